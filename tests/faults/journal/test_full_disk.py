"""The disk of a journal in SQLite is full: a small tmpfs, or files that may not grow."""

import resource
import sqlite3
import threading
from collections import Counter
from contextlib import closing

import grpc
import pytest

from fixtures.disks import disk_fixture
from fixtures.grpc_servers import IMPATIENT
from fixtures.journal_calls import new_call
from fixtures.journal_clients import (
    QUEUED,
    Records,
    Settings,
    check_deliveries,
    stored_calls,
    wait_until_none_is_stored,
)
from fixtures.recording_server import PUSH, UNAVAILABLE, succeed
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import CallPolicy
from rpcwheel.errors import JournalFull
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, intercept_channel
from rpcwheel.journal import Filter, open_journal_backend
from rpcwheel.journal.journal import open_journal

RESERVE = 1 << 20
"""Bytes that are free again in the end."""


disk = disk_fixture("3m")


@pytest.fixture
def url(disk):
    return f"sqlite://{disk}/journal.db"


@pytest.fixture
def push(server, url):
    """Makes a call through a channel whose failback has the journal."""
    policy = FailbackPolicy(
        retry_on="UNAVAILABLE", backoff=0.05, default=QUEUED, name="orders", journal=url
    )
    queues = FailbackQueues()
    with grpc.insecure_channel(server.target, options=IMPATIENT) as plain:
        channel = intercept_channel(plain, CallPolicy(failback=policy), queues=queues)
        method = channel.unary_unary(PUSH)
        yield lambda name: method(name.encode(), timeout=WAIT_S)
        queues.close(WAIT_S)


def fill(file, size=None):
    """Write a file of this size, or until the disk is full."""
    left = size
    with file.open("wb", buffering=0) as made:
        try:
            while left is None or left > 0:
                left = None if left is None else left - 4096
                made.write(bytes(4096))
        except OSError:
            assert size is None


def fill_with_calls(push):
    """Make calls of 4 kB until one is refused; return the ids of those that were queued."""
    for number in range(10_000):
        name = f"{number}-{'x' * 4096}"
        try:
            assert push(name) == QUEUED
        except JournalFull as error:
            return [f"{each}-{'x' * 4096}" for each in range(number)], error
    raise AssertionError("the disk is not full")


def test_a_full_disk_refuses_calls_and_loses_none(disk, url, server, push):
    up = threading.Event()
    server.answer = lambda attempt: None if up.is_set() and attempt.number > 1 else UNAVAILABLE
    fill(disk / "reserve", RESERVE)
    queued, error = fill_with_calls(push)
    assert f"{disk}/journal.db: the disk is full" in str(error)
    assert error.code() is UNAVAILABLE
    assert queued
    (disk / "reserve").unlink()
    up.set()
    wait_until_none_is_stored(url)
    assert server.delivered() == set(queued)
    with closing(sqlite3.connect(disk / "journal.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_results_that_a_full_disk_refuses_are_stored_when_there_is_space(disk, url, server, push):
    answers = threading.Event()

    def answer(attempt):
        if attempt.number == 1:
            return UNAVAILABLE
        answers.wait(WAIT_S)
        return None

    server.answer = answer
    fill(disk / "reserve", RESERVE)
    queued = [f"held-{number}" for number in range(4)]
    for name in queued:
        assert push(name) == QUEUED
    wait_until(lambda: server.delivered() == set(queued))  # their attempts are running
    more, _ = fill_with_calls(push)
    fill(disk / "rest")
    with closing(open_journal(url)) as journal:
        answers.set()
        wait_until(lambda: journal.unstored_results > 0)
        with pytest.raises(JournalFull):
            push(f"refused-{'x' * 4096}")  # a smaller call may have room
        (disk / "reserve").unlink()
        wait_until_none_is_stored(url)
        wait_until(lambda: journal.unstored_results == 0)
    attempts = Counter(attempt.id for attempt in server.attempts if attempt.number > 1)
    assert attempts == Counter(queued + more)


def test_a_full_disk_refuses_nothing_while_the_file_has_room(disk, url):
    call = new_call(body=bytes(4096))
    with closing(open_journal_backend(url)) as journal:
        journal.append([call] * 50)
        journal.delete(Filter())
    fill(disk / "reserve", 1 << 18)  # for the log, much less than it would take
    fill(disk / "rest")
    (disk / "reserve").unlink()
    with closing(open_journal_backend(url)) as journal:
        for _ in range(200):
            journal.append([call] * 5)
            journal.delete(Filter())


def test_a_file_that_may_not_grow_refuses_calls_and_loses_none(server, client, tmp_path):
    answers, url = tmp_path / "answers", f"sqlite://{tmp_path}/journal.db?lease=2"

    def start(name, callers):
        settings = Settings(url, server.target, str(answers), name, callers=callers, pause_s=0.01)
        client.start(settings)

    def wait_for(outcome):
        start = answers.stat().st_size
        wait_until(lambda: f'"{outcome}"' in answers.read_text()[start:])

    answers.touch()
    server.answer = lambda _: UNAVAILABLE
    start("first", 4)
    wait_for("queued")
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (300_000, 1 << 30))
    wait_for("refused")
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    wait_for("queued")
    client.kill()

    records, waiting = Records.read(answers), stored_calls(url)
    assert records.ids("queued") <= waiting.keys()
    server.answer = succeed
    start("last", 0)
    wait_until_none_is_stored(url)
    check_deliveries(server, records.ids("refused", "failed"), waiting)
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
