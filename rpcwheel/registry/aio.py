"""The registry for coroutines: awaits the blocking one, and calls listeners on the event loop.

A request goes on if the task that awaits it is canceled, or the loop is closed. Any number of loops
may share a registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from rpcwheel._concurrency.closing import AsyncClosing
from rpcwheel._concurrency.loop import (
    await_future,
    call_on_loop,
    loop_timeout,
    on_worker,
    running_loop,
)
from rpcwheel.errors import RegistryRefused, RegistryUnavailable, safe_repr
from rpcwheel.events import CallbackFailed

from . import registry as blocking
from .reconciler import RegistrationState
from .registry import RegistrationBase, RegistryBase, checked_close, checked_wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rpcwheel.durations import Duration
    from rpcwheel.instance import ServiceInstance, Snapshot
    from rpcwheel.timer.api import Timer

    from .backend import RegistryBackend
    from .policy import RegistryPolicy

__all__ = [
    "Registration",
    "Registry",
    "Subscription",
    "open_registry",
]


class Registration(RegistrationBase):
    """An instance that a registry keeps published, also without this object. Thread-safe."""

    async def wait_published(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as in sync
        """Wait until the registry has it, as `rpcwheel.Registration.wait_published`."""
        return await self._reaches(RegistrationState.PUBLISHED, checked_wait(timeout, "timeout"))

    async def unregister(self, wait: Duration | None = None) -> None:
        """Withdraw it; as `Registry.unregister`."""
        await self._owner.unregister(self, wait=wait)

    async def _reaches(self, state: RegistrationState, wait_s: float | None) -> bool:
        reached = self._when(state)
        try:
            return await await_future(reached, wait_s)
        except TimeoutError:
            return False
        finally:
            reached.cancel()


class Subscription(AsyncClosing):
    """Follows a service until it is closed. An async context manager that closes.

    `async for snapshot in subscription` gives the known snapshot, then each change, of several at a
    time only the latest, until it is closed.
    """

    def __init__(
        self, owner: Registry, service: str, listener: Callable[[Snapshot], object] | None
    ) -> None:
        """Start to follow; called by `Registry.subscribe` only."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._session = owner._session
        self._forget = owner._subscriptions.discard
        self._closed = False
        # All that follows belongs to the loop.
        self._latest: Snapshot | None = None
        self._news = asyncio.Event()  # replaced when it is set
        self._task: asyncio.Future[object] | None = None  # of the listener, which awaits something
        self._blocking: blocking.Subscription = owner._blocking.subscribe(
            service, lambda snapshot: call_on_loop(self._loop, self._arrived, snapshot)
        )

    @property
    def service(self) -> str:
        """The name of the service."""
        return self._blocking.service

    @property
    def snapshot(self) -> Snapshot | None:
        """The present snapshot; None if there is none yet."""
        return self._blocking.snapshot

    async def wait(self, timeout: Duration | None = None) -> Snapshot:  # noqa: ASYNC109 - as in sync
        """Wait until something is known, as `rpcwheel.Subscription.wait`."""
        wait_s = checked_wait(timeout, "timeout")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(loop_timeout(wait_s)):
                while self.snapshot is None and not self._closed:
                    await self._news.wait()
        return self._blocking.wait(0)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        seen: Snapshot | None = None
        while not self._closed:
            if self._latest is None or self._latest is seen:
                await self._news.wait()
            else:
                seen = self._latest
                yield seen

    def close(self) -> None:
        """End it. No call of the listener begins after this, and a running one is canceled.

        Idempotent; does not wait; any thread.
        """
        self._closed = True
        self._forget(self)
        self._blocking.close()
        if running_loop() is self._loop:
            self._end()
        else:
            call_on_loop(self._loop, self._end)

    @safe_repr
    def __repr__(self) -> str:
        return repr(self._blocking)

    # On the loop

    def _arrived(self, snapshot: Snapshot) -> None:
        if self._closed:
            return
        self._latest = snapshot
        self._wake()
        if self._listener is not None and self._task is None:
            self._call(self._listener, snapshot)

    def _call(self, listener: Callable[[Snapshot], object], snapshot: Snapshot) -> None:
        try:
            result = listener(snapshot)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported
            self._report(listener, error)
            return
        if inspect.isawaitable(result):
            self._task = asyncio.ensure_future(result, loop=self._loop)
            self._task.add_done_callback(partial(self._called, listener, snapshot))

    def _called(
        self,
        listener: Callable[[Snapshot], object],
        snapshot: Snapshot,
        task: asyncio.Future[object],
    ) -> None:
        """Call the listener again if there is a newer snapshot."""
        self._task = None
        if task.cancelled() and (self._closed or _was_asked_to_end(task)):
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._report(listener, error)
        if self._latest is not None and self._latest is not snapshot and not self._closed:
            self._call(listener, self._latest)

    def _report(self, listener: object, error: BaseException) -> None:
        self._session.emit(CallbackFailed(self.service, repr(listener), error))

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _end(self) -> None:
        self._wake()
        if self._task is not None and self._task is not asyncio.current_task(self._loop):
            self._task.cancel()
            self._task = None


def _was_asked_to_end(task: asyncio.Future[object]) -> bool:
    """Whether the task itself was canceled, and not something that it awaited."""
    return isinstance(task, asyncio.Task) and task.cancelling() > 0


class Registry(RegistryBase, AsyncClosing):
    """The form of `rpcwheel.registry.Registry` for asyncio: coroutines where that blocks.

    An async context manager that closes.
    """

    def __init__(
        self,
        backend: RegistryBackend | str,
        *,
        registry_policy: RegistryPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        self._blocking = blocking.Registry(backend, registry_policy=registry_policy, timer=timer)
        self._session = self._blocking._session
        self._subscriptions: set[Subscription] = set()
        self.policy = self._blocking.policy
        """The settings."""

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The registrations, also unregistered ones until the registry has removed them."""
        return tuple(Registration(self, record) for record in self._session.records())

    async def register(
        self, instance: ServiceInstance, *, wait: Duration | None = None
    ) -> Registration:
        """Keep an instance published, as `rpcwheel.Registry.register`."""
        record, wait_s = self._set_desired(instance, wait)
        registration = Registration(self, record)
        if wait_s is not None and not await registration.wait_published(wait_s):
            raise registration._not_published(wait_s)
        return registration

    async def unregister(
        self, instance: ServiceInstance | Registration, *, wait: Duration | None = None
    ) -> None:
        """Withdraw an instance, as `rpcwheel.Registry.unregister`."""
        record, wait_s = self._remove(instance, wait)
        registration = Registration(self, record)
        if wait_s is not None and not await registration._reaches(RegistrationState.GONE, wait_s):
            raise registration._not_withdrawn(wait_s)

    def subscribe(
        self, service: str, listener: Callable[[Snapshot], object] | None = None
    ) -> Subscription:
        """Follow the instances of a service, on the running loop.

        Args:
            service: Its name.
            listener: A function or a coroutine function, called as `listener(snapshot)` on the
                loop, first with what is known, then at each change; one call at a time, only the
                latest. What it raises is an event (`CallbackFailed`), and has no other effect.

        Raises:
            RegistryClosed: After `close()`.
            RuntimeError: No loop runs here; or the system can't start the timer's thread.
            TypeError, ConfigurationError: The name is not valid; the listener can't be called.
        """
        self._check_service(service, listener)
        subscription = Subscription(self, service, listener)
        self._subscriptions.add(subscription)
        if self.closed:  # on another thread, perhaps without this one
            subscription.close()
        return subscription

    async def lookup(self, service: str, *, wait: Duration | None = None) -> Snapshot:
        """Return the present instances of a service, as `rpcwheel.Registry.lookup`."""
        watched, wait_s = self._watched_snapshot(service, wait)
        if watched is not None:
            return watched
        try:
            snapshot: Snapshot = await self._answer(service, wait_s)
        except (RegistryUnavailable, RegistryRefused):
            last = await on_worker(partial(self._session.lookups.last, service))  # reads a file
            if last is None:
                raise
            return last
        return snapshot

    async def services(self) -> list[str]:
        """Request the names of all services in the registry, in order."""
        names: list[str] = await self._answer(None, self._timeout_s)
        return names.copy()  # the answer may be shared

    async def close(self, timeout: Duration = 2.0) -> None:  # noqa: ASYNC109 - as in sync
        """Withdraw everything, and end, as `rpcwheel.Registry.close`.

        If this is canceled, the registry is closed without it.
        """
        wait_s = checked_close(timeout)
        over = self._session.close()
        for subscription in tuple(self._subscriptions):
            subscription.close()
        try:
            await await_future(over, wait_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._session.abandon()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _answer(self, service: str | None, wait_s: float) -> Any:
        try:  # without a variable for the future: the traceback of its error has this frame
            return await await_future(self._session.look_up(service), wait_s)
        except TimeoutError:
            raise self._no_answer(wait_s) from None


def open_registry(
    url: str | RegistryBackend,
    *,
    registry_policy: RegistryPolicy | None = None,
    timer: Timer | None = None,
) -> Registry:
    """Open the registry of a URL, as `rpcwheel.open_registry`; contacts nothing yet."""
    return Registry(url, registry_policy=registry_policy, timer=timer)
