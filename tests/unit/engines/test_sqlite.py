"""Connections to SQLite files during a fork, those of a journal and of a registry."""

import ctypes
import os
import sqlite3
import sys
import threading
from contextlib import closing, contextmanager

import pytest

from fixtures.forks import holds_in_child
from fixtures.waiting import WAIT_S, in_thread
from rpcwheel._engines import sqlite
from rpcwheel.errors import JournalError, RegistryError
from rpcwheel.journal.sqlite import SqliteJournal
from rpcwheel.journal.url import parse_journal_url
from rpcwheel.registry.backends.sqlite_file import SqliteFile


class Journal:
    def __init__(self, path):
        self._journal = SqliteJournal(parse_journal_url(f"sqlite://{path}"))
        self.connection = self._journal._writer
        self.transaction = self._journal._transaction
        self.close = self._journal.close


class Registry:
    def __init__(self, path):
        self.connection = SqliteFile(str(path), WAIT_S)
        self.transaction = self.connection.transaction
        self.close = self.connection.close


@pytest.fixture(params=[Journal, Registry])
def file(request, tmp_path):
    with closing(request.param(tmp_path / "file.db")) as file:
        with file.transaction():
            file.connection._db.execute("CREATE TABLE test (value)")
        yield file


def write(file):
    with file.transaction():
        file.connection._db.execute("INSERT INTO test VALUES (1)")


@contextmanager
def written_by_another_thread(file, ends):
    """Another thread writes a row, in a transaction that lasts until `ends` is set."""
    entered = threading.Event()

    def transact():
        with file.transaction():
            file.connection._db.execute("INSERT INTO test VALUES (1)")
            entered.set()
            ends.wait(WAIT_S)

    writing = in_thread(transact)
    assert entered.wait(WAIT_S)
    yield
    writing.result(WAIT_S)


def rows_of(file):
    with closing(sqlite3.connect(file.connection._path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return db.execute("SELECT count(*) FROM test").fetchone()[0]


def is_refused(file):
    try:
        write(file)
    except (JournalError, RegistryError) as error:
        return "was in use when this process was forked" in str(error)
    return False


def fork_in_c():
    """Fork as uWSGI does, without Python's handlers before it."""
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


class NoticedLock:
    """A lock of which a test learns that a second thread waits for it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.asked = threading.Event()

    def acquire(self, timeout):
        if self._lock.locked():
            self.asked.set()
        return self._lock.acquire(timeout=timeout)

    def locked(self):
        return self._lock.locked()

    def release(self):
        self._lock.release()


def test_a_fork_waits_for_the_transaction_of_another_thread(file):
    file.connection._lock = lock = NoticedLock()
    with written_by_another_thread(file, lock.asked):
        assert holds_in_child(lambda: write(file) is None)
    write(file)
    assert rows_of(file) == 3


def test_a_child_does_not_use_a_file_that_was_in_use_for_too_long(file, monkeypatch):
    monkeypatch.setattr(sqlite, "FORK_TIMEOUT_S", 0.0)
    ends = threading.Event()
    with written_by_another_thread(file, ends):
        assert holds_in_child(lambda: is_refused(file))
        ends.set()
    assert rows_of(file) == 1


def test_a_transaction_that_forks_is_committed_by_the_parent_only(file):
    transaction = file.transaction()
    transaction.__enter__()
    file.connection._db.execute("INSERT INTO test VALUES (1)")

    def child():
        try:
            transaction.__exit__(None, None, None)
        except (JournalError, RegistryError):
            return is_refused(file)
        return False

    assert holds_in_child(child)
    assert rows_of(file) == 0
    transaction.__exit__(None, None, None)
    assert rows_of(file) == 1


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="CPython ends such a child")
def test_a_child_of_c_code_does_not_use_a_file_with_a_log(file):
    write(file)
    has_log = isinstance(file, Journal)
    assert holds_in_child(lambda: is_refused(file) if has_log else write(file) is None, fork_in_c)


def test_what_a_child_writes_survives_the_close_of_its_parent(file):
    parent_closed, child_wrote = os.pipe(), os.pipe()

    def child():
        write(file)
        os.write(child_wrote[1], b"x")
        os.read(parent_closed[0], 1)
        write(file)
        return True

    def close():
        os.read(child_wrote[0], 1)
        file.close()
        os.write(parent_closed[1], b"x")

    write(file)
    closing = in_thread(close)
    assert holds_in_child(child)
    closing.result(WAIT_S)
    for descriptor in (*parent_closed, *child_wrote):
        os.close(descriptor)
    assert rows_of(file) == 3
