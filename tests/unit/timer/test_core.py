"""What all timers do: times of tasks, wake-ups, stop, errors, executors, stats, limits."""

import asyncio
import functools
import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from datetime import timedelta
from unittest.mock import Mock

import pytest

from fixtures.timers import RefusingExecutor, nothing, run_threads
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.events.events import ExecutorRejected, TaskFailed, TaskSlow, TooManyTimers
from rpcwheel.telemetry import components
from rpcwheel.timer import (
    AsyncWheelTimer,
    HashedWheel,
    ManualTimer,
    PeriodicTask,
    TimerStopped,
    TimerTask,
    TooManyTimeouts,
    WheelTimer,
    core,
)
from rpcwheel.timer.api import LATENESS_BOUNDS_S, Lateness

INF = float("inf")


def test_a_timer_whose_constructor_is_interrupted_is_collected_without_an_error(
    make_timer, monkeypatch
):
    class Interrupted(HashedWheel):
        def advance(self, now_ns):
            raise LookupError  # as a signal may raise KeyboardInterrupt anywhere

    errors = []
    monkeypatch.setattr("sys.unraisablehook", errors.append)
    with pytest.raises(LookupError):
        make_timer(Interrupted(tick=0.001, slots=8))
    gc.collect()
    assert errors == []


def test_each_task_runs_once_and_never_early(make_timer):
    timer, wait = make_timer()
    ran = []
    now = timer._timer_state.now
    for n in range(100):
        timeout = timer.new_timeout(lambda timeout: ran.append((timeout, now())), n * 3e-4)
        if n % 4 == 3:
            timeout.reschedule(0.04)  # later, unless it has run
    assert wait(lambda: timer.pending == 0)
    assert len(ran) == len({id(timeout) for timeout, _ in ran}) == 100
    assert [t for t, at_ns in ran if at_ns < t._deadline_ns] == []


def test_tasks_run_on_one_thread_by_their_ticks_and_first_in_first_out(make_timer, make_queue):
    ran, queue, threads = [], make_queue(), set()
    timer, wait = make_timer(queue)
    gate = Gate()

    def task(timeout):
        ran.append(timeout)
        threads.add(threading.current_thread())

    if make_timer.driver is not ManualTimer:  # no task runs while others are started
        timer.new_timeout(gate, 0.0)
        assert gate.entered.wait(WAIT_S)
    delays = (0.09, 0.03, 0.06, *[0.12] * 200, 0.05)
    started = [timer.new_timeout(task, delay) for delay in delays]
    gate.opened.set()
    assert wait(lambda: len(ran) == len(started))
    tick_ns = queue._tick_ns
    order = sorted(range(len(started)), key=lambda n: (-(-started[n]._deadline_ns // tick_ns), n))
    assert ran == [started[n] for n in order]
    assert len(threads) == 1
    assert (threading.current_thread() in threads) == (make_timer.driver is ManualTimer)


def test_a_delay_of_zero_or_less_runs_soon_but_not_in_new_timeout(make_timer):
    timer, wait = make_timer()
    ran, here, inside = [], threading.current_thread(), [True]
    delays = [0, 0.0, -1, -0.5, -INF, timedelta(0), timedelta(days=-3)]

    def task(timeout):
        ran.append(inside[0] and threading.current_thread() is here)

    started = [timer.new_timeout(task, delay) for delay in delays]
    inside[0] = False
    assert wait(lambda: len(ran) == len(delays))
    assert not any(ran)
    assert all(timeout._deadline_ns <= timer._timer_state.now() for timeout in started)


def test_an_object_with_run_is_a_task(make_timer):
    timer, wait = make_timer()

    class Task:
        seen = None

        def run(self, timeout) -> None:
            self.seen = timeout, timeout.task, timer.pending

    task = Task()
    assert isinstance(task, TimerTask)
    timeout = timer.new_timeout(task, 0)
    assert wait(lambda: task.seen)
    assert task.seen == (timeout, task, 0)


def test_new_timeout_beyond_max_pending_raises_and_is_counted_as_rejected(make_timer):
    timer, _ = make_timer(max_pending=2)
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
    with pytest.raises(FrozenInstanceError):
        stats.pending = 0
    assert first.cancel()
    assert stats.pending == 2
    timer.new_timeout(nothing, 60.0)
    with pytest.raises(TooManyTimeouts):
        timer.new_timeout(nothing, 60.0)


def test_a_running_task_does_not_count_for_max_pending(make_timer):
    timer, wait = make_timer(max_pending=1)
    followed = []

    def task(timeout):
        assert timer.pending == 0
        timer.new_timeout(followed.append, 0.0)

    timer.new_timeout(task, 0.001)
    assert wait(lambda: followed)
    assert timer.stats().failed == 0


def test_stop_returns_pending_timeouts_by_deadline_cancelled_with_tasks(make_timer, make_queue):
    timer, _ = make_timer(make_queue())
    delays = [70.0, 61.0, INF, 3600.0, 62.0, 1e9]
    started = {delay: timer.new_timeout(nothing, delay) for delay in delays}
    timer.new_timeout(nothing, 65.0).cancel()
    assert timer.stop() == [started[delay] for delay in sorted(delays)]
    for timeout in started.values():
        assert timeout.cancelled()
        assert not timeout.expired()
        assert timeout.task is nothing
        assert not timeout.cancel()
        assert timeout.task is None
        assert not timeout.cancel()
        assert not timeout.reschedule(1.0)
    assert timer.stop() == []
    assert timer.stopped
    assert timer.pending == 0
    for delay in (0, 1.0, INF):
        with pytest.raises(TimerStopped, match="was stopped; make a new timer, or use shared_t"):
            timer.new_timeout(nothing, delay)
    assert timer.stats().started == len(delays) + 1


def test_an_idle_timer_sleeps_until_its_first_deadline(make_timer):
    """A suspended process adds no wake-ups; a timer that polls has many."""
    timer, wait = make_timer()
    far = [timer.new_timeout(nothing, 3600.0 + n / 7) for n in range(1000)]
    passed = []
    timer.new_timeout(passed.append, 0.2)
    assert wait(lambda: passed)
    assert timer.stats().wakeups <= 8
    assert len(far) == timer.pending


def test_timeouts_that_are_started_and_cancelled_cause_few_wake_ups(make_timer):
    timer, _ = make_timer()
    for _ in range(20_000):
        assert timer.new_timeout(nothing, 60.0).cancel()
    # If the thread wakes up between a cancel and the next start, it finds nothing, and is woken up
    # again. That happens at most once in each interval between switches of threads.
    assert timer.stats().wakeups <= 200
    assert timer.pending == 0


def test_a_task_cannot_stop_its_timer_but_another_thread_can(make_timer):
    timer, wait = make_timer()
    seen, stopped = [], []

    def task(timeout):
        try:
            timer.stop()
        except RuntimeError as error:
            seen.append((str(error), timer.stopped))

    def stopper(timeout):
        threading.Thread(target=lambda: stopped.append(timer.stop())).start()

    timer.new_timeout(task, 0)
    later = timer.new_timeout(nothing, 60.0)
    assert wait(lambda: seen)
    ((said, was_stopped),) = seen
    assert "cannot stop the timer that runs it; use another thread" in said
    assert not was_stopped
    if make_timer.driver is not ManualTimer:
        timer.new_timeout(stopper, 0)
        assert wait(lambda: stopped == [[later]])
        assert timer.stopped


def boom(timeout):
    raise ValueError("boom")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_keyboard_interrupt_and_system_exit_of_a_task_are_raised_on_a_users_thread(error):
    seen, ran = [], []
    timer = ManualTimer()
    timer._on_error = lambda *args: seen.append(args)
    failing = timer.new_timeout(Mock(side_effect=error), 1.0)
    timer.new_timeout(ran.append, 1.0)
    with pytest.raises(type(error)):
        timer.advance(1.0)
    assert seen == [(failing, error)]
    assert failing.task is None
    timer.advance(0)
    assert len(ran) == 1
    timer.stop()


def test_tasks_after_one_that_raises_are_run(make_timer):
    errors = [ValueError("boom"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()]
    if make_timer.driver is AsyncWheelTimer:
        del errors[2:]  # these end the loop
    elif make_timer.driver is ManualTimer:
        del errors[1:]  # raised on the user's thread, as in the test above
    seen, ran = [], []
    timer, pass_time = make_timer(on_error=lambda *args: seen.append(args))
    failing = [timer.new_timeout(Mock(side_effect=error), 0.001) for error in errors]
    timer.new_timeout(ran.append, 0.001)
    timer.new_timeout(ran.append, 0.02)
    assert pass_time(lambda: len(ran) == 2)
    assert sorted(map(id, failing)) == sorted(id(timeout) for timeout, _ in seen)
    assert {error for _, error in seen} == set(errors)
    assert timer.stats().failed == len(errors)
    assert all(timeout.task is None for timeout in failing)


def test_without_on_error_an_exception_of_a_task_is_an_event(events, make_timer):
    timer, pass_time = make_timer()
    timer.new_timeout(boom, 0)
    assert pass_time(lambda: events.of(TaskFailed))
    (event,) = events.of(TaskFailed)
    assert (event.timer, str(event.error)) == (timer.name, "boom")
    assert event.task.endswith("test_core.boom")


@pytest.mark.parametrize("second", [ZeroDivisionError(), SystemExit(4)])
def test_an_exception_of_on_error_is_an_event(events, make_timer, second):
    timer, pass_time = make_timer(on_error=Mock(side_effect=second))
    ran = []
    timer.new_timeout(boom, 0)
    timer.new_timeout(ran.append, 0.02)
    assert pass_time(lambda: ran)
    assert [event.error for event in events.of(TaskFailed)] == [second]


def test_a_coroutine_function_on_a_wheel_timer_is_reported_as_a_type_error():
    seen = []

    async def task(_):
        """Not called."""

    with warnings.catch_warnings(), WheelTimer(on_error=lambda *args: seen.append(args)) as timer:
        warnings.simplefilter("error")
        timer.new_timeout(task, 0)
        assert wait_until(lambda: seen)
        gc.collect()
    (_, error) = seen[0]
    assert isinstance(error, TypeError)
    assert "is a coroutine function; use an AsyncWheelTimer" in str(error)


def test_tasks_run_on_the_executor_where_they_may_block_and_fail():
    seen, gate, threads = [], threading.Event(), []
    with (
        ThreadPoolExecutor(1, "worker") as executor,
        WheelTimer(executor=executor, on_error=lambda *args: seen.append(args)) as timer,
    ):
        timer.new_timeout(lambda timeout: gate.wait(WAIT_S), 0)
        failing = timer.new_timeout(boom, 0.001)
        timer.new_timeout(lambda timeout: threads.append(threading.current_thread().name), 0.002)
        assert wait_until(lambda: timer.stats().fired == 3)
        gate.set()
        assert wait_until(lambda: threads)
        assert threads[0].startswith("worker")
        assert [timeout for timeout, _ in seen] == [failing]
        assert failing.task is None
        assert timer.stats().failed == 1


@pytest.mark.parametrize("error", [OSError("full"), SystemExit(3)], ids=repr)
def test_a_task_rejected_by_the_executor_is_an_event_and_the_timer_continues(events, error):
    with WheelTimer(executor=RefusingExecutor(error)) as timer:
        timer.new_timeout(boom, 0)
        timer.new_timeout(boom, 0.01)
        assert wait_until(lambda: timer.stats().refused == 2)
        assert wait_until(lambda: len(events.of(ExecutorRejected)) == 2)
        assert events.of(ExecutorRejected)[0].error is error
        assert timer.stats().fired == 2


def test_a_periodic_task_continues_after_the_executor_rejected_a_run(events):
    with WheelTimer(executor=RefusingExecutor(RuntimeError("full"))) as timer:
        task = PeriodicTask(timer, 0.002, print).start()
        assert wait_until(lambda: timer.stats().refused >= 3)
        assert task.cancel()


@pytest.mark.parametrize("raised", [ValueError("boom"), SystemExit(3)], ids=repr)
def test_an_exception_of_a_refused_method_is_reported(events, raised):
    class Task:
        def run(self, timeout):
            """Not called."""

        def refused(self, timeout, error):
            raise raised

    with WheelTimer(executor=RefusingExecutor(RuntimeError("full"))) as timer:
        timer.new_timeout(Task(), 0)
        timer.new_timeout(Task(), 0.01)
        assert wait_until(lambda: len(events.of(TaskFailed)) == 2)
        assert timer.stats().refused == timer.stats().failed == 2


def test_stop_calls_timer_stopped_of_pending_tasks_and_reports_its_exceptions(events):
    notified = []

    class Task:
        def run(self, timeout):
            """Not called."""

        def timer_stopped(self, timeout):
            notified.append(timeout)
            raise ValueError("boom")

    timer = ManualTimer()
    timer.new_timeout(Task(), 1.0).cancel()
    waiting = [timer.new_timeout(Task(), delay) for delay in (2.0, 3.0)]
    timer.new_timeout(print, 4.0)
    assert timer.stop()[:2] == waiting
    assert notified == waiting
    assert len(events.of(TaskFailed)) == 2
    assert timer.stop() == []
    assert notified == waiting


def test_stats_count_tasks_and_put_their_lateness_into_buckets(make_timer):
    timer, pass_time = make_timer()
    timeouts = [timer.new_timeout(lambda timeout: None, n * 0.001) for n in range(20)]
    kept = timer.new_timeout(boom, 3600.0)
    timer.new_timeout(boom, 3600.0).cancel()
    assert pass_time(lambda: timer.stats().fired == 20)
    stats = timer.stats()
    assert (stats.started, stats.pending, stats.fired, stats.cancelled) == (22, 1, 20, 1)
    assert stats.lateness.count == sum(stats.lateness.buckets) == 20
    assert len(stats.lateness.buckets) == len(LATENESS_BOUNDS_S) + 1
    assert 0 <= stats.lateness.max_s <= stats.lateness.sum_s
    assert all(timeout.expired() for timeout in timeouts)
    assert timer.stop() == [kept]
    stats = timer.stats()
    assert (stats.started, stats.pending, stats.fired, stats.cancelled) == (22, 0, 20, 2)


def due_tasks(*durations_s):
    """Tasks of a timer that are all due now, and take so long on its clock."""
    timer = ManualTimer(HashedWheel(tick=1.0))
    state = timer._timer_state

    def take(timeout, duration_s):
        state.manual_ns += int(duration_s * 1e9)

    for n, duration_s in enumerate(durations_s, 1):
        timer.new_timeout(functools.partial(take, duration_s=duration_s), n / 4)
    state.manual_ns = 10**9
    return timer


class Inline:
    """An executor that runs a task in `submit`."""

    def submit(self, function, timeout):
        function(timeout)


@pytest.mark.parametrize("executor", [None, Inline()])
def test_the_lateness_of_a_task_includes_the_duration_of_those_before_it(executor):
    timer = due_tasks(0.5, 0.0, 0.5)
    timer._executor = executor
    for ran, late_s in ((True, [0.75, 1.0]), (True, [0.75, 1.0, 0.75]), (False, [0.75, 1.0, 0.75])):
        assert timer._run_due(2) == ran
        buckets = [0] * (len(LATENESS_BOUNDS_S) + 1)
        buckets[LATENESS_BOUNDS_S.index(1.0)] = len(late_s)
        expected = Lateness(len(late_s), sum(late_s), max(late_s), tuple(buckets))
        assert timer.stats().lateness == expected
    timer.stop()


def problems(timer, seconds):
    """What is wrong with a timer in each of the next seconds, in which one task starts in time."""
    for _ in range(seconds):
        timer.new_timeout(nothing, 1)
        assert timer.advance(1) == 1
        yield timer.status().problem


def test_late_tasks_are_a_problem_for_at_most_a_minute():
    timer = due_tasks(0, 0, 0)
    assert timer.status().problem == ""
    timer._run_due(3)
    late = "3 of {} tasks started over 0.1 s late in the last minute"
    assert timer.status().problem == late.format(3)
    shown = list(problems(timer, 60))
    assert shown[:30] == [late.format(n) for n in range(4, 34)]
    assert shown[-1] == ""
    timer.stop()


def test_late_tasks_are_no_problem_a_minute_later_if_no_other_task_has_started():
    timer = due_tasks(0)
    timer._run_due(1)
    timer.advance(29)
    assert timer.status().problem
    timer.advance(31)
    assert timer.status().problem == ""
    assert list(problems(timer, 1)) == [""]
    timer.stop()


def test_tasks_that_are_late_after_a_task_of_minutes_are_a_problem():
    timer = due_tasks(600, 0, 0)
    timer._run_due(3)
    assert timer.status().problem == "2 of 2 tasks started over 0.1 s late in the last minute"
    timer.stop()


def test_less_than_1_percent_of_late_tasks_are_no_problem():
    timer = due_tasks(0)
    for _ in range(99):
        timer.new_timeout(nothing, 0)
    timer._run_due(100)
    assert timer.stats().fired == 100
    assert timer.status().problem == ""
    timer.stop()


def test_each_task_of_100_ms_or_more_is_an_event_and_the_slowest_is_in_the_stats(monkeypatch):
    timer, events = due_tasks(0.3, 0.1, 0.0999), []
    monkeypatch.setattr(core, "emit", events.append)
    timer._run_due(3)
    assert [(type(event), event.timer, event.duration_s) for event in events] == [
        (TaskSlow, timer.name, 0.3),
        (TaskSlow, timer.name, 0.1),
    ]
    assert events[0].task.endswith("take")
    stats = timer.stats()
    assert (stats.slowest_task, stats.slowest_task_s) == (events[0].task, 0.3)
    timer.stop()


def test_no_task_of_a_batch_starts_after_another_thread_has_begun_to_stop_the_timer():
    timer, ran = due_tasks(), []
    timer.new_timeout(lambda timeout: setattr(timer, "_stopped", True), 0)
    timer.new_timeout(ran.append, 0)
    timer._run_due(2)
    assert ran == []
    assert len(timer.stop()) == 1


def test_a_task_and_its_result_are_released_before_the_next_task_runs():
    timer, made, alive = due_tasks(), [], []

    class Task:
        def __init__(self) -> None:
            made.append(weakref.ref(self))

        def __call__(self, timeout=None):
            return Task() if timeout is not None else None

    timer.new_timeout(Task(), 0)
    timer.new_timeout(lambda timeout: alive.extend(ref() for ref in made), 0)
    timer._run_due(2)
    assert alive == [None, None]
    timer.stop()


def test_more_than_64_timers_emit_too_many_timers_once(events, monkeypatch):
    monkeypatch.setattr(core, "_warned", [])
    gc.collect()
    others = len(components.of_kind("timer"))
    timers = [WheelTimer() for _ in range(64 - others)]
    for _ in range(10):
        timers.pop().stop()
        timers.append(WheelTimer())
    assert events == []
    timers += [WheelTimer(), WheelTimer()]
    assert events == [TooManyTimers(live=65, limit=64)]
    for timer in timers:
        timer.stop()


def test_finalizers_of_tasks_may_start_cancel_and_reschedule_timeouts(make_queue):
    timer, ran = ManualTimer(make_queue()), []
    others = [timer.new_timeout(ran.append, 1.0) for _ in range(30)]

    class Task:
        def __call__(self, timeout):
            ran.append(self.__class__)

        def __del__(self) -> None:
            others.pop().cancel()
            others.pop().reschedule(2.0)
            timer.new_timeout(ran.append, 1.0)
            timer._timer_state.queue.check()

    for _ in range(10):
        timer.new_timeout(Task(), 1.0)
    timer.advance(5.0)
    stats = timer.stats()
    assert (stats.started, stats.pending, stats.failed) == (50, 0, 0)
    assert stats.fired == len(ran) == 50 - stats.cancelled
    timer.stop()


def test_stop_ends_tasks_that_resubmit_themselves_without_delay(make_queue):
    timer = WheelTimer(make_queue())
    again = []

    def task(timeout):
        again.append(1)
        timer.new_timeout(task, 0)

    for _ in range(300):
        timer.new_timeout(task, 0)
    assert wait_until(lambda: len(again) > 1000)
    run_threads(timer.stop)
    assert timer.pending == 0
