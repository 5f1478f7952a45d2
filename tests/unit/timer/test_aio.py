"""`AsyncWheelTimer`: handles, wake-ups, threads, coroutines, stop."""

import asyncio
import contextvars
import functools
import gc
import itertools
import threading
import time
import weakref

import pytest

from fixtures.event_loops import uvloop
from fixtures.forks import holds_in_child
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.call.deadline import current_deadline, deadline_scope
from rpcwheel.telemetry import components
from rpcwheel.timer import AsyncWheelTimer, TimerStopped, aio


async def test_a_timer_has_one_handle_in_the_loop():
    loop, counts, done = asyncio.get_running_loop(), [], asyncio.Event()
    if not hasattr(loop, "_scheduled"):
        pytest.skip("uvloop does not show its handles")

    def count(_=None):
        ours = [handle for handle in loop._scheduled if handle._callback is aio._on_wakeup]
        counts.append(len([handle for handle in ours if not handle.cancelled()]))

    async with AsyncWheelTimer() as timer:
        for n in range(1000, 0, -1):
            timer.new_timeout(print, 60.0 + n)
        count()
        await loop.run_in_executor(None, timer.new_timeout, count, 30.0)  # wakes the loop
        timer.new_timeout(count, 0.0)
        timer.new_timeout(lambda _: done.set(), 0.01)
        await done.wait()
        count()
    assert counts[0] == counts[-1] == 1
    assert max(counts) == 1


async def test_tasks_do_not_have_the_context_of_a_handler_that_starts_a_timeout():
    deadlines, ran = [], asyncio.Event()

    def task(_):
        deadlines.append(current_deadline())
        ran.set()

    async with AsyncWheelTimer() as timer:
        with deadline_scope(60.0):
            timer.new_timeout(task, 0.01)
            context = contextvars.copy_context()
        await ran.wait()
        ran.clear()
        start = functools.partial(context.run, timer.new_timeout, task, 0.0)
        run_threads(start, functools.partial(time.sleep, 0.01))  # it is due at the wake-up
        await ran.wait()
    assert deadlines == [None, None]


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_uvloop_delays_are_rounded_up_to_milliseconds():
    """uvloop rounds half a millisecond to 0: the timer would not pause until the deadline."""

    async def main():
        loop = asyncio.get_running_loop()
        asked = []

        class Loop:
            def call_later(self, delay, *args, **options):
                asked.append(delay)
                return loop.call_later(delay, *args, **options)

            def __getattr__(self, name):
                return getattr(loop, name)

        async with AsyncWheelTimer() as timer:
            assert timer._whole_ms
            for delay_ns in (0, 1, 300_000, 499_999, 1_000_001, 2_400_000):
                timer._loop = Loop()
                timer._schedule_wakeup(timer._timer_state.now() + delay_ns)
            timer._loop = loop
        assert all(delay * 1e3 == pytest.approx(round(delay * 1e3)) for delay in asked)
        assert min(asked) >= 0.001
        assert asked[-1] == pytest.approx(0.003)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_task_may_be_a_coroutine_function_and_its_errors_are_reported():
    seen, ran = [], []
    async with AsyncWheelTimer(on_error=lambda *args: seen.append(args)) as timer:

        async def work(expired):
            await asyncio.sleep(0)
            ran.append(expired)

        async def fail(_):
            await asyncio.sleep(0)
            raise ValueError("boom")

        first, second = timer.new_timeout(work, 0), timer.new_timeout(fail, 0.001)
        await aio_wait_until(lambda: seen and ran)
    ((timeout, error),) = seen
    assert (ran, timeout, str(error)) == ([first], second, "boom")
    assert first.task is second.task is None
    assert timer.stats().failed == 1


async def test_aclose_cancels_running_coroutines_and_waits_for_them():
    began, ended = asyncio.Event(), []
    timer, before = AsyncWheelTimer(), asyncio.all_tasks()

    async def work(_):
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    timer.new_timeout(work, 0)
    later = timer.new_timeout(work, 60.0)
    await began.wait()
    assert await timer.aclose() == [later]
    assert ended == [True]
    assert asyncio.all_tasks() == before
    assert await timer.aclose() == []
    with pytest.raises(TimerStopped):
        timer.new_timeout(work, 0)


@pytest.mark.parametrize("way", ["stop", "aclose"])
async def test_a_coroutine_may_stop_its_own_timer(way):
    timer, done = AsyncWheelTimer(), asyncio.Event()
    later = timer.new_timeout(print, 60.0)
    got = []

    async def work(_):
        await asyncio.sleep(0)
        got.extend(timer.stop() if way == "stop" else await timer.aclose())
        done.set()

    timer.new_timeout(work, 0)
    await done.wait()
    assert got == [later]


async def test_another_thread_may_stop_the_timer_while_a_task_runs():
    timer, errors, done = AsyncWheelTimer(), [], asyncio.Event()
    later = timer.new_timeout(print, 60.0)

    def stop():
        try:
            errors.append(timer.stop())
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    def task(timeout):
        thread = threading.Thread(target=stop)
        thread.start()
        wait_until(lambda: errors)
        done.set()

    timer.new_timeout(task, 0)
    await done.wait()
    assert errors == [[later]]
    await timer.aclose()


async def test_other_callbacks_of_the_loop_run_between_batches_of_tasks():
    ran, between = [], []
    loop = asyncio.get_running_loop()
    async with AsyncWheelTimer() as timer:
        for _ in range(10_000):
            timer.new_timeout(ran.append, 0.001)

        def look():
            between.append(len(ran))
            if len(ran) < 10_000:
                loop.call_soon(look)

        time.sleep(0.01)  # noqa: ASYNC251 - the loop is late: all are due
        look()
        await aio_wait_until(lambda: len(ran) == 10_000)
    assert len(set(between)) > 10
    assert max(b - a for a, b in itertools.pairwise(between)) <= 300


def test_a_timer_on_a_closed_loop_raises_timer_stopped():
    async def main(waiting):
        timer = AsyncWheelTimer()
        for _ in range(waiting):
            timer.new_timeout(print, 3600.0)
        return timer

    for waiting in (0, 1):
        timer = asyncio.run(main(waiting))
        assert timer.stopped
        assert "stopped" in repr(timer)
        for delay in (0, 60.0):
            with pytest.raises(TimerStopped, match="loop of this timer is closed; create"):
                timer.new_timeout(print, delay)
        assert len(timer.stop()) == waiting


async def test_an_aio_timer_collected_with_pending_timeouts_warns_and_releases_its_tasks():
    timer = AsyncWheelTimer()
    task = type("Task", (), {"__call__": lambda self, timeout: None})()
    gone = weakref.ref(timer), weakref.ref(task)
    timeout = timer.new_timeout(task, 0.01)
    del task
    with pytest.warns(ResourceWarning, match="1 pending> was not stopped; call `await"):
        del timer
    assert timeout.cancelled()
    await asyncio.sleep(0.02)  # the handle is still in the loop, and does nothing
    del timeout
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
@pytest.mark.parametrize(
    "test",
    [
        test_tasks_do_not_have_the_context_of_a_handler_that_starts_a_timeout,
        test_a_task_may_be_a_coroutine_function_and_its_errors_are_reported,
        test_aclose_cancels_running_coroutines_and_waits_for_them,
        test_another_thread_may_stop_the_timer_while_a_task_runs,
        test_other_callbacks_of_the_loop_run_between_batches_of_tasks,
        test_an_aio_timer_collected_with_pending_timeouts_warns_and_releases_its_tasks,
    ],
)
def test_uvloop_runs_a_timer_as_asyncio_does(test):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), WAIT_S))


async def test_a_forked_child_does_not_report_a_timer_whose_loop_does_not_run_there():
    async with AsyncWheelTimer() as timer:
        timer.new_timeout(print, 3600.0)
        assert holds_in_child(lambda: timer not in components.of_kind("timer"))
        assert timer in components.of_kind("timer")
