# cython: language_level=3, annotation_typing=False
# cython: binding=False, embedsignature=True, embedsignature.format=clinic
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""Timeouts, and the base class of all queues.

This source exists in two forms. Imported as it is, it is the pure form. Built under the name
`_base_c`, with the types in `_base_c.pxd`, it is the compiled form. `_wheel.py`, `_sparse.py` and
`_front.py` are built in the same way. They refer to each other by module (`base.Timeout`); the
`.pxd` files replace the module by its compiled form. `_native.py` has what differs.

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

**Slots.** A slot is an index of `_heads`, which has the first timeout of each slot, or None. The
timeouts of a slot are a circular list.

**Invariants**, which `TimerQueue.check` asserts: each pending timeout is in the list of its
`_slot`; `len` is their number; the slot is reached not after the timeout is due; in the wheels, a
slot's bound is at most the tick of each timeout in it, and a slot with a timeout has its bit in
`_occupied`.
"""

from __future__ import annotations

import time
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import rpcwheel.timer._native as native
from rpcwheel.durations import Duration, to_ns
from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from weakref import ReferenceType

EXPIRED = -1
CANCELLED = -2
NEVER = (1 << 63) - 1
MAX_NS = 1 << 62
ONE = 1  # as wide as a word of the bitmap
LONG_S = 1e9  # 31 years: a shorter float delay needs no further check
LONG_NS = 10**18
MOVES = 256  # the most timeouts that one `pop` moves to another slot: some tens of microseconds


class Timeout:
    """The handle of one scheduled task. Its methods are O(1) and safe on any thread."""

    __slots__ = ("_deadline_ns", "_next", "_prev", "_slot", "_task", "_timer_state")

    _deadline_ns: int
    _timer_state: TimerState
    _next: Timeout
    _prev: Timeout
    _slot: int  # where it is pending, 0 or more; or EXPIRED or CANCELLED
    _task: object

    def __cinit__(self) -> None:  # compiled only
        native.untrack(self)  # each garbage collection would take 100 ms for a million
        self._slot = CANCELLED  # until it is in a queue

    def __reduce__(self) -> str:
        """Raise TypeError: two handles cannot share one place in a slot."""
        raise TypeError("a Timeout can't be copied or pickled")

    def cancel(self) -> bool:
        """Cancel the task and release it; True if and only if this call prevents it from starting.

        A timeout that `stop()` returned is cancelled already: this releases its task and returns
        False.
        """
        if self._slot < 0:  # not pending; atomic from here to the call at the end
            if self._slot == CANCELLED:
                self._release_task()
            return False
        queue = self._timer_state.queue
        queue._removed += 1
        after = self._next
        if after is not None:
            heads = queue._heads
            if heads[self._slot] is self:
                heads[self._slot] = None if after is self else after
            before = self._prev
            before._next = after
            after._prev = before
            self._prev = None  # type: ignore[assignment]
            self._next = None  # type: ignore[assignment]
        self._slot = CANCELLED
        task = self._task  # noqa: F841 - released at the end: its finalizer may call `cancel`
        self._task = None
        return True

    def _release_task(self) -> object:
        """Return the task and remove it: in C, a store would release it before it is removed."""
        task = self._task
        self._task = None
        return task

    def _keep_task(self, task: object) -> None:
        """Keep the task outside the queue, where the garbage collector tracks the timeout."""
        self._task = task
        native.track(self)

    def reschedule(self, delay: Duration) -> bool:
        """Let it expire `delay` from now instead; False if it has expired or was cancelled.

        A later deadline is one write: the timeout is moved when its old slot is due (tokio's lazy
        reset). An earlier one moves it now. `delay` is as for `new_timeout`; if it is refused,
        nothing changes.
        """
        if self._slot < 0:
            return False
        state = self._timer_state
        deadline_ns = state.deadline(delay)
        if not state.queue.reschedule(self, deadline_ns):
            return False
        if deadline_ns < state.armed_ns:
            state.wake(deadline_ns)
        return True

    def cancelled(self) -> bool:
        """Return whether it was cancelled, by `cancel()` or by the timer's `stop()`."""
        return self._slot == CANCELLED

    def expired(self) -> bool:
        """Return whether it was due: the task runs, has run, or was submitted to an executor."""
        return self._slot == EXPIRED

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
        state = "pending" if self._slot >= 0 else "expired" if self.expired() else "cancelled"
        return f"<Timeout {state} deadline={self.deadline:.6f} task={self._task!r}>"


class TimerQueue:
    """The base class of all queues. It reads no clock, takes no lock and runs no task.

    All times are integer nanoseconds. A subclass defines the slot of a tick (`_slot`) and the next
    timeout (`pop`, `next_wake`). If it has a fixed number of `slots`, each has a bound and a bit.
    """

    def __cinit__(self) -> None:  # compiled only: no crash without `__init__`
        self._attached = True
        self._tick_ns = 1  # a divisor

    def __init__(self, tick_ns: int, slots: int = 0) -> None:
        if getattr(self, "_heads", None) is not None:  # it may have timeouts
            raise RuntimeError(f"this {type(self).__name__} is initialized already")
        self._tick_ns = tick_ns
        self._cursor = 0  # all earlier ticks are done
        self._epoch = 0  # changes when a slot computed before may be wrong
        self._added = 0  # timeouts added, ever
        self._moved = 0  # moves from slot to slot, ever
        self._removed = 0  # timeouts that expired or were cancelled, ever
        self._capacity = NEVER  # how many may be pending; -1: closed
        self._limit = NEVER  # at this value of `_added`, check the capacity
        self._bounded = slots > 0
        self._never = (slots + 63) // 64 * 64  # the slot of infinite delays
        self._heads: list[Any] = [None] * (self._never + 2)
        if slots:
            self._bounds = native.integers(self._never + 2)  # the first tick with a timeout
            self._occupied = native.bitmap(self._never + 2)  # an empty slot may still have its bit
        self._recent = self._never  # the slot of the last added timeout ...
        self._after = NEVER  # ... and the deadlines for which it is right: after this ...
        self._until = 0  # ... and up to this
        self._mark: Any = None  # in a list, but no timeout; see `HashedWheel`
        self._attached = False

    def __dealloc__(self) -> None:  # compiled only
        native.free(self._bounds)
        native.free(self._occupied)

    def attach(self) -> None:
        """Reserve the queue for one timer; ConfigurationError if it has one already."""
        if self._attached:
            name = type(self).__name__
            raise ConfigurationError(f"this {name} belongs to a timer already; make one for each")
        self._attached = True

    def limit(self, capacity: int) -> None:
        """Set the maximum of pending timeouts; -1 closes the queue."""
        self._capacity = capacity
        self._limit = -1

    def schedule(self, timeout: Timeout) -> bool:
        """Add a timeout; False if the queue is full or closed. O(1)."""
        return self._place(timeout, True, False)

    def cancel(self, timeout: Timeout) -> bool:
        """Cancel a timeout and remove it; False if it is not pending. O(1)."""
        return timeout.cancel()

    def reschedule(self, timeout: Timeout, deadline_ns: int) -> bool:
        """Change the deadline: a write if later, else a move; False if it is not pending. O(1)."""
        if timeout._slot < 0:  # atomic to the write
            return False
        later = deadline_ns >= timeout._deadline_ns
        timeout._deadline_ns = deadline_ns
        return True if later else self._place(timeout, False, False)

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
            while (timeout := self._heads[slot]) is not None:
                task = timeout._task
                if timeout.cancel():
                    timeout._keep_task(task)
                    drained.append(timeout)
        drained.sort(key=attrgetter("_deadline_ns"))
        return drained

    def __len__(self) -> int:
        return self._added - self._removed

    def check(self) -> None:
        """Check the invariants while no other thread uses the queue. O(n), for tests.

        Raises:
            AssertionError: An invariant does not hold.
        """
        count = 0
        for slot in self._slots():
            timeout = head = self._heads[slot]
            while timeout is not None:
                assert timeout._next._prev is timeout, "broken list"
                if timeout is not self._mark:
                    count += 1
                    assert timeout._slot == slot, f"{timeout!r} is in slot {slot}"
                    self._check_slot(slot, max(self._due(timeout._deadline_ns), self._cursor))
                timeout = None if timeout._next is head else timeout._next
        assert count == len(self), f"{count} timeouts are in slots, {len(self)} counted"

    def _check_slot(self, slot: int, tick: int) -> None:
        """Assert that a timeout that is due at this tick may be in this slot."""
        raise NotImplementedError

    def _slots(self) -> list[int]:
        """Return every slot with timeouts."""
        return list(compress(range(len(self._heads)), self._heads))

    def _slot(self, tick: int, cursor: int) -> int:
        """Return the slot of a tick that is not before the cursor."""
        raise NotImplementedError

    def _due(self, deadline_ns: int) -> int:
        if deadline_ns == NEVER:
            return NEVER
        return (deadline_ns + (self._tick_ns - 1)) // self._tick_ns

    def _place(  # noqa: C901, PLR0912 - one atomic section: it cannot be divided
        self, timeout: Timeout, fresh: bool, first: bool
    ) -> bool:
        """Put a timeout into the slot of its deadline, as the last there or as the first.

        `fresh`: it is in no slot yet. Returns False if the queue is full or closed, or the timeout
        is no longer pending.
        """
        heads = self._heads
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
                if self._added >= self._limit:
                    self._limit = self._removed + self._capacity if self._capacity >= 0 else -1
                    if self._added >= self._limit:
                        return False
                self._added += 1
            else:
                old = timeout._slot
                if old < 0 or self._capacity < 0:
                    return False
                self._moved += 1
                after = timeout._next
                if heads[old] is timeout:
                    heads[old] = None if after is timeout else after
                before = timeout._prev
                before._next = after
                after._prev = before
                if native.COMPILED:
                    native.prefetch(before._prev)
            timeout._slot = slot
            head = heads[slot]
            if self._bounded and (head is None or tick < self._bounds[slot]):
                self._bounds[slot] = tick
                self._occupied[slot >> 6] |= ONE << (slot & 63)
            if head is None:
                heads[slot] = timeout
                timeout._prev = timeout
                timeout._next = timeout
            else:
                last = head._prev
                timeout._prev = last
                timeout._next = head
                last._next = timeout
                head._prev = timeout
                if first:
                    heads[slot] = timeout
            self._recent = slot
            self._until = until
            self._after = until - self._tick_ns if tick != NEVER else NEVER
            return True

    def _expire(self, timeout: Timeout, tick: int) -> bool:
        """Expire and remove a timeout; False if it is due later now, or was cancelled."""
        slot = timeout._slot
        if slot < 0 or timeout._deadline_ns > tick * self._tick_ns:
            return False  # atomic from the first line to the end
        timeout._slot = EXPIRED
        self._removed += 1
        after = timeout._next
        if after is not None:
            if self._heads[slot] is timeout:
                self._heads[slot] = None if after is timeout else after
            before = timeout._prev
            before._next = after
            after._prev = before
            timeout._prev = None  # type: ignore[assignment]
            timeout._next = None  # type: ignore[assignment]
            if native.COMPILED:
                native.prefetch(after._next)
        return True

    def _move_cursor(self, tick: int, changes: int) -> bool:
        """Set the cursor; False if `_added + _moved` is not `changes`: a timeout came meanwhile."""
        if self._added + self._moved != changes:  # atomic from here to the end
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
            delay_ns = native.floor(seconds * 1e9 + 0.5)
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
        owner = self.owner()
        if owner is not None:
            self.armed_ns = deadline_ns
            try:
                owner._wake(deadline_ns)  # type: ignore[attr-defined]  # a `TimerCore`
            except BaseException:
                self.armed_ns = NEVER  # the next timeout wakes it
                raise

    def arm(self) -> int:
        """Set and return the next wake-up. An earlier timeout that is added later calls `wake`."""
        queue = self.queue
        while True:
            changes = queue._added + queue._moved
            wake_ns = queue.next_wake()
            if changes == queue._added + queue._moved:  # atomic to the write
                self.armed_ns = wake_ns
                return wake_ns
