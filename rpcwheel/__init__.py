"""rpcwheel: what lives by time in a gRPC service, on one shared wheel timer.

The map, from what you import down to what it stands on:

==============  ====================================================================================
`kit`           All of it in one object: `Kit(timeout=2.0, retry=...)`, from code or a file.
`interceptors`  Where gRPC's calls come in, client and server: `client_interceptors`, `CallPolicy`.
`call`          Deadlines, retries and default responses: `RetryPolicy`, `current_deadline`.
`pending`       Calls of your own transport that wait for answers: `PendingCalls`.
`heartbeat`     Silent connections are asked whether they live: `HeartbeatManager`.
`idle`          Connections of a server that nobody uses are closed: `IdleConnectionDetector`.
`failback`      Answer now, deliver later: `with_failback` queues a failed call and makes it again.
`registry`      Services that stay published, and channels to them: `insecure_channel("etcd://..")`.
`balancer`      One channel for all servers of a service: `BalancedChannel`.
`transport`     Channels whose connection can be replaced: `ReconnectingChannel`.
`options`       Options of grpc that do what they say, and a check of yours: `channel_options`.
`timer`         A million timeouts on one thread: `WheelTimer`, `AsyncWheelTimer`, `shared_timer`.
`observe`       What happened, and who is told: events, `add_sink`, the standard log.
`errors`        Every exception, drawn as a tree.
==============  ====================================================================================

All public names but those of `observe` stand here too: `from rpcwheel import Kit`. `rpcwheel.aio`
has the same names for `grpc.aio`. A name is loaded when it is first used; `import rpcwheel` alone
loads neither grpc nor pydantic. Each room's own docstring is its manual. `python -m rpcwheel
demo` shows it at work on a real server that is killed (it needs `pip install 'rpcwheel[cli]'`);
`python -m rpcwheel doctor HOST:PORT` says what it finds there, and `python -m rpcwheel registry
ls URL` who is published.

To read the code, begin with `rpc.py` (the terms), `failback/core.py` (a decision) and
`failback/sync.py` (its hands).
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import RENAMED, lazy_names

if TYPE_CHECKING:
    from rpcwheel.balancer import (
        BalancedChannel,
        BalancerPolicy,
        BroadcastChannel,
        BroadcastFailed,
        LeastRequest,
        OutlierEjectionPolicy,
        Picker,
        RingHash,
        RoundRobin,
        Subchannel,
        WeightedRandom,
        WeightedRoundRobin,
    )
    from rpcwheel.call import (
        CallPolicy,
        Deadline,
        DeadlinePolicy,
        DefaultResponsePolicy,
        HedgingPolicy,
        MethodPolicy,
        RetryPolicy,
        RetryThrottling,
        call_options,
        current_deadline,
        deadline_scope,
    )
    from rpcwheel.errors import (
        CallError,
        CallsClosed,
        CallTimeout,
        ConfigurationError,
        DuplicateKey,
        ExtraMissing,
        FailbackClosed,
        FailbackError,
        FailbackFull,
        InstanceIdConflict,
        NotPublished,
        RegistryClosed,
        RegistryError,
        RegistryRefused,
        RegistryUnavailable,
        RpcWheelError,
        TimerError,
        TimerStopped,
        TooManyCalls,
        TooManyTimeouts,
    )
    from rpcwheel.failback import (
        FailbackInvoker,
        FailbackPolicy,
        FailbackStats,
        FailedCall,
        with_failback,
    )
    from rpcwheel.heartbeat import (
        HealthProbe,
        Heartbeat,
        HeartbeatManager,
        HeartbeatPolicy,
        HeartbeatState,
        MethodProbe,
        Probe,
        Verdict,
    )
    from rpcwheel.idle import (
        Connection,
        ConnectionTable,
        IdleConnectionDetector,
        IdlePolicy,
    )
    from rpcwheel.interceptors import (
        FailbackQueues,
        client_interceptors,
        intercept_channel,
        server_interceptors,
    )
    from rpcwheel.kit import Kit, KitPolicy
    from rpcwheel.options import (
        Finding,
        channel_options,
        check_options,
        server_options,
    )
    from rpcwheel.pending import CallFuture, PendingCalls, PendingStats
    from rpcwheel.registry import (
        Publisher,
        Registration,
        Registry,
        RegistryBackend,
        RegistryPolicy,
        ServiceInstance,
        Snapshot,
        Subscription,
        insecure_channel,
        open_registry,
        secure_channel,
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
    from rpcwheel.transport import ReconnectingChannel

    from . import aio
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".balancer": (
                "BalancedChannel BalancerPolicy BroadcastChannel BroadcastFailed LeastRequest "
                "OutlierEjectionPolicy Picker RingHash RoundRobin Subchannel WeightedRandom "
                "WeightedRoundRobin"
            ),
            ".call": (
                "CallPolicy Deadline DeadlinePolicy DefaultResponsePolicy HedgingPolicy "
                "MethodPolicy RetryPolicy RetryThrottling call_options current_deadline "
                "deadline_scope"
            ),
            ".errors": (
                "CallError CallsClosed CallTimeout ConfigurationError ExtraMissing FailbackClosed "
                "FailbackError FailbackFull InstanceIdConflict DuplicateKey NotPublished "
                "RegistryClosed RegistryError RegistryRefused RegistryUnavailable RpcWheelError "
                "TimerError TimerStopped TooManyCalls TooManyTimeouts"
            ),
            ".failback": "FailbackInvoker FailbackPolicy FailbackStats FailedCall with_failback",
            ".heartbeat": (
                "HealthProbe Heartbeat HeartbeatManager HeartbeatPolicy HeartbeatState "
                "MethodProbe Probe Verdict"
            ),
            ".idle": "Connection ConnectionTable IdleConnectionDetector IdlePolicy",
            ".interceptors": (
                "FailbackQueues client_interceptors intercept_channel server_interceptors"
            ),
            ".kit": "Kit KitPolicy",
            ".options": "Finding channel_options check_options server_options",
            ".pending": "CallFuture PendingCalls PendingStats",
            ".registry": (
                "Publisher Registration Registry RegistryBackend RegistryPolicy "
                "ServiceInstance Snapshot Subscription insecure_channel open_registry "
                "secure_channel"
            ),
            ".transport": "ReconnectingChannel",
            ".timer": (
                "AsyncWheelTimer DeadlineHeap HashedWheel HierarchicalWheel Lateness ManualTimer "
                "PeriodicTask RetryTask SparseWheel Timeout TimerStats TimerTask WheelTimer "
                "shared_timer"
            ),
        },
        submodules=(
            "aio backoff balancer call durations errors failback heartbeat idle instance "
            "interceptors kit methods observe options pending policy probe registry rpc timer "
            "transport"
        ),
        renamed=RENAMED,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncWheelTimer",
    "BalancedChannel",
    "BalancerPolicy",
    "BroadcastChannel",
    "BroadcastFailed",
    "CallError",
    "CallFuture",
    "CallPolicy",
    "CallTimeout",
    "CallsClosed",
    "ConfigurationError",
    "Connection",
    "ConnectionTable",
    "Deadline",
    "DeadlineHeap",
    "DeadlinePolicy",
    "DefaultResponsePolicy",
    "DuplicateKey",
    "ExtraMissing",
    "FailbackClosed",
    "FailbackError",
    "FailbackFull",
    "FailbackInvoker",
    "FailbackPolicy",
    "FailbackQueues",
    "FailbackStats",
    "FailedCall",
    "Finding",
    "HashedWheel",
    "HealthProbe",
    "Heartbeat",
    "HeartbeatManager",
    "HeartbeatPolicy",
    "HeartbeatState",
    "HedgingPolicy",
    "HierarchicalWheel",
    "IdleConnectionDetector",
    "IdlePolicy",
    "InstanceIdConflict",
    "Kit",
    "KitPolicy",
    "Lateness",
    "LeastRequest",
    "ManualTimer",
    "MethodPolicy",
    "MethodProbe",
    "NotPublished",
    "OutlierEjectionPolicy",
    "PendingCalls",
    "PendingStats",
    "PeriodicTask",
    "Picker",
    "Probe",
    "Publisher",
    "ReconnectingChannel",
    "Registration",
    "Registry",
    "RegistryBackend",
    "RegistryClosed",
    "RegistryError",
    "RegistryPolicy",
    "RegistryRefused",
    "RegistryUnavailable",
    "RetryPolicy",
    "RetryTask",
    "RetryThrottling",
    "RingHash",
    "RoundRobin",
    "RpcWheelError",
    "ServiceInstance",
    "Snapshot",
    "SparseWheel",
    "Subchannel",
    "Subscription",
    "Timeout",
    "TimerError",
    "TimerStats",
    "TimerStopped",
    "TimerTask",
    "TooManyCalls",
    "TooManyTimeouts",
    "Verdict",
    "WeightedRandom",
    "WeightedRoundRobin",
    "WheelTimer",
    "__version__",
    "aio",
    "call_options",
    "channel_options",
    "check_options",
    "client_interceptors",
    "current_deadline",
    "deadline_scope",
    "insecure_channel",
    "intercept_channel",
    "open_registry",
    "secure_channel",
    "server_interceptors",
    "server_options",
    "shared_timer",
    "with_failback",
]
