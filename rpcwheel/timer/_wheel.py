# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True
"""The two wheels. Also built as `_wheel_c`; `_base.py` has the rules of threads.

Sources: Varghese & Lauck 1987 (scheme 6, hashed; scheme 7, hierarchical); Netty's and Dubbo's
`HashedWheelTimer` (one ring, rounds); Kafka's `TimingWheel` (levels on demand); tokio's
`time::wheel` (64 slots and a bitmap a level, the level by exclusive or).
"""

from __future__ import annotations

import rpcwheel.timer._base as base
from rpcwheel.durations import Duration, positive_ns
from rpcwheel.errors import ConfigurationError


class HierarchicalWheel(base.TimerQueue):
    """Levels of 64 slots. A slot is as wide as the whole level below; any delay fits.

    The level of a timeout is the highest digit (in base 64) in which its tick differs from the
    cursor. So all timeouts of a level are due before those of higher levels, and no level wraps
    around. Levels are created when needed, 6 KB each.

    Args:
        tick: Seconds or a `timedelta`. Timeouts fire up to one tick late.
    """

    def __init__(self, tick: Duration = 0.001) -> None:
        super().__init__(positive_ns(tick, what="tick"))
        self._levels = [base.Level(0, 64, True)]
        self._moving: base.Slot | None = None  # its timeouts are to be moved down a level first
        self._start = 0  # second result of `_find`

    def pop(self, now_ns: int) -> base.Timeout | None:
        """As `TimerQueue.pop`; moves at most `MOVES` timeouts down a level."""
        target = now_ns // self._tick_ns
        moves = 0
        while moves < base.MOVES:
            filed = self._filed + self._refiled
            slot = self._find()
            start = self._start
            if slot is None or start > target:
                if self._move_cursor(target, filed):
                    return None
                continue
            if not self._move_cursor(start, filed):
                continue
            if slot.level.shift:
                self._moving = slot
                timeout = slot._prev
                if timeout is not slot:
                    self._file(timeout, False, True)
                    moves += 1
                continue
            timeout = slot._next
            if timeout is not slot:
                if self._expire(timeout, start):
                    return timeout
                self._file(timeout, False, False)
                moves += 1
        return None

    def next_wake(self) -> int:
        """As `TimerQueue.next_wake`: exact, unless the first timeout was cancelled or moved."""
        slot = self._find()
        if slot is None:
            return base.NEVER
        if slot is self._moving:
            return self._cursor * self._tick_ns
        return max(slot.bound, self._start) * self._tick_ns

    def _find(self) -> base.Slot | None:
        """Return the next slot with timeouts, and set `_start` to its first tick."""
        slot = self._moving
        if slot is not None:
            if slot._next is not slot:
                self._start = self._cursor
                return slot
            self._moving = None
        for level in self._levels:
            while level.occupied:
                index = _lowest(level.occupied)
                slot = level.slots[index]
                if slot._next is slot:  # atomic: its timeouts were cancelled or moved
                    level.occupied &= ~slot.bit
                    continue
                above = level.shift + 6
                start = (self._cursor >> above) << above if above < base.BITS else 0
                self._start = max(start + (index << level.shift), self._cursor)
                return slot
        return None

    def _slot(self, tick: int, cursor: int) -> base.Slot:
        differs = (tick ^ cursor) >> 6
        depth = 0
        while differs:
            differs >>= 6
            depth += 1
        while depth >= len(self._levels):
            self._grow(depth)
        level = self._levels[depth]
        return level.slots[(tick >> level.shift) & 63]

    def _grow(self, depth: int) -> None:
        levels = self._levels
        more = [base.Level(6 * index, 64, True) for index in range(len(levels), depth + 1)]
        taller = levels + more
        if self._levels is levels:  # atomic; else another thread has added levels
            self._levels = taller

    def _slots(self) -> list[base.Slot]:
        slots = [self._never]
        for level in self._levels:
            slots += level.slots
        return slots

    def _check_slot(self, slot: base.Slot, tick: int) -> None:
        if slot is not self._never and slot is not self._moving:
            assert slot is self._slot(tick, self._cursor), f"tick {tick} is in the wrong slot"


class HashedWheel(base.TimerQueue):
    """One ring of slots, as in Netty and Dubbo. Timeouts of later rounds stay in their slots.

    Unlike theirs, it visits only slots with a due timeout, as each slot knows its earliest tick.

    Args:
        tick: Seconds or a `timedelta`, the width of a slot. Timeouts fire up to one tick late.
        slots: The number of slots, rounded up to a power of two.
    """

    def __init__(self, tick: Duration = 0.1, slots: int = 512) -> None:
        count = _power_of_two(slots)
        super().__init__(positive_ns(tick, what="tick"))
        level = base.Level(0, count, False)
        self._ring = level.slots
        self._mask = len(level.slots) - 1
        self._visiting: base.Slot | None = None  # the slot of the cursor, while it is visited
        self._later = base.Slot(level, 0)  # its timeouts that are due in a later round, in order

    def pop(self, now_ns: int) -> base.Timeout | None:
        """As `TimerQueue.pop`; moves at most `MOVES` timeouts of later rounds to `_later`."""
        target = now_ns // self._tick_ns
        moves = 0
        while moves < base.MOVES:
            slot = self._visiting
            if slot is None:
                filed = self._filed + self._refiled
                tick = self._earliest()
                if tick > target:
                    if self._move_cursor(target, filed):
                        return None
                elif self._move_cursor(tick, filed):
                    self._visiting = self._ring[self._cursor & self._mask]
                continue
            if self._cursor > target:
                return None
            timeout = slot._next
            if timeout is slot:
                self._leave(slot)
            elif timeout._tick > self._cursor:
                self._set_aside(slot)
                moves += 1
            elif self._expire(timeout, self._cursor):
                return timeout
            else:
                self._file(timeout, False, False)
                moves += 1
        return None

    def next_wake(self) -> int:
        """As `TimerQueue.next_wake`: exact, unless the first timeout was cancelled or moved."""
        slot = self._visiting
        if slot is not None:
            if slot._next is not slot:
                return self._cursor * self._tick_ns
            self._leave(slot)
        tick = self._earliest()
        return base.NEVER if tick == base.NEVER else tick * self._tick_ns

    def _earliest(self) -> int:
        """Return a lower bound of the next due tick; exact if it is in this round."""
        cursor = self._cursor
        best = base.NEVER
        for offset in range(self._mask + 1):
            slot = self._ring[(cursor + offset) & self._mask]
            if slot._next is not slot:
                if slot.bound <= cursor + offset:
                    return cursor + offset
                if slot.bound < best:
                    best = slot.bound
        return best

    def _set_aside(self, slot: base.Slot) -> None:
        """Move the slot's first timeout to `_later`, if it is due in a later round."""
        timeout = slot._next
        if timeout is slot or timeout._tick <= self._cursor:  # atomic from here to the end
            return
        after = timeout._next
        slot._next = after
        after._prev = slot
        later = self._later
        last = later._prev
        if timeout._tick < later.bound or last is later:
            later.bound = timeout._tick
        timeout._prev = last
        timeout._next = later
        last._next = timeout
        later._prev = timeout

    def _leave(self, slot: base.Slot) -> None:
        """End the visit of an empty slot, and put the timeouts in `_later` back into it."""
        later = self._later
        if slot._next is not slot:  # atomic to the end; true if a timeout was added meanwhile
            return
        self._visiting = None
        self._after = base.NEVER
        first = later._next
        if first is not later:
            last = later._prev
            slot._next = first
            first._prev = slot
            slot._prev = last
            last._next = slot
            slot.bound = later.bound
            later._next = later
            later._prev = later

    def _slot(self, tick: int, cursor: int) -> base.Slot:
        return self._ring[tick & self._mask]

    def _slots(self) -> list[base.Slot]:
        return [self._never, self._later, *self._ring]

    def _check_slot(self, slot: base.Slot, tick: int) -> None:
        if slot is not self._never and slot is not self._later:
            assert slot is self._slot(tick, 0), f"tick {tick} is in the wrong slot"


def _power_of_two(slots: int) -> int:
    if isinstance(slots, bool) or not isinstance(slots, int):
        raise TypeError(f"slots must be a whole number, not {slots!r}")
    if not 1 <= slots <= 1 << 20:
        raise ConfigurationError(f"slots must be from 1 to {1 << 20}, not {slots!r}")
    return 1 << (slots - 1).bit_length()


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
