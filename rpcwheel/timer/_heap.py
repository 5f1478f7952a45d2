"""A binary heap of deadlines, as in asyncio and in the JDK's `ScheduledThreadPoolExecutor`.

For deadlines exact to the nanosecond, and to compare the wheels with. Starting a timeout is
O(log n). A canceled timeout releases its task at once, but its entry stays in the heap until it is
due or until half of the entries are dead; then the heap is rebuilt, which takes O(n). The wheels
have no such clean-up.

Threads are as in `_base.py`: any thread may start, cancel and reschedule, and thereby rebuild the
heap; only the timer pops. No lock is taken. "No thread switch from here to ..." marks an atomic
section, see `_base.py`. An entry is dead if its timeout was canceled or has expired. The counters
are those of `TimerQueue`: `_added` counts the timeouts ever started, `_removed` those that expired
or were canceled, and `_moved` the entries ever added here.
"""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.timer._base import Timeout, TimerQueue

    Base = TimerQueue  # for type checkers only; see `HeapRules`
else:
    Base = object

STALE = 64  # dead entries that are allowed in addition to half of the entries


class HeapRules(Base):
    """The heap as a mixin, for the pure and the compiled `TimerQueue`.

    Its methods override those of `TimerQueue`, which describes when they are called.
    """

    def __init__(self) -> None:
        super().__init__(1)  # ticks of 1 ns
        self._entries: list[tuple[int, int, Timeout]] = []  # tick, sequence number, timeout
        self._count = itertools.count()  # sequence numbers: equal ticks expire in order

    def schedule(self, timeout: Timeout) -> bool:
        if self._added - self._removed >= self._capacity:  # no thread switch from here to `+= 1`
            return False
        self._added += 1
        timeout._next = None  # type: ignore[assignment]  # it will be in no list
        timeout._slot = 0
        self._push(timeout)
        if self._capacity >= 0:  # negative: the queue was closed meanwhile
            return True
        if not timeout.cancel():  # `drain` has canceled and returned it
            return True
        self._added -= 1  # `drain` has not seen it: it counts as refused
        self._removed -= 1
        return False

    def pop(self, now_ns: int) -> Timeout | None:
        while True:
            changes = self._added + self._moved
            # Only this method and `next_wake` pop, and only the timer calls them. If another thread
            # replaces the list by `_clean_up`, this pops from the old one. The entry in the new
            # list is then dead or at an old tick, which is harmless.
            entries = self._entries
            if not entries or entries[0][0] > now_ns:
                if self._move_cursor(now_ns, changes):
                    return None
                continue  # an entry was added meanwhile
            tick, _, timeout = heappop(entries)
            if self._expire(timeout, tick):
                self._move_cursor(tick, self._added + self._moved)
                return timeout
            if not timeout.cancelled() and not timeout.expired():
                self._push(timeout)  # it was rescheduled to a later time

    def next_wake(self) -> int:
        while True:
            entries = self._entries
            if not entries:
                return NEVER
            entry = entries[0]
            if not entry[2].cancelled() and not entry[2].expired():
                return entry[0]
            removed = heappop(entries)
            if removed is not entry:  # another thread has just added an earlier entry
                self._put(removed)

    def _push(self, timeout: Timeout) -> None:
        deadline_ns = NEVER + 1
        # Again if it was rescheduled to an earlier time meanwhile. A later time is seen by `pop`.
        while timeout._deadline_ns < deadline_ns:
            deadline_ns = timeout._deadline_ns
            self._put((max(deadline_ns, self._cursor), next(self._count), timeout))
        if len(self._entries) > 2 * len(self) + STALE:
            self._clean_up()

    def _put(self, entry: tuple[int, int, Timeout]) -> None:
        """Add an entry to the heap, and count it in `_moved` afterwards.

        `TimerState.arm` and `_clean_up` read `_moved` before and after they read the heap, to
        notice a change.
        """
        while True:
            entries = self._entries
            heappush(entries, entry)
            self._moved += 1  # no thread switch from here to the comparison
            if entries is self._entries:
                return
            # `_clean_up` has replaced the list, perhaps without this entry. A second entry is
            # harmless.

    def _clean_up(self) -> None:
        """Remove the dead entries, unless another thread adds an entry meanwhile."""
        entries, refiled = self._entries, self._moved
        live = [e for e in entries.copy() if not e[2].cancelled() and not e[2].expired()]
        heapify(live)
        # No thread switch from here to the end.
        if entries is self._entries and refiled == self._moved:
            self._entries = live

    def _place(self, timeout: Timeout, fresh: bool, first: bool) -> bool:
        """Add an entry at the timeout's new deadline; False if it is no longer pending.

        Called by `reschedule`. `fresh` and `first` are for the wheels.
        """
        if timeout.cancelled() or timeout.expired():
            return False
        self._push(timeout)
        return True

    def drain(self) -> list[Timeout]:
        """Cancel and return all timeouts, by deadline; they keep their tasks."""
        drained = []
        for timeout in self:  # each once, also if it has several entries
            task = timeout._task
            if timeout.cancel():
                timeout._keep_task(task)  # `cancel` has released it
                drained.append(timeout)
        self._entries = []
        return sorted(drained, key=attrgetter("_deadline_ns"))

    def _slots(self) -> list[int]:
        return []

    def __iter__(self) -> Iterator[Timeout]:
        live = (entry[2] for entry in sorted(self._entries))
        return iter(dict.fromkeys(t for t in live if not t.cancelled() and not t.expired()))

    def check(self) -> None:
        """Check the invariants while no other thread uses the queue. O(n^2), for tests.

        Raises:
            AssertionError: An invariant does not hold.
        """
        entries = self._entries
        for index in range(1, len(entries)):
            assert entries[(index - 1) >> 1] <= entries[index], "not a heap"
        live = list(self)
        assert len(live) == len(self), f"{len(live)} timeouts have entries, {len(self)} counted"
        for timeout in live:
            assert any(
                entry[2] is timeout and entry[0] <= max(timeout._deadline_ns, self._cursor)
                for entry in entries
            ), "no entry at its tick"
