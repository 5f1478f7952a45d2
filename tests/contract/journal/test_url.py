"""The URLs of journals."""

from unittest.mock import Mock

import psycopg
import pytest
import redis

from rpcwheel.errors import JournalUnavailable
from rpcwheel.journal import open_journal_backend
from rpcwheel.journal.url import parse_journal_url


def test_a_url_is_shown_without_password_and_options():
    url = parse_journal_url(
        "postgresql://user:hunter2@h:5432/db?lease=30&timeout=2&password=hunter2"
    )
    assert str(url) == "postgresql://***@h:5432/db"
    assert "hunter2" not in repr(url)
    assert (url.lease_s, url.timeout_s) == (30.0, 2.0)
    url = parse_journal_url("sqlite:///x.db")
    assert (url.lease_s, url.timeout_s) == (15.0, 5.0)


def test_a_url_with_an_at_sign_in_an_option_is_shown_without_it():
    assert str(parse_journal_url("postgresql://h/db?password=a@hunter2")) == "postgresql://***@"


def test_options_of_libpq_are_handed_on(monkeypatch):
    connect = Mock(side_effect=psycopg.OperationalError("no server"))
    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    journal = open_journal_backend(
        "postgres://u:a%26b@h1:1,h2:2/db?sslmode=verify-full&options=-c%20a%3D1&lease=3&schema=s"
        "&connect_timeout=3"
    )
    with pytest.raises(JournalUnavailable):
        journal.depths()
    assert connect.call_args.kwargs == {
        "autocommit": True,
        "user": "u",
        "password": "a&b",
        "host": "h1,h2",
        "port": "1,2",
        "dbname": "db",
        "sslmode": "verify-full",
        "options": "-c a=1",
        "connect_timeout": "3",
        "tcp_user_timeout": 10_000,
        "application_name": "rpcwheel",
        "client_encoding": "utf8",
    }


@pytest.mark.parametrize(
    ("url", "parameters"),
    [
        ("postgresql:///shop", {"dbname": "shop"}),
        (
            "postgresql:///shop?host=/run/postgresql&schema=s",
            {"dbname": "shop", "host": "/run/postgresql"},
        ),
        ("postgresql://u@%2Frun/shop", {"dbname": "shop", "host": "/run", "user": "u"}),
        ("postgresql://", {}),
    ],
)
def test_a_url_without_a_host_is_that_of_a_socket(url, parameters, monkeypatch):
    connect = Mock(side_effect=psycopg.OperationalError("no server"))
    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    with pytest.raises(JournalUnavailable):
        open_journal_backend(url).depths()
    names = ("dbname", "host", "user")
    arguments = connect.call_args.kwargs
    assert {name: arguments[name] for name in names if name in arguments} == parameters


def test_a_number_sign_is_a_part_of_the_file_or_the_option(monkeypatch):
    url = parse_journal_url("sqlite:///var/a#b.db?durability=power")
    assert (url.path, url.options) == ("/var/a#b.db", {"durability": "power"})
    connect = Mock(side_effect=psycopg.OperationalError("no server"))
    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    with pytest.raises(JournalUnavailable):
        open_journal_backend("postgresql://u:a#b@h/db?application_name=c#d").depths()
    arguments = connect.call_args.kwargs
    assert (arguments["password"], arguments["application_name"]) == ("a#b", "c#d")


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("sqlite:///x.db?lease=3&durability=power", "sqlite:///x.db"),
        ("postgres://u:p@h/db?timeout=2&sslmode=require", "postgresql://***@h/db"),
        ("postgresql://h/db?schema=rpcwheel", "postgresql://h/db"),
        ("postgresql://h/db?schema=s&password=hunter2", "postgresql://h/db?schema=s"),
        ("postgresql:///db?host=/run", "postgresql:///db?host=%2Frun"),
        ("redis://h:1?db=0", "redis://h:1"),
        ("redis://h:1?db=2&namespace=x", "redis://h:1?namespace=x&db=2"),
    ],
)
def test_the_location_of_a_url_says_where_its_calls_are(url, location):
    assert parse_journal_url(url).location == location


@pytest.mark.parametrize(
    ("url", "other", "is_same"),
    [
        ("sqlite:///x.db?lease=3&durability=power", "sqlite:///x.db", True),
        ("sqlite:///x.db", "sqlite:///y.db", False),
        ("postgres://u:p@h/db?timeout=2&sslmode=require", "postgresql://other:q@h/db", True),
        ("postgresql://h/db?schema=rpcwheel", "postgresql://h/db", True),
        ("postgresql://h/db?schema=s", "postgresql://h/db", False),
        ("postgresql://h/db?user=a@b", "postgresql://h/other?user=a@b", False),
        ("redis://h:1?db=0", "redis://h:1", True),
        ("redis://h:1?db=2", "redis://h:2?db=2", False),
        ("redis://h:1", "rediss://h:1", False),
    ],
)
def test_urls_of_one_journal_have_the_same_location(url, other, is_same):
    assert parse_journal_url(url).is_same_location(parse_journal_url(other)) is is_same


def test_a_redis_url_has_decoded_credentials(monkeypatch):
    monkeypatch.setattr(redis, "Redis", client := Mock())
    open_journal_backend("redis://us%2Fer:a%26b@h:1?db=3&namespace=x")
    options = {"host": "h", "port": 1, "db": 3, "username": "us/er", "password": "a&b"}
    assert client.call_args.kwargs.items() >= options.items()
