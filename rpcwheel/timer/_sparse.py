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
        self._by_tick: dict[int, base.Slot] = {}
        self._ticks: list[int] = []  # a heap; may have ticks whose slot was removed
        self._pushes = 0
        self._emptied = base.Slot(self._never.level, 0)  # `_first` returns it to be called again
        self._made: deque[int] = deque()  # the slots' ticks, in the order of `_sweep`

    def pop(self, now_ns: int) -> base.Timeout | None:
        """As `TimerQueue.pop`; moves at most `MOVES` rescheduled timeouts."""
        target = now_ns // self._tick_ns
        moves = 0
        while moves < base.MOVES:
            filed = self._filed + self._refiled
            slot = self._first()
            if slot is self._emptied:
                return None
            if slot is None or slot.bound > target:
                if self._move_cursor(target, filed):
                    return None
                continue
            tick = max(slot.bound, self._cursor)
            if not self._move_cursor(tick, filed):
                continue
            timeout = slot._next
            if timeout is not slot and timeout is not None:  # None: removed meanwhile
                if self._expire(timeout, tick):
                    return timeout
                self._file(timeout, False, False)
                moves += 1
        return None

    def next_wake(self) -> int:
        """As `TimerQueue.next_wake`: exact, unless the first timeout was rescheduled."""
        slot = self._first()
        if slot is None:
            return base.NEVER
        if slot._next is slot:  # more empty slots to remove: now, but in another call
            return self._cursor * self._tick_ns
        return slot.bound * self._tick_ns

    def _first(self) -> base.Slot | None:
        """Return the earliest slot with timeouts; removes at most `MOVES` empty slots before it."""
        if not len(self._by_tick) <= len(self._ticks) <= 8 * len(self._by_tick) + STALE:
            pushes = self._pushes
            ticks = sorted(self._by_tick)  # a heap too
            if pushes == self._pushes:  # atomic to the end
                self._ticks = ticks
        slot = None
        for _ in range(base.MOVES):
            if not self._ticks:
                return None
            tick = self._ticks[0]
            slot = self._by_tick.get(tick)
            if slot is None:
                other = heappop(self._ticks)
                if other != tick:  # another thread has added an earlier one
                    heappush(self._ticks, other)
            elif slot._next is not slot:
                return slot
            else:
                self._forget(slot)
        return self._emptied

    def _slot(self, tick: int, cursor: int) -> base.Slot:
        slot = self._by_tick.get(tick)
        if slot is None:
            self._sweep()
            fresh = base.Slot(self._never.level, 0)
            fresh.bound = tick
            fresh._tick = -1  # until its tick is in the heap
            slot = self._by_tick.setdefault(tick, fresh)
            if slot is fresh:
                self._made.append(tick)
        if slot._tick != tick:  # this thread or another that uses the slot adds its tick
            self._pushes += 1
            ticks = self._ticks
            heappush(ticks, tick)
            if ticks is not self._ticks:  # sorted again meanwhile, perhaps without this tick:
                heappush(self._ticks, tick)  # a duplicate is harmless
            slot._tick = tick
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
                self._forget(slot)
                if tick in self._by_tick:
                    self._made.append(tick)

    def _forget(self, slot: base.Slot) -> None:
        if slot._next is slot:  # atomic from here to the end
            self._epoch += 1
            self._after = base.NEVER
            slot._prev = None  # type: ignore[assignment]
            slot._next = None  # type: ignore[assignment]
            self._by_tick.pop(slot.bound, None)

    def _slots(self) -> list[base.Slot]:
        return [self._never, *self._by_tick.values()]

    def _check_slot(self, slot: base.Slot, tick: int) -> None:
        if slot is not self._never:
            assert self._by_tick.get(tick) is slot, f"tick {tick} is in the wrong slot"
            assert tick in self._ticks, f"tick {tick} is not in the heap"
