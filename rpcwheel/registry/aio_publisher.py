"""The publisher for `grpc.aio`: the twin of `publisher.py`.

All of it runs on the loop that started it, in a task of its own on the way down. What asks the
system or resolves names runs on a worker.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import grpc
import grpc.aio

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import call_on_loop, loop_timeout, on_worker
from rpcwheel._concurrency.notifications import FLUSH_TIMEOUT_S
from rpcwheel._grpc.aio_serving import is_running
from rpcwheel.errors import ConfigurationError, RegistryError, TimerError
from rpcwheel.timer import ManualTimer, shared_timer

from .aio_registry import Registry, open_registry
from .lifecycle import UP, Phase, PortBinding, Step
from .publishing import HEALTH_S, NOT_SERVING, NOTICED_S, SERVING, PublisherBase
from .registry import checked_wait
from .signals import SIGNALS, may_handle, of_a_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from rpcwheel.durations import Duration

    from .policy import RegistryPolicy

__all__ = ["Publisher"]

GLANCE_S: Final = 0.05
"""Between two looks whether somebody is in a hurry by now."""

SLACK_S: Final = 1.0
"""How much longer than the grace the server may take to end."""


class Publisher(PublisherBase[Registry]):
    """What `rpcwheel.Publisher` is, for a server of `grpc.aio`.

        async with Publisher(server, "etcd://127.0.0.1:2379", "shop.Orders", port=50051) as served:
            await server.wait_for_termination()

    As in the sync twin, with coroutines where it waits, on one loop; `begin_stop()` may be called
    from any thread. The services are to be named: a server of grpc.aio does not show its own.

    If its loop ends before `stop()`, the server is gone, but stays published until `begin_stop()`,
    or `stop()` on another loop: so use `async with`.
    """

    _kind: ClassVar[type[Any]] = Registry
    _world: ClassVar[str] = "grpc.aio"

    def _prepare(self) -> None:
        self._hurry = asyncio.Event()
        self._rest = asyncio.Event()
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        self._heard = 0

    def _checked_server(self, server: Any) -> Any:
        if isinstance(server, grpc.Server):
            raise TypeError(
                f"{server!r} is a server of grpc with threads: for those there is "
                "rpcwheel.Publisher"
            )
        if not isinstance(server, grpc.aio.Server):
            raise TypeError(f"server must be what grpc.aio.server() gave, not {server!r}")
        return server

    def _open(self, url: str, policy: RegistryPolicy | None) -> Registry:
        return open_registry(url, policy=policy, timer=self._timer)

    def _discard(self, registry: Registry) -> None:
        EXECUTOR.submit(
            registry, lambda: asyncio.run(_closed(registry))
        )  # here nobody can wait for it

    def _is_running(self) -> bool:
        return bool(is_running(self._server))

    # For users

    async def start(self) -> None:
        """Start the server if it is not, and publish its services; as in the sync twin.

        Raises:
            ConfigurationError: As in the sync twin; and `signals=True` where `add_signal_handler`
                of the loop has set a handler, which would be called beside.
        """
        if self._signals and (taken := of_a_loop()):
            raise ConfigurationError(
                f"{taken} has a handler of loop.add_signal_handler(), which would be called while "
                "the server is still published: remove it; or leave signals=False, and have it "
                "call begin_stop()"
            )
        self._loop = asyncio.get_running_loop()
        if not self._begin():
            return
        if self._signals and may_handle():
            SIGNALS.add(self._signalled)
        await self._drive()

    async def stop(
        self, grace: Duration | None = None, *, reason: str = "asked for", wait: bool = True
    ) -> None:
        """End in order, as often as you like; as in the sync twin.

        Args:
            grace: Seconds that calls may go on; the smallest that is given counts. 0: at once.
            reason: Why; for events.
            wait: Whether to wait for the end; who is cancelled meanwhile does not stop it.
        """
        if self._is_forked():
            return
        self._check(grace)
        loop = asyncio.get_running_loop()
        moved = self._loop is not None and self._loop is not loop and self._loop.is_closed()
        if moved:
            self._move()
        self._loop = loop if moved or self._loop is None else self._loop
        if self._turn(reason, grace) or moved:
            self._keep(self._loop.create_task(self._drive()))
        if self._core.is_hurried:
            self._hurry.set()
            self._rest.set()
            if self._core.under_way is Step.STOP:
                self._keep(self._loop.create_task(self._server.stop(0)))
        if wait and asyncio.current_task() is not self._driver:
            await self._over.wait()
            SIGNALS.remove(self._signalled)

    def begin_stop(self, reason: str = "asked for", grace: Duration | None = None) -> None:
        """Begin the ordered end, and return at once; any thread, once it was started."""
        if self._loop is None:
            raise RuntimeError(
                f"{self!r} was not started; `await stop()` closes what it has opened"
            )
        self._check(grace)
        if self._loop.is_closed():
            EXECUTOR.submit(self, lambda: asyncio.run(self.stop(grace, reason=reason)))
            return
        call_on_loop(self._loop, self._stop_soon, reason, grace)

    def _stop_soon(self, reason: str, grace: Duration | None) -> None:
        if self._loop is not None:
            stopping = self.stop(grace, reason=reason, wait=False)
            self._keep(self._loop.create_task(stopping))

    async def wait(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as the twin
        """Wait until all has ended, `timeout` seconds at most; whether it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(loop_timeout(checked_wait(timeout, "timeout"))):
                await self._over.wait()
        return self._over.is_set()

    async def wait_published(self, timeout: Duration) -> bool:  # noqa: ASYNC109
        """Wait `timeout` seconds, at most, until all registries have all services; whether so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(loop_timeout(checked_wait(timeout, "timeout"))):
                return all([await one.wait_published() for one in self.registrations])
        return False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(reason="its block was left")

    # The steps

    def _move(self) -> None:
        """The loop is closed, and with it went the server, and whatever was under way."""
        over = self._over.is_set()
        self._hurry, self._rest, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if over:
            self._over.set()
        self._tasks.clear()
        with self._lock:
            self._core.abandon()
            if self._core.under_way is not None:
                self._core.done()
        self._driver = None

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self) -> None:
        """Carry out what is next until nothing is; raises what a step up has raised."""
        failure: BaseException | None = None
        self._driver = asyncio.current_task()
        while (step := self._next()) is not None:
            try:
                await self._carry_out(step)
            except BaseException as error:  # noqa: BLE001 - raised below, or told
                if step in UP:
                    failure = error
                elif isinstance(error, asyncio.CancelledError):
                    # The loop ends, and grpc's own tasks on it have been cancelled too: to stop the
                    # server now may crash the process (grpcio 1.85).
                    self._core.abandon()
                else:
                    self._tell_failed(step.value, error)
            if failure is not None:
                self._core.failed(repr(failure))
            self._core.done()
        self._driver = None
        if self._core.phase is Phase.CLOSED:
            SIGNALS.remove(self._signalled)
            self._over.set()
        if failure is not None:
            SIGNALS.remove(self._signalled)
            raise failure

    def _signalled(self, name: str) -> None:
        """On the main thread, perhaps between two instructions of the loop."""
        self._heard += 1
        self.begin_stop(name, None if self._heard == 1 else 0.0)

    async def _carry_out(self, step: Step) -> None:
        match step:
            case Step.START:
                await self._start_server()
            case Step.LOOK:
                await on_worker(partial(self._look, self._door))
            case Step.HEALTHY:
                await self._be_healthy()
            case Step.PUBLISH:
                await self._publish()
            case Step.WITHDRAW:
                await self._together(self._withdraw_from(one) for one in self._registries)
            case Step.NOT_SERVING:
                await self._together([self._be_unhealthy()], HEALTH_S)
            case Step.WAIT:
                await self._be_lame()
            case Step.STOP:
                await self._stop_server()
            case Step.CLOSE:
                await self._close()

    async def _start_server(self) -> None:
        self._door = await on_worker(self._find_door)
        services, host = await on_worker(self._whom)
        if self._door is PortBinding.BIND:
            self._bind()
        self._make_instances(services, host)
        if not self._core.was_running:
            await self._server.start()

    async def _be_healthy(self) -> None:
        for service, status in () if self._health is None else self._statuses(SERVING):
            await _done(self._health.set(service, status))

    async def _publish(self) -> None:
        for registry in self._registries:
            for instance in self._instances:
                self._published.append((registry, await registry.register(instance)))
        if self._beside is not None:
            self._end_beside = self._beside(self)

    async def _withdraw_from(self, registry: Registry) -> None:
        """Tell one registry; it may take as long as the step does, and whatever becomes of it."""
        with suppress(RegistryError):  # dead, which it tells itself; or its owner has closed it
            told = self._draining(registry)
            share_s = 0.0 if self._core.is_hurried else self._left_s() / 2 / max(1, len(told))
            if all([await one.wait_published(share_s) for one in told]):
                await self._pause(self._hurry, NOTICED_S)
            for one in told:
                await registry.unregister(one)
            for one in told:
                await registry.unregister(one, wait=self._left_s())
            self._answered.append(registry)

    async def _be_unhealthy(self) -> None:
        if self._health is None:
            return
        graceful = getattr(self._health, "enter_graceful_shutdown", None)
        if callable(graceful):
            await _done(graceful())
            return
        for service, status in self._statuses(NOT_SERVING):
            await _done(self._health.set(service, status))

    async def _be_lame(self) -> None:
        """Wait on the timer, until somebody is in a hurry."""
        left_s, loop = self._left_s(), asyncio.get_running_loop()
        timer = shared_timer() if self._timer is None else self._timer
        try:
            timeout = timer.new_timeout(lambda _: call_on_loop(loop, self._rest.set), left_s)
        except TimerError:  # stopped, full
            await self._pause(self._rest, left_s)
            return
        if isinstance(timer, ManualTimer):
            await self._rest.wait()
        else:
            await self._pause(self._rest, left_s + SLACK_S)
        timeout.cancel()

    async def _stop_server(self) -> None:
        left_s = self._left_s()
        await self._together([self._server.stop(left_s)], left_s + SLACK_S)

    async def _close(self) -> None:
        jobs: list[Awaitable[object]] = [one.close(self._patience_with(one)) for one in self._own]
        if self._end_beside is not None:
            self._end_beside()
        await self._together(jobs)
        self._tell(Step.CLOSE)
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        self._events.submit(partial(call_on_loop, loop, told.set))
        await self._pause(told, FLUSH_TIMEOUT_S)

    # How they wait

    async def _together(
        self, jobs: Iterable[Awaitable[object]], limit_s: float | None = None
    ) -> None:
        """Run all at once, and wait for them as long as the step may take; then let them run on."""
        tasks = [asyncio.ensure_future(job) for job in jobs]
        for task in tasks:
            self._keep(task)
        waited, loop = set(tasks), asyncio.get_running_loop()
        until = None if limit_s is None else loop.time() + limit_s
        while waited and (left_s := self._left_s() if until is None else until - loop.time()) > 0:
            _, waited = await asyncio.wait(waited, timeout=min(left_s, GLANCE_S))
        for task in tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None:
                self._tell_failed(repr(task), error)

    @staticmethod
    async def _pause(event: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(loop_timeout(seconds)):
                await event.wait()


async def _done(given: object) -> None:
    """Wait, if there is anything to wait for: health servicers of either world."""
    if inspect.isawaitable(given):
        await given


async def _closed(registry: Registry) -> None:
    await registry.close()
