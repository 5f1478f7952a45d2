"""What feeds one channel of `grpc.aio`: the twin of `_follower.py`."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel.errors import RegistryError

from .alarm import Alarm
from .doubting import tell_why

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rpcwheel.errors import TimerError
    from rpcwheel.instance import Snapshot
    from rpcwheel.timer.api import Timer

    from .aio_face import Registry, Subscription
    from .aio_named import NamedChannel
    from .selecting import Selection

__all__ = ["Follower"]


class Follower:
    """Follows a service for a channel, which is held weakly. On one loop."""

    def __init__(
        self,
        registry: Registry,
        selection: Selection,
        *,
        wait_ns: int,
        timer: Timer | None,
        let_go: Callable[[], Awaitable[object]],
    ) -> None:
        """Do nothing yet; see the sync twin."""
        self._registry = registry
        self._selection = selection
        self._wait_ns = wait_ns
        self._let_go = let_go
        self._loop = asyncio.get_running_loop()
        self._doubt = Alarm(timer, self._rang, _not_told)
        self._subscription: Subscription | None = None
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    def begin(self, channel: NamedChannel) -> None:
        """Follow.

        Raises:
            RegistryClosed: The registry is closed.
        """
        self._channel = weakref.ref(channel)
        self._subscription = self._registry.subscribe(self._selection.service, self._tell)
        self._ask_soon(last=False)

    async def close(self) -> None:
        """Follow no more. Idempotent; on another loop too, when this one is over."""
        if self._closed:
            return
        self._closed = True
        self._doubt.clear()
        if self._subscription is not None:
            self._subscription.close()
        if self._asking is not None:
            call_on_loop(self._loop, self._asking.cancel)
        await self._let_go()

    def _tell(self, snapshot: Snapshot) -> None:
        channel = self._channel()
        if channel is not None:
            channel.update(self._selection.of(snapshot))

    def _ask_soon(self, *, last: bool) -> None:
        if not self._closed:
            self._asking = self._loop.create_task(self._ask(last=last))

    async def _ask(self, *, last: bool) -> None:
        """Find out whether anything will be known, and why not."""
        try:
            await self._registry.lookup(self._selection.service)
        except RegistryError as error:
            if tell_why(self._channel(), error, last=last) and not self._closed:
                self._doubt.wake(self._doubt.now_ns() + self._wait_ns)

    def _rang(self) -> None:
        """On the timer's thread."""
        call_on_loop(self._loop, self._again)

    def _again(self) -> None:
        self._doubt.rang()
        self._ask_soon(last=True)


def _not_told(_: TimerError) -> None:
    """Nobody is told why, then: each call says only that nothing is known."""
