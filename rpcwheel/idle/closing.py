"""One scan that closes the connections that are marked, each after a last look at it.

The decision of the round is some milliseconds old by then. So each is looked at again under the
table's lock, what the kernel says of it too: a call that has begun meanwhile, or bytes that have
just come and may be one, keep it. The socket is shut under the same lock.

Bytes that gRPC has read may be a call that nobody has told the table of yet. So the server is given
a moment, again and again while a scan takes long (`Settled`), and bytes that are younger than the
begin of that keep the connection.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from rpcwheel.durations import NEVER
from rpcwheel.events import ConnectionClosed, IdleCloseSkipped

from .core import AGED_NS, STATUS_NS, TRY_NS, Look, Reason, Step, step
from .peers import open_sockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.events import Event

    from .core import Mark
    from .entry import Call, Entry
    from .limits import Limits
    from .peers import Address, OpenSocket, Slot
    from .table import Connections

    Finished = list[tuple[Call, str]]

__all__ = ["Closing", "Settled"]

LEAVING_NS: Final = 1_000_000_000
"""Between two looks whether a client that was asked to leave has gone."""

FRESH_NS: Final = 25_000_000
"""After so long the server is given another moment."""


class Settled:
    """When calls that had come in by then were surely seen."""

    def __init__(self, settle: Callable[[], bool]) -> None:
        """Take how to give the server a moment, which says False if it did not have it."""
        self._settle = settle
        self._had = True
        self._began_ns = 0
        self._at_ns: int | None = None

    def renew(self) -> None:
        """Give the server a moment, if the last is over; after one that it did not have, no more.

        It waits, so no socket may be held: gRPC may close its own meanwhile, and a duplicate keeps
        alive what it has to do with the descriptor (epoll(7), Q6).
        """
        now_ns = time.monotonic_ns()
        if self._had and (self._at_ns is None or now_ns - self._at_ns > FRESH_NS):
            self._began_ns = now_ns
            self._had = self._settle()
            self._at_ns = time.monotonic_ns()

    def seen_ago_ns(self) -> int | None:
        """Since the last moment began: what came in before was seen. None if it was not had."""
        if self._at_ns is None or not self._had:
            return None
        return time.monotonic_ns() - self._began_ns


class Closing:
    """One scan, and what it needs."""

    def __init__(
        self,
        connections: Connections,
        limits: Callable[[], Limits],
        settled: Settled,
        coming_ago_ns: Callable[[bool], int],
    ) -> None:
        """Take the table and what is asked.

        Args:
            connections: The table.
            limits: What holds now; asked under the table's lock.
            settled: Gives the server its moment.
            coming_ago_ns: Gives that of `Look`, if told whether the server had its moment; asked
                under the table's lock.
        """
        self._connections = connections
        self._limits = limits
        self._settled = settled
        self._coming_ago_ns = coming_ago_ns
        self.events: list[Event] = []
        """What has happened."""
        self.finished: Finished = []
        """The calls to end, and what to tell their clients: nothing of theirs counts any more."""

    def run(self, slot: Slot | None = None) -> None:
        """Do the next step with each connection whose turn it is.

        Blocks for microseconds per socket of the process, and for the server's moments; a worker.
        """
        marked = self._due()
        if not marked:
            return
        wanted: Callable[[Address, int], bool] = lambda peer, _: peer in marked  # noqa: E731
        with closing(open_sockets(wanted, slot=slot, between=self._settled.renew)) as sockets:
            for socket in sockets:
                entry = marked[socket.peer]
                if entry.inode == socket.inode:
                    del marked[socket.peer]
                    self._step(entry, socket)
        for entry in marked.values():
            self._has_gone(entry)

    def _due(self) -> dict[Address, Entry]:
        now_ns = self._connections.now_ns()
        return {
            entry.address: entry
            for entry in self._connections.entries()
            if entry.address is not None and entry.mark is not None and entry.mark.next_ns <= now_ns
        }

    def _step(self, entry: Entry, socket: OpenSocket) -> None:
        connections = self._connections
        with connections.lock:
            mark, limits = entry.mark, self._limits()
            if mark is None or entry.gone:  # used, closed, or no longer looked after
                return
            now_ns = connections.now_ns()
            next_step = step(entry.seen, mark, self._look(socket, now_ns), limits, now_ns)
            mark.next_ns = now_ns + TRY_NS
            mark.tries += 1
            match next_step:
                case Step.WAIT:
                    pass
                case Step.WAIT_LONG:
                    mark.tries -= 1
                    mark.next_ns = now_ns + _pause_ns(mark, limits)
                case Step.END_CALLS:
                    self._end_calls(entry, mark, now_ns)
                case Step.GOAWAY:
                    if socket.goaway():
                        mark.left_ns, mark.tries = now_ns, 0
                        mark.next_ns = now_ns + _pause_ns(mark, limits)
                case Step.SHUTDOWN:
                    socket.shutdown()
                    connections.drop(entry)
                    self.events.append(_closed(entry, mark, "shutdown"))
                case Step.KEEP_USED | Step.KEEP_BUSY | Step.KEEP_DOUBTFUL:
                    entry.mark = None
                    self.events.append(IdleCloseSkipped(entry.peer, next_step.value))

    def _end_calls(self, entry: Entry, mark: Mark, now_ns: int) -> None:
        mark.ended_ns = now_ns
        if mark.due.reason is Reason.AGE:
            mark.next_ns = now_ns + STATUS_NS
        self.finished += _finishing(entry, f"closed by the server: {mark.due.text}")

    def _look(self, socket: OpenSocket, now_ns: int) -> Look:
        hidden_ns = self._connections.hidden_ns
        seen_ago_ns, info = self._settled.seen_ago_ns(), socket.info()
        return Look(
            unread=socket.unread(),
            unsent=socket.unsent(),
            received_ago_ns=0 if info is None else int(info.received_ago_s * 1e9),
            seen_ago_ns=seen_ago_ns or 0,
            coming_ago_ns=self._coming_ago_ns(seen_ago_ns is not None),
            hidden_ago_ns=NEVER if hidden_ns is None else now_ns - hidden_ns,
        )

    def _has_gone(self, entry: Entry) -> None:
        """The client has closed a marked connection itself, asked or not."""
        with self._connections.lock:
            mark = entry.mark
            if mark is None or entry.gone:
                return
            self._connections.drop(entry)
        if mark.left_ns is not None:
            self.events.append(_closed(entry, mark, "goaway"))


def _pause_ns(mark: Mark, limits: Limits) -> int:
    """Until it is looked at again whether what is open has ended, or the client has gone."""
    longest = LEAVING_NS if mark.left_ns is None else min(LEAVING_NS, limits.goaway_grace_ns)
    if mark.due.reason is Reason.AGE:
        return max(TRY_NS, min(AGED_NS, longest, limits.age_grace_ns // 10))
    return longest


def _finishing(entry: Entry, details: str) -> list[tuple[Call, str]]:
    """The open calls that are to be ended now; from here on they keep nothing open."""
    calls = [call for call in entry.calls if not call.finished]
    for call in calls:
        call.finished = True
    return [(call, details) for call in calls]


def _closed(entry: Entry, mark: Mark, how: str) -> ConnectionClosed:
    return ConnectionClosed(entry.peer, mark.due.text, mark.due.idle_ns / 1e9, how)
