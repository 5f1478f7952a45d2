"""What the watches of a SQLite file read while leases that have ended cannot be deleted."""

import sqlite3
import threading
from contextlib import closing

import pytest

from fixtures.engine_watchers import RecordingWatcher
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.backends.sqlite_file import SqliteFile

LEASE = 1.0
A, B = (ServiceInstance(service=name, host="10.0.0.1", port=1) for name in ("shop.A", "shop.B"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def watching(path, timer, closed_later):
    """Watch two services, each with one instance, whose leases end after `LEASE`."""

    def watching(timeout):
        publishing = closed_later(open_backend(f"sqlite://{path}", Settings(LEASE, timeout, timer)))
        backend = closed_later(open_backend(f"sqlite://{path}", Settings(3600.0, timeout, timer)))
        publishing.publish([A, B])
        for instance in (A, B):
            backend.watch(instance.service, watcher := RecordingWatcher())
            assert watcher.sees(instance)
        return backend

    return watching


@pytest.fixture
def read_services(monkeypatch, timer):
    """Count the services that a backend reads for its watches in some seconds."""

    def read_services(backend, seconds):
        reads = []
        read = backend._polling._read
        monkeypatch.setattr(backend._polling, "_read", lambda *of: reads.append(of) or read(*of))
        for _ in range(round(seconds / 0.11)):  # a poll each
            timer.advance(0.11)
            assert wait_until(lambda: not backend._polling._running)
        return len(reads)

    return read_services


@pytest.fixture
def lock(path):
    """The lock of a process that hangs."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        yield lambda: db.execute("BEGIN IMMEDIATE")


def test_a_client_without_write_permission_reads_once_when_leases_end(
    watching, read_services, monkeypatch
):
    def connect(file):
        db = connects(file)
        db.execute("PRAGMA query_only = 1")
        return db

    backend = watching(timeout=10.0)
    connects = SqliteFile._connect
    monkeypatch.setattr(SqliteFile, "_connect", connect)
    backend._watch_file._close()  # it opens the file again, which it can only read
    assert read_services(backend, 10.0) == 4  # both at the first poll, and when the leases end
    assert backend.lookup(A.service).records == {}


def test_reads_that_fail_at_the_end_of_a_lease_are_repeated_with_a_growing_delay(
    watching, read_services, lock
):
    backend = watching(timeout=0.001)
    lock()
    assert 2 <= read_services(backend, 10.0) < 40  # not at each of 90 polls


def test_a_request_does_not_wait_for_a_watch_that_waits_for_a_lock(
    watching, lock, timer, monkeypatch
):
    def connect(file):
        db = connects(file)
        db.set_trace_callback(lambda sql: waits.set() if sql.startswith("BEGIN") else None)
        return db

    waits = threading.Event()
    connects = SqliteFile._connect
    monkeypatch.setattr(SqliteFile, "_connect", connect)
    backend = watching(timeout=WAIT_S)
    lock()
    waits.clear()
    timer.advance(1.1 * LEASE)
    assert waits.wait(WAIT_S)
    assert backend.lookup("shop.C").records == {}
    assert backend._watch_file._lock.locked()
