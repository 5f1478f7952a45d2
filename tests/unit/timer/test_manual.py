"""`ManualTimer`: order of tasks, exact times, its clock."""

import threading
import time
from datetime import timedelta

import pytest

from rpcwheel.timer import HashedWheel, ManualTimer, SparseWheel, WheelTimer
from rpcwheel.timer.manual import clock_of


@pytest.fixture
def timer_of_each_queue(make_queue):
    with ManualTimer(make_queue()) as timer:
        yield timer


def test_advance_runs_due_tasks_in_order_on_the_calling_thread(timer_of_each_queue):
    timer = timer_of_each_queue
    ran = []
    for n in (3, 1, 2, 1, 0):
        timer.new_timeout(lambda t, n=n: ran.append((n, timer.now, threading.get_ident())), n)
    assert not ran
    assert (timer.advance(0), timer.now) == (1, 0)
    assert timer.advance(2.5) == 3
    assert timer.now == 2.5
    assert timer.advance(timedelta(seconds=0.5)) == 1
    me = threading.get_ident()
    assert ran == [(0, 0.0, me), (1, 1.0, me), (1, 1.0, me), (2, 2.0, me), (3, 3.0, me)]


def test_the_clock_stops_at_a_tick_while_its_tasks_run(timer_of_each_queue):
    timer = timer_of_each_queue
    ran = []

    def again(timeout):
        ran.append(timer.now)
        timer.new_timeout(again, 0.25)

    timer.new_timeout(again, 0.25)
    assert timer.advance(1.0) == 4
    assert ran == [0.25, 0.5, 0.75, 1.0]


def test_a_timeout_between_two_ticks_fires_at_the_later_one():
    for queue, delay, tick in ((HashedWheel(1.0), 0.25, 1.0), (SparseWheel(), 0.1004, 0.101)):
        with ManualTimer(queue) as timer:
            ran = []
            timer.new_timeout(lambda _, ran=ran, timer=timer: ran.append(timer.now), delay)
            assert timer.advance(0.1005) == 0
            timer.advance(5)
            assert ran == [tick]


def test_a_task_cannot_advance_its_manual_timer(timer):
    refused = []

    def task(timeout):
        with pytest.raises(RuntimeError, match="a task cannot call advance"):
            timer.advance(1)
        refused.append(True)

    timer.new_timeout(task, 0.5)
    assert timer.advance(1) == 1
    assert refused
    assert timer.now == 1
    timer.stop()
    assert timer.advance(10) == 0


def test_the_clock_of_a_manual_timer_is_exact_to_the_nanosecond(timer):
    now = clock_of(timer)
    timer.advance(0.1)
    assert now() == 100_000_000


def test_the_clock_of_other_timers_and_of_none_is_monotonic_ns():
    with WheelTimer() as timer:
        assert clock_of(timer) is time.monotonic_ns
    assert clock_of(None) is time.monotonic_ns
