"""How the engine for a URL is found, and what is said if there is none."""

import sys
from importlib import metadata

import pytest

from rpcwheel.errors import ConfigurationError, ExtraMissing
from rpcwheel.registry import providers
from rpcwheel.registry.provider import Provider, Settings
from rpcwheel.registry.providers import OURS, open_provider
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.url import parse_url

SETTINGS = Settings(lease_s=2.0, timeout_s=1.0)


class Mine(MemoryProvider):
    """Somebody's own."""

    schemes = ("mine",)


not_a_provider = dict


@pytest.fixture
def entry(monkeypatch):
    """Name a provider as another package's entry point does."""

    def named(value):
        point = metadata.EntryPoint("mine", value, providers.GROUP)
        monkeypatch.setattr(providers, "entry_points", lambda group: [point])

    monkeypatch.setitem(sys.modules, "somebodys", sys.modules[__name__])
    return named


def test_the_scheme_of_a_url_finds_its_provider():
    url = parse_url("memory://a")
    for given in (url, "memory://a"):
        provider = open_provider(given, SETTINGS)
        assert isinstance(provider, MemoryProvider)
        assert (provider.url, provider.settings) == (url, SETTINGS)
        provider.close()


def test_each_built_in_scheme_has_a_provider():
    for scheme in OURS:
        where = {"sqlite": "/run/a.db", "headless": "localhost:50051"}.get(scheme, "localhost")
        provider = open_provider(f"{scheme}://{where}", SETTINGS)
        provider.close()
        assert scheme in provider.schemes


def test_an_unknown_scheme_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"'etdc'; did you mean etcd://\? there are etcd"):
        open_provider("etdc://u:secret@h", SETTINGS)
    with pytest.raises(
        ConfigurationError, match=r"there are etcd://, etcds://, headless://, memory://"
    ):
        open_provider("consul://h", SETTINGS)


def test_an_entry_point_names_a_provider(entry):
    entry("somebodys:Mine")
    provider = open_provider("mine://a", SETTINGS)
    provider.close()
    assert type(provider) is Mine


def test_an_unknown_scheme_is_told_those_of_entry_points_too(entry):
    entry("somebodys:Mine")
    with pytest.raises(ConfigurationError, match=r"did you mean mine://"):
        open_provider("mime://a", SETTINGS)


def test_an_entry_point_that_leads_nowhere_is_an_error_that_says_so(entry):
    for value, kind, said in (
        ("somebodys:not_a_provider", ConfigurationError, "is no rpcwheel.registry.Provider"),
        ("somebodys:Other", ConfigurationError, "somebodys:Other could not be loaded"),
        ("nowhere_at_all:Other", ExtraMissing, "needs the package 'nowhere_at_all'"),
    ):
        entry(value)
        with pytest.raises(kind, match=said):
            open_provider("mine://a", SETTINGS)


def test_a_missing_package_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(providers.OURS, "etcd", "no_such_package:EtcdProvider")
    with pytest.raises(ExtraMissing, match=r"pip install 'rpcwheel\[etcd\]'") as caught:
        open_provider("etcd://h", SETTINGS)
    assert isinstance(caught.value, ImportError)


def test_a_package_that_is_missed_only_when_a_provider_is_made_is_told_alike(monkeypatch):
    class Late(MemoryProvider):
        def __init__(self, url, settings):
            raise ModuleNotFoundError("no kazoo", name="kazoo")

    monkeypatch.setitem(providers.OURS, "zookeeper", "somebodys:Late")
    monkeypatch.setitem(sys.modules, "somebodys", type(sys)("somebodys"))
    sys.modules["somebodys"].Late = Late
    with pytest.raises(ExtraMissing, match=r"'kazoo'.*pip install 'rpcwheel\[zookeeper\]'"):
        open_provider("zookeeper://h", SETTINGS)


def test_every_method_of_a_provider_must_be_written():
    with pytest.raises(TypeError, match="abstract"):
        Provider(parse_url("memory://"), SETTINGS)
    assert Provider.__abstractmethods__ == {
        "close",
        "lookup",
        "publish",
        "renew",
        "services",
        "watch",
        "withdraw",
    }
