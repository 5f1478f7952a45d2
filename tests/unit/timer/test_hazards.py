"""Regression tests."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fixtures.timers import nothing, run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import AsyncWheelTimer, WheelTimer
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError, TooManyTimeouts
from rpcwheel.timer import (
    DeadlineHeap,
    HashedWheel,
    HierarchicalWheel,
    ManualTimer,
    PeriodicTask,
    SparseWheel,
    Timeout,
    aio,
)
from rpcwheel.timer.queue import FORM

WHEELS = [HierarchicalWheel, SparseWheel, HashedWheel]


def test_a_compiled_timeout_in_a_queue_is_not_tracked_by_the_garbage_collector() -> None:
    timer = ManualTimer()
    assert gc.is_tracked(timer.new_timeout(nothing, 1.0)) == (FORM == "pure")
    timer.stop()


def test_one_next_wake_of_the_sparse_wheel_removes_a_bounded_number_of_slots() -> None:
    queue = SparseWheel()
    timer = ManualTimer(queue)
    timeouts = [timer.new_timeout(nothing, 1.0 + i * 0.001) for i in range(5000)]
    for timeout in timeouts:
        timeout.cancel()
    before = len(queue._by_tick)
    queue.pop(0)
    assert before - 256 <= len(queue._by_tick) < before
    timer.advance(10.0)
    assert queue.next_wake() == NEVER


class Unnamable:
    """An object whose `repr` raises, with a task as a method."""

    def __repr__(self) -> str:
        raise RecursionError

    def work(self, timeout: object) -> None:
        """Do nothing."""


def test_the_timer_continues_after_a_task_whose_repr_raises() -> None:
    with WheelTimer() as timer:
        timer.new_timeout(Unnamable().work, 0)
        done = threading.Event()
        timer.new_timeout(lambda _: done.set(), 0.01)
        assert done.wait(WAIT_S)
        assert wait_until(lambda: timer.stats().slowest_task is not None)


def test_a_timeout_cannot_be_copied_or_pickled() -> None:
    timer = ManualTimer()
    with pytest.raises(TypeError, match="can't be copied"):
        copy.copy(timer.new_timeout(nothing, 1.0))
    timer.stop()


@pytest.mark.skipif(FORM == "pure", reason="the pure form raises AttributeError")
def test_a_timeout_created_without_a_timer_is_cancelled() -> None:
    assert not Timeout().cancel()
    assert not Timeout().reschedule(1.0)
    assert Timeout().timer is None


def test_a_timer_without_init_raises_attribute_error() -> None:
    class Hasty(ManualTimer):
        def __init__(self) -> None:
            self.new_timeout(nothing, 1.0)

    with pytest.raises((RuntimeError, AttributeError)):
        Hasty()


async def test_an_earlier_deadline_set_while_a_wakeup_is_scheduled_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncWheelTimer() as timer:
        again = [0.01]
        aim = aio.AsyncWheelTimer._schedule_wakeup

        def interrupted(self: AsyncWheelTimer, wake_ns: int) -> None:
            if again:  # as a finalizer or a signal handler may do
                timer.new_timeout(nothing, again.pop())
            aim(self, wake_ns)

        monkeypatch.setattr(aio.AsyncWheelTimer, "_schedule_wakeup", interrupted)
        timer.new_timeout(nothing, 100.0)
        assert timer._handle is not None
        assert timer._handle.when() - timer._loop.time() < 1.0  # type: ignore[attr-defined]


def test_an_interrupted_wake_up_does_not_prevent_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with WheelTimer() as timer:
        wake = WheelTimer._wake

        def interrupted(self: WheelTimer, deadline_ns: int) -> None:
            monkeypatch.setattr(WheelTimer, "_wake", wake)
            raise KeyboardInterrupt  # as a signal handler may do

        monkeypatch.setattr(WheelTimer, "_wake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            timer.new_timeout(nothing, 0.01)
        done = threading.Event()
        timer.new_timeout(lambda _: done.set(), 0.02)
        assert done.wait(WAIT_S)


def test_a_periodic_task_is_resubmitted_to_a_timer_with_the_largest_max_pending() -> None:
    runs = []
    with WheelTimer(max_pending=sys.maxsize) as timer:
        PeriodicTask(timer, 0.001, lambda: runs.append(1)).start()
        assert wait_until(lambda: len(runs) > 3)
        timer.new_timeout(nothing, 1.0)


@pytest.mark.parametrize("queue", [HierarchicalWheel, DeadlineHeap])
def test_a_task_is_resubmitted_while_another_thread_resubmits_one(queue: Any) -> None:
    class Task:
        """Another thread resubmits a task while this one is added."""

        is_first = True

        @property
        def run(self) -> Callable[[Timeout], None]:
            if self.is_first:
                self.is_first = False
                run_threads(lambda: timer.resubmit(nothing, 1.0))
            return nothing

    timer = ManualTimer(queue())
    timer._max_pending = 1
    timer._timer_state.queue.limit(1)
    timer.new_timeout(nothing, 1.0)
    timer.resubmit(Task(), 1.0)
    assert timer.pending == 3
    assert timer.stats().rejected == 0
    with pytest.raises(TooManyTimeouts):
        timer.new_timeout(nothing, 1.0)


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_queue_without_init_raises_and_does_not_crash(wheel: Any) -> None:
    queue = wheel.__new__(wheel)
    assert getattr(queue, "_attached", True)  # if not, the next lines may crash
    for use in (lambda: queue.pop(0), queue.next_wake, queue.drain, lambda: queue.advance(1)):
        with pytest.raises((TypeError, AttributeError)):
            use()
    with pytest.raises((ConfigurationError, AttributeError)):
        WheelTimer(queue)


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_queue_can_be_initialized_once(wheel: Any) -> None:
    queue = wheel()
    timer = ManualTimer(queue)
    timeout = timer.new_timeout(nothing, 1000.0)
    with pytest.raises(RuntimeError, match="initialized already"):
        queue.__init__(1.0)
    assert timeout.cancel()
