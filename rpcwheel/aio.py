"""The names of `rpcwheel`, for programs that use `grpc.aio`.

What blocks in `rpcwheel` is a coroutine here, and channels and servers are those of `grpc.aio`.
Policies, errors and timers are the same objects as in `rpcwheel`::

    retry = aio.RetryPolicy(retry_on={"UNAVAILABLE"})  # of the methods marked idempotent
    methods = {"/shop.Orders/Get*": aio.MethodPolicy(idempotent=True)}
    kit = aio.Kit(timeout=2.0, retry=retry, methods=methods)
    server = grpc.aio.server(interceptors=kit.server_interceptors())
    async with kit, kit.channel("127.0.0.1:50051") as channel:
        ...  # at the end the kit delivers the queued calls

The `grpc.aio` variant of a name that `rpcwheel` does not list is in its package:
`rpcwheel.heartbeat.aio.HeartbeatManager`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.admission import BreakerPolicy, ConcurrencyPolicy, ThrottlePolicy
    from rpcwheel.balancer import BalancerPolicy
    from rpcwheel.call import (
        CallPolicy,
        Criticality,
        DeadlinePolicy,
        DefaultResponsePolicy,
        HedgingPolicy,
        MethodPolicy,
        RetryPolicy,
        call_options,
        current_criticality,
        current_deadline,
        deadline_scope,
        with_breaker,
    )
    from rpcwheel.errors import ConfigurationError, RpcWheelError
    from rpcwheel.failback import FailbackPolicy, with_failback
    from rpcwheel.heartbeat import HeartbeatPolicy
    from rpcwheel.idle import IdlePolicy
    from rpcwheel.interceptors.aio import (
        client_interceptors,
        intercept_channel,
        server_interceptors,
    )
    from rpcwheel.kit.aio import Kit
    from rpcwheel.limit import LimitPolicy, RatePolicy
    from rpcwheel.publisher.aio import Publisher
    from rpcwheel.registry import RegistryPolicy
    from rpcwheel.registry.aio import open_registry
    from rpcwheel.resolver.aio import insecure_channel, secure_channel
    from rpcwheel.timer import AsyncWheelTimer, WheelTimer, shared_timer

__all__ = [
    "AsyncWheelTimer",
    "BalancerPolicy",
    "BreakerPolicy",
    "CallPolicy",
    "ConcurrencyPolicy",
    "ConfigurationError",
    "Criticality",
    "DeadlinePolicy",
    "DefaultResponsePolicy",
    "FailbackPolicy",
    "HeartbeatPolicy",
    "HedgingPolicy",
    "IdlePolicy",
    "Kit",
    "LimitPolicy",
    "MethodPolicy",
    "Publisher",
    "RatePolicy",
    "RegistryPolicy",
    "RetryPolicy",
    "RpcWheelError",
    "ThrottlePolicy",
    "WheelTimer",
    "call_options",
    "client_interceptors",
    "current_criticality",
    "current_deadline",
    "deadline_scope",
    "insecure_channel",
    "intercept_channel",
    "open_registry",
    "secure_channel",
    "server_interceptors",
    "shared_timer",
    "with_breaker",
    "with_failback",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "rpcwheel": " ".join(__all__),  # the same in both worlds, except:
            "rpcwheel.interceptors.aio": (
                "client_interceptors intercept_channel server_interceptors"
            ),
            "rpcwheel.kit.aio": "Kit",
            "rpcwheel.publisher.aio": "Publisher",
            "rpcwheel.registry.aio": "open_registry",
            "rpcwheel.resolver.aio": "insecure_channel secure_channel",
        },
        elsewhere=(
            "balancer.aio failback.aio heartbeat.aio idle.aio pending.aio registry.aio timer.aio "
            "transport.aio"
        ),
    )
