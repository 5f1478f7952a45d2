"""What is done about a queue's calls: timer, events, errors. Time moves by hand, tries by name."""

import pytest
import tenacity

from fixtures.failback_queues import GONE, PUSH, Queue
from rpcwheel.errors import FailbackFull
from rpcwheel.events import (
    DeadLetterFailed,
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackGaveUp,
    FailbackQueued,
)
from rpcwheel.failback.entry import State
from rpcwheel.timer import WheelTimer


def test_a_parked_call_is_launched_when_its_wait_is_over_and_not_before(queue, timer):
    assert queue.park()
    timer.advance(4.999)
    assert queue.launched == []
    timer.advance(0.001)
    (entry,) = queue.launched
    assert entry.state is State.RUNNING
    assert entry.attempts == 2


def test_each_retry_waits_anew(queue, timer):
    queue.park()
    for launches in (1, 2, 3):
        timer.advance(4.999)
        assert len(queue.launched) == launches - 1
        timer.advance(0.001)
        assert len(queue.launched) == launches
        queue.ledger.failed(queue.launched[-1], GONE)
    timer.advance(60)
    assert len(queue.launched) == 3


def test_the_story_of_a_call_is_told_in_events(timer, events):
    queue = Queue(timer, max_attempts=3)
    queue.park()
    timer.advance(5)
    queue.ledger.failed(queue.launched[0], GONE)
    timer.advance(5)
    queue.ledger.failed(queue.launched[0], GONE)
    assert events == [
        FailbackQueued("q", PUSH, GONE, delay_s=5.0, pending=1),
        FailbackAttemptFailed("q", PUSH, 2, waited_s=5.0, error=GONE, delay_s=5.0),
        FailbackGaveUp("q", PUSH, 3, waited_s=10.0, error=GONE, reason="no retries left"),
    ]
    assert queue.stats(parked=1, retried=2, abandoned=1, pending=0)


def test_a_delivery_is_told_with_the_tries_and_the_time_it_took(queue, timer, events):
    queue.park()
    timer.advance(5)
    queue.ledger.delivered(queue.launched[0])
    assert events[1:] == [FailbackDelivered("q", PUSH, 2, waited_s=5.0)]
    assert queue.stats(delivered_later=1, pending=0)
    assert timer.pending == 0


def test_an_error_not_named_by_on_ends_the_retries(queue, timer, events):
    queue.park()
    timer.advance(5)
    error = ValueError("no such shop")
    queue.ledger.failed(queue.launched[0], error)
    assert events[-1] == FailbackGaveUp(
        "q", PUSH, 2, 5.0, error, "its error is not one that `retry_on` names"
    )
    assert timer.pending == 0


def test_a_timer_that_takes_no_more_makes_the_queue_full(events):
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(print, 60)
        queue = Queue(timer)
        with pytest.raises(FailbackFull, match="the timer refused it") as caught:
            queue.park()
    assert caught.value.__cause__ is GONE
    assert events == []
    assert queue.stats(calls=1, rejected=1, parked=0, pending=0)


def test_without_a_timer_the_shared_one_is_taken_at_the_first_parked_call(monkeypatch, timer):
    asked = []

    def shared():
        asked.append(1)
        return timer

    monkeypatch.setattr("rpcwheel.failback.ledger.shared_timer", shared)
    queue = Queue(None)
    queue.park(ValueError())
    assert not asked
    queue.park()
    assert asked
    assert timer.pending == 1


def test_a_strategy_that_raises_at_a_retry_ends_it_with_a_reason(timer, events):
    queue = Queue(timer, backoff=lambda state: 5 if state.attempt_number == 1 else 1 / 0)
    queue.park()
    timer.advance(5)
    queue.ledger.failed(queue.launched[0], GONE)
    assert events[-1].error is GONE
    assert events[-1].reason.startswith(
        "its policy's `retry_on`, `backoff` or `stop` raised ZeroDivision"
    )


def test_a_stop_measures_from_the_start_of_the_first_try(timer):
    queue = Queue(timer, backoff=1, stop=tenacity.stop_after_delay(10))
    timer.advance(20)
    queue.park(started_ns=12_000_000_000)  # it took 8 s to fail
    timer.advance(1)
    queue.ledger.failed(queue.launched[0], GONE)
    assert queue.stats(abandoned=0)
    timer.advance(1)
    queue.ledger.failed(queue.launched[1], GONE)
    assert queue.stats(abandoned=1)


def test_an_error_that_waits_holds_no_frames(queue, timer):
    try:
        raise ConnectionError("gone")  # noqa: TRY301
    except ConnectionError as caught:
        error = caught
        queue.park(error)
    assert error.__traceback__ is None


# --- The dead-letter hook ---


def test_an_abandoned_call_goes_to_the_hook_and_is_pending_until_that_has_run(timer):
    buried = []
    queue = Queue(timer, max_attempts=2, dead_letter=buried.append)
    queue.park(GONE, "order")
    timer.advance(5)
    (entry,) = queue.launched
    failed = queue.ledger.failed(entry, GONE)
    assert queue.stats(pending=1, abandoned=0)
    queue.ledger.dead_letter(failed)
    queue.ledger.bury(entry)
    assert queue.stats(pending=0, abandoned=1)
    (letter,) = buried
    assert (letter.function, letter.args, letter.kwargs) == (PUSH, ("order",), {})
    assert (letter.attempts, letter.waited_s, letter.error) == (2, 5.0, GONE)
    assert letter.reason == "no retries left"


def test_a_hook_that_raised_is_told_and_the_call_is_over(timer, events):
    queue = Queue(timer, max_attempts=2, dead_letter=print)
    queue.park()
    timer.advance(5)
    (entry,) = queue.launched
    queue.ledger.failed(entry, GONE)
    broken = ZeroDivisionError()
    queue.ledger.bury(entry, broken)
    assert events[-1] == DeadLetterFailed("q", PUSH, broken)
    assert queue.stats(pending=0, abandoned=1)
