"""Channels of `grpc.aio` to an address, or to a service by its name.

`insecure_channel` and `secure_channel` return them. The channel to a service spreads its calls over
the instances of the service, and calls `on_subchannel` and `on_removed` on its event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rpcwheel._concurrency.loop import on_worker, running_loop
from rpcwheel.balancer.aio_channel import BalancedChannel
from rpcwheel.registry.aio import Registry
from rpcwheel.transport.aio import ReconnectingChannel
from rpcwheel.transport.arguments import checked_credentials

from .resolver import new_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc.aio

    from rpcwheel.balancer.aio_channel import Subchannel
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
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
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
) -> grpc.aio.Channel:
    """Make a channel without encryption, as `grpc.aio.insecure_channel`.

    The arguments are those of `rpcwheel.insecure_channel`, and `interceptors` as in `grpc.aio`: by
    name, those of the connection to each instance. A channel by name needs a running event loop,
    on which `on_subchannel` and `on_removed` are called.

    Raises:
        RuntimeError: A channel by name is made where no event loop runs; or the system
            can't start the timer's thread.
        ConfigurationError, ExtraMissing, TypeError: As `rpcwheel.insecure_channel`.
    """
    return new_channel(ReconnectingChannel, ResolvedChannel, Registry, credentials=None, **locals())


def secure_channel(
    target: str,
    credentials: grpc.ChannelCredentials,
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
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
) -> grpc.aio.Channel:
    """Make a channel with these credentials, as `grpc.aio.secure_channel`.

    All other arguments, the result and the errors are those of `insecure_channel`.
    """
    checked_credentials(credentials)
    return new_channel(ReconnectingChannel, ResolvedChannel, Registry, **locals())


class ResolvedChannel(BalancedChannel):
    """A channel that spreads its calls over the instances that a registry has of a service.

    Made by `insecure_channel` and `secure_channel`.
    """

    _resolver: Resolver | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        if running_loop() is None:
            raise RuntimeError("no event loop runs here: make the channel in a coroutine")
        super().__init__(*args, **settings)
        self._pool.jobs.enter()

    async def close(self, grace: float | None = None) -> None:
        """End all calls, close all connections, and release the registry. Idempotent.

        Args:
            grace: Seconds that calls in flight may go on, as in `grpc.aio`.
        """
        try:
            await super().close(grace)
        finally:
            if self._resolver is not None:
                await on_worker(self._resolver.close)
