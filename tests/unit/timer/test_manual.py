"""`ManualTimer`: order of tasks, exact times, invalid arguments."""

import threading
from datetime import timedelta

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.timer import HashedWheel, ManualTimer, TimerStopped


@pytest.fixture
def timer():
    with ManualTimer() as timer:
        yield timer


@pytest.fixture
def timer_of_each_queue(make_queue):
    with ManualTimer(make_queue()) as timer:
        yield timer


def test_advance_runs_due_tasks_in_order_on_the_calling_thread(timer_of_each_queue):
    timer = timer_of_each_queue
    ran = []
    for n in (3, 1, 2, 1):
        timer.new_timeout(lambda t, n=n: ran.append((n, timer.now, threading.get_ident())), n)
    assert timer.advance(2.5) == 3
    assert timer.now == 2.5
    assert timer.advance(timedelta(seconds=0.5)) == 1
    me = threading.get_ident()
    assert ran == [(1, 1.0, me), (1, 1.0, me), (2, 2.0, me), (3, 3.0, me)]


def test_the_clock_stops_at_a_tick_while_its_tasks_run(timer_of_each_queue):
    timer = timer_of_each_queue
    ran = []

    def again(timeout):
        ran.append(timer.now)
        timer.new_timeout(again, 0.25)

    timer.new_timeout(again, 0.25)
    assert timer.advance(1.0) == 4
    assert ran == [0.25, 0.5, 0.75, 1.0]


def test_a_task_does_not_run_before_the_end_of_its_tick():
    with ManualTimer(HashedWheel(tick=1.0, slots=4)) as timer:
        ran = []
        timer.new_timeout(lambda timeout: ran.append(timer.now), 0.25)
        assert timer.advance(0.75) == 0
        assert timer.advance(5.25) == 1
        assert ran == [1.0]


def test_advance_by_zero_runs_due_tasks(timer):
    ran = []
    assert timer.now == 0
    timer.new_timeout(ran.append, 0)
    timer.new_timeout(ran.append, 0.001)
    assert not ran
    assert timer.advance(0) == 1
    assert timer.now == 0


def test_advance_refuses_invalid_times(timer):
    timer.new_timeout(print, 0)
    for seconds, error, says in (
        (-1, ConfigurationError, "seconds must be finite and not negative, not -1"),
        (float("inf"), ConfigurationError, "must be finite"),
        (float("nan"), ConfigurationError, "seconds is NaN"),
        (None, TypeError, "seconds must be seconds"),
        (True, TypeError, "not True"),
    ):
        with pytest.raises(error, match=says):
            timer.advance(seconds)
        assert (timer.now, timer.pending) == (0, 1)


def test_a_task_cannot_advance_or_stop_its_manual_timer(timer):
    errors = []

    def task(timeout):
        for act in (lambda: timer.advance(1), timer.stop):
            try:
                act()
            except RuntimeError as error:
                errors.append(str(error))

    timer.new_timeout(task, 0.5)
    assert timer.advance(1) == 1
    assert "a task cannot call advance" in errors[0]
    assert "cannot stop the timer" in errors[1]
    assert not timer.stopped
    assert timer.now == 1


def test_stop_returns_pending_timeouts_and_advance_then_runs_none(timer):
    late, soon = timer.new_timeout(print, 9), timer.new_timeout(print, 1)
    assert timer.stop() == [soon, late]
    assert timer.stop() == []
    assert timer.advance(10) == 0
    with pytest.raises(TimerStopped):
        timer.new_timeout(print, 0)
