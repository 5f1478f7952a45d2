"""rpcwheel: what lives by time in a gRPC service, on one shared wheel timer.

The map, from what you import down to what it stands on:

=============  =====================================================================================
`failback`     Answer now, deliver later: `with_failback` queues a failed call and makes it again.
`timer`        A million timeouts on one thread: `WheelTimer`, `AsyncWheelTimer`, `shared_timer`.
`observe`      What happened, and who is told: events, `add_sink`, the standard log.
`errors`       Every exception, drawn as a tree.
=============  =====================================================================================

All public names but those of `observe` stand here too: `from rpcwheel import with_failback`. Each
room's own docstring is its manual. `python -m rpcwheel demo` shows it at work on a real server
that is killed; it needs `pip install 'rpcwheel[cli]'`.

To read the code, begin with `failback/core.py` (a decision) and `failback/sync.py` (its hands).
"""

from rpcwheel.errors import (
    ConfigurationError,
    FailbackClosed,
    FailbackError,
    FailbackFull,
    RpcWheelError,
    TimerError,
    TimerStopped,
    TooManyTimeouts,
)
from rpcwheel.failback import (
    FailbackInvoker,
    FailbackPolicy,
    FailbackStats,
    FailedCall,
    with_failback,
)
from rpcwheel.timer import (
    AsyncWheelTimer,
    DeadlineHeap,
    HashedWheel,
    HierarchicalWheel,
    Lateness,
    ManualTimer,
    PeriodicTask,
    RetryTask,
    SparseWheel,
    Timeout,
    TimerStats,
    TimerTask,
    WheelTimer,
    shared_timer,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncWheelTimer",
    "ConfigurationError",
    "DeadlineHeap",
    "FailbackClosed",
    "FailbackError",
    "FailbackFull",
    "FailbackInvoker",
    "FailbackPolicy",
    "FailbackStats",
    "FailedCall",
    "HashedWheel",
    "HierarchicalWheel",
    "Lateness",
    "ManualTimer",
    "PeriodicTask",
    "RetryTask",
    "RpcWheelError",
    "SparseWheel",
    "Timeout",
    "TimerError",
    "TimerStats",
    "TimerStopped",
    "TimerTask",
    "TooManyTimeouts",
    "WheelTimer",
    "__version__",
    "shared_timer",
    "with_failback",
]
