"""One connection of a server, one call on it, and what users see of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel.durations import to_seconds

from .core import Reason, Seen

if TYPE_CHECKING:
    from .core import Due, Mark, Use
    from .peers import Address, OpenSocket, TcpInfo
    from .table import Connections

__all__ = ["Call", "Connection", "Entry", "Sighting"]

SMALLEST_CALL: Final = 200
"""Bytes. A greeting of grpc's has about 90, and the headers of a first call about as many."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection of a server, at one moment. Times are seconds on the timer's clock."""

    peer: str
    """As `context.peer()` has it; all unix sockets together are `"unix:"`."""
    local_port: int | None
    """The server's. None until a look at the sockets has found it, as are the bytes."""
    first: float
    """When it was seen first; a connection without calls, when it was last seen to be silent."""
    last_read: float | None
    """The last message of the client's, or begin of a call. None: never yet."""
    last_write: float | None
    """The last message to the client. None: never yet."""
    calls_open: int
    streams_open: int
    calls: int
    """All that have begun, streams too. Heartbeats are in none of these figures but the last."""
    messages_in: int
    messages_out: int
    heartbeats: int
    bytes_in: int | None
    bytes_out: int | None


class Sighting(NamedTuple):
    """A socket, as a scan has found it."""

    peer: Address
    local: Address
    inode: int
    text: str
    info: TcpInfo | None

    @classmethod
    def of(cls, socket: OpenSocket) -> Sighting:
        """What is known of an open socket."""
        return cls(socket.peer, socket.local, socket.inode, socket.text, socket.info())


class Entry:
    """One connection. Under the table's lock."""

    __slots__ = (
        "address",
        "ambiguous",
        "asked",
        "calls",
        "gone",
        "info",
        "inode",
        "local_port",
        "mark",
        "peer",
        "seen",
        "sighted_ns",
        "told",
    )

    def __init__(self, peer: str, address: Address | None, first_ns: int) -> None:
        self.peer = peer
        self.address = address
        self.seen = Seen(first_ns, random.random())
        self.asked = False
        """Whether a call was asked what it alone can know: whether it is plaintext."""
        self.calls: set[Call] = set()
        """Those that are open."""
        self.inode: int | None = None
        self.local_port: int | None = None
        self.info: TcpInfo | None = None
        self.sighted_ns = first_ns
        self.ambiguous = False
        """Whether several sockets have its address, of which only one is its own."""
        self.gone = False
        """Whether it is no longer in the table."""
        self.mark: Mark | None = None
        self.told: tuple[object, int] | None = None
        """What was said of it last: why it is idle, and its moves then."""

    def connection(self) -> Connection:
        """Make the record for users."""
        user, info = self.seen.user, self.info
        return Connection(
            peer=self.peer,
            local_port=self.local_port,
            first=to_seconds(self.seen.first_ns),
            last_read=None if user.read_ns is None else to_seconds(user.read_ns),
            last_write=None if user.write_ns is None else to_seconds(user.write_ns),
            calls_open=user.calls,
            streams_open=user.streams,
            calls=user.total,
            messages_in=user.messages_in,
            messages_out=user.messages_out,
            heartbeats=self.seen.beats.total,
            bytes_in=None if info is None else info.bytes_in,
            bytes_out=None if info is None else info.bytes_out,
        )

    def last_ns(self) -> int:
        """When anything was last seen of it."""
        uses = self.seen.user, self.seen.beats
        times = [time for use in uses for time in (use.read_ns, use.write_ns, use.ended_ns)]
        return max(self.seen.first_ns, *(time or 0 for time in times))

    def is_mute(self) -> bool:
        """Whether so little came in that there is no call among it."""
        return self.info is not None and (self.info.bytes_in or 0) < SMALLEST_CALL

    def is_news(self, due: Due, moves: int) -> bool:
        """Whether it was not said yet that it is idle for this reason, since it was used last.

        That it is too old is said once: use makes it no younger.
        """
        said = due.reason, -1 if due.reason is Reason.AGE else moves
        news, self.told = self.told != said, said
        return news


class Call:
    """One call that is being served. A twin says how it is ended."""

    __slots__ = (
        "_connections",
        "answered",
        "began_ns",
        "entry",
        "finished",
        "heartbeat",
        "streams",
        "use",
    )

    def __init__(
        self, connections: Connections, peer: str, *, streams: bool, heartbeat: bool
    ) -> None:
        self._connections = connections
        self.streams = streams
        self.heartbeat = heartbeat
        self.answered = False
        """Set where there is one answer: it counts at the end. Half the price of `wrote`."""
        self.finished = False
        """Whether it is being ended by us: what it does then keeps nothing open."""
        self.began_ns = connections.now_ns()
        self.entry: Entry
        self.use: Use
        connections.enter(self, peer)

    def read(self) -> None:
        """A message came in. Thread-safe, as the others."""
        connections = self._connections
        with connections.lock:
            if not self.finished:
                self.use.read(connections.now_ns())

    def wrote(self) -> None:
        """A message goes out."""
        connections = self._connections
        with connections.lock:
            if not self.finished:
                self.use.wrote(connections.now_ns())

    def ended(self) -> None:
        """It is over; a second time nothing."""
        connections = self._connections
        with connections.lock:
            if self in self.entry.calls:
                now_ns = connections.now_ns()
                self.entry.calls.remove(self)
                connections.open_calls -= 1
                if self.answered and not self.finished:
                    self.use.wrote(now_ns)
                self.use.end(now_ns, streams=self.streams)

    def finish(self, details: str) -> None:
        """End it with UNAVAILABLE. Any thread; must not wait. Of a twin."""
        raise NotImplementedError
