"""The kit for `grpc.aio`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rpcwheel._concurrency.closing import AsyncClosing
from rpcwheel.durations import to_ns

from .base import KitBase

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc.aio

    from rpcwheel.balancer.pickers import Picker
    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.durations import Duration
    from rpcwheel.heartbeat.aio import Heartbeat
    from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector
    from rpcwheel.publisher.aio import Publisher
    from rpcwheel.registry.aio import Registry
    from rpcwheel.transport.probe import Probe

    Base = KitBase[
        grpc.aio.Channel,
        grpc.aio.Server,
        grpc.aio.ServerInterceptor,
        Heartbeat,
        ConnectionTable,
        IdleConnectionDetector,
        Registry,
        Publisher,
    ]
else:
    Base = KitBase

__all__ = ["Kit"]


class Kit(Base, AsyncClosing):
    """`rpcwheel.Kit` for channels and servers of `grpc.aio`.

    The methods that wait are coroutines. An async context manager that closes.

    Example::

        kit = rpcwheel.aio.Kit(timeout=2.0)
        server = grpc.aio.server(interceptors=kit.server_interceptors())
        async with kit, kit.channel("127.0.0.1:50051") as channel:
            ...  # at the end the kit delivers the queued calls
    """

    _world: ClassVar = "aio"

    def channel(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: grpc.Compression | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
        probe: Probe | None = None,
        service: str | None = None,
        lb_policy: str | Picker | None = None,
        group: str | None = None,
        version: str | None = None,
        zone: str | None = None,
        balancer_policy: BalancerPolicy | None = None,
    ) -> grpc.aio.Channel:
        """Make a channel with the policies in front, on a running event loop.

        The arguments are those of `rpcwheel.Kit.channel`, and `interceptors`, as in grpc.aio: they
        are called inside the policies, once for each attempt.
        """
        service_settings = {
            "service": service,
            "lb_policy": lb_policy,
            "group": group,
            "version": version,
            "zone": zone,
            "balancer_policy": balancer_policy,
        }
        return self._make_channel(
            target,
            credentials,
            probe,
            service_settings,
            options=options,
            compression=compression,
            interceptors=interceptors,
        )

    def client_interceptors(self) -> list[Any]:
        """Make those of one channel: `grpc.aio.insecure_channel(target, interceptors=these)`.

        Call it once for each channel. They do not know their channel, so `heartbeat` has no effect
        on it: the first call of a kit with `heartbeat` warns (`RuntimeWarning`).
        """
        from rpcwheel.interceptors.aio import make_interceptors

        self._warn_not_probed()
        return make_interceptors(
            self._policy, timer=self._timer, queues=self._queues, breakers=self._breakers
        )

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as with grpc
        """Retry each queued call now, and wait until none is queued; as `rpcwheel.Kit.flush`."""
        return bool(await self._queues.flush(timeout))

    async def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver those that are queued, and report the others.

        As `rpcwheel.Kit.close`.
        """
        to_ns(drain_timeout, subject="drain_timeout")
        self._queues.refuse_close_inside()
        try:
            undelivered: list[FailedCall] = await self._queues.close(drain_timeout)
            return undelivered
        finally:
            try:
                if self._manager is not None:
                    await self._manager.aclose()
            finally:
                self._close_servers()
