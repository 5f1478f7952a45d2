"""How long handlers take: different durations, and the loop that burns CPU time."""

from __future__ import annotations

import math
import random
import time

_LOOPS = 500
"""About 10 us."""

_STEPS = 20
_SHUFFLED = 100


def burn(cpu_s: float) -> None:
    """Hold the interpreter's lock, and compute until the thread has used so much CPU time.

    A number of loops would take up to twice as long while the load computes on the other half of
    the same processor, and only then.
    """
    until_ns = time.thread_time_ns() + round(cpu_s * 1e9)
    while time.thread_time_ns() < until_ns:
        for _ in range(_LOOPS):
            pass


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
