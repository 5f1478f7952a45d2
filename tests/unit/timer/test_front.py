"""`new_timeout`: conversion of delays, reuse of slots, errors; states of timeouts."""

import functools
import random
import time
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.timers import QUEUES, no_new_threads
from rpcwheel.durations import MAX_NS, NEVER
from rpcwheel.timer import ManualTimer, TooManyTimeouts, WheelTimer
from rpcwheel.timer.queue import TimerState


@pytest.fixture
def timer():
    with WheelTimer() as timer:
        yield timer


def test_equal_and_alternating_delays_give_their_own_deadlines(timer):
    one, other, third = 5.0, timedelta(seconds=7), 11
    dice = random.Random(1)
    for _ in range(300):
        delay = dice.choice([one, other, third, 0, 0.25, 1e12, float("inf")])
        before = time.monotonic_ns()
        timeout = timer.new_timeout(print, delay)
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        if seconds == float("inf"):
            assert timeout._deadline_ns == NEVER
        elif seconds == 1e12:
            assert timeout._deadline_ns == MAX_NS
        else:
            delay_ns = int(seconds * 1e9)
            assert before + delay_ns <= timeout._deadline_ns <= time.monotonic_ns() + delay_ns
        timeout.cancel()


def test_a_repeated_delay_on_a_manual_timer_begins_at_its_present_time():
    with ManualTimer() as timer:
        for _ in range(5):
            delay = 2.0
            assert timer.new_timeout(print, delay).deadline == timer.now + 2.0
            timer.advance(0.5)


def test_a_delay_is_rounded_to_the_nearest_nanosecond(timer):
    state = timer._timer_state
    manual = TimerState(state.queue, lambda: None, True)
    for seconds, ns in ((1e-9, 1), (0.4e-9, 0), (0.6e-9, 1), (0.1, 10**8), (1.1, 1_100_000_000)):
        assert manual.deadline(seconds) == ns


def test_new_timeout_can_be_repeated_if_the_thread_could_not_start(timer):
    with no_new_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        timer.new_timeout(print, 60.0)
    assert timer.pending == 0
    timeout = timer.new_timeout(print, 60.0)
    assert timer._thread.is_alive()
    assert timer.stop() == [timeout]


def test_a_timeout_is_pending_expired_or_cancelled(timer):
    timeout = timer.new_timeout(print, 60.0)
    assert timeout.timer is timer
    assert timeout.task is print
    assert (timeout.cancelled(), timeout.expired()) == (False, False)
    assert "pending" in repr(timeout)
    assert timeout.cancel()
    assert not timeout.cancel()
    assert (timeout.cancelled(), timeout.expired(), timeout.task) == (True, False, None)
    assert "cancelled" in repr(timeout)
    assert timer.stats().cancelled == 1


def test_a_timeout_is_expired_while_its_task_runs_and_afterwards():
    with ManualTimer() as timer:
        seen = []
        timeout = timer.new_timeout(
            lambda t: seen.append((t.expired(), t.cancel(), t.reschedule(1), t.task)), 1
        )
        timer.advance(1)
        assert seen[0][:3] == (True, False, False)
        assert seen[0][3] is not None
        assert timeout.task is None
        assert timeout.expired()
        assert not timeout.cancelled()
        assert not timeout.cancel()
        assert timer.stats().cancelled == 0


def test_reschedule_moves_a_timeout_only_if_it_is_earlier(make_queue):
    queue = make_queue()
    with ManualTimer(queue) as timer:
        timeout = timer.new_timeout(print, 1.0)
        moves = queue._moved
        for later in (2.0, 3.0, 60.0, float("inf")):
            timeout.reschedule(later)
        assert queue._moved == moves
        timeout.reschedule(0.5)
        assert queue._moved == moves + 1
        assert timeout.deadline == 0.5
        queue.check()


def test_the_slot_of_the_last_timeout_is_not_reused_after_it_was_removed(make_queue):
    with ManualTimer(make_queue()) as timer:
        timer.new_timeout(print, 0.1).cancel()
        timer.advance(0)
        timer.new_timeout(str, 0.1)
        timer._timer_state.queue.check()
        assert timer.advance(0.1) == 1


def test_the_slot_of_the_last_timeout_is_not_reused_beyond_the_limit(make_queue):
    with ManualTimer(make_queue()) as timer:
        timer._timer_state.queue.limit(2)
        timer._max_pending = 2
        first, _ = (timer.new_timeout(print, 0.1) for _ in range(2))
        with pytest.raises(TooManyTimeouts):
            timer.new_timeout(print, 0.1)
        assert first.cancel()
        timer.new_timeout(print, 0.1)
        with pytest.raises(TooManyTimeouts):
            timer.new_timeout(print, 0.1)


DELAYS = [0, 1, 1, 2, 7, 8, 9, 63, 64, 65, 500, 4096, float("inf"), -3]  # in ms
steps = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(DELAYS)),
    st.tuples(st.just("start"), st.sampled_from(DELAYS[:4])),  # repeated delays
    st.tuples(st.just("cancel"), st.integers(0, 60)),
    st.tuples(st.just("put"), st.tuples(st.integers(0, 60), st.sampled_from(DELAYS))),
    st.tuples(st.just("advance"), st.sampled_from([0, 1, 1, 3, 64, 1000])),
)


@given(script=st.lists(steps, max_size=60))
@settings(max_examples=100)
def test_all_queues_fire_the_same_timeouts_at_the_same_times(script):
    results = []
    for make in QUEUES.values():
        queue, fired, started = make(), set(), []
        with ManualTimer(queue) as timer:

            def note(timeout, n, fired=fired, timer=timer):
                fired.add((n, round(timer.now * 1000)))

            for step, value in script:
                if step == "start":
                    task = functools.partial(note, n=len(started))
                    started.append(timer.new_timeout(task, value / 1000))
                elif step == "advance":
                    timer.advance(value / 1000)
                elif started and step == "cancel":
                    started[value % len(started)].cancel()
                elif started:
                    started[value[0] % len(started)].reschedule(value[1] / 1000)
                queue.check()
            timer.advance(10)
            results.append((fired, timer.pending, timer.stats().cancelled))
    assert all(result == results[-1] for result in results)
