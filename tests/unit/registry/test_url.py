"""How a registry's URL is read. `refusals/registry.txt` has those that are refused."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import open_registry
from rpcwheel.registry.url import RegistryUrl, parse_url
from rpcwheel.resolver import insecure_channel

PARSED = [
    ("memory://", RegistryUrl("memory")),
    ("memory://a/shop.Orders", RegistryUrl("memory", (("a", None),), service="shop.Orders")),
    (
        "etcd://u:p%40%2F@10.0.0.1:2379,[::1]:2380,c/shop.Orders?namespace=eu&lease=3",
        RegistryUrl(
            "etcd",
            (("10.0.0.1", 2379), ("::1", 2380), ("c", None)),
            service="shop.Orders",
            user="u",
            password="p@/",
            namespace="eu",
            options={"lease": "3"},
        ),
    ),
    ("redis://:secret@h", RegistryUrl("redis", (("h", None),), password="secret")),
    ("etcd://h/", RegistryUrl("etcd", (("h", None),))),
    ("etcd://h?service=a.B", RegistryUrl("etcd", (("h", None),), service="a.B")),
    ("sqlite:///run/a%20b.db", RegistryUrl("sqlite", path="/run/a b.db")),
    ("sqlite:////run/a.db", RegistryUrl("sqlite", path="/run/a.db")),
    ("sqlite://./a.db", RegistryUrl("sqlite", path="./a.db")),
    ("sqlite://~/a@b.db?service=s", RegistryUrl("sqlite", path="~/a@b.db", service="s")),
    ("mine://[fe80::1%eth0]:1", RegistryUrl("mine", (("fe80::1%eth0", 1),))),
    (
        "etcds://h?tls&ca=%2Fa%2Fb",
        RegistryUrl("etcds", (("h", None),), options={"tls": "", "ca": "/a/b"}),
    ),
]


def test_a_url_is_parsed():
    for url, wanted in PARSED:
        assert parse_url(url) == wanted, url


def test_neither_the_text_nor_the_repr_shows_a_password():
    url = parse_url("etcd://u:secret@a:1,[::1]:2/s?namespace=eu&key_password=secret")
    assert str(url) == "etcd://u:***@a:1,[::1]:2?namespace=eu"
    assert "secret" not in repr(url)
    assert str(parse_url("redis://:secret@a")) == "redis://:***@a"
    assert str(parse_url("redis://u@a")) == "redis://u@a"


def test_two_parts_of_one_engine_have_two_names():
    for url, name in (
        ("redis://h:1?db=2", "redis://h:1?db=2"),
        ("redis://h:1/s?namespace=eu&db=2", "redis://h:1?namespace=eu&db=2"),
        ("redis://h:1?db=0", "redis://h:1"),
        ("redis://h:1?db=%26a", "redis://h:1"),
        ("dubbo+zookeeper://h/a.B?root=eu", "dubbo+zookeeper://h?root=eu"),
        ("dubbo+zookeeper://h?root=dubbo", "dubbo+zookeeper://h"),
    ):
        assert str(parse_url(url)) == name


@pytest.fixture
def backend_in_files(tmp_path, monkeypatch):
    """An installed package with a backend that uses the path of its URLs."""
    code = """
from rpcwheel.registry.backends.memory import MemoryBackend
class FileBackend(MemoryBackend):
    schemes, path_is_own = ("file",), True
"""
    (tmp_path / "filed_registry.py").write_text(code)
    directory = tmp_path / "filed_registry-1.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: filed-registry\nVersion: 1\n")
    points = "[rpcwheel.registry]\nfile = filed_registry:FileBackend\nbad = filed_registry:No\n"
    (directory / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


OWN_PATHS = [
    ("file:///run/a%20b.json", RegistryUrl("file", path="/run/a b.json")),
    ("file://./a.json?service=s", RegistryUrl("file", path="./a.json", service="s")),
    (
        "file://u:p@h:1/shop/db?service=s",
        RegistryUrl("file", (("h", 1),), "/shop/db", "s", user="u", password="p"),
    ),
    ("file://h/", RegistryUrl("file", (("h", None),))),
    ("bad://h/shop.Orders", RegistryUrl("bad", (("h", None),), service="shop.Orders")),
]


@pytest.mark.usefixtures("backend_in_files")
def test_a_custom_backend_may_use_the_path_of_the_url():
    for url, wanted in OWN_PATHS:
        assert parse_url(url) == wanted, url


@pytest.mark.usefixtures("backend_in_files")
def test_a_backend_with_a_path_has_it_in_its_name():
    with open_registry("file:///run/a.json") as registry:
        assert registry.url == "file:///run/a.json"
        registry.register(ServiceInstance(service="shop.Orders", host="10.0.0.1", port=1), wait=9)
    with pytest.raises(ConfigurationError, match=r"file:///run/a\.json\?service=shop\.Orders"):
        insecure_channel("file:///run/a.json")


def test_a_flag_is_yes_or_no():
    for query, wanted in (
        ("", False),
        ("?tls", True),
        ("?tls=1", True),
        ("?tls=true", True),
        ("?tls=No", False),
    ):
        assert parse_url(f"etcd://h{query}").flag("tls") is wanted, query
    assert parse_url("etcd://h").flag("tls", default=True)


def test_seconds_are_a_number_above_zero():
    assert parse_url("etcd://h?poll=0.5").seconds("poll", default=1.0) == 0.5
    assert parse_url("etcd://h").seconds("poll", default=1.0) == 1.0


@given(st.text(max_size=40))
@example("a%40b@h")
@example("\udce9@h")  # as in arguments of a program that are not UTF-8
@example("/a%3Fb%2541.db")
def test_any_text_is_a_url_or_refused(text):
    for url in (text, f"etcd://{text}", f"sqlite://{text}"):
        try:
            again = parse_url(url)
        except ConfigurationError:
            continue
        if not again.password:
            assert str(parse_url(str(again))) == str(again)
