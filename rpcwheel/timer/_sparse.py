# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""The sparse wheel. Also built as `_sparse_c`; `_base.py` has the rules of threads."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count

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
        super().__init__(positive_ns(tick, subject="tick"))
        self._by_tick: dict[int, int] = {}  # the slot of a tick
        self._tick_of: list[int] = [-1]  # the tick of a slot; -1 until it is in the heap
        self._unused: list[int] = []  # slots
        self._numbers = count(1)  # of new slots
        self._ticks: list[int] = []  # a heap; may have ticks whose slot was removed
        self._pushes = 0
        self._made: deque[int] = deque()  # ticks with a slot, in the order of `_sweep`

    def pop(self, now_ns: int) -> base.Timeout | None:
        """Expire and return the next due timeout; moves at most `MOVES` rescheduled timeouts."""
        target = now_ns // self._tick_ns
        moves = 0
        while moves < base.MOVES:
            changes = self._added + self._moved
            tick = self._first()
            if tick < 0:
                return None
            if tick > target:
                if self._move_cursor(target, changes):
                    return None
                continue
            if not self._move_cursor(tick, changes):
                continue
            slot = self._by_tick.get(tick, self._never)
            timeout: base.Timeout | None = self._heads[slot]
            if timeout is not None and slot != self._never:  # not removed meanwhile
                if self._expire(timeout, tick):
                    return timeout
                self._place(timeout, False, False)
                moves += 1
        return None

    def next_wake(self) -> int:
        """Return when to call `pop`: exact, unless the first timeout was rescheduled."""
        tick = self._first()
        if tick == base.NEVER:
            return base.NEVER
        return (self._cursor if tick < 0 else tick) * self._tick_ns

    def _first(self) -> int:
        """Return the first tick with timeouts, or NEVER; removes empty slots before it.

        Removes at most `MOVES`. If there are more, the result is -1: call it again.
        """
        if not len(self._by_tick) <= len(self._ticks) <= 8 * len(self._by_tick) + STALE:
            pushes = self._pushes
            ticks = sorted(self._by_tick)  # a heap too
            if pushes == self._pushes:  # atomic to the end
                self._ticks = ticks
        for _ in range(base.MOVES):
            if not self._ticks:
                return base.NEVER
            tick = self._ticks[0]
            slot = self._by_tick.get(tick)
            if slot is None:
                other = heappop(self._ticks)
                if other != tick:  # another thread has added an earlier one
                    heappush(self._ticks, other)
            elif self._heads[slot] is not None:
                return tick
            else:
                self._forget(tick, slot)
        return -1

    def _slot(self, tick: int, cursor: int) -> int:
        epoch = self._epoch
        slot = self._by_tick.get(tick)
        if slot is None:
            self._sweep()
            epoch = self._epoch
            slot = self._new_slot(tick)
        if self._tick_of[slot] != tick:  # this thread or another that uses the slot adds its tick
            self._pushes += 1  # first: if `_first` replaces the heap from here on, it has this tick
            heappush(self._ticks, tick)
            if epoch == self._epoch:  # atomic to the next line: the slot was not removed meanwhile
                self._tick_of[slot] = tick
        return slot

    def _new_slot(self, tick: int) -> int:
        try:
            fresh = self._unused.pop()
        except IndexError:
            fresh = next(self._numbers)
            while len(self._tick_of) <= fresh:
                self._heads.append(None)
                self._tick_of.append(-1)
        self._tick_of[fresh] = -1
        slot = self._by_tick.setdefault(tick, fresh)
        if slot is fresh:
            self._made.append(tick)
        else:  # another thread was first
            self._unused.append(fresh)
        return slot

    def _sweep(self) -> None:
        """Remove empty slots, looking at two for each new slot: this bounds the memory."""
        for _ in range(2):
            try:
                tick = self._made.popleft()
            except IndexError:
                return
            slot = self._by_tick.get(tick)
            if slot is not None:
                self._forget(tick, slot)
                if tick in self._by_tick:
                    self._made.append(tick)

    def _forget(self, tick: int, slot: int) -> None:
        """Remove a slot if it is empty."""
        own = tick in self._by_tick and self._by_tick[tick] == slot  # atomic to `del`
        if own and self._heads[slot] is None:
            self._epoch += 1
            self._after = base.NEVER
            del self._by_tick[tick]
            self._unused.append(slot)

    def _check_slot(self, slot: int, tick: int) -> None:
        if slot != self._never:
            own = self._tick_of[slot]
            assert self._by_tick.get(own) == slot, f"slot {slot} of tick {own} was removed"
            assert self._cursor <= own <= tick, f"slot {own} is after {tick}"
            assert own in self._ticks, f"tick {own} is not in the heap"
