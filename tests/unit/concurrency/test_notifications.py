"""`NotificationQueue`."""

import pytest

from rpcwheel._concurrency.notifications import LIMIT, NotificationQueue
from rpcwheel.events import CallbackFailed, IdleDetectionLimited


@pytest.fixture
def jobs():
    return []


@pytest.fixture
def queue(jobs):
    return NotificationQueue(run=jobs.append)


def test_events_and_calls_run_in_order_in_one_job(queue, jobs, events):
    seen = []
    queue.emit(IdleDetectionLimited("1"), IdleDetectionLimited("2"))
    queue.call("orders", lambda *args: seen.append((args, len(events))), 3, 4)
    queue.emit(IdleDetectionLimited("5"))
    assert (len(jobs), events, seen) == (1, [], [])
    jobs.pop()()
    assert events == [
        IdleDetectionLimited("1"),
        IdleDetectionLimited("2"),
        IdleDetectionLimited("5"),
    ]
    assert seen == [((3, 4), 2)]


def test_notifications_added_by_a_listener_run_in_the_same_job(queue, jobs):
    seen = []
    queue.call("orders", lambda: queue.call("orders", seen.append, 1))
    jobs.pop()()
    assert (jobs, seen) == ([], [1])


def test_any_exception_of_a_listener_is_an_event(queue, jobs, events):
    def broken():
        raise SystemExit

    queue.call("orders", broken)
    queue.call("orders", broken)
    jobs.pop()()
    assert [type(event) for event in events] == [CallbackFailed] * 2
    assert (events[0].subject, events[0].callback) == (
        "orders",
        f"{__name__}.{broken.__qualname__}",
    )


def test_beyond_the_limit_the_oldest_notifications_are_dropped(queue, jobs, events):
    seen = []
    queue.emit(*[IdleDetectionLimited("dropped")] * LIMIT)
    for number in range(LIMIT + 5):
        queue.call("orders", seen.append, number)
    jobs.pop()()
    assert seen == list(range(5, LIMIT + 5))
    assert events == []


def test_all_events_of_one_call_are_emitted(queue, jobs, events):
    queue.emit(*[IdleDetectionLimited("many")] * (LIMIT + 1))
    jobs.pop()()
    assert len(events) == LIMIT + 1
