"""Timers: start and cancel timeouts in O(1), on one thread for a million of them.

A timer consists of a *queue* of timeouts and a *driver* that runs them::

    from rpcwheel.timer import HashedWheel, WheelTimer

    with WheelTimer() as timer:                               # a thread, and the fastest queue
        timeout = timer.new_timeout(lambda timeout: print("late"), 2.0)
        timeout.cancel()                                      # True: the task will never start

    netty = WheelTimer(HashedWheel(tick=0.1, slots=512))      # any queue works with any driver
    netty.stop()

Drivers:

- `WheelTimer` runs tasks on a thread. `shared_timer()` is the one of this process.
- `AsyncWheelTimer` runs tasks on an event loop.
- `ManualTimer` runs tasks when a test advances its clock.

Queues. The default is right for most programs:

- `HierarchicalWheel`, the default in compiled form: levels of 64 slots, for any delays.
- `SparseWheel`, the default in pure Python, where it is the fastest: a dict of slots.
- `HashedWheel`: one ring of slots, as in Netty and Dubbo. With more slots than the longest delay
  has ticks it fires faster than `HierarchicalWheel`, as no timeout moves (65,536 ticks of 1 ms are
  65 s and take 1 MB). With coarse ticks (0.1 s) many timeouts share one wake-up.
- `DeadlineHeap`: a heap, exact to the nanosecond, as in asyncio. Starting costs O(log n).

`PeriodicTask` and `RetryTask` run a function repeatedly.

Guarantees: A task never starts early, and late by less than a tick plus the wake-up. If `cancel()`
returns True, the task never starts. Without due timeouts there are no wake-ups. An exception of a
task does not affect other tasks.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.errors import TimerStopped, TooManyTimeouts

    from . import aio, api, manual, periodic, queue, sync
    from .aio import AsyncWheelTimer
    from .api import Lateness, TimerStats, TimerTask
    from .manual import ManualTimer
    from .periodic import PeriodicTask, RetryTask
    from .queue import DeadlineHeap, HashedWheel, HierarchicalWheel, SparseWheel, Timeout
    from .sync import WheelTimer, shared_timer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "rpcwheel.errors": "TimerStopped TooManyTimeouts",
            ".aio": "AsyncWheelTimer",
            ".api": "Lateness TimerStats TimerTask",
            ".manual": "ManualTimer",
            ".periodic": "PeriodicTask RetryTask",
            ".queue": "DeadlineHeap HashedWheel HierarchicalWheel SparseWheel Timeout",
            ".sync": "WheelTimer shared_timer",
        },
        submodules="aio api manual periodic queue sync",
    )

__all__ = [
    "AsyncWheelTimer",
    "DeadlineHeap",
    "HashedWheel",
    "HierarchicalWheel",
    "Lateness",
    "ManualTimer",
    "PeriodicTask",
    "RetryTask",
    "SparseWheel",
    "Timeout",
    "TimerStats",
    "TimerStopped",
    "TimerTask",
    "TooManyTimeouts",
    "WheelTimer",
    "shared_timer",
]
