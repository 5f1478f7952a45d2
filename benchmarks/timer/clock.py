"""How time is taken: CPU time of the process beside wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call took, in nanoseconds: CPU time of all threads of the process, and wall time."""

    cpu_ns: float
    wall_ns: float


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        self._wall_ns = time.perf_counter_ns()

    def per(self, calls: int) -> Cost:
        """The time until now, for each of so many calls."""
        wall_ns = time.perf_counter_ns() - self._wall_ns
        cpu_ns = time.process_time_ns() - self._cpu_ns
        return Cost(cpu_ns / calls, wall_ns / calls)


def cost(work: Callable[[int], object], calls: int) -> Cost:
    """What `work(calls)` takes a call."""
    watch = Stopwatch()
    work(calls)
    return watch.per(calls)


def median_cost(costs: Iterable[Cost]) -> Cost:
    """The medians, each kind of time for itself."""
    taken = list(costs)
    return Cost(median(each.cpu_ns for each in taken), median(each.wall_ns for each in taken))
