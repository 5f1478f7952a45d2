"""Events and their sinks.

Each time rpcwheel loses, delays or saves work, it emits an event: a frozen record such as
`FailbackQueued` or `TaskSlow`. One sink is installed by default, `log_event`, which writes to the
loggers `rpcwheel.timer`, `rpcwheel.failback`, `rpcwheel.call`, `rpcwheel.connection` and
`rpcwheel.registry`. Add your own::

    from rpcwheel.events import FailbackGaveUp, Event, add_sink

    def count_losses(event: Event) -> None:
        if isinstance(event, FailbackGaveUp):
            LOSSES.labels(event.name).inc()

    add_sink(count_losses)

A sink runs on the thread where the event happened and must be quick. If it raises, that is logged
once, and has no effect on the call or the timer.
"""

from .events import (
    CallbackFailed,
    CallSlow,
    ConnectionAlive,
    ConnectionClosed,
    ConnectionDead,
    ConnectionIdle,
    ConnectionReplaced,
    DeadLetterFailed,
    DeadlineExceededBeforeStart,
    DefaultResponseUsed,
    Event,
    ExecutorRejected,
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackDropped,
    FailbackGaveUp,
    FailbackLost,
    FailbackQueued,
    HeartbeatMissed,
    HedgeSent,
    IdleCloseSkipped,
    IdleDetectionLimited,
    InstancePublished,
    InstancesChanged,
    InstancesRetained,
    InstanceWithdrawn,
    LateResponse,
    RecordSkipped,
    RegistryFailed,
    RegistryRecovered,
    RetryScheduled,
    RetryStopped,
    ShutdownStep,
    SnapshotFailed,
    StaleInstancesKept,
    StreamStalled,
    SubchannelHealthy,
    SubchannelUnhealthy,
    TaskFailed,
    TaskSlow,
    TooManyTimers,
    UnmatchedResponse,
    WithdrawalFailed,
)
from .hub import Sink, add_sink, emit, remove_sink
from .log import log_event
from .rate_limit import Suppressed

__all__ = [
    "CallSlow",
    "CallbackFailed",
    "ConnectionAlive",
    "ConnectionClosed",
    "ConnectionDead",
    "ConnectionIdle",
    "ConnectionReplaced",
    "DeadLetterFailed",
    "DeadlineExceededBeforeStart",
    "DefaultResponseUsed",
    "Event",
    "ExecutorRejected",
    "FailbackAttemptFailed",
    "FailbackDelivered",
    "FailbackDropped",
    "FailbackGaveUp",
    "FailbackLost",
    "FailbackQueued",
    "HeartbeatMissed",
    "HedgeSent",
    "IdleCloseSkipped",
    "IdleDetectionLimited",
    "InstancePublished",
    "InstanceWithdrawn",
    "InstancesChanged",
    "InstancesRetained",
    "LateResponse",
    "RecordSkipped",
    "RegistryFailed",
    "RegistryRecovered",
    "RetryScheduled",
    "RetryStopped",
    "ShutdownStep",
    "Sink",
    "SnapshotFailed",
    "StaleInstancesKept",
    "StreamStalled",
    "SubchannelHealthy",
    "SubchannelUnhealthy",
    "Suppressed",
    "TaskFailed",
    "TaskSlow",
    "TooManyTimers",
    "UnmatchedResponse",
    "WithdrawalFailed",
    "add_sink",
    "emit",
    "log_event",
    "remove_sink",
]
