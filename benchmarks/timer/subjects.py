"""The subjects by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec

from benchmarks.timer.own import LoopWheel, ThreadWheel
from benchmarks.timer.rivals import LoopTimers, Scheduler, ThreadingTimers
from benchmarks.timer.subject import Subject
from rpcwheel.timer import DeadlineHeap, HashedWheel, HierarchicalWheel, SparseWheel
from rpcwheel.timer.queue import TimerQueue

QUEUES: dict[str, Callable[[], TimerQueue]] = {
    "HierarchicalWheel": HierarchicalWheel,
    "SparseWheel": SparseWheel,
    "HashedWheel": HashedWheel,
    "DeadlineHeap": DeadlineHeap,
}
"""On `WheelTimer`, with their defaults: ticks of 1 ms, of 100 ms (Netty's) for the hashed one."""

ASYNC, ASYNC_TURNING, ASYNC_UVLOOP = (
    "AsyncWheelTimer",
    "AsyncWheelTimer turning",
    "AsyncWheelTimer uvloop",
)
ASYNCIO, ASYNCIO_TURNING = "asyncio", "asyncio turning"
UVLOOP, UVLOOP_TURNING = "uvloop", "uvloop turning"
THREADING, SCHED = "threading.Timer", "sched"
NETTY = "Netty HashedWheelTimer"

OWN = (*QUEUES, ASYNC, ASYNC_TURNING, ASYNC_UVLOOP)
TURNING = (ASYNC_TURNING, ASYNCIO_TURNING, UVLOOP_TURNING)
RIVALS = (ASYNCIO, ASYNCIO_TURNING, UVLOOP, UVLOOP_TURNING, THREADING, SCHED)
BASELINE = ASYNCIO
"""What the ratios are to: asyncio in a burst, its loop not turning while the clock runs; turning
costs it more."""

HAS_UVLOOP = find_spec("uvloop") is not None


def make(name: str) -> Subject:
    """A fresh one, empty."""
    if name in QUEUES:
        return ThreadWheel(name, QUEUES[name]())
    if name == THREADING:
        return ThreadingTimers(name)
    if name == SCHED:
        return Scheduler(name)
    loop = _uvloop() if "uvloop" in name else asyncio.new_event_loop()
    kind = LoopWheel if name in OWN else LoopTimers
    return kind(name, loop, turning=name in TURNING)


def available(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those that this installation can run."""
    return tuple(name for name in names if HAS_UVLOOP or "uvloop" not in name)


def default_queue(form: str) -> str:
    """The queue that a timer has by default in this form."""
    return "HierarchicalWheel" if form == "native" else "SparseWheel"


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()
