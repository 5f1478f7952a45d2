"""What a queue with a journal keeps in the memory."""

import pytest

from rpcwheel.failback import FailbackInvoker, FailbackPolicy


@pytest.fixture
def invoker(tmp_path):
    journal = f"sqlite://{tmp_path}/calls.db"
    policy = FailbackPolicy(retry_on=ConnectionError, journal=journal, name="push")
    with FailbackInvoker(policy) as invoker:
        yield invoker


def test_a_second_start_adds_no_route(invoker):
    invoker.register(lambda: None)
    for _ in range(2):
        invoker.start()
    assert len(invoker._queue.store.routes.target("").routes) == 1


def test_the_name_of_an_ended_lease_is_forgotten(invoker):
    store = invoker._queue.store
    store._end_lease()
    assert [*store.journal._workers] == [store.lease.worker]
