"""`WheelTimer`: times of tasks, wake-ups, stop, invalid arguments; `shared_timer`."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.timer import (
    TimerStopped,
    TimerTask,
    TooManyTimeouts,
    WheelTimer,
    shared_timer,
)

INF = float("inf")


@pytest.fixture
def timer():
    with WheelTimer() as timer:
        yield timer


def nothing(timeout):
    """Do nothing."""


def test_a_task_runs_once_and_never_early():
    ran = []
    with WheelTimer() as timer:
        for n in range(200):
            timer.new_timeout(lambda timeout: ran.append((timeout, time.monotonic_ns())), n * 3e-4)
        assert wait_until(lambda: timer.pending == 0)
    assert len(ran) == len({id(timeout) for timeout, _ in ran}) == 200
    assert [t for t, at_ns in ran if at_ns < t._deadline_ns] == []


def test_tasks_run_in_the_order_of_their_ticks_and_first_in_first_out(make_queue):
    ran, queue = [], make_queue()
    with WheelTimer(queue) as timer:
        begun, go = threading.Event(), threading.Event()
        timer.new_timeout(lambda _: begun.set() or go.wait(WAIT_S), 0.0)
        assert begun.wait(WAIT_S)  # no task runs while others are started
        delays = (0.09, 0.03, 0.06, *[0.12] * 200, 0.05)
        started = [timer.new_timeout(ran.append, delay) for delay in delays]
        go.set()
        assert wait_until(lambda: len(ran) == len(started))
    tick_ns = queue._tick_ns
    order = sorted(range(len(started)), key=lambda n: (-(-started[n]._deadline_ns // tick_ns), n))
    assert ran == [started[n] for n in order]


def test_a_delay_of_zero_or_less_runs_soon_but_not_in_new_timeout(timer):
    threads = []
    delays = [0, 0.0, -1, -0.5, -INF, timedelta(0), timedelta(days=-3)]
    started = [
        timer.new_timeout(lambda _: threads.append(threading.current_thread()), delay)
        for delay in delays
    ]
    assert wait_until(lambda: len(threads) == len(delays))
    assert threading.current_thread() not in threads
    assert all(timeout.deadline <= time.monotonic() for timeout in started)


def test_a_timeout_with_an_infinite_delay_is_pending_and_starts_no_thread():
    with WheelTimer(name="rpcwheel-never") as timer:
        timeout = timer.new_timeout(nothing, INF)
        assert timer.pending == 1
        assert timeout.deadline == INF
        assert timer._thread is None
        assert timeout.cancel()
        assert timer.pending == 0


def test_invalid_arguments_of_new_timeout_are_refused_and_not_counted(timer):
    timer.new_timeout(nothing, 1).cancel()  # 1 == True: the delay converted last must not be used
    timeout = timer.new_timeout(nothing, 60)
    before = timeout.deadline
    for delay, error, says in (
        (float("nan"), ConfigurationError, "delay is NaN; give seconds, or float.'inf'. for never"),
        (None, TypeError, "delay must be seconds .int or float. or a timedelta, not None"),
        ("1", TypeError, "delay must be seconds .* not '1'"),
        (True, TypeError, "delay must be seconds .* not True"),
    ):
        with pytest.raises(error, match=says):
            timer.new_timeout(nothing, delay)
        with pytest.raises(error, match=says):
            timeout.reschedule(delay)
    for task in (None, 3, "run", object()):
        with pytest.raises(TypeError, match=r"callable as task\(timeout\), or have run\(timeout\)"):
            timer.new_timeout(task, 1.0)
    assert timeout.deadline == before
    stats = timer.stats()
    assert (stats.started, stats.rejected) == (2, 0)


def test_an_object_with_run_is_a_task(timer):
    class Task:
        def __init__(self) -> None:
            self.ran = threading.Event()

        def run(self, timeout) -> None:
            self.seen = timeout, timeout.task, timer.pending
            self.ran.set()

    task = Task()
    assert isinstance(task, TimerTask)
    timeout = timer.new_timeout(task, 0)
    assert task.ran.wait(WAIT_S)
    assert task.seen == (timeout, task, 0)


def test_new_timeout_beyond_max_pending_raises_and_is_counted_as_rejected():
    with WheelTimer(max_pending=2) as timer:
        first = timer.new_timeout(nothing, 60.0)
        timer.new_timeout(nothing, 60.0)
        task = type("Task", (), {"__call__": nothing})()
        gone = weakref.ref(task)
        with pytest.raises(TooManyTimeouts, match=r"2 pending timeouts \(max_pending\); cancel"):
            timer.new_timeout(task, 0.001)
        del task
        assert gone() is None
        stats = timer.stats()
        assert (stats.pending, stats.started, stats.rejected, stats.cancelled) == (2, 2, 1, 0)
        assert first.cancel()
        timer.new_timeout(nothing, 60.0)
        with pytest.raises(TooManyTimeouts):
            timer.new_timeout(nothing, 60.0)


def test_a_running_task_does_not_count_for_max_pending():
    with WheelTimer(max_pending=1) as timer:
        followed = threading.Event()

        def task(timeout):
            assert timer.pending == 0
            timer.new_timeout(lambda timeout: followed.set(), 0.0)

        timer.new_timeout(task, 0.001)
        assert followed.wait(WAIT_S)
    assert timer.stats().failed == 0


def test_stop_returns_pending_timeouts_by_deadline_cancelled_with_tasks(make_queue):
    timer = WheelTimer(make_queue())
    delays = [70.0, 61.0, INF, 3600.0, 62.0, 1e9]
    started = {delay: timer.new_timeout(nothing, delay) for delay in delays}
    cancelled = timer.new_timeout(nothing, 65.0)
    cancelled.cancel()
    assert timer.stop() == [started[delay] for delay in sorted(delays)]
    for timeout in started.values():
        assert timeout.cancelled()
        assert not timeout.expired()
        assert timeout.task is nothing
        assert not timeout.cancel()
        assert not timeout.reschedule(1.0)
    assert timer.stop() == []
    assert timer.stopped
    assert timer.pending == 0


def test_new_timeout_on_a_stopped_timer_raises_timer_stopped():
    timer = WheelTimer()
    timer.stop()
    assert timer.stop() == []
    for delay in (0, 1.0, INF):
        with pytest.raises(TimerStopped, match="was stopped; make a new timer, or use shared_t"):
            timer.new_timeout(nothing, delay)
    assert timer.stats().started == timer.pending == 0


def test_stop_waits_for_the_running_task_after_the_process_was_suspended(monkeypatch):
    """Then a join may time out at once, before the task had any time to run."""
    timer, began, go, ended = WheelTimer(), threading.Event(), threading.Event(), []

    def task(timeout):
        began.set()
        go.wait(WAIT_S)
        ended.append(True)

    timer.new_timeout(task, 0)
    assert began.wait(WAIT_S)
    join, joins = timer._thread.join, []

    def join_after_a_standstill(seconds):
        joins.append(seconds)
        if len(joins) > 1:
            go.set()
            join(WAIT_S)

    monkeypatch.setattr(timer._thread, "join", join_after_a_standstill)
    timer.stop()
    assert ended


def test_stop_does_not_wait_for_due_tasks_that_have_not_begun():
    timer, began, go = WheelTimer(), threading.Event(), threading.Event()

    def hold(timeout):
        began.set()
        go.wait(WAIT_S)

    timer.new_timeout(hold, 0)
    assert began.wait(WAIT_S)
    due = [timer.new_timeout(nothing, 0) for _ in range(100)]
    stopper = threading.Thread(target=lambda: returned.extend(timer.stop()))
    returned = []
    stopper.start()
    assert wait_until(lambda: timer.stopped)
    go.set()
    stopper.join()
    assert returned == due


def test_a_task_cannot_stop_its_timer_but_a_thread_that_it_starts_can(timer):
    done, seen = threading.Event(), []

    def task(timeout):
        try:
            timer.stop()
        except RuntimeError as error:
            seen.append(str(error))
        seen.append(timer.stopped)
        stopper = threading.Thread(target=lambda: (timer.stop(), done.set()))
        stopper.start()

    timer.new_timeout(task, 0)
    assert done.wait(WAIT_S)
    assert "cannot stop the timer that runs it; use another thread" in seen[0]
    assert seen[1] is False
    assert timer.stopped


def test_the_end_of_a_with_statement_stops_the_timer_and_its_thread():
    with WheelTimer(name="rpcwheel-mine") as timer:
        assert timer._thread is None
        timer.new_timeout(nothing, 60.0)
        (thread,) = [t for t in threading.enumerate() if t.name == "rpcwheel-mine"]
        assert thread.daemon
    assert timer.stopped
    assert not thread.is_alive()


def test_an_idle_timer_sleeps_until_its_first_deadline():
    """A suspended process adds no wake-ups; a thread that polls has many."""
    with WheelTimer() as timer:
        far = [timer.new_timeout(nothing, 3600.0 + n / 7) for n in range(1000)]
        passed = threading.Event()
        timer.new_timeout(lambda timeout: passed.set(), 0.2)
        assert passed.wait(WAIT_S)
        assert timer.stats().wakeups <= 8
        assert len(far) == timer.pending


def test_timeouts_that_are_started_and_cancelled_cause_few_wake_ups():
    with WheelTimer() as timer:
        for _ in range(20_000):
            assert timer.new_timeout(nothing, 60.0).cancel()
        # If the thread wakes up between a cancel and the next start, it finds nothing, and is woken
        # up again. That happens at most once in each interval between switches of threads.
        assert timer.stats().wakeups <= 200
        assert timer.pending == 0


def test_only_an_earlier_timeout_wakes_the_thread():
    with WheelTimer() as timer:
        timer.new_timeout(nothing, 3600.0)
        for n in range(50):
            assert wait_until(
                lambda: timer._timer_state.armed_ns
            )  # the thread sleeps, or is about to
            timer.new_timeout(nothing, 3601.0 + n)
        before = timer.stats().wakeups
        assert before <= 4
        timer.new_timeout(nothing, 1800.0)
        assert wait_until(lambda: timer.stats().wakeups > before)


def put_off(timer, task, delay):
    """Make a timeout that was rescheduled before it was due, also if this thread is slow."""
    while True:
        timeout = timer.new_timeout(task, 0.02)
        if timeout.reschedule(delay):
            return timeout


def test_a_timeout_rescheduled_later_fires_once_at_its_new_deadline():
    with WheelTimer() as timer:
        fired = []
        timeout = put_off(timer, lambda timeout: fired.append((timeout, time.monotonic())), 0.06)
        due = timeout.deadline
        assert wait_until(timeout.expired)
        assert not timeout.reschedule(0.001)
        assert wait_until(lambda: timer.pending == 0)
    ((at, _),) = [(at, each) for each, at in fired if each is timeout]
    assert at >= due


def test_a_timer_collected_with_pending_timeouts_warns_and_ends_its_thread():
    timer = WheelTimer(name="rpcwheel-dropped")
    task = type("Task", (), {"__call__": nothing})()
    gone = weakref.ref(timer), weakref.ref(task)
    timeout = timer.new_timeout(task, 3600.0)
    assert timeout.timer is timer
    del task
    with pytest.warns(ResourceWarning, match="1 pending> was not stopped; call s") as warned:  # noqa: PT031
        del timer
        assert wait_until(
            lambda got=warned.list: got
        )  # by the timer's thread, if it had the last reference
    assert timeout.cancelled()
    del warned
    assert wait_until(lambda: "rpcwheel-dropped" not in [t.name for t in threading.enumerate()])
    assert wait_until(lambda: gone[0]() is None)
    assert timeout.timer is None
    del timeout
    gc.collect()
    assert gone[1]() is None


def test_the_thread_of_a_collected_timer_ends_if_the_warning_raises(monkeypatch):
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: raised.append(args.exc_type))
    timer = WheelTimer(name="rpcwheel-dropped")
    timeout = timer.new_timeout(nothing, 3600.0)
    del timer
    assert wait_until(lambda: raised == [ResourceWarning])
    assert timeout.cancelled()
    assert wait_until(lambda: "rpcwheel-dropped" not in [t.name for t in threading.enumerate()])


def test_a_timer_collected_stopped_or_without_pending_timeouts_does_not_warn():
    timer = WheelTimer()
    timer.new_timeout(nothing, 60.0)
    timer.stop()
    gone = [weakref.ref(timer)]
    timer = WheelTimer(name="rpcwheel-dropped")
    timer.new_timeout(nothing, 60.0).cancel()
    gone.append(weakref.ref(timer))
    del timer
    assert wait_until(lambda: [ref() for ref in gone] == [None, None])
    assert wait_until(lambda: "rpcwheel-dropped" not in [t.name for t in threading.enumerate()])


def test_the_shared_timer_is_one_object_and_cannot_be_stopped():
    timer = shared_timer()
    timeout = timer.new_timeout(nothing, 60.0)
    with pytest.raises(RuntimeError, match=r"used by the whole process.*use a WheelTimer\(\)"):
        timer.stop()
    assert not timer.stopped
    assert timeout.cancel()
    assert shared_timer() is timer


def test_the_shared_timer_continues_after_a_with_statement_that_raises():
    ran = threading.Event()
    with pytest.raises(RuntimeError, match="cannot be stopped"), shared_timer() as timer:
        pass
    timer.new_timeout(lambda timeout: ran.set(), 0)
    assert ran.wait(WAIT_S)


def test_a_process_with_pending_timeouts_in_the_shared_timer_exits_without_warnings():
    script = "import rpcwheel; rpcwheel.shared_timer().new_timeout(print, 3600.0)"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=dict(os.environ, PYTHONPATH=":".join(sys.path)),
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
