"""The kit for `grpc.aio`: the twin of `sync.py`, with the same names and the same late imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from .base import INTERCEPTORS_UNWATCHED, KitBase, check_served

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import grpc.aio

    from rpcwheel.balancer.pickers import Picker
    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.durations import Duration
    from rpcwheel.failback.entry import FailedCall
    from rpcwheel.heartbeat.aio import Heartbeat, HeartbeatManager
    from rpcwheel.heartbeat.policy import HeartbeatPolicy
    from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector
    from rpcwheel.interceptors.aio import FailbackQueues
    from rpcwheel.probe import Probe
    from rpcwheel.registry.aio import Publisher, Registry

__all__ = ["Kit"]


class Kit(
    KitBase["FailbackQueues", "HeartbeatManager", "ConnectionTable", "IdleConnectionDetector"]
):
    """What `rpcwheel.Kit` is, for your own channels and servers of `grpc.aio`.

    As `rpcwheel.Kit`, with coroutines where it waits; an async context manager that closes.

    Example::

        async with rpcwheel.aio.Kit(timeout=2.0) as kit:
            channel = kit.intercept_channel(grpc.aio.insecure_channel("127.0.0.1:50051"))
            server = grpc.aio.server(interceptors=kit.server_interceptors())
    """

    def _make_queues(self) -> FailbackQueues:
        from rpcwheel.interceptors.aio import FailbackQueues

        return FailbackQueues(self._timer)

    def _make_manager(self, policy: HeartbeatPolicy) -> HeartbeatManager:
        from rpcwheel.heartbeat.aio import HeartbeatManager

        return HeartbeatManager.from_policy(policy, timer=self._timer)

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
        balancer: BalancerPolicy | None = None,
    ) -> grpc.aio.Channel:
        """Make a channel with the policies in front, whose connection is replaced when it is dead.

        As in the sync twin; on a running loop. `interceptors` are grpc's, inside the policies.
        """
        self._check_probe(probe)
        named: dict[str, Any] = {"service": service, "lb_policy": lb_policy, "group": group}
        named |= {"version": version, "zone": zone, "balancer": balancer}
        by_name = self._by_name(target, named, probe)
        channel: grpc.aio.Channel
        if by_name:
            from rpcwheel.registry.aio_resolved_channel import new_channel

            channel = new_channel(
                target,
                credentials,
                options=options,
                compression=compression,
                interceptors=interceptors,
                **by_name,
            )
        else:
            from rpcwheel.instance import explicit_target
            from rpcwheel.transport.aio import ReconnectingChannel
            from rpcwheel.transport.arguments import checked_target

            channel = ReconnectingChannel(
                explicit_target(checked_target(target)),
                credentials,
                options=options,
                compression=compression,
                interceptors=interceptors,
                timer=self._timer,
            )
            if self._manager is not None:  # refused, it was never used: no connection
                self._manager.attach(channel, probe=probe)
        return self._intercept(channel)

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """Those of open channels, made by `channel()` or given to `intercept_channel()`."""
        return () if self._manager is None else self._manager.heartbeats

    def client_interceptors(self) -> list[Any]:
        """Make those of one channel: `grpc.aio.insecure_channel(target, interceptors=these)`.

        Call it once for each channel, and with the same warning, as for `grpc`.
        """
        from rpcwheel.interceptors.aio import client_interceptors

        self._warn_unwatched(INTERCEPTORS_UNWATCHED)
        return client_interceptors(self._policy, timer=self._timer, queues=self._queues)

    def server_interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Make those of one server: `grpc.aio.server(interceptors=these)`; as in the sync twin."""
        from rpcwheel.interceptors.aio import server_interceptors

        interceptors = server_interceptors(self._policy, timer=self._timer)
        if self._policy.idle is None:
            return interceptors
        from rpcwheel.idle.aio import ConnectionTable

        table = ConnectionTable()
        self._tables.append(table)
        return [table, *interceptors]

    def detect_idle(
        self,
        server: grpc.aio.Server,
        ports: int | str | Iterable[int | str] | None = None,
        *,
        connections: ConnectionTable | None = None,
    ) -> IdleConnectionDetector:
        """Begin to close the connections of a server that do nothing; as in the sync twin.

        On the server's loop.
        """
        from rpcwheel.idle.aio import IdleConnectionDetector

        table = self._claim(connections)
        detector = IdleConnectionDetector(
            server, connections=table, ports=ports, policy=self._policy.idle, timer=self._timer
        )
        return self._looked_after(table, detector)

    def serve(
        self,
        server: grpc.aio.Server,
        *,
        publish: Registry | str | Sequence[Registry | str],
        service: str | Sequence[str] | None = None,
        port: int,
        ports: int | str | Iterable[int | str] | None = None,
        connections: ConnectionTable | None = None,
        signals: bool = True,
        **settings: Any,
    ) -> Publisher:
        """Publish a server while it serves, close its idle connections, and stop it in order.

            async with kit.serve(server, publish=url, service="shop.Orders", port=50051):
                await server.wait_for_termination()

        As in the sync twin, for `async with`. The services must be named.
        """
        from rpcwheel.registry.aio_publisher import Publisher

        check_served(settings)
        services = [service] if isinstance(service, str) else service or ()
        return Publisher(
            server,
            publish,
            *services,
            port=port,
            signals=signals,
            policy=self._policy.registry,
            timer=self._timer,
            on_serving=self._on_serving(server, ports, connections),
            **settings,
        )

    def intercept_channel(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Put the policies in front of a channel that exists already, and stays yours to close.

        With `heartbeat` the channel gets one, as for `grpc`; then a loop must be running.
        """
        intercepted = self._intercept(channel)
        if self._manager is not None:
            from rpcwheel.balancer.aio_channel import BalancedChannel

            self._watch(channel, intercepted, BalancedChannel)
        return intercepted

    def _intercept(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        from rpcwheel.interceptors.aio import intercept_channel

        return intercept_channel(channel, self._policy, timer=self._timer, queues=self._queues)

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as the twin
        """Try every parked call now, and wait until none is pending; as in the sync twin."""
        return await self._queues.flush(timeout)

    async def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Park no more calls, try to deliver those that are, and report the others; as the twin.

        Returns the calls that were queued and were not delivered in that time. Then the heartbeats
        and the idle detectors end.
        """
        try:
            return await self._queues.close(drain_timeout)
        finally:
            if self._manager is not None:
                await self._manager.aclose()
            self._end_detectors()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
