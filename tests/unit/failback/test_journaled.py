"""What a queue with a journal keeps in the memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from fixtures.forks import holds_in_child
from fixtures.journals import store, stored
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.failback.pacer import Pacer
from rpcwheel.failback.queued_call import QueuedCall, SavedCall
from rpcwheel.failback.routes import CallRoute
from rpcwheel.failback.stored import StoredRpc
from rpcwheel.failback.sync import close_all
from rpcwheel.journal.backend import CallState, StoredCall
from rpcwheel.journal.journal import Journal
from rpcwheel.rpc import Kind


@pytest.fixture
def url(tmp_path):
    return f"sqlite://{tmp_path}/calls.db"


@pytest.fixture
def invoker(url):
    policy = FailbackPolicy(retry_on=ConnectionError, journal=url, name="push")
    with FailbackInvoker(policy) as invoker:
        yield invoker


def test_a_second_start_adds_no_route(invoker):
    invoker.register(lambda: None)
    for _ in range(2):
        invoker.start()
    assert len(invoker._queue.store.routes._by_target[""]) == 1


def test_the_name_of_an_ended_lease_is_forgotten(invoker):
    store = invoker._queue.store
    store._end_lease()
    assert [*store.journal._workers] == [store.lease.worker]


def test_queues_that_are_closed_together_wait_for_their_journals_together(tmp_path, monkeypatch):
    both, release = threading.Barrier(2), Journal._release

    def release_with_the_other(journal, worker):
        both.wait(WAIT_S)
        release(journal, worker)

    monkeypatch.setattr(Journal, "_release", release_with_the_other)
    journals = [f"sqlite://{tmp_path}/{name}.db?timeout={2 * WAIT_S}" for name in "ab"]
    policies = [FailbackPolicy(retry_on=ConnectionError, journal=url, name="q") for url in journals]
    assert close_all(list(map(FailbackInvoker, policies)), 0) == []
    assert not both.broken


def test_a_look_during_which_the_queue_is_closed_begins_no_lease(invoker, monkeypatch):
    store = invoker._queue.store

    def keep(*, is_used):
        invoker.close(0)
        return False

    monkeypatch.setattr(store.lease, "keep", keep)
    store.poller.look()
    assert [*store.journal._workers] == []


def test_a_call_that_is_taken_while_close_begins_is_given_back_at_once(invoker, url):
    gate, closings = Gate(), []

    def make(stored, body):
        if gate.entered.is_set():
            closings.append(pool.submit(invoker.close, WAIT_S))
            wait_until(lambda: invoker._queue.calls.closed)
        return gate, (), {}

    with ThreadPoolExecutor() as pool:
        store(url, queue="push", target="shop")
        invoker.add_route("shop", make)
        assert gate.entered.wait(WAIT_S)
        store(url, queue="push", target="shop")
        invoker._queue.store.poller.request()
        wait_until(lambda: closings and stored(url, CallState.READY))
        assert not closings[0].done()
        gate.opened.set()
        assert closings[0].result(WAIT_S) == []


def test_a_call_that_is_taken_again_while_its_attempt_runs_is_given_back(invoker, url):
    gate = Gate()
    store(url, queue="push", target="shop")
    invoker.add_route("shop", lambda stored, body: (gate, (), {}))
    assert gate.entered.wait(WAIT_S)
    journaled = invoker._queue.store
    worker = journaled.lease.worker
    journaled._end_lease()
    journaled.journal.backend.release(worker)
    journaled.poller.look()
    assert wait_until(lambda: stored(url, CallState.READY))
    gate.opened.set()


def test_a_closed_queue_is_not_listed_though_the_journal_has_calls(invoker, url):
    store(url, queue="push")
    assert (invoker.pending, invoker._queue.status().pending) == (1, 1)
    invoker.close(0)
    assert invoker._queue.status() is None


def test_a_target_whose_channels_are_closed_is_forgotten(invoker):
    routes = invoker._queue.store.routes
    invoker.remove_route(invoker.add_route("removed", Mock()))
    invoker.add_route("closed", Mock(), is_open=lambda: False)
    invoker.add_route("open", Mock())
    assert routes.open_targets() == [*routes._by_target] == ["open"]


def test_a_forked_child_has_no_routes_of_its_parent(invoker):
    invoker.add_route("shop", Mock())
    assert holds_in_child(lambda: not invoker._queue.store.routes.open_targets())


def test_a_target_without_calls_is_forgotten(invoker):
    calls, saved = invoker._queue.calls, SavedCall.save(Mock(), (), {})
    taken = [
        QueuedCall(saved, OSError("gone"), 0, Mock(), stored=Mock(target=target))
        for target in ("10.0.0.1:443", "10.0.0.1:443", "10.0.0.2:443")
    ]
    for call in taken:
        calls.add(call)
    for call in taken[1:]:
        calls.remove(call)
    assert dict(calls._by_target) == {"10.0.0.1:443": 1}
    calls.remove(taken[0])


def test_a_journal_is_not_asked_after_each_call_if_too_many_are_in_the_memory(
    invoker, url, monkeypatch
):
    """The pacing of a target may have become slower since they were taken."""
    queue, journaled = invoker._queue, invoker._queue.store
    monkeypatch.setattr(Pacer, "capacity", lambda *_: capacity)
    monkeypatch.setattr(journaled.poller, "request", Mock(side_effect=journaled.poller.look))
    store(url, count=16, queue="push", target="shop")
    journaled.routes.add(CallRoute("shop", lambda stored, body: (print, (), {}), Mock()))
    capacity = 16
    journaled.poller.look()
    capacity = 4
    left = []
    for call in queue.calls:
        queue.end(call, "redelivered")
        if journaled.poller.request.called:
            left.append(len(queue.calls))
            journaled.poller.request.reset_mock()
    assert left == [12, 3]


def test_a_call_that_was_taken_has_its_requests_in_the_memory_once(invoker):
    store, body = invoker._queue.store, StoredRpc(Kind.UNARY_UNARY, (b"order",)).encoded()
    stored = StoredCall(
        1, "push", "shop", "/a/B", "k", body, 0.0, 1.0, 60.0, 1, "", None, CallState.TAKEN
    )
    make = lambda stored, body: (print, body.requests, {})  # noqa: E731
    call = store._taken_call(stored, CallRoute("shop", make, Mock()))
    assert call.saved.args == (b"order",)
    assert call.stored.body == b""
