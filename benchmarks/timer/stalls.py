"""The longest single call while a million timeouts are cancelled.

Every call is timed by itself: start, cancel, and the empty advance (for a loop: one turn of it).
The wall time of the longest call says mostly how long the machine was busy elsewhere, so the CPU
time of the thread is what counts: the smallest of several runs' maxima, for what is left of noise
(interrupts, page faults of a first touch) never hits the same call twice, while the work of the
structure always does. The collector is off, and one run more, with it on, says what it adds.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.timer.scale import Row, Scale
from benchmarks.timer.subject import DELAY_S, LoopSubject, nothing
from benchmarks.timer.subjects import QUEUES, make
from rpcwheel.timer import ManualTimer
from rpcwheel.timer.queue import FORM

CANCELS_A_START = 10
CANCELS_A_TURN = 1_000
STEP_S = 0.001  # time passes, and nothing falls due


class Longest:
    """The longest call of each kind, in thread CPU time and in wall time."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def time(self, kind: str, call: Callable[..., object], *args: object) -> None:
        """Make the call."""
        cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        call(*args)
        self.note(kind, cpu_ns, wall_ns)

    def note(self, kind: str, cpu_ns: int, wall_ns: int) -> None:
        """A call that began at these times is over."""
        wall_us = (time.perf_counter_ns() - wall_ns) / 1e3
        cpu_us = (time.thread_time_ns() - cpu_ns) / 1e3
        for key, taken in ((f"{kind}_cpu_us", cpu_us), (f"{kind}_wall_us", wall_us)):
            if taken > self.values.get(key, 0.0):
                self.values[key] = taken


def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    """A row `stall` for each subject, and `stall, gc on`: queues on a `ManualTimer`, and loops."""
    return [each for name in names for each in _measure(name, scale)]


def _measure(name: str, scale: Scale) -> list[Row]:
    runs = [_run(name, scale.many, collecting=False) for _ in range(scale.stall_runs)]
    least = {key: min(run[key] for run in runs) for key in runs[0]}
    collecting = _run(name, scale.many, collecting=True)
    return [
        Row("stall", name, FORM, scale.many, least),
        Row("stall, gc on", name, FORM, scale.many, collecting),
    ]


def _run(name: str, count: int, *, collecting: bool) -> dict[str, float]:
    gc.collect()
    if not collecting:
        gc.disable()
    try:
        return _queue(name, count) if name in QUEUES else _loop(name, count)
    finally:
        gc.enable()


def _queue(name: str, count: int) -> dict[str, float]:
    timer = ManualTimer(QUEUES[name]())
    handles = _handles(timer.new_timeout, count, swap=False)
    longest = Longest()
    for index, handle in enumerate(handles):
        longest.time("cancel", handle.cancel)
        if index % CANCELS_A_START == 0:
            longest.time("start", timer.new_timeout, nothing, DELAY_S)
        if index % CANCELS_A_TURN == 0:
            longest.time("advance", timer.advance, STEP_S)
    timer.stop()
    return longest.values


def _loop(name: str, count: int) -> dict[str, float]:
    subject = make(name)
    assert isinstance(subject, LoopSubject)
    try:
        return subject.loop.run_until_complete(_cancel_on(subject.loop, count))
    finally:
        subject.close()


async def _cancel_on(loop: asyncio.AbstractEventLoop, count: int) -> dict[str, float]:
    handles = _handles(loop.call_later, count, swap=True)
    longest = Longest()
    for index, handle in enumerate(handles):
        longest.time("cancel", handle.cancel)
        if index % CANCELS_A_START == 0:
            longest.time("start", loop.call_later, DELAY_S, nothing)
        if index % CANCELS_A_TURN == 0:
            cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
            await asyncio.sleep(0)
            longest.note("advance", cpu_ns, wall_ns)
    return longest.values


def _handles(start: Callable[..., Any], count: int, *, swap: bool) -> list[Any]:
    """So many pending, in random order; they are cancelled in the order they were started."""
    uniform = random.Random(1).uniform
    delays = (uniform(DELAY_S / 2, DELAY_S * 3 / 2) for _ in range(count))
    if swap:
        return [start(delay, nothing) for delay in delays]
    return [start(nothing, delay) for delay in delays]
