"""The table of pending calls: the part that threads and coroutines share.

Each call ends once: the thread that takes its entry out of the table ends its future. Other threads
find no entry. A key may be used again, so entries are compared by identity.

The lock is held for work on dictionaries only, never while a future ends or a timer is called. It
is reentrant because a finalizer may cancel a call at any time. A timeout refers to the table and to
the entry weakly: neither a value nor a future is kept alive by a timer (Dubbo #4040, #4129), and a
table that was dropped is freed.
"""

from __future__ import annotations

import enum
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from rpcwheel._concurrency.closing import Closing
from rpcwheel.call.deadline import left_ns
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import (
    CallsClosed,
    CallTimeout,
    ConfigurationError,
    DuplicateKey,
    TooManyCalls,
    safe_repr,
)
from rpcwheel.events import LateResponse, UnmatchedResponse, emit
from rpcwheel.timer import shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

F = TypeVar("F")
if TYPE_CHECKING:  # typing's has no `default` before Python 3.13
    V = TypeVar("V", default=Any)
else:
    V = TypeVar("V")

REMEMBERED_CALLS: Final = 1024
"""How many keys of calls without a response are remembered, to recognize late responses."""


class Ending(enum.Enum):
    """How a call ended; the value completes "the call had ..."."""

    ANSWERED = "been answered"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CANCELLED = "been cancelled"
    LOST = "lost its connection"
    CLOSED = "been closed"


WITHOUT_RESPONSE: Final = frozenset(Ending) - {Ending.ANSWERED, Ending.FAILED}
"""After these a response may still arrive."""


@dataclass(frozen=True, slots=True)
class PendingStats:
    """Counts of calls; `opened == pending + answered + failed + timed_out + cancelled`.

    `failed` includes calls whose connection was lost, and those that `close()` ended. `late` counts
    responses to calls that had ended without one. `unknown` counts all other responses without a
    pending call: a second response, one to a call that was never opened, or a very late one.
    """

    pending: int
    opened: int
    answered: int
    failed: int
    timed_out: int
    cancelled: int
    late: int
    unknown: int


@dataclass(slots=True, weakref_slot=True, eq=False)
class PendingEntry:
    """A pending call."""

    key: Hashable
    future: Any
    connection: Hashable | None
    started_ns: int
    timeout_ns: int
    sent_ns: int | None = None
    timeout: Timeout | None = None

    def cancel_timeout(self) -> None:
        """Cancel it, if there is one."""
        if self.timeout is not None:
            self.timeout.cancel()

    def timeout_error(self, now_ns: int, name: str) -> CallTimeout:
        """The error of a call without a response in time.

        If the request was sent only after the timeout, the client was slow (Dubbo #13001).
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


class PendingTable(Closing, ABC, Generic[F, V]):
    """The pending calls, by key. Thread-safe. A context manager that closes the table."""

    def __init__(
        self, timer: Timer | None = None, *, name: str = "calls", max_pending: int | None = None
    ) -> None:
        """Create an empty table.

        Args:
            timer: A timer of rpcwheel; None: `shared_timer()`. Close the table before you stop the
                timer: on a stopped timer no call times out.
            name: For events, logs and errors.
            max_pending: The largest number of pending calls; None: no limit.

        Raises:
            TypeError: An argument is of the wrong type.
            ConfigurationError: `max_pending` is below 1.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {name!r}")
        _check_max_pending(max_pending)
        self.name = name
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._max_pending = NEVER if max_pending is None else max_pending
        self._lock = threading.RLock()
        self._closed = False
        self._entries: dict[Hashable, PendingEntry] = {}
        self._by_connection: dict[Hashable, dict[Hashable, PendingEntry]] = {}
        self._without_response: dict[Hashable, tuple[Ending, int]] = {}  # ending and time, by key
        self._opened = self._late = self._unknown = 0
        self._ended: Counter[Ending] = Counter()

    # In the adapters

    @abstractmethod
    def _new_future(self, key: Hashable) -> F:
        """Create the future of a call."""

    @abstractmethod
    def _end(
        self, future: F, value: object, error: BaseException | None, *, may_run_callbacks: bool
    ) -> None:
        """End the future of an entry that was just taken out of the table.

        It ends with `error`, or with `value` if that is None. `may_run_callbacks`: this thread may
        run callbacks of the user.
        """

    # For callers

    def open(
        self, key: Hashable, *, timeout: Duration | None, connection: Hashable | None = None
    ) -> F:
        """Add a call; send its request after that.

        If the timeout has passed already (it is zero or less, or `current_deadline()` has passed),
        the future is done when this returns. Check `done()` before you send.

        Args:
            key: Identifies the response, such as a request id; hashable. Do not use a key again
                soon: a late response would be taken for that of the new call.
            timeout: Seconds or a `timedelta`; None: no limit. If `current_deadline()` is earlier,
                it applies.
            connection: The argument of `lost`, such as the socket; hashable.

        Returns:
            The future. Its `cancel()` removes the call and its timeout at once.

        Raises:
            TypeError: `timeout` is not a duration; `key` or `connection` is not hashable.
            ConfigurationError: `timeout` is NaN.
            DuplicateKey: A call with this key is pending, and stays so.
            TooManyCalls: `max_pending` calls are pending.
            CallsClosed: After `close()`.
            TooManyTimeouts, TimerStopped: The timer did not take the timeout.

        After an error nothing has changed, and no count either. O(1).
        """
        timeout_ns = _effective_timeout_ns(timeout)
        future = self._new_future(key)
        entry = PendingEntry(key, future, connection, self._now_ns(), timeout_ns)
        with self._lock:
            self._add(entry)
        if timeout_ns <= 0:
            self.expire(entry)
        elif timeout_ns != NEVER:
            self._start_timeout(entry)
        return future

    def withdraw(self, key: Hashable, future: F) -> bool:
        """Remove a call that is canceled. For `CallFuture.cancel`; call that instead.

        Returns:
            Whether it was pending: if so, the caller ends the future.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.future is not future:
                return False
            self._take(entry, Ending.CANCELLED)
        entry.cancel_timeout()
        return True

    # For the transport

    def sent(self, key: Hashable) -> bool:
        """Note that the request of a call was written. A timeout from now on is the server's.

        Returns:
            Whether the call is pending. Only the first time counts.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.sent_ns is None:
                entry.sent_ns = self._now_ns()
            return entry is not None

    def received(self, key: Hashable, value: V) -> bool:
        """End a call with its response. Any thread.

        Returns:
            Whether it was pending. If not, nothing changes: the response is counted as late or
            unknown and reported as an event (`LateResponse`, `UnmatchedResponse`).
        """
        return self._answer(key, Ending.ANSWERED, value, None)

    def failed(self, key: Hashable, error: BaseException) -> bool:
        """End a call with an error: one in the response, or one while sending.

        Args:
            key: Of the call.
            error: What the future raises.

        Returns:
            As `received`.

        Raises:
            TypeError: `error` is not an exception.
        """
        _check_error(error)
        return self._answer(key, Ending.FAILED, None, error)

    def lost(self, connection: Hashable, error: BaseException) -> int:
        """End all calls of a connection at once, before their timeouts (Dubbo #2185).

        Args:
            connection: As given to `open`.
            error: What the futures raise; the same object for all.

        Returns:
            The number of calls. A thread that does not know yet may still open calls on this
            connection; end those with `failed` when sending fails.

        Raises:
            TypeError: `error` is not an exception, or `connection` is None.

        O(calls of this connection). Any thread; callbacks run on another one.
        """
        if connection is None:
            raise TypeError("connection must be one that calls were opened with, not None")
        _check_error(error)
        with self._lock:
            entries = self._take_all(self._by_connection.get(connection, {}), Ending.LOST)
        self._end_all(entries, error)
        return len(entries)

    # End and state

    def close(self, error: BaseException | None = None) -> list[Hashable]:
        """End all pending calls, and accept no more. Idempotent; does not block.

        Args:
            error: What the futures raise; None: a `CallsClosed` for each.

        Returns:
            The keys of the calls that were pending, oldest first; empty the second time.

        Raises:
            TypeError: `error` is not an exception.
        """
        if error is not None:
            _check_error(error)
        with self._lock:
            self._closed = True
            entries = self._take_all(self._entries, Ending.CLOSED)
        self._end_all(entries, error)
        return [entry.key for entry in entries]

    @property
    def pending(self) -> int:
        """How many calls are pending."""
        return len(self._entries)

    def stats(self) -> PendingStats:
        """Count the calls so far, by how they ended."""
        with self._lock:
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

    @safe_repr
    def __repr__(self) -> str:
        kind = type(self)
        return f"<{kind.__module__}.{kind.__name__} {self.name!r} {self.pending} pending>"

    def __del__(self) -> None:
        """Warn if calls are pending, and end them."""
        if not getattr(self, "_entries", None) or sys.is_finalizing():
            return
        message = f"{self!r} was dropped with calls pending; call close()"
        self.close()
        warnings.warn(message, ResourceWarning, source=self, stacklevel=1)

    # Entries; under the lock

    def _add(self, entry: PendingEntry) -> None:
        key, connection = entry.key, entry.connection
        if self._closed:
            raise CallsClosed(f"{self.name}: closed; create another one for a new connection")
        if key in self._entries:
            raise DuplicateKey(
                f"{self.name}: a call with the key {key!r} is pending; use a key for each call"
            )
        if len(self._entries) >= self._max_pending:
            raise TooManyCalls(
                f"{self.name}: {self._max_pending} calls are pending (max_pending); wait until "
                "some have ended, or increase the limit"
            )
        if connection is not None:
            self._by_connection.setdefault(connection, {})[key] = entry
        self._entries[key] = entry
        self._opened += 1

    def _take(self, entry: PendingEntry, ending: Ending | None) -> bool:
        """Remove an entry; False if it was removed before.

        `ending` None: `open` has failed, so the call does not count.
        """
        key, connection = entry.key, entry.connection
        if self._entries.get(key) is not entry:
            return False
        del self._entries[key]
        if connection is not None:
            entries = self._by_connection[connection]
            del entries[key]
            if not entries:
                del self._by_connection[connection]
        if ending is None:
            self._opened -= 1
            return True
        self._ended[ending] += 1
        self._without_response.pop(key, None)  # that of an earlier call
        if ending in WITHOUT_RESPONSE:
            self._without_response[key] = ending, self._now_ns()
            if len(self._without_response) > REMEMBERED_CALLS:
                del self._without_response[next(iter(self._without_response))]
        return True

    def _take_all(
        self, entries: dict[Hashable, PendingEntry], ending: Ending
    ) -> list[PendingEntry]:
        return [entry for entry in list(entries.values()) if self._take(entry, ending)]

    # Timeouts and ends; without the lock

    def _start_timeout(self, entry: PendingEntry) -> None:
        timer = shared_timer() if self._timer is None else self._timer
        task = _Expiry(weakref.ref(self), weakref.ref(entry))
        try:
            timeout = timer.new_timeout(task, to_seconds(entry.timeout_ns))
        except BaseException:
            with self._lock:
                self._take(entry, None)
            raise
        with self._lock:
            entry.timeout = timeout
            pending = self._entries.get(entry.key) is entry
        if not pending:
            timeout.cancel()

    def expire(self, entry: PendingEntry) -> None:
        """End a call whose timeout has passed.

        May be called on the timer's thread, so no code of the user may run here.
        """
        now_ns = self._now_ns()
        with self._lock:
            taken = self._take(entry, Ending.TIMED_OUT)
        if taken:
            timed_out = entry.timeout_error(now_ns, self.name)
            self._end(entry.future, None, timed_out, may_run_callbacks=False)

    def _answer(
        self, key: Hashable, ending: Ending, value: object, error: BaseException | None
    ) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            ended = None if entry is not None else self._without_response.pop(key, None)
            if entry is not None:
                self._take(entry, ending)
            elif ended is not None:
                self._late += 1
            else:
                self._unknown += 1
        if entry is not None:
            entry.cancel_timeout()
            self._end(entry.future, value, error, may_run_callbacks=True)
        elif ended is None:
            emit(UnmatchedResponse(self.name, _key_text(key)))
        else:
            how, ended_ns = ended
            late_s = (self._now_ns() - ended_ns) / 1e9
            emit(LateResponse(self.name, _key_text(key), how.value, late_s))
        return entry is not None

    def _end_all(self, entries: list[PendingEntry], error: BaseException | None) -> None:
        for entry in entries:
            entry.cancel_timeout()
            reason = error
            if reason is None:
                reason = CallsClosed(f"{self.name}: closed while the call was pending")
            self._end(entry.future, None, reason, may_run_callbacks=False)


# Python's TypeError for wrong arguments then names the public class.
PendingTable.open.__qualname__ = "PendingCalls.open"


class _Expiry:
    """The timer's task, which keeps neither the table nor the call alive."""

    __slots__ = ("_entry", "_table")

    def __init__(
        self, table: weakref.ref[PendingTable[Any, Any]], entry: weakref.ref[PendingEntry]
    ) -> None:
        self._table = table
        self._entry = entry

    def run(self, _: Timeout) -> None:
        """End the call."""
        table, entry = self._table(), self._entry()
        if table is not None and entry is not None:
            table.expire(entry)

    def refused(self, timeout: Timeout, _: BaseException) -> None:
        """End the call although the timer's executor is full (leaked in Dubbo #15671)."""
        self.run(timeout)


def _effective_timeout_ns(timeout: Duration | None) -> int:
    """The timeout of a call that begins now: the earlier of this one and the deadline."""
    timeout_ns = NEVER if timeout is None else to_ns(timeout, subject="timeout")
    until_ns = left_ns()  # until the deadline
    return timeout_ns if until_ns is None else min(timeout_ns, until_ns)


def _check_error(error: object) -> None:
    if not isinstance(error, BaseException):
        raise TypeError(f"error must be an exception, not {error!r}")


def _check_max_pending(max_pending: object) -> None:
    if max_pending is None:
        return
    if isinstance(max_pending, bool) or not isinstance(max_pending, int):
        raise TypeError(f"max_pending must be a whole number or None, not {max_pending!r}")
    if max_pending < 1:
        raise ConfigurationError(
            f"max_pending must be 1 or more, or None for no limit; not {max_pending!r}"
        )


def _key_text(key: Hashable) -> str:
    try:
        return repr(key)[:80]
    except Exception:  # noqa: BLE001 - user code; the event must still be emitted
        return f"a {type(key).__name__}"
