"""When a worker ends, and what a stored call is sent with."""

import threading
from contextlib import closing
from unittest.mock import Mock

import grpc
import pytest

from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S
from rpcwheel.call.idempotency import IDEMPOTENCY_KEY
from rpcwheel.failback import FailbackStats, JournalWorker
from rpcwheel.failback.stored import StoredRpc
from rpcwheel.failback.stored_calls import StoredCalls
from rpcwheel.failback.worker import THREAD_NAME, _has_nothing_due
from rpcwheel.journal import open_journal_backend
from rpcwheel.journal.backend import CallState, StoredCall
from rpcwheel.rpc import Kind

EMPTY, HOLDS_ONE = FailbackStats(), FailbackStats(queued_total=1, pending=1)
DELIVERED_ONE = FailbackStats(queued_total=1, attempts=1, redelivered=1)


class Interrupted(BaseException):
    """What Ctrl-C raises, for example."""


@pytest.mark.parametrize(
    ("before", "after", "found_none", "ended"),
    [
        (EMPTY, EMPTY, True, True),
        (DELIVERED_ONE, DELIVERED_ONE, True, True),
        (EMPTY, EMPTY, False, False),
        (HOLDS_ONE, HOLDS_ONE, True, False),
        (EMPTY, HOLDS_ONE, True, False),
        (EMPTY, DELIVERED_ONE, True, False),  # which may have unblocked another call
    ],
)
def test_nothing_is_due_if_a_look_finds_none_and_nothing_changes(before, after, found_none, ended):
    queue = Mock(stats=Mock(side_effect=[before, after]), found_none=False)
    queue.poller.look = lambda: setattr(queue, "found_none", found_none)
    assert _has_nothing_due(queue, queue) is ended


@pytest.fixture
def worker(tmp_path):
    url = f"sqlite://{tmp_path}/journal.db"
    with closing(open_journal_backend(url)) as backend:
        backend.routes()  # creates it
    return JournalWorker(url)


@pytest.fixture
def interrupt(monkeypatch):
    """Lets a method of the worker's thread raise once, when it has done its work."""

    def interrupt(name):
        method = getattr(threading.Thread, name)

        def interrupted(thread, *args):
            method(thread, *args)
            if thread.name == THREAD_NAME and not threads:
                threads.append(thread)
                raise Interrupted

        threads = []
        monkeypatch.setattr(threading.Thread, name, interrupted)
        return threads

    return interrupt


def test_counts_do_not_wait_for_those_that_a_signal_handler_interrupts(worker):
    worker._invokers = {"orders": Mock(stats=lambda: worker.skipped)}
    run_threads(worker.stats)


def test_a_count_does_not_wait_for_one_that_a_signal_handler_interrupts(worker, monkeypatch):
    worker.start()
    backend = worker._journal.backend
    depths, counted = backend.depths, []

    def interrupted():
        monkeypatch.setattr(backend, "depths", depths)
        counted.append(worker.count())
        return depths()

    monkeypatch.setattr(backend, "depths", interrupted)
    run_threads(worker.count)
    assert counted == [0]
    worker.close()


def test_a_close_that_is_interrupted_while_it_waits_for_the_thread_ends_the_worker(
    worker, interrupt
):
    worker.start()
    interrupt("join")
    with pytest.raises(Interrupted):
        worker.close()
    assert worker.wait(0)
    worker.close()


def test_a_start_that_is_interrupted_ends_the_thread(worker, interrupt):
    threads = interrupt("start")
    with pytest.raises(Interrupted):
        worker.start()
    threads[0].join(WAIT_S)
    assert not threads[0].is_alive()


def test_given_metadata_replaces_stored_metadata_of_the_same_name():
    body = StoredRpc(Kind.UNARY_UNARY, (b"",), (("x-zone", "a"), ("x-tenant", "7")))
    state = CallState.TAKEN
    call = StoredCall(1, "q", "t", "/s/M", "key-1", b"", 0.0, 1.0, 1.0, 1, "", None, state)
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        calls = StoredCalls(channel, None, lambda: [("x-zone", "b")])
        delivery, requests, _ = calls(call, body)
    assert requests == (b"",)
    assert delivery._details.metadata == (
        ("x-tenant", "7"),
        ("x-zone", "b"),
        (IDEMPOTENCY_KEY, "key-1"),
    )
