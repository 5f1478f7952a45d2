"""Channels of `grpc.aio` to an address, or to a service by its name; see `resolved_channel.py`.

The resolver updates its channel on the event loop on which the channel was made.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel.balancer.aio_channel import BalancedChannel
from rpcwheel.errors import RegistryError
from rpcwheel.instance import explicit_target
from rpcwheel.transport.aio import ReconnectingChannel
from rpcwheel.transport.arguments import checked_credentials, checked_target

from ._shared import ResolverBase, Shared, resolution_of
from .aio_face import Registry
from .target import names_service

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    import grpc.aio

    from rpcwheel.balancer.aio_channel import Subchannel
    from rpcwheel.balancer.pickers import Picker
    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.timer.api import Timer

    from ._shared import Resolution
    from .policy import RegistryPolicy

__all__ = ["ResolvedChannel", "insecure_channel", "secure_channel"]

SESSIONS: Final[Shared[Registry]] = Shared()
"""Of this process, for channels."""


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
    timer: Timer | None,
    *,
    options: Sequence[tuple[str, Any]] | None,
    compression: grpc.Compression | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None,
    **named: Any,
) -> ReconnectingChannel | ResolvedChannel:
    """Make the channel of `insecure_channel` and `secure_channel`; `named` are the other settings.

    Raises:
        RuntimeError, ConfigurationError, ExtraMissing, TypeError: As `insecure_channel`.
    """
    if names_service(target, named):
        return resolved_channel(
            target, credentials, options, compression, interceptors, timer=timer, **named
        )
    return ReconnectingChannel(
        explicit_target(checked_target(target)),
        credentials,
        options=options,
        compression=compression,
        interceptors=interceptors,
        timer=timer,
    )


def resolved_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, Any]] | None,
    compression: grpc.Compression | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None,
    **named: Any,
) -> ResolvedChannel:
    """Make a channel by name; `named` are the keyword arguments of `insecure_channel`.

    Raises:
        RuntimeError, ConfigurationError, ExtraMissing, TypeError: As `insecure_channel`.
    """
    if running_loop() is None:
        raise RuntimeError("no event loop runs here: make the channel in a coroutine")
    resolution, settings = resolution_of(target, Registry, "rpcwheel.aio.Registry", **named)
    channel = ResolvedChannel(
        resolution.target.service,
        credentials=credentials,
        options=options,
        compression=compression,
        interceptors=interceptors,
        **settings,
    )
    channel.start(Resolver(channel, resolution))
    return channel


class ResolvedChannel(BalancedChannel):
    """A channel that spreads its calls over the instances that a registry has of a service.

    Made by `insecure_channel` and `secure_channel`.
    """

    _resolver: Resolver | None = None

    def start(self, resolver: Resolver) -> None:
        """Have a resolver update this channel until it is closed or dropped.

        Raises:
            RegistryClosed: The registry is closed.
        """
        self._resolver = resolver
        self._dropped = weakref.finalize(
            self, EXECUTOR.submit, resolver, partial(_run, resolver.close)
        )
        self._dropped.atexit = False
        resolver.start()

    async def close(self, grace: float | None = None) -> None:
        """End all calls, close all connections, and release the registry. Idempotent.

        Args:
            grace: Seconds that calls in flight may go on, as in `grpc.aio`.
        """
        try:
            await super().close(grace)
        finally:
            if self._resolver is not None and self._dropped.detach():
                await self._resolver.close()


class Resolver(ResolverBase):
    """Updates one channel, which it holds weakly, with the instances of a service. On its loop."""

    sessions = SESSIONS
    registry_class = Registry

    def __init__(self, channel: ResolvedChannel, resolution: Resolution) -> None:
        super().__init__(channel, resolution)
        self._loop = asyncio.get_running_loop()
        self._lookup: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Subscribe.

        Raises:
            RegistryClosed: The registry is closed.
        """
        self._subscription = self._registry.subscribe(self._target.service, self._update)
        self._begin_lookup(wait=True)

    async def close(self) -> None:
        """End the subscription, and close the registry if no other channel uses it. Idempotent.

        Also on another loop, if the channel was dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._alarm.clear()
        if self._subscription is not None:
            self._subscription.close()
        if self._lookup is not None:
            call_on_loop(self._loop, self._lookup.cancel)
        if self._target.url is not None and SESSIONS.release(self._key, self._registry):
            await self._registry.close()

    def _begin_lookup(self, *, wait: bool) -> None:
        if not self._closed:
            self._lookup = self._loop.create_task(self._look_up(wait=wait))

    async def _look_up(self, *, wait: bool) -> None:
        """Find out whether the registry answers, and report to calls why not.

        Args:
            wait: Whether calls wait, and the registry is asked again, if it is unavailable.
        """
        try:
            await self._registry.lookup(self._target.service)
        except RegistryError as error:
            self._report(error, wait=wait)

    def _wait_is_over(self) -> None:
        call_on_loop(self._loop, self._look_up_again)

    def _look_up_again(self) -> None:
        self._alarm.rang()
        self._begin_lookup(wait=False)


def _run(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs on a worker, where there is no loop."""
    asyncio.run(close())
