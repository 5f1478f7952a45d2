"""A binary heap of deadlines, as in asyncio and in the JDK's `ScheduledThreadPoolExecutor`.

For deadlines exact to the nanosecond, and to compare the wheels with. Starting a timeout is
O(log n). A cancelled timeout releases its task at once, but its entry stays until it is due or
until half of the entries are dead. The wheels have no such clean-up, which can take long.
"""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.timer._base import Slot, Timeout, TimerQueue

    Base = TimerQueue
else:
    Base = object

__all__ = ["HeapRules"]

STALE = 64  # dead entries that are tolerated in addition to half of the entries


class HeapRules(Base):
    """The heap as a mixin, for the pure and the compiled `TimerQueue`."""

    def __init__(self) -> None:
        super().__init__(1)
        self._entries: list[tuple[int, int, Timeout]] = []
        self._count = itertools.count()

    def schedule(self, timeout: Timeout) -> bool:
        if self._filed - self._gone >= self._capacity:  # atomic to the count
            return False
        self._filed += 1
        timeout._prev = None  # type: ignore[assignment]  # it will be in no slot
        self._push(timeout)
        if self._capacity >= 0 or not timeout.cancel():
            return True
        self._filed -= 1  # closed meanwhile, and not seen by `drain`
        self._gone -= 1
        return False

    def pop(self, now_ns: int) -> Timeout | None:
        while True:
            filed = self._filed + self._refiled
            entries = self._entries  # no other thread removes an entry
            if not entries or entries[0][0] > now_ns:
                if self._move_cursor(now_ns, filed):
                    return None
                continue
            tick, _, timeout = heappop(entries)
            if self._expire(timeout, tick):
                self._move_cursor(tick, self._filed + self._refiled)
                return timeout
            if not timeout.cancelled() and not timeout.expired():
                self._push(timeout)

    def next_wake(self) -> int:
        while True:
            entries = self._entries
            if not entries:
                return NEVER
            entry = entries[0]
            if not entry[2].cancelled() and not entry[2].expired():
                return entry[0]
            removed = heappop(entries)
            if removed is not entry:  # another thread has just added an earlier one
                self._put(removed)

    def _push(self, timeout: Timeout) -> None:
        deadline_ns = NEVER + 1
        while timeout._deadline_ns < deadline_ns:  # it may be rescheduled meanwhile
            deadline_ns = timeout._deadline_ns
            timeout._tick = max(deadline_ns, self._cursor)
            self._put((timeout._tick, next(self._count), timeout))
        if len(self._entries) > 2 * len(self) + STALE:
            self._clean_up()

    def _put(self, entry: tuple[int, int, Timeout]) -> None:
        """Add an entry to the heap, and count it afterwards.

        `TimerState.arm` and `_clean_up` read the count before and after they read the heap, to
        notice a change.
        """
        while True:
            entries = self._entries
            heappush(entries, entry)
            self._refiled += 1  # atomic to the comparison
            if entries is self._entries:
                return
            # cleaned up meanwhile, perhaps without this entry; a second entry is harmless

    def _clean_up(self) -> None:
        """Remove the dead entries, unless another thread adds an entry meanwhile."""
        entries, refiled = self._entries, self._refiled
        live = [e for e in entries.copy() if not e[2].cancelled() and not e[2].expired()]
        heapify(live)
        if entries is self._entries and refiled == self._refiled:  # atomic to the end
            self._entries = live

    def _file(self, timeout: Timeout, fresh: bool, first: bool) -> bool:
        if timeout.cancelled() or timeout.expired():
            return False
        self._push(timeout)
        return True

    def drain(self) -> list[Timeout]:
        drained = []
        for timeout in self:  # each once, also with several entries
            task = timeout._task
            if timeout.cancel():
                timeout._keep_task(task)
                drained.append(timeout)
        self._entries = []
        return sorted(drained, key=attrgetter("_deadline_ns"))

    def _slots(self) -> list[Slot]:
        return []

    def __iter__(self) -> Iterator[Timeout]:
        live = (entry[2] for entry in sorted(self._entries))
        return iter(dict.fromkeys(t for t in live if not t.cancelled() and not t.expired()))

    def check(self) -> None:
        entries = self._entries
        for index in range(1, len(entries)):
            assert entries[(index - 1) >> 1] <= entries[index], "not a heap"
        live = list(self)
        assert len(live) == len(self), f"{len(live)} timeouts have entries, {len(self)} counted"
        for timeout in live:
            assert any(entry[2] is timeout and entry[0] == timeout._tick for entry in entries), (
                "no entry at its tick"
            )
