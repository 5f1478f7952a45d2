"""The one member of a channel of `grpc.aio` with `balance="core"`: the twin of `_listed.py`."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.loop import call_on_loop, on_worker
from rpcwheel.cluster.arguments import credentials_for
from rpcwheel.durations import NEVER
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe import emit

from .alarm import Alarm
from .listing import PLAIN, LeftOut, Listing, one_protocol, protocol_of, spread, wanted_of
from .places import addresses_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.cluster.aio import ClusterChannel
    from rpcwheel.errors import TimerError
    from rpcwheel.timer.api import Timer

    from .listing import Places

    Options = list[tuple[str, Any]]

__all__ = ["Listed"]

WARM_S: Final = 1.0
"""How long the channel of a new list may take to connect, before it is used as it is."""

CHANGED: Final = "its addresses have changed"


class Listed:
    """What a channel of one list is made of, and is made of anew. On one loop."""

    def __init__(
        self,
        name: str,
        registry: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        compression: grpc.Compression | None,
        timer: Timer | None,
    ) -> None:
        """See the sync twin."""
        self._name = name
        self._credentials = credentials
        self._compression = compression
        self._loop = asyncio.get_running_loop()
        self._core = Listing()
        self._left_out = LeftOut(registry, name)
        self._alarm = Alarm(timer, self._rang, _not_told)
        self._channel: Callable[[], ClusterChannel | None] = _nobody
        self._using = "", ""  # the target and the protocol
        self._options: Options = []
        self._warm: grpc.aio.Channel | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._closed = False

    def connect(self, _: ServiceInstance, options: Options) -> grpc.aio.Channel:
        """Give the channel of the list, for the one member; the one that is warm, if one is."""
        warm, self._warm = self._warm, None
        if warm is not None:
            return warm
        self._options = options
        return self._make()

    def show(self, channel: ClusterChannel, instances: list[ServiceInstance]) -> None:
        """Take note of what the registry says."""
        usable, others = one_protocol(instances, credentials=self._credentials is not None)
        for told in self._left_out.news(others, PLAIN):
            emit(told)
        self._channel = weakref.ref(channel)
        protocol = protocol_of(usable, credentials=self._credentials is not None)
        self._core.saw(*wanted_of(usable), self._alarm.now_ns(), protocol)
        self._wake()

    async def close(self) -> None:
        """Change nothing any more. Idempotent."""
        self._closed = True
        self._alarm.clear()
        if self._stepping is not None:
            call_on_loop(self._loop, self._stepping.cancel)

    def _wake(self) -> None:
        """Do what is due, or wait for it."""
        self._alarm.clear()
        wake_ns = self._core.next_wake_ns
        if self._closed or wake_ns == NEVER:
            return
        if wake_ns > self._alarm.now_ns():
            self._alarm.wake(wake_ns)
        elif self._stepping is None:
            self._stepping = self._loop.create_task(self._step())

    def _rang(self) -> None:
        """On the timer's thread."""
        call_on_loop(self._loop, self._again)

    def _again(self) -> None:
        self._alarm.rang()
        self._wake()

    async def _step(self) -> None:
        """Have the list in use that is wanted; one at a time."""
        try:
            places = self._core.step(self._alarm.now_ns())
            if places is not None:
                await self._use(places, self._core.protocol)
        finally:
            self._stepping = None
            self._wake()

    async def _use(self, places: Places, protocol: str) -> None:
        found = await on_worker(partial(addresses_of, sorted(places)))
        for told in self._left_out.news(found.left_out, f"it has no {found.family} address"):
            emit(told)
        using = found.target, protocol
        channel = self._channel()
        if channel is None:
            return
        if not found.target:
            channel.update([])
            return
        changed, self._using = using != self._using, using
        members = channel.members
        if not members:
            channel.update([ServiceInstance(service=self._name, host=self._name, port=1)])
        elif changed and members[0].link is not None:
            await self._swap(members[0].link)

    async def _swap(self, inner: Any) -> None:
        """Calls in flight take as long as they take: most are on servers that stay."""
        if inner.is_idle():  # nobody calls: so nobody need be connected
            inner.reconnect(CHANGED, force=True)
            return
        warm = self._make()
        used = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WARM_S):
                    await warm.channel_ready()
            self._warm = warm
            used = inner.reconnect(CHANGED, force=True)
        finally:
            self._warm = None
            if not used:  # it is closed
                await warm.close()

    def _make(self) -> grpc.aio.Channel:
        target, protocol = self._using
        credentials = credentials_for(protocol, self._credentials)
        options = spread(self._options)
        if credentials is None:
            return grpc.aio.insecure_channel(target, options, self._compression)
        return grpc.aio.secure_channel(target, credentials, options, self._compression)


def _nobody() -> None:
    """There is no channel yet."""


def _not_told(_: TimerError) -> None:
    """The list stays as it is until the next change."""
