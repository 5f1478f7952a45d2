"""What the twins of `PendingCalls` have in common: the book under a lock, and the timeouts.

The lock is held for dictionary work only: no future ends under it, no timer is called. It is
reentrant, because a finalizer that cancels a call may run at any moment. A timeout's task knows
the key, the number and, weakly, the table: neither a value nor a future waits for a timer to let
it go (Dubbo #4040, #4129), and a table that is dropped can go too.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import CallsClosed, ConfigurationError
from rpcwheel.events import LateResponse, UnmatchedResponse, emit
from rpcwheel.rpc import DEADLINE
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from .core import Book, Ending, Entry, Stray

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .core import PendingStats

__all__ = ["PendingTable", "V"]

F = TypeVar("F")
if TYPE_CHECKING:  # typing's has no `default` before Python 3.13
    V = TypeVar("V", default=Any)
else:
    V = TypeVar("V")


class PendingTable(Generic[F, V]):
    """The calls that wait for an answer, by key. Thread-safe; a context manager that closes."""

    def __init__(
        self, timer: Timer | None = None, *, name: str = "calls", max_pending: int | None = None
    ) -> None:
        """Make an empty table.

        Args:
            timer: Any rpcwheel timer; None takes `shared_timer()` when the first call is opened.
                Close the table before you stop the timer: a stopped timer ends no call.
            name: For events, logs and errors.
            max_pending: At most so many calls wait; None for no limit.

        Raises:
            TypeError: An argument is of the wrong type.
            ConfigurationError: `max_pending` is below 1.
        """
        _check(name, max_pending)
        self.name = name
        self._book = Book(name, max_pending)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._me = weakref.ref(self)

    # What a twin is

    def _future(self, key: Hashable, number: int) -> F:
        """Make the future of a call."""
        raise NotImplementedError

    def _end(self, future: F, value: object, error: BaseException | None, *, here: bool) -> None:
        """End a future that nobody else will end, with `error`, or with `value` if that is None.

        Args:
            future: Its entry was just taken out.
            value: What it gives.
            error: What it raises.
            here: Whether this thread may run callbacks of the user's.
        """
        raise NotImplementedError

    # The caller's side

    def open(
        self, key: Hashable, *, timeout: Duration | None, connection: Hashable | None = None
    ) -> F:
        """Begin to wait for the answer to a call; then send the request.

        If the time is over already (a `timeout` of zero or less, or `current_deadline()` has
        passed), the future has ended when this returns: look at `done()` before you send.

        Args:
            key: What the answer will be known by, such as a request id; anything hashable. Do not
                use one again soon: a late answer would be taken for the new call's.
            timeout: Seconds, or a `timedelta`; None for no limit of its own. The earlier of this
                and `current_deadline()` holds.
            connection: What `lost` will be told; anything hashable, such as the transport.

        Returns:
            The future. Its `cancel()` takes the call and its timeout out at once.

        Raises:
            TypeError: `timeout` is no time; `key` or `connection` is not hashable.
            ConfigurationError: `timeout` is NaN.
            DuplicateKey: A call with this key is pending; it goes on.
            TooManyCalls: `max_pending` calls are pending.
            CallsClosed: After `close()`.
            TooManyTimeouts, TimerStopped: The timer did not take the timeout.

        Whatever is raised, nothing was begun and nothing counted. O(1).
        """
        timeout_ns = _limit_ns(timeout)
        number = next(self._numbers)
        future = self._future(key, number)
        entry = Entry(key, number, future, self._now_ns(), timeout_ns)
        with self._lock:
            self._book.open(entry, connection)
        if timeout_ns <= 0:
            self._expired(key, number)
        elif timeout_ns != NEVER:
            self._arm(entry)
        return future

    def withdraw(self, key: Hashable, number: int) -> bool:
        """Take out a call that is being cancelled; for `CallFuture.cancel`, which you call.

        Returns:
            Whether it was pending: if so, the future is the caller's to end.
        """
        with self._lock:
            entry = self._book.end(key, number, Ending.CANCELLED, self._now_ns())
        return entry is not None and _disarm(entry)

    # The transport's side

    def sent(self, key: Hashable) -> bool:
        """Note that the request of a call has been written; from now on the server is waited for.

        Returns:
            False if the call is not pending any more. Only the first time counts.
        """
        with self._lock:
            return self._book.sent(key, self._now_ns())

    def received(self, key: Hashable, value: V) -> bool:
        """End a call with the value that it gives.

        Returns:
            Whether it was pending. If not, the answer is late or unknown; that is counted, told as
            an event (`LateResponse`, `UnmatchedResponse`), and changes nothing.

        Any thread.
        """
        return self._answer(key, Ending.ANSWERED, value, None)

    def failed(self, key: Hashable, error: BaseException) -> bool:
        """End a call with an error: one the peer answered, or one met while sending.

        Args:
            key: The call's.
            error: What the future raises.

        Returns:
            As `received`.

        Raises:
            TypeError: `error` is no exception.
        """
        return self._answer(key, Ending.FAILED, None, _checked(error))

    def lost(self, connection: Hashable, error: BaseException) -> int:
        """End every call of a connection at once, not at its timeout (Dubbo #2185).

        Args:
            connection: As given to `open`.
            error: What the futures raise: this very object, all of them.

        Returns:
            How many calls that were; 0 for a connection without any. Calls may be opened on it
            again, or still, by a thread that does not know yet: what ends those is that sending
            them fails.

        Raises:
            TypeError: `error` is no exception, or `connection` is None.

        O(calls of this connection). Any thread; callbacks run elsewhere.
        """
        if connection is None:
            raise TypeError("connection must be one that calls were opened with, not None")
        _checked(error)
        with self._lock:
            entries = self._book.lose(connection, self._now_ns())
        self._end_all(entries, error)
        return len(entries)

    # The end, and what is there to see

    def close(self, error: BaseException | None = None) -> list[Hashable]:
        """Fail what is pending, and take no more calls. Idempotent; waits for nothing.

        Args:
            error: What the futures raise; None is a `CallsClosed` for each.

        Returns:
            The keys of the calls that were pending, oldest first; empty the second time.

        Raises:
            TypeError: `error` is no exception.
        """
        if error is not None:
            _checked(error)
        with self._lock:
            entries = self._book.close(self._now_ns())
        self._end_all(entries, error)
        return [entry.key for entry in entries]

    @property
    def pending(self) -> int:
        """How many calls wait for an answer."""
        return len(self._book)

    def stats(self) -> PendingStats:
        """Count what has become of every call so far."""
        with self._lock:
            return self._book.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = type(self)
        return f"<{kind.__module__}.{kind.__name__} {self.name!r} {self.pending} pending>"

    def __del__(self) -> None:
        """End what nobody else can end any more, and leave no timeout behind."""
        book: Book | None = getattr(self, "_book", None)
        if not book or sys.is_finalizing():
            return
        said = f"{self!r} was dropped with calls pending; call close()"
        self._end_all(book.close(self._now_ns()), None)  # no lock: nobody else is here
        warnings.warn(said, ResourceWarning, source=self, stacklevel=1)

    # Inside

    def _arm(self, entry: Entry) -> None:
        """Have the timer end the call; not under the lock, so it may have ended meanwhile."""
        timer = shared_timer() if self._timer is None else self._timer
        task = _Expiry(self._me, entry.key, entry.number)
        try:
            timeout = timer.new_timeout(task, to_seconds(entry.timeout_ns))
        except BaseException:
            with self._lock:
                self._book.revoke(entry)
            raise
        with self._lock:
            armed = self._book.arm(entry, timeout)
        if not armed:
            timeout.cancel()

    def _expired(self, key: Hashable, number: int) -> None:
        """End a call whose time is over. On the timer's thread, or by `open`: no user's code."""
        now_ns = self._now_ns()
        with self._lock:
            entry = self._book.end(key, number, Ending.TIMED_OUT, now_ns)
        if entry is not None:
            self._end(entry.future, None, entry.overdue(now_ns, self.name), here=False)

    def _answer(
        self, key: Hashable, ending: Ending, value: object, error: BaseException | None
    ) -> bool:
        with self._lock:
            found = self._book.answer(key, ending, self._now_ns())
        if isinstance(found, Stray):
            self._tell(key, found)
            return False
        _disarm(found)
        self._end(found.future, value, error, here=True)
        return True

    def _end_all(self, entries: list[Entry], error: BaseException | None) -> None:
        for entry in entries:
            _disarm(entry)
            reason = self._closed() if error is None else error
            self._end(entry.future, None, reason, here=False)

    def _closed(self) -> CallsClosed:
        return CallsClosed(f"{self.name}: closed while the call waited for its answer")

    def _tell(self, key: Hashable, stray: Stray) -> None:
        if stray.ending is None:
            emit(UnmatchedResponse(self.name, _label(key)))
        else:
            emit(LateResponse(self.name, _label(key), stray.ending.value, stray.late_ns / 1e9))


PendingTable.open.__qualname__ = "PendingCalls.open"  # Python's own errors name what users know


class _Expiry:
    """The timer's task: which call to end, and nothing of what the call holds."""

    __slots__ = ("_key", "_number", "_table")

    def __init__(
        self, table: weakref.ref[PendingTable[Any, Any]], key: Hashable, number: int
    ) -> None:
        self._table = table
        self._key = key
        self._number = number

    def run(self, _: Timeout) -> None:
        """End the call."""
        table = self._table()
        if table is not None:
            table._expired(self._key, self._number)  # noqa: SLF001

    def refused(self, timeout: Timeout, _: BaseException) -> None:
        """End the call although the timer's executor is full (Dubbo #15671 leaked it)."""
        self.run(timeout)


def _disarm(entry: Entry) -> bool:
    if entry.timeout is not None:
        entry.timeout.cancel()
    return True


def _limit_ns(timeout: Duration | None) -> int:
    """How long a call may take that begins now."""
    limit_ns = NEVER if timeout is None else to_ns(timeout, what="timeout")
    deadline_ns = DEADLINE.get()
    if deadline_ns is None or deadline_ns == NEVER:
        return limit_ns
    return min(limit_ns, deadline_ns - time.monotonic_ns())


def _checked(error: BaseException) -> BaseException:
    if not isinstance(error, BaseException):
        raise TypeError(f"error must be an exception, not {error!r}")
    return error


def _check(name: object, max_pending: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {name!r}")
    if max_pending is None:
        return
    if isinstance(max_pending, bool) or not isinstance(max_pending, int):
        raise TypeError(f"max_pending must be a whole number, or None; not {max_pending!r}")
    if max_pending < 1:
        raise ConfigurationError(
            f"max_pending must be 1 or more, or None for no limit; not {max_pending!r}"
        )


def _label(key: Hashable) -> str:
    """The key for people, whatever its `__repr__` does."""
    try:
        return repr(key)[:80]
    except Exception:  # noqa: BLE001 - the user's code; a late answer must still be told
        return f"a {type(key).__name__}"
