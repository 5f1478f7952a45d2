"""The URLs of journals."""

import pytest

from fixtures.refusals import not_refused_so
from rpcwheel.errors import ConfigurationError
from rpcwheel.journal import open_journal_backend
from rpcwheel.journal.url import parse_journal_url


def test_urls_that_are_wrong_are_refused(tmp_path):
    pem = tmp_path / "no.pem"
    rows = {
        "x.db": "is not the URL of a journal",
        "sqlit:///x.db": "did you mean sqlite://?",
        "mysql://h/db": "no journal has the scheme 'mysql'",
        "sqlite:///x.db?lease=1&lease=2": "an option is given twice",
        "sqlite:///x.db?lease=0.5": "lease must be from 1 to 3600 seconds, not '0.5'",
        "sqlite:///x.db?lease=3601": "lease must be from 1 to 3600 seconds",
        "sqlite:///x.db?lease=soon": "lease must be from 1 to 3600 seconds, not 'soon'",
        "sqlite:///x.db?durabilty=power": "did you mean 'durability'?",
        "sqlite:///x.db?durability=disk": "durability must be 'process' or 'power', not 'disk'",
        "sqlite://host/x.db": "SQLite takes a file of this machine",
        "sqlite:///": "give the file",
        "sqlite:///x/": "give the file",
        "sqlite:///x%00y": "give the file",
        "redis://": "with one host",
        "redis://a,b": "with one host",
        "redis://a:x": "with one host",
        "redis://a:123456": "with one host",
        "redis://a/2": "with one host",
        "redis://a?db=x": "db must be a number from 0, not 'x'",
        "redis://a?namespace=": "namespace must not be empty",
        "redis://a?schema=x": "there is no option 'schema'",
        "redis://a?ca=x": "there is no option 'ca'",
        f"rediss://a?ca={pem}": "ca, cert or key can't be used",
        f"rediss://a?cert={pem}": "cert and key go together",
        "postgresql://h/db?schema=a-b": "schema must be a name of letters",
        "postgresql://h/db?schema=": "schema must be a name of letters",
        "postgresql://h/db?slmode=x": 'invalid URI query parameter: "slmode"',
        "postgresql://u:%zz@h/db": "it is not a URL that libpq accepts",
        "postgresql://[h/db": "Invalid IPv6 URL",
    }
    assert (
        not_refused_so(
            (lambda url=url: open_journal_backend(url), ConfigurationError, text)
            for url, text in rows.items()
        )
        == []
    )


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:hunter2@h/db",
        "redis://user:hunter2@a:b:c",
        "redis://user:hunter2@a?password=hunter2",
        "postgresql://user:hunter2@h/db?hunter=hunter2",
        "postgresql://user:hunter2%zz@h/db",
        "postgresql://user:hunter2@h/db?schema=%20",
    ],
)
def test_errors_do_not_show_passwords(url):
    with pytest.raises(ConfigurationError) as refused:
        open_journal_backend(url)
    assert "hunter2" not in str(refused.value)


def test_a_url_is_shown_without_password_and_options():
    url = parse_journal_url("postgresql://user:hunter2@h:5432/db?lease=30&password=hunter2")
    assert str(url) == "postgresql://***@h:5432/db"
    assert "hunter2" not in repr(url)
    assert url.lease_s == 30.0


def test_a_url_with_an_at_sign_in_an_option_is_shown_without_it():
    assert str(parse_journal_url("postgresql://h/db?password=a@hunter2")) == "postgresql://***@"


def test_options_of_libpq_are_handed_on():
    journal = open_journal_backend(
        "postgres://u:a%26b@h1:1,h2:2/db?sslmode=verify-full&options=-c%20a%3D1&lease=3&schema=s"
        "&connect_timeout=3"
    )
    assert journal._parameters == {
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


def test_a_redis_url_has_decoded_credentials():
    journal = open_journal_backend("redis://us%2Fer:a%26b@h:1?db=3&namespace=x")
    given = {
        name: journal._options[name] for name in ("host", "port", "db", "username", "password")
    }
    assert given == {"host": "h", "port": 1, "db": 3, "username": "us/er", "password": "a&b"}
