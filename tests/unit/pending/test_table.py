"""What both twins promise: every call ends once, and its end leaves nothing behind."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from fixtures.pending_worlds import CANCELLED, PENDING, outcome
from fixtures.waiting import wait_until
from rpcwheel.call import deadline_scope
from rpcwheel.errors import (
    CallsClosed,
    CallTimeout,
    ConfigurationError,
    DuplicateKey,
    TimerStopped,
    TooManyCalls,
    TooManyTimeouts,
)
from rpcwheel.events import LateResponse, UnmatchedResponse
from rpcwheel.timer import ManualTimer, WheelTimer

LOST = ConnectionError("gone")


@pytest.fixture
def calls(world, timer):
    with world.twin.PendingCalls(timer, name="orders") as calls:
        yield calls
    world.do(lambda: None)
    assert (calls.pending, timer.pending) == (0, 0)


# Ends


def test_an_answer_ends_its_call_and_its_timeout(world, calls, timer):
    future = world.do(calls.open, 7, timeout=2.0)
    assert (outcome(future), timer.pending, calls.pending) == (PENDING, 1, 1)
    assert world.do(calls.received, 7, "answer")
    assert (outcome(future), timer.pending, calls.pending) == (("answer",), 0, 0)


def test_an_error_ends_its_call_and_its_timeout(world, calls, timer):
    future = world.do(calls.open, 7, timeout=2.0)
    assert world.do(calls.failed, 7, LOST)
    assert outcome(future) is LOST
    assert timer.pending == 0


def test_a_call_that_was_never_sent_times_out_by_the_clients_fault(world, calls, timer):
    timer.advance(10)
    future = world.do(calls.open, 7, timeout=timedelta(seconds=2))
    world.do(timer.advance, 1.999)
    assert outcome(future) == PENDING
    world.do(timer.advance, 0.001)
    error = outcome(future)
    assert isinstance(error, CallTimeout)
    assert (error.side, error.key, error.name) == ("client", 7, "orders")
    assert (error.start, error.sent, error.elapsed, error.timeout) == (10.0, None, 2.0, 2.0)
    assert calls.stats().timed_out == 1


def test_a_call_that_was_sent_times_out_by_the_servers_fault(world, calls, timer):
    future = world.do(calls.open, 7, timeout=2.0)
    timer.advance(0.5)
    assert calls.sent(7)
    timer.advance(0.5)
    assert calls.sent(7)
    world.do(timer.advance, 1)
    assert (outcome(future).side, outcome(future).sent) == ("server", 0.5)
    assert not calls.sent(7)


@pytest.mark.parametrize("timeout", [None, float("inf")])
def test_a_call_without_limit_waits_on_without_a_timer(world, calls, timer, timeout):
    future = world.do(calls.open, 7, timeout=timeout)
    assert timer.pending == 0
    world.do(timer.advance, 1e6)
    assert outcome(future) == PENDING


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_call_whose_time_is_over_has_ended_when_open_returns(world, calls, timer, timeout):
    future = world.do(lambda: (future := calls.open(7, timeout=timeout), future.done()))
    assert future[1]
    assert (outcome(future[0]).side, outcome(future[0]).timeout) == ("client", 0.0)
    assert (calls.pending, timer.pending) == (0, 0)


def test_a_lost_connection_fails_its_calls_at_once_and_no_others(world, calls, timer):
    mine = [world.do(calls.open, key, timeout=2.0, connection="a") for key in range(3)]
    others = [
        world.do(calls.open, key, timeout=2.0, connection=connection)
        for key, connection in ((3, "b"), (4, None))
    ]
    assert world.do(calls.lost, "a", LOST) == 3
    assert [outcome(future) for future in mine] == [LOST] * 3
    assert [outcome(future) for future in others] == [PENDING] * 2
    assert timer.pending == 2
    assert world.do(calls.lost, "a", LOST) == 0


def test_closing_fails_what_is_pending_and_refuses_what_comes(world, calls, timer):
    futures = [world.do(calls.open, key, timeout=2.0) for key in "ab"]
    assert world.do(calls.close) == ["a", "b"]
    assert all(isinstance(outcome(future), CallsClosed) for future in futures)
    assert outcome(futures[0]) is not outcome(futures[1])
    assert world.do(calls.close) == []
    assert timer.pending == 0
    with pytest.raises(CallsClosed):
        world.do(calls.open, "c", timeout=2.0)


def test_closing_fails_with_the_error_that_it_is_given(world, calls):
    future = world.do(calls.open, 7, timeout=2.0)
    world.do(calls.close, LOST)
    assert outcome(future) is LOST


def test_cancelling_takes_the_call_and_its_timeout_out_at_once(world, calls, timer):
    future = world.do(calls.open, 7, timeout=2.0)
    assert world.do(future.cancel)
    assert (outcome(future), calls.pending, timer.pending) == (CANCELLED, 0, 0)
    assert calls.stats().cancelled == 1


def test_cancelling_a_call_that_has_ended_changes_nothing(world, calls):
    future = world.do(calls.open, 7, timeout=2.0)
    world.do(calls.received, 7, "answer")
    assert not world.do(future.cancel)
    assert outcome(future) == ("answer",)
    assert calls.stats().cancelled == 0


def test_cancelling_does_not_reach_a_later_call_of_the_same_key(world, calls):
    old = world.do(calls.open, 7, timeout=2.0)
    world.do(calls.received, 7, "answer")
    new = world.do(calls.open, 7, timeout=2.0)
    world.do(old.cancel)
    assert outcome(new) == PENDING


# Late and unknown answers


@pytest.mark.parametrize("answer", ["received", "failed"])
def test_a_late_answer_is_told_and_changes_nothing(world, calls, timer, events, answer):
    future = world.do(calls.open, 7, timeout=2.0)
    world.do(timer.advance, 2)
    timer.advance(0.5)
    before = outcome(future)
    assert not world.do(getattr(calls, answer), 7, LOST)
    assert outcome(future) is before
    assert events == [LateResponse("orders", "7", "timed out", 0.5)]
    assert calls.stats().late == 1


def test_an_answer_to_nothing_is_told_and_changes_nothing(world, calls, events):
    assert not world.do(calls.received, "7", "answer")
    assert events == [UnmatchedResponse("orders", "'7'")]
    assert calls.stats().unknown == 1


def test_a_key_that_cannot_be_shown_does_no_harm(world, calls, timer, events):
    class Mute:
        def __repr__(self):
            raise ZeroDivisionError

    key = Mute()
    future = world.do(calls.open, key, timeout=2.0)
    world.do(timer.advance, 2)
    assert outcome(future).key is key
    world.do(calls.received, key, None)
    assert events == [LateResponse("orders", "a Mute", "timed out", 0.0)]


# Deadlines


def test_the_earlier_deadline_holds(world, calls, timer):
    with deadline_scope(60.0):
        short = world.do(calls.open, 1, timeout=2.0)
        scoped = world.do(calls.open, 2, timeout=100.0)
        unlimited = world.do(calls.open, 3, timeout=None)
    world.do(timer.advance, 2)
    assert [outcome(future) == PENDING for future in (short, scoped, unlimited)] == [0, 1, 1]
    world.do(timer.advance, 58)
    assert outcome(scoped).timeout <= 60.0
    assert outcome(unlimited).timeout <= 60.0


def test_a_deadline_that_has_passed_ends_the_call_before_it_is_sent(world, calls):
    with deadline_scope(0):
        future = world.do(calls.open, 7, timeout=2.0)
    assert outcome(future).side == "client"


def test_a_scope_without_end_is_no_limit(world, calls, timer):
    with deadline_scope(float("inf")):
        world.do(calls.open, 7, timeout=None)
    assert timer.pending == 0


# What is refused


def test_what_makes_no_sense_is_refused_and_leaves_no_trace(world, calls, timer):
    refused = [
        (TypeError, {"timeout": "2"}),
        (ConfigurationError, {"timeout": float("nan")}),
        (TypeError, {"timeout": 2.0, "connection": []}),
    ]
    for error, given in refused:
        with pytest.raises(error):
            world.do(calls.open, 7, **given)
    with pytest.raises(TypeError):
        world.do(calls.open, [], timeout=2.0)
    assert (calls.stats().opened, timer.pending) == (0, 0)


def test_an_error_must_be_an_exception(world, calls):
    future = world.do(calls.open, 7, timeout=2.0, connection="a")
    for refused in (
        lambda: calls.failed(7, "boom"),
        lambda: calls.failed(7, ValueError),
        lambda: calls.lost("a", "boom"),
        lambda: calls.lost(None, LOST),
        lambda: calls.close("boom"),
    ):
        with pytest.raises(TypeError):
            world.do(refused)
    assert outcome(future) == PENDING


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (TypeError, {"timer": 2.0}),
        (TypeError, {"name": None}),
        (TypeError, {"max_pending": 1.0}),
        (TypeError, {"max_pending": True}),
        (ConfigurationError, {"max_pending": 0}),
    ],
)
def test_a_table_says_what_is_wrong_with_its_arguments(world, error, given):
    with pytest.raises(error):
        world.twin.PendingCalls(**given)


def test_a_timeout_that_is_left_out_is_told_by_the_name_that_users_know(calls):
    with pytest.raises(TypeError, match=r"^PendingCalls\.open\(\) missing .* 'timeout'"):
        calls.open(7)


def test_a_table_may_say_of_what_its_answers_are(world, timer):
    with world.twin.PendingCalls[bytes](timer) as calls:
        assert type(calls) is world.twin.PendingCalls


def test_a_pending_key_is_refused_and_its_timeout_stays(world, calls, timer):
    future = world.do(calls.open, 7, timeout=2.0)
    with pytest.raises(DuplicateKey, match="7 waits already"):
        world.do(calls.open, 7, timeout=1.0)
    assert timer.pending == 1
    world.do(calls.received, 7, 1)
    assert outcome(future) == (1,)


def test_a_full_table_refuses(world, timer):
    with world.twin.PendingCalls(timer, max_pending=1) as calls:
        world.do(calls.open, 1, timeout=2.0)
        with pytest.raises(TooManyCalls):
            world.do(calls.open, 2, timeout=2.0)
        assert timer.pending == 1
    world.do(lambda: None)


def test_a_timer_that_is_full_or_stopped_refuses_the_call_and_no_entry_is_left(world):
    timer = WheelTimer(max_pending=1)
    calls = world.twin.PendingCalls(timer)
    world.do(calls.open, 1, timeout=60.0, connection="a")
    with pytest.raises(TooManyTimeouts):
        world.do(calls.open, 2, timeout=60.0, connection="a")
    assert (calls.pending, calls.stats().opened) == (1, 1)
    timer.stop()
    with pytest.raises(TimerStopped):
        world.do(calls.open, 3, timeout=60.0, connection="a")
    assert world.do(calls.lost, "a", LOST) == 1


def test_a_call_ends_in_time_although_the_timers_executor_refuses_the_task(world):
    pool = ThreadPoolExecutor()
    pool.shutdown()
    with WheelTimer(executor=pool) as timer, world.twin.PendingCalls(timer) as calls:
        future = world.do(calls.open, 1, timeout=0.001)
        assert wait_until(lambda: world.do(future.done))
        assert isinstance(outcome(future), CallTimeout)
        assert calls.pending == 0


# What is left behind


class Value:
    """Something that can be seen to go."""


def test_an_answered_call_frees_its_value_and_future_although_time_is_left(world, calls):
    value = Value()
    future = world.do(calls.open, 7, timeout=1e6)
    world.do(calls.received, 7, value)
    seen = weakref.ref(value), weakref.ref(future)
    gc.disable()
    try:
        del value, future
        assert [look() for look in seen] == [None, None]
    finally:
        gc.enable()


def test_the_timers_task_knows_neither_future_nor_table(world, timer):
    calls = world.twin.PendingCalls(timer)
    future = world.do(calls.open, 7, timeout=1e6)
    (waiting,) = timer._timer_state.queue
    held = gc.get_referents(waiting.task)
    assert calls not in held
    assert future not in held
    calls.close()
    world.do(lambda: None)


def test_a_table_that_is_dropped_warns_and_leaves_no_timeout(world, timer):
    calls = world.twin.PendingCalls(timer)
    ended = []
    world.do(calls.open, 7, timeout=1e6).add_done_callback(ended.append)
    holder = [calls]
    del calls

    def drop():
        holder.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"1 pending> was dropped .* call close\(\)"):
        drop()
    assert timer.pending == 0
    assert wait_until(lambda: world.do(lambda: ended))
    assert isinstance(outcome(ended[0]), CallsClosed)


def test_a_table_lives_as_long_as_someone_waits_for_one_of_its_calls(world, timer):
    future = world.do(world.twin.PendingCalls(timer).open, 7, timeout=2.0)
    gc.collect()
    world.do(timer.advance, 2)
    assert isinstance(outcome(future), CallTimeout)


def test_a_hundred_thousand_answered_calls_leave_nothing(world, calls, timer):
    def flood():
        for key in range(100_000):
            calls.open(key, timeout=2.0, connection=key % 7)
            calls.received(key, key)

    world.do(flood)
    book = calls._book
    left = (book._entries, book._of, book._gone, timer._timer_state.queue)
    assert [len(part) for part in left] == [0] * 4
    assert calls.stats().answered == 100_000


def test_a_manual_timer_made_of_nothing_else_is_enough(world):
    with ManualTimer() as timer, world.twin.PendingCalls(timer) as calls:
        assert repr(calls) == f"<{world.twin.__name__}.PendingCalls 'calls' 0 pending>"
