"""rpcwheel's timers as subjects."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING

from benchmarks.timer.clock import Cost, Stopwatch
from benchmarks.timer.subject import DELAY_S, LoopSubject, Subject, nothing
from rpcwheel.timer import AsyncWheelTimer, Timeout, WheelTimer

if TYPE_CHECKING:
    import asyncio

    from rpcwheel.timer.queue import TimerQueue

DELAYS_S = [DELAY_S + index / 1e3 for index in range(1000)]


class OwnSubject(Subject):
    """A timer of ours, through its public `new_timeout`."""

    @property
    @abstractmethod
    def timer(self) -> WheelTimer | AsyncWheelTimer:
        """The timer itself."""

    def start(self, delay: float, task: Callable[..., object]) -> Timeout:
        return self.timer.new_timeout(task, delay)

    def pairs(self, count: int) -> None:
        new_timeout = self.timer.new_timeout
        for _ in repeat(None, count):
            new_timeout(nothing, DELAY_S).cancel()

    def varied(self, count: int) -> None:
        """Pairs with a different delay each, so that the conversion of a delay cannot be cached."""
        new_timeout = self.timer.new_timeout
        for _ in repeat(None, count // len(DELAYS_S)):
            for delay in DELAYS_S:
                new_timeout(nothing, delay).cancel()

    def starts(self, count: int) -> list[Timeout]:
        new_timeout = self.timer.new_timeout
        return [new_timeout(nothing, DELAY_S) for _ in repeat(None, count)]


class ThreadWheel(OwnSubject):
    """A queue on `WheelTimer`."""

    bears_threads = True

    def __init__(self, name: str, queue: TimerQueue) -> None:
        super().__init__(name)
        self._timer = WheelTimer(queue)

    @property
    def timer(self) -> WheelTimer:
        return self._timer

    def fire(self, count: int, spread_s: float) -> Cost:
        """Keep the thread busy with a first task until all the others are due."""
        gate, done = threading.Event(), threading.Event()
        self.start(0.0, lambda _: gate.wait())
        for index in range(count):
            self.start(spread_s * index / count, nothing)
        last_s = spread_s * 1.05 + 0.1  # a tick later than the others in the coarsest queue
        self.start(last_s, lambda _: done.set())
        time.sleep(last_s + 0.15)
        watch = Stopwatch()
        gate.set()
        done.wait()
        return watch.per(count)

    def close(self) -> None:
        self._timer.stop()


class LoopWheel(OwnSubject, LoopSubject):
    """The default queue on `AsyncWheelTimer`."""

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, *, turning: bool = False
    ) -> None:
        super().__init__(name, loop, turning=turning)
        self._timer = self.inside(AsyncWheelTimer)

    @property
    def timer(self) -> AsyncWheelTimer:
        return self._timer

    def close(self) -> None:
        self._timer.stop()
        self.loop.close()
