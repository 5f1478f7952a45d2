"""Publishes the services of a server while it serves, and stops both in order.

`PublisherBase` has the start and the stop, as blocking code. `Publisher` is the interface for
threads; `aio_publisher.py` has the interface for coroutines, which runs the same code on worker
threads. A `ServerAdapter` hides whether the server is one of `grpc` or of `grpc.aio`. A
`_StepDeadline` limits a step of the stop. The checks of arguments are at the end of the module.

Start (`_start`): the server starts, its port accepts a connection, its health is SERVING, and only
then it is published.

Stop (`_shut_down`): the server is withdrawn from the registries, its health is NOT_SERVING, it goes
on serving for a while (lame duck), it stops, and the registries that the publisher opened are
closed. Measured with eight busy clients over six replacements: in this order no call of 16,211
failed; if a server stopped before it was withdrawn, some did. A second signal, or a grace of 0,
hurries the stop: it then takes no more time than it must.

Threads: `start()` runs on its caller's thread, the stop on one worker thread. Registries, health
servicers and sinks run on workers of their own during the stop, so one that hangs delays it for a
bounded time only. Neither they nor any other user code are called under the lock.
"""

from __future__ import annotations

import enum
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

import grpc
import grpc.aio

from rpcwheel._concurrency.callbacks import CloseCallbacks
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.notifications import FLUSH_TIMEOUT_S, NotificationQueue
from rpcwheel._grpc.serving import has_terminated, is_running, services_of
from rpcwheel.durations import MAX_NS, to_ns, to_seconds
from rpcwheel.errors import (
    ConfigurationError,
    NotPublished,
    RegistryError,
    TimerError,
    public_name,
    safe_repr,
)
from rpcwheel.events import CallbackFailed, ShutdownStep, WithdrawalFailed
from rpcwheel.instance import ServiceInstance, started_now
from rpcwheel.registry.backends import check_writable
from rpcwheel.registry.registry import Registration, Registry, RegistryBase, checked_wait
from rpcwheel.registry.url import DUBBO_SCHEMES, parse_url
from rpcwheel.telemetry import components
from rpcwheel.timer import ManualTimer, shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of

from .netinfo import PortBinding, PublishedPort, address_facing
from .signals import SIGNAL_HANDLERS, is_main_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rpcwheel.durations import Duration
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.registry.url import RegistryUrl
    from rpcwheel.timer.api import Timer

R = TypeVar("R", bound=RegistryBase)

WITHDRAW_TIMEOUT_S: Final = 2.0
"""The timeout of the withdrawal from all registries together."""

DRAINING_NOTICE_S: Final = 0.25
"""The pause between DRAINING and the withdrawal. Clients with a registry that is polled, such as
`sqlite://` every 0.1 s, must see DRAINING."""

LAME_DUCK_S: Final = 1.0
"""The default for `lame_duck`."""

DUBBO_LAME_DUCK_S: Final = 10.0
"""Its default with a registry of Dubbo's. A consumer of Dubbo Java 3.3.6 lets one change of the
registry through in 5 s: it acted 4 to 7 s after a change, and does after 10 s at the latest."""

HEALTH_TIMEOUT_S: Final = 1.0
"""The limit for calls of the user's health servicer."""

STOP_MARGIN_S: Final = 1.0
"""The server may take this much longer than the grace to stop. The wait for the lame duck ends this
much late if its timeout is not run."""

CLOSE_TIMEOUT_S: Final = 2.0
"""The limit for closing the publisher's own registries, and for the user's callback."""

HURRIED_TIMEOUT_S: Final = 0.5
"""The limit for a step of a hurried stop, unless the step is left out."""

UNANSWERED_TIMEOUT_S: Final = 0.1
"""The limit for closing a registry whose withdrawal did not succeed in time: it may be dead."""

POLL_INTERVAL_S: Final = 0.05
"""How often a step checks whether the stop is hurried by now, or a manual clock has advanced."""

WORKER_START_TIMEOUT_S: Final = 0.5
"""How long `stop()` waits for a worker thread before it does the work itself."""

SIGNAL_CHECK_S: Final = 0.2
"""How often a wait lets the main thread run signal handlers; gRPC's own waits do so every 0.1 s."""

SERVING: Final = 1
NOT_SERVING: Final = 2
"""Both are numbers of `grpc.health.v1.HealthCheckResponse.ServingStatus`."""

UNREGISTERED_STATES: Final = ("WITHDRAWING", "GONE")
"""The states of a registration that the user has unregistered."""

UNPUBLISHED_PREFIXES: Final = ("grpc.health.", "grpc.reflection.", "grpc.channelz.")
"""Services with these prefixes are not published unless they are named: they describe a server."""


class ServerGone(Exception):
    """The event loop of a server of `grpc.aio` has ended, so the server can't be used any more."""


class ServerAdapter:
    """Adapts a server of `grpc`; its subclass adapts one of `grpc.aio`.

    Blocking; not for event loops.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    @property
    def is_gone(self) -> bool:
        """Whether `call` and `stop` have no effect any more."""
        return False

    @property
    def is_running(self) -> bool:
        """Whether the server was started and not stopped."""
        return bool(is_running(self._server))

    def service_names(self) -> tuple[str, ...]:
        """The services that the server has handlers for; () if that can't be known."""
        return services_of(self._server)

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        """Call a method of the server, or user code, where the server runs; returns the result.

        Raises:
            ServerGone: The server's event loop has ended.
        """
        return function(*args)

    def stop(self, grace_s: float) -> threading.Event:
        """Begin to stop: accept no more calls, and let running calls continue for `grace_s`.

        May be called again with 0 to end the running calls at once.

        Returns:
            An event that is set when the server has stopped.

        Raises:
            ServerGone: The server's event loop has ended.
        """
        stopped: threading.Event = self._server.stop(grace_s)
        return stopped


class PublisherState(enum.Enum):
    """The state of a publisher."""

    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"
    CLOSED = "closed"


class _StepDeadline:
    """The end of a step of the stop, by the timer's clock.

    A step takes at most `timeout_s` seconds, or `hurried_timeout_s` if the stop is hurried; both
    count from its begin.
    """

    def __init__(
        self, publisher: PublisherBase[Any], timeout_s: float, hurried_timeout_s: float
    ) -> None:
        self._now_ns, self._hurry = publisher._now_ns, publisher._hurry
        self._timeout_s, self._hurried_timeout_s = timeout_s, hurried_timeout_s
        self._begin_ns = self._now_ns()

    def left_s(self) -> float:
        """Return the seconds until the step is over, or 0."""
        timeout_s = self._hurried_timeout_s if self._hurry.is_set() else self._timeout_s
        return max(0.0, timeout_s - to_seconds(self._now_ns() - self._begin_ns))

    def wait_for(self, events: Iterable[threading.Event]) -> None:
        """Wait until all events are set, or the step is over."""
        for event in events:
            while (left_s := self.left_s()) > 0:
                if event.wait(min(left_s, POLL_INTERVAL_S)):
                    break


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """A publisher, as the live view shows it."""

    services: tuple[str, ...]
    state: str
    """See `PublisherBase.state`."""
    port: int
    problem: str
    """What is wrong, or an empty string."""


@public_name("Publisher")
class PublisherBase(Generic[R]):
    """A server, its registries, and the instances that are published of it.

    `R` is the class of registries that users give and get.
    """

    _registry_type: ClassVar[type[Any]]

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
        lame_duck: Duration | None = None,
        grace: Duration = 10.0,
        signals: bool = False,
        registry_policy: RegistryPolicy | None = None,
        timer: Timer | None = None,
        on_serving: Callable[[PublisherBase[R]], Callable[[], object]] | None = None,
    ) -> None:
        """Check the arguments and open the registries that are given by URL. Does not connect.

        Args:
            server: What `grpc.server()` returned; for `rpcwheel.aio`, `grpc.aio.server()`. It is
                started if it does not run, and stopped at the end.
            registry: Where to publish: a registry of yours, which is left open, a URL, or several
                of them.
            *services: The names of the services to publish. Without any: the services that the
                server has handlers for, except health, reflection and channelz; a server of
                grpc.aio does not show its services. The path of a URL may name one, too.
            port: Where clients reach the server. If nothing listens there and the server does not
                run, it is bound first, without TLS, as `[::]:port`; 0 takes any free port. A port
                at which another process listens is refused; to share it, bind it yourself.
            host: Where clients reach the server. None: the address of this machine that faces the
                registry; 127.0.0.1 for a registry on this machine.
            id: The instance's id in the registry; "" for `host:port`. Workers that share a port
                need one each: a process that publishes an id takes it over from the one before.
            weight: From 0 to 1000. An instance gets calls in proportion to its weight, unless the
                clients' `lb_policy` ignores weights, as "round_robin" does.
            group: Clients that ask for a group get only its instances.
            version: Clients that ask for a version get only its instances.
            protocol: `"grpc"`, or `"grpcs"` for a server with TLS.
            zone: For clients that prefer their own zone.
            metadata: More strings to publish, by key.
            health: The server's `grpc_health` servicer, or any object with `set(service, status)`.
                It gets SERVING before the services are published, and NOT_SERVING once they are
                withdrawn (by `enter_graceful_shutdown()` if it has that).
            lame_duck: Seconds between the withdrawal and the stop, in which clients hear of it.
                None: 1 s, or 10 s if a registry is Dubbo's.
            grace: Seconds for which running calls may go on after the stop.
            signals: Whether SIGTERM and SIGINT stop the server in order, and a second one at once.
                On the main thread only. Handlers that were set before are not called meanwhile, and
                are restored afterwards. (Handlers that were added to an event loop would be called:
                asyncio's are refused, uvloop's can't be detected.) Wait for the end with the
                server's `wait_for_termination()`.
            registry_policy: For registries that are given by URL; None: the defaults.
            timer: Any rpcwheel timer; None takes `shared_timer()`.
            on_serving: Called with this publisher once it is published; returns a function that is
                called after the server has stopped.

        Raises:
            ConfigurationError: A value is not valid; the message says which ones are.
            ExtraMissing: A package that a registry needs is not installed.
            TypeError: An argument is of a wrong type.
        """
        self._server: ServerAdapter = self._adapt(server)
        self._grpc_server = server
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._health = _checked_health(health)
        self._grace_s = _checked_seconds(grace, "grace")
        self._signals = signals
        self._on_serving = on_serving
        self._undo_on_serving: Callable[[], object] | None = None
        entries = (
            [registry]
            if isinstance(registry, (str, self._registry_type))
            else _checked_list(registry)
        )
        self._urls = [url for entry in entries if (url := _url_of(entry)) is not None]
        self._lame_duck_s = _lame_duck_s(lame_duck, self._urls)
        self._port = PublishedPort(host, _checked_port(port))
        self._instance_settings: dict[str, Any] = {
            "id": id,
            "weight": weight,
            "group": group or _url_option(self._urls, "group"),
            "version": version or _url_option(self._urls, "version"),
            "protocol": protocol,
            "zone": zone,
            "metadata": dict(metadata or {}),
        }
        self._services = _named_services(services, self._urls)
        # `ServiceInstance` checks its values. What is not known yet is replaced by valid values.
        for service in self._services or ("checked",):
            self._make_instance(service, "checked" if host is None else host, port or 1)

        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._state = PublisherState.NEW
        self._reason = ""
        self._instances: tuple[ServiceInstance, ...] = ()
        self._published: list[tuple[R, Registration]] = []
        self._withdrawn_from: list[R] = []
        self._events = NotificationQueue()
        # What the stop has to undo. Set before the step of the start, which may fail in its midst.
        self._must_stop_server = False
        self._must_set_not_serving = False
        self._must_withdraw = False
        # A server that ran before is left running if the start fails.
        self._ran_before = False
        self._start_failed = False

        self._hurry = threading.Event()  # set if the stop is hurried
        self._lame_duck_over = threading.Event()
        self._closed = threading.Event()
        self._on_closed = CloseCallbacks("publisher")
        self._shutdown_begun = threading.Event()
        self._busy_thread: int | None = None  # its ident, while it runs the start or the stop
        self._signal_names: SimpleQueue[str | None] = SimpleQueue()  # None ends its reader
        self._registries, self._own = self._open_all(entries, registry_policy)
        components.add("publisher", self)

    # What differs between `grpc` and `grpc.aio`

    def _adapt(self, server: Any) -> ServerAdapter:
        """Check the type of the server, and return its adapter."""
        raise NotImplementedError

    def _close(self, registry: R, timeout_s: float) -> None:
        """Close a registry; blocks for at most `timeout_s` seconds."""
        raise NotImplementedError

    # State

    @property
    def registries(self) -> tuple[R, ...]:
        """The registries that were given, and those that were opened for given URLs."""
        return tuple(self._registries)

    @property
    def instances(self) -> tuple[ServiceInstance, ...]:
        """The published instances, one for each service; () before the start."""
        return self._instances

    @property
    def registrations(self) -> tuple[Any, ...]:
        """The `Registration` of each instance in each registry; () before the start."""
        return tuple(registration for _, registration in self._published)

    @property
    def port(self) -> int:
        """Where clients reach the server; 0 before the start if any port will do."""
        return self._port.number

    @property
    def listening_port(self) -> int | None:
        """The port on which this process listens; None if only a proxy listens on `port`."""
        return None if self._port.binding is PortBinding.PROXY else self._port.number

    @property
    def state(self) -> str:
        """One of "new", "starting", "serving", "ending" and "closed"."""
        return self._state.value

    def status(self) -> PublisherStatus | None:
        """Describe the publisher now; None if it is closed."""
        state = self.state
        if state == "closed":
            return None
        services = tuple(instance.service for instance in self.instances)
        problem = "it stops" if state == "ending" else ""
        return PublisherStatus(services, state, self.port, problem)

    @safe_repr
    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name()}: {self.state}>"

    def _name(self) -> str:
        services = (
            [instance.service for instance in self._instances]
            or list(self._services)
            or ["a server"]
        )
        more = f" and {len(services) - 1} more" if len(services) > 1 else ""
        address = self._instances[0].address if self._instances else f"port {self._port.number}"
        return f"{services[0]}{more} at {address}"

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _make_instance(self, service: str, host: str, port: int) -> ServiceInstance:
        return ServiceInstance(service=service, host=host, port=port, **self._instance_settings)

    def _open_all(
        self, entries: Sequence[R | str], policy: RegistryPolicy | None
    ) -> tuple[list[R], list[R]]:
        """Return all registries, and those of them that the publisher has opened."""
        for entry in entries:
            if not isinstance(entry, (str, self._registry_type)):
                raise TypeError(
                    f"registry must be a {self._registry_type.__module__}.Registry or a URL such "
                    f"as 'etcd://127.0.0.1:2379', or several; not {entry!r}"
                )
        registries: list[R] = []
        own: list[R] = []
        try:
            for entry in entries:
                if isinstance(entry, str):
                    registry = self._registry_type(entry, registry_policy=policy, timer=self._timer)
                    own.append(registry)
                else:
                    registry = entry
                registries.append(registry)
                registry._session.check_writable()
        except BaseException:
            for registry in own:
                EXECUTOR.submit(registry, partial(self._close, registry, CLOSE_TIMEOUT_S))
            raise
        return registries, own

    # Start

    def _begin_start(self) -> bool:
        """Begin the start, which the caller continues with `_start`.

        On the main thread, signals are handled from now on.

        Returns:
            False if the start was begun before; the caller then does nothing.

        Raises:
            RuntimeError: It has been stopped; or a thread for signals can't be started.
        """
        with self._lock:
            if self._state in {PublisherState.STARTING, PublisherState.SERVING}:
                return False
            if self._state is not PublisherState.NEW:
                raise RuntimeError(f"{self!r} can't start again; make another for another server")
            if self._signals and is_main_thread():
                threading.Thread(
                    target=self._stop_on_signals, name="rpcwheel-signals", daemon=True
                ).start()
                SIGNAL_HANDLERS.add(self._signal_names.put)
            self._state = PublisherState.STARTING
            self._busy_thread = threading.get_ident()
        return True

    def _start(self) -> None:
        """Start and publish; if that fails, or a stop was requested meanwhile, undo it."""
        self._busy_thread = threading.get_ident()  # for aio a worker, not that of `_begin_start`
        try:
            for step in (self._start_server, self._check_port, self._set_serving, self._publish):
                if self._state is PublisherState.STARTING:
                    step()
        except BaseException as error:
            self._start_failed = True
            self.begin_stop(repr(error), 0)
            self._shut_down()
            raise
        with self._lock:
            if self._state is PublisherState.STARTING:
                self._state, self._busy_thread = PublisherState.SERVING, None
                return
        self._shut_down()

    def _start_server(self) -> None:
        self._ran_before = self._server.is_running
        port = self._port
        port.find_binding(server_runs=self._ran_before)
        services = self._services or tuple(
            name
            for name in self._server.service_names()
            if not name.startswith(UNPUBLISHED_PREFIXES)
        )
        if not services:
            raise ConfigurationError(
                "the server has no handlers of services that are known here; add its servicers "
                "first, or name the services that are published, as in service='shop.Orders'"
            )
        host = address_facing(self._urls) if port.host is None else port.host
        if port.binding is PortBinding.BIND:
            add_port = partial(self._server.call, self._grpc_server.add_insecure_port)
            port.bind(add_port, self._instance_settings["protocol"])
        now = started_now()
        self._instances = tuple(
            self._make_instance(service, host, port.number).replace(started_at=now)
            for service in services
        )
        self._must_stop_server = True
        if not self._ran_before:
            self._server.call(self._grpc_server.start)

    def _check_port(self) -> None:
        self._port.check(self._instances[0].host)

    def _set_serving(self) -> None:
        self._must_set_not_serving = True
        if self._health is not None:
            self._set_health(SERVING)

    def _set_health(self, status: int) -> None:
        services = [instance.service for instance in self._instances]
        for service in ("", *services):  # "" is the whole server
            self._server.call(self._health.set, service, status)

    def _publish(self) -> None:
        self._must_withdraw = True
        for registry in self._registries:
            for instance in self._instances:
                registration = registry._blocking.register(instance)
                self._published.append((registry, registration))
        if self._on_serving is not None:
            self._undo_on_serving = self._server.call(self._on_serving, self)

    # Stop

    def begin_stop(
        self, reason: str = "begin_stop() was called", grace: Duration | None = None
    ) -> None:
        """Begin the stop, and return at once; from any thread. Arguments as in `stop()`."""
        grace_s = checked_wait(grace, "grace")
        if self._is_forked():
            return
        if self._server.is_gone:
            grace_s = 0.0
        with self._lock:
            if self._state is PublisherState.CLOSED:
                return
            if grace_s is not None:
                self._grace_s = min(self._grace_s, grace_s)
            is_first = self._state is not PublisherState.ENDING
            if is_first:
                self._state, self._reason = PublisherState.ENDING, reason
        if grace_s == 0:
            self._hurry.set()
            self._lame_duck_over.set()
        if is_first:
            EXECUTOR.submit(self, self._shut_down_if_idle)

    def _shut_down_if_idle(self) -> None:
        """Shut down on this thread, unless another one has begun to.

        If a thread runs the start, that thread shuts down after it.
        """
        with self._lock:
            if self._busy_thread is not None or self._shutdown_begun.is_set():
                return
            self._busy_thread = threading.get_ident()
        self._shut_down()

    def _ensure_shutdown_runs(self) -> None:
        """Shut down on this thread if no worker begins to.

        Python starts no more threads in a program that ends.
        """
        if not self._shutdown_begun.wait(WORKER_START_TIMEOUT_S):
            self._shut_down_if_idle()

    def _stop_on_signals(self) -> None:
        """Stop at the first signal, and hurry at the next ones."""
        grace = None
        while (name := self._signal_names.get()) is not None:
            self.begin_stop(name, grace)
            self._ensure_shutdown_runs()
            grace = 0

    def _shut_down(self) -> None:
        """Stop in the order that the module's docstring gives, whatever fails."""
        self._shutdown_begun.set()
        try:
            if self._must_withdraw:
                step = self._begin_step("withdraw", WITHDRAW_TIMEOUT_S)
                withdrawals = [
                    (f"withdrawal from {registry!r}", partial(self._withdraw, registry, step))
                    for registry in self._registries
                ]
                self._run_all(step, *withdrawals)
            if self._must_set_not_serving:
                step = self._begin_step("not serving", HEALTH_TIMEOUT_S)
                self._run_all(step, (type(self._health).__name__, self._set_not_serving))
            if self._must_withdraw:
                self._begin_step("wait")
                self._run("lame duck", self._wait_lame_duck)
            is_left_running = self._ran_before and self._start_failed
            if self._must_stop_server and not is_left_running and not self._server.is_gone:
                step = self._begin_step("stop", self._grace_s + STOP_MARGIN_S, 0.0)
                self._run("stop of the server", partial(self._stop_server, step))
            # Without an event: "closed" is reported when this step has ended.
            step = _StepDeadline(self, CLOSE_TIMEOUT_S, HURRIED_TIMEOUT_S)
            closes = [(repr(own), partial(self._close_own, own, step)) for own in self._own]
            self._run_all(step, *closes, ("on_serving", self._call_undo_on_serving))
            self._report_failed_withdrawals()
            self._begin_step("closed")
            self._events.wait(FLUSH_TIMEOUT_S)
        finally:
            with self._lock:
                self._state, self._busy_thread = PublisherState.CLOSED, None
            SIGNAL_HANDLERS.remove(self._signal_names.put)
            self._signal_names.put(None)
            self._closed.set()
            self._on_closed.run()

    def _report_failed_withdrawals(self) -> None:
        """Report the registries that may still list the server."""
        for registry in self._registries:
            registrations = [each for owner, each in self._published if owner is registry]
            if any(registration.state != "GONE" for registration in registrations):
                errors = (registration.error for registration in registrations)
                first_error = next((error for error in errors if error is not None), None)
                self._events.emit(WithdrawalFailed(self._name(), registry.url, first_error))

    def _begin_step(
        self, name: str, timeout_s: float = 0.0, hurried_timeout_s: float = HURRIED_TIMEOUT_S
    ) -> _StepDeadline:
        """Emit the event of a step, and return the deadline of the step."""
        if self._instances:
            self._events.emit(ShutdownStep(self._name(), name, self._reason))
        return _StepDeadline(self, timeout_s, hurried_timeout_s)

    def _run_all(self, step: _StepDeadline, *jobs: tuple[str, Callable[[], object]]) -> None:
        """Run named jobs on workers, all at once; wait until they or the step have ended."""
        ends: list[threading.Event] = []
        for name, job in jobs:
            ended = threading.Event()  # also the key: a job that hangs delays no other
            EXECUTOR.submit(ended, partial(self._run, name, job, ended))
            ends.append(ended)
        step.wait_for(ends)

    def _run(
        self, name: str, job: Callable[[], object], ended: threading.Event | None = None
    ) -> None:
        """Run a job; an exception becomes a `CallbackFailed` event."""
        try:
            job()
        except ServerGone:
            pass  # there is nothing to stop any more
        except Exception as error:  # noqa: BLE001 - reported
            self._events.emit(CallbackFailed(self._name(), name, error))
        finally:
            if ended is not None:
                ended.set()

    def _withdraw(self, registry: R, step: _StepDeadline) -> None:
        """Publish DRAINING, give clients a moment to see it, and unregister.

        What the user has unregistered stays so, and so do changes that the user has made.
        """
        blocking = registry._blocking
        with suppress(RegistryError):  # it is dead, which it reports itself; or the user closed it
            draining: list[Registration] = []
            for owner, registration in self._published:
                if owner is registry and registration.state not in UNREGISTERED_STATES:
                    with suppress(NotPublished):  # the user unregisters it at this moment
                        registration.update(status="DRAINING")
                        draining.append(registration)
            # Half the time, so that a slow registry has the other half for the withdrawal.
            limit_s = 0.0 if self._hurry.is_set() else step.left_s() / 2
            until = time.monotonic() + limit_s
            is_draining_published = all(
                registration.wait_published(max(0.0, until - time.monotonic()))
                for registration in draining
            )
            if is_draining_published:
                self._hurry.wait(DRAINING_NOTICE_S)
            for registration in draining:  # first request all withdrawals, then wait for them
                blocking.unregister(registration)
            for registration in draining:
                blocking.unregister(registration, wait=step.left_s())
            self._withdrawn_from.append(registry)

    def _set_not_serving(self) -> None:
        enter_shutdown = getattr(self._health, "enter_graceful_shutdown", None)
        if callable(enter_shutdown):
            self._server.call(enter_shutdown)
        elif self._health is not None:
            self._set_health(NOT_SERVING)

    def _wait_lame_duck(self) -> None:
        """Wait on the timer, or until the stop is hurried."""
        timer = shared_timer() if self._timer is None else self._timer
        try:
            timeout = timer.new_timeout(lambda _: self._lame_duck_over.set(), self._lame_duck_s)
        except TimerError:  # it is stopped, or full
            self._lame_duck_over.wait(self._lame_duck_s)
            return
        # The timer may be stopped meanwhile. The time of a manual timer is not that of `wait`.
        limit_s = None if isinstance(timer, ManualTimer) else self._lame_duck_s + STOP_MARGIN_S
        self._lame_duck_over.wait(limit_s)
        timeout.cancel()

    def _stop_server(self, step: _StepDeadline) -> None:
        grace_s = self._grace_s
        stopped = self._server.stop(grace_s)
        step.wait_for([stopped])
        if self._hurry.is_set():
            has_grace_left = grace_s > 0 and not stopped.is_set()
            if has_grace_left:
                self._server.stop(0)
            stopped.wait(STOP_MARGIN_S)

    def _close_own(self, registry: R, step: _StepDeadline) -> None:
        may_be_dead = self._must_withdraw and registry not in self._withdrawn_from
        timeout_s = 0.0 if may_be_dead else step.left_s()
        self._close(registry, max(UNANSWERED_TIMEOUT_S, timeout_s))

    def _call_undo_on_serving(self) -> None:
        if self._undo_on_serving is not None:
            try:
                self._server.call(self._undo_on_serving)
            except ServerGone:  # there is no loop to call it on
                self._undo_on_serving()


class Publisher(PublisherBase[Registry]):
    """Publishes the services of a `grpc.server()` while it serves, and stops both in order.

        with Publisher(server, "etcd://127.0.0.1:2379", "shop.Orders", port=50051, signals=True):
            server.wait_for_termination()

    The stop: DRAINING, then withdrawn from all registries at once (at most 2 s, also if they are
    dead), health NOT_SERVING, the lame duck, no more calls are accepted, running calls may end
    within the grace, registries that were given by URL are closed. Each step is an event
    (`ShutdownStep`).

    A context manager, which calls `start()` and `stop()`. Thread-safe; all methods are idempotent.
    In a forked child it does nothing.
    """

    _registry_type = Registry

    def start(self) -> None:
        """Start the server if it does not run, and publish its services.

        If a registry can't be reached, that is no error: the services are published as soon as it
        can be. If the start fails, all of it is undone; a server that ran before is left running.

        Raises:
            ConfigurationError: Nothing listens at the port and it can't be bound, or it accepts no
                connections; or the services or the host can't be known.
            RuntimeError: It was stopped before.
            Exception: What the server or the health servicer raised.
        """
        if self._begin_start():
            self._start()

    def stop(
        self, grace: Duration | None = None, *, reason: str = "stop() was called", wait: bool = True
    ) -> None:
        """Stop in order; from any thread, any number of times.

        Args:
            grace: Seconds for which running calls may go on. Of all that were given, the smallest
                counts. 0: stop at once, without the lame duck.
            reason: For events; of several calls, the reason of the first counts.
            wait: Whether to wait until the publisher is closed. Give False where the stop waits for
                the caller, as in a handler of the server.
        """
        self.begin_stop(reason, grace)
        if wait and not self._is_forked() and self._busy_thread != threading.get_ident():
            self._ensure_shutdown_runs()
            self.wait()
            SIGNAL_HANDLERS.remove(self._signal_names.put)  # the main thread restores handlers

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait until it is closed, at most `timeout` seconds; returns whether it is."""
        timeout_s = checked_wait(timeout, "timeout")
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        left_s = until - time.monotonic()
        # Many short waits, because a wait of the main thread is not ended by a signal that arrives
        # just before it begins.
        while not self._closed.wait(max(0.0, min(left_s, SIGNAL_CHECK_S))):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
        return True

    def wait_published(self, timeout: Duration) -> bool:
        """Wait until all services are in all registries, at most `timeout` seconds.

        Returns whether they are.
        """
        until = time.monotonic() + (checked_wait(timeout, "timeout") or 0.0)
        return all(
            registration.wait_published(max(0.0, until - time.monotonic()))
            for registration in self.registrations
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(reason="the with block ended")

    def _adapt(self, server: Any) -> ServerAdapter:
        if isinstance(server, grpc.aio.Server):
            raise TypeError(
                f"{server!r} is a server of grpc.aio: for those there is rpcwheel.aio.Publisher"
            )
        if not isinstance(server, grpc.Server):
            raise TypeError(f"server must be what grpc.server() gave, not {server!r}")
        if has_terminated(server):
            raise ConfigurationError("the server was stopped before; make another")
        return ServerAdapter(server)

    def _close(self, registry: Registry, timeout_s: float) -> None:
        registry.close(timeout_s)


# Checks of arguments


def _checked_health(health: Any) -> Any:
    if health is not None and not callable(getattr(health, "set", None)):
        raise TypeError(
            "health must be the server's health servicer, or what has "
            f"`set(service, status)`; not {health!r}"
        )
    return health


def _checked_port(port: object) -> int:
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"port must be a number, such as 50051, not {port!r}")
    if not 0 <= port < 1 << 16:
        raise ConfigurationError(f"port must be from 1 to 65535, or 0 for any, not {port}")
    return port


def _checked_seconds(value: Duration, argument: str) -> float:
    value_ns = to_ns(value, subject=argument)
    if value_ns < 0:
        raise ConfigurationError(f"{argument} must be 0 or more seconds, not {value!r}")
    return to_seconds(min(value_ns, MAX_NS))


def _lame_duck_s(value: Duration | None, urls: Sequence[RegistryUrl]) -> float:
    if value is not None:
        return _checked_seconds(value, "lame_duck")
    is_dubbo = any(url.scheme in DUBBO_SCHEMES for url in urls)
    return DUBBO_LAME_DUCK_S if is_dubbo else LAME_DUCK_S


def _checked_list(registry: object) -> list[Any]:
    if not isinstance(registry, Sequence) or isinstance(registry, (bytes, bytearray)):
        raise TypeError(
            "registry must be a registry, a URL such as 'etcd://127.0.0.1:2379', or several of "
            f"them; not {registry!r}"
        )
    if not registry:
        raise ConfigurationError("registry is empty; give at least one registry, or its URL")
    return list(registry)


def _url_of(registry: Any) -> RegistryUrl | None:
    """Return the URL of a registry; None if it is a registry of the user without a valid URL."""
    if isinstance(registry, str):
        url = parse_url(registry)
        check_writable(url)
        return url
    try:
        return parse_url(registry.url)
    except (AttributeError, ConfigurationError, TypeError):
        return None


def _url_option(urls: Sequence[RegistryUrl], name: str) -> str:
    """Return the option of the first URL that has it, or ""."""
    return next((url.options[name] for url in urls if url.options.get(name)), "")


def _named_services(services: tuple[str, ...], urls: Sequence[RegistryUrl]) -> tuple[str, ...]:
    """Return the services that the arguments name, or else those that the URLs name."""
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
