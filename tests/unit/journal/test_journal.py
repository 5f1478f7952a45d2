"""Parts of a journal: who has its lock, its counts and failures, and calls that are not stored."""

import gc
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from fixtures.journal_calls import new_call
from fixtures.journals import store, stored
from fixtures.leaks import no_garbage_collector
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.errors import JournalError, JournalUnavailable
from rpcwheel.events import JournalFailed, JournalRecovered
from rpcwheel.journal import counts
from rpcwheel.journal.backend import CallState, Route
from rpcwheel.journal.journal import _JOURNALS, _RequestLock, open_journal
from rpcwheel.journal.outage import Outage


def test_a_thread_that_has_waited_gets_the_lock_before_the_one_that_releases_it():
    lock, order = _RequestLock(), []

    def wait():
        with lock:
            order.append("waited")

    def is_waiting():
        free = lock._turnstile.acquire(blocking=False)
        if free:
            lock._turnstile.release()
        return not free

    with ThreadPoolExecutor() as pool:
        with lock:
            waiter = pool.submit(wait)
            wait_until(is_waiting)
        with lock:
            order.append("again")
        waiter.result(WAIT_S)
    assert order == ["waited", "again"]


class Method(str):  # noqa: SLOT000 - it has weak references
    pass


def refuse(calls):
    raise JournalUnavailable(f"{len(calls)} calls not stored")


@pytest.mark.parametrize("limit", [0, 1], ids=["the queue is full", "the engine fails"])
def test_a_call_that_is_not_stored_is_freed_without_the_garbage_collector(limit, tmp_path):
    """Its requests may be large, and many calls may fail while the disk is full."""
    journal = open_journal(f"sqlite:///{tmp_path}/calls.db")
    journal.backend.append = refuse

    def append():
        call = new_call(method=Method("/a/B"))
        with suppress(JournalError):
            journal.append_now(call, limit)
            pytest.fail("it was stored")
        return weakref.ref(call.method)

    gc.disable()
    try:
        assert append()() is None
    finally:
        gc.enable()
        journal.close()


def test_a_call_that_is_not_stored_in_time_is_freed_without_the_garbage_collector(tmp_path):
    """Many calls may wait for an engine that hangs."""
    journal = open_journal(f"sqlite:///{tmp_path}/calls.db")

    def failed():
        future = Future()
        future.set_exception(JournalUnavailable("not stored"))
        return future

    def error_of(make):
        try:
            return journal.wait_until_stored(make(), 0)
        except JournalError as error:
            return weakref.ref(error)

    with no_garbage_collector():
        assert [error_of(make)() for make in (Future, failed)] == [None, None]
    journal.close()


def test_a_worker_is_released_before_its_use_of_the_journal_ends(tmp_path):
    """Another thread may end the last use next, and close the connection."""
    url = f"sqlite://{tmp_path}/calls.db"
    store(url)
    journal = open_journal(url)
    journal.take("w", [Route("*", "", 1)], 0.0)
    with ThreadPoolExecutor() as pool:
        with _JOURNALS._lock:  # no use ends
            closing = pool.submit(journal.close, "w")
            wait_until(lambda: stored(url, CallState.READY))
        closing.result(WAIT_S)


def test_the_wait_for_the_end_of_a_use_counts_from_its_begin(tmp_path, monkeypatch):
    url, gate, now_s = f"sqlite://{tmp_path}/calls.db?timeout={2 * WAIT_S}", Gate(), 0.0
    journal = open_journal(url)
    monkeypatch.setattr(journal, "_release", gate)
    monkeypatch.setattr("rpcwheel.journal.journal.time", SimpleNamespace(monotonic=lambda: now_s))
    wait = journal.begin_close("w")
    now_s = 2 * WAIT_S
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        try:
            waiting.result(WAIT_S)
        finally:
            gate.opened.set()


def test_counting_takes_at_most_one_percent_of_the_time(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0, counted=0)

    def depths():  # takes 0.1 s
        clock.now_s += 0.1
        clock.counted += 1
        return []

    monkeypatch.setattr(counts, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    outage = SimpleNamespace(is_failing=False)
    of_journal = counts.Counts(SimpleNamespace(depths=depths), outage, lambda: 0, nullcontext)
    for _ in range(200):
        of_journal.refresh("*", 1000)
        clock.now_s += 0.5
    assert clock.counted == 10


class InterruptedLock:
    """A lock under which a signal handler runs, once."""

    def __init__(self, lock, handler):
        self._lock, self._handlers = lock, [handler]

    def __enter__(self):
        assert self._lock.acquire(blocking=False)
        while self._handlers:
            self._handlers.pop()()

    def __exit__(self, *_):
        self._lock.release()


def test_a_signal_handler_whose_call_fails_does_not_deadlock(events):
    outage = Outage("sqlite:///calls.db", lambda: 0, lambda: 0)
    handler = lambda: outage.failed(JournalUnavailable("in a handler"))  # noqa: E731
    outage._lock = InterruptedLock(outage._lock, handler)
    outage.failed(JournalUnavailable("away"))
    assert [type(event) for event in events] == [JournalFailed]


def test_a_finalizer_whose_call_is_refused_does_not_deadlock(events):
    def now_ns():
        if not reading:
            reading.append(1)
            outage.failed(JournalUnavailable("in a finalizer"))
        return 0

    reading = []
    outage = Outage("sqlite:///calls.db", now_ns, lambda: 0)
    outage.failed(JournalUnavailable("away"))
    outage.succeeded()
    assert [type(event) for event in events] == [JournalFailed, JournalRecovered]
    assert not outage.is_failing
