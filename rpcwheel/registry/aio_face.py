"""A registry for coroutines: the twin of `face.py`, with the same names.

The work is done by the same session on the same workers; what comes of it is handed over to the
loop that waits for it. Any number of loops may share a registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from rpcwheel._concurrency.loop import (
    await_future,
    call_on_loop,
    loop_timeout,
    on_worker,
    running_loop,
)
from rpcwheel.errors import NotPublished
from rpcwheel.observe import CallbackFailed

from .base import (
    RegistrationBase,
    RegistryBase,
    checked_close,
    checked_wait,
    no_answer,
    not_published,
    not_withdrawn,
    patience,
)
from .entry import State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from concurrent.futures import Future

    from rpcwheel.durations import Duration
    from rpcwheel.instance import ServiceInstance, Snapshot
    from rpcwheel.timer.api import Timer

    from .directory import Directory
    from .policy import RegistryPolicy
    from .provider import Provider

__all__ = ["FailbackRegistry", "Registration", "Registry", "Subscription", "open_registry"]


class Registry(ABC):
    """What a registry does for servers and clients."""

    @abstractmethod
    async def register(
        self, instance: ServiceInstance, *, wait: Duration | None = None
    ) -> Registration:
        """Have an instance published, and kept so; the same `service` and `id` again: changed."""

    @abstractmethod
    async def unregister(
        self, what: ServiceInstance | Registration, *, wait: Duration | None = None
    ) -> None:
        """Have it published no more."""

    @abstractmethod
    def subscribe(
        self, service: str, listener: Callable[[Snapshot], object] | None = None
    ) -> Subscription:
        """Follow the instances of a service."""

    @abstractmethod
    def unsubscribe(self, subscription: Subscription) -> None:
        """Follow them no more."""

    @abstractmethod
    async def lookup(self, service: str, *, wait: Duration | None = None) -> Snapshot:
        """The instances of a service, now."""

    @abstractmethod
    async def close(self, timeout: Duration = 2.0) -> None:  # noqa: ASYNC109 - as the twin
        """Withdraw what was published, and end."""


class Registration(RegistrationBase):
    """An instance that a registry has taken on; goes on without this object."""

    _owner: FailbackRegistry

    async def wait_published(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as the twin
        """Wait until the registry has it, as it was given or changed last.

        Args:
            timeout: Seconds; None: as long as it takes.

        Returns:
            Whether it has; False too if it was unregistered meanwhile, or the registry closed.
        """
        wait_s = checked_wait(timeout, "timeout")
        return await _reached(self._owner._session.when(self._entry, State.PUBLISHED), wait_s)  # noqa: SLF001

    async def unregister(self, wait: Duration | None = None) -> None:
        """Have it published no more; as `Registry.unregister`."""
        await self._owner.unregister(self, wait=wait)


class Subscription:
    """Follows a service until it is closed. An async context manager that closes.

    `async for snapshot in subscription` gives what is known, then each change, until it is closed;
    of several changes since the last look only the latest.
    """

    def __init__(
        self,
        owner: FailbackRegistry,
        listener: Callable[[Snapshot], object] | None,
        directory: Directory,
    ) -> None:
        """For `FailbackRegistry.subscribe` only."""
        self._owner = owner
        self._listener = listener
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._latest: tuple[int, Snapshot] | None = None
        """Numbered; of the loop's, as all that follows."""
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Future[object] | None = None
        """What the listener gave to be awaited."""
        self._listening = directory.add(self._heard)

    @property
    def service(self) -> str:
        """Its name."""
        return self._directory.service

    @property
    def snapshot(self) -> Snapshot | None:
        """What is known now; None: nothing yet."""
        return self._directory.snapshot

    async def wait(self, timeout: Duration | None = None) -> Snapshot:  # noqa: ASYNC109 - as the twin
        """Wait until something is known, of the registry or of an earlier run (`source`).

        Raises:
            NotPublished: Nothing was known in `timeout` seconds, or it was closed.
        """
        wait_s = checked_wait(timeout, "timeout")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(loop_timeout(wait_s)):
                while self.snapshot is None and not self._closed:
                    await self._news()
        snapshot = self.snapshot
        if snapshot is None:
            raise NotPublished(f"nothing is known of {self.service} at {self._owner.url} yet")
        return snapshot

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        number = 0
        while not self._closed:
            if self._latest is None or self._latest[0] == number:
                await self._news()
            else:
                number, snapshot = self._latest
                yield snapshot

    def close(self) -> None:
        """End it; no call of the listener begins after this, and one that awaits is cancelled.

        Idempotent; waits for nothing; any thread.
        """
        self._closed = True
        self._listening.close()
        self._owner._session.following.unfollow(self.service, self)  # noqa: SLF001
        if running_loop() is self._loop:
            self._end()
        else:
            call_on_loop(self._loop, self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscription of {self.service} at {self._owner.url}>"

    # --- On the directory's worker ---

    def _heard(self, snapshot: Snapshot) -> None:
        call_on_loop(self._loop, self._arrived, snapshot)

    # --- On the loop ---

    def _arrived(self, snapshot: Snapshot) -> None:
        if self._closed:
            return
        self._latest = (self._latest[0] + 1 if self._latest else 1), snapshot
        self._wake()
        if self._listener is not None and self._task is None:
            self._tell(self._listener, *self._latest)

    def _tell(
        self, listener: Callable[[Snapshot], object], number: int, snapshot: Snapshot
    ) -> None:
        try:
            given = listener(snapshot)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - harms nothing
            self._tell_failed(listener, error)
            return
        if inspect.isawaitable(given):
            self._task = asyncio.ensure_future(given, loop=self._loop)
            self._task.add_done_callback(partial(self._told, listener, number))

    def _told(
        self,
        listener: Callable[[Snapshot], object],
        number: int,
        task: asyncio.Future[object],
    ) -> None:
        """It has ended: once more if there is something newer; one call at a time."""
        self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        by_us = task.cancelled() and (self._closed or _was_asked_to_end(task))
        if error is not None and not by_us:
            self._tell_failed(listener, error)
        if not by_us and not self._closed and self._latest and self._latest[0] != number:
            self._tell(listener, *self._latest)

    def _tell_failed(self, listener: object, error: BaseException) -> None:
        failed = CallbackFailed(self.service, repr(listener), error)
        self._owner._session.emit(failed)  # noqa: SLF001

    async def _news(self) -> None:
        news = self._loop.create_future()
        self._waiting.append(news)
        await news

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None)

    def _end(self) -> None:
        self._wake()
        if self._task is not None and self._task is not asyncio.current_task(self._loop):
            self._task.cancel()
            self._task = None


async def _reached(future: Future[bool], wait_s: float | None) -> bool:
    """Wait for the result, and cancel the future then; False if it takes longer."""
    try:
        return await await_future(future, wait_s)
    except TimeoutError:
        return False
    finally:
        future.cancel()


def _was_asked_to_end(task: asyncio.Future[object]) -> bool:
    """Whether a task was cancelled itself, and not something that it awaited."""
    return isinstance(task, asyncio.Task) and task.cancelling() > 0


class FailbackRegistry(RegistryBase[Registration], Registry):
    """A registry that may fail: what it should know, it is told until it knows.

    As the sync twin, with coroutines where that waits. An async context manager that closes.
    """

    _registration: ClassVar[type[Registration]] = Registration

    def __init__(
        self,
        provider: Provider | str,
        *,
        policy: RegistryPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        super().__init__(provider, policy=policy, timer=timer)
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    async def register(
        self, instance: ServiceInstance, *, wait: Duration | None = None
    ) -> Registration:
        """Have an instance published, and kept so; the same `service` and `id` again: changed.

        Args:
            instance: The latest one given by its key is what counts.
            wait: Seconds to wait until it is published. None: not at all; an engine that can't be
                reached is then no error.

        Raises:
            NotPublished: Not within `wait`; its cause is the last error. It is tried on.
            RegistryClosed: After `close()`.
            TypeError: It is no `ServiceInstance`.
        """
        registration, wait_s = self._want(instance, wait)
        if wait_s is not None and not await registration.wait_published(wait_s):
            raise not_published(self._session, registration._entry, wait_s)  # noqa: SLF001
        return registration

    async def unregister(
        self, what: ServiceInstance | Registration, *, wait: Duration | None = None
    ) -> None:
        """Have it published no more; again, or of one that is gone: nothing happens.

        Args:
            what: What was registered; or any instance, as it was looked up: it is taken out if it
                is still of the same `epoch`.
            wait: Seconds to wait until the engine has said that it is gone. None: not at all.

        Raises:
            RegistryUnavailable: Not within `wait`; its cause is the last error. It is tried on.
            RegistryClosed: After `close()`.
            TypeError, ConfigurationError: It is neither; it is of another registry.
        """
        entry, wait_s = self._drop(what, wait)
        if wait_s is None:
            return
        if not await _reached(self._session.when(entry, State.GONE), wait_s):
            raise not_withdrawn(self._session, entry, wait_s)

    def subscribe(
        self, service: str, listener: Callable[[Snapshot], object] | None = None
    ) -> Subscription:
        """Follow the instances of a service, on the running loop.

        Args:
            service: Its name.
            listener: A function or a coroutine function, called as `listener(snapshot)` on the
                loop, first with what is known, then at each change; one call at a time, only the
                latest. What it raises is an event (`CallbackFailed`), and harms nothing.

        Raises:
            RegistryClosed: After `close()`.
            RuntimeError: No loop runs here.
            TypeError, ConfigurationError: The name is none; the listener can't be called.
        """
        self._check_service(service, listener)
        asyncio.get_running_loop()  # raises before anything is begun
        made = self._session.following.follow(service, partial(Subscription, self, listener))
        self._subscriptions.add(made)
        return made

    def unsubscribe(self, subscription: Subscription) -> None:
        """As `subscription.close()`."""
        subscription.close()

    async def lookup(self, service: str, *, wait: Duration | None = None) -> Snapshot:
        """The instances of a service, now; as in the sync twin."""
        wait_s = checked_wait(wait)
        self._check_service(service)
        known = self._session.following.known(service)
        if known is not None:
            return known
        patience_s = patience(self._session, wait_s)
        try:
            return await await_future(self._session.look_up(service), patience_s)
        except TimeoutError:
            error: Exception = no_answer(self.url, patience_s)
        except Exception as failure:  # noqa: BLE001 - raised there if there is no better answer
            error = failure
        return await on_worker(partial(self._session.last, service, error))  # it reads a file

    async def services(self) -> list[str]:
        """The names of all services in the registry, in order; asks the engine.

        Raises:
            RegistryUnavailable, RegistryRefused: It can't be asked, or will not answer.
            RegistryClosed: After `close()`.
        """
        patience_s = patience(self._session, None)
        try:
            names = await await_future(self._session.services(), patience_s)
        except TimeoutError:
            raise no_answer(self.url, patience_s) from None
        return list(names)

    async def close(self, timeout: Duration = 2.0) -> None:  # noqa: ASYNC109 - as the twin
        """Withdraw what was published, and end; as in the sync twin."""
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def open_registry(
    url: str | Provider, *, policy: RegistryPolicy | None = None, timer: Timer | None = None
) -> FailbackRegistry:
    """Open the registry of a URL, as in the sync twin; contacts nobody yet."""
    return FailbackRegistry(url, policy=policy, timer=timer)
