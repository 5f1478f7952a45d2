"""What the publishers of both worlds share: what is published where, and how far they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar, cast

from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import MAX_NS, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, NotPublished
from rpcwheel.instance import ServiceInstance, joined, started_now
from rpcwheel.observe import CallbackFailed, ShutdownStep
from rpcwheel.timer.clock import checked_timer, clock_of

from .lifecycle import DOWN, LifecycleLimits, Phase, PortBinding, ServerLifecycle, Step, door
from .netinfo import accepts, host_towards, is_local, listening
from .url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .url import RegistryUrl

__all__ = [
    "PublisherBase",
    "checked_port",
    "named_services",
    "said_in",
    "several",
    "span_ns",
    "url_of",
]


R = TypeVar("R")

NOTICED_S: Final = 0.25

"""Between DRAINING and the withdrawal, so that who looks now and then sees the former; two looks of
the engines that have to be polled."""

ACCEPT_S: Final = 1.0

"""For one connection to the server's own port."""

HEALTH_S: Final = 1.0

"""For what the user's health servicer does."""

SERVING: Final = 1

NOT_SERVING: Final = 2

"""Of `grpc.health.v1.HealthCheckResponse.ServingStatus`."""

UNREGISTERED: Final = ("WITHDRAWING", "GONE")

NOT_PUBLISHED: Final = ("grpc.health.", "grpc.reflection.", "grpc.channelz.")

"""Beginnings of services that every server has."""


class PublisherBase(Generic[R]):
    """A server, its registries, and what is published of it where."""

    _kind: ClassVar[type[Any]]
    """Of registries."""
    _world: ClassVar[str]
    """The name of grpc's module."""

    def __init__(
        self,
        server: Any,
        registry: R | str | Sequence[R | str],
        *services: str,
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
        lame_duck: Duration = 1.0,
        grace: Duration = 10.0,
        signals: bool = False,
        policy: RegistryPolicy | None = None,
        timer: Timer | None = None,
        beside: Callable[[PublisherBase[R]], Callable[[], object]] | None = None,
    ) -> None:
        """Check the arguments, and open what is to be opened; nobody is contacted.

        Args:
            server: What `grpc.server()` gave; in the aio twin `grpc.aio.server()`. It stays yours,
                but is stopped at the end. If it is not started, it is.
            registry: Where it is published: a registry of yours, which is left open, or a URL, or
                several of them.
            *services: What is published. None: the services that the server has handlers for, but
                for health and reflection; a server of grpc.aio does not show them. The path of a
                URL names one too.
            port: Where clients reach it. If nobody listens there and the server is not started, it
                is bound first, without TLS, as `[::]:port`; 0 for one that is free.
            host: Where clients reach it. None: the address of this machine by which the registry is
                reached; 127.0.0.1 for one of this machine.
            id: By which the registry knows it; "" for `host:port`. Workers that share a port need
                one each: whoever publishes an id takes it from who had it.
            weight: Its share of the calls, from 0 to 1000.
            group: As clients ask for it.
            version: As clients ask for it.
            protocol: `"grpcs"` if it is over TLS.
            zone: Where it is, for clients that prefer their own.
            metadata: More to tell of it; words.
            health: The server's `grpc_health` servicer, or whatever has `set(service, status)`: it
                says SERVING before the services are published, and NOT_SERVING once they are
                withdrawn (by `enter_graceful_shutdown()` if there is one).
            lame_duck: Seconds between the withdrawal and the stop, for clients to hear of it.
            grace: Seconds that calls may go on after the stop.
            signals: Whether SIGTERM begins the ordered end, and SIGINT too; a second one ends it
                at once. On the main thread only; the handlers of before come back afterwards, and
                are not called meanwhile (those that a loop has added would be: asyncio's are
                refused, uvloop's can't be told). Wait for the end by the server's
                `wait_for_termination()`.
            policy: For registries that are given by URL; None: the defaults.
            timer: Any rpcwheel timer; None takes `shared_timer()`.
            beside: For `Kit.serve`: called when it serves; gives what is called after the stop.

        Raises:
            ConfigurationError: A value makes no sense; the message says which do.
            ExtraMissing: A package that an engine needs is not installed.
            TypeError: An argument is of a wrong type.
        """
        self._prepare()
        self._server = self._checked_server(server)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._health = self._checked_health(health)
        self._core = ServerLifecycle(
            LifecycleLimits(span_ns(lame_duck, "lame_duck"), span_ns(grace, "grace")),
        )
        self._signals = signals
        self._beside = beside
        self._end_beside: Callable[[], object] | None = None
        given = [registry] if isinstance(registry, (str, self._kind)) else several(registry)
        self._urls = [url for one in given if (url := url_of(one)) is not None]
        self._port, self._host = checked_port(port), host
        self._told = {
            "id": id,
            "weight": weight,
            "group": group or said_in(self._urls, "group"),
            "version": version or said_in(self._urls, "version"),
            "protocol": protocol,
            "zone": zone,
            "metadata": dict(metadata or {}),
        }
        self._services = named_services(services, self._urls)
        for service in self._services or ("checked",):
            self._instance(service, "checked" if host is None else host, self._port or 1)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._door = PortBinding.HERE
        self._instances: tuple[ServiceInstance, ...] = ()
        self._published: list[tuple[R, Any]] = []  # where, and what that has made of it
        self._events = NotificationQueue()
        self._answered: list[R] = []  # those that have said that it is withdrawn
        self._registries, self._own = self._opened(given, policy)

    # What a twin knows

    def _prepare(self) -> None:
        """Make what the twin waits with; before anything else."""
        raise NotImplementedError

    def _checked_server(self, server: Any) -> Any:
        raise NotImplementedError

    def _checked_health(self, health: Any) -> Any:
        if health is not None and not callable(getattr(health, "set", None)):
            raise TypeError(
                "health must be the server's health servicer, or what has "
                f"`set(service, status)`; not {health!r}"
            )
        return health

    def _open(self, url: str, policy: RegistryPolicy | None) -> R:
        raise NotImplementedError

    def _discard(self, registry: R) -> None:
        """Close one that was opened in vain."""
        raise NotImplementedError

    def _is_running(self) -> bool:
        raise NotImplementedError

    def _service_names(self) -> tuple[str, ...]:
        """Those that the server has handlers for, if that can be known."""
        return ()

    def begin_stop(self, reason: str = "asked for", grace: Duration | None = None) -> None:
        """Begin the ordered end, and return at once; any thread."""
        raise NotImplementedError

    # For users

    @property
    def registries(self) -> tuple[R, ...]:
        """Where it is published: those that were given, and those that were opened."""
        return tuple(self._registries)

    @property
    def instances(self) -> tuple[ServiceInstance, ...]:
        """What is published, one for each service; () before the start."""
        return self._instances

    @property
    def registrations(self) -> tuple[Any, ...]:
        """Of each instance in each registry, as those gave them; () before the start."""
        return tuple(one for _, one in self._published)

    @property
    def port(self) -> int:
        """Where clients reach it; 0 before the start if any will do."""
        return self._port

    @property
    def own_ports(self) -> int | None:
        """The port, if this process listens there itself; None if somebody in front of it does."""
        return None if self._door is PortBinding.OUTSIDE else self._port

    @property
    def state(self) -> str:
        """Which it is: "new", "starting", "serving", "ending" or "closed"."""
        return self._core.phase.value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name()}: {self.state}>"

    def _name(self) -> str:
        services = [one.service for one in self._instances] or list(self._services) or ["a server"]
        more = f" and {len(services) - 1} more" if len(services) > 1 else ""
        where = self._instances[0].address if self._instances else f"port {self._port}"
        return f"{services[0]}{more} at {where}"

    # On the way up

    def _opened(
        self, given: Sequence[R | str], policy: RegistryPolicy | None
    ) -> tuple[list[R], list[R]]:
        """All registries, and those of them that are ours to close."""
        for one in given:
            if not isinstance(one, (str, self._kind)):
                raise TypeError(
                    f"registry must be a {self._kind.__module__}.Registry or a URL such as "
                    f"'etcd://127.0.0.1:2379', or several; not {one!r}"
                )
        registries: list[R] = []
        own: list[R] = []
        try:
            for one in given:
                opened = self._open(one, policy) if isinstance(one, str) else one
                registries.append(opened)
                if isinstance(one, str):
                    own.append(opened)
                cast("Any", opened)._session.check_writable()  # noqa: SLF001 - of either world
        except BaseException:
            for one in own:
                self._discard(one)
            raise
        return registries, own

    def _begin(self) -> bool:
        """Whether to go up; False if that was begun before.

        Raises:
            RuntimeError: It has ended.
        """
        with self._lock:
            if self._core.begin(running=self._is_running()):
                return True
            if self._core.phase in {Phase.ENDING, Phase.CLOSED}:
                raise RuntimeError(f"{self!r} can't start again; make another for another server")
            return False

    def _find_door(self) -> PortBinding:
        """Tell how callers come in; blocks for microseconds, for a name as the resolver does."""
        mine = listening()
        host, port = self._host, self._port
        answered = bool(host and port and not accepts(host, port, ACCEPT_S))
        if mine is None:  # the system hides that
            mine = frozenset({("", port)} if not accepts("localhost", port, ACCEPT_S) else ())
        return door(
            port,
            listening={one for _, one in mine},
            running=self._core.was_running,
            elsewhere=host is not None and not is_local(host),
            answered=answered,
        )

    def _bind(self) -> None:
        """Have the server listen, as nobody does yet."""
        if self._told["protocol"] != "grpc":
            raise ConfigurationError(
                f"nothing in this process listens on port {self._port}, and which credentials it "
                f"takes is not known: call add_secure_port('[::]:{self._port}', credentials) first"
            )
        try:
            self._port = self._server.add_insecure_port(f"[::]:{self._port}")
        except RuntimeError as error:
            raise ConfigurationError(
                f"port {self._port} can't be bound, perhaps as another process listens there; give "
                "another, or, if that is in front of this server, host= and a server that has a "
                f"port of its own ({error})"
            ) from error

    def _whom(self) -> tuple[tuple[str, ...], str]:
        """What is published, and of which host; blocks as the resolver does."""
        services = self._services or tuple(
            name for name in self._service_names() if not name.startswith(NOT_PUBLISHED)
        )
        if not services:
            raise ConfigurationError(
                "name the services that are published: which ones the server has handlers for "
                "can't be known"
            )
        return services, host_towards(self._urls) if self._host is None else self._host

    def _make_instances(self, services: tuple[str, ...], host: str) -> None:
        now = started_now()
        self._instances = tuple(
            self._instance(service, host, self._port).changed(started_at=now)
            for service in services
        )

    def _instance(self, service: str, host: str, port: int) -> ServiceInstance:
        told: dict[str, Any] = self._told
        return ServiceInstance(service=service, host=host, port=port, **told)

    def _look(self, found: PortBinding) -> None:
        """See that callers find an open door."""
        if found is PortBinding.OUTSIDE:
            return
        host, port = self._instances[0].host, self._port
        refused = accepts(host, port, ACCEPT_S)
        if refused and (self._host is None or is_local(host)):
            where = sorted(joined(*one) for one in listening() or () if one[1] == port)
            raise ConfigurationError(
                f"nobody accepts connections at {joined(host, port)} ({refused}), so that it can't "
                f"be published; the server listens at {', '.join(where) or 'no port'}; have it "
                "listen at '[::]', or give the host= at which it does"
            )

    # On the way down

    def _turn(self, reason: str, grace: Duration | None) -> bool:
        """Ask for the end; True if somebody has to carry it out."""
        grace_ns = self._check(grace)
        with self._lock:
            return self._core.stop(reason, grace_ns)

    @staticmethod
    def _check(grace: Duration | None) -> int | None:
        return None if grace is None else span_ns(grace, "grace")

    def _next(self) -> Step | None:
        with self._lock:
            step = self._core.step(self._now_ns())
        if step in DOWN and step is not Step.CLOSE:  # that is told when it is over
            self._tell(step)
        return step

    def _tell(self, step: Step) -> None:
        if self._instances:
            self._events.emit(ShutdownStep(self._name(), step.value, self._core.reason))

    def _tell_failed(self, what: str, error: BaseException) -> None:
        self._events.emit(CallbackFailed(self._name(), what, error))

    def _draining(self, registry: R) -> list[Any]:
        """Have a registry tell that it ends; gives what is to be withdrawn there.

        What was unregistered by hand stays so, and what was changed by hand, too.
        """
        told: list[Any] = []
        for where, one in self._published:
            if where is registry and one.state not in UNREGISTERED:
                with suppress(NotPublished):  # it is unregistered just now
                    one.update(status="DRAINING")
                    told.append(one)
        return told

    def _left_s(self) -> float:
        with self._lock:
            return to_seconds(self._core.left_ns(self._now_ns()))

    def _patience_with(self, registry: R) -> float:
        """Seconds that a registry may take to close; little for one that did not answer before."""
        silent = bool(self._published) and registry not in self._answered
        return max(0.1, 0.0 if silent else self._left_s())

    def _statuses(self, status: int) -> list[tuple[str, int]]:
        """What the health servicer is told: of each service, and of the server as a whole."""
        return [("", status), *((one.service, status) for one in self._instances)]

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid


def several(registry: object) -> list[Any]:
    """As a list.

    Raises:
        TypeError, ConfigurationError: They are none; there are none.
    """
    if not isinstance(registry, Sequence) or isinstance(registry, (bytes, bytearray)):
        raise TypeError(
            "registry must be a registry, a URL such as 'etcd://127.0.0.1:2379', or several of "
            f"them; not {registry!r}"
        )
    if not registry:
        raise ConfigurationError("registry is empty; give at least one registry, or its URL")
    return list(registry)


def url_of(registry: object) -> RegistryUrl | None:
    """Where a registry is; None for one of the user's that does not say."""
    url = registry if isinstance(registry, str) else getattr(registry, "url", None)
    if not isinstance(url, str):
        return None
    try:
        return parse_url(url)
    except ConfigurationError:
        if isinstance(registry, str):
            raise
        return None


def said_in(urls: Sequence[RegistryUrl], name: str) -> str:
    """What the first URL that has such an option says; "" if none does."""
    return next((url.options[name] for url in urls if url.options.get(name)), "")


def named_services(services: tuple[str, ...], urls: Sequence[RegistryUrl]) -> tuple[str, ...]:
    """The services that were named, by arguments or URLs.

    Raises:
        TypeError, ConfigurationError: One is no string; a URL names another.
    """
    of_urls = tuple(url.service for url in urls if url.service)
    for service in services:
        if not isinstance(service, str):
            raise TypeError(
                f'a service is named by a string, such as "shop.Orders"; not {service!r}'
            )
    if services and not set(of_urls) <= set(services):
        raise ConfigurationError(
            f"the URL names the service {of_urls[0]!r}, which is not among {', '.join(services)}; "
            "leave it out of the URL, or name it too"
        )
    return tuple(dict.fromkeys(services or of_urls))


def checked_port(port: object) -> int:
    """Give it back.

    Raises:
        TypeError, ConfigurationError: It is none.
    """
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"port must be a number, such as 50051, not {port!r}")
    if not 0 <= port < 1 << 16:
        raise ConfigurationError(f"port must be from 1 to 65535, or 0 for any, not {port}")
    return port


def span_ns(value: Duration, what: str) -> int:
    """A length of time that may be nothing, in nanoseconds.

    Raises:
        TypeError, ConfigurationError: It is none.
    """
    given_ns = to_ns(value, what=what)
    if given_ns < 0:
        raise ConfigurationError(f"{what} must be 0 or more seconds, not {value!r}")
    return min(given_ns, MAX_NS)
