"""Channels of `grpc.aio` to an address, or to a service by its name; see `resolved_channel.py`.

The resolver is the same; the channel calls `on_subchannel` and `on_removed` on its event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rpcwheel._concurrency.loop import on_worker, running_loop
from rpcwheel.balancer.aio_channel import BalancedChannel
from rpcwheel.instance import explicit_target
from rpcwheel.transport.aio import ReconnectingChannel
from rpcwheel.transport.arguments import checked_credentials, checked_target

from .aio_registry import Registry
from .resolver import Resolver, check_registry, resolution_of
from .target import names_service

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc.aio

    from rpcwheel.balancer.aio_channel import Subchannel
    from rpcwheel.balancer.pickers import Picker
    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy

__all__ = ["ResolvedChannel", "insecure_channel", "secure_channel"]


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
    policy: BalancerPolicy | None = None,
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
        RuntimeError: A channel by name is made where no event loop runs.
        ConfigurationError, ExtraMissing, TypeError: As `rpcwheel.insecure_channel`.
    """
    return new_channel(credentials=None, **locals())


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
    policy: BalancerPolicy | None = None,
    registry_policy: RegistryPolicy | None = None,
    on_subchannel: Callable[[Subchannel], object] | None = None,
    on_removed: Callable[[Subchannel], object] | None = None,
    timer: Timer | None = None,
) -> grpc.aio.Channel:
    """Make a channel with these credentials, as `grpc.aio.secure_channel`.

    All other arguments, the result and the errors are those of `insecure_channel`.
    """
    checked_credentials(credentials)
    return new_channel(**locals())


def new_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    *,
    options: Sequence[tuple[str, Any]] | None,
    compression: grpc.Compression | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None,
    timer: Timer | None,
    registry: Registry | None = None,
    **named: Any,
) -> ReconnectingChannel | ResolvedChannel:
    """Make the channel of `insecure_channel` and `secure_channel`; `named` are the other settings.

    Raises:
        RuntimeError, ConfigurationError, ExtraMissing, TypeError: As `insecure_channel`.
    """
    if not names_service(target, {"registry": registry, **named}):
        return ReconnectingChannel(
            explicit_target(checked_target(target)),
            credentials,
            options=options,
            compression=compression,
            interceptors=interceptors,
            timer=timer,
        )
    if running_loop() is None:
        raise RuntimeError("no event loop runs here: make the channel in a coroutine")
    check_registry(registry, Registry, "rpcwheel.registry.aio.Registry")
    blocking = None if registry is None else registry._blocking  # noqa: SLF001 - shared by both worlds
    resolution, settings = resolution_of(
        target, credentials=credentials, options=options, timer=timer, registry=blocking, **named
    )
    channel = ResolvedChannel(
        resolution.target.service, compression=compression, interceptors=interceptors, **settings
    )
    channel.start(Resolver(channel, resolution))
    return channel


class ResolvedChannel(BalancedChannel):
    """A channel that spreads its calls over the instances that a registry has of a service.

    Made by `insecure_channel` and `secure_channel`.
    """

    _resolver: Resolver | None = None

    def start(self, resolver: Resolver) -> None:
        """Have a resolver update this channel; callbacks are called on the running loop.

        Raises:
            RegistryClosed: The registry is closed.
        """
        self._pool.enter()
        self._resolver = resolver
        self._pool.on_unreachable = resolver.refresh
        resolver.start()

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
