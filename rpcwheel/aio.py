"""The names of `rpcwheel`, for programs that use `grpc.aio`.

What waits is a coroutine here, and what makes channels and servers makes those of `grpc.aio`; the
rest (policies, errors, timers) is the same in both worlds, and stands here too, so that
`from rpcwheel import aio` suffices::

    retry = aio.RetryPolicy(retry_on={"UNAVAILABLE"})  # of the methods marked idempotent
    methods = {"/shop.Orders/Get*": aio.MethodPolicy(idempotent=True)}
    async with aio.Kit(timeout=2.0, retry=retry, methods=methods) as kit:
        channel = kit.intercept_channel(grpc.aio.insecure_channel("127.0.0.1:50051"))
        server = grpc.aio.server(interceptors=kit.server_interceptors())
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import RENAMED, lazy_names

if TYPE_CHECKING:
    from rpcwheel.balancer import (
        BalancerPolicy,
        BroadcastFailed,
        LeastRequest,
        OutlierEjectionPolicy,
        Picker,
        RingHash,
        RoundRobin,
        WeightedRandom,
        WeightedRoundRobin,
    )
    from rpcwheel.balancer.aio import BalancedChannel, BroadcastChannel, Subchannel
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
        FailbackPolicy,
        FailbackStats,
        FailedCall,
        with_failback,
    )
    from rpcwheel.failback.aio import FailbackInvoker
    from rpcwheel.heartbeat import (
        HealthProbe,
        HeartbeatPolicy,
        HeartbeatState,
        MethodProbe,
        Probe,
        Verdict,
    )
    from rpcwheel.heartbeat.aio import Heartbeat, HeartbeatManager
    from rpcwheel.idle import Connection, IdlePolicy
    from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector
    from rpcwheel.interceptors.aio import (
        FailbackQueues,
        client_interceptors,
        intercept_channel,
        server_interceptors,
    )
    from rpcwheel.kit import KitPolicy
    from rpcwheel.kit.aio import Kit
    from rpcwheel.options import Finding, channel_options, check_options, server_options
    from rpcwheel.pending import PendingStats
    from rpcwheel.pending.aio import CallFuture, PendingCalls
    from rpcwheel.registry import RegistryBackend, RegistryPolicy, ServiceInstance, Snapshot
    from rpcwheel.registry.aio import (
        Publisher,
        Registration,
        Registry,
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
    from rpcwheel.transport.aio import ReconnectingChannel

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "rpcwheel": " ".join(__all__),  # all that is the same in both worlds, but for:
            "rpcwheel.transport.aio": "ReconnectingChannel",
            "rpcwheel.balancer.aio": "BalancedChannel BroadcastChannel Subchannel",
            "rpcwheel.pending.aio": "CallFuture PendingCalls",
            "rpcwheel.failback.aio": "FailbackInvoker",
            "rpcwheel.heartbeat.aio": "Heartbeat HeartbeatManager",
            "rpcwheel.idle.aio": "ConnectionTable IdleConnectionDetector",
            "rpcwheel.interceptors.aio": (
                "FailbackQueues client_interceptors intercept_channel server_interceptors"
            ),
            "rpcwheel.kit.aio": "Kit",
            "rpcwheel.registry.aio": (
                "Publisher Registration Registry Subscription insecure_channel "
                "open_registry secure_channel"
            ),
        },
        renamed=RENAMED,
    )
