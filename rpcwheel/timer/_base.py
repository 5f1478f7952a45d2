# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""Timeouts, slots, and the base class of all queues.

This source exists in two forms. Imported as it is, it is the pure form. Built under the name
`_base_c`, with the types in `_base_c.pxd`, it is the compiled form. `_wheel.py`, `_sparse.py` and
`_front.py` are built in the same way. They refer to each other by module (`base.Slot`); the `.pxd`
files replace the module by its compiled form.

**Threads.** No queue takes a lock. Only the timer itself calls `pop`, `advance`, `next_wake` and
`drain`, one at a time. Any thread, finalizer and signal handler may call `schedule`, `cancel` and
`reschedule` at any time, also while another such call is in progress. This is safe because each
change of the structure is an *atomic section*: loads, compares and stores, without a call and
without a loop. CPython switches to another thread, a finalizer or a signal handler only at a call,
at the end of a loop's iteration or at the start of a function, and no atomic section releases the
last reference to an object. So no other code sees half of a change. A value that was computed
before an atomic section, such as a slot, is checked in it (`_epoch`), and computed again if it is
out of date. In the compiled form whole methods are atomic. A lock would cost more than everything
else, and would deadlock with a finalizer that cancels a timeout. All of this relies on the GIL.

**Never early.** `due_tick = ceil(deadline / tick)`, counted from the clock's zero, and a timeout is
due when `due_tick <= floor(now / tick)`. So `deadline <= due_tick * tick <= now`.

**Invariants**, which `TimerQueue.check` asserts: each pending timeout is in exactly one slot, and
nothing else is in a slot; `len` is their number; a slot's `bound` is at most the tick of each
timeout in it; a slot with a timeout has its bit in `occupied`; no timeout's tick is before the
cursor.
"""

from __future__ import annotations

import math
import time
from operator import attrgetter
from typing import TYPE_CHECKING

import rpcwheel.timer._collector as collector
from rpcwheel.durations import Duration, to_ns
from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from weakref import ReferenceType

PENDING = 0
EXPIRED = 1
CANCELLED = 2
NEVER = (1 << 63) - 1
MAX_NS = 1 << 62
BITS = 63  # bits of a tick
LONG_S = 1e9  # 31 years: a shorter float delay needs no further check
LONG_NS = 10**18
MOVES = 256  # the most timeouts that one `pop` moves to another slot: some tens of microseconds


class Timeout:
    """The handle of one scheduled task. Its methods are O(1) and safe on any thread."""

    __slots__ = ("_deadline_ns", "_next", "_prev", "_state", "_task", "_tick", "_timer_state")

    _deadline_ns: int
    _timer_state: TimerState
    _next: Timeout
    _prev: Timeout
    _state: int
    _task: object
    _tick: int

    def __cinit__(self) -> None:  # compiled only
        collector.untrack(self)  # each garbage collection would take 100 ms for a million
        self._state = CANCELLED  # until a timer makes it pending

    def __reduce__(self) -> str:
        """Raise TypeError: two handles cannot share one place in a slot."""
        raise TypeError("a Timeout can't be copied or pickled")

    def cancel(self) -> bool:
        """Cancel the task and release it; True if and only if this call prevents it from starting.

        A timeout that `stop()` returned is cancelled already: this releases its task and returns
        False.
        """
        if self._state:  # not pending; atomic from here to the call at the end
            if self._state == CANCELLED:
                self._let_go()
            return False
        self._state = CANCELLED
        self._timer_state.queue._gone += 1
        before = self._prev
        if before is not None:
            after = self._next
            before._next = after
            after._prev = before
            self._prev = None  # type: ignore[assignment]
            self._next = None  # type: ignore[assignment]
        task = self._task  # noqa: F841 - released at the end: its finalizer may call `cancel`
        self._task = None
        return True

    def _let_go(self) -> object:
        """Return the task and remove it: in C, a store would release it before it is removed."""
        task = self._task
        self._task = None
        return task

    def _keep_task(self, task: object) -> None:
        """Keep the task outside the queue, where the garbage collector tracks the timeout."""
        self._task = task
        if collector.COMPILED:
            collector.track(self)

    def reschedule(self, delay: Duration) -> bool:
        """Let it expire `delay` from now instead; False if it has expired or was cancelled.

        A later deadline is one write: the old slot moves the timeout when it is due (tokio's lazy
        reset). An earlier one moves it now. `delay` is as for `new_timeout`; if it is refused,
        nothing changes.
        """
        if self._state:
            return False
        state = self._timer_state
        deadline_ns = state.deadline(delay)
        if not state.queue.reschedule(self, deadline_ns):
            return False
        if deadline_ns < state.armed_ns:
            state.wake(deadline_ns)
        return True

    def cancelled(self) -> bool:
        """Whether it was cancelled, by `cancel()` or by the timer's `stop()`."""
        return self._state == CANCELLED

    def expired(self) -> bool:
        """Whether it was due: the task runs, has run, or was submitted to an executor."""
        return self._state == EXPIRED

    @property
    def timer(self) -> object:
        """The timer that made it; None if that timer no longer exists."""
        state: TimerState | None = self._timer_state
        return None if state is None else state.owner()

    @property
    def task(self) -> object:
        """The task; None after it ran or was cancelled, except by the timer's `stop()`."""
        return self._task

    @property
    def deadline(self) -> float:
        """When it is due: seconds on the timer's clock (`time.monotonic()`), or infinity."""
        return float("inf") if self._deadline_ns == NEVER else self._deadline_ns / 1e9

    def __repr__(self) -> str:
        state = ("pending", "expired", "cancelled")[self._state]
        return f"<Timeout {state} deadline={self.deadline:.6f} task={self._task!r}>"


class Slot(Timeout):
    """The head of a circular list of timeouts that are due at one tick, or in a range of ticks."""

    __slots__ = ("bit", "bound", "level")

    def __init__(self, level: Level, bit: int) -> None:
        if collector.COMPILED:
            collector.track(self)
        self._prev = self
        self._next = self
        self.level = level
        self.bit = bit  # in `level.occupied`; 0: the level has no bitmap
        self.bound = NEVER


class Level:
    """Slots of one width, and a bitmap of slots in use. An empty slot may still have its bit."""

    __slots__ = ("occupied", "shift", "slots")

    def __init__(self, shift: int, count: int, mapped: bool) -> None:
        self.shift = shift
        self.occupied = 0
        self.slots = [Slot(self, 1 << index if mapped else 0) for index in range(count)]


class TimerQueue:
    """The base class of all queues. It reads no clock, takes no lock and runs no task.

    All times are integer nanoseconds. A subclass defines the slot of a tick (`_slot`), the list of
    slots (`_slots`), and the next timeout (`pop`, `next_wake`).
    """

    def __init__(self, tick_ns: int) -> None:
        self._tick_ns = tick_ns
        self._cursor = 0  # all earlier ticks are done
        self._epoch = 0  # changes when a slot computed before may be wrong
        self._filed = 0  # timeouts added, ever
        self._refiled = 0  # moves from slot to slot, ever
        self._gone = 0  # timeouts that expired or were cancelled, ever
        self._capacity = NEVER  # how many may be pending; -1: closed
        self._limit = NEVER  # at this value of `_filed`, check the capacity
        self._never = Slot(Level(0, 0, False), 0)
        self._recent = self._never  # the slot of the last added timeout ...
        self._recent_tick = 0  # ... its tick ...
        self._after = NEVER  # ... and the deadlines of that tick: after this
        self._until = 0  # ... and up to this
        self._attached = False

    def attach(self) -> None:
        """Reserve the queue for one timer; ConfigurationError if it has one already."""
        if self._attached or self._tick_ns < 1:
            name = type(self).__name__
            raise ConfigurationError(f"this {name} belongs to a timer already; make one for each")
        self._attached = True

    def limit(self, capacity: int) -> None:
        """Set the maximum of pending timeouts; -1 closes the queue."""
        self._capacity = capacity
        self._limit = -1

    def schedule(self, timeout: Timeout) -> bool:
        """Add a pending timeout; False if the queue is full or closed. O(1)."""
        return self._file(timeout, True, False)

    def cancel(self, timeout: Timeout) -> bool:
        """Cancel a timeout and remove it; False if it is not pending. O(1)."""
        return timeout.cancel()

    def reschedule(self, timeout: Timeout, deadline_ns: int) -> bool:
        """Change the deadline: a write if later, else a move; False if it is not pending. O(1)."""
        if timeout._state != PENDING:  # atomic to the write
            return False
        timeout._deadline_ns = deadline_ns
        tick = timeout._tick
        if tick == self._cursor or (tick != NEVER and deadline_ns > (tick - 1) * self._tick_ns):
            return True
        return self._file(timeout, False, False)

    def advance(self, now_ns: int, limit: int = NEVER) -> list[Timeout]:
        """Expire and return at most `limit` due timeouts, in order."""
        due: list[Timeout] = []
        while len(due) < limit:
            timeout = self.pop(now_ns)
            if timeout is not None:
                due.append(timeout)
            elif self.next_wake() > now_ns:
                break
        return due

    def pop(self, now_ns: int) -> Timeout | None:
        """Expire and return the next due timeout. If None, call again at `next_wake()`."""
        raise NotImplementedError

    def next_wake(self) -> int:
        """Return when to call `pop`; may be in the past. `NEVER`: no timeout will be due."""
        raise NotImplementedError

    def drain(self) -> list[Timeout]:
        """Cancel and return all timeouts, by deadline; they keep their tasks."""
        drained = []
        for slot in self._slots():
            while (timeout := slot._next) is not slot and timeout is not None:  # None: forgotten
                task = timeout._task
                if timeout.cancel():
                    timeout._keep_task(task)
                    drained.append(timeout)
        drained.sort(key=attrgetter("_deadline_ns"))
        return drained

    def __len__(self) -> int:
        return self._filed - self._gone

    def __iter__(self) -> Iterator[Timeout]:
        pending = []
        for slot in self._slots():
            timeout: Timeout | None = slot._next
            while timeout is not None and type(timeout) is not Slot:  # moved to another slot's list
                if timeout._state == PENDING:
                    pending.append(timeout)
                timeout = timeout._next
        return iter(pending)

    def check(self) -> None:
        """Check the invariants while no other thread uses the queue. O(n), for tests.

        Raises:
            AssertionError: An invariant does not hold.
        """
        count = 0
        for slot in self._slots():
            timeout: Timeout = slot._next
            before: Timeout = slot
            while timeout is not slot:
                tick = timeout._tick
                assert timeout._prev is before, "broken list"
                assert timeout._state == PENDING, f"{timeout!r} is in a slot"
                assert slot.bound <= tick, f"bound {slot.bound} is after {tick}"
                assert self._cursor <= tick, f"{tick} is before cursor {self._cursor}"
                late = self._due(timeout._deadline_ns) < tick and tick != self._cursor
                assert not late, f"{timeout!r} is late in its slot, at {tick}"
                self._check_slot(slot, tick)
                timeout, before = timeout._next, timeout
                count += 1
            assert slot._prev is before, "broken list"
            in_use = slot._next is not slot and slot.bit
            assert not in_use or slot.level.occupied & slot.bit, "a slot in use has no bit"
        assert count == len(self), f"{count} timeouts are in slots, {len(self)} counted"

    def _check_slot(self, slot: Slot, tick: int) -> None:
        """Assert that the tick belongs to this slot."""
        raise NotImplementedError

    def _slots(self) -> list[Slot]:
        """Return every slot that may hold a timeout."""
        raise NotImplementedError

    def _slot(self, tick: int, cursor: int) -> Slot:
        """Return the slot of a tick that is not before the cursor."""
        raise NotImplementedError

    def _due(self, deadline_ns: int) -> int:
        if deadline_ns == NEVER:
            return NEVER
        return (deadline_ns + self._tick_ns - 1) // self._tick_ns

    def _file(self, timeout: Timeout, fresh: bool, first: bool) -> bool:
        """Move a timeout into the slot of its deadline, as the last there or as the first.

        `fresh`: it is in no slot yet. Returns False if the queue is full or closed, or the timeout
        is no longer pending.
        """
        while True:
            epoch = self._epoch
            cursor = self._cursor
            deadline_ns = timeout._deadline_ns
            tick = self._due(deadline_ns)
            if tick < cursor:
                tick = cursor
            slot = self._never if tick == NEVER else self._slot(tick, cursor)
            until = tick * self._tick_ns if tick != NEVER else 0
            if epoch != self._epoch or deadline_ns != timeout._deadline_ns:  # atomic from here on
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
        """Expire and remove a timeout; False if it is due later now, or was cancelled."""
        if timeout._state != PENDING or timeout._deadline_ns > tick * self._tick_ns:
            return False  # atomic from the line before to the end
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
        """Set the cursor; False if a timeout was added or moved since the counts were `filed`."""
        if self._filed + self._refiled != filed:  # atomic from here to the end
            return False
        if tick > self._cursor:
            self._cursor = tick
            self._epoch += 1
            self._after = NEVER
        return True


class TimerState:
    """The part of a timer to which its timeouts refer.

    It refers to the timer weakly, so an unused timer is freed although timeouts are pending.
    """

    __slots__ = ("armed_ns", "last_delay", "last_ns", "manual_ns", "owner", "queue")

    def __init__(self, queue: TimerQueue, owner: ReferenceType[object], manual: bool) -> None:
        self.queue = queue
        self.owner = owner
        self.manual_ns = 0 if manual else -1  # the time of a `ManualTimer`
        self.armed_ns = NEVER  # the next wake-up; 0: the timer runs
        self.last_delay: object = TimerState  # the last converted delay
        self.last_ns = 0

    def now(self) -> int:
        """Return the nanoseconds on the timer's clock."""
        return time.monotonic_ns() if self.manual_ns < 0 else self.manual_ns

    def deadline(self, delay: Duration) -> int:
        """Return the deadline of a delay that begins now; raises as `to_ns`."""
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
        plain = type(delay) is float or type(delay) is int  # no finalizer
        if plain and self.manual_ns < 0 and delay_ns < LONG_NS:
            self.last_delay = delay  # atomic to the next line
            self.last_ns = delay_ns
        return now_ns + delay_ns

    def wake(self, deadline_ns: int) -> None:
        """Wake the timer up for a deadline before its next wake-up."""
        self.armed_ns = deadline_ns
        owner = self.owner()
        if owner is not None:
            owner._wake(deadline_ns)  # type: ignore[attr-defined]  # a `TimerCore`

    def arm(self) -> int:
        """Set and return the next wake-up. An earlier timeout that is added later calls `wake`."""
        queue = self.queue
        while True:
            filed = queue._filed + queue._refiled
            wake_ns = queue.next_wake()
            if filed == queue._filed + queue._refiled:  # atomic to the write
                self.armed_ns = wake_ns
                return wake_ns
