"""Publishes the services of a server while it serves, and stops both in order.

`PublisherBase` has the start and the stop, as blocking code. `Publisher` is the interface for
threads; `aio.py` has the interface for coroutines, which runs the same code on worker
threads. A `ServerAdapter` hides whether the server is one of `grpc` or of `grpc.aio`,
`PublishedInstances` are what the registries list, and `Shutdown` runs the steps of the stop.

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

import grpc
import grpc.aio

from rpcwheel._concurrency.callbacks import CloseCallbacks
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.notifications import FLUSH_TIMEOUT_S
from rpcwheel._grpc.serving import has_terminated
from rpcwheel.durations import MAX_NS, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, public_name, safe_repr, short_repr
from rpcwheel.events import WithdrawalFailed
from rpcwheel.registry.registry import Registry, RegistryBase, checked_wait
from rpcwheel.registry.url import DUBBO_SCHEMES
from rpcwheel.telemetry import components
from rpcwheel.timer.manual import checked_timer
from rpcwheel.transport.probe import ServingStatus

from .netinfo import PortBinding, PublishedPort
from .published_instances import (
    CLOSE_TIMEOUT_S,
    PublishedInstances,
    registry_entries,
    registry_urls,
)
from .server_adapter import ServerAdapter, ServerGone
from .shutdown import STOP_MARGIN_S, RunningStep, Shutdown
from .signals import SignalThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel.durations import Duration
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.registry.url import RegistryUrl
    from rpcwheel.timer.api import Timer

R = TypeVar("R", bound=RegistryBase)

WITHDRAW_TIMEOUT_S: Final = 2.0
"""The timeout of the withdrawal from all registries together."""

LAME_DUCK_S: Final = 1.0
"""The default for `lame_duck`."""

DUBBO_LAME_DUCK_S: Final = 10.0
"""Its default with a registry of Dubbo's. A consumer of Dubbo Java 3.3.6 lets one change of the
registry through in 5 s: it acted 4 to 7 s after a change, and does after 10 s at the latest."""

HEALTH_TIMEOUT_S: Final = 1.0
"""The limit for calls of the user's health servicer."""

WORKER_START_TIMEOUT_S: Final = 0.5
"""How long `stop()` waits for a worker thread before it does the work itself."""

SIGNAL_CHECK_S: Final = 0.2
"""How often a wait lets the main thread run signal handlers; gRPC's own waits do so every 0.1 s."""


class PublisherState(enum.Enum):
    """The state of a publisher."""

    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"
    CLOSED = "closed"


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

    _registry_type: ClassVar[Any]
    """The class of registries that users give and get, `R`."""

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
                No effect if the server is started on a thread other than the main thread. Handlers
                that were set before are not called meanwhile, and are restored afterwards.
                (Handlers that were added to an event loop would be called: asyncio's are refused,
                uvloop's can't be detected.) Wait for the end with the server's
                `wait_for_termination()`.
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
        timer = checked_timer(timer)
        self._health = _checked_health(health)
        self._server.check_callback("health.set", getattr(health, "set", None))
        self._server.check_callback("on_serving", on_serving)
        grace_s = _checked_seconds(grace, "grace")
        self._on_serving = on_serving
        self._undo_on_serving: Callable[[], object] | None = None
        entries = registry_entries(registry, self._registry_type)
        urls = registry_urls(entries)
        lame_duck_s = _lame_duck_s(lame_duck, urls)
        settings: dict[str, Any] = {
            "id": id,
            "weight": weight,
            "group": group,
            "version": version,
            "protocol": protocol,
            "zone": zone,
            "metadata": _copied_metadata(metadata),
        }
        self._published: PublishedInstances[R] = PublishedInstances(
            entries,
            urls,
            services,
            PublishedPort(host, _checked_port(port)),
            settings,
            open_registry=partial(
                self._registry_type, registry_policy=registry_policy, timer=timer
            ),
            close_registry=self._close,
        )
        self._shutdown = Shutdown(self._published.name, timer, lame_duck_s, grace_s)
        self._signals = SignalThread(is_wanted=signals)

        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._state = PublisherState.NEW
        self._busy_thread: int | None = None  # its ident, while it runs the start or the stop
        self._must_set_not_serving = False
        # A server that ran before is left running if the start fails.
        self._ran_before = False
        self._start_failed = False
        self._shutdown_begun = threading.Event()
        self._closed = threading.Event()
        self._on_closed = CloseCallbacks("publisher")
        components.add("publisher", self)

    # What differs between `grpc` and `grpc.aio`

    def _adapt(self, server: Any) -> ServerAdapter:
        """Check the type of the server, and return its adapter."""
        raise NotImplementedError

    @staticmethod
    def _close(registry: Any, timeout_s: float) -> None:
        """Close a registry; blocks for at most `timeout_s` seconds."""
        raise NotImplementedError

    # State

    @property
    def registries(self) -> tuple[R, ...]:
        """The registries that were given, and those that were opened for given URLs."""
        return tuple(self._published.registries)

    @property
    def instances(self) -> tuple[ServiceInstance, ...]:
        """The published instances, one for each service; () before the start."""
        return self._published.instances

    @property
    def registrations(self) -> tuple[Any, ...]:
        """The `Registration` of each instance in each registry; () before the start."""
        return tuple(registration for _, registration in self._published.registrations)

    @property
    def port(self) -> int:
        """Where clients reach the server; 0 before the start if any port will do."""
        return self._published.port.number

    @property
    def listening_port(self) -> int | None:
        """The port on which this process listens; None if only a proxy listens on `port`."""
        port = self._published.port
        return None if port.binding is PortBinding.PROXY else port.number

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
        return f"<{type(self).__name__} of {self._published.name()}: {self.state}>"

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

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
            self._signals.start(self._stop_on_signal)
            self._state = PublisherState.STARTING
            self._busy_thread = threading.get_ident()
        return True

    def _start(self) -> None:
        """Start and publish; if that fails, or a stop was requested meanwhile, undo it."""
        self._busy_thread = threading.get_ident()  # for aio a worker, not that of `_begin_start`
        try:
            self._start_server()  # in any case, as the program waits for the end of the server
            for step in (self._check_port, self._set_serving, self._publish):
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
        self._published.resolve(self._server)
        if not self._ran_before:
            self._server.start()

    def _check_port(self) -> None:
        self._published.port.check(self.instances[0].host)

    def _set_serving(self) -> None:
        self._must_set_not_serving = True
        if self._health is not None:
            self._set_health(self._call_if_starting, ServingStatus.SERVING)

    def _set_health(self, call: Callable[..., object], status: ServingStatus) -> None:
        services = [instance.service for instance in self.instances]
        for service in ("", *services):  # "" is the whole server
            call(self._health.set, service, status.value)

    def _publish(self) -> None:
        self._published.publish()
        if self._on_serving is not None:
            self._undo_on_serving = self._call_if_starting(self._on_serving, self)

    def _call_if_starting(self, function: Callable[..., Any], *args: object) -> Any:
        """Call user code of the start where the server runs, unless a stop was requested.

        The state is read there: in grpc.aio, `start()` may be canceled before the loop calls it.
        """

        def call() -> Any:
            return function(*args) if self._state is PublisherState.STARTING else None

        return self._server.call(call)

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
                self._shutdown.grace_s = min(self._shutdown.grace_s, grace_s)
            is_first = self._state is not PublisherState.ENDING
            if is_first:
                self._state, self._shutdown.reason = PublisherState.ENDING, reason
        if grace_s == 0:
            self._shutdown.hurry()
        if is_first:
            EXECUTOR.submit(self, self._shut_down_unless_busy)

    def _shut_down_unless_busy(self) -> None:
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
            self._shut_down_unless_busy()

    def _stop_on_signal(self, name: str, earlier: int) -> None:
        """Stop at the first signal, and hurry at the next ones."""
        self.begin_stop(name, 0 if earlier else None)
        self._ensure_shutdown_runs()

    def _shut_down(self) -> None:
        """Stop in the order that the module's docstring gives, whatever fails."""
        self._shutdown_begun.set()
        published, shutdown = self._published, self._shutdown
        try:
            if published.is_publishing:
                step = shutdown.begin_step("withdraw", WITHDRAW_TIMEOUT_S)
                withdrawals = [
                    (f"withdrawal from {registry!r}", partial(published.withdraw, registry, step))
                    for registry in published.registries
                ]
                step.run_all(*withdrawals)
            if self._must_set_not_serving:
                step = shutdown.begin_step("not serving", HEALTH_TIMEOUT_S)
                step.run_all((type(self._health).__name__, self._set_not_serving))
            if published.is_publishing:
                step = shutdown.begin_step("wait", shutdown.lame_duck_s)
                step.wait_for([step.hurried])
            is_left_running = self._ran_before and self._start_failed
            if published.instances and not is_left_running and not self._server.is_gone:
                step = shutdown.begin_step("stop", None)
                shutdown.run("stop of the server", partial(self._stop_server, step))
            # Without an event: "closed" is reported when this step has ended.
            step = RunningStep(shutdown, CLOSE_TIMEOUT_S)
            closes = [(repr(own), partial(published.close, own, step)) for own in published.own]
            step.run_all(*closes, ("on_serving", self._call_undo_on_serving))
            for registry, error in published.failed_withdrawals():
                shutdown.events.emit(WithdrawalFailed(published.name(), registry.url, error))
            if published.instances:
                shutdown.begin_step("closed")
            shutdown.events.wait(FLUSH_TIMEOUT_S)
        finally:
            with self._lock:
                self._state, self._busy_thread = PublisherState.CLOSED, None
            self._signals.end()
            self._closed.set()
            self._on_closed.run()

    def _set_not_serving(self) -> None:
        enter_shutdown = getattr(self._health, "enter_graceful_shutdown", None)
        if callable(enter_shutdown):
            self._server.call(enter_shutdown)
        elif self._health is not None:
            self._set_health(self._server.call, ServingStatus.NOT_SERVING)

    def _stop_server(self, step: RunningStep) -> None:
        grace_s = self._shutdown.grace_s
        stopped = self._server.stop(grace_s)
        step.wait_for([stopped])
        if self._shutdown.grace_s < grace_s and not stopped.is_set():
            self._server.stop(0)
        stopped.wait(STOP_MARGIN_S)

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
            grace: Seconds for which running calls may go on after the server has begun to refuse
                calls. Of all that were given, also later, the smallest counts. 0: stop at once,
                without the lame duck.
            reason: For events; of several calls, the reason of the first counts.
            wait: Whether to wait until the publisher is closed. Give False where the stop waits for
                the caller, as in a handler of the server.
        """
        self.begin_stop(reason, grace)
        if wait and not self._is_forked() and self._busy_thread != threading.get_ident():
            self._ensure_shutdown_runs()
            self.wait()
            self._signals.restore()  # the main thread restores handlers

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

    def wait_published(self, timeout: Duration | None) -> bool:
        """Wait until all services are in all registries, at most `timeout` seconds; None: no limit.

        Returns whether they are. Before the start: False, at once.
        """
        timeout_s = checked_wait(timeout, "timeout")
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return self._published.is_registered and all(
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

    @staticmethod
    def _close(registry: Registry, timeout_s: float) -> None:
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


def _copied_metadata(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if isinstance(metadata, Mapping):
        return dict(metadata)
    with suppress(TypeError, ValueError):
        pairs = tuple(metadata)
        # `dict` would take ["eu"] for {"e": "u"}.
        if not any(isinstance(pair, str) for pair in (metadata, *pairs)):
            return dict(pairs)
    raise TypeError(
        f"metadata must be a mapping, such as {{'commit': 'abc'}}, not {short_repr(metadata)}"
    )


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
