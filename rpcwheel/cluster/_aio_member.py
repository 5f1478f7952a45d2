"""One member of a channel of `grpc.aio`: a server, with a connection of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .member import MemberCore

if TYPE_CHECKING:
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.transport.aio import ReconnectingChannel

    from ._aio_fleet import Fleet

__all__ = ["Member"]


class Member(MemberCore):
    """One server of a channel's, with a connection of its own. Made by the channel."""

    def __init__(self, fleet: Fleet, instance: ServiceInstance, began_ns: int) -> None:
        super().__init__(instance, began_ns)
        self._fleet = fleet
        self.link: ReconnectingChannel | None = None
        """Internal: its channel, once there is one."""

    @property
    def channel(self) -> ReconnectingChannel:
        """Its own channel; made when it is first asked for, and connected by its first call.

        On the loop, where it is not made yet.

        Raises:
            grpc.aio.UsageError: The member is gone.
            Exception: What `connect` raised.
        """
        return self._fleet.connected(self) if self.link is None else self.link

    @property
    def calls(self) -> int:
        """Calls in flight on it."""
        return 0 if self.link is None else self.link.calls

    def down(self, reason: str = "asked for") -> None:
        """Have it not called until it answers a probe. A second time, or once it is gone, nothing.

        On any thread; soon, if not on the loop.

        Args:
            reason: For the event.
        """
        self._fleet.home.do(partial(self._fleet.down, self, reason))

    def up(self) -> None:
        """Have it called again. One that is not down: nothing. On any thread, as `down`."""
        self._fleet.home.do(partial(self._fleet.up, self))
