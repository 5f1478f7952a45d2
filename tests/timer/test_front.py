"""The front door: what it checks, what it remembers of delays, what it leaves when it fails."""

import random
import time
from datetime import timedelta

import pytest

from rpcwheel.durations import MAX_NS, NEVER
from rpcwheel.timer import ManualTimer, WheelTimer, sync
from rpcwheel.timer.queue import Hub


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
            passed = timeout._deadline_ns - before - int(seconds * 1e9)
            assert 0 <= passed < 10**9
        timeout.cancel()


def test_the_same_delay_on_a_manual_timer_counts_from_its_own_time():
    with ManualTimer() as timer:
        for _ in range(5):
            delay = 2.0
            assert timer.new_timeout(print, delay).deadline == timer.now + 2.0
            timer.advance(0.5)


def test_a_delay_is_rounded_to_the_nearest_nanosecond(timer):
    hub = timer._hub
    manual = Hub(hub.queue, lambda: None, True)
    for seconds, ns in ((1e-9, 1), (0.4e-9, 0), (0.6e-9, 1), (0.1, 10**8), (1.1, 1_100_000_000)):
        assert manual.deadline(seconds) == ns


def test_a_timer_whose_thread_cannot_start_keeps_no_trace_and_may_try_again(monkeypatch, timer):
    class NoThread:
        def __init__(self, **options) -> None:
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(sync.threading, "Thread", NoThread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            timer.new_timeout(print, 60.0)
    assert timer.pending == 0
    timeout = timer.new_timeout(print, 60.0)
    assert timer._thread.is_alive()
    assert timer.stop() == [timeout]


def test_a_handle_tells_what_became_of_it(timer):
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


def test_a_handle_of_a_task_that_runs_or_ran_is_expired():
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


def test_putting_off_is_one_write_and_pulling_forward_a_move(make_queue):
    queue = make_queue()
    with ManualTimer(queue) as timer:
        timeout = timer.new_timeout(print, 1.0)
        for later in (2.0, 3.0, 60.0, float("inf")):
            timeout.reschedule(later)
        assert queue._refiled == 0
        timeout.reschedule(0.5)
        assert queue._refiled == 1
        assert timeout.deadline == 0.5
        queue.check()
