"""A binary heap of deadlines, as in asyncio and in the JDK's `ScheduledThreadPoolExecutor`.

For deadlines exact to the nanosecond, and to compare the wheels with. Starting a timeout is
O(log n). The entries of the heap are numbered; a pending timeout has the number of its last entry
in `_slot`. An entry is dead if its timeout was canceled or has expired, or if its number is lower:
the timeout was rescheduled to an earlier time and has a newer entry. A canceled timeout releases
its task at once, but its dead entry stays in the heap for a while.

**Clean-up.** If there are more than `2 * pending + EXTRA` entries, each call that adds one also
looks at `STEPS` others, at the end of a second heap, `_old`. It moves the live ones to the first
heap, `_entries`, and drops the dead ones. If `_old` is empty, the heaps change places first. `pop`
and `next_wake` use the heap with the earlier entry. So no call takes longer because many timeouts
were canceled, and the number of entries is at most 2.2 times the largest number of timeouts that
were pending at one time, plus 100. It falls while timeouts are added or become due: canceling alone
removes no entry.

**Threads** are as in `_base.py`: any thread may start, cancel and reschedule timeouts, and thereby
clean up; only the timer pops. No lock is taken. "Atomic" marks an atomic section, see `_base.py`.
Here it may end with a call of `heappush` or `heappop`, which are written in C, run no Python code
and create no object: CPython switches threads only after such a call. So an entry is moved from one
heap to the other in one atomic section, and any number of threads, finalizers and signal handlers
can clean up at the same time.

The counters are those of `TimerQueue`: `_added` counts the timeouts ever started, `_removed` those
that expired or were canceled, and `_moved` the entries ever added here.
"""

from __future__ import annotations

import itertools
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.timer._base import Timeout, TimerQueue

    Base = TimerQueue  # for type checkers only; see `HeapMixin`
    Entry: TypeAlias = tuple[int, int, Timeout]  # tick, sequence number, timeout
else:
    Base = object

EXTRA = 64  # dead entries that are allowed in addition to half of the entries
STEPS = 16  # the most entries that one call looks at; removing one of a million takes some 20 us


class HeapMixin(Base):
    """A binary heap of deadlines, exact to the nanosecond.

    A mixin for the pure and the compiled `TimerQueue`. Its methods override those of `TimerQueue`,
    which describes when they are called.
    """

    def __init__(self) -> None:
        super().__init__(1)  # ticks of 1 ns
        self._entries: list[Entry] = []  # a heap, to which entries are added
        self._old: list[Entry] = []  # a heap, which the clean-up empties
        self._numbers = itertools.count()  # equal ticks expire in the order of their numbers

    def schedule(self, timeout: Timeout) -> bool:
        if self._added - self._removed >= self._capacity:  # atomic from here to `+= 1`
            return False
        self._added += 1
        timeout._next = None  # type: ignore[assignment]  # it will be in no list
        timeout._slot = 0
        self._add(timeout)
        if self._capacity >= 0:  # negative: the queue was closed meanwhile
            return True
        if not timeout.cancel():  # `drain` has canceled and returned it
            return True
        self._added -= 1  # `drain` has not seen it: it counts as refused
        self._removed -= 1
        return False

    def _place(self, timeout: Timeout, fresh: bool, first: bool) -> bool:
        """Add an entry at the timeout's new deadline; False if it is no longer pending.

        Called by `reschedule`. `fresh` and `first` are for the wheels.
        """
        if timeout._slot < 0:
            return False
        self._add(timeout)
        return True

    def pop(self, now_ns: int) -> Timeout | None:
        """Expire and return the next due timeout; looks at most at `STEPS` entries."""
        for _ in range(STEPS):
            changes = self._added + self._moved
            entries, old = self._entries, self._old  # atomic from here to `heappop`
            if old and (not entries or old[0] < entries[0]):
                entries = old
            if not entries or entries[0][0] > now_ns:
                if self._move_cursor(now_ns, changes):
                    return None
                continue  # an entry was added meanwhile
            tick, number, timeout = heappop(entries)
            if self._expire(timeout, tick):
                self._move_cursor(tick, self._added + self._moved)
                return timeout
            if 0 <= timeout._slot <= number:  # it was rescheduled to a later time
                self._add(timeout)
        return None

    def next_wake(self) -> int:
        """Return when to call `pop`; removes at most `STEPS` dead entries."""
        for _ in range(STEPS):
            entries, old = self._entries, self._old  # atomic from here to `heappop`
            if old and (not entries or old[0] < entries[0]):
                entries = old
            if not entries:
                return NEVER
            entry = entries[0]
            if 0 <= entry[2]._slot <= entry[1]:
                return entry[0]
            heappop(entries)
            del entry  # not in the atomic section: a finalizer may run
        return self._cursor  # more entries to remove: now, but in another call

    def _add(self, timeout: Timeout) -> None:
        """Add an entry at the timeout's deadline. Its entries with lower numbers are then dead."""
        deadline_ns = timeout._deadline_ns
        number = next(self._numbers)
        entry = (max(deadline_ns, self._cursor), number, timeout)
        heappush(self._entries, entry)  # atomic: no call between the read of `_entries` and this
        # Afterwards, since `TimerState.arm` reads the count before and after it reads the heap.
        self._moved += 1  # atomic from here to the write of `_slot`
        # If another thread has set an earlier deadline meanwhile, its entry is the live one.
        if timeout._slot >= 0 and timeout._deadline_ns >= deadline_ns:
            timeout._slot = number
        if len(self._entries) + len(self._old) > 2 * (self._added - self._removed) + EXTRA:
            self._clean_up()

    def _clean_up(self) -> None:
        """Look at `STEPS` entries of the old heap: move the live ones, drop the dead ones."""
        empty: list[Entry] = []
        if not self._old:  # atomic from here to the second assignment
            self._old = self._entries
            self._entries = empty
        old = self._old
        for _ in range(STEPS):
            if not old:  # atomic from here to `heappush`
                return
            entry = old[-1]
            del old[-1]  # the others are still a heap
            if 0 <= entry[2]._slot <= entry[1]:
                heappush(self._entries, entry)
            del entry  # not in the atomic section: a finalizer may run

    def drain(self) -> list[Timeout]:
        """Cancel and return all timeouts, by deadline; they keep their tasks."""
        drained = []
        for timeout in self:  # each once, also if it has several entries
            task = timeout._task
            if timeout.cancel():
                timeout._keep_task(task)  # `cancel` has released it
                drained.append(timeout)
        self._entries = []
        self._old = []
        return sorted(drained, key=attrgetter("_deadline_ns"))

    def _slots(self) -> list[int]:
        return []

    def __iter__(self) -> Iterator[Timeout]:
        # Also by dead entries: the live one may be added after this copy was made.
        timeouts = dict.fromkeys(entry[2] for entry in sorted([*self._old, *self._entries]))
        return iter([timeout for timeout in timeouts if timeout._slot >= 0])

    def check(self) -> None:
        """Check the invariants while no other thread uses the queue. O(n log n), for tests.

        Raises:
            AssertionError: An invariant does not hold.
        """
        for heap in (self._entries, self._old):
            for index in range(1, len(heap)):
                assert heap[(index - 1) >> 1] <= heap[index], "not a heap"
        entries = sorted([*self._old, *self._entries], reverse=True)
        first = {entry[2]: entry[0] for entry in entries if 0 <= entry[2]._slot <= entry[1]}
        assert len(first) == len(self), f"{len(first)} timeouts have entries, {len(self)} counted"
        for timeout, tick in first.items():
            late = tick > max(timeout._deadline_ns, self._cursor)
            assert not late, f"{timeout!r} is late, at {tick}"
