"""How a registry's URL is read, and what is said of one that makes no sense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.errors import ConfigurationError
from rpcwheel.registry.url import RegistryUrl, parse_url


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
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
    ],
)
def test_a_url_is_taken_apart(url, wanted):
    assert parse_url(url) == wanted


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "it begins with a scheme"),
        ("shop.Orders", "it begins with a scheme"),
        ("Etcd://h", "it begins with a scheme"),
        ("etcd:/h", "it begins with a scheme"),
        ("etcd://h:0", "a port is a number from 1 to 65535"),
        ("etcd://h:65536", "a port is a number"),
        ("etcd://h:x", "a port is a number"),
        ("etcd://h:", "a port is a number"),
        ("etcd://h:²", "a port is a number"),
        ("etcd://a,,b", "'' is no host and port"),
        ("etcd://::1", "'::1' is no host and port"),
        ("etcd://a b", "'a b' is no host and port"),
        ("etcd://h/a/b", "the service must be a name"),
        ("etcd://h/a%20b", "the service must be a name of letters, digits"),
        ("etcd://h/a?service=b", "it names two services, 'a' and 'b'"),
        ("etcd://h?namespace=", "namespace must be a name"),
        ("etcd://h?namespace=a/b", "namespace must be a name"),
        ("etcd://h?a=1&a=2", "a: given twice"),
        ("etcd://@h", "before '@' stands user:password"),
        ("sqlite://run/a.db", "after three slashes: sqlite:///run/shop.db"),
        ("sqlite://", "the name of the file is missing"),
        ("sqlite:///", "the name of the file is missing"),
        ("sqlite:///run/", "the name of the file is missing"),
        ("sqlite:///a%00b", "zero character"),
    ],
)
def test_one_that_makes_no_sense_is_refused_with_what_does(url, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_url(url)


@pytest.mark.parametrize("url", [None, 5, b"etcd://h"])
def test_one_that_is_no_string_is_a_type_error(url):
    with pytest.raises(TypeError, match="named by a URL"):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://u:hun/ter2@h",
        "etcd://u:hun?ter2@h",
        "etcd://u:hun@ter2@h",
        "etcd://u:hun:ter2@h",
        "etcd://u:hunter2@h:x",
        "etcd://u:hunter2@h/a b",
        "etcd://h:x?password=hunter2",
        "u:hunter2@h",
        "etcd//u:hunter2@h",
        "sqlite://u:hunter2@h/a",
    ],
)
def test_a_password_is_in_no_error(url):
    with pytest.raises(ConfigurationError) as caught:
        parse_url(url)
    assert "ter2" not in str(caught.value)


def test_a_slash_in_a_password_is_said_to_be_written_otherwise():
    with pytest.raises(ConfigurationError, match="is written %2F"):
        parse_url("etcd://u:a/b@h")


def test_neither_the_text_nor_the_repr_shows_a_password():
    url = parse_url("etcd://u:secret@a:1,[::1]:2/s?namespace=eu&key_password=secret")
    assert str(url) == "etcd://u:***@a:1,[::1]:2?namespace=eu"
    assert "secret" not in repr(url)
    assert str(parse_url("redis://:secret@a")) == "redis://:***@a"
    assert str(parse_url("redis://u@a")) == "redis://u@a"


def test_an_option_that_nobody_knows_is_refused_with_the_nearest():
    url = parse_url("etcd://h?pol=1&group=a&version=b")
    url.check_options("pol")
    with pytest.raises(ConfigurationError, match="no option 'pol'; did you mean 'poll'"):
        url.check_options("poll")
    with pytest.raises(ConfigurationError, match="there are namespace, service, group, version"):
        url.check_options()


@pytest.mark.parametrize(
    ("query", "wanted"),
    [("", False), ("?tls", True), ("?tls=1", True), ("?tls=true", True), ("?tls=No", False)],
)
def test_a_flag_is_yes_or_no(query, wanted):
    assert parse_url(f"etcd://h{query}").flag("tls") is wanted
    assert parse_url("etcd://h").flag("tls", default=True)


def test_a_flag_that_is_neither_is_refused():
    with pytest.raises(ConfigurationError, match="tls must be true or false, not 'maybe'"):
        parse_url("etcd://h?tls=maybe").flag("tls")


def test_seconds_are_a_number_above_zero():
    assert parse_url("etcd://h?poll=0.5").seconds("poll", default=1.0) == 0.5
    assert parse_url("etcd://h").seconds("poll", default=1.0) == 1.0
    for bad in ("0", "-1", "x", "nan", "inf", ""):
        with pytest.raises(ConfigurationError, match=f"poll must be .* not '{bad}'"):
            parse_url(f"etcd://h?poll={bad}").seconds("poll", default=1.0)


@given(st.text(max_size=40))
def test_any_text_is_a_url_or_refused(text):
    for url in (text, f"etcd://{text}", f"sqlite://{text}"):
        try:
            again = parse_url(url)
        except ConfigurationError:
            continue
        if not again.password:
            assert str(parse_url(str(again))) == str(again)
