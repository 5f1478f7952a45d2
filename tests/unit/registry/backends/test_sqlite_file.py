"""The file of a SQLite registry: transactions, and a file that is replaced while it is used."""

import sqlite3

import pytest

from rpcwheel.errors import ConfigurationError, RegistryUnavailable
from rpcwheel.registry.backends.sqlite_file import SqliteFile

KEEP = "INSERT OR REPLACE INTO meta VALUES ('test', ?)"
FIND = "SELECT value FROM meta WHERE name = 'test'"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def opened(closed_later):
    """Open files of registries; closed in the end."""
    return lambda path, timeout=60.0: closed_later(SqliteFile(str(path), timeout))


def test_a_path_below_a_home_directory_that_is_unknown_is_refused(opened):
    with pytest.raises(ConfigurationError, match=r"~nobody-is-called-so/a\.db: .*absolute path"):
        opened("~nobody-is-called-so/a.db")


def keep(file, value):
    with file.transaction() as db:
        db.execute(KEEP, (value,))


def find(file):
    with file.connection() as db:
        found = db.execute(FIND).fetchone()
    return None if found is None else found[0]


def test_a_request_waits_for_another_one_until_the_timeout(opened, path):
    file = opened(path, 0.05)
    with (
        file.connection(),
        pytest.raises(RegistryUnavailable, match="still busy with the request before"),
    ):
        find(file)


def test_an_exception_rolls_a_transaction_back(opened, path):
    file = opened(path)
    keep(file, 1)

    def broken():
        with file.transaction() as db:
            db.execute(KEEP, (2,))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        broken()
    assert find(file) == 1


def test_a_file_that_another_process_has_created_again_is_not_deleted(opened, path):
    file = opened(path)
    keep(file, 1)
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT

    def use():
        with file.connection():
            path.unlink()
            keep(opened(path), 3)
            raise error

    with pytest.raises(RegistryUnavailable, match="is created again"):
        use()
    assert find(opened(path)) == 3


def delete_at(monkeypatch, path, statement):
    """Delete the file whenever a connection to it executes a statement."""
    connect = sqlite3.connect

    def connect_and_trace(*args, **kwargs):
        db = connect(*args, **kwargs)
        db.set_trace_callback(lambda sql: path.unlink() if sql.startswith(statement) else None)
        return db

    monkeypatch.setattr(sqlite3, "connect", connect_and_trace)


def test_a_file_that_is_deleted_at_each_opening_is_an_error_after_the_timeout(
    opened, path, monkeypatch
):
    delete_at(monkeypatch, path, "PRAGMA synchronous")
    with pytest.raises(RegistryUnavailable, match="is replaced or deleted again and again"):
        find(opened(path, 0.01))


def test_a_file_that_is_deleted_during_a_write_is_unavailable_not_forbidden(
    opened, path, monkeypatch
):
    keep(opened(path), 1)
    delete_at(monkeypatch, path, "INSERT OR REPLACE INTO meta")
    with pytest.raises(RegistryUnavailable, match="was replaced or deleted during this request"):
        keep(opened(path), 2)


def test_close_does_not_wait_for_a_request_which_then_closes_the_connection(opened, path):
    file = opened(path)
    with file.connection() as db:
        file.close()
        db.execute("SELECT 1")
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        db.execute("SELECT 1")
