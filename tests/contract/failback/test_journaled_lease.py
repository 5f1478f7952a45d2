"""The lease of a queue with a journal."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import FailbackLeaseLost
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.failback.journaled import CallRoute
from rpcwheel.failback.stored import StoredFunction
from rpcwheel.journal.backend import NewCall


@pytest.mark.parametrize(("lease", "interval_s"), [(2, 0.5), (15, 1.0)])
def test_the_journal_is_asked_several_times_in_a_lease(
    lease, interval_s, timer, tmp_path, monkeypatch
):
    policy = FailbackPolicy(
        retry_on=ConnectionError, journal=f"sqlite://{tmp_path}/journal.db?lease={lease}"
    )
    with FailbackInvoker(policy, timer=timer) as invoker:
        looks = []
        backend = invoker._queue.journal.backend
        monkeypatch.setattr(backend, "take", lambda *given: looks.append(given) or [])
        invoker.add_route("orders:443", lambda *_: None, lambda: True)
        wait_until(lambda: len(looks) == 1)
        for number in range(3):
            timer.advance(interval_s)
            wait_until(lambda number=number: len(looks) == 2 + number)


@pytest.fixture
def invoker(tmp_path):
    policy = FailbackPolicy(retry_on=ConnectionError, journal=f"sqlite://{tmp_path}/journal.db")
    invoker = FailbackInvoker(policy)
    yield invoker
    invoker.close(0)


def begin_attempt(queue):
    """Take a call from the journal, and begin its attempt."""
    begun = []
    route = CallRoute(
        "", lambda *_: (print, (), {}), lambda _, call: begun.append(call), None, lambda: True
    )
    call = NewCall(queue.name, "", "f", "k", StoredFunction(b"{}").encoded(), 0.0, 60.0)
    queue.journal.backend.append([call])
    queue.add_route(route)
    wait_until(lambda: begun)
    assert queue.begin_attempt(begun[0])
    return begun[0]


@pytest.mark.parametrize("request_name", ["renew", "take"])
def test_a_request_that_ends_after_the_lease_does_not_prolong_it(
    request_name, invoker, monkeypatch, events
):
    queue = invoker._queue
    backend = queue.journal.backend
    begin_attempt(queue)
    worker, real = queue.worker, getattr(backend, request_name)

    def ends_late(*given):
        queue._lease_ends_ns = time.monotonic_ns()
        return real(*given)

    with queue._loading:
        monkeypatch.setattr(backend, request_name, ends_late)
        left_s = 1 if request_name == "renew" else 15
        queue._lease_ends_ns = time.monotonic_ns() + left_s * 1_000_000_000
    queue.look()
    assert queue.worker != worker
    assert [event.count for event in events if isinstance(event, FailbackLeaseLost)] == [1]


def test_a_result_that_is_not_stored_yet_when_its_lease_ends_is_reported(invoker, events):
    queue = invoker._queue
    journal, worker = queue.journal, queue.worker
    call = begin_attempt(queue)
    journal.backend.release(worker)  # another process may have the call now
    with ThreadPoolExecutor() as pool:
        with journal._turn:  # no result is stored meanwhile
            queue.succeeded(call)
            with queue._loading:
                queue._lease_ends_ns = time.monotonic_ns()
            look = pool.submit(queue.look)
            wait_until(lambda: queue.worker != worker)
        look.result(WAIT_S)
    assert [event.count for event in events if isinstance(event, FailbackLeaseLost)] == [1]


def test_the_names_of_ended_leases_are_forgotten(invoker):
    queue = invoker._queue
    queue.journal._holders.add(queue.worker)
    queue._end_lease()
    assert not queue.journal._holders
