# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""Timeouts, the slots they wait in, and what every queue does alike.

One source, two forms. As it stands this is the pure form; built under a second name, with its types
in `_base_c.pxd`, it is the compiled one; `_wheel.py`, `_sparse.py` and `_front.py` are built the
same way. They reach each other through module names (`base.Slot`), which the `.pxd` files point to
the compiled neighbour.

**Ground rules.** No queue takes a lock. The driver alone calls `pop`, `advance`, `next_wake` and
`drain`, one at a time; any thread, any finalizer and any signal handler may call `schedule`,
`cancel` and `reschedule` at any moment, in the middle of one another too. What makes that safe is
that each change of the structure is a *straight line*: loads, compares and stores, without a call
and without a loop. CPython hands over to another thread, a finalizer or a signal handler only at a
call, at the end of a loop's round or at the start of a function, and no reference is released for
the last time in such a line. So nobody ever sees half a change. What was computed before a straight
line (a slot, from the cursor) is checked in it (`_epoch`), and computed again if it went stale. In
the compiled form whole methods run that way. A lock would cost more than all the rest, and would
deadlock with a finalizer that cancels. (All this leans on the GIL.) `_walk.py` has the invariants.

**Never early**, said once, here: `due_tick = ceil(deadline / tick)`, counted from the clock's zero,
and due when `due_tick <= floor(now / tick)`. So `deadline <= due_tick * tick <= now`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import rpcwheel.timer._collector as collector
from rpcwheel.durations import Duration, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.timer._walk import audit, drain, walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from weakref import ReferenceType

PENDING = 0
EXPIRED = 1
CANCELLED = 2
NEVER = (1 << 63) - 1
MAX_NS = 1 << 62
BITS = 63  # of a tick
LONG_S = 1e9  # seconds, 31 years: below it, a float delay needs no further check
LONG_NS = 10**18
MOVES = 256  # timeouts that one `pop` moves to another slot at most: some tens of microseconds


class Timeout:
    """The handle of one task that waits. Its methods are O(1) and safe from anywhere."""

    __slots__ = ("_deadline_ns", "_hub", "_next", "_prev", "_state", "_task", "_tick")

    _deadline_ns: int
    _hub: Hub
    _next: Timeout
    _prev: Timeout
    _state: int
    _task: object
    _tick: int

    def __cinit__(self) -> None:  # compiled only
        collector.untrack(self)  # a million would cost each collection 100 ms and more
        self._state = CANCELLED  # until a timer makes it pending

    def __reduce__(self) -> str:
        """Refuse: a copy would be a second handle on one place in a slot."""
        raise TypeError("a Timeout can't be copied or pickled")

    def cancel(self) -> bool:
        """Cancel and let go of the task; True if and only if this call prevented it from starting.

        A timeout that `stop()` returned is cancelled already: this drops its task, and is False.
        """
        if self._state:  # not pending; straight from here to the call at the end
            if self._state == CANCELLED:
                self._let_go()
            return False
        self._state = CANCELLED
        self._hub.queue._gone += 1
        before = self._prev
        if before is not None:
            after = self._next
            before._next = after
            after._prev = before
            self._prev = None  # type: ignore[assignment]
            self._next = None  # type: ignore[assignment]
        task = self._task  # noqa: F841 - a finalizer runs at the end, and finds the task gone
        self._task = None
        return True

    def _let_go(self) -> object:
        """Hand out the task, to be dropped: a finalizer must find it gone (C stores drop first)."""
        task = self._task
        self._task = None
        return task

    def _keep_task(self, task: object) -> None:
        """Leave the queue with the task, which may refer to it: show it to the cycle collector."""
        self._task = task
        if collector.COMPILED:
            collector.track(self)

    def reschedule(self, delay: Duration) -> bool:
        """Let it expire `delay` from now instead; False if it has expired or was cancelled.

        Later is one write (its old slot files it again when due: tokio's lazy reset), earlier a
        move. Takes and raises what `new_timeout` does for delays; then nothing has changed.
        """
        if self._state:
            return False
        hub = self._hub
        deadline_ns = hub.deadline(delay)
        if not hub.queue.reschedule(self, deadline_ns):
            return False
        if deadline_ns < hub.armed_ns:
            hub.wake(deadline_ns)
        return True

    def cancelled(self) -> bool:
        """Whether it was cancelled, by `cancel()` or by the timer's `stop()`."""
        return self._state == CANCELLED

    def expired(self) -> bool:
        """Whether its time has come: the task runs, ran, or was handed to an executor."""
        return self._state == EXPIRED

    @property
    def timer(self) -> object:
        """The timer that made it; None once that timer was dropped."""
        hub: Hub | None = self._hub
        return None if hub is None else hub.owner()

    @property
    def task(self) -> object:
        """The task; None after it ran or was cancelled. What `stop()` returns keeps its task."""
        return self._task

    @property
    def deadline(self) -> float:
        """When it is due, in seconds on the timer's clock, `time.monotonic()`; may be infinite."""
        return float("inf") if self._deadline_ns == NEVER else self._deadline_ns / 1e9

    def __repr__(self) -> str:
        state = ("pending", "expired", "cancelled")[self._state]
        return f"<Timeout {state} deadline={self.deadline:.6f} task={self._task!r}>"


class Slot(Timeout):
    """The anchor of a circular list of timeouts: those due at one tick, or in a range of ticks."""

    __slots__ = ("bit", "bound", "level")

    def __init__(self, level: Level, bit: int) -> None:
        if collector.COMPILED:
            collector.track(self)
        self._prev = self
        self._next = self
        self.level = level
        self.bit = bit  # in `level.occupied`; 0: the level keeps no bitmap
        self.bound = NEVER


class Level:
    """Slots of one width, and a bitmap of those in use (an empty one may keep its bit a while)."""

    __slots__ = ("occupied", "shift", "slots")

    def __init__(self, shift: int, count: int, mapped: bool) -> None:
        self.shift = shift
        self.occupied = 0
        self.slots = [Slot(self, 1 << index if mapped else 0) for index in range(count)]


class TimerQueue:
    """The contract of a queue, and what all share. It reads no clock, locks nothing, runs no task.

    Times come in as integer nanoseconds. A subclass says in which slot a tick belongs (`_slot`),
    which slots there are (`_slots`), and what comes next (`pop`, `next_wake`).
    """

    def __init__(self, tick_ns: int) -> None:
        self._tick_ns = tick_ns
        self._cursor = 0  # every tick before it is done
        self._epoch = 0  # changes whenever a slot that was computed before may be the wrong one
        self._filed = 0  # timeouts taken in, ever
        self._refiled = 0  # moves from slot to slot, ever
        self._gone = 0  # timeouts that expired or were cancelled, ever
        self._capacity = NEVER  # how many may be pending; -1: closed
        self._limit = NEVER  # at that value of `_filed`, look closer at the capacity
        self._never = Slot(Level(0, 0, False), 0)
        self._recent = self._never  # the slot that was filed into last, for the tick
        self._recent_tick = 0  # of the deadlines
        self._after = NEVER  # after this one
        self._until = 0  # and up to this one
        self._attached = False

    def attach(self) -> None:
        """Give it to one timer, for good; ConfigurationError if it has one already."""
        if self._attached or self._tick_ns < 1:
            name = type(self).__name__
            raise ConfigurationError(f"this {name} belongs to a timer already; make one for each")
        self._attached = True

    def limit(self, capacity: int) -> None:
        """Let so many be pending at most; -1 refuses everything from now on."""
        self._capacity = capacity
        self._limit = -1

    def schedule(self, timeout: Timeout) -> bool:
        """Take a pending timeout in; False if the queue is full or closed. O(1)."""
        return self._file(timeout, True, False)

    def cancel(self, timeout: Timeout) -> bool:
        """Let go of it, cancelled; False if it isn't pending. O(1)."""
        return timeout.cancel()

    def reschedule(self, timeout: Timeout, deadline_ns: int) -> bool:
        """Give it another deadline: a write if later, or a move; False if not pending. O(1)."""
        if timeout._state != PENDING:  # straight to the write
            return False
        timeout._deadline_ns = deadline_ns
        tick = timeout._tick
        if tick == self._cursor or (tick != NEVER and deadline_ns > (tick - 1) * self._tick_ns):
            return True
        return self._file(timeout, False, False)

    def advance(self, now_ns: int, limit: int = NEVER) -> list[Timeout]:
        """Take out at most `limit` due timeouts, expired, in order."""
        due: list[Timeout] = []
        while len(due) < limit:
            timeout = self.pop(now_ns)
            if timeout is not None:
                due.append(timeout)
            elif self.next_wake() > now_ns:
                break
        return due

    def pop(self, now_ns: int) -> Timeout | None:
        """Take out the next due timeout, expired; if None, `next_wake()` says when to ask again."""
        raise NotImplementedError

    def next_wake(self) -> int:
        """When to call `pop`, which may be in the past; `NEVER` if nothing will be due."""
        raise NotImplementedError

    def drain(self) -> list[Timeout]:
        """Take everything out, cancelled but with its task, by deadline."""
        return drain(self)

    def __len__(self) -> int:
        return self._filed - self._gone

    def __iter__(self) -> Iterator[Timeout]:
        return iter(walk(self))

    def check(self) -> None:
        """Audit the whole structure, at rest; AssertionError if it is broken. For tests; O(n)."""
        audit(self)

    def _check_slot(self, slot: Slot, tick: int) -> None:
        """Audit that the tick belongs in this slot."""
        raise NotImplementedError

    def _slots(self) -> list[Slot]:
        """Every slot that may hold a timeout."""
        raise NotImplementedError

    def _slot(self, tick: int, cursor: int) -> Slot:
        """The slot of a tick that is not before the cursor."""
        raise NotImplementedError

    def _due(self, deadline_ns: int) -> int:
        if deadline_ns == NEVER:
            return NEVER
        return (deadline_ns + self._tick_ns - 1) // self._tick_ns

    def _file(self, timeout: Timeout, fresh: bool, first: bool) -> bool:
        """Put it, from where it is, into the slot of its deadline, as the last there (or first)."""
        while True:
            epoch = self._epoch
            cursor = self._cursor
            deadline_ns = timeout._deadline_ns
            tick = self._due(deadline_ns)
            if tick < cursor:
                tick = cursor
            slot = self._never if tick == NEVER else self._slot(tick, cursor)
            until = tick * self._tick_ns if tick != NEVER else 0
            if epoch != self._epoch or deadline_ns != timeout._deadline_ns:  # straight from here on
                continue
            if fresh:
                if self._filed >= self._limit:
                    self._limit = self._gone + self._capacity if self._capacity >= 0 else -1
                    if self._filed >= self._limit:
                        return False
                self._filed += 1
            else:
                if timeout._state != PENDING or self._capacity < 0:
                    return False
                self._refiled += 1
                before = timeout._prev
                after = timeout._next
                before._next = after
                after._prev = before
            last = slot._prev
            if tick < slot.bound or last is slot:
                slot.bound = tick
            timeout._tick = tick
            if first:
                last = slot._next
                timeout._prev = slot
                timeout._next = last
                last._prev = timeout
                slot._next = timeout
            else:
                timeout._prev = last
                timeout._next = slot
                last._next = timeout
                slot._prev = timeout
            slot.level.occupied |= slot.bit
            self._recent = slot
            self._recent_tick = tick
            self._until = until
            self._after = until - self._tick_ns if tick != NEVER else NEVER
            return True

    def _expire(self, timeout: Timeout, tick: int) -> bool:
        """Take it out, expired, if it is due at this tick; False if it was put off or cancelled."""
        if timeout._state != PENDING or timeout._deadline_ns > tick * self._tick_ns:
            return False  # straight from the line before to the end
        timeout._state = EXPIRED
        self._gone += 1
        before = timeout._prev
        if before is not None:
            after = timeout._next
            before._next = after
            after._prev = before
            timeout._prev = None  # type: ignore[assignment]
            timeout._next = None  # type: ignore[assignment]
        return True

    def _move_cursor(self, tick: int, filed: int) -> bool:
        """Go on to a tick, unless something was filed since the sum of both counts was `filed`."""
        if self._filed + self._refiled != filed:  # straight from here to the end
            return False
        if tick > self._cursor:
            self._cursor = tick
            self._epoch += 1
            self._after = NEVER
        return True


class Hub:
    """What a timeout knows of its timer, which owns the hub and is only weakly known to it.

    So a timer that the program drops is freed, though its queue and timeouts hold each other.
    """

    __slots__ = ("armed_ns", "last_delay", "last_ns", "manual_ns", "owner", "queue")

    def __init__(self, queue: TimerQueue, owner: ReferenceType[object], manual: bool) -> None:
        self.queue = queue
        self.owner = owner
        self.manual_ns = 0 if manual else -1  # the time, if it is moved by hand
        self.armed_ns = NEVER  # when the driver will look next; 0: it is looking
        self.last_delay: object = Hub  # the delay converted last: programs have one, or a few
        self.last_ns = 0

    def now(self) -> int:
        """Nanoseconds on the timer's clock."""
        return time.monotonic_ns() if self.manual_ns < 0 else self.manual_ns

    def deadline(self, delay: Duration) -> int:
        """When a delay that begins now will be over; raises if it is no time."""
        seconds = delay if type(delay) is float else -1.0
        if 0.0 <= seconds < LONG_S:
            delay_ns = math.floor(seconds * 1e9 + 0.5)
        else:
            delay_ns = to_ns(delay)
            if delay_ns == NEVER:
                return NEVER
            if delay_ns < 0:
                delay_ns = 0
        now_ns = self.now()
        if delay_ns >= MAX_NS - now_ns:
            return MAX_NS
        plain = type(delay) is float or type(delay) is int  # what has no finalizer, may be kept
        if plain and self.manual_ns < 0 and delay_ns < LONG_NS:
            self.last_delay = delay  # straight to the next line
            self.last_ns = delay_ns
        return now_ns + delay_ns

    def wake(self, deadline_ns: int) -> None:
        """Tell the driver of a deadline that is earlier than its next look."""
        self.armed_ns = deadline_ns
        owner = self.owner()
        if owner is not None:
            owner._wake(deadline_ns)  # type: ignore[attr-defined]  # a `TimerCore`

    def arm(self) -> int:
        """Decide when the driver looks next; whoever files something earlier after it wakes it."""
        queue = self.queue
        while True:
            filed = queue._filed + queue._refiled
            wake_ns = queue.next_wake()
            if filed == queue._filed + queue._refiled:  # straight to the write
                self.armed_ns = wake_ns
                return wake_ns
