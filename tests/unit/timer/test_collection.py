"""Tasks that refer to their own timeout are garbage-collected, in both forms."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel import AsyncWheelTimer, WheelTimer
from rpcwheel.timer import ManualTimer, PeriodicTask, RetryTask, Timeout

TASKS = 20


class SelfResubmittingTask:
    """A user's task that refers to its timeout, and through it to its timer."""

    def __init__(self, timer, delay):
        self.timeout = timer.new_timeout(self, delay)

    def run(self, timeout):
        self.timeout = timeout.timer.new_timeout(self, 60.0)


def start_periodic(timer, delay):
    return PeriodicTask(timer, 60.0, print, initial_delay=delay).start()


def start_retry(timer, delay):
    return RetryTask(timer, print, initial_delay=delay).start()


@pytest.fixture(params=[start_periodic, start_retry, SelfResubmittingTask])
def start(request):
    return request.param


def start_all(start, timer, delay=60.0):
    return [weakref.ref(start(timer, delay)) for _ in range(TASKS)]


def all_freed(tasks):
    def is_freed():
        gc.collect()
        return not any(task() for task in tasks)

    return wait_until(is_freed)


def test_tasks_returned_by_stop_can_be_collected(make_queue, start):
    timer = WheelTimer(make_queue())
    tasks = start_all(start, timer)
    undelivered = timer.stop()
    assert [timeout.task for timeout in undelivered] == [task() for task in tasks]
    del timer, undelivered
    assert all_freed(tasks)


async def test_tasks_returned_by_aclose_can_be_collected():
    timer = AsyncWheelTimer()
    tasks = start_all(start_periodic, timer)
    await timer.aclose()
    assert all_freed(tasks)


@pytest.mark.filterwarnings("ignore:.* was not stopped:ResourceWarning")
@pytest.mark.parametrize("kind", [WheelTimer, ManualTimer, AsyncWheelTimer])
def test_tasks_of_a_collected_timer_can_be_collected(kind, start):
    async def main():
        return start_all(start, kind())

    assert all_freed(asyncio.run(main()))


def test_tasks_in_a_shut_down_executor_can_be_collected():
    executor, gate = ThreadPoolExecutor(1), Gate()
    executor.submit(gate)
    assert gate.entered.wait(WAIT_S)
    with WheelTimer(executor=executor) as timer:
        tasks = start_all(start_periodic, timer, delay=0.0)
        assert wait_until(lambda: timer.stats().fired == TASKS)
        executor.shutdown(wait=False, cancel_futures=True)
        gate.opened.set()
        executor.shutdown()
        assert all_freed(tasks)


def test_cancel_does_not_remove_a_task_that_waits_in_an_executor():
    ran, submitted = [], []

    class Executor:
        def submit(self, function, timeout):
            submitted.append((function, timeout))

    timer = WheelTimer(executor=Executor())
    timer.new_timeout(ran.append, 0)
    assert wait_until(lambda: submitted)
    ((function, timeout),) = submitted
    assert not timeout.cancel()
    function(timeout)
    timer.stop()
    assert ran == [timeout]


def test_a_timeout_that_ended_refers_to_no_timeout(make_queue):
    with ManualTimer(make_queue()) as timer:
        timeouts = [timer.new_timeout(lambda timeout: None, 1.0) for _ in range(4)]
        timeouts[1].cancel()
        timer.advance(1.0)
        for timeout in timeouts:  # a compiled one is not tracked: a cycle would be a leak
            assert not any(isinstance(other, Timeout) for other in gc.get_referents(timeout))
