"""What is seen of a channel of `grpc.aio` that reconnects: its state, across replacements."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.aio_relay import Signal

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ._aio_members import Wire
    from .core import Links, Traffic

__all__ = ["Seen"]

READY: Final = grpc.ChannelConnectivity.READY


class Seen(grpc.aio.Channel):
    """The part of a channel that changes nothing."""

    def __init__(self, target: str, links: Links[Wire]) -> None:
        self.target = target
        """As it was given."""
        self.links = links
        """Internal: which connection serves what."""
        self._changed = Signal()

    def __repr__(self) -> str:
        state = self.get_state().name
        return (
            f"<ReconnectingChannel of grpc.aio to {self.target!r}, connection {self.number}, "
            f"{state}, calls in flight: {self.calls}>"
        )

    @property
    def number(self) -> int:
        """Of the connection that is active, from 1."""
        return self.links.active.number

    @property
    def calls(self) -> int:
        """Calls in flight, those on connections that were replaced too."""
        return self.links.calls

    @property
    def closed(self) -> bool:
        """Whether it was closed, or was retired and has been drained since."""
        return self.links.closed

    @property
    def traffic(self) -> Traffic:
        """When something was read, written and used on the active connection; for heartbeats.

        In nanoseconds on the timer's clock.
        """
        return self.links.active.traffic

    def is_idle(self) -> bool:
        """Whether there is no connection, and none is wanted; False where that is unknown."""
        try:
            return bool(self.get_state() is grpc.ChannelConnectivity.IDLE)
        except Exception:  # noqa: BLE001 - closed, or of another make
            return False

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the active connection.

        Args:
            try_to_connect: Whether to begin to connect if it is idle; if it is replaced before it
                is ready, so is the next.
        """
        link = self.links.active
        state = link.channel.channel.get_state(try_to_connect)
        link.wanted = state is not READY and (link.wanted or bool(try_to_connect))
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state is another, be it that of a new connection."""
        while True:
            channel = self.links.active.channel.channel
            if channel.get_state() is not last_observed_state:
                return
            await self._either(channel.wait_for_state_change(last_observed_state))

    async def _either(self, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change of state, or for a new connection."""
        replaced = self._changed.waiter()  # before anything else may run
        changing = asyncio.ensure_future(change)
        try:
            await asyncio.wait([changing, replaced], return_when=asyncio.FIRST_COMPLETED)
            if not replaced.done():
                changing.result()
        finally:
            self._changed.forget(replaced)
            changing.cancel()
            await asyncio.gather(changing, return_exceptions=True)

    async def channel_ready(self) -> None:
        """Wait until there is a connection, and have it made."""
        while (state := self.get_state(try_to_connect=True)) is not READY:
            await self.wait_for_state_change(state)
