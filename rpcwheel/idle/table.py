"""The connections of one server: from its calls, and from scans of the process's sockets.

* `Table` has a `ConnectionEntry` for each connection. The detector of idle connections
  (`IdleConnectionDetector`) updates it with its scans, and decides from it what to close.
* `ServedCall` is a call in flight. The server interceptor makes it, which enters it into the table.
  `Requests` and `Responses` count the messages of its streams.
* `Connection` is the record of a connection for users.

Calls show gRPC's name of the peer, scans the address and the inode of a socket. An entry has the
name and the address. If a scan finds another inode at the address, the client has connected again
from the same port, and the connection gets a new entry. A call whose client has left before the
interceptor called `peer()`, which is empty then, belongs to no connection.

A table has one lock. It is held for a few assignments, and while the detector examines and closes a
socket. So a call begins either before the decision to close, which then sees it, or on a closed
connection. The lock is reentrant, because a signal handler may list the connections.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Never, Self

from rpcwheel.backoff import RANDOM
from rpcwheel.methods import matches
from rpcwheel.rpc import HEARTBEAT_KEY

from .core import NOT_YET, ConnectionActivity, IdleLimit
from .policy import HEALTH_METHODS
from .sockets import grpc_name, parse_peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .core import Activity, IdleReason, Limits, PendingClose
    from .sockets import Address, SocketInfo

SMALLEST_CALL_BYTES: Final = 200
"""Fewer bytes are taken for no call. Measured with a client of grpcio 1.85: it sends 91 when it
connects, and 367 up to the end of a first call with an empty request."""

MAX_METHODS: Final = 4096
"""The number of methods for which it is remembered whether they are heartbeats. There is a limit,
because a generic handler may serve any name that clients send."""

MAX_ENTRIES: Final = 1 << 16
"""The largest number of entries. Reached only if no scan shows which connections are closed."""


class ConnectionState(enum.Enum):
    """State of a server's connection."""

    ACTIVE = "active"
    """Calls are in flight."""
    IDLE = "idle"
    """No calls are in flight, except heartbeats."""
    CLOSING = "closing"
    """A limit of the policy is exceeded, and the detector closes the connection."""


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The identity in the certificate of a client (mutual TLS), as gRPC provides it."""

    subject: str | None
    """Such as "CN=shop,O=Example"."""
    alternative_names: tuple[str, ...]
    """DNS names, addresses and URIs."""

    @classmethod
    def from_auth_context(cls, context: Mapping[str, Iterable[bytes]]) -> Self | None:
        """Convert what `context.auth_context()` returns; None if there was no certificate."""
        subject, names = (
            tuple(value.decode(errors="replace") for value in context.get(key, ()))
            for key in ("x509_subject", "x509_subject_alternative_name")
        )
        if not subject and not names:
            return None
        return cls(subject[0] if subject else None, names)


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of a server, as it was when the connections were listed.

    gRPC describes the client only with a call: until the first call on the connection,
    `user_agent` and `tls_identity` are None. On systems other than Linux, and for unix sockets,
    `local_address`, `bytes_in` and `bytes_out` are None. If the kernel does not say how
    many bytes it received (gVisor), `bytes_in` and `bytes_out` are None.
    """

    peer: str
    """The value of `context.peer()`. All unix sockets together are "unix:"."""
    local_address: str | None
    """The server's address, in the same form. None: not known."""
    user_agent: str | None
    """From the metadata of the first call."""
    tls_identity: TlsIdentity | None
    """None if not known, on a plaintext connection, or if the client gave no certificate."""
    state: ConnectionState
    calls_in_flight: int
    """Streams included."""
    streams_in_flight: int
    calls_total: int
    """All calls so far, streams included. Heartbeats are in none of these numbers."""
    heartbeats_total: int
    messages_in: int
    messages_out: int
    bytes_in: int | None
    """Bytes that the kernel received, including the overhead of HTTP/2 and TLS."""
    bytes_out: int | None
    connected_at: datetime
    """UTC. When its first call began. If a scan saw the connection before it had a call, when bytes
    were last received or sent before this scan. Never changes."""
    last_used_at: datetime | None
    """UTC. When a call last began or ended, or a message was last read or written. None: never."""
    idle_s: float
    """Seconds since `last_used_at`, or else since `connected_at`."""


class ConnectionEntry:
    """One connection. Guarded by the lock of its table."""

    def __init__(
        self, peer: str, address: Address | None, first_ns: int, connected_at: datetime
    ) -> None:
        """Make the entry of a connection without calls.

        If `address` is None, the entry stands for several connections, such as those of a unix
        socket, which have no age. The connection began at `first_ns` by the table's clock, and
        `connected_at` by the wall clock, as far as known.
        """
        self.peer = peer
        self.address = address
        self.connected_at = connected_at
        self.last_used: tuple[int, datetime | None] = NOT_YET, None
        """The last use that was listed: by the table's clock, and by the wall clock. Kept, so that
        its wall-clock time is the same in each list."""
        age_jitter = None if address is None else RANDOM.random()
        self.activity = ConnectionActivity(first_ns, age_jitter)
        self.described = False
        """Whether a call has noted `user_agent` and `tls_identity`."""
        self.user_agent: str | None = None
        self.tls_identity: TlsIdentity | None = None
        self.calls: set[ServedCall] = set()
        """The calls in flight."""
        self.info: SocketInfo | None = None
        """Its socket, as the last scan saw it; None if it is not known which socket it is."""
        self.gone = False
        """Whether it was removed from the table."""
        self.pending: PendingClose | None = None
        """Set while the detector closes the connection."""
        self.reported: tuple[IdleLimit, int] | None = None
        """The last reported reason: the limit, and the time of the last use before the report."""

    def connection(self, limits: Limits, now_ns: int, now: datetime) -> Connection:
        """Make the record for users."""
        calls, info, first_ns = self.activity.user, self.info, self.activity.first_ns
        last_ns = self._last_used_ns(limits)
        if last_ns != self.last_used[0]:
            self.last_used = (
                last_ns,
                None if last_ns == NOT_YET else _wall_time(last_ns, now_ns, now),
            )
        if self.pending is not None:
            state = ConnectionState.CLOSING
        else:
            state = ConnectionState.ACTIVE if calls.in_flight else ConnectionState.IDLE
        return Connection(
            peer=self.peer,
            local_address=None if info is None else grpc_name(info.local),
            user_agent=self.user_agent,
            tls_identity=self.tls_identity,
            state=state,
            calls_in_flight=calls.in_flight,
            streams_in_flight=calls.streams,
            calls_total=calls.total,
            heartbeats_total=self.activity.heartbeats.total,
            messages_in=calls.messages_in,
            messages_out=calls.messages_out,
            bytes_in=None if info is None else info.bytes_in,
            bytes_out=None if info is None else info.bytes_out,
            connected_at=self.connected_at,
            last_used_at=self.last_used[1],
            idle_s=(now_ns - max(first_ns, last_ns)) / 1e9,
        )

    def _last_used_ns(self, limits: Limits) -> int:
        """Return when a call that counts as use was last active; `NOT_YET` if none was."""
        return max(kind.last_used_ns for kind in self.activity.counted_activities(limits))

    def last_ns(self) -> int:
        """Return the time of the last activity, heartbeats and the beginning included."""
        activity = self.activity
        return max(activity.first_ns, activity.user.last_used_ns, activity.heartbeats.last_used_ns)

    def had_no_call(self) -> bool:
        """Whether too few bytes arrived for a call; False if their number is not known."""
        received = None if self.info is None else self.info.bytes_in
        return received is not None and received < SMALLEST_CALL_BYTES

    def note_report(self, reason: IdleReason, limits: Limits) -> bool:
        """Note that a reason is reported.

        Returns:
            False if it is the last reported reason, and the connection was not used since then. An
            age above the limit is reported once, because use makes a connection no younger.
        """
        is_age = reason.limit is IdleLimit.AGE
        report = reason.limit, NOT_YET if is_age else self._last_used_ns(limits)
        previous, self.reported = self.reported, report
        return previous != report


class ServedCall:
    """A call in flight. Thread-safe. The subclasses for `grpc` and `grpc.aio` can end it."""

    __slots__ = (
        "activity",
        "ended_by_detector",
        "entry",
        "heartbeat",
        "is_over",
        "streams",
        "table",
    )

    def __init__(self, table: Table, peer: str, *, streams: bool, heartbeat: bool) -> None:
        self.table = table
        self.streams = streams
        self.heartbeat = heartbeat
        self.is_over = False
        """Whether the call has ended."""
        self.ended_by_detector = False
        """Whether the detector has begun to end the call. Its messages and its end are then no use
        of the connection."""
        self.entry: ConnectionEntry
        self.activity: Activity
        table.enter(self, peer)  # sets `entry` and `activity`

    def describe(self, context: Any, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Note who is connected, if this is the first call of the connection. Takes no lock."""
        entry = self.entry
        if entry.described:
            return
        entry.described = True
        for key, value in metadata:
            if key == "user-agent":
                entry.user_agent = str(value)
        with suppress(Exception):  # a context of another package
            entry.tls_identity = TlsIdentity.from_auth_context(context.auth_context())

    def note_read(self) -> None:
        """Count a message that was read."""
        with self.table.lock:
            if not self.ended_by_detector:
                self.activity.note_read(self.table.now_ns())

    def note_write(self) -> None:
        """Count a message that was written."""
        with self.table.lock:
            if not self.ended_by_detector:
                self.activity.note_write(self.table.now_ns())

    def note_end(self) -> None:
        """Note the end of the call. Idempotent."""
        self.is_over = True
        with self.table.lock:
            if self in self.entry.calls:
                self.table.leave(self)

    def note_return(self) -> None:
        """Note that the handler has returned, which need not be the end of the call.

        Overridden for calls of grpc.aio whose end nothing else reports.
        """

    def takes_no_responses(self) -> bool:
        """Whether gRPC no longer takes its responses. Any thread."""
        return self.is_over

    def finish(self, details: str) -> None:
        """End the call with UNAVAILABLE. Any thread; does not block."""
        raise NotImplementedError


class Requests:
    """A request stream that counts the messages that the handler reads.

    The handler may be blocking or a coroutine.
    """

    __slots__ = ("_call", "_requests")

    def __init__(self, requests: Any, call: ServedCall) -> None:
        self._requests = requests
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        request = next(self._requests)
        self._call.note_read()
        return request

    def next(self) -> object:
        """Return the next request. gRPC's request iterators have this method too."""
        return next(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        request = await self._requests.__anext__()
        self._call.note_read()
        return request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)


class Responses:
    """A response stream of a blocking handler that counts the messages that gRPC takes.

    It ends with the call. Otherwise a pool thread of grpc.aio would block forever on a queue that
    is not read (`generator_to_async_generator`, grpcio 1.85).
    """

    __slots__ = ("_call", "_responses")

    def __init__(self, responses: Iterator[object], call: ServedCall) -> None:
        self._responses = responses
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        call = self._call
        if call.takes_no_responses():
            return self._end()
        try:
            response = next(self._responses)
        except BaseException:  # also StopIteration
            call.note_return()
            raise
        if call.takes_no_responses():  # it has ended while the handler made the response
            return self._end()
        call.note_write()
        return response

    def _end(self) -> Never:
        self._responses = iter(())  # drops the handler's iterator, which may run cleanup code
        raise StopIteration


class Table:
    """The connections of one server."""

    def __init__(self) -> None:
        self.now_ns: Callable[[], int] = time.monotonic_ns
        """The clock of the detector that uses the table."""
        self.lock = threading.RLock()
        self.owner: object = None
        """The detector that closes these connections."""
        self.has_seen_calls = False
        """Whether any call came in. If not, the table may not be an interceptor of the server."""
        self.hidden_call_ns = NOT_YET
        """When a call last began whose peer is not known, by `now_ns`."""
        self.open_calls = 0
        """Calls in flight on all connections."""
        self.accounted_ns = time.monotonic_ns()
        """The detector knows every call whose bytes arrived before this time: the call is in the
        table, or is about to be entered. By `time.monotonic_ns()`, whatever `now_ns` is. Begins as
        the time when the table is made, because no call can have arrived before."""
        self._entries: dict[str, ConnectionEntry] = {}
        self._by_address: dict[Address, ConnectionEntry] = {}
        self.set_heartbeats((HEALTH_METHODS,))

    def __len__(self) -> int:
        return len(self._entries)

    # Calls

    def set_heartbeats(self, patterns: tuple[str, ...]) -> None:
        """Set which methods are heartbeats, for calls that begin from now on."""
        self._is_heartbeat_method = lru_cache(MAX_METHODS)(
            lambda method: any(matches(pattern, method) for pattern in patterns)
        )

    def is_heartbeat(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call is a heartbeat."""
        if self._is_heartbeat_method(method):
            return True
        for key, _ in metadata:  # noqa: SIM110 - `any` takes three times as long
            if key == HEARTBEAT_KEY:
                return True
        return False

    def enter(self, call: ServedCall, peer: str) -> None:
        """Add a call that begins."""
        with self.lock:
            entry = self._entries.get(peer)
            if entry is None:
                entry = self._add(peer, parse_peer(peer), self.now_ns())
            self._begin(call, entry)

    def _begin(self, call: ServedCall, entry: ConnectionEntry) -> None:
        """Count a call as the newest of a connection. Under the lock."""
        call.entry = entry
        call.activity = entry.activity.heartbeats if call.heartbeat else entry.activity.user
        call.activity.begin(self.now_ns(), streams=call.streams)
        entry.calls.add(call)
        self.open_calls += 1

    def leave(self, call: ServedCall) -> None:
        """Remove a call that has ended. Under the lock."""
        call.entry.calls.remove(call)
        self.open_calls -= 1
        now_ns = None if call.ended_by_detector else self.now_ns()
        call.activity.end(now_ns, streams=call.streams)

    def _add(self, peer: str, address: Address | None, first_ns: int) -> ConnectionEntry:
        """Return the entry of a peer that is not in the table by this name. Under the lock.

        The peer may be in the table by its address: of an IPv6 address, a scan may name the scope
        otherwise than gRPC. Its entry then gets this name.
        """
        entry = None if address is None else self._by_address.get(address)
        if entry is None:
            if len(self._entries) >= MAX_ENTRIES:
                self._drop_older_half()
            now = datetime.now(UTC)  # read first, so that `last_used_at` is not earlier
            connected_at = _wall_time(first_ns, self.now_ns(), now)
            entry = ConnectionEntry(peer, address, first_ns, connected_at)
            if address is not None:
                self._by_address[address] = entry
        else:
            self._entries.pop(entry.peer, None)
            entry.peer = peer
        self._entries[peer] = entry
        return entry

    def _drop_older_half(self) -> None:
        """Remove the entries without calls from the older half. Under the lock."""
        for entry in list(self._entries.values())[: MAX_ENTRIES // 2]:
            if not entry.calls:
                self.drop(entry)

    # Connections

    def entries(self) -> list[ConnectionEntry]:
        """Return the entries of all connections."""
        with self.lock:
            return list(self._entries.values())

    def connections(self, limits: Limits, entries: Iterable[ConnectionEntry]) -> list[Connection]:
        """Return the records of these entries for users, oldest first."""
        with self.lock:
            now_ns, now = self.now_ns(), datetime.now(UTC)
            ordered = sorted(entries, key=lambda entry: entry.activity.first_ns)
            return [entry.connection(limits, now_ns, now) for entry in ordered]

    def callers(self) -> set[Address]:
        """Return the addresses from which calls came."""
        with self.lock:
            return {
                address
                for address, entry in self._by_address.items()
                if entry.activity.user.total or entry.activity.heartbeats.total
            }

    def drop(self, entry: ConnectionEntry) -> None:
        """Remove a connection that has gone."""
        with self.lock:
            entry.gone = True
            if self._entries.get(entry.peer) is entry:
                del self._entries[entry.peer]
            if entry.address is not None and self._by_address.get(entry.address) is entry:
                del self._by_address[entry.address]

    def reconcile(self, sockets: Iterable[SocketInfo], scanned_ns: int) -> None:
        """Update the table from a scan, which may have missed connections after `scanned_ns`."""
        sockets = list(sockets)
        sockets_by_peer = Counter(info.peer for info in sockets)
        for info in sockets:
            with self.lock:
                self._update(info, is_unique=sockets_by_peer[info.peer] == 1)
        for entry in self.entries():
            with self.lock:
                is_missing = entry.address is not None and entry.address not in sockets_by_peer
                was_used_since = entry.last_ns() >= scanned_ns
                if is_missing and not entry.calls and not was_used_since:
                    self.drop(entry)

    def _update(self, info: SocketInfo, *, is_unique: bool) -> None:
        """Update the entry of one socket. Under the lock.

        If several sockets have the same peer, at different ports of the server, gRPC does not say
        on which of them a call is. `is_unique` is then False, and the entry has no `info`.
        """
        entry = self._by_address.get(info.peer)
        if entry is None:
            silent_ns = min(info.received_ago_ns, info.sent_ago_ns)
            entry = self._add(info.name, info.peer, self.now_ns() - silent_ns)
        elif is_unique and entry.info is not None and entry.info.inode != info.inode:
            # Another connection from the same port. Calls that have not ended may be on it.
            previous = entry
            self.drop(previous)
            entry = self._add(previous.peer, previous.address, self.now_ns())
            for call in list(previous.calls):
                self.leave(call)
                self._begin(call, entry)
        entry.info = info if is_unique else None


def _wall_time(time_ns: int, now_ns: int, now: datetime) -> datetime:
    """Convert a time of the clock that shows `now_ns` while the wall clock shows `now`."""
    return now - timedelta(microseconds=(now_ns - time_ns) / 1000)


def late_request_details(limit_ns: int) -> str:
    """Status details for a call whose request did not arrive."""
    return f"the request did not arrive within {limit_ns / 1e9:g} s"
