"""One scan that closes the connections that are marked, each after a last look at it.

The decision of the round is some milliseconds old by then. So each is looked at again under the
table's lock, what the kernel says of it too: a call that has begun meanwhile, or bytes that have
just come and may be one, keep it. The socket is shut under the same lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.observe import ConnectionClosed, ConnectionKept

from .core import TRY_NS, Look, Step, step
from .peers import open_sockets

if TYPE_CHECKING:
    from .core import Limits, Mark
    from .entry import Call, Entry
    from .peers import OpenSocket
    from .table import Connections

    Finished = list[tuple[Call, str]]

__all__ = ["close_marked"]

LEAVING_NS: Final = 1_000_000_000
"""Between two looks whether a client that was asked to leave has gone."""


def close_marked(
    connections: Connections, limits: Limits, events: list[object], *, doubtful: bool
) -> Finished:
    """Do the next step with each connection whose turn it is.

    Args:
        connections: The table.
        limits: What holds now.
        events: Where to put what has happened.
        doubtful: Whether there may be calls that the table does not know of.

    Returns:
        The calls to end, and what to tell their clients: nothing of theirs counts any more.

    Blocks for microseconds per socket of the process; on a worker.
    """
    now_ns, marked = connections.now_ns(), {}
    for entry in connections.entries():
        if entry.mark is not None and entry.mark.next_ns <= now_ns and entry.address is not None:
            marked[entry.address] = entry
    finished: Finished = []
    if not marked:
        return finished
    for socket in open_sockets(lambda peer, _: peer in marked):
        entry = marked[socket.peer]
        if entry.inode == socket.inode:
            del marked[socket.peer]
            finished += _step(connections, entry, socket, limits, events, doubtful=doubtful)
    for entry in marked.values():
        _has_gone(connections, entry, events)
    return finished


def _step(
    connections: Connections,
    entry: Entry,
    socket: OpenSocket,
    limits: Limits,
    events: list[object],
    *,
    doubtful: bool,
) -> Finished:
    with connections.lock:
        mark = entry.mark
        if mark is None or entry.gone:  # used, closed, or no longer looked after
            return []
        now_ns = connections.now_ns()
        next_step = step(entry.seen, mark, _look(socket, doubtful=doubtful), limits, now_ns)
        mark.next_ns = now_ns + TRY_NS
        mark.tries += 1
        match next_step:
            case Step.WAIT:
                pass
            case Step.WAIT_LONG:
                mark.tries -= 1
                mark.next_ns = now_ns + LEAVING_NS
            case Step.END_CALLS:
                mark.moves = entry.seen.moves(limits)
                return _finishing(entry, f"closed by the server: {mark.due.text}")
            case Step.GOAWAY:
                if socket.goaway():
                    mark.left_ns, mark.tries = now_ns, 0
                    mark.next_ns = now_ns + min(LEAVING_NS, limits.goaway_grace_ns)
            case Step.SHUTDOWN:
                socket.shutdown()
                connections.drop(entry)
                events.append(_closed(entry, mark, "shutdown"))
            case Step.KEEP_USED | Step.KEEP_BUSY | Step.KEEP_DOUBTFUL:
                entry.mark = None
                events.append(ConnectionKept(entry.peer, next_step.value))
    return []


def _look(socket: OpenSocket, *, doubtful: bool) -> Look:
    info = socket.info()
    received_ns = 0 if info is None else int(info.received_ago_s * 1e9)
    return Look(socket.unread(), socket.unsent(), received_ns, doubtful)


def _has_gone(connections: Connections, entry: Entry, events: list[object]) -> None:
    """The client has closed a marked connection itself, asked or not."""
    with connections.lock:
        mark = entry.mark
        if mark is None or entry.gone:
            return
        connections.drop(entry)
    if mark.left_ns is not None:
        events.append(_closed(entry, mark, "goaway"))


def _finishing(entry: Entry, details: str) -> list[tuple[Call, str]]:
    """The open calls that are to be ended now; from here on they keep nothing open."""
    calls = [call for call in entry.calls if not call.finished]
    for call in calls:
        call.finished = True
    return [(call, details) for call in calls]


def _closed(entry: Entry, mark: Mark, how: str) -> ConnectionClosed:
    return ConnectionClosed(entry.peer, mark.due.text, mark.due.idle_ns / 1e9, how)
