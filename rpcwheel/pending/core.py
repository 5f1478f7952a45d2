"""The book of the calls that wait for their answers: who waits, since when, and who ends it.

Dubbo's `DefaultFuture` keeps two static maps and a future that knows its channel; here it is one
object without clock, lock, thread or future of its own. Each call ends once: whoever *takes* its
entry out of the book ends it, and all others find nothing. An entry has a number beside its key,
since a key may be used again while a timeout of its former use is on its way.

The book is not thread-safe. `table.py` puts a lock around it, and the twins do the rest.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import CallsClosed, CallTimeout, DuplicateKey, TooManyCalls

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rpcwheel.timer import Timeout

__all__ = ["Book", "Ending", "Entry", "PendingStats", "Stray"]

REMEMBERED: Final = 1024
"""How many calls that ended unanswered are known by key, to tell a late answer from a wrong one."""


class Ending(enum.Enum):
    """How a call ended; the value completes "the call had ..."."""

    ANSWERED = "been answered"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CANCELLED = "been cancelled"
    LOST = "lost its connection"
    CLOSED = "been closed"


UNANSWERED: Final = frozenset({Ending.TIMED_OUT, Ending.CANCELLED, Ending.LOST, Ending.CLOSED})
"""After these, an answer may still be on its way."""


@dataclass(frozen=True, slots=True)
class PendingStats:
    """A table's counts; `opened == pending + answered + failed + timed_out + cancelled`.

    `failed` includes calls whose connection was lost and those that `close()` ended. `late` are
    answers to calls that had ended without one, `unknown` all other answers that nobody waited
    for: a second one, one to a call never made, one so late that its call is forgotten.
    """

    pending: int
    opened: int
    answered: int
    failed: int
    timed_out: int
    cancelled: int
    late: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Stray:
    """An answer that nobody waits for."""

    ending: Ending | None
    """How its call had ended; None if no such call is remembered."""
    late_ns: int
    """How long ago."""


class Entry:
    """A call that waits. Whoever took it out of the book may end its future, and nobody else."""

    __slots__ = (
        "connection", "future", "key", "number", "sent_ns", "started_ns", "timeout", "timeout_ns",
    )  # fmt: skip

    def __init__(
        self,
        key: Hashable,
        number: int,
        future: Any,
        started_ns: int,
        timeout_ns: int,
    ) -> None:
        self.key = key
        self.number = number
        self.future = future
        self.started_ns = started_ns
        self.timeout_ns = timeout_ns
        self.connection: Hashable | None = None
        self.sent_ns: int | None = None
        self.timeout: Timeout | None = None

    def overdue(self, now_ns: int, name: str) -> CallTimeout:
        """The error of a call that found no answer in time.

        A request that was written only after the time was over is the client's fault (Dubbo words
        it so since #13001, but still types it as the server's).
        """
        sent_ns = self.sent_ns
        in_time = sent_ns is not None and sent_ns - self.started_ns < self.timeout_ns
        return CallTimeout(
            key=self.key,
            side="server" if in_time else "client",
            timeout=max(0.0, to_seconds(self.timeout_ns)),
            elapsed=(now_ns - self.started_ns) / 1e9,
            start=self.started_ns / 1e9,
            sent=None if sent_ns is None else sent_ns / 1e9,
            name=name,
        )


class Book:
    """Which calls wait, by key and by connection. Every method but two is O(1)."""

    def __init__(self, name: str, max_pending: int | None) -> None:
        """Begin empty.

        Args:
            name: Of the table, for messages.
            max_pending: At most so many calls wait; None for no limit.
        """
        self._name = name
        self._max_pending = NEVER if max_pending is None else max_pending
        self._closed = False
        self._entries: dict[Hashable, Entry] = {}
        self._of: dict[Hashable, dict[Hashable, Entry]] = {}  # by connection
        self._gone: dict[Hashable, tuple[Ending, int]] = {}  # the last that ended unanswered
        self._opened = self._late = self._unknown = 0
        self._ended: Counter[Ending] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, entry: Entry, connection: Hashable | None) -> None:
        """Take in a call that begins.

        Raises:
            TypeError: The key or the connection is not hashable.
            CallsClosed: After `close`.
            DuplicateKey: A call with this key waits already.
            TooManyCalls: `max_pending` calls wait already.
        """
        key = entry.key
        if self._closed:
            raise CallsClosed(f"{self._name}: closed; a new connection wants a new table")
        if key in self._entries:
            raise DuplicateKey(
                f"{self._name}: a call with the key {key!r} waits already; give each its own"
            )
        if len(self._entries) >= self._max_pending:
            raise TooManyCalls(
                f"{self._name}: {self._max_pending} calls wait for an answer already "
                "(max_pending); wait for some, or raise the limit"
            )
        if connection is not None:
            self._of.setdefault(connection, {})[key] = entry
            entry.connection = connection
        self._entries[key] = entry
        self._gone.pop(key, None)  # from now on an answer is one to the new call
        self._opened += 1

    def revoke(self, entry: Entry) -> None:
        """Take a call out again as if it had never been opened: no timer took its timeout."""
        if self._remove(entry.key, entry.number) is not None:
            self._opened -= 1

    def arm(self, entry: Entry, timeout: Timeout) -> bool:
        """Note what will end the call; False if it has ended already."""
        if self._entries.get(entry.key) is not entry:
            return False
        entry.timeout = timeout
        return True

    def sent(self, key: Hashable, now_ns: int) -> bool:
        """Note that a request has left; False if its call has ended. Only the first time counts."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.sent_ns is None:
            entry.sent_ns = now_ns
        return True

    def answer(self, key: Hashable, ending: Ending, now_ns: int) -> Entry | Stray:
        """Take out the call that an answer belongs to, or say what is known of a stray one."""
        entry = self._remove(key, None)
        if entry is not None:
            self._ended[ending] += 1
            return entry
        known = self._gone.pop(key, None)
        if known is None:
            self._unknown += 1
            return Stray(None, 0)
        self._late += 1
        return Stray(known[0], now_ns - known[1])

    def end(self, key: Hashable, number: int, ending: Ending, now_ns: int) -> Entry | None:
        """Take out the call of this key and number, unless it has ended."""
        entry = self._remove(key, number)
        if entry is not None:
            self._note(entry, ending, now_ns)
        return entry

    def lose(self, connection: Hashable, now_ns: int) -> list[Entry]:
        """Take out the calls of a connection, oldest first. O(calls of this connection)."""
        return self._end_all(self._of.get(connection, {}), Ending.LOST, now_ns)

    def close(self, now_ns: int) -> list[Entry]:
        """Take out all calls, oldest first, and take in no more. O(calls)."""
        self._closed = True
        return self._end_all(self._entries, Ending.CLOSED, now_ns)

    def stats(self) -> PendingStats:
        """The counts so far."""
        ended = self._ended
        return PendingStats(
            pending=len(self._entries),
            opened=self._opened,
            answered=ended[Ending.ANSWERED],
            failed=ended[Ending.FAILED] + ended[Ending.LOST] + ended[Ending.CLOSED],
            timed_out=ended[Ending.TIMED_OUT],
            cancelled=ended[Ending.CANCELLED],
            late=self._late,
            unknown=self._unknown,
        )

    def _remove(self, key: Hashable, number: int | None) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None or number not in {None, entry.number}:
            return None
        del self._entries[key]
        if entry.connection is not None:
            calls = self._of[entry.connection]
            del calls[key]
            if not calls:
                del self._of[entry.connection]
        return entry

    def _end_all(self, calls: dict[Hashable, Entry], ending: Ending, now_ns: int) -> list[Entry]:
        taken = (self.end(call.key, call.number, ending, now_ns) for call in list(calls.values()))
        return [entry for entry in taken if entry is not None]

    def _note(self, entry: Entry, ending: Ending, now_ns: int) -> None:
        self._ended[ending] += 1
        if ending in UNANSWERED:
            self._gone[entry.key] = (ending, now_ns)
            if len(self._gone) > REMEMBERED:
                del self._gone[next(iter(self._gone))]
