"""Measures CPU time of the process and wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a call in nanoseconds: CPU time of all threads of the process, and wall time."""

    cpu_ns: float
    wall_ns: float


class Stopwatch:
    """Measures the time since its creation."""

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        self._wall_ns = time.perf_counter_ns()

    def per(self, calls: int) -> Cost:
        """The time until now, divided by the number of calls."""
        wall_ns = time.perf_counter_ns() - self._wall_ns
        cpu_ns = time.process_time_ns() - self._cpu_ns
        return Cost(cpu_ns / calls, wall_ns / calls)


def cost(work: Callable[[int], object], calls: int) -> Cost:
    """The cost of each call of `work(calls)`."""
    watch = Stopwatch()
    work(calls)
    return watch.per(calls)


def median_cost(costs: Iterable[Cost]) -> Cost:
    """The median CPU time and the median wall time."""
    taken = list(costs)
    return Cost(median(each.cpu_ns for each in taken), median(each.wall_ns for each in taken))
