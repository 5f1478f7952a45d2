"""Publishes the services of a `grpc.Server` while it serves, and ends both in order.

What goes down runs on a worker, whoever asks for it; `stop()` waits there. What a registry, the
health servicer or a sink does can hold it up for a bounded time only.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import grpc
import grpc.aio

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.notifications import FLUSH_TIMEOUT_S
from rpcwheel._grpc.serving import has_ended, is_running, services_of
from rpcwheel.errors import ConfigurationError, RegistryError, TimerError
from rpcwheel.timer import ManualTimer, shared_timer

from .lifecycle import UP, Phase, PortBinding, Step
from .publishing import HEALTH_S, NOT_SERVING, NOTICED_S, SERVING, PublisherBase
from .registry import Registry, checked_wait, open_registry
from .signals import SIGNALS, may_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.durations import Duration

    from .policy import RegistryPolicy

__all__ = ["Publisher"]

GLANCE_S: Final = 0.05
"""Between two looks whether somebody is in a hurry by now."""

SLACK_S: Final = 1.0
"""How much longer than the grace the server may take to end, and a timer than the lame duck."""

START_S: Final = 0.5
"""How long a worker may take to begin."""

SIGNAL_CHECK_S: Final = 0.2
"""How often a wait lets the main thread run signal handlers; gRPC's own waits do so every 0.1 s."""


class Publisher(PublisherBase[Registry]):
    """Publishes the services of a `grpc.server` while it serves, and ends both in order.

        with Publisher(server, "etcd://127.0.0.1:2379", "shop.Orders", port=50051, signals=True):
            server.wait_for_termination()

    The end: DRAINING and withdrawn from all registries at once (at most 2 s, also if they are
    dead), health NOT_SERVING, the wait of the lame duck, no more calls accepted, those in flight
    may end within the grace, what was opened is closed. Each step is told (`ShutdownStep`).

    A context manager: `start()`, and `stop()`. Thread-safe; everything is idempotent. In a forked
    child it does nothing.
    """

    _kind: ClassVar[type[Any]] = Registry
    _world: ClassVar[str] = "grpc"

    def _prepare(self) -> None:
        self._hurry = threading.Event()
        self._rest = threading.Event()
        self._over = threading.Event()
        self._driver = 0
        self._is_wanted = False  # somebody is to drive
        self._is_driven = threading.Event()
        self._words: SimpleQueue[str | None] = SimpleQueue()

    def _checked_server(self, server: Any) -> Any:
        if isinstance(server, grpc.aio.Server):
            raise TypeError(
                f"{server!r} is a server of grpc.aio: for those there is rpcwheel.aio.Publisher"
            )
        if not isinstance(server, grpc.Server):
            raise TypeError(f"server must be what grpc.server() gave, not {server!r}")
        if has_ended(server):
            raise ConfigurationError("the server was stopped before; make another")
        return server

    def _open(self, url: str, policy: RegistryPolicy | None) -> Registry:
        return open_registry(url, policy=policy, timer=self._timer)

    def _discard(self, registry: Registry) -> None:
        registry.close()

    def _is_running(self) -> bool:
        return bool(is_running(self._server))

    def _service_names(self) -> tuple[str, ...]:
        return services_of(self._server)

    # For users

    def start(self) -> None:
        """Start the server if it is not, and publish its services.

        A registry that can't be reached is no error: they are published as soon as it can be.

        Raises:
            ConfigurationError: Nobody listens at the port and it can't be bound, or nobody accepts
                connections there; which services or which host is meant can't be known.
            RuntimeError: It has ended.
            Exception: What the server, or the health servicer, raised.

        What was begun is undone then.
        """
        if not self._begin():
            return
        if self._signals and may_handle():
            threading.Thread(target=self._listen, name="rpcwheel-signals", daemon=True).start()
            SIGNALS.add(self._signalled)
        self._drive()

    def stop(
        self, grace: Duration | None = None, *, reason: str = "asked for", wait: bool = True
    ) -> None:
        """End in order; from any thread, as often as you like.

        Args:
            grace: Seconds that calls may go on, in place of what was given; the smallest counts. 0:
                at once, without the wait for clients.
            reason: Why; for events.
            wait: Whether to wait for the end. Not where the end waits for this: in a call that the
                server serves, for one.
        """
        if self._is_forked():
            return
        if self._turn(reason, grace):
            self._is_wanted = True
            EXECUTOR.submit(self, self._drive_if_wanted)
        if self._core.is_hurried:
            self._hurry.set()
            self._rest.set()
            if self._core.under_way is Step.STOP:
                EXECUTOR.submit((self, "hurry"), partial(self._server.stop, 0))
        if wait and self._driver != threading.get_ident():
            self._see_to_a_driver()
            self.wait()
            SIGNALS.remove(self._signalled)

    def begin_stop(self, reason: str = "asked for", grace: Duration | None = None) -> None:
        """Begin the ordered end, and return at once; any thread."""
        self.stop(grace, reason=reason, wait=False)

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait until all has ended, `timeout` seconds at most; whether it has."""
        wait_s = checked_wait(timeout, "timeout")
        until = None if wait_s is None else time.monotonic() + wait_s
        left_s = SIGNAL_CHECK_S if wait_s is None else min(wait_s, SIGNAL_CHECK_S)
        # A signal that arrives just before the main thread begins to wait does not end the wait.
        while not self._over.wait(left_s):
            if until is not None:
                left_s = min(until - time.monotonic(), SIGNAL_CHECK_S)
                if left_s <= 0:
                    return False
        return True

    def wait_published(self, timeout: Duration) -> bool:
        """Wait `timeout` seconds, at most, until all registries have all services; whether so."""
        until = time.monotonic() + (checked_wait(timeout, "timeout") or 0.0)
        return all(
            one.wait_published(max(0.0, until - time.monotonic())) for one in self.registrations
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(reason="its block was left")

    # The steps

    def _see_to_a_driver(self) -> None:
        """Be it if no worker is: there may be no more threads, least of all when a program ends."""
        if self._is_wanted:
            self._is_driven.wait(START_S)
            self._drive_if_wanted()

    def _drive_if_wanted(self) -> None:
        with self._lock:
            wanted, self._is_wanted = self._is_wanted, False
        if wanted:
            self._is_driven.set()
            self._drive()

    def _drive(self) -> None:
        """Carry out what is next until nothing is; raises what a step up has raised."""
        failure: BaseException | None = None
        self._driver = threading.get_ident()
        while (step := self._next()) is not None:
            try:
                self._carry_out(step)
            except BaseException as error:  # noqa: BLE001 - raised below, or told
                if step in UP:
                    failure = error
                else:
                    self._tell_failed(step.value, error)
            with self._lock:
                if failure is not None:
                    self._core.failed(repr(failure))
                self._core.done()
        self._driver = 0
        if self._core.phase is Phase.CLOSED:
            SIGNALS.remove(self._signalled)
            self._words.put(None)
            self._over.set()
        if failure is not None:
            SIGNALS.remove(self._signalled)
            raise failure

    def _signalled(self, name: str) -> None:
        self._words.put(name)

    def _listen(self) -> None:
        """Hear of signals: the first begins the end, the next ends at once."""
        grace = None
        while (name := self._words.get()) is not None:
            self.begin_stop(name, grace)
            self._see_to_a_driver()
            grace = 0.0

    def _carry_out(self, step: Step) -> None:
        match step:
            case Step.START:
                self._start_server()
            case Step.LOOK:
                self._look(self._door)
            case Step.HEALTHY:
                self._be_healthy()
            case Step.PUBLISH:
                self._publish()
            case Step.WITHDRAW:
                self._together(partial(self._withdraw_from, one) for one in self._registries)
            case Step.NOT_SERVING:
                self._together([self._be_unhealthy], HEALTH_S)
            case Step.WAIT:
                self._be_lame()
            case Step.STOP:
                self._stop_server()
            case Step.CLOSE:
                self._close()

    def _start_server(self) -> None:
        self._door = self._find_door()
        services, host = self._whom()
        if self._door is PortBinding.BIND:
            self._bind()
        self._make_instances(services, host)
        if not self._core.was_running:
            self._server.start()

    def _be_healthy(self) -> None:
        for service, status in () if self._health is None else self._statuses(SERVING):
            self._health.set(service, status)

    def _publish(self) -> None:
        for registry in self._registries:
            for instance in self._instances:
                self._published.append((registry, registry.register(instance)))
        if self._beside is not None:
            self._end_beside = self._beside(self)

    def _withdraw_from(self, registry: Registry) -> None:
        """Tell one registry; it may take as long as the step does, and whatever becomes of it."""
        with suppress(RegistryError):  # dead, which it tells itself; or its owner has closed it
            told = self._draining(registry)
            soon = time.monotonic() + (0 if self._core.is_hurried else self._left_s() / 2)
            if all(one.wait_published(max(0.0, soon - time.monotonic())) for one in told):
                self._hurry.wait(NOTICED_S)
            for one in told:
                registry.unregister(one)
            for one in told:
                registry.unregister(one, wait=self._left_s())
            self._answered.append(registry)

    def _be_unhealthy(self) -> None:
        if self._health is None:
            return
        graceful = getattr(self._health, "enter_graceful_shutdown", None)
        if callable(graceful):
            graceful()
            return
        for service, status in self._statuses(NOT_SERVING):
            self._health.set(service, status)

    def _be_lame(self) -> None:
        """Wait on the timer, until somebody is in a hurry."""
        left_s = self._left_s()
        timer = shared_timer() if self._timer is None else self._timer
        try:
            timeout = timer.new_timeout(lambda _: self._rest.set(), left_s)
        except TimerError:  # stopped, full
            self._rest.wait(left_s)
            return
        self._rest.wait(None if isinstance(timer, ManualTimer) else left_s + SLACK_S)
        timeout.cancel()

    def _stop_server(self) -> None:
        left_s = self._left_s()
        self._server.stop(left_s).wait(left_s + SLACK_S)

    def _close(self) -> None:
        jobs: list[Callable[[], object]] = [partial(self._close_one, one) for one in self._own]
        if self._end_beside is not None:
            jobs.append(self._end_beside)
        self._together(jobs)
        self._tell(Step.CLOSE)
        self._events.wait(FLUSH_TIMEOUT_S)

    def _close_one(self, registry: Registry) -> None:
        registry.close(self._patience_with(registry))

    def _together(self, jobs: Iterable[Callable[[], object]], limit_s: float | None = None) -> None:
        """Run all at once on workers, and wait for them as long as the step may take."""
        ends: list[threading.Event] = []
        for job in jobs:
            ends.append(threading.Event())  # a key of its own: one that hangs holds up no other
            EXECUTOR.submit(ends[-1], partial(self._run, job, ends[-1]))
        until = None if limit_s is None else time.monotonic() + limit_s
        for end in ends:
            while (left_s := self._left_s() if until is None else until - time.monotonic()) > 0:
                if end.wait(min(left_s, GLANCE_S)):
                    break

    def _run(self, job: Callable[[], object], end: threading.Event) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - the user's health, the user's registry: told
            self._tell_failed(repr(job), error)
        finally:
            end.set()
