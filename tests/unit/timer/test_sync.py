"""`WheelTimer`: times of tasks, wake-ups, stop, invalid arguments; `shared_timer`."""

import gc
import sys
import threading
import weakref

import pytest

from fixtures.forks import holds_in_child
from fixtures.programs import run_program
from fixtures.timers import QUEUES, inherit_contexts, nothing
from fixtures.waiting import WAIT_S, Gate, in_thread, wait_until
from rpcwheel.call.deadline import current_deadline, deadline_scope
from rpcwheel.timer import (
    TooManyTimeouts,
    WheelTimer,
    shared_timer,
)

INF = float("inf")


def test_a_timeout_with_an_infinite_delay_is_pending_and_starts_no_thread():
    with WheelTimer(name="rpcwheel-never") as timer:
        timeout = timer.new_timeout(nothing, INF)
        assert timer.pending == 1
        assert timeout.deadline == INF
        assert timer._thread is None
        assert timeout.cancel()
        assert timer.pending == 0


def test_stop_waits_for_the_running_task_after_the_process_was_suspended(monkeypatch):
    """Then a join may time out at once, before the task had any time to run."""
    timer, gate, ended = WheelTimer(), Gate(), []

    def task(timeout):
        gate()
        ended.append(True)

    timer.new_timeout(task, 0)
    assert gate.entered.wait(WAIT_S)
    join, joins = timer._thread.join, []

    def join_after_a_standstill(seconds):
        joins.append(seconds)
        if len(joins) > 1:
            gate.opened.set()
            join(WAIT_S)

    monkeypatch.setattr(timer._thread, "join", join_after_a_standstill)
    timer.stop()
    assert ended


def test_stop_does_not_wait_for_due_tasks_that_have_not_begun():
    timer, gate = WheelTimer(), Gate()
    timer.new_timeout(gate, 0)
    assert gate.entered.wait(WAIT_S)
    due = [timer.new_timeout(nothing, 0) for _ in range(100)]
    stopping = in_thread(timer.stop)
    assert wait_until(lambda: timer.stopped)
    gate.opened.set()
    assert stopping.result(WAIT_S) == due


def test_the_end_of_a_with_statement_stops_the_timer_and_its_thread():
    with WheelTimer(name="rpcwheel-mine") as timer:
        assert timer._thread is None
        timer.new_timeout(nothing, 60.0)
        (thread,) = [t for t in threading.enumerate() if t.name == "rpcwheel-mine"]
        assert thread.daemon
    assert timer.stopped
    assert not thread.is_alive()


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


def test_the_shared_timer_continues_after_a_with_statement_that_raises():
    ran = threading.Event()
    with pytest.raises(RuntimeError, match="cannot be stopped"), shared_timer() as timer:
        pass
    timer.new_timeout(lambda timeout: ran.set(), 0)
    assert ran.wait(WAIT_S)


def test_a_process_with_pending_timeouts_in_the_shared_timer_exits_without_warnings():
    script = "import rpcwheel; rpcwheel.shared_timer().new_timeout(print, 3600.0)"
    assert run_program(script) == ("", "")


@pytest.mark.parametrize("make_queue", QUEUES.values(), ids=QUEUES)
def test_the_timer_of_a_forked_child_begins_with_counts_of_0(make_queue):
    with WheelTimer(make_queue(), max_pending=3, on_error=lambda *_: None) as timer:
        new = timer.stats()
        timer.new_timeout(lambda _: 1 / 0, 0.001)
        wait_until(lambda: timer.stats().failed and timer.stats().slowest_task)
        for _ in range(3):
            timer.new_timeout(nothing, 3600.0)
        with pytest.raises(TooManyTimeouts):
            timer.new_timeout(nothing, 3600.0)

        def begins_anew():
            assert timer.stats() == new
            for _ in range(3):
                timer.new_timeout(nothing, 3600.0)
            with pytest.raises(TooManyTimeouts):
                timer.new_timeout(nothing, 3600.0)
            stats = timer.stats()
            return (stats.started, stats.pending, stats.cancelled) == (3, 3, 0)

        assert holds_in_child(begins_anew)
        assert timer.stats().fired == 1


def test_tasks_have_an_empty_context_although_the_thread_of_the_timer_may_inherit_one(monkeypatch):
    inherit_contexts(monkeypatch)
    deadlines, ran = [], threading.Event()

    def task(timeout):
        deadlines.append(current_deadline())
        ran.set()

    with WheelTimer() as timer:
        with deadline_scope(60.0):
            timer.new_timeout(task, 0)  # starts the thread
        assert ran.wait(WAIT_S)
    assert deadlines == [None]
