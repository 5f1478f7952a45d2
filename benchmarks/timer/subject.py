"""What can be measured: the contract of a subject, and what those on an event loop share."""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Protocol, TypeVar

from benchmarks.timer.clock import Cost, Stopwatch, cost

T = TypeVar("T")

DELAY_S = 120.0
"""Of the calls measured. What is pending is due from half to one and a half times that, so that a
new timeout is neither always the first nor always the last: a heap's cost depends on it."""

CALLS_A_TURN = 100
"""Where the loop turns during the measurement, it does so after so many calls."""


class Handle(Protocol):
    """What a start gives back, where it can be cancelled by itself."""

    def cancel(self) -> object:
        """Cancel it."""


class Subject(ABC):
    """A timer that is measured. Its hot loops are its own, so that no adapter is timed."""

    most_pending = 10**7  # more than that can't be held
    bears_threads = False  # whether several threads may start and cancel at once

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def start(self, delay: float, task: Callable[..., object]) -> object:
        """Start one, at any speed."""

    @abstractmethod
    def pairs(self, count: int) -> None:
        """Start one and cancel it, so many times. A hot loop."""

    @abstractmethod
    def starts(self, count: int) -> list[Any]:
        """Start so many. A hot loop."""

    @abstractmethod
    def fire(self, count: int, spread_s: float) -> Cost:
        """What firing takes, of so many that are all due when the clock starts."""

    def cancels(self, handles: Iterable[Any]) -> None:
        """Cancel what `starts` gave. A hot loop."""
        for handle in handles:
            handle.cancel()

    def inside(self, work: Callable[[], T]) -> T:
        """Do the work where the calls belong: on its loop, if it has one."""
        return work()

    def pair_cost(self, count: int) -> Cost:
        """What a start and its cancel take together."""
        return self.inside(lambda: cost(self.pairs, count))

    def fill(self, count: int, low_s: float = DELAY_S / 2, high_s: float = DELAY_S * 3 / 2) -> None:
        """Have so many pending, due at random times between these two."""
        uniform = random.Random(1).uniform

        def work() -> None:
            for _ in repeat(None, count):
                self.start(uniform(low_s, high_s), nothing)

        self.inside(work)

    def let_pass(self, seconds: float) -> None:
        """Wait, so that what is due meanwhile runs."""
        time.sleep(seconds)

    @abstractmethod
    def close(self) -> None:
        """End it, and all that is pending in it."""


class LoopSubject(Subject):
    """A timer on an event loop that runs only while something is measured."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, *, turning: bool) -> None:
        super().__init__(name)
        self.loop = loop
        self._turning = turning

    def inside(self, work: Callable[[], T]) -> T:
        async def main() -> T:
            return work()

        return self.loop.run_until_complete(main())

    def pair_cost(self, count: int) -> Cost:
        if not self._turning:
            return super().pair_cost(count)
        return self.loop.run_until_complete(self._turning_cost(count))

    async def _turning_cost(self, count: int) -> Cost:
        turns = max(count // CALLS_A_TURN, 1)
        watch = Stopwatch()
        for _ in range(turns):
            self.pairs(CALLS_A_TURN)
            await asyncio.sleep(0)
        return watch.per(turns * CALLS_A_TURN)

    def fire(self, count: int, spread_s: float) -> Cost:
        return self.loop.run_until_complete(self._fire(count, spread_s))

    async def _fire(self, count: int, spread_s: float) -> Cost:
        done = self.loop.create_future()
        for index in range(count):
            self.start(spread_s * index / count, nothing)
        self.start(spread_s * 1.05, lambda *_: done.set_result(None))
        time.sleep(spread_s * 1.1)  # noqa: ASYNC251 - the loop must not turn before all are due
        watch = Stopwatch()
        await done
        return watch.per(count)

    def let_pass(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def close(self) -> None:
        self.loop.close()


def nothing(_: object = None) -> None:
    """The task of all timeouts; ours pass the timeout, the others nothing."""
