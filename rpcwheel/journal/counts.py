"""`Counts`: how many calls a journal has, and whether another one may be stored.

`max_pending` limits the calls of all processes together. To count them in each transaction would
take too long (0.1 s for a million), and a counter in the engine would let PostgreSQL store the
calls of one process after the other. So a process may store an eighth of the free places that it
has seen, for a short time, and then counts again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from .backend import Depth, JournalBackend
    from .outage import Outage

COUNT_INTERVAL_S: Final = 2.0
"""The least time between two counts by `count_if_due`."""

COUNT_SHARE: Final = 0.01
"""Counting takes at most this share of the time: a count is used for `1 / COUNT_SHARE` times as
long as it took."""

ROOM_SHARE: Final = 8
"""The part of the free places that may be used before the next count."""


class Counts:
    """The last count of the calls of a journal, and what this process has changed since.

    Thread-safe, except for `added` and `refresh`, which one thread at a time may call.
    """

    def __init__(
        self,
        backend: JournalBackend,
        outage: Outage,
        now_ns: Callable[[], int],
        beside: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Begin without a count; `now_ns` is the clock, and `beside` the method of the journal."""
        self._backend = backend
        self._outage = outage
        self._now_ns = now_ns
        self._beside = beside
        self.depths: list[Depth] = []
        """The last count."""
        self._stored: Counter[str] = Counter()
        """How many calls of each queue are not dead: the last count, and the changes since."""
        self._due_s = 0.0
        self._was_tried = False
        self.reset()

    def reset(self) -> None:
        """Make locks, also in a forked child."""
        self._executor = SerialExecutor()
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        """The calls that were counted before one was stored, and how many were stored since."""
        self._added: Counter[str] = Counter()
        self._seen_until_s = 0.0

    def of(self, queue: str) -> int:
        """Return how many calls of a queue are stored and not dead."""
        return self._stored[queue]

    def added(self, queue: str) -> None:
        """Note that this process has stored a call."""
        self._stored[queue] += 1
        self._added[queue] += 1

    def ended(self, queue: str, count: int) -> None:
        """Note that calls were deleted, or are dead letters now."""
        self._stored[queue] = max(0, self._stored[queue] - count)

    def refresh(self, queue: str, limit: int) -> None:
        """Count what other processes have stored, unless that is known well enough for `limit`.

        An engine that has just failed is not asked, as the call would wait for it twice.
        """
        room = limit - self._seen[queue]
        is_used = self._added[queue] * ROOM_SHARE >= room > 0
        is_known = not is_used and time.monotonic() < self._seen_until_s
        if is_known or self._outage.is_failing:
            return
        if self._lock.acquire(blocking=False):  # not twice, also not in a finalizer
            try:
                began_s = time.monotonic()
                self._count()
                now_s = time.monotonic()
                self._seen = Counter(self._stored)
                self._added.clear()
                self._seen_until_s = now_s + (now_s - began_s) / COUNT_SHARE
            finally:
                self._lock.release()

    def ensure(self, *, block: bool) -> None:
        """Count the calls if that was never tried: now, or on a worker thread."""
        if not self._was_tried and not self._outage.is_over:
            if block:
                self.count()
            else:
                self.count_if_due()

    def count_if_due(self) -> None:
        """Count the calls on a worker thread if the last count is old. Never blocks."""
        now_s = self._now_ns() / 1e9
        if now_s >= self._due_s:
            self._due_s = now_s + COUNT_INTERVAL_S
            self._executor.submit(self.count)

    def count(self) -> None:
        """Count the calls now. Blocks.

        Does nothing in a signal handler or finalizer that has interrupted a request.
        """
        with suppress(JournalError), self._beside(), self._lock:
            self._count()

    def _count(self) -> None:
        began_s = self._now_ns() / 1e9
        try:
            depths = self._backend.depths()
        except JournalError as error:
            self._outage.failed(error, writes=False)
            return
        finally:
            self._was_tried = True
        self.depths = depths
        stored: Counter[str] = Counter()
        for depth in depths:
            stored[depth.queue] += depth.waiting + depth.taken
        self._stored = stored
        took_s = self._now_ns() / 1e9 - began_s
        self._due_s = began_s + max(COUNT_INTERVAL_S, took_s / COUNT_SHARE)
