# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True
"""The sparse wheel; also built as `_sparse_c`, see `_base.py` for how and for the ground rules."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

import rpcwheel.timer._base as base
from rpcwheel.durations import Duration, positive_ns

STALE = 4096  # so many ticks too many in the heap are not worth a clean-up


class SparseWheel(base.TimerQueue):
    """A slot for each tick that holds something, found by its tick, and a heap of those ticks.

    No levels, no rounds and no empty slots: wake-ups are exact, and a jump costs what is due. The
    fastest wheel in pure Python, whose dicts do the work. (Kafka turns its wheel by such a heap.)

    Args:
        tick: Seconds or a `timedelta`; timeouts fire up to that much late.
    """

    def __init__(self, tick: Duration = 0.001) -> None:
        super().__init__(positive_ns(tick, what="tick"))
        self._by_tick: dict[int, base.Slot] = {}
        self._ticks: list[int] = []  # a heap; may hold ticks whose slot is gone
        self._pushes = 0
        self._emptied = base.Slot(self._never.level, 0)  # says that there is more to forget
        self._made: deque[int] = deque()  # the slots' ticks, as `_sweep` will look at them

    def pop(self, now_ns: int) -> base.Timeout | None:
        """As `TimerQueue.pop`; files a bounded number of put-off timeouts again on the way."""
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
            if timeout is not slot and timeout is not None:  # None: forgotten meanwhile
                if self._expire(timeout, tick):
                    return timeout
                self._file(timeout, False, False)
                moves += 1
        return None

    def next_wake(self) -> int:
        """As `TimerQueue.next_wake`: exact, unless what is due first was put off."""
        slot = self._first()
        if slot is None:
            return base.NEVER
        if slot._next is slot:  # more of the same to forget: at once, but in another call
            return self._cursor * self._tick_ns
        return slot.bound * self._tick_ns

    def _first(self) -> base.Slot | None:
        """The earliest slot that holds something; forgets a bounded number of empty ones before."""
        if not len(self._by_tick) <= len(self._ticks) <= 8 * len(self._by_tick) + STALE:
            pushes = self._pushes
            ticks = sorted(self._by_tick)  # a heap too
            if pushes == self._pushes:  # straight to the end
                self._ticks = ticks
        slot = None
        for _ in range(base.MOVES):
            if not self._ticks:
                return None
            tick = self._ticks[0]
            slot = self._by_tick.get(tick)
            if slot is None:
                other = heappop(self._ticks)
                if other != tick:  # another thread has put an earlier one in front
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
        if slot._tick != tick:  # its maker, or whoever is faster: what is filed must be found
            self._pushes += 1
            ticks = self._ticks
            heappush(ticks, tick)
            if ticks is not self._ticks:  # sorted anew meanwhile, perhaps without this one:
                heappush(self._ticks, tick)  # twice does no harm
            slot._tick = tick
        return slot

    def _sweep(self) -> None:
        """Forget those of two slots that are empty, two for each slot made: that bounds memory."""
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
        if slot._next is slot:  # straight from here to the end
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
