"""Processes that fork while their threads write and read a journal in a file."""

import os
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from fixtures.journal_calls import new_call
from fixtures.waiting import WAIT_S
from rpcwheel.journal import Filter, open_journal_backend

CHILDREN = 12
CALLS = 10
CALL = new_call(body=bytes(4000))


def write(journal):
    return len(journal.append([CALL] * 3))


def read(journal):
    assert journal.select(Filter())
    assert journal.depths()
    return 0


def reopen_and_write(journal):
    """Write by connections of their own, which may be the last ones that are closed."""
    with closing(open_journal_backend(journal.url)) as another:
        return write(another)


def forked(journal):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # also in C code
        signal.alarm(int(WAIT_S))
        code = 1
        try:
            for _ in range(CALLS):
                journal.append([CALL])
                read(journal)
            code = 0
        finally:
            os._exit(code)
    return pid


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_no_call_is_lost_and_the_file_is_intact(tmp_path):
    """If a child inherited SQLite's locks, it would skip those of the kernel, or wait for ever."""
    path, stop = tmp_path / "journal.db", threading.Event()

    def repeat(request):
        count = 0
        while not stop.is_set():
            count += request(journal)
        return count

    with closing(open_journal_backend(f"sqlite://{path}")) as journal, ThreadPoolExecutor() as pool:
        expected = write(journal) + CHILDREN * CALLS
        running = [pool.submit(repeat, request) for request in (write, read, reopen_and_write)]
        try:
            children = [forked(journal) for _ in range(CHILDREN)]
            ended = [os.waitpid(pid, 0)[1] for pid in children]
        finally:
            stop.set()
        assert ended == [0] * CHILDREN
        expected += sum(future.result() for future in running)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM call").fetchone() == (expected,)
