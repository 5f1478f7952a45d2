"""The failback queue on a manual timer. Its attempts are recorded instead of being made."""

import asyncio
import functools
import gc
import threading
from unittest.mock import Mock

import grpc
import hypothesis.strategies as st
import pytest
import tenacity
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.calls import CANCELLED_HERE, set_not_sent
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call.failed_calls import ChannelKey
from rpcwheel.call.keeper import KeptDelivery
from rpcwheel.call.metadata import not_sent_metadata
from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.events import (
    DeadLetterFailed,
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackGaveUp,
    FailbackLost,
    FailbackQueued,
    FailbackRejected,
)
from rpcwheel.failback import FailbackPolicy, FailbackStats
from rpcwheel.failback.aio import _give_up
from rpcwheel.failback.queue import Attempt, FailbackQueue
from rpcwheel.failback.queued_call import QueuedCall, QueuedCallState, SavedCall
from rpcwheel.timer import ManualTimer, WheelTimer

GONE = ConnectionError("gone")
REMEDY = "close the kit, or the queue, before the channel"


def push(*args):
    """The function whose calls are queued."""


PUSH = f"{__name__}.push"


class RecordingQueue(FailbackQueue):
    """A queue that keeps the calls whose attempts it starts, in `started`."""

    def __init__(self, timer, **given):
        super().__init__(
            FailbackPolicy(
                **{"retry_on": ConnectionError, "name": "q", "backoff": tenacity.wait_fixed(5)}
                | given
            ),
            timer,
        )
        self.started = []
        self.attempts = {}  # the last one of each call

    def start(self, attempt):
        self.started.append(attempt.call)
        self.attempts[attempt.call] = attempt

    def of(self, call):
        """The last attempt of a call, which may not have begun."""
        return self.attempts.get(call) or Attempt(self, call)

    def failed(self, call, error):
        return self.of(call).failed(error)

    def succeeded(self, call):
        self.of(call).succeeded()

    def lost(self, call, reason):
        self.of(call).lost(reason)

    def add(self, *args, error=GONE, started_ns=None, channel=None):
        """Queue a call of `push`, or of a method of a channel."""
        started_ns = self.now_ns() if started_ns is None else started_ns
        function = push if channel is None else KeptDelivery("/a/B", channel, 60)
        saved = SavedCall.save(function, args, {})
        return self.enqueue(QueuedCall(saved, error, started_ns, self.start))

    def counts(self, **expected):
        stats = self.stats()
        return {name: getattr(stats, name) for name in expected} == expected


@pytest.fixture
def queue(timer):
    return RecordingQueue(timer)


def args_of(calls):
    return [call.args for call in calls]


def not_sent(pushback_s=None):
    """The error of an attempt that the client has refused."""
    pushback_ns = None if pushback_s is None else round(pushback_s * 1e9)
    trailing = not_sent_metadata(pushback_ns)
    error = FinishedError(grpc.StatusCode.UNAVAILABLE, "not sent: open", trailing=trailing)
    set_not_sent(error)
    return error


def raised(error):
    """The error with a traceback."""
    with pytest.raises(type(error)):
        raise error
    return error


# --- Whether and when a call is attempted again ---


def test_a_wait_object_gets_the_attempt_the_error_and_the_times(timer):
    seen = []
    queue = RecordingQueue(timer, backoff=lambda state: seen.append(state) or 2.0)
    queue.add(started_ns=-8_000_000_000)  # it took 8 s to fail
    timer.advance(2)
    timer.advance(3)  # the attempt takes 3 s
    queue.failed(queue.started[0], GONE)
    state = seen[-1]
    assert (state.attempt_number, state.outcome.exception()) == (2, GONE)
    assert (state.seconds_since_start, state.idle_for) == (13.0, 2.0)
    timer.advance(2)
    queue.failed(queue.started[1], GONE)
    assert seen[-1].idle_for == 4.0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such shop"), "its error is not one that `retry_on` names"),
        (
            FinishedError(grpc.StatusCode.CANCELLED, CANCELLED_HERE),
            "its error is not one that `retry_on` names",
        ),
        (ValueError("Cannot invoke RPC on closed channel!"), f"its channel was closed; {REMEDY}"),
        (
            asyncio.CancelledError(),
            f"its attempt was cancelled, as by a channel that was closed; {REMEDY}",
        ),
    ],
)
def test_an_error_that_retry_on_does_not_name_ends_the_call_with_a_reason(
    queue, timer, events, error, reason
):
    queue.add()
    timer.advance(5)
    queue.failed(queue.started[0], error)
    assert events[-1] == FailbackGaveUp("q", PUSH, 2, 5.0, error, reason)
    assert timer.pending == 0


@pytest.mark.parametrize(
    "code", ["CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"]
)
def test_a_queued_call_is_not_given_up_because_its_server_is_busy(timer, code):
    queue = RecordingQueue(timer, max_attempts=3, backoff=5)
    busy = FinishedError(grpc.StatusCode[code], "")
    assert queue.add(error=busy) is None
    queue.add()
    for number in (1, 2):
        timer.advance(5)
        assert queue.counts(attempts=number, gave_up=0)
        queue.failed(queue.started[-1], busy)
    assert queue.counts(gave_up=1)
    assert queue.started[-1].reason == "no attempts left"


def test_an_attempt_that_was_not_sent_does_not_count(timer, events):
    queue = RecordingQueue(timer, max_attempts=3)
    queue.add()
    for error in (not_sent(), not_sent(), GONE, not_sent(), not_sent(), GONE):
        timer.advance(5)
        queue.failed(queue.started[-1], error)
    assert [event.attempts for event in events[1:]] == [1, 1, 2, 2, 2, 3]
    assert events[-1].reason == "no attempts left"


def test_a_call_whose_first_attempt_was_not_sent_has_made_this_attempt(timer):
    queue = RecordingQueue(timer, retry_on="UNAVAILABLE", max_attempts=1)
    assert queue.add(error=not_sent()) is None


@pytest.mark.parametrize(
    ("backoff_s", "pushback_s", "wait_s"), [(5, None, 5), (5, 2, 5), (5, 8, 8), (0, None, 0.05)]
)
def test_an_attempt_follows_one_that_was_not_sent_after_the_backoff_and_the_pushback(
    timer, events, backoff_s, pushback_s, wait_s
):
    backoff = tenacity.wait_fixed(backoff_s)
    queue = RecordingQueue(timer, retry_on="UNAVAILABLE", backoff=backoff)
    queue.add(error=not_sent(pushback_s))
    timer.advance(wait_s)
    queue.failed(queue.started[0], not_sent(pushback_s))
    assert [event.delay_s for event in events] == [wait_s, wait_s]


@pytest.mark.parametrize(
    ("stop", "waits_s"),
    [(tenacity.stop_after_delay(10), (2, 8)), (tenacity.stop_before_delay(10), (2,))],
)
def test_a_call_whose_attempts_are_not_sent_ends_with_the_time_limit(timer, events, stop, waits_s):
    queue = RecordingQueue(timer, backoff=tenacity.wait_fixed(2), stop=stop)
    queue.add()
    for wait_s in waits_s:
        assert not queue.counts(gave_up=1)
        timer.advance(wait_s)
        queue.failed(queue.started[-1], not_sent(8))
    assert events[-1].reason == "no attempts left"


def test_attempts_that_are_not_sent_are_paced_like_those_to_a_busy_server(timer):
    queue = RecordingQueue(timer, backoff=tenacity.wait_fixed(60))
    queue.start = lambda attempt: queue.started.append(attempt.call) or attempt.failed(not_sent())
    for _ in range(50):
        queue.add()
    timer.advance(60)
    for seconds in (1, 2, 3):
        assert len(queue.started) == 10 * seconds
        timer.advance(1)


def test_attempts_of_a_channel_wait_for_those_that_run_and_not_for_those_of_others(timer):
    queue = RecordingQueue(timer, backoff=5)
    keys = [ChannelKey(), ChannelKey()]
    for number in range(30):
        queue.add(channel=keys[number // 15])
    timer.advance(5)
    assert [call.saved.function.channel for call in queue.started].count(keys[0]) == 4
    assert len(queue.started) == 8
    (entry,) = {entry.next_attempt_s for entry in queue.entries()} - {None}
    assert entry == 0
    for call in queue.started:
        queue.succeeded(call)
    assert queue.counts(redelivered=30, pending=0)


def test_a_function_may_have_any_attributes(queue, timer):
    function = Mock(channel="sms")  # and a `timeout_s`, and a `release_channel`
    saved = SavedCall.save(function, (), {})
    queue.enqueue(QueuedCall(saved, GONE, queue.now_ns(), queue.start))
    timer.advance(5)
    (call,) = queue.started
    queue.succeeded(call)
    assert queue.counts(redelivered=1)
    assert function.mock_calls == []


def test_functions_that_are_no_longer_called_leave_no_pacer(queue, timer):
    def attempt(name):
        saved = SavedCall.save(Mock(label=name), (), {})
        queue.enqueue(QueuedCall(saved, GONE, queue.now_ns(), queue.start))
        timer.advance(5)
        return queue.started.pop()

    slow, pacer = attempt("slow"), queue.pacers.of("slow")
    for number in range(500):
        queue.succeeded(attempt(f"function {number}"))
    assert queue.pacers.of("slow") is pacer
    assert len(queue.pacers._by_name) < 100
    queue.succeeded(slow)


@pytest.mark.parametrize(
    ("own", "of_worker"), [({"rate": 2}, (None, None)), ({"rate": 2}, (None, 8)), ({}, (2, None))]
)
def test_attempts_begin_at_the_rate_of_the_policy_or_the_worker(timer, own, of_worker):
    queue = RecordingQueue(timer, **own)
    queue.pacers.limit(*of_worker)
    for _ in range(4):
        queue.add()
    timer.advance(5)
    for number in (1, 2, 3, 4):
        assert len(queue.started) == number
        timer.advance(0.5)


def test_calls_that_wait_for_the_pacing_are_lost_with_a_stopped_timer(timer):
    queue = RecordingQueue(timer, rate=1)
    for _ in range(3):
        queue.add()
    timer.advance(5)
    timer.stop()
    wait_until(lambda: queue.counts(lost=2))


def test_a_queued_call_is_attempted_again_though_the_timer_is_full():
    with WheelTimer(max_pending=1) as timer:
        queue = RecordingQueue(timer)
        queue.add()
        queue.begin_flush(None)
        timer.new_timeout(print, 60)  # it takes the place of the call
        queue.failed(queue.started[0], GONE)
        assert queue.counts(pending=1, gave_up=0)


def test_attempts_begin_at_the_rate_though_the_timer_is_full():
    with WheelTimer(max_pending=2) as timer:
        queue = RecordingQueue(timer, rate=0.01)
        queue.add(1)
        queue.add(2)
        queue.start_attempt(next(iter(queue.calls)))
        timer.new_timeout(print, 60)  # that of the first call is free
        queue.begin_flush(None)
        queue.succeeded(queue.started[0])
        assert queue.counts(attempts=1, pending=1)


def test_while_the_timer_has_no_thread_attempts_follow_each_other(timer, monkeypatch):
    queue = RecordingQueue(timer, rate=0.01)
    queue.add(1)
    queue.add(2)
    monkeypatch.setattr(timer, "new_timeout", Mock(side_effect=RuntimeError("no thread")))
    queue.begin_flush(None)
    assert len(queue.started) == 1
    queue.succeeded(queue.started[0])
    queue.succeeded(queue.started[1])
    assert queue.counts(redelivered=2, lost=0)


def test_a_call_whose_channel_was_closed_is_logged_without_a_traceback(timer, caplog):
    queue = RecordingQueue(timer, name="closed")  # no line of it is suppressed
    queue.add()
    queue.begin_flush(None)
    queue.failed(queue.started[0], raised(ValueError("Cannot invoke RPC on closed channel!")))
    given_up = caplog.records[-1]
    assert REMEDY in given_up.getMessage()
    assert given_up.exc_text is None


def test_a_named_error_is_retried_though_the_channel_was_closed(timer):
    queue = RecordingQueue(timer, retry_on=ValueError)
    assert queue.add(error=ValueError("Cannot invoke RPC on closed channel!"))


def test_a_predicate_that_raises_after_the_first_attempt_raises_to_the_caller(timer):
    queue = RecordingQueue(timer, retry_on=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        queue.add()
    assert queue.stats() == FailbackStats(calls=1, failed=1)


def test_a_wait_object_that_raises_after_a_further_attempt_ends_the_call_with_a_reason(
    timer, events
):
    queue = RecordingQueue(timer, backoff=lambda state: 5 if state.attempt_number == 1 else 1 / 0)
    queue.add()
    timer.advance(5)
    queue.failed(queue.started[0], GONE)
    assert events[-1].error is GONE
    assert events[-1].reason.startswith(
        "its policy's `retry_on`, `backoff` or `stop` raised ZeroDivision"
    )


# --- Which calls are queued ---


def test_a_closed_queue_refuses_calls_even_if_a_full_one_drops_them(timer):
    queue = RecordingQueue(timer, overflow="drop")
    queue.begin_close(0)
    with pytest.raises(FailbackClosed) as caught:
        queue.add()
    assert caught.value.__cause__ is GONE


def test_a_closed_queue_returns_errors_of_calls_that_have_one_attempt(timer):
    queue = RecordingQueue(timer, max_attempts=1)
    queue.begin_close(0)
    assert not queue.add()


def test_a_call_that_cannot_be_made_again_is_not_queued_and_its_error_has_a_note(queue):
    error = ConnectionError("gone")
    assert not queue.add(iter([b"a"]), error=error)
    assert error.__notes__[0].startswith("q: not queued, argument 0 is an iterator")
    assert queue.stats() == FailbackStats(calls=1, failed=1)


def test_a_full_timer_makes_the_queue_full(events):
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(print, 60)
        queue = RecordingQueue(timer)
        with pytest.raises(FailbackFull, match="the timer refused it") as caught:
            queue.add()
    assert caught.value.__cause__ is GONE
    (rejected,) = events
    assert isinstance(rejected, FailbackRejected)
    assert (rejected.error, rejected.reason[:20]) == (GONE, "the timer refused it")
    assert queue.stats() == FailbackStats(calls=1, rejected=1)


def test_without_a_timer_the_shared_one_is_taken_when_the_first_call_is_queued(monkeypatch, timer):
    asked = []
    monkeypatch.setattr(
        "rpcwheel.failback.timeouts.shared_timer", lambda: asked.append(timer) or timer
    )
    queue = RecordingQueue(None)
    queue.add(error=ValueError())
    assert not asked
    queue.add()
    assert timer.pending == 1


def test_a_queued_error_keeps_no_frames_of_itself_and_its_causes(queue):
    def fail(*, cause):
        try:
            raise inner
        except OSError:
            raise error from cause

    def frames():
        return [each.__traceback__ for each in (inner, error)]

    inner, error = OSError("reset"), ConnectionError("gone")
    with pytest.raises(ConnectionError):
        fail(cause=inner)
    queue.add(error=error)
    assert frames() == [None, None]
    queue.begin_flush(None)
    for cause in (inner, None):  # the context only
        with pytest.raises(ConnectionError):
            fail(cause=cause)
        queue.failed(queue.started[0], error)
        assert frames() == [None, None]
        queue.begin_flush(None)


def test_a_queued_error_keeps_no_frames_of_a_group_that_is_its_cause(queue):
    errors = [raised(OSError("reset")), raised(ConnectionError("gone"))]
    error = ConnectionError("no server answers")
    error.__cause__ = ExceptionGroup("all have failed", errors)
    queue.add(error=error)
    assert [each.__traceback__ for each in errors] == [None, None]


def test_an_error_that_the_caller_of_a_first_attempt_handles_keeps_its_frames(queue):
    error, handled = ConnectionError("gone"), raised(OSError("of the caller"))
    error.__context__ = handled
    queue.add(error=error)
    assert handled.__traceback__ is not None


# --- Events, entries and the log ---


def test_each_step_of_a_call_is_an_event(timer, events):
    queue = RecordingQueue(timer, max_attempts=3)
    queue.add()
    queue.add()
    for number in (1, 2):
        timer.advance(4.999)
        assert queue.counts(attempts=2 * (number > 1))
        timer.advance(0.001)
        assert queue.started[-1].state is QueuedCallState.RUNNING
        queue.failed(queue.started[0], GONE)
    queue.succeeded(queue.started[1])
    assert events == [
        FailbackQueued("q", PUSH, GONE, delay_s=5.0, pending=1),
        FailbackQueued("q", PUSH, GONE, delay_s=5.0, pending=2),
        FailbackAttemptFailed("q", PUSH, 2, waited_s=5.0, error=GONE, delay_s=5.0),
        FailbackGaveUp("q", PUSH, 3, waited_s=10.0, error=GONE, reason="no attempts left"),
        FailbackDelivered("q", PUSH, 2, waited_s=10.0),
    ]
    assert queue.stats() == FailbackStats(
        calls=2, queued_total=2, attempts=3, gave_up=1, redelivered=1
    )
    assert timer.pending == 0


def test_entries_lists_the_queued_calls_oldest_first(queue, timer):
    queue.add("secret", started_ns=-1_000_000_000)
    timer.advance(5)
    queue.add("secret")
    timer.advance(1)
    running, waiting = queue.entries()
    assert (running.function, running.age_s, running.attempts) == (PUSH, 7.0, 2)
    assert (running.next_attempt_s, running.error) == (None, GONE)
    assert (waiting.age_s, waiting.attempts, waiting.next_attempt_s) == (1.0, 1, 4.0)
    latest = ConnectionError("later")
    queue.failed(queue.started[0], latest)
    entry = queue.entries()[0]
    assert (entry.error, entry.next_attempt_s) == (latest, 5.0)
    assert "secret" not in repr(queue.entries())
    queue.end_close()
    assert queue.entries() == []


def test_the_timers_task_names_the_call(queue):
    queue.add()
    (call,) = queue.calls
    assert repr(call.timeout.task) == f"retry of {PUSH}"


# --- dead_letter ---


def test_a_dead_letter_hook_that_is_interrupted_ends_the_call_and_raises(timer, events):
    queue = RecordingQueue(timer, dead_letter=print)
    queue.add()
    timer.advance(5)
    (call,) = queue.started
    queue.failed(call, ValueError())
    with pytest.raises(KeyboardInterrupt), queue.of(call).dead_letter():
        raise KeyboardInterrupt
    assert type(events[-1]) is DeadLetterFailed
    assert queue.pending == 0


def test_a_call_whose_loop_is_closed_before_it_is_given_up_is_lost(queue):
    loop = asyncio.new_event_loop()
    saved, give_up = SavedCall.save(push, (), {}), functools.partial(_give_up, loop)
    queue.adopt(QueuedCall(saved, GONE, 0, queue.start, reason="too old", give_up=give_up), 0)
    loop.close()
    queue.begin_flush(None)
    wait_until(lambda: queue.counts(lost=1, pending=0))


# --- flush and close ---


@pytest.mark.parametrize(
    ("drain_s", "backoff_s", "limit", "error", "wait_s"),
    [
        (8, 5, {}, GONE, 4),
        (20, 5, {}, GONE, 5),
        (0.01, 5, {}, GONE, 0.05),
        (1, 0.001, {}, GONE, 0.001),
        (100, 0, {"max_attempts": 2}, GONE, 0.05),
        (100, 1, {"stop": tenacity.stop_after_attempt(2)}, GONE, 1),
        (8, 1, {}, not_sent(60), 4),
    ],
)
def test_during_close_attempts_are_not_limited_and_wait_for_half_of_the_time_left_at_most(
    timer, events, drain_s, backoff_s, limit, error, wait_s
):
    queue = RecordingQueue(timer, backoff=tenacity.wait_fixed(backoff_s), **limit)
    queue.add()
    assert queue.begin_close(drain_s) == drain_s
    queue.failed(queue.started[0], error)
    assert events[-1].delay_s == wait_s
    timer.advance(wait_s)
    assert len(queue.started) == 2


def test_a_close_that_is_interrupted_as_it_begins_reports_the_calls(queue, events, monkeypatch):
    def interrupted(call):
        raise KeyboardInterrupt

    queue.add()
    monkeypatch.setattr(queue, "start_attempt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.begin_close(5)
    assert type(events[-1]) is FailbackLost
    assert queue.pending == 0


def test_close_returns_and_reports_the_calls_that_are_left_once(queue, timer, events):
    queue.add("running")
    timer.advance(5)
    queue.add("waiting")
    queue.begin_close(0)
    during = "closed, during an attempt, which may still succeed"
    assert [(one.args, one.attempts, one.reason) for one in queue.end_close()] == [
        (("waiting",), 1, "closed"),
        (("running",), 2, during),
    ]
    assert events[-2:] == [
        FailbackLost("q", (PUSH,), 1, 0.0, "closed"),
        FailbackLost("q", (PUSH,), 1, 5.0, during),
    ]
    assert queue.counts(lost=2, pending=0)
    assert timer.pending == 0
    (call,) = queue.started
    assert queue.failed(call, GONE) is queue.failed(call, ValueError()) is None
    queue.lost(call, "its event loop is closed")
    assert type(events[-1]) is FailbackLost
    assert queue.counts(lost=2)
    queue.succeeded(call)  # worth an event, though it is counted already
    assert type(events[-1]) is FailbackDelivered
    assert queue.counts(lost=2, redelivered=0)
    assert queue.end_close() == []


@pytest.mark.parametrize("hook", [None, print])
def test_close_returns_the_calls_that_ended_during_it_unless_the_dead_letter_hook_got_them(
    timer, hook
):
    queue = RecordingQueue(timer, dead_letter=hook)
    for order in "abcd":
        queue.add(order)
    queue.begin_close(5)
    assert (queue.failed(queue.started[0], ValueError()) is None) == (hook is None)
    queue.lost(queue.started[1], "its event loop is closed")
    assert queue.failed(queue.started[3], GONE) is None
    given_up = [(("a",), "its error is not one that `retry_on` names")]
    assert [(one.args, one.reason) for one in queue.end_close()] == [
        *([] if hook else given_up),
        (("b",), "its event loop is closed"),
        (("d",), "closed"),
        (("c",), "closed, during an attempt, which may still succeed"),
    ]
    assert queue.counts(gave_up=1, lost=3, pending=0)


def test_a_call_whose_attempt_fails_after_the_timer_was_stopped_is_lost(queue, timer, events):
    queue.add("order")
    timer.advance(5)
    timer.stop()
    assert queue.failed(queue.started[0], GONE) is None
    assert events[-1] == FailbackLost("q", (PUSH,), 1, 5.0, "its timer was stopped")
    assert queue.counts(lost=1, pending=0)
    assert args_of(queue.end_close()) == [("order",)]


def test_a_stopped_timer_loses_the_queued_calls_and_close_returns_them(queue, timer, events):
    for number in range(3):
        queue.add(number)
    timer.stop()
    wait_until(lambda: queue.counts(lost=3, pending=0))
    with pytest.raises(FailbackClosed, match="timer was stopped; make a new queue") as caught:
        queue.add()
    assert caught.value.__cause__ is GONE
    left = queue.end_close()
    assert [call.args for call in left] == [(0,), (1,), (2,)]
    assert {(call.attempts, call.reason) for call in left} == {(1, "its timer was stopped")}
    (lost,) = [event for event in events if isinstance(event, FailbackLost)]
    assert (lost.name, lost.count, lost.reason) == ("q", 3, "its timer was stopped")
    assert queue.counts(lost=3, rejected=1)


# --- Threads and processes ---


@pytest.mark.parametrize("error", [None, GONE, not_sent()])
def test_a_timeout_is_canceled_if_flush_started_the_attempt_before_it_was_set(
    queue, timer, monkeypatch, error
):
    new_timeout = timer.new_timeout

    def new_timeout_and_flush(task, delay):
        timeout = new_timeout(task, delay)
        monkeypatch.setattr(timer, "new_timeout", new_timeout, raising=False)
        queue.begin_flush(None)  # as by another thread
        if error is not None:
            queue.failed(queue.started[0], error)
        return timeout

    monkeypatch.setattr(timer, "new_timeout", new_timeout_and_flush, raising=False)
    queue.add()
    assert len(queue.started) == 1
    assert timer.pending == (error is not None)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_many_threads_add_start_and_end_each_call_once(timer):
    queue = RecordingQueue(timer, max_pending=50)
    run_threads(*[lambda: [queue.add() for _ in range(10)]] * 5)
    calls = list(queue.calls)
    assert len(calls) == 50

    def race(order):
        for call in order:
            queue.start_attempt(call)
            queue.succeeded(call)

    orders = [calls, calls[::-1], calls[::2] + calls[1::2], calls]
    run_threads(*[functools.partial(race, order) for order in orders])
    assert len(queue.started) == len(set(queue.started))
    assert queue.counts(redelivered=50, pending=0, attempts=len(queue.started))


def test_a_finalizer_whose_call_fails_does_not_deadlock(queue):
    class Late:
        def __del__(self):
            queue.add()

    late = Late()
    late.itself = late
    with queue.calls.lock:
        del late
        gc.collect()
    assert queue.pending == 1


def test_a_forked_child_has_an_empty_queue_though_another_thread_held_the_lock(queue, timer):
    queue.add()
    (call,) = queue.calls
    waiter = queue.calls.when_empty()
    held, end = threading.Event(), threading.Event()

    def hold():
        with queue.calls.lock:
            held.set()
            end.wait(WAIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(WAIT_S)
    queue.reset_after_fork()
    timer.advance(5)
    assert queue.stats() == FailbackStats()
    assert (call.state, queue.started, waiter.done()) == (QueuedCallState.DONE, [], False)
    assert queue.add()
    end.set()
    holder.join()


HELD = QueuedCallState.WAITING, QueuedCallState.RUNNING, QueuedCallState.ENDING
"""The states of the calls that the queue has."""


class AnyOrder(RuleBasedStateMachine):
    """Any order of events, against a model of the states of calls."""

    LIMIT = 4

    def __init__(self):
        super().__init__()
        self.timer = ManualTimer()
        self.queue = RecordingQueue(
            self.timer, max_pending=self.LIMIT, max_attempts=3, dead_letter=print
        )
        self.model = {}  # the state of each call
        self.refused = 0
        self.waiters = [self.queue.calls.when_empty()]
        self.is_closed = False
        self.is_draining = False

    def teardown(self):
        self.queue.end_close()
        self.timer.stop()

    def in_state(self, *states):
        return [call for call, state in self.model.items() if state in states]

    def one(self, data, *states):
        calls = self.in_state(*states)
        return data.draw(st.sampled_from(calls)) if calls else None

    def note_started(self):
        for call in self.queue.started:
            self.model[call] = QueuedCallState.RUNNING
        self.queue.started.clear()

    @rule()
    def a_first_attempt_fails(self):
        if self.is_closed or len(self.in_state(*HELD)) >= self.LIMIT:
            with pytest.raises(FailbackClosed if self.is_closed else FailbackFull):
                self.queue.add()
            self.refused += 1
        else:
            self.queue.add()
            self.model[list(self.queue.calls)[-1]] = QueuedCallState.WAITING

    @rule(seconds=st.sampled_from([0.01, 2.5, 5.0]))
    def time_passes(self, seconds):
        self.timer.advance(seconds)
        self.note_started()

    @rule()
    def all_are_flushed(self):
        waiting = self.in_state(QueuedCallState.WAITING)
        self.queue.begin_flush(0)
        assert self.queue.started == waiting
        self.note_started()

    @rule(data=st.data(), named=st.booleans())
    def an_attempt_fails(self, data, named):
        call = self.one(data, *set(QueuedCallState) - {QueuedCallState.WAITING})
        if call is None:
            return
        hook = self.queue.failed(call, GONE if named else ValueError())
        if self.model[call] is QueuedCallState.RUNNING:
            self.model[call] = QueuedCallState.WAITING if hook is None else QueuedCallState.ENDING
            assert (hook is None) == (named and (call.attempts < 3 or self.is_draining))
        else:
            assert hook is None

    @rule(data=st.data())
    def an_attempt_succeeds(self, data):
        call = self.one(data, QueuedCallState.RUNNING, QueuedCallState.DONE)
        if call is not None:
            self.queue.succeeded(call)
            self.model[call] = QueuedCallState.DONE

    @rule(data=st.data())
    def a_hook_ends(self, data):
        call = self.one(data, QueuedCallState.ENDING)
        if call is not None:
            with self.queue.of(call).dead_letter():
                pass
            self.model[call] = QueuedCallState.DONE

    @rule(data=st.data())
    def a_loop_is_closed(self, data):
        call = self.one(data, QueuedCallState.RUNNING)
        if call is not None:
            self.queue.lost(call, "its event loop is closed")
            self.model[call] = QueuedCallState.DONE

    @precondition(lambda self: not self.is_closed)
    @rule(drain_s=st.sampled_from([0, 60]))
    def it_is_closed(self, drain_s):
        assert self.queue.begin_close(drain_s) == drain_s
        assert drain_s or not self.queue.started
        assert self.queue.begin_close(60) is None
        self.is_closed = self.is_draining = True
        self.note_started()

    @precondition(lambda self: self.is_closed)
    @rule()
    def the_drain_ends(self):
        left = self.in_state(QueuedCallState.WAITING, QueuedCallState.RUNNING)
        lost = self.queue.stats().lost
        self.queue.end_close()
        self.is_draining = False
        assert self.queue.stats().lost == lost + len(left)
        for call in self.model:
            self.model[call] = QueuedCallState.DONE

    @invariant()
    def calls_are_in_the_states_of_the_model(self):
        assert {call: call.state for call in self.model} == self.model
        assert list(self.queue.calls) == self.in_state(*HELD)
        assert self.timer.pending == len(self.in_state(QueuedCallState.WAITING))

    @invariant()
    def those_who_wait_for_an_empty_queue_are_notified(self):
        is_empty = not self.in_state(*HELD)
        assert {waiter.done() for waiter in self.waiters} <= {is_empty}
        self.waiters = [] if is_empty else [*self.waiters, self.queue.calls.when_empty()]
        self.queue.calls.when_empty().cancel()

    @invariant()
    def the_counts_add_up(self):
        stats = self.queue.stats()
        assert stats.calls == stats.queued_total + stats.rejected
        assert (stats.queued_total, stats.rejected) == (len(self.model), self.refused)
        ended = stats.redelivered + stats.gave_up + stats.lost
        assert stats.queued_total == ended + stats.pending
        assert stats.pending == len(self.queue.entries()) <= self.LIMIT


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
