"""What is true of a queue: the core's book under its lock, and who waits for it to be empty.

Ground rules: the core's book is touched under `_lock` only; no event and no code of the user's runs
under it. The lock is reentrant because a finalizer, which can run at any allocation, may make a
call that fails. Every method but `after_failure` is one transition: of several threads that want to
move an entry, one gets True.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .core import FailbackCore, Last
from .entry import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout

    from .core import Admission, Again, FailbackStats, First, GiveUp
    from .entry import Entry, FailedCall
    from .policy import FailbackPolicy

__all__ = ["Book"]


class Book:
    """The calls of one queue and their states. Thread-safe."""

    def __init__(self, policy: FailbackPolicy) -> None:
        self._core = FailbackCore(policy)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._waiters: list[Callable[[], object]] = []
        self._closes_at_ns: int | None = None
        self._kept: list[FailedCall] = []
        self._lost: list[Entry] = []

    def after_failure(
        self,
        error: BaseException,
        now_ns: int,
        *,
        started_ns: int,
        attempts: int = 1,
        idle_ns: int = 0,
    ) -> Again | GiveUp:
        """Ask the core, which asks the user's predicates and strategies, so without the lock."""
        closes_at_ns = self._closes_at_ns
        return self._core.after_failure(
            error,
            attempts=attempts,
            elapsed_ns=now_ns - started_ns,
            idle_ns=idle_ns,
            closes_in_ns=None if closes_at_ns is None else closes_at_ns - now_ns,
        )

    # --- Calls ---

    def count(self, first: First) -> None:
        """Count a first try that was not parked."""
        with self._lock:
            self._core.count(first)

    def admit(self, entry: Entry) -> tuple[Admission, int]:
        """Take a call in if possible, and say how many are pending then."""
        with self._lock:
            return self._core.admit(entry), self._core.pending

    def refuse(self, entry: Entry) -> None:
        """Undo `admit`."""
        with self._lock:
            self._core.refuse(entry)
        self._tell_if_empty()

    def arm(self, entry: Entry, attempts: int, timeout: Timeout) -> None:
        """Keep the handle of the wake-up that follows that many tries, if it is still wanted."""
        with self._lock:
            wanted = entry.state is State.WAITING and entry.attempts == attempts
            if wanted:
                entry.timeout = timeout
        if not wanted:  # a flush was quicker
            timeout.cancel()

    def claim(self, entry: Entry, now_ns: int) -> bool:
        """Begin the entry's next try, and take its wake-up off the timer."""
        with self._lock:
            claimed = self._core.claim(entry, now_ns)
            timeout, entry.timeout = entry.timeout, None
        if timeout is not None:
            timeout.cancel()
        return claimed

    def wait_again(self, entry: Entry, error: BaseException, now_ns: int) -> bool:
        """Let the entry wait for another try."""
        with self._lock:
            return self._core.wait_again(entry, error, now_ns)

    def give_up(self, entry: Entry, error: BaseException) -> bool:
        """Try the entry no more; it stays pending until `remove`."""
        with self._lock:
            return self._core.give_up(entry, error)

    def remove(self, entry: Entry, last: Last) -> bool:
        """End the entry's story."""
        with self._lock:
            removed = self._core.remove(entry, last)
        self._tell_if_empty()
        return removed

    # --- All of them ---

    @property
    def pending(self) -> int:
        """How many calls are waiting or running."""
        return self._core.pending

    def stats(self) -> FailbackStats:
        """Count everything up to now."""
        with self._lock:
            return self._core.stats()

    def waiting(self) -> list[Entry]:
        """The entries that wait for their next try, oldest first."""
        with self._lock:
            return self._core.waiting()

    def when_empty(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, when nothing is pending: now, or later on whichever thread."""
        with self._lock:
            if self._core.pending:
                self._waiters.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], object]) -> None:
        """Take `callback` back, if it has not been called."""
        with self._lock:
            if callback in self._waiters:
                self._waiters.remove(callback)

    def _tell_if_empty(self) -> None:
        with self._lock:
            if self._core.pending:
                return
            waiters, self._waiters = self._waiters, []
        for callback in waiters:
            callback()

    # --- The end ---

    def close(self, closes_at_ns: int) -> bool:
        """Refuse failing calls from now on, and hurry those that are in."""
        with self._lock:
            first = self._core.close()
            if first:
                self._closes_at_ns = closes_at_ns
            return first

    def keep(self, failed: FailedCall) -> None:
        """Remember for `take_left` a call that was given up, if this is while closing."""
        with self._lock:
            if self._closes_at_ns is not None:
                self._kept.append(failed)

    def lose_waiting(self, refused: Entry | None = None) -> list[Entry]:
        """End the entries that wait in the timer, which was stopped; `take_left` returns them.

        Args:
            refused: An entry that waits without a timeout, because the timer refused it.
        """
        with self._lock:
            waiting = self._core.waiting()
            lost = [entry for entry in waiting if entry.timeout is not None or entry is refused]
            for entry in lost:
                self._core.remove(entry, Last.UNDELIVERED)
            self._lost += lost
        self._tell_if_empty()
        return lost

    def take_left(self) -> tuple[list[FailedCall], list[tuple[Entry, State]]]:
        """End it all: the calls kept, and the entries that were left, each as it stood.

        Those that `lose_waiting` has ended, and reported, are GONE.
        """
        with self._lock:
            kept, self._kept = self._kept, []
            lost, self._lost = self._lost, []
            left = [(entry, State.GONE) for entry in lost] + self._core.take_left()
            self._closes_at_ns = None
        for entry, _ in left:
            if entry.timeout is not None:
                entry.timeout.cancel()
        self._tell_if_empty()
        return kept, left

    def disown(self) -> None:
        """Begin anew in a forked child: what is pending belongs to the parent."""
        self._core.disown()
        self._begin()
