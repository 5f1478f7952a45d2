"""How long handlers take: different durations, and the loop that burns CPU time."""

from __future__ import annotations

import math
import random
import time

from benchmarks.overload.cases import BURN_S

_ROUNDS = 300
_LOOPS = 50_000
_STEPS = 20
_SHUFFLED = 100


def burn(loops: int) -> None:
    """Hold the interpreter's lock, and compute."""
    for _ in range(loops):
        pass


def loops_of_a_call() -> int:
    """The loops that take `BURN_S` of CPU time; the fastest of several rounds decides."""
    fastest_ns = min(_timed() for _ in range(_ROUNDS))
    return round(_LOOPS * BURN_S * 1e9 / fastest_ns)


def _timed() -> int:
    began_ns = time.thread_time_ns()
    burn(_LOOPS)
    return time.thread_time_ns() - began_ns


def durations() -> list[float]:
    """Durations of calls, as multiples of their mean: exponential, and the same in each run.

    Each `_STEPS` of them have the same mean, so that the capacity can be measured in seconds.
    """
    quantiles = [-math.log1p(-(step + 0.5) / _STEPS) for step in range(_STEPS)]
    mean = sum(quantiles) / _STEPS
    rng = random.Random(0)
    return [
        each / mean for _ in range(_SHUFFLED) for each in rng.sample(quantiles, k=len(quantiles))
    ]
