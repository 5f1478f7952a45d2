"""How the engine for a URL is found, and what is said if there is none."""

import sys
from importlib import metadata

import pytest

from rpcwheel.errors import ConfigurationError, ExtraMissing
from rpcwheel.registry import url as registry_url
from rpcwheel.registry.backend import RegistryBackend, Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.backends.etcd_client import messages
from rpcwheel.registry.backends.memory import MemoryBackend
from rpcwheel.registry.url import BACKENDS, GROUP, parse_url

SETTINGS = Settings(lease_s=2.0, timeout_s=1.0)


class Mine(MemoryBackend):
    """A backend of another package."""


not_a_backend = dict


@pytest.fixture
def entry(monkeypatch):
    """Name a backend as another package's entry point does."""

    def named(value):
        point = metadata.EntryPoint("mine", value, GROUP)
        monkeypatch.setattr(registry_url, "entry_points", lambda group: [point])

    monkeypatch.setitem(sys.modules, "somebodys", sys.modules[__name__])
    return named


def test_the_scheme_of_a_url_finds_its_backend():
    url = parse_url("memory://a")
    for given in (url, "memory://a"):
        backend = open_backend(given, SETTINGS)
        assert isinstance(backend, MemoryBackend)
        assert (backend.url, backend.settings) == (url, SETTINGS)
        backend.close()


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "a copy of the source"])
def test_each_built_in_scheme_has_a_backend(installed, monkeypatch):
    if not installed:
        monkeypatch.setattr(metadata, "distribution", not_installed)
    for scheme in BACKENDS:
        where = {"sqlite": "/run/a.db", "headless": "localhost:50051"}.get(scheme, "localhost")
        open_backend(f"{scheme}://{where}", SETTINGS).close()


def not_installed(name):
    raise metadata.PackageNotFoundError(name)


def test_an_entry_point_names_a_backend(entry):
    entry("somebodys:Mine")
    backend = open_backend("mine://a", SETTINGS)
    backend.close()
    assert type(backend) is Mine


def test_an_unknown_scheme_is_refused_with_those_of_entry_points(entry):
    entry("somebodys:Mine")
    with pytest.raises(ConfigurationError, match=r"did you mean mine://"):
        open_backend("mime://a", SETTINGS)


def test_an_entry_point_that_cannot_be_loaded_is_an_error_with_its_name(entry):
    for value, kind, said in (
        ("somebodys:not_a_backend", ConfigurationError, "is no rpcwheel.registry.RegistryBackend"),
        ("somebodys:Other", ConfigurationError, "somebodys:Other could not be loaded"),
        ("nowhere_at_all:Other", ExtraMissing, "needs the package 'nowhere_at_all'"),
    ):
        entry(value)
        with pytest.raises(kind, match=said):
            open_backend("mine://a", SETTINGS)


def test_a_missing_package_is_an_error_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(BACKENDS, "etcd", ("no_such_module:EtcdBackend", "etcd"))
    with pytest.raises(ExtraMissing, match=r"pip install 'rpcwheel\[etcd\]'") as caught:
        open_backend("etcd://h", SETTINGS)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("no kazoo", name="kazoo"), "'kazoo', which is not here"),
        (ImportError("no NodeError", name="kazoo.exceptions"), r"another version .*no NodeError"),
    ],
    ids=["missing", "too old"],
)
def test_a_package_that_fails_when_a_backend_is_created_is_the_same_error(monkeypatch, error, said):
    class Late(MemoryBackend):
        def __init__(self, url, settings):
            raise error

    monkeypatch.setattr("rpcwheel.registry.backends.zookeeper.ZookeeperBackend", Late)
    with pytest.raises(ExtraMissing, match=rf"{said}.*pip install 'rpcwheel\[zookeeper\]'"):
        open_backend("zookeeper://h", SETTINGS)


def test_a_protobuf_that_is_too_old_for_etcd_is_the_same_error(monkeypatch):
    monkeypatch.delattr("google.protobuf.message_factory.GetMessageClass")
    messages.cache_clear()
    said = r"^etcd:// needs the package protobuf .*GetMessageClass.*'rpcwheel\[etcd\]'$"
    with pytest.raises(ExtraMissing, match=said):
        open_backend("etcd://h", SETTINGS)


def test_a_backend_must_define_every_method():
    with pytest.raises(TypeError, match="abstract"):
        RegistryBackend(parse_url("memory://"), SETTINGS)
