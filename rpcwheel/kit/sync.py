"""The kit for `grpc`: its policies in front of your channels and servers, and around them.

Only the policies are imported with this module. All else is imported by the method that uses it, so
that `rpcwheel.Kit` loads fast, and a kit loads only what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from .base import INTERCEPTORS_UNWATCHED, KitBase, check_served

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import grpc

    from rpcwheel.balancer.pickers import Picker
    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.durations import Duration
    from rpcwheel.failback.entry import FailedCall
    from rpcwheel.heartbeat.policy import HeartbeatPolicy
    from rpcwheel.heartbeat.sync import Heartbeat, HeartbeatManager
    from rpcwheel.idle.sync import ConnectionTable, IdleConnectionDetector
    from rpcwheel.interceptors.sync import FailbackQueues
    from rpcwheel.probe import Probe
    from rpcwheel.registry.sync import Publisher, Registry

__all__ = ["Kit"]


class Kit(
    KitBase["FailbackQueues", "HeartbeatManager", "ConnectionTable", "IdleConnectionDetector"]
):
    """Deadlines, retries, default responses, failback, heartbeats, idle detection for your gRPC.

    One kit serves any number of channels and servers; `rpcwheel.aio.Kit` is that of `grpc.aio`.
    Close it at the end: calls may be queued. Thread-safe; a context manager that closes.

    Example::

        retry = RetryPolicy(retry_on={"UNAVAILABLE"})  # of the methods marked idempotent
        methods = {"/shop.Orders/Get*": MethodPolicy(idempotent=True)}
        with rpcwheel.Kit(timeout=2.0, retry=retry, methods=methods) as kit:
            channel = kit.intercept_channel(grpc.insecure_channel("127.0.0.1:50051"))
            server = grpc.server(pool, interceptors=kit.server_interceptors())
    """

    def _make_queues(self) -> FailbackQueues:
        from rpcwheel.failback.sync import FailbackInvoker
        from rpcwheel.interceptors.sync import FailbackQueues

        for policy in (self._policy, *self._policy.methods.values()):
            if policy.failback is not None:
                FailbackInvoker(policy.failback)  # refuses now what no thread could carry out
        return FailbackQueues(self._timer)

    def _make_manager(self, policy: HeartbeatPolicy) -> HeartbeatManager:
        from rpcwheel.heartbeat.sync import HeartbeatManager

        return HeartbeatManager.from_policy(policy, timer=self._timer)

    def channel(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: grpc.Compression | None = None,
        probe: Probe | None = None,
        service: str | None = None,
        lb_policy: str | Picker | None = None,
        group: str | None = None,
        version: str | None = None,
        zone: str | None = None,
        balancer: BalancerPolicy | None = None,
    ) -> grpc.Channel:
        """Make a channel with the policies in front, whose connection is replaced when it is dead.

        To an address: a `ReconnectingChannel`, with a heartbeat if this kit has `heartbeat`. To a
        service by its name: a channel as of `rpcwheel.insecure_channel` or `secure_channel`, each
        of whose subchannels has a heartbeat, and gets no calls while that is missed. Close it. For
        other settings make a channel yourself, and give it to `intercept_channel`.

        Args:
            target: As in `rpcwheel.insecure_channel`: `"127.0.0.1:50051"`, `"dns:///orders:50051"`,
                `"etcd://127.0.0.1:2379/shop.Orders"`.
            credentials: None for a channel without encryption.
            options: As grpc takes them; `rpcwheel.options.channel_options()` has some that work.
            compression: As grpc takes it.
            probe: What its heartbeats ask; None: the standard health service.
            service: This and the following are for channels by name; see
                `rpcwheel.insecure_channel`.
            lb_policy: As there.
            group: As there.
            version: As there.
            zone: As there.
            balancer: As `policy` there.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
            RuntimeError: The kit has `heartbeat` and is closed.
        """
        self._check_probe(probe)
        named: dict[str, Any] = {"service": service, "lb_policy": lb_policy, "group": group}
        named |= {"version": version, "zone": zone, "balancer": balancer}
        by_name = self._by_name(target, named, probe)
        channel: grpc.Channel
        if by_name:
            from rpcwheel.registry.resolved_channel import new_channel

            channel = new_channel(
                target, credentials, options=options, compression=compression, **by_name
            )
        else:
            from rpcwheel.instance import explicit_target
            from rpcwheel.transport.arguments import checked_target
            from rpcwheel.transport.sync import ReconnectingChannel

            channel = ReconnectingChannel(
                explicit_target(checked_target(target)),
                credentials,
                options=options,
                compression=compression,
                timer=self._timer,
            )
        try:
            if self._manager is not None and not by_name:
                self._manager.attach(channel, probe=probe)
            return self._intercept(channel)
        except BaseException:
            channel.close()
            raise

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """Those of open channels, made by `channel()` or given to `intercept_channel()`."""
        return () if self._manager is None else self._manager.heartbeats

    def client_interceptors(self) -> list[Any]:
        """Make the interceptors for one channel: `grpc.intercept_channel(channel, *these)`.

        Call it once for each channel: each call makes a new budget of retries, which is that of one
        target. The queues of failback are the kit's.

        They do not know their channel, so `heartbeat` has no effect on it: the first call of a kit
        with `heartbeat` warns (`RuntimeWarning`).
        """
        from rpcwheel.interceptors.sync import client_interceptors

        self._warn_unwatched(INTERCEPTORS_UNWATCHED)
        return client_interceptors(
            self._policy, timer=self._timer, queues=self._queues, _stacklevel=3
        )

    def server_interceptors(self) -> list[grpc.ServerInterceptor]:
        """Make the interceptors for one server: `grpc.server(pool, interceptors=these)`.

        With `idle` the first is the server's `ConnectionTable`: call it once for each server.
        """
        from rpcwheel.interceptors.sync import server_interceptors

        interceptors = server_interceptors(self._policy, timer=self._timer)
        if self._policy.idle is None:
            return interceptors
        from rpcwheel.idle.sync import ConnectionTable

        table = ConnectionTable()
        self._tables.append(table)
        return [table, *interceptors]

    def detect_idle(
        self,
        server: grpc.Server,
        ports: int | str | Iterable[int | str] | None = None,
        *,
        connections: ConnectionTable | None = None,
    ) -> IdleConnectionDetector:
        """Begin to close the connections of a server that do nothing, as `idle` says.

        Args:
            server: One that has `server_interceptors()`.
            ports: Where it listens: what `add_insecure_port()` returned. None: wherever a call has
                come in.
            connections: The first of its interceptors; needed only where there are several servers.

        Returns:
            The detector; it ends with the server, or with this kit.

        Raises:
            ConfigurationError: This kit has no `idle`, or it is not clear which table is meant.
        """
        from rpcwheel.idle.sync import IdleConnectionDetector

        table = self._claim(connections)
        detector = IdleConnectionDetector(
            server, connections=table, ports=ports, policy=self._policy.idle, timer=self._timer
        )
        return self._looked_after(table, detector)

    def serve(
        self,
        server: grpc.Server,
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

            with kit.serve(server, publish=url, service="shop.Orders", port=50051):
                server.wait_for_termination()

        The server is started if it does not run, and is published once it serves. At the end of
        the block, or at SIGTERM or SIGINT, it is withdrawn first, clients get some time to hear of
        it, and only then it stops. Registries that are given by URL have this kit's `registry`
        policy.

        Args:
            server: A server of yours; with `idle`, it must have `server_interceptors()`.
            publish: The URL of a registry, a registry of yours, or several of them.
            service: What to publish; None: all services that the server has handlers for.
            port: Where clients reach the server; bound as `[::]:port` if nobody listens there.
            ports: The ports of the idle detector, as in `detect_idle`; None: `port`.
            connections: As in `detect_idle`.
            signals: Whether SIGTERM and SIGINT stop the server in order; on the main thread only.
            **settings: Those of `Publisher`: `host`, `weight`, `health`, `lame_duck`, `grace`, ...

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
            ExtraMissing: A package that an engine needs is not installed.
        """
        from rpcwheel.registry.publisher import Publisher

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

    def intercept_channel(self, channel: grpc.Channel) -> grpc.Channel:
        """Put the policies in front of a channel, which stays yours to close.

        With `heartbeat` the channel below all interceptors gets one (`heartbeats`), until the
        channel is closed, or this kit. Only a `ReconnectingChannel` can be replaced when it is
        dead. Another channel of grpc is probed once in each interval while it is connected, because
        its activity is not seen, and its death is reported: `HeartbeatMissed`, `ConnectionDead`,
        `Heartbeat.state`. It is kept until then, also if you drop it. Of a `BalancedChannel` each
        subchannel gets a heartbeat, and no calls while that is missed.

        Raises:
            RuntimeError: It would get a heartbeat, and this kit is closed.
        """
        intercepted = self._intercept(channel)
        if self._manager is not None:
            from rpcwheel.balancer.channel import BalancedChannel

            self._watch(channel, intercepted, BalancedChannel)
        return intercepted

    def _intercept(self, channel: grpc.Channel) -> grpc.Channel:
        from rpcwheel.interceptors.sync import intercept_channel

        return intercept_channel(channel, self._policy, timer=self._timer, queues=self._queues)

    def flush(self, timeout: Duration | None = None) -> bool:
        """Try every parked call now, and wait until none is pending; True if none is.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.
        """
        return self._queues.flush(timeout)

    def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Park no more calls, try to deliver those that are, and report the others.

        Calls go on to work, but one that failback would park raises `FailbackClosed`. Then the
        heartbeats and the idle detectors end. Idempotent.
        Channels and servers are not closed: they are yours. Close the kit before the channels: it
        delivers through them. `with kit:` closes too, but drops the list.

        Args:
            drain_timeout: Seconds to go on trying, however many retries the policies allow. 0: not
                at all.

        Returns:
            The calls that were queued and were not delivered in that time, oldest first. Calls
            given up before went to `dead_letter`, the log and an event; `stats()` has their number,
            `abandoned`. See `FailbackInvoker.close`.
        """
        try:
            return self._queues.close(drain_timeout)
        finally:
            if self._manager is not None:
                self._manager.close()
            self._end_detectors()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
