"""The publisher of servers of `grpc.aio`.

It awaits the blocking publisher, which runs on worker threads. What concerns the server, and user
code, is called on the server's event loop; what concerns the registries needs no loop, so a server
whose loop has ended can still be withdrawn.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import grpc.aio

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import LONGEST_TIMEOUT_S, await_future, loop_timeout, on_worker
from rpcwheel._grpc.aio_serving import is_running
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.registry.aio import Registration, Registry
from rpcwheel.registry.registry import checked_wait

from .publisher import WORKER_START_TIMEOUT_S, PublisherBase
from .server_adapter import ServerAdapter, ServerGone
from .shutdown import HURRIED_TIMEOUT_S
from .signals import signal_handled_by_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rpcwheel.durations import Duration

__all__ = ["Publisher"]

LOOP_CHECK_S: Final = 0.2
"""How often a thread that waits for a call on the loop looks whether the loop was closed."""

LOOP_END_TIMEOUT_S: Final = 4 * HURRIED_TIMEOUT_S
"""The longest delay of the end of an event loop, for the withdrawal of the server."""


class _LoopServer(ServerAdapter):
    """Adapts a `grpc.aio.Server`: runs calls on its event loop, and waits for them on a thread."""

    def __init__(self, server: grpc.aio.Server) -> None:
        super().__init__(server)
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the server, or None before it is known."""
        self._is_abandoned = False
        self._tasks: set[asyncio.Task[Any]] = set()  # only used on the loop

    def abandon(self) -> None:
        """Call nothing any more, as the loop ends. On the loop.

        gRPC's own tasks are canceled then, and to stop the server could crash the process (grpcio
        1.85).
        """
        self._is_abandoned = True

    def cancel_calls(self) -> None:
        """Cancel the user's coroutines that are being called. On the loop."""
        for task in self._tasks:
            task.cancel()

    def is_caller(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this task is one of `call`, which the publisher waits for."""
        return task in self._tasks

    @property
    def is_gone(self) -> bool:
        return self._is_abandoned or (self.loop is not None and self.loop.is_closed())

    @property
    def is_running(self) -> bool:
        return bool(is_running(self._server))

    def service_names(self) -> tuple[str, ...]:
        return ()

    def check_callback(self, name: str, function: object) -> None:
        """Accept every function: `call` awaits what it returns."""

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        called = self._submit(self._call(function, *args))
        while not wait([called], LOOP_CHECK_S).done:
            if self.is_gone:
                raise ServerGone
        try:
            return called.result()
        except CancelledError:
            raise ServerGone from None

    def stop(self, grace_s: float) -> threading.Event:
        # Two `stop(0)` at once crash the process (grpcio 1.85: each yields to the loop before it
        # cancels the calls, and the other frees the server meanwhile). `stop(None)` does not yield.
        grace = min(grace_s, LONGEST_TIMEOUT_S) if grace_s > 0 else None
        stopped = threading.Event()
        stopping = self._submit(self._stop(grace))

        def end(stopping: Future[Any]) -> None:
            error = None if stopping.cancelled() else stopping.exception()
            if error is not None and not isinstance(error, ServerGone):
                failed = CallbackFailed("server of grpc.aio", "stop", error)
                EXECUTOR.submit(stopped, partial(emit, failed))
            stopped.set()

        stopping.add_done_callback(end)
        return stopped

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self.loop is not None:
            with suppress(RuntimeError):  # it is closed
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        raise ServerGone

    async def _stop(self, grace: float | None) -> None:
        self._check_loop()
        await self._server.stop(grace)

    async def _call(self, function: Callable[..., Any], *args: object) -> Any:
        self._check_loop()
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for mypy
        self._tasks.add(task)
        try:
            result = function(*args)
            return await result if inspect.isawaitable(result) else result
        finally:
            self._tasks.discard(task)

    def _check_loop(self) -> None:
        """Raise `ServerGone` if the loop ends; on the loop, where that can't change meanwhile."""
        if self._is_abandoned:
            raise ServerGone


class Publisher(PublisherBase[Registry]):
    """Publishes the services of a `grpc.aio.server()` while it serves, and stops both in order.

        async with Publisher(server, "etcd://127.0.0.1:2379", "shop.Orders", port=50051) as served:
            await server.wait_for_termination()

    The methods that wait are coroutines; `begin_stop()` may be called from any thread. The services
    must be named, because a server of grpc.aio does not show its own. The health servicer and
    `on_serving` are called on the server's event loop.

    If the tasks of that loop are canceled, as at the end of `asyncio.run()`, the server is
    withdrawn at once. If the loop is closed without that, it stays published until `begin_stop()`
    on any thread, or `stop()` on any loop.
    """

    _registry_type = Registry
    _server: _LoopServer

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The `Registration` of each instance in each registry; () before the start."""
        return tuple(
            Registration(registry, registration._record)
            for registry, registration in self._published.registrations
        )

    async def start(self) -> None:
        """Start the server if it does not run, and publish its services, as `Publisher` of grpc.

        If this is canceled, it is undone.

        Raises:
            ConfigurationError: As with `grpc`; or with `signals=True`, the loop has a handler
                of its `add_signal_handler()`, which would be called as well.
        """
        if self._signals.is_wanted and (name := signal_handled_by_loop()):
            raise ConfigurationError(
                f"{name} has a handler of loop.add_signal_handler(), which would be called while "
                "the server is still published: remove it; or leave signals=False, and have it "
                "call begin_stop()"
            )
        if not self._begin_start():
            return
        loop = asyncio.get_running_loop()
        self._server.loop = loop
        # Kept: a loop has only weak references to tasks.
        self._loop_guard = loop.create_task(self._stop_with_loop())
        try:
            await on_worker(self._start)
        except asyncio.CancelledError:
            self._start_failed = True
            self.begin_stop("its start was canceled", 0)
            self._server.cancel_calls()
            await self.wait(LOOP_END_TIMEOUT_S)
            raise
        finally:
            if self._closed.is_set():
                self._signals.restore()  # the main thread restores handlers

    async def stop(
        self, grace: Duration | None = None, *, reason: str = "stop() was called", wait: bool = True
    ) -> None:
        """Stop in order; arguments as in `rpcwheel.Publisher.stop`.

        Idempotent. If it is canceled, the stop continues.
        """
        self.begin_stop(reason, grace)
        if wait and not self._is_forked() and not self._server.is_caller(asyncio.current_task()):
            while not await self.wait(WORKER_START_TIMEOUT_S):
                EXECUTOR.retry(self)  # it may have been refused a thread
            self._signals.restore()  # the main thread restores handlers

    async def wait(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as with grpc
        """Wait until it is closed, at most `timeout` seconds; returns whether it is."""
        closed: Future[None] = Future()
        remove = self._on_closed.add(partial(closed.set_result, None))
        try:
            await await_future(closed, checked_wait(timeout, "timeout"))
        except TimeoutError:
            return False
        finally:
            remove()
        return True

    async def wait_published(self, timeout: Duration | None) -> bool:  # noqa: ASYNC109
        """Wait until all services are in all registries, at most `timeout` seconds; None: no limit.

        Returns whether they are. Before the start: False, at once.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(loop_timeout(checked_wait(timeout, "timeout"))):
                return self._published.is_registered and all(
                    [await registration.wait_published() for registration in self.registrations]
                )
        return False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(reason="the async with block ended")

    async def _stop_with_loop(self) -> None:
        """Stop when the loop ends, which cancels all of its tasks."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            self._server.abandon()
            self.begin_stop("its event loop ended", 0)
            await self.wait(LOOP_END_TIMEOUT_S)
            raise

    def _adapt(self, server: Any) -> ServerAdapter:
        if isinstance(server, grpc.Server):
            raise TypeError(
                f"{server!r} is a server of grpc with threads: for those there is "
                "rpcwheel.Publisher"
            )
        if not isinstance(server, grpc.aio.Server):
            raise TypeError(f"server must be what grpc.aio.server() gave, not {server!r}")
        return _LoopServer(server)

    @staticmethod
    def _close(registry: Registry, timeout_s: float) -> None:
        asyncio.run(registry.close(timeout_s))  # ends its subscriptions, too
