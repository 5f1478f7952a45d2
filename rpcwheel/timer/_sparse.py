# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True
"""The sparse wheel. Also built as `_sparse_c`; `_base.py` has the rules of threads."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

import rpcwheel.timer._base as base
from rpcwheel.durations import Duration, positive_ns

STALE = 4096  # unused ticks that are tolerated in the heap


class SparseWheel(base.TimerQueue):
    """A dict with a slot for each tick that has timeouts, and a heap of those ticks.

    It has no levels and no rounds, and empty slots are removed: wake-ups are exact, and after a
    long wait only due timeouts cost time. The fastest wheel in pure Python. (Kafka advances its
    wheel by such a heap.)

    Args:
        tick: Seconds or a `timedelta`. Timeouts fire up to one tick late.
    """

    def __init__(self, tick: Duration = 0.001) -> None:
        super().__init__(positive_ns(tick, what="tick"))
        self._ticks: list[int] = []  # a heap; may have ticks whose slot was removed
        self._pushes = 0
        self._unlisted: set[int] = set()  # ticks with a slot that are not yet in the heap
        self._made: deque[int] = deque()  # the slots, in the order of `_sweep`

    def pop(self, now_ns: int) -> base.Timeout | None:
        """As `TimerQueue.pop`; moves at most `MOVES` rescheduled timeouts."""
        target = now_ns // self._tick_ns
        moves = 0
        while moves < base.MOVES:
            changes = self._added + self._moved
            slot = self._first()
            if slot < 0:
                return None
            if slot > target:
                if self._move_cursor(target, changes):
                    return None
                continue
            if not self._move_cursor(slot, changes):
                continue
            timeout = self._head(slot)
            if timeout is not None:
                if self._expire(timeout, slot):
                    return timeout
                self._place(timeout, False, False)
                moves += 1
        return None

    def next_wake(self) -> int:
        """As `TimerQueue.next_wake`: exact, unless the first timeout was rescheduled."""
        slot = self._first()
        if slot == base.NEVER:
            return base.NEVER
        return (self._cursor if slot < 0 else slot) * self._tick_ns

    def _first(self) -> int:
        """Return the first slot with timeouts, or NEVER; removes empty slots before it.

        Removes at most `MOVES`. If there are more, the result is -1: call it again.
        """
        if not len(self._heads) <= len(self._ticks) + 1 <= 8 * len(self._heads) + STALE:
            pushes = self._pushes
            ticks = sorted(self._heads)  # a heap too
            ticks.pop()  # the slot of infinite delays
            if pushes == self._pushes:  # atomic to the end
                self._ticks = ticks
        for _ in range(base.MOVES):
            if not self._ticks:
                return base.NEVER
            tick = self._ticks[0]
            if self._head(tick) is not None:
                return tick
            if tick in self._heads:
                self._forget(tick)
            else:
                other = heappop(self._ticks)
                if other != tick:  # another thread has added an earlier one
                    heappush(self._ticks, other)
        return -1

    def _slot(self, tick: int, cursor: int) -> int:
        if tick not in self._heads:
            self._sweep()
            self._unlisted.add(tick)
            self._heads.setdefault(tick, None)
            self._made.append(tick)
        if tick in self._unlisted:  # this thread or another that uses the slot adds its tick
            self._pushes += 1
            ticks = self._ticks
            heappush(ticks, tick)
            if ticks is not self._ticks:  # sorted again meanwhile, perhaps without this tick:
                heappush(self._ticks, tick)  # a duplicate is harmless
            self._unlisted.discard(tick)
        return tick

    def _sweep(self) -> None:
        """Remove empty slots, looking at two for each new slot: this bounds the memory."""
        for _ in range(2):
            try:
                tick = self._made.popleft()
            except IndexError:
                return
            if tick in self._heads:
                self._forget(tick)
                if tick in self._heads:
                    self._made.append(tick)

    def _forget(self, tick: int) -> None:
        """Remove a slot if it is empty."""
        if tick in self._heads and self._heads[tick] is None:  # atomic to the end
            self._epoch += 1
            self._after = base.NEVER
            del self._heads[tick]

    def _check_slot(self, slot: int, tick: int) -> None:
        if slot != self._never:
            assert self._cursor <= slot <= tick, f"slot {slot} is after {tick}"
            assert slot in self._ticks, f"tick {slot} is not in the heap"
