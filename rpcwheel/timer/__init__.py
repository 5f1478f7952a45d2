"""One timer for everything that waits: start and cancel in O(1), one thread for a million timeouts.

A timer is a *queue* (which structure holds the timeouts) in a *driver* (what turns it)::

    from rpcwheel.timer import HashedWheel, WheelTimer

    with WheelTimer() as timer:                               # a thread, and the fastest queue
        timeout = timer.new_timeout(lambda timeout: print("late"), 2.0)
        timeout.cancel()                                      # True: it will never start

    netty = WheelTimer(HashedWheel(tick=0.1, slots=512))      # any queue goes with any driver
    netty.stop()

Drivers: `WheelTimer` (a thread), `AsyncWheelTimer` (an event loop), `ManualTimer` (your hand, for
tests); `shared_timer()` is the one of this process. Queues: `HierarchicalWheel` (levels of 64
slots: the default where compiled), `SparseWheel` (a slot for each tick in use: the default in pure
Python), `HashedWheel` (one ring and rounds: Netty's and Dubbo's), `DeadlineHeap` (a heap, exact to
the nanosecond: asyncio's, kept as the yardstick). Jobs that come again are `PeriodicTask` and
`RetryTask`: one-shot tasks that submit themselves once more.

Promises: never early; late by less than a tick and the wake-up; `cancel()` that returns True means
the task will never start; no wake-ups without need; what a task raises harms only itself.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.errors import TimerStopped, TooManyTimeouts

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
        submodules="aio api clock manual periodic queue sync",
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
