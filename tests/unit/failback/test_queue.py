"""The failback queue on a manual timer. Its attempts are recorded instead of being made.

`test_queue_model.py` has most rules.
"""

import asyncio
import functools
import gc
from unittest.mock import Mock

import grpc
import pytest
import tenacity

from fixtures.forks import held_by_another_thread
from fixtures.interrupts import interrupted_at_each_call
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel._grpc.calls import set_not_sent
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.errors import FailbackClosed, FailbackFull, TooManyTimeouts
from rpcwheel.events import ExecutorRejected, FailbackLost, FailbackRejected
from rpcwheel.failback import FailbackPolicy, FailbackStats
from rpcwheel.failback.aio import _start
from rpcwheel.failback.held_calls import HeldCalls
from rpcwheel.failback.invoker import begin_close_all
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

    def add(self, *args, error=GONE):
        """Queue a call of `push`."""
        saved = SavedCall.save(push, args, {})
        return self.enqueue(QueuedCall(saved, error, self.now_ns(), self.start))

    def counts(self, **expected):
        stats = self.stats()
        return {name: getattr(stats, name) for name in expected} == expected


@pytest.fixture
def queue(timer):
    return RecordingQueue(timer)


def not_sent():
    """The error of an attempt that the client has refused."""
    error = FinishedError(grpc.StatusCode.UNAVAILABLE, "not sent: open")
    set_not_sent(error)
    return error


def raised(error):
    """The error with a traceback."""
    with pytest.raises(type(error)):
        raise error
    return error


# --- When attempts begin, and what follows them ---


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


def test_while_the_timer_has_no_thread_attempts_follow_each_other(timer, monkeypatch, events):
    queue = RecordingQueue(timer, rate=0.01)
    queue.add(1)
    queue.add(2)
    monkeypatch.setattr(timer, "new_timeout", Mock(side_effect=RuntimeError("no thread")))
    queue.begin_flush(None)
    assert len(queue.started) == 1
    queue.succeeded(queue.started[0])
    assert {event.timer for event in events.of(ExecutorRejected)} == {"q"}
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


def test_a_call_that_a_flush_attempts_is_queued_although_the_timer_refuses_it():
    class FullTimer(ManualTimer):
        def new_timeout(self, *_):
            queue.begin_flush(0)
            raise TooManyTimeouts

    queue = RecordingQueue(FullTimer())
    assert queue.add() == "queued"
    (call,) = queue.started
    queue.succeeded(call)
    assert queue.stats() == FailbackStats(calls=1, queued_total=1, attempts=1, redelivered=1)


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


def test_the_timers_task_names_the_call(queue):
    queue.add()
    (call,) = queue.calls
    assert repr(call.timeout.task) == f"retry of {PUSH}"


def test_a_call_whose_loop_is_closed_before_it_is_given_up_is_lost(queue):
    loop = asyncio.new_event_loop()
    saved, start = SavedCall.save(push, (), {}), functools.partial(_start, loop)
    queue.adopt(QueuedCall(saved, GONE, 0, start, reason="too old"), 0)
    loop.close()
    queue.begin_flush(None)
    wait_until(lambda: queue.counts(lost=1, pending=0))


# --- The end ---


def test_a_close_that_is_interrupted_as_it_begins_reports_the_calls(queue, events, monkeypatch):
    queue.add()
    monkeypatch.setattr(queue, "start_attempt", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        queue.begin_close(5)
    assert type(events[-1]) is FailbackLost
    assert queue.pending == 0


def test_a_queue_whose_close_is_interrupted_reports_its_calls_or_is_listed_as_closing(timer):
    queues = []

    def begin_close():
        queues.append(RecordingQueue(timer))
        queues[-1].add()
        closing.clear()
        begin_close_all(queues[-1:], 5, closing)

    closing = []
    for _ in interrupted_at_each_call(begin_close):
        assert closing == queues[-1:] or not (queues[-1].calls.closed and queues[-1].pending)


def test_a_call_whose_attempt_fails_after_the_timer_was_stopped_is_lost(queue, timer, events):
    queue.add("order")
    timer.advance(5)
    timer.stop()
    assert queue.failed(queue.started[0], GONE) is None
    assert events[-1] == FailbackLost("q", (PUSH,), 1, 5.0, "its timer was stopped")
    assert queue.counts(lost=1, pending=0)
    assert [call.args for call in queue.end_close()] == [("order",)]


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
    (lost,) = wait_until(lambda: events.of(FailbackLost))
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


class InterruptedCall:
    """A call that another one follows whenever it is read, as one of a finalizer may."""

    stored = None

    def __init__(self, calls):
        self._calls = calls
        calls.add(self)

    @property
    def state(self):
        InterruptedCall(self._calls)
        return QueuedCallState.WAITING

    def entry(self, now_ns):
        return self.state


@pytest.mark.parametrize(
    "read",
    [
        lambda calls: calls.in_state(QueuedCallState.WAITING),
        lambda calls: calls.entries(),
        lambda calls: [call.state for call in calls],
    ],
    ids=["in_state", "entries", "iteration"],
)
def test_a_finalizer_may_add_a_call_while_the_calls_are_read(read):
    calls = HeldCalls(lambda: 0, limit=2)
    for _ in range(2):
        InterruptedCall(calls)
    assert len(read(calls)) == 2
    assert len(calls) == 4


def test_a_forked_child_has_an_empty_queue_though_another_thread_held_the_lock(queue, timer):
    queue.add()
    (call,) = queue.calls
    waiter = queue.calls.when_empty()
    with held_by_another_thread(queue.calls.lock):
        queue.reset_after_fork()
        timer.advance(5)
        assert queue.stats() == FailbackStats()
        assert (call.state, queue.started, waiter.done()) == (QueuedCallState.DONE, [], False)
        assert queue.add()
