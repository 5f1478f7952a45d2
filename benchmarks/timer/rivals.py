"""What rpcwheel is measured against: the loops' own timers, and the standard library's others."""

from __future__ import annotations

import asyncio
import sched
import threading
import time
from collections.abc import Callable, Iterable
from itertools import repeat

from benchmarks.timer.clock import Cost, Stopwatch
from benchmarks.timer.subject import DELAY_S, LoopSubject, Subject, nothing


class LoopTimers(LoopSubject):
    """`loop.call_later` of asyncio or uvloop."""

    def start(self, delay: float, task: Callable[..., object]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay, task)

    def pairs(self, count: int) -> None:
        call_later = self.loop.call_later
        for _ in repeat(None, count):
            call_later(DELAY_S, nothing).cancel()

    def starts(self, count: int) -> list[asyncio.TimerHandle]:
        call_later = self.loop.call_later
        return [call_later(DELAY_S, nothing) for _ in repeat(None, count)]


class ThreadingTimers(Subject):
    """`threading.Timer`: a thread for each timeout."""

    most_pending = 1_000
    bears_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._pending: list[threading.Timer] = []

    def start(self, delay: float, task: Callable[..., object]) -> threading.Timer:
        timer = threading.Timer(delay, task)
        timer.daemon = True
        timer.start()
        self._pending.append(timer)
        return timer

    def pairs(self, count: int) -> None:
        for _ in repeat(None, count):
            timer = threading.Timer(DELAY_S, nothing)
            timer.start()
            timer.cancel()

    def starts(self, count: int) -> list[threading.Timer]:
        timers = []
        for _ in repeat(None, count):
            timer = threading.Timer(DELAY_S, nothing)
            timer.start()
            timers.append(timer)
        return timers

    def fire(self, count: int, spread_s: float) -> Cost:
        timers = [threading.Timer(0.5 + spread_s * i / count, nothing) for i in range(count)]
        for timer in timers:
            timer.start()
        watch = Stopwatch()
        for timer in timers:
            timer.join()
        return watch.per(count)

    def close(self) -> None:
        for timer in self._pending:
            timer.cancel()
        for timer in self._pending:
            timer.join()


class Scheduler(Subject):
    """`sched.scheduler`: a heap under a lock, where cancel searches the whole heap."""

    bears_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._scheduler = sched.scheduler(time.monotonic, time.sleep)

    def start(self, delay: float, task: Callable[..., object]) -> sched.Event:
        return self._scheduler.enter(delay, 0, task)

    def pairs(self, count: int) -> None:
        enter, cancel = self._scheduler.enter, self._scheduler.cancel
        for _ in repeat(None, count):
            cancel(enter(DELAY_S, 0, nothing))

    def starts(self, count: int) -> list[sched.Event]:
        enter = self._scheduler.enter
        return [enter(DELAY_S, 0, nothing) for _ in repeat(None, count)]

    def cancels(self, handles: Iterable[sched.Event]) -> None:
        cancel = self._scheduler.cancel
        for handle in handles:
            cancel(handle)

    def fire(self, count: int, spread_s: float) -> Cost:
        for index in range(count):
            self.start(spread_s * index / count, nothing)
        time.sleep(spread_s * 1.1)
        watch = Stopwatch()
        self._scheduler.run()
        return watch.per(count)

    def let_pass(self, seconds: float) -> None:
        self._scheduler.enter(seconds, 0, nothing)
        self._scheduler.run()

    def close(self) -> None:
        """Nothing runs."""
