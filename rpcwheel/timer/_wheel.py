# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""The two wheels. Also built as `_wheel_c`; `_base.py` has the rules of threads.

Sources: Varghese & Lauck 1987 (scheme 6, hashed; scheme 7, hierarchical); Netty's and Dubbo's
`HashedWheelTimer` (one ring, rounds); Kafka's `TimingWheel` (levels on demand); tokio's
`time::wheel` (64 slots and a bitmap a level, the level by exclusive or).
"""

from __future__ import annotations

import rpcwheel.timer._base as base
import rpcwheel.timer._native as native
from rpcwheel.durations import Duration, positive_ns
from rpcwheel.errors import ConfigurationError

LEVELS = 11  # of 6 bits each: a tick has 63
SLOTS = 64  # of a level


class HierarchicalWheel(base.TimerQueue):
    """Levels of 64 slots. A slot is as wide as the whole level below; any delay fits.

    The level of a timeout is the highest digit (in base 64) in which its tick differs from the
    cursor. So all timeouts of a level are due before those of higher levels, and no level wraps
    around.

    Args:
        tick: Seconds or a `timedelta`. Timeouts fire up to one tick late.
    """

    def __init__(self, tick: Duration = 0.001) -> None:
        super().__init__(positive_ns(tick, subject="tick"), SLOTS * LEVELS)
        self._moving = -1  # a slot whose timeouts are to be moved down a level first
        self._start = 0  # second result of `_find`

    def pop(self, now_ns: int) -> base.Timeout | None:
        """Expire and return the next due timeout; moves at most `MOVES` timeouts down a level."""
        target = now_ns // self._tick_ns
        moves = 0
        while moves < base.MOVES:
            changes = self._added + self._moved
            slot = self._find()
            start = self._start
            if slot < 0 or start > target:
                if self._move_cursor(target, changes):
                    return None
                continue
            if not self._move_cursor(start, changes):
                continue
            timeout: base.Timeout | None = self._heads[slot]
            if slot >= SLOTS:
                self._moving = slot
                if timeout is not None:
                    self._place(timeout._prev, False, True)
                    moves += 1
                continue
            if timeout is not None:
                if self._expire(timeout, start):
                    return timeout
                self._place(timeout, False, False)
                moves += 1
        return None

    def next_wake(self) -> int:
        """Return when to call `pop`: exact, unless the first timeout was cancelled or moved."""
        slot = self._find()
        if slot < 0:
            return base.NEVER
        if slot == self._moving:
            return self._cursor * self._tick_ns
        return max(self._bounds[slot], self._start) * self._tick_ns

    def _find(self) -> int:
        """Return the next slot with timeouts, and set `_start` to its first tick; -1 for none."""
        slot = self._moving
        if slot >= 0:
            if self._heads[slot] is not None:
                self._start = self._cursor
                return slot
            self._moving = -1
        for level in range(LEVELS):
            while self._occupied[level]:
                bits = self._occupied[level]
                index = native.lowest_bit(bits)
                slot = SLOTS * level + index
                if self._heads[slot] is None:  # atomic: its timeouts were cancelled or moved
                    self._occupied[level] &= ~(base.ONE << index)
                    continue
                shift = 6 * level
                start = (self._cursor >> shift >> 6) << shift << 6
                self._start = max(start + (index << shift), self._cursor)
                return slot
        return -1

    def _slot(self, tick: int, cursor: int) -> int:
        level = 0
        differs = (tick ^ cursor) >> 6
        while differs:
            differs >>= 6
            level += 1
        return SLOTS * level + ((tick >> 6 * level) & 63)

    def _check_slot(self, slot: int, tick: int) -> None:
        if slot not in {self._never, self._moving}:
            assert self._bounds[slot] <= tick, f"bound {self._bounds[slot]} is after {tick}"
            assert self._occupied[slot >> 6] >> (slot & 63) & 1, "a slot in use has no bit"
            assert slot <= self._slot(tick, self._cursor), f"tick {tick} is in the wrong slot"
            assert slot == self._slot(max(self._bounds[slot], self._cursor), self._cursor), "bound"


class HashedWheel(base.TimerQueue):
    """One ring of slots, as in Netty and Dubbo. Timeouts of later rounds stay in their slots.

    Unlike theirs, it visits only slots with a due timeout, as each slot knows its earliest tick.

    Args:
        tick: Seconds or a `timedelta`, the width of a slot. Timeouts fire up to one tick late.
        slots: The number of slots, rounded up to a power of two.
    """

    def __init__(self, tick: Duration = 0.1, slots: int = 512) -> None:
        count = _power_of_two(slots)
        super().__init__(positive_ns(tick, subject="tick"), count)
        self._mask = count - 1
        self._now = self._never + 1  # the slot of timeouts that were due when they were added
        self._visiting = -1  # the slot of the cursor, while it is visited
        self._mark = base.Timeout()  # in its list, behind the timeouts that were visited

    def pop(self, now_ns: int) -> base.Timeout | None:
        """Expire and return the next due timeout; looks at most at `MOVES` of later rounds."""
        target = now_ns // self._tick_ns
        moves = 0
        while moves < base.MOVES:
            changes = self._added + self._moved
            timeout = self._next_of_visit()
            if timeout is None:
                timeout = self._heads[self._now]
            if timeout is None:
                tick = self._earliest()
                if tick > target:
                    if self._move_cursor(target, changes):
                        return None
                elif self._move_cursor(tick, changes):
                    self._visit(tick & self._mask)
                continue
            if self._cursor > target:
                return None
            if self._expire(timeout, self._cursor):
                return timeout
            self._pass_by(timeout)
            moves += 1
        return None

    def next_wake(self) -> int:
        """Return when to call `pop`: exact, unless the first timeout was cancelled or moved."""
        if self._heads[self._now] is not None or self._next_of_visit() is not None:
            return self._cursor * self._tick_ns
        tick = self._earliest()
        return base.NEVER if tick == base.NEVER else tick * self._tick_ns

    def _next_of_visit(self) -> base.Timeout | None:
        """Return the next timeout of the slot that is visited; ends the visit after the last."""
        if self._visiting < 0:
            return None
        timeout: base.Timeout = self._mark._next  # atomic from here to the call
        if timeout is not self._heads[self._visiting]:
            return timeout
        self._end_visit()
        return None

    def drain(self) -> list[base.Timeout]:
        """Cancel and return all timeouts, by deadline; ends a visit of a slot first."""
        if self._visiting >= 0:
            self._end_visit()
        return base.TimerQueue.drain(self)

    def _earliest(self) -> int:
        """Return a lower bound of the next due tick; exact if it is in this round."""
        cursor = self._cursor
        first = cursor & self._mask
        best = base.NEVER
        words = (self._mask >> 6) + 1
        for step in range(words + 1):  # the first word twice: its high bits, at last its low bits
            word = ((first >> 6) + step) % words
            bits = self._occupied[word]
            if step == 0:
                bits = bits >> (first & 63) << (first & 63)
            while bits:
                index = native.lowest_bit(bits)
                bits &= bits - 1
                slot = 64 * word + index
                if self._heads[slot] is None:  # atomic: its timeouts were cancelled or moved
                    self._occupied[word] &= ~(base.ONE << index)
                    continue
                tick = cursor + ((slot - first) & self._mask)
                if self._bounds[slot] <= tick:
                    return tick
                best = min(best, self._bounds[slot])
        return best

    def _visit(self, slot: int) -> None:
        """Begin to visit a slot; `_pass_by` computes its bound anew."""
        mark = self._mark
        first = self._heads[slot]
        if first is None:  # cancelled meanwhile; atomic from the line before to the end
            return
        self._visiting = slot
        self._bounds[slot] = base.NEVER
        self._after = base.NEVER
        last = first._prev
        mark._prev = last
        mark._next = first
        last._next = mark
        first._prev = mark
        self._heads[slot] = mark

    def _end_visit(self) -> None:
        mark = self._mark
        slot = self._visiting
        before = mark._prev  # atomic from here to the end
        after = mark._next
        if self._heads[slot] is mark:
            self._heads[slot] = None if after is mark else after
        before._next = after
        after._prev = before
        mark._prev = None
        mark._next = None
        self._visiting = -1

    def _pass_by(self, timeout: base.Timeout) -> None:
        """Leave a timeout that is due in a later round in its slot: move the mark behind it."""
        mark = self._mark
        slot = self._visiting
        tick = self._due(timeout._deadline_ns)
        if timeout._slot != slot or tick & self._mask != slot:  # it was rescheduled
            self._place(timeout, False, False)
            return
        if mark._next is not timeout:  # removed meanwhile; atomic from here to the end
            return
        if self._heads[slot] is mark:
            self._heads[slot] = timeout
        after = timeout._next
        if after is not mark:
            before = mark._prev
            before._next = timeout
            timeout._prev = before
            timeout._next = mark
            mark._prev = timeout
            mark._next = after
            after._prev = mark
        if tick < self._bounds[slot]:
            self._bounds[slot] = tick

    def _slot(self, tick: int, cursor: int) -> int:
        return self._now if tick <= cursor else tick & self._mask

    def _check_slot(self, slot: int, tick: int) -> None:
        if slot not in {self._never, self._now, self._visiting}:
            bound = self._bounds[slot]
            assert self._cursor <= bound <= tick, f"bound {bound} is after {tick}"
            assert self._occupied[slot >> 6] >> (slot & 63) & 1, "a slot in use has no bit"
            assert slot == bound & self._mask, f"tick {bound} is in the wrong slot"


def _power_of_two(slots: int) -> int:
    if isinstance(slots, bool) or not isinstance(slots, int):
        raise TypeError(f"slots must be a whole number, not {slots!r}")
    if not 1 <= slots <= 1 << 20:
        raise ConfigurationError(f"slots must be from 1 to {1 << 20}, not {slots!r}")
    return 1 << (slots - 1).bit_length()
