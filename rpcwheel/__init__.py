"""Resilience middleware for gRPC in Python, on one shared timing wheel.

Deadlines, retries, background redelivery, heartbeats, idle-connection handling and service
discovery, for `grpc` and `grpc.aio`.

Packages, highest layer first:

==============  ====================================================================================
`kit`           All policies in one object: `Kit(timeout=2.0, retry=...)`, from code or a file.
`interceptors`  The call policies as gRPC interceptors, client and server.
`failback`      Background retry of calls whose callers already have an answer: `with_failback`.
`heartbeat`     Probes silent connections and replaces dead ones: `HeartbeatManager`.
`idle`          Finds and closes idle connections of a server: `IdleConnectionDetector`.
`limit`         Keeps a server from being overloaded: `LimitPolicy`, `RatePolicy`, `ServerExecutor`.
`pending`       Calls over your own transport that wait for a response: `PendingCalls`.
`publisher`     Keeps a server published while it serves: `Publisher`.
`resolver`      Channels to services by name: `insecure_channel("etcd://...")`.
`registry`      Registers instances and finds them: `open_registry`, `RegistryPolicy`.
`balancer`      One channel over all instances of a service: `BalancedChannel`.
`call`          Deadlines, retries, hedging and default responses: `RetryPolicy`, `call_options`.
`admission`     Which calls a client sends: `BreakerPolicy`, `ThrottlePolicy`, `ConcurrencyPolicy`.
`transport`     A channel whose connection can be replaced: `ReconnectingChannel`.
`options`       gRPC's channel and server options, and a check of yours: `channel_options`.
`timer`         The timing wheel: `WheelTimer`, `AsyncWheelTimer`, `shared_timer`.
`events`        What happened, for logs and your own sinks: `add_sink`.
`errors`        Every exception.
`testing`       For tests: servers and registries that fail on command, pytest fixtures.
==============  ====================================================================================

The names that most programs need are here (`from rpcwheel import Kit`), with the same names for
`grpc.aio` in `rpcwheel.aio`; all others are in their packages (`rpcwheel.timer.ManualTimer`), or,
for `grpc.aio`, in the package's `aio` (`rpcwheel.heartbeat.aio.HeartbeatManager`). A name is loaded
when it is first used: `import rpcwheel` alone loads neither grpc nor pydantic.

From a shell, `rpcwheel doctor HOST:PORT` examines a server and `rpcwheel registry ls URL` lists
published instances.

pytest does not rewrite the assertions of this module, as it would warn if it is imported before
pytest starts: PYTEST_DONT_REWRITE.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names
from rpcwheel.telemetry import components as _components

if TYPE_CHECKING:
    from rpcwheel._version import __version__
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
    from rpcwheel.interceptors import client_interceptors, intercept_channel, server_interceptors
    from rpcwheel.kit import Kit
    from rpcwheel.limit import LimitPolicy, RatePolicy
    from rpcwheel.publisher import Publisher
    from rpcwheel.registry import RegistryPolicy, open_registry
    from rpcwheel.resolver import insecure_channel, secure_channel
    from rpcwheel.timer import AsyncWheelTimer, WheelTimer, shared_timer

    from . import (
        admission,
        aio,
        backoff,
        balancer,
        call,
        durations,
        errors,
        events,
        failback,
        heartbeat,
        idle,
        instance,
        interceptors,
        kit,
        limit,
        methods,
        metrics,
        options,
        pending,
        policy,
        publisher,
        registry,
        resolver,
        rpc,
        telemetry,
        testing,
        timer,
        transport,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "._version": "__version__",
            ".admission": "BreakerPolicy ConcurrencyPolicy ThrottlePolicy",
            ".balancer": "BalancerPolicy",
            ".call": (
                "CallPolicy Criticality DeadlinePolicy DefaultResponsePolicy HedgingPolicy "
                "MethodPolicy RetryPolicy call_options current_criticality current_deadline "
                "deadline_scope with_breaker"
            ),
            ".errors": "ConfigurationError RpcWheelError",
            ".failback": "FailbackPolicy with_failback",
            ".heartbeat": "HeartbeatPolicy",
            ".idle": "IdlePolicy",
            ".interceptors": "client_interceptors intercept_channel server_interceptors",
            ".kit": "Kit",
            ".limit": "LimitPolicy RatePolicy",
            ".publisher": "Publisher",
            ".registry": "RegistryPolicy open_registry",
            ".resolver": "insecure_channel secure_channel",
            ".timer": "AsyncWheelTimer WheelTimer shared_timer",
        },
        submodules=(
            "admission aio backoff balancer call durations errors events failback heartbeat idle "
            "instance interceptors kit limit methods metrics options pending policy publisher "
            "registry resolver rpc telemetry testing timer transport"
        ),
        elsewhere=(
            "admission balancer call errors failback heartbeat idle instance interceptors journal "
            "kit limit pending publisher registry resolver timer transport"
        ),
    )


def _counts_calls() -> bool:
    from rpcwheel.telemetry.switches import metric_sinks

    return bool(metric_sinks())


def _start_telemetry() -> None:
    from rpcwheel import _autostart

    _autostart.start()


_components.on_first(_start_telemetry, _counts_calls)

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
    "__version__",
    "aio",
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
