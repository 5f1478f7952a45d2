"""`PendingCalls` in both worlds: what `test_table_model.py` does not show."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.leaks import no_garbage_collector
from fixtures.pending_worlds import LOST, PENDING, outcome
from fixtures.waiting import wait_until
from rpcwheel.call import deadline_scope
from rpcwheel.durations import NEVER
from rpcwheel.errors import (
    CallsClosed,
    CallTimeout,
    TimerStopped,
    TooManyTimeouts,
)
from rpcwheel.events import LateResponse
from rpcwheel.pending.table import REMEMBERED_CALLS, PendingEntry
from rpcwheel.timer import ManualTimer, WheelTimer

S = 10**9


@pytest.fixture
def calls(world, timer):
    with world.module.PendingCalls(timer, name="orders") as calls:
        yield calls
    world.do(lambda: None)
    assert (calls.pending, timer.pending) == (0, 0)


def test_a_key_whose_repr_raises_is_named_by_its_type(world, calls, timer, events):
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


def test_the_earlier_of_timeout_and_deadline_applies(world, calls, timer):
    with deadline_scope(60.0):
        short = world.do(calls.open, 1, timeout=2.0)
        scoped = world.do(calls.open, 2, timeout=100.0)
        unlimited = world.do(calls.open, 3, timeout=None)
    world.do(timer.advance, 2)
    assert [outcome(future) == PENDING for future in (short, scoped, unlimited)] == [0, 1, 1]
    world.do(timer.advance, 58)
    assert outcome(scoped).timeout <= 60.0
    assert outcome(unlimited).timeout <= 60.0


def test_a_call_after_the_deadline_has_ended_when_open_returns(world, calls):
    with deadline_scope(0):
        future = world.do(calls.open, 7, timeout=2.0)
    assert outcome(future).side == "client"


def test_an_infinite_deadline_is_no_limit(world, calls, timer):
    with deadline_scope(float("inf")):
        world.do(calls.open, 7, timeout=None)
    assert timer.pending == 0


def test_the_class_can_be_subscripted_with_the_response_type(world, timer):
    with world.module.PendingCalls[bytes](timer) as calls:
        assert type(calls) is world.module.PendingCalls


def test_a_key_or_connection_without_a_hash_is_refused_and_changes_nothing(world, calls, timer):
    for key, connection in (([], None), (7, [])):
        with pytest.raises(TypeError, match="unhashable"):
            world.do(calls.open, key, timeout=2.0, connection=connection)
    assert (calls.pending, calls.stats().opened, timer.pending) == (0, 0, 0)


def test_a_call_that_the_timer_refuses_leaves_no_entry(world):
    timer = WheelTimer(max_pending=1)
    calls = world.module.PendingCalls(timer)
    world.do(calls.open, 1, timeout=60.0, connection="a")
    timed_out = world.do(calls.open, 2, timeout=0)
    with pytest.raises(TooManyTimeouts):
        world.do(calls.open, 2, timeout=60.0, connection="a")
    assert (calls.pending, calls.stats().opened) == (1, 2)
    world.do(calls.received, 2, "of the first call with this key")
    assert (calls.stats().late, calls.stats().unknown) == (1, 0)
    assert isinstance(outcome(timed_out), CallTimeout)
    timer.stop()
    with pytest.raises(TimerStopped):
        world.do(calls.open, 3, timeout=60.0, connection="a")
    assert world.do(calls.lost, "a", LOST) == 1


def test_a_call_times_out_although_the_timers_executor_refuses_the_task(world):
    pool = ThreadPoolExecutor()
    pool.shutdown()
    with WheelTimer(executor=pool) as timer, world.module.PendingCalls(timer) as calls:
        future = world.do(calls.open, 1, timeout=0.001)
        assert wait_until(lambda: world.do(future.done))
        assert isinstance(outcome(future), CallTimeout)
        assert calls.pending == 0


# Memory


class Value:
    """An object with weak references."""


def test_an_answered_call_frees_its_value_and_future_before_its_timeout(world, calls):
    value = Value()
    future = world.do(calls.open, 7, timeout=1e6)
    world.do(calls.received, 7, value)
    seen = weakref.ref(value), weakref.ref(future)
    with no_garbage_collector():
        del value, future
        assert [look() for look in seen] == [None, None]


def test_the_timers_task_holds_neither_future_nor_table(world, timer, monkeypatch):
    begin, begun = timer.new_timeout, []
    monkeypatch.setattr(timer, "new_timeout", lambda *args: begun.append(begin(*args)) or begun[-1])
    calls = world.module.PendingCalls(timer)
    future = world.do(calls.open, 7, timeout=1e6)
    held = gc.get_referents(begun[0].task)
    assert calls not in held
    assert future not in held
    calls.close()
    world.do(lambda: None)


def test_a_dropped_table_warns_and_ends_its_calls(world, timer):
    calls = world.module.PendingCalls(timer)
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


def test_a_pending_future_keeps_its_table_alive(world, timer):
    future = world.do(world.module.PendingCalls(timer).open, 7, timeout=2.0)
    gc.collect()
    world.do(timer.advance, 2)
    assert isinstance(outcome(future), CallTimeout)


def test_a_key_is_remembered_for_the_last_calls_without_a_response(world, calls):
    for key in range(REMEMBERED_CALLS + 1):
        world.do(calls.open, key, timeout=0)
    for key in (0, 1):
        world.do(calls.received, key, "response")
    assert (calls.stats().unknown, calls.stats().late) == (1, 1)


# Timeouts that meet the end of their call


class Recorder(ManualTimer):
    """Notes the tasks of its timeouts."""

    def __init__(self):
        super().__init__()
        self.tasks = []

    def new_timeout(self, task, delay):
        self.tasks.append(task)
        return super().new_timeout(task, delay)


def test_an_expired_timeout_does_not_affect_a_later_call_with_the_same_key(world):
    with Recorder() as timer, world.module.PendingCalls(timer) as calls:
        world.do(calls.open, 7, timeout=2.0)
        world.do(calls.received, 7, "response")
        later = world.do(calls.open, 7, timeout=5.0)
        world.do(timer.tasks[0].run, None)
        assert outcome(later) == PENDING
        world.do(calls.received, 7, "response")


class Answering(ManualTimer):
    """Takes a timeout while the response arrives."""

    calls = None

    def new_timeout(self, task, delay):
        self.calls.received(7, "response")
        return super().new_timeout(task, delay)


def test_a_call_that_ends_while_its_timeout_is_created_leaves_no_timeout(world):
    with Answering() as timer, world.module.PendingCalls(timer) as calls:
        timer.calls = calls
        future = world.do(calls.open, 7, timeout=2.0)
        assert (outcome(future), timer.pending) == (("response",), 0)


@pytest.mark.parametrize(
    ("timeout_ns", "sent_ns", "side"),
    [
        (2 * S, None, "client"),
        (2 * S, 2 * S - 1, "server"),
        (2 * S, 2 * S, "client"),
        (2 * S, 0, "server"),
        (NEVER, 10 * S, "server"),
    ],
)
def test_the_timeout_error_names_the_client_if_the_request_was_sent_too_late(
    timeout_ns, sent_ns, side
):
    entry = PendingEntry(7, None, None, 0, timeout_ns, sent_ns)
    error = entry.timeout_error(3 * S, "orders")
    assert (error.side, error.elapsed, error.start) == (side, 3.0, 0.0)
    assert error.timeout == (2.0 if timeout_ns == 2 * S else float("inf"))
    assert error.sent == (None if sent_ns is None else sent_ns / 1e9)
    assert (error.key, error.name) == (7, "orders")
