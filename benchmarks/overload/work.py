"""The CPU time that a handler burns: a loop, and how often it runs in 10 ms."""

from __future__ import annotations

import time

from benchmarks.overload.cases import BURN_S

_ROUNDS = 300
_LOOPS = 50_000


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
