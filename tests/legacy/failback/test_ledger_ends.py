"""What a flush and a close do about the calls of a queue. Time moves by hand, tries by name."""

import logging

import pytest

from fixtures.failback_queues import GONE, PUSH, Queue
from rpcwheel.events import (
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackLost,
)
from rpcwheel.timer import ManualTimer


def test_a_flush_launches_all_that_wait_oldest_first_and_only_once(queue, timer):
    for order in "abc":
        queue.park(GONE, order)
    assert queue.ledger.begin_flush(None) == float("inf")
    assert queue.ledger.begin_flush(2.5) == 2.5
    assert [entry.call.args for entry in queue.launched] == [("a",), ("b",), ("c",)]
    timer.advance(60)
    assert len(queue.launched) == 3
    assert timer.pending == 0


def test_a_flushed_call_that_fails_goes_on_in_its_rhythm(queue, timer):
    queue.park()
    queue.ledger.begin_flush(None)
    queue.ledger.failed(queue.launched[0], GONE)
    timer.advance(4.999)
    assert len(queue.launched) == 1
    timer.advance(0.001)
    assert len(queue.launched) == 2


def test_a_close_launches_all_that_wait_and_then_tries_at_a_quicker_pace(queue, timer, events):
    queue.park()
    assert queue.ledger.begin_close(4) == 4.0
    queue.ledger.failed(queue.launched[0], GONE)
    assert events[-1] == FailbackAttemptFailed("q", PUSH, 2, 0.0, GONE, delay_s=2.0)


def test_a_close_without_a_drain_tries_nothing(queue):
    queue.park()
    assert queue.ledger.begin_close(0) == 0.0
    assert queue.launched == []


@pytest.mark.parametrize("bad", [None, "5", float("nan"), True])
def test_a_bad_drain_changes_nothing(queue, bad):
    with pytest.raises((TypeError, ValueError), match="drain"):
        queue.ledger.begin_close(bad)
    assert queue.park()


def test_what_is_left_at_the_end_is_returned_and_told_each_as_it_stood(queue, timer, events):
    queue.park(GONE, "running")
    timer.advance(5)
    queue.park(GONE, "waiting")
    queue.ledger.begin_close(0)
    failed = queue.ledger.end_close()
    assert [(one.args, one.attempts, one.reason) for one in failed] == [
        (("waiting",), 1, "closed"),
        (("running",), 2, "closed in the middle of a try, which may still arrive"),
    ]
    assert [event for event in events if isinstance(event, FailbackLost)] == [
        FailbackLost("q", (PUSH,), 1, 0.0, "closed"),
        FailbackLost("q", (PUSH,), 1, 5.0, "closed in the middle of a try, which may still arrive"),
    ]
    assert queue.stats(undelivered=2, pending=0)
    assert timer.pending == 0


def test_a_call_that_arrives_after_it_was_reported_is_told(queue, timer, events):
    queue.park()
    timer.advance(5)
    queue.ledger.begin_close(0)
    queue.ledger.end_close()
    queue.ledger.delivered(queue.launched[0])
    assert type(events[-1]) is FailbackDelivered
    assert queue.stats(undelivered=1, delivered_later=0)


def test_a_call_that_fails_after_it_was_reported_is_not_told_twice(queue, timer, events):
    queue.park()
    timer.advance(5)
    queue.ledger.begin_close(0)
    queue.ledger.end_close()
    told = len(events)
    assert queue.ledger.failed(queue.launched[0], GONE) is None
    assert queue.ledger.failed(queue.launched[0], ValueError()) is None
    queue.ledger.lost(queue.launched[0], "its loop is closed")
    assert len(events) == told


def test_a_call_that_has_no_place_to_be_tried_is_undelivered(queue, timer, events):
    queue.park()
    timer.advance(5)
    queue.ledger.lost(queue.launched[0], "its event loop is closed")
    assert events[-1] == FailbackLost("q", (PUSH,), 1, 5.0, "its event loop is closed")
    assert queue.stats(undelivered=1, pending=0)


def test_a_call_lost_during_the_drain_is_returned_too(queue):
    queue.park(GONE, "order")
    queue.ledger.begin_close(5)
    queue.ledger.lost(queue.launched[0], "its event loop is closed")
    assert [one.args for one in queue.ledger.end_close()] == [("order",)]


def test_the_timers_task_names_the_call(queue, timer):
    queue.park()
    (entry,) = queue.ledger.book.waiting()
    assert repr(entry.timeout.task) == f"retry of {PUSH}"


def test_a_parked_call_is_a_warning_a_lost_one_an_error(timer, caplog):
    queue = Queue(timer, max_attempts=2)
    queue.park()
    timer.advance(5)
    queue.ledger.failed(queue.launched[0], GONE)
    assert [(record.levelno, record.name) for record in caplog.records] == [
        (logging.WARNING, "rpcwheel.failback"),
        (logging.ERROR, "rpcwheel.failback"),
    ]


def test_all_times_are_the_manual_timers():
    with ManualTimer() as timer:
        timer.advance(7.5)
        assert Queue(timer).ledger.now_ns() == 7_500_000_000
