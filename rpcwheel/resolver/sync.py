"""Channels to an address, or to a service by its name: `insecure_channel` and `secure_channel`.

An address gets a `ReconnectingChannel`. A registry URL gets a `ResolvedChannel`, which spreads its
calls over the instances of the service. Its `Resolver` subscribes to the service and updates the
channel, on a worker thread. Channels with the URL of one registry share its session.

The resolver holds the channel weakly, so a channel that is dropped without `close()` releases its
registry by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rpcwheel.balancer.channel import BalancedChannel
from rpcwheel.registry.registry import Registry
from rpcwheel.transport.arguments import checked_credentials
from rpcwheel.transport.sync import ReconnectingChannel

from .resolver import new_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc

    from rpcwheel.balancer.channel import Subchannel
    from rpcwheel.balancer.pickers import Picker
    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.timer.api import Timer

    from .resolver import Resolver

__all__ = ["insecure_channel", "secure_channel"]


def insecure_channel(
    target: str,
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
    *,
    service: str | None = None,
    registry: Registry | None = None,
    lb_policy: str | Picker | None = None,
    group: str | None = None,
    version: str | None = None,
    zone: str | None = None,
    balancer_policy: BalancerPolicy | None = None,
    registry_policy: RegistryPolicy | None = None,
    on_subchannel: Callable[[Subchannel], object] | None = None,
    on_removed: Callable[[Subchannel], object] | None = None,
    timer: Timer | None = None,
) -> grpc.Channel:
    """Make a channel without encryption, as `grpc.insecure_channel`.

        channel = rpcwheel.insecure_channel("etcd://127.0.0.1:2379/shop.Orders")
        orders = OrdersStub(channel)

    Contacts nothing yet. Calls by name wait until the instances are known, at most
    `balancer_policy.pick_timeout`; then they end with UNAVAILABLE and the reason. If the registry
    fails later, the last known instances stay.

    Args:
        target: An address, `"127.0.0.1:50051"` or a URI of gRPC such as `"dns:///orders:50051"`; or
            a registry's URL with the service, `"etcd://127.0.0.1:2379/shop.Orders"`; or with
            `registry`, the name of the service. In `"unix:50051"` and `"dns:50051"` the word before
            the colon is a host name here, not a scheme as for gRPC.
        options: As in gRPC; by name, for the connection to each instance.
        compression: As in gRPC.
        service: This and the following, except `timer`, are for channels by name only. The
            service's name, if the URL does not have it.
        registry: A registry of yours, which stays open. Channels by URL share one session for each
            registry.
        lb_policy: How calls are spread: `"weighted_round_robin"` (the default), `"round_robin"`,
            `"weighted_random"`, `"least_request"`, `"ring_hash:HEADER"`, or a `Picker`.
        group: Only instances of this group; `"*"`: of any. None: what the URL says (`?group=`), or
            any.
        version: The same for the version.
        zone: Where this client is: instances of the zone are preferred.
        balancer_policy: How subchannels are treated; None: the defaults.
        registry_policy: Of the registry, if it is given by URL; None: the defaults.
        on_subchannel: Called with each subchannel when its channel is made.
        on_removed: Called with each subchannel whose instance is gone, if its channel was made.
        timer: Any rpcwheel timer; None takes `shared_timer()`.

    Returns:
        A `ReconnectingChannel` to an address, a `ResolvedChannel` to a service. Close it.

    Raises:
        ConfigurationError: An argument is not valid; the message says what is.
        ExtraMissing: A package that the registry needs is not installed.
        RuntimeError: The system can't start the timer's thread, which a channel by name needs.
        TypeError: An argument is of a wrong type.
    """
    return new_channel(ReconnectingChannel, ResolvedChannel, Registry, credentials=None, **locals())


def secure_channel(
    target: str,
    credentials: grpc.ChannelCredentials,
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
    *,
    service: str | None = None,
    registry: Registry | None = None,
    lb_policy: str | Picker | None = None,
    group: str | None = None,
    version: str | None = None,
    zone: str | None = None,
    balancer_policy: BalancerPolicy | None = None,
    registry_policy: RegistryPolicy | None = None,
    on_subchannel: Callable[[Subchannel], object] | None = None,
    on_removed: Callable[[Subchannel], object] | None = None,
    timer: Timer | None = None,
) -> grpc.Channel:
    """Make a channel with these credentials, as `grpc.secure_channel`; by name, to all instances.

    All other arguments, the result and the errors are those of `insecure_channel`.
    """
    checked_credentials(credentials)
    return new_channel(ReconnectingChannel, ResolvedChannel, Registry, **locals())


class ResolvedChannel(BalancedChannel):
    """A channel that spreads its calls over the instances that a registry has of a service.

    Made by `insecure_channel` and `secure_channel`.
    """

    _resolver: Resolver | None = None

    def close(self) -> None:
        """End all calls, close all connections, and release the registry. Idempotent.

        Not to be called where gRPC runs done-callbacks, as for any channel of gRPC.
        """
        try:
            super().close()
        finally:
            if self._resolver is not None:
                self._resolver.close()
