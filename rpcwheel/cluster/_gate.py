"""The requests of one try of a call, none of which is taken before there is a connection.

gRPC reads the first request of a stream while it still looks for a connection, so that a call that
found none could not be made elsewhere. Here its thread waits at the gate.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._fleet import Member

__all__ = ["Gate"]

SOONEST_S: Final = 0.002
LATEST_S: Final = 0.05
"""How often to look whether there is a connection: first, and after a while."""

CONNECTED: Final = frozenset({grpc.ChannelConnectivity.READY, None})


class Gate:
    """An iterator over requests that are somebody else's. Read by one thread, shut by any."""

    def __init__(self, requests: Iterator[Any], member: Member) -> None:
        self._requests = requests
        self._member = member
        self._over = threading.Condition()
        self._shut = False
        self._taken = False

    def shut(self) -> bool:
        """Let nothing more pass, if nothing has; whether anything was taken."""
        with self._over:
            self._shut = True
            self._over.notify_all()
            return self._taken

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._taken:
            self._pass()
        return next(self._requests)

    def _pass(self) -> None:
        wait_s = SOONEST_S
        while True:
            link = self._member.link
            connected = link is not None and link.get_state() in CONNECTED
            with self._over:
                if self._shut:
                    raise StopIteration
                if connected:
                    self._taken = True
                    return
                self._over.wait(wait_s)
            wait_s = min(2 * wait_s, LATEST_S)
