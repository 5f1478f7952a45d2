"""`AsyncWheelTimer` on asyncio and uvloop: handles, wake-ups, threads, coroutines, stop."""

import asyncio
import functools
import gc
import itertools
import threading
import time
import weakref

import pytest

from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.timer import AsyncWheelTimer, DeadlineHeap, TimerStopped, aio
from rpcwheel.timer.queue import default_queue

try:
    import uvloop
except ImportError:
    uvloop = None
else:
    uvloop.new_event_loop().close()  # the first one opens a pipe that libuv keeps (signal.c)


def uvloop_factory():
    if uvloop is None:
        pytest.skip("uvloop is not installed")
    return uvloop.new_event_loop


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine function on a new event loop, of asyncio and of uvloop."""
    factory = uvloop_factory() if request.param == "uvloop" else asyncio.new_event_loop

    def run(main):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(main(), WAIT_S))

    return run


@pytest.fixture
def make_queue(request):
    """The default queue on asyncio, the heap on uvloop: the driver has no branch for queues."""
    run = request.node.callspec.params.get("run")
    return DeadlineHeap if run == "uvloop" else default_queue


class Calls:
    """Counts the pending handles of the timer in the loop, and its wake-ups."""

    def __init__(self, monkeypatch) -> None:
        self.wakeups = 0
        self.made = []
        self.most = 0
        on_wakeup = aio._on_wakeup

        def counted(timer_ref):
            self.wakeups += 1
            on_wakeup(timer_ref)

        monkeypatch.setattr(aio, "_on_wakeup", counted)
        schedule = AsyncWheelTimer._schedule_wakeup

        def scheduled(timer, wake_ns):
            schedule(timer, wake_ns)
            self.made.append(timer._handle)
            alive = [h for h in self.made if not h.cancelled() and not over(h)]
            self.most = max(self.most, len(alive))

        monkeypatch.setattr(AsyncWheelTimer, "_schedule_wakeup", scheduled)


def over(handle) -> bool:
    return handle.when() < asyncio.get_running_loop().time()


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def test_tasks_run_on_the_thread_of_the_loop_in_order_and_never_early(run, make_queue):
    queue = make_queue()

    async def main():
        ran = []
        async with AsyncWheelTimer(queue) as timer:
            for n in (30, 10, 20, 0, -5):
                timer.new_timeout(
                    lambda t, n=n: ran.append((n, threading.get_ident(), time.monotonic_ns(), t)),
                    n * 1e-3,
                )
            assert not ran
            await aio_wait_until(lambda: not timer.pending)
        return ran

    ran = run(main)
    ticks = [-(-t._deadline_ns // queue._tick_ns) for *_, t in ran]
    assert ticks == sorted(ticks)  # also if some were late
    assert sorted(n for n, *_ in ran) == [-5, 0, 10, 20, 30]
    assert {ident for _, ident, *_ in ran} == {threading.get_ident()}
    assert all(at >= t._deadline_ns for *_, at, t in ran)


def test_a_thousand_timeouts_have_one_handle_in_the_loop(run, make_queue, calls):
    async def main():
        async with AsyncWheelTimer(make_queue()) as timer:
            for n in range(1000, 0, -1):
                timer.new_timeout(print, 60.0 + n)
            loop = asyncio.get_running_loop()
            scheduled = getattr(loop, "_scheduled", None)  # uvloop has no such list
            if scheduled is not None:
                ours = [h for h in scheduled if h._callback is aio._on_wakeup and not h.cancelled()]
                assert len(ours) == 1
            done = asyncio.Event()
            for n in range(20):
                timer.new_timeout(lambda timeout: None, n * 0.001)
            timer.new_timeout(lambda timeout: done.set(), 0.03)
            await done.wait()
        assert calls.most == 1

    run(main)


def test_a_timeout_costs_few_wake_ups(run, make_queue, calls):
    async def main():
        async with AsyncWheelTimer(make_queue()) as timer:
            for delay in (0.0003, 0.0005, 0.0014, 0.0026, 0.005) * 4:
                done = asyncio.Event()
                timer.new_timeout(lambda timeout, done=done: done.set(), delay)
                await done.wait()
            assert calls.wakeups <= 20 * 3

    run(main)


def test_uvloop_delays_are_rounded_up_to_milliseconds():
    """uvloop rounds half a millisecond to 0: the timer would not pause until the deadline."""
    factory = uvloop_factory()

    async def main():
        loop = asyncio.get_running_loop()
        asked = []

        class Loop:
            def call_later(self, delay, *args):
                asked.append(delay)
                return loop.call_later(delay, *args)

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

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def test_an_idle_aio_timer_has_no_wake_ups(run, make_queue, calls):
    async def main():
        async with AsyncWheelTimer(make_queue()) as timer:
            for n in range(1000):
                timer.new_timeout(print, 3600.0 + n / 7)
            for _ in range(5000):
                timer.new_timeout(print, 1800.0).cancel()
            await asyncio.sleep(0.1)  # a timer that polls would wake up often
            assert calls.wakeups <= 3

    run(main)


def test_an_earlier_timeout_of_another_thread_wakes_the_loop(run, make_queue):
    async def main():
        loop = asyncio.get_running_loop()
        async with AsyncWheelTimer(make_queue()) as timer:
            timer.new_timeout(print, 3600.0)
            fired = threading.Event()

            def start_nearer_ones():
                for _ in range(100):
                    fired.clear()
                    timer.new_timeout(lambda timeout: fired.set(), 0.001)
                    assert fired.wait(WAIT_S), "a wake-up was lost"

            await loop.run_in_executor(None, start_nearer_ones)
            assert timer.pending == 1

    run(main)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_timeouts_of_many_threads_each_fire_or_are_cancelled_once(run, make_queue):
    async def main():
        loop = asyncio.get_running_loop()
        fired, won, started = [], [], []
        async with AsyncWheelTimer(make_queue()) as timer:

            def churn():
                for step in range(500):
                    timeout = timer.new_timeout(fired.append, step % 4 * 0.001)
                    started.append(timeout)
                    timeout.reschedule(step % 3 * 0.001)
                    if step % 2 and timeout.cancel():
                        won.append(timeout)

            await loop.run_in_executor(None, run_threads, churn, churn, churn)
            await aio_wait_until(lambda: not timer.pending)
            timer._timer_state.queue.check()
        assert sorted(map(id, fired + won)) == sorted(map(id, started))

    run(main)


def test_a_task_may_be_a_coroutine_function_and_its_errors_are_reported(run):
    async def main():
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

    run(main)


def test_aclose_cancels_running_coroutines_and_waits_for_them(run):
    async def main():
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

    run(main)


@pytest.mark.parametrize("way", ["stop", "aclose"])
def test_a_coroutine_may_stop_its_own_timer(run, way):
    async def main():
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

    run(main)


def test_a_task_cannot_stop_its_aio_timer(run):
    async def main():
        seen, done = [], asyncio.Event()
        async with AsyncWheelTimer(on_error=lambda *args: seen.append(args)) as timer:
            timer.new_timeout(lambda timeout: timer.stop(), 0)
            timer.new_timeout(lambda timeout: done.set(), 0.002)
            await done.wait()
        assert "cannot stop the timer that runs it" in str(seen[0][1])

    run(main)


def test_another_thread_may_stop_the_timer_while_a_task_runs(run):
    async def main():
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

    run(main)


def test_other_callbacks_of_the_loop_run_between_batches_of_tasks(run, make_queue):
    async def main():
        ran, between = [], []
        loop = asyncio.get_running_loop()
        async with AsyncWheelTimer(make_queue()) as timer:
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

    run(main)


def test_an_aio_timer_needs_a_running_loop():
    with pytest.raises(RuntimeError, match="create an AsyncWheelTimer inside a coroutine"):
        AsyncWheelTimer()


def test_a_timer_on_a_closed_loop_raises_timer_stopped(run):
    async def main(waiting):
        timer = AsyncWheelTimer()
        for _ in range(waiting):
            timer.new_timeout(print, 3600.0)
        return timer

    for waiting in (0, 1):
        timer = run(functools.partial(main, waiting))
        assert timer.stopped
        assert "stopped" in repr(timer)
        for delay in (0, 60.0):
            with pytest.raises(TimerStopped, match="loop of this timer is closed; create"):
                timer.new_timeout(print, delay)
        assert len(timer.stop()) == waiting


def test_an_aio_timer_collected_with_pending_timeouts_warns_and_releases_its_tasks(run):
    async def main():
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
        return [ref() for ref in gone]

    assert run(main) == [None, None]
