"""The kit for `grpc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rpcwheel._concurrency.closing import Closing
from rpcwheel.durations import to_ns

from .base import KitBase

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

    from rpcwheel.balancer.pickers import Picker
    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.durations import Duration
    from rpcwheel.heartbeat.sync import Heartbeat
    from rpcwheel.idle.sync import ConnectionTable, IdleConnectionDetector
    from rpcwheel.limit.executor import ServerExecutor
    from rpcwheel.publisher.publisher import Publisher
    from rpcwheel.registry.sync import Registry
    from rpcwheel.transport.probe import Probe

    Base = KitBase[
        grpc.Channel,
        grpc.Server,
        grpc.ServerInterceptor,
        Heartbeat,
        ConnectionTable,
        IdleConnectionDetector,
        Registry,
        Publisher,
    ]
else:
    Base = KitBase

__all__ = ["Kit"]


class Kit(Base, Closing):
    """Settings for calls, connections and registries, and the channels and servers that use them.

    One kit serves any number of channels and servers; `rpcwheel.aio.Kit` is the one for `grpc.aio`.
    Close it at the end: calls may be queued. Thread-safe; a context manager that closes.

    Example::

        retry = RetryPolicy(retry_on={"UNAVAILABLE"})  # of the methods marked idempotent
        methods = {"/shop.Orders/Get*": MethodPolicy(idempotent=True)}
        kit = rpcwheel.Kit(timeout=2.0, retry=retry, methods=methods)
        server = grpc.server(pool, interceptors=kit.server_interceptors())
        with kit, kit.channel("127.0.0.1:50051") as channel:
            ...  # at the end the kit delivers the queued calls
    """

    _world: ClassVar = "sync"

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
        balancer_policy: BalancerPolicy | None = None,
    ) -> grpc.Channel:
        """Make a channel with the policies in front.

        To an address: a `ReconnectingChannel`. If the kit has `heartbeat`, it is probed, and its
        connection is replaced if it is dead. To a service in a registry: a channel as of
        `rpcwheel.insecure_channel` or `secure_channel`. If the kit has `heartbeat`, each of its
        subchannels is probed, and gets no calls after a heartbeat was missed, until it answers.

        Close it. If calls of it are queued then, new calls are refused, `.future()` calls and
        streams are canceled, and blocking calls that run end by themselves. Its connections are
        kept until the queued calls are delivered, or the kit is closed.

        For other settings make a channel yourself, and give it to `intercept_channel`.

        Args:
            target: As in `rpcwheel.insecure_channel`: `"127.0.0.1:50051"`, `"dns:///orders:50051"`,
                `"etcd://127.0.0.1:2379/shop.Orders"`.
            credentials: None for a channel without encryption.
            options: As in gRPC; `rpcwheel.options.channel_options()` makes some that fit together.
            compression: As in gRPC.
            probe: How its heartbeats probe the server; None: by the standard health service.
            service: This and the following, for a service in a registry only: as in
                `rpcwheel.insecure_channel`.
            lb_policy: Which server gets a call.
            group: Which instances are used.
            version: The same for the version.
            zone: Where this client is.
            balancer_policy: How subchannels are treated.

        Raises:
            ConfigurationError: An argument is not valid; the message says what is.
            ExtraMissing: A package that the registry needs is not installed.
            RuntimeError: The kit has `heartbeat` and is closed.
            TypeError: An argument is of a wrong type.
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
            target, credentials, probe, service_settings, options=options, compression=compression
        )

    def client_interceptors(self) -> list[Any]:
        """Make the interceptors for one channel: `grpc.intercept_channel(channel, *these)`.

        Call it once for each channel, because each result has one retry budget, for one target. The
        queues of failback are the kit's.

        They do not know their channel, so `heartbeat` has no effect on it: the first call of a kit
        with `heartbeat` warns (`RuntimeWarning`).
        """
        from rpcwheel.interceptors.sync import make_interceptors

        self._warn_not_probed()
        return make_interceptors(
            self._policy,
            timer=self._timer,
            queues=self._queues,
            stacklevel=3,
            breakers=self._breakers,
        )

    def server_executor(
        self, max_workers: int | None = None, *, thread_name_prefix: str = ""
    ) -> ServerExecutor:
        """Make the executor for one server with a `limit`, in place of a `ThreadPoolExecutor`.

            server = grpc.server(kit.server_executor(10), interceptors=kit.server_interceptors())

        Calls wait in it until they may run, not in an endless queue of the threads. Without a
        `limit`, it is a `ThreadPoolExecutor`.

        Args:
            max_workers: How many handlers can run at the same time at most, as in a
                `ThreadPoolExecutor`.
            thread_name_prefix: As in a `ThreadPoolExecutor`.

        Raises:
            ValueError: `max_workers` is not positive.
        """
        from rpcwheel.limit.executor import ServerExecutor

        return ServerExecutor(max_workers, thread_name_prefix)

    def flush(self, timeout: Duration | None = None) -> bool:
        """Retry each queued call now, and wait until none is queued. Returns whether none is.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.
        """
        return bool(self._queues.flush(timeout))

    def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver those that are queued, and report the others.

        Afterwards calls still work, but a call that failback would queue raises `FailbackClosed`.
        The heartbeats, the idle detectors and the live view end. Idempotent. `with kit:` closes
        too, but drops the list.

        Servers and open channels are not closed. Queued calls of channels of `channel()` are
        delivered also if these were closed before. Close channels of `intercept_channel()` after
        the kit, which delivers through them.

        Args:
            drain_timeout: Seconds to go on trying, however many attempts the policies allow. 0: not
                at all.

        Returns:
            The calls that were queued and were not delivered in that time, oldest first. Calls that
            were given up before went to `dead_letter`, the log and an event; `stats()` has their
            number, `gave_up`. See `FailbackInvoker.close`.

        Raises:
            RuntimeError: Called inside an attempt of a queued call. Nothing is closed.
            TypeError, ConfigurationError: `drain_timeout` is no time. Nothing is closed.
        """
        to_ns(drain_timeout, subject="drain_timeout")
        self._queues.refuse_close_inside()
        try:
            undelivered: list[FailedCall] = self._queues.close(drain_timeout)
            return undelivered
        finally:
            if self._manager is not None:
                self._manager.close()
            self._close_servers()
