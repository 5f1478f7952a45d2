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


def test_a_url_with_an_at_sign_in_an_option_is_shown_without_it():
    assert str(parse_journal_url("postgresql://h/db?password=a@hunter2")) == "postgresql://***@"


@pytest.mark.parametrize(
    ("url", "other", "is_same"),
    [
        ("sqlite:///a.db?lease=30&durability=power", "sqlite:///a.db", True),
        ("sqlite:///a.db", "sqlite:///b.db", False),
        ("postgresql://u:old@h/db?schema=rpcwheel", "postgresql://u:new@h/db", True),
        ("postgresql://h/db?schema=shop", "postgresql://h/db", False),
        ("redis://h?namespace=shop", "redis://h", False),
        ("redis://h?db=1", "redis://h?db=0", False),
    ],
)
def test_a_place_is_that_of_all_urls_of_one_journal(url, other, is_same):
    assert (parse_journal_url(url).place == parse_journal_url(other).place) is is_same


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
    }


def test_a_redis_url_has_decoded_credentials(monkeypatch):
    monkeypatch.setattr(redis, "Redis", client := Mock())
    open_journal_backend("redis://us%2Fer:a%26b@h:1?db=3&namespace=x")
    options = {"host": "h", "port": 1, "db": 3, "username": "us/er", "password": "a&b"}
    assert client.call_args.kwargs.items() >= options.items()
