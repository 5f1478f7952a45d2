"""What the kits for `grpc` and for `grpc.aio` share: nearly all of them.

The classes that a kit uses have the same names in both worlds: `rpcwheel.heartbeat.sync` and
`rpcwheel.heartbeat.aio` each have a `HeartbeatManager`. `_load` imports the module of the kit's
world when it is needed first, so that a kit imports only what it uses. A type checker does not see
through that. Therefore the methods here are generic, and `sync.py` and `aio.py` say which types
they have.
"""

from __future__ import annotations

import importlib
import os
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Never, Self, TypeVar

from rpcwheel.admission.targets import Breakers
from rpcwheel.call.policy import CallPolicy
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, public_name, safe_repr, short_repr
from rpcwheel.methods import checked_pattern
from rpcwheel.policy import refusal
from rpcwheel.telemetry import components

from .policy import PREFIX, KitPolicy, journal_problems
from .subchannel_heartbeats import SubchannelHeartbeats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from pydantic import SecretStr

    from rpcwheel.admission.policy import BreakerPolicy, ConcurrencyPolicy, ThrottlePolicy
    from rpcwheel.call.failback_policy import FailbackPolicy
    from rpcwheel.call.policy import (
        DeadlinePolicy,
        DefaultResponsePolicy,
        HedgingPolicy,
        MethodPolicy,
        RetryPolicy,
    )
    from rpcwheel.durations import Duration
    from rpcwheel.failback.held_calls import FailbackStats
    from rpcwheel.failback.queued_call import QueueEntry
    from rpcwheel.heartbeat.policy import HeartbeatPolicy
    from rpcwheel.idle.policy import IdlePolicy
    from rpcwheel.limit.policy import LimitPolicy
    from rpcwheel.limit.rate import RatePolicy
    from rpcwheel.options.presets import ServerPreset
    from rpcwheel.publisher.publisher import PublisherBase
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.rpc import Criticality
    from rpcwheel.status.server import StatusServer
    from rpcwheel.timer.api import Timer
    from rpcwheel.transport.probe import Probe

Channel = TypeVar("Channel")
Server = TypeVar("Server")
ServerInterceptor = TypeVar("ServerInterceptor")
Heartbeat = TypeVar("Heartbeat")
ConnectionTable = TypeVar("ConnectionTable")
Detector = TypeVar("Detector")
Registry = TypeVar("Registry")
Publisher = TypeVar("Publisher")

CLOSED: Final = "this kit is closed; make another one"

NOT_PROBED: Final = (
    "Kit(heartbeat=...) has no effect on this channel: interceptors do not know their channel; "
    "make it with kit.channel(target), or use kit.intercept_channel(channel)"
)

NO_HEARTBEAT: Final = (
    "probe is what a heartbeat asks, and this kit has no `heartbeat`; make it with one, such as "
    "Kit(heartbeat=10.0)"
)

NO_IDLE: Final = "this kit has no `idle`; make it with one, such as Kit(idle=180.0)"

NO_TABLE: Final = (
    "no server waits for a detector: make the server with interceptors=kit.server_interceptors() "
    "first, and give it one detector"
)


@public_name("Kit")
class KitBase(
    Generic[
        Channel,
        Server,
        ServerInterceptor,
        Heartbeat,
        ConnectionTable,
        Detector,
        Registry,
        Publisher,
    ]
):
    """A kit without `channel`, `client_interceptors`, `server_executor`, `flush` and `close`."""

    _world: ClassVar[str]
    """The name of the modules of this world: "sync" or "aio"."""

    def __init__(
        self,
        *,
        timeout: float | timedelta | DeadlinePolicy | None = None,
        retry: RetryPolicy | None = None,
        hedging: float | timedelta | HedgingPolicy | None = None,
        default_response: DefaultResponsePolicy | None = None,
        failback: FailbackPolicy | None = None,
        idempotent: bool = False,
        wait_for_ready: bool | None = None,
        criticality: Criticality | str | None = None,
        limit: str | int | LimitPolicy | None = None,
        throttle: float | ThrottlePolicy | None = None,
        breaker: float | BreakerPolicy | None = None,
        concurrency: str | int | ConcurrencyPolicy | None = None,
        rate: float | RatePolicy | None = None,
        methods: Mapping[str, MethodPolicy] | None = None,
        heartbeat: float | timedelta | HeartbeatPolicy | None = None,
        idle: float | timedelta | IdlePolicy | None = None,
        registry_policy: float | timedelta | RegistryPolicy | None = None,
        status_port: int | None = None,
        status_host: str = "127.0.0.1",
        status_token: str | SecretStr | None = None,
        timer: Timer | None = None,
        **unknown: Never,
    ) -> None:
        """Check the settings. Starts nothing but the live view, if there is a `status_port`.

        Args:
            timeout: Maximum seconds for each call, including all attempts, or a `DeadlinePolicy`.
            retry: Which failed calls are retried within their deadline. Only methods marked
                `idempotent` are retried.
            hedging: Seconds after which a call of an `idempotent` method is sent once more, or a
                `HedgingPolicy`.
            default_response: Which failed calls are logged and replaced by a default response.
            failback: Which failed calls get a default response and are retried in the background.
            idempotent: Whether a server may execute a call of any method twice without harm. Better
                mark single methods with `methods`, by `MethodPolicy(idempotent=True)`.
            wait_for_ready: The default of gRPC's argument `wait_for_ready`.
            criticality: How much calls matter if a server has to refuse some: a `Criticality` or
                its name. None: that of the call being served.
            limit: `"adaptive"`, a number, or a `LimitPolicy`: how many calls each server with
                `server_interceptors()` (and for `grpc`, `server_executor()`) works on at the same
                time. Others wait, and the least critical are refused if it is overloaded.
            throttle: The `multiplier` of a `ThrottlePolicy`, such as 2.0, or the policy: while a
                server accepts too few calls, only a part of them is sent.
            breaker: The `failure_rate` of a `BreakerPolicy`, such as 0.5, or the policy: after too
                many failures no calls are sent for some time. See `breakers`.
            concurrency: How many calls of a method run at the same time: a number, `"adaptive"`, or
                a `ConcurrencyPolicy`.
            rate: How many calls of a method are sent per second, or a `RatePolicy`.
            methods: Other settings for some methods, by pattern: `"/shop.Orders/Get*"`.
            heartbeat: Seconds of silence after which a heartbeat is sent on the channels of
                `channel()` and `intercept_channel()`, or a `HeartbeatPolicy`.
            idle: Seconds without use after which the connections of servers with `detect_idle()`
                are closed, or an `IdlePolicy`.
            registry_policy: Seconds after which a registry removes a server whose process is gone,
                or a `RegistryPolicy`; for the registries of `channel()` and `serve()`.
            status_port: The port of the live view: a page, `/status.json` and `/metrics`. 0: any
                free port, see `status_address`.
            status_host: Where the live view listens. Other machines need a `status_token`.
            status_token: What clients of the live view must know, 16 characters or more.
            timer: Any rpcwheel timer; None takes `shared_timer()` when one is needed.
            **unknown: Any other name is refused, and the error names the nearest setting.

        Raises:
            ConfigurationError: A setting is unknown or out of range, or contradicts another; or the
                `status_port` is in use.
            TypeError: A setting is of a wrong type.
        """
        arguments = locals()
        settings = {name: arguments[name] for name in KitPolicy.model_fields}
        policy = KitPolicy(**settings | {"methods": methods or {}}, **unknown)
        self._begin(policy, timer)

    @classmethod
    def from_policy(cls, policy: CallPolicy, *, timer: Timer | None = None) -> Self:
        """Make a kit from a `KitPolicy` or a `CallPolicy`.

        Raises:
            TypeError: `policy` is neither.
        """
        if not isinstance(policy, CallPolicy):
            raise TypeError(
                f"policy must be a KitPolicy or a CallPolicy, not {short_repr(policy)}; "
                f"{cls.__name__}(...) takes its settings by name"
            )
        if not isinstance(policy, KitPolicy):
            policy = KitPolicy(**{name: getattr(policy, name) for name in policy.model_fields_set})
        kit = cls.__new__(cls)
        kit._begin(policy, timer)  # noqa: SLF001 - its own
        return kit

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, timer: Timer | None = None) -> Self:
        """Make a kit from the settings in a TOML or YAML file (YAML needs `rpcwheel[config]`).

        Raises:
            ConfigurationError: The file can't be read, or settings in it are wrong; the message
                names the file and each place.
        """
        from .config import policy_from_file

        return cls.from_policy(policy_from_file(path), timer=timer)

    @classmethod
    def from_env(cls, prefix: str = PREFIX, *, timer: Timer | None = None) -> Self:
        """Make a kit from environment variables, which override the file that CONFIG names.

        Args:
            prefix: How the names of the variables begin: `RPCWHEEL_CONFIG=shop.toml`,
                `RPCWHEEL_TIMEOUT=2.0`, `RPCWHEEL_RETRY__RETRY_ON=["UNAVAILABLE"]`.
            timer: As in the constructor.

        Raises:
            ConfigurationError: A variable with this prefix names no setting, or its value is wrong.
            TypeError: `prefix` is not a string.
        """
        from .config import policy_from_env

        return cls.from_policy(policy_from_env(prefix), timer=timer)

    @classmethod
    def from_service_config(
        cls, config: str | Mapping[str, Any] | os.PathLike[str], *, timer: Timer | None = None
    ) -> Self:
        """Make a kit from a service config of gRPC, the format that gRPC in other languages reads.

        It applies `timeout`, `waitForReady`, `retryPolicy`, `hedgingPolicy` and `retryThrottling`.
        A method with a `retryPolicy` or `hedgingPolicy` counts as idempotent. A warning names what
        it does not apply. Do not give the same config to gRPC as the channel's option
        `grpc.service_config`: then both retry.

        Args:
            config: The JSON text, the mapping that it stands for, or the path of a file (a
                `pathlib.Path`; a plain string is taken for the text).
            timer: As in the constructor.

        Raises:
            ConfigurationError: It can't be read, or gRPC would refuse it.
            TypeError: It is of another type.
        """
        from .service_config import policy_from_service_config

        return cls.from_policy(policy_from_service_config(config), timer=timer)

    def _begin(self, policy: KitPolicy, timer: Timer | None) -> None:
        from rpcwheel.timer.manual import checked_timer

        self._policy = policy
        self._timer = checked_timer(timer)
        for layer in (policy, *policy.methods.values()):
            if layer.failback is not None:
                in_memory = layer.failback.model_copy(update={"journal": None})
                # Checks that this world can call `dead_letter`, without opening the journal.
                self._load("failback").FailbackInvoker(in_memory)
        problems = [message for _, message in journal_problems(policy)]
        if problems:
            raise refusal(problems, len(problems))
        components.start()
        self._queues: Any = self._load("interceptors").FailbackQueues(self._timer)
        self._breakers = Breakers(layer.breaker for layer in (policy, *policy.methods.values()))
        self._manager: Any = None
        if policy.heartbeat is not None:
            self._manager = self._load("heartbeat").HeartbeatManager.from_policy(
                policy.heartbeat, timer=self._timer
            )
        self._balanced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The process that attached heartbeats to the subchannels, by balanced channel."""
        self._has_warned = False
        self._tables: list[ConnectionTable] = []  # of servers without a detector
        self._detectors: dict[Any, None] = {}  # a set in order, to which any thread may add
        self._status: StatusServer | None = None
        if policy.status_port is not None:  # last: it may raise
            from rpcwheel.status.server import shared_server

            components.count_calls()
            token = policy.status_token
            self._status = shared_server(
                policy.status_port,
                policy.status_host,
                None if token is None else token.get_secret_value(),
            )

    @classmethod
    def _load(cls, package: str) -> Any:
        """Import the module of this world of a package."""
        return importlib.import_module(f"rpcwheel.{package}.{cls._world}")

    @property
    def policy(self) -> KitPolicy:
        """All settings. Immutable."""
        return self._policy

    def policy_for(self, method: str) -> MethodPolicy:
        """Return the effective settings of one method.

        Each setting comes from the most specific pattern in `methods` that matches the method and
        has the setting, or else from the settings for all methods.

        Args:
            method: The full name, `"/shop.Orders/Get"`; or a pattern, for the settings of all
                methods that match it.

        Raises:
            ConfigurationError: It is neither.
        """
        return self._policy.policy_for(checked_pattern(method))

    @property
    def status_address(self) -> str | None:
        """Where the live view is served, such as `127.0.0.1:9090`; None if it is not."""
        status = self._status
        return None if status is None or status.closed else status.address

    # Channels

    def _make_channel(
        self,
        target: str,
        credentials: Any,
        probe: Probe | None,
        service_settings: dict[str, Any],
        **arguments: Any,
    ) -> Channel:
        """Make the channel of `channel()`.

        `service_settings` apply only to a service in a registry; `arguments` are handed on to gRPC.
        """
        from rpcwheel.resolver.target import names_service

        if probe is not None and self._manager is None:
            raise ConfigurationError(NO_HEARTBEAT)
        self._refuse_closed()
        if names_service(target, service_settings):
            service_channel = self._service_channel(
                target, credentials, probe, service_settings, **arguments
            )
            return self._intercept(service_channel, keeps=True, stacklevel=5)
        from rpcwheel.instance import explicit_target
        from rpcwheel.transport.arguments import checked_target

        channel = self._load("transport").ReconnectingChannel(
            explicit_target(checked_target(target)), credentials, timer=self._timer, **arguments
        )
        if self._manager is not None:  # if it raises, the channel has no connection yet
            self._manager.attach(channel, probe=probe)
        return self._intercept(channel, keeps=True, stacklevel=5)

    def _service_channel(
        self,
        target: str,
        credentials: Any,
        probe: Probe | None,
        service_settings: dict[str, Any],
        **arguments: Any,
    ) -> Any:
        """Make a channel to a service in a registry, whose subchannels have heartbeats."""
        settings = arguments | service_settings | {"registry_policy": self._policy.registry_policy}
        if self._manager is not None:
            heartbeats = SubchannelHeartbeats(self._manager, probe)
            settings |= {"on_subchannel": heartbeats.add, "on_removed": heartbeats.remove}
        resolver = self._load("resolver")
        if credentials is None:
            return resolver.insecure_channel(target, timer=self._timer, **settings)
        return resolver.secure_channel(target, credentials, timer=self._timer, **settings)

    def intercept_channel(self, channel: Channel) -> Channel:
        """Put the policies in front of a channel. To close the result closes the channel.

        With `heartbeat` the channel gets a heartbeat (`heartbeats`), until the channel or this kit
        is closed. If the connection of a `ReconnectingChannel` is dead, it is replaced. Any other
        channel of gRPC cannot be reconnected and does not show its activity: it is probed once in
        each interval while it is connected, and its death is reported (`HeartbeatMissed`,
        `ConnectionDead`, `Heartbeat.state`). The kit keeps a reference to such a channel until
        then. Of a `BalancedChannel` each subchannel gets a heartbeat, and gets no calls after a
        heartbeat was missed, until it answers. Of a `BroadcastChannel` each of its channels gets
        one, until that channel or this kit is closed.

        With `heartbeat` and grpc.aio an event loop must be running.

        Warns (`RuntimeWarning`) if both this kit and the policies that the channel already has
        retry or hedge: their attempts multiply.

        Raises:
            RuntimeError: The kit has `heartbeat` and is closed.
        """
        self._refuse_closed()
        intercepted = self._intercept(channel, stacklevel=4)
        if self._manager is not None and not self._watch_parts(channel):
            on_close: Any = intercepted.on_close  # type: ignore[attr-defined]
            on_close(self._manager.attach(channel).detach)
        return intercepted

    def _watch_parts(self, channel: Any) -> bool:
        """Attach heartbeats to the parts of a channel; returns whether it consists of parts."""
        from rpcwheel.heartbeat.channel import channel_below_interceptors

        balancer, inner = self._load("balancer"), channel_below_interceptors(channel)
        if isinstance(inner, balancer.BroadcastChannel):
            for part in inner._channel:  # noqa: SLF001 - the list it was made of
                if not self._watch_parts(part):
                    self._manager.attach(part)
            return True
        if not isinstance(inner, balancer.BalancedChannel):
            return False
        if self._balanced.get(inner) != os.getpid():  # a forked child has no heartbeats
            self._balanced[inner] = os.getpid()
            heartbeats = SubchannelHeartbeats(self._manager, None)
            inner.add_listener(heartbeats.add, heartbeats.remove)
        return True

    def _refuse_closed(self) -> None:
        """Refuse a channel whose heartbeats have ended."""
        if self._manager is not None and self._manager.closed:
            raise RuntimeError(CLOSED)

    def _intercept(self, channel: Any, *, keeps: bool = False, stacklevel: int) -> Channel:
        """Apply the policies; `keeps`: the kit owns the channel, see `FailbackQueuesBase.keep`."""
        intercepted: Channel = self._load("interceptors").apply_policies(
            channel,
            self._policy,
            timer=self._timer,
            queues=self._queues,
            keeps=keeps,
            stacklevel=stacklevel,
            breakers=self._breakers,
        )
        return intercepted

    def _warn_not_probed(self) -> None:
        """Warn once that `heartbeat` has no effect on channels with `client_interceptors()`."""
        beat = self._policy.heartbeat
        if not self._has_warned and beat is not None and beat.interval is not None:
            self._has_warned = True
            warnings.warn(NOT_PROBED, RuntimeWarning, stacklevel=3)

    @property
    def breakers(self) -> Breakers:
        """The circuit breakers of the channels, to look at them and to set them by hand."""
        return self._breakers

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """The heartbeats of open channels of `channel()` and `intercept_channel()`."""
        return () if self._manager is None else self._manager.heartbeats

    # Servers

    def server_options(
        self,
        *,
        preset: ServerPreset = "wan",
        keepalive: Duration | None = None,
        ping_timeout: Duration | None = None,
        while_idle: bool = True,
        permit_every: Duration = 5.0,
        connection_idle: Duration | None = None,
        connection_age: Duration | None = None,
        connection_grace: Duration | None = None,
    ) -> list[tuple[str, int]]:
        """Make the options for a server: `grpc.server(pool, options=kit.server_options())`.

        With them the server finds dead clients by HTTP/2 pings, and permits the pings of clients.
        The arguments are those of `rpcwheel.options.server_options`. If the kit has `heartbeat`,
        the defaults of two of them come from it.

        Args:
            preset: As there.
            keepalive: As there. None: `heartbeat.interval`, at least 1 s.
            ping_timeout: As there. None: `heartbeat.timeout` less `heartbeat.interval`.
            while_idle: As there.
            permit_every: As there.
            connection_idle: As there.
            connection_age: As there.
            connection_grace: As there.

        Raises:
            ConfigurationError: A value is out of range.
            TypeError: A value is of a wrong type.
        """
        from rpcwheel.options import server_options

        beat = self._policy.heartbeat
        if beat is not None and beat.interval is not None:
            interval_ns = to_ns(beat.interval)
            timeout_ns = 3 * interval_ns if beat.timeout is None else to_ns(beat.timeout)
            if keepalive is None:
                keepalive = max(1.0, to_seconds(interval_ns))
            if ping_timeout is None:
                ping_timeout = to_seconds(timeout_ns - interval_ns)
        return server_options(
            preset=preset,
            keepalive=keepalive,
            ping_timeout=ping_timeout,
            while_idle=while_idle,
            permit_every=permit_every,
            connection_idle=connection_idle,
            connection_age=connection_age,
            connection_grace=connection_grace,
        )

    def server_interceptors(self) -> list[ServerInterceptor]:
        """Make the interceptors for one server: `grpc.server(pool, interceptors=these)`.

        They set the deadline and the criticality of the call in handlers, refuse calls whose
        deadline has passed, and report slow calls. Call it once for each server: with `idle` the
        first is the server's `ConnectionTable`, and with `limit` they count its calls. Put them
        before all others: a limit has no effect behind an interceptor that runs the others in a
        task or a `contextvars` context of its own. For a limit, the `pool` of a server of `grpc`
        must be `server_executor()`.
        """
        interceptors: list[Any] = self._load("interceptors").server_interceptors(
            self._policy, timer=self._timer
        )
        if self._policy.idle is None:
            return interceptors
        table: Any = self._load("idle").ConnectionTable()
        self._tables.append(table)
        interceptors.insert(0, table)
        return interceptors

    def detect_idle(
        self,
        server: Server,
        ports: int | str | Iterable[int | str] | None = None,
        *,
        connections: ConnectionTable | None = None,
    ) -> Detector:
        """Begin to close the idle connections of a server, as the setting `idle` says.

        For a server of grpc.aio: on its event loop.

        Args:
            server: A server that has `server_interceptors()`.
            ports: Where it listens: what `add_insecure_port()` returned. None: each port at which
                a call arrived.
            connections: The first of its interceptors; needed only if the kit has several servers.

        Returns:
            The detector; it ends with the server, or with this kit.

        Raises:
            ConfigurationError: This kit has no `idle`, or it is not clear which table is meant.
        """
        table = self._table_for(connections)
        detector: Any = self._load("idle").IdleConnectionDetector(
            server, connections=table, ports=ports, policy=self._policy.idle, timer=self._timer
        )
        with suppress(ValueError):  # a table of the user's own
            self._tables.remove(table)
        for other in tuple(self._detectors):
            if other.closed:
                self._detectors.pop(other, None)
        self._detectors[detector] = None
        return detector  # type: ignore[no-any-return]

    @property
    def detectors(self) -> tuple[Detector, ...]:
        """The running idle detectors of `detect_idle()` and `serve()`, oldest first.

        A server of `serve()` has one from the time when it is published until it is stopped. A
        detector of `detect_idle()` notices the end of its server at its next check. Thread-safe.
        """
        return tuple(detector for detector in tuple(self._detectors) if not detector.closed)

    def _table_for(self, connections: ConnectionTable | None) -> ConnectionTable:
        """Return the table that was given, or the only one without a detector."""
        if self._policy.idle is None:
            raise ConfigurationError(NO_IDLE)
        if connections is not None:
            return connections
        if not self._tables:
            raise ConfigurationError(NO_TABLE)
        if len(self._tables) > 1:
            raise ConfigurationError(
                f"server_interceptors() was called for {len(self._tables)} servers that have no "
                "detector; call it once for each server, and give its first interceptor here: "
                "detect_idle(server, connections=interceptors[0])"
            )
        return self._tables[0]

    def serve(  # noqa: D417 - the others are those of `Publisher`
        self,
        server: Server,
        *,
        publish: Registry | str | Sequence[Registry | str],
        service: str | Sequence[str] | None = None,
        port: int,
        host: str | None = None,
        id: str = "",  # noqa: A002 - as the instance has it
        weight: int = 100,
        group: str = "",
        version: str = "",
        protocol: str = "grpc",
        zone: str = "",
        metadata: Mapping[str, str] | None = None,
        health: Any = None,
        lame_duck: Duration | None = None,
        grace: Duration = 10.0,
        signals: bool = True,
        ports: int | str | Iterable[int | str] | None = None,
        connections: ConnectionTable | None = None,
    ) -> Publisher:
        """Publish a server while it serves, close its idle connections, and stop it in order.

            with kit.serve(server, publish=url, service="shop.Orders", port=50051):
                server.wait_for_termination()

        For grpc.aio: `async with` and `await server.wait_for_termination()`.

        The server is started if it does not run, and is published once it serves. At the end of
        the block, or at SIGTERM or SIGINT, it is withdrawn from the registries. It goes on serving
        for `lame_duck` seconds, in which clients receive the change, and only then it stops.

        The arguments that are not described here are those of `Publisher`.

        Args:
            server: A server of yours. With `idle`, it must have `server_interceptors()`; otherwise
                an `IdleDetectionLimited` event is emitted, and no connection is closed.
            publish: The URL of a registry, a `Registry`, or several of them. Registries that are
                given by URL have this kit's `registry_policy`.
            service: What to publish, one name or several. None: all services that the server has
                handlers for; a server of grpc.aio does not show them, so name them.
            signals: As for `Publisher`, but True unless given.
            ports: The ports of the idle detector, as in `detect_idle`; None: `port`. Only with
                `idle`.
            connections: As in `detect_idle`. Only with `idle`.

        Returns:
            The `Publisher`, a context manager.

        Raises:
            ConfigurationError: A value is not valid; the message says which ones are.
            ExtraMissing: A package that a registry needs is not installed.
            TypeError: An argument is of a wrong type.
        """
        from rpcwheel.publisher.published_instances import registry_entries

        on_serving: Callable[[PublisherBase[Any]], Callable[[], object]] | None = None
        if self._policy.idle is None and (ports is not None or connections is not None):
            raise ConfigurationError(f"ports, connections: {NO_IDLE}")
        if self._policy.idle is not None and connections is None and not self._tables:
            running: tuple[Any, ...] = self.detectors
            if server not in [detector._server() for detector in running]:  # noqa: SLF001
                from rpcwheel.events import IdleDetectionLimited, emit

                emit(IdleDetectionLimited(f"kit.serve starts no detector: {NO_TABLE}"))
        elif self._policy.idle is not None:
            table = self._table_for(connections)

            def on_serving(publisher: PublisherBase[Any]) -> Callable[[], object]:
                where = publisher.listening_port if ports is None else ports
                detector: Any = self.detect_idle(server, where, connections=table)
                return detector.close  # type: ignore[no-any-return]

        services = [service] if isinstance(service, str) else service or ()
        publisher: Publisher = self._load("publisher").Publisher(
            server,
            registry_entries(publish, self._load("registry").Registry, "publish"),
            *services,
            port=port,
            host=host,
            id=id,
            weight=weight,
            group=group,
            version=version,
            protocol=protocol,
            zone=zone,
            metadata=metadata,
            health=health,
            lame_duck=lame_duck,
            grace=grace,
            signals=signals,
            registry_policy=self._policy.registry_policy,
            timer=self._timer,
            on_serving=on_serving,
        )
        return publisher

    def _close_servers(self) -> None:
        """Close the live view and the idle detectors."""
        status, self._status = self._status, None
        if status is not None:
            status.close()
        for detector in tuple(self._detectors):
            detector.close()
        if self._tables:
            from rpcwheel.events import IdleDetectionLimited, emit

            reason = "a kit with `idle` is closed, and detect_idle(server) was not called for"
            emit(IdleDetectionLimited(f"{reason} {len(self._tables)} of its servers"))
            self._tables.clear()

    # Failback

    @property
    def pending(self) -> int:
        """How many calls are queued by failback."""
        count: int = self._queues.pending
        return count

    def stats(self) -> dict[str, FailbackStats]:
        """Count the calls of failback by their outcome, for each queue."""
        counts: dict[str, FailbackStats] = self._queues.stats()
        return counts

    def entries(self) -> dict[str, list[QueueEntry]]:
        """List the calls that failback has queued, oldest first, by the name of the queue.

        Thread-safe. See `FailbackInvoker.entries`.
        """
        entries: dict[str, list[QueueEntry]] = self._queues.entries()
        return entries

    @safe_repr
    def __repr__(self) -> str:
        """Names of settings only: a default response may be anything."""
        names = [
            name
            for name, field in KitPolicy.model_fields.items()
            if getattr(self._policy, name) != field.get_default(call_default_factory=True)
        ]
        if self._policy.methods:
            names.remove("methods")
            names.append(f"methods {', '.join(self._policy.methods)}")
        settings = ", ".join(names) or "nothing switched on"
        return f"<{type(self).__module__}.{type(self).__name__}: {settings}>"
