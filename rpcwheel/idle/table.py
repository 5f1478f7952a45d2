"""Which connections a server has: fed by its calls, and by looks at the process's own sockets.

The twins' `ConnectionTable` is a server interceptor on top of this. One entry per connection: known
by what grpc calls its peer, and, once a scan has seen its socket, by the socket's inode, so that
another connection from the same port is another entry. A call whose client has left before it was
asked where it came from (`peer()` is empty then) is no connection's.

One lock for all, held for a few assignments, and while a socket is looked at and shut: so a call
begins either before the decision, which then sees it, or finds its connection closed. It is
reentrant, as a signal handler may ask for a snapshot.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from rpcwheel._grpc.handlers import behavior_of, kind_of, with_behavior
from rpcwheel.methods import matches
from rpcwheel.timer.clock import checked_timer, clock_of

from .entry import Entry
from .peers import parse_peer
from .policy import HEALTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import grpc

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.rpc import Kind
    from rpcwheel.timer.api import Timer

    from .entry import Call, Connection, Sighting
    from .peers import Address

__all__ = ["HEARTBEAT_KEY", "Connections", "Method", "late_details"]

HEARTBEAT_KEY: Final = "rpcwheel-heartbeat"
"""The metadata of a heartbeat, whatever its method."""

MOST_METHODS: Final = 4096
"""Handlers kept. A generic handler may answer to any name, and clients may make them up."""

MOST_ENTRIES: Final = 1 << 16
"""Connections kept if nobody looks which of them are gone."""


def late_details(limit_ns: int) -> str:
    """Status details for a call whose request did not arrive."""
    return f"the request did not arrive within {limit_ns / 1e9:g} s"


class Method:
    """One method as a server serves it."""

    __slots__ = ("heartbeat", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.heartbeat = False


class Connections:
    """The connections of one server: what the twins of `ConnectionTable` have in common.

    For users there is `snapshot()`. All else is for the detector and for calls.
    """

    def __init__(self, *, timer: Timer | None = None) -> None:
        """Make an empty table.

        Args:
            timer: Whose clock it reads; the detector that is given the table brings its own.

        Raises:
            TypeError: `timer` is none.
        """
        self.now_ns: Callable[[], int] = clock_of(checked_timer(timer))
        self.lock = threading.RLock()
        self.owner: object = None
        """The detector that closes what is in here."""
        self.has_intercepted = False
        """Whether a call came to the table whose handler may not have begun: only aio tells."""
        self.uncounted = 0
        """Calls whose peer could not be told."""
        self.hidden_ns: int | None = None
        """When the last of them began."""
        self.open_calls = 0
        """Those that are known to be open, on all connections together."""
        self.total = 0
        """All that were seen."""
        self.can_end_late_requests = True
        """False once `end_late_requests` has found that this version of gRPC does not allow it."""
        self.heard_ns = time.monotonic_ns()
        """Calls that had come in by then are known, or known to be on their way. The table is made
        before its server is, so that at first none had."""
        self._entries: dict[str, Entry] = {}
        self._by_address: dict[Address, Entry] = {}
        self._heartbeats: tuple[str, ...] = (HEALTH,)
        self._methods: dict[str, Method] = {}
        self._made: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler] | None] = {}

    def snapshot(self) -> tuple[Connection, ...]:
        """The connections that are known, oldest first. Any thread; O(connections).

        A connection that has made no call is known after the detector's first look.
        """
        found = [entry.connection() for entry in self.entries()]
        return tuple(sorted(found, key=lambda connection: connection.first))

    def __repr__(self) -> str:
        kind = type(self)
        return f"<{kind.__module__}.{kind.__name__} {len(self._entries)} connections>"

    # Calls

    def around(
        self,
        handler: grpc.RpcMethodHandler,
        method: str,
        wrap: Callable[[Kind, Behavior, Method], Behavior],
        ready: Callable[[grpc.RpcMethodHandler, Method], None] | None = None,
    ) -> grpc.RpcMethodHandler:
        """The handler with what `wrap` puts around its behavior; made once for each handler.

        `ready` is told of it. For methods that have another handler at each call, as many
        interceptors make them, each is made: what they hold is not kept.
        """
        known = self._made.get(method, ())
        if known and known[0] is handler:
            return known[1]
        behavior = behavior_of(handler)
        if behavior is None:
            return handler
        one = self._method(method)
        made = with_behavior(handler, wrap(kind_of(handler), behavior, one))
        if ready is not None:
            ready(made, one)
        if len(self._made) >= MOST_METHODS:
            self._made.clear()
        self._made[method] = (handler, made) if known == () else None
        return made

    def forget_made(self) -> None:
        """Make all handlers anew from now on."""
        self._made.clear()

    def _method(self, name: str) -> Method:
        with self.lock:
            if len(self._methods) >= MOST_METHODS:
                self._methods.clear()
            method = self._methods.get(name)
            if method is None:
                method = self._methods[name] = Method(name)
                method.heartbeat = self._is_heartbeat(name)
            return method

    def set_heartbeats(self, patterns: tuple[str, ...]) -> None:
        """Say which methods are heartbeats; for calls that begin from now on."""
        with self.lock:
            self._heartbeats = patterns
            for name, method in self._methods.items():
                method.heartbeat = self._is_heartbeat(name)

    def _is_heartbeat(self, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self._heartbeats)

    def enter(self, call: Call, peer: str) -> None:
        """Note that a call begins; for `Call`."""
        with self.lock:
            entry = self._entries.get(peer)
            if entry is None:
                entry = self._new(peer, parse_peer(peer), call.began_ns)
            call.entry = entry
            call.use = entry.seen.beats if call.heartbeat else entry.seen.user
            call.use.begin(call.began_ns, streams=call.streams)
            entry.calls.add(call)
            self.open_calls += 1
            self.total += 1

    def end_late_requests(self, limit_ns: int) -> None:
        """End calls that have waited for their single request for `limit_ns`. Any thread.

        Must be called at regular intervals: the waiting time of a call counts from the first time
        that this method finds it waiting. Implemented by both subclasses.
        """
        raise NotImplementedError

    def has_hidden(self) -> None:
        """Note that a call began of which can't be told where it comes from."""
        self.uncounted += 1
        self.hidden_ns = self.now_ns()

    def has_seen_calls(self) -> bool:
        """Whether any came by; if not, it may be no interceptor of the server's."""
        return self.has_intercepted or bool(self.total or self.uncounted)

    def is_new(self, call: Call) -> bool:
        """Whether it is the first call on its connection, of which more may be asked."""
        entry = call.entry
        asked, entry.asked = entry.asked, True
        return not asked

    def _new(self, peer: str, address: Address | None, first_ns: int) -> Entry:
        entry = None if address is None else self._by_address.get(address)
        if entry is None:
            if len(self._entries) >= MOST_ENTRIES:
                self._forget_some()
            entry = Entry(peer, address, first_ns)
            if address is not None:
                self._by_address[address] = entry
        else:  # found by a scan, which has not quite grpc's words for it
            self._entries.pop(entry.peer, None)
            entry.peer = peer
        self._entries[peer] = entry
        return entry

    def _forget_some(self) -> None:
        for entry in list(self._entries.values())[: MOST_ENTRIES // 2]:
            if not entry.calls:
                self.drop(entry)

    # Sockets

    def entries(self) -> list[Entry]:
        """Those of now."""
        with self.lock:
            return list(self._entries.values())

    def addresses(self) -> set[Address]:
        """Where calls have come from."""
        with self.lock:
            return {
                address
                for address, entry in self._by_address.items()
                if entry.seen.user.total or entry.seen.beats.total
            }

    def find(self, address: Address) -> Entry | None:
        """The connection from there."""
        return self._by_address.get(address)

    def drop(self, entry: Entry) -> None:
        """Take one out that is gone."""
        with self.lock:
            entry.gone = True
            if self._entries.get(entry.peer) is entry:
                del self._entries[entry.peer]
            if entry.address is not None and self._by_address.get(entry.address) is entry:
                del self._by_address[entry.address]

    def reconcile(self, sightings: Iterable[Sighting], began_ns: int) -> list[Entry]:
        """Take in what a scan has found: all sockets of the server's that were open.

        Args:
            sightings: The sockets.
            began_ns: When the scan began: what is younger it may have missed.

        Returns:
            Entries that have open calls although no socket of theirs was found.
        """
        sightings = list(sightings)
        several = Counter(one.peer for one in sightings)
        now_ns = self.now_ns()
        for one in sightings:
            with self.lock:
                entry = self._sighted(one, now_ns)
                entry.ambiguous = several[one.peer] > 1
                entry.sighted_ns = began_ns
        lost = []
        for entry in self.entries():
            with self.lock:
                if entry.address is None or entry.address in several:
                    continue
                if entry.mark is not None:
                    entry.mark.next_ns = now_ns  # who marked it tells its end
                elif entry.calls:
                    lost.append(entry)
                elif entry.last_ns() < began_ns:
                    self.drop(entry)
        return lost

    def _sighted(self, one: Sighting, now_ns: int) -> Entry:
        entry = self._by_address.get(one.peer)
        if entry is None:
            silent_s = min(one.info.received_ago_s, one.info.sent_ago_s) if one.info else 0.0
            entry = self._new(one.text, one.peer, now_ns - int(silent_s * 1e9))
        elif entry.inode not in (None, one.inode) and not entry.ambiguous:
            entry = self._replaced(entry, now_ns)
        if entry.inode is None or not entry.ambiguous:
            entry.inode, entry.local_port = one.inode, one.local[1]
        entry.info = one.info
        return entry

    def _replaced(self, old: Entry, now_ns: int) -> Entry:
        """Another connection from the same port: it begins anew, with the calls that may be its."""
        self.drop(old)
        entry = self._new(old.peer, old.address, now_ns)
        entry.seen.plain = old.seen.plain
        for call in [call for call in old.calls if call.began_ns >= old.sighted_ns]:
            call.ended()
            call.entry = entry
            call.use = entry.seen.beats if call.heartbeat else entry.seen.user
            call.use.begin(now_ns, streams=call.streams)
            entry.calls.add(call)
            self.open_calls += 1
        return entry
