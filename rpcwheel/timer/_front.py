# cython: language_level=3, annotation_typing=False
# cython: binding=False, embedsignature=True, embedsignature.format=clinic
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""The base class of all timers: `new_timeout`, and the loop that runs due tasks.

Also built as `_front_c`, as `_base.py` says.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import rpcwheel.timer._base as base
import rpcwheel.timer._native as native
from rpcwheel.timer.api import LATENESS_BOUNDS_S

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import TaskLike


SLOW_NS = 100_000_000  # a task that blocks the timer's thread for longer is reported
BUCKETS = len(LATENESS_BOUNDS_S) + 1
BOUNDS_NS = native.integers(BUCKETS)
for _index in range(BUCKETS - 1):
    BOUNDS_NS[_index] = int(LATENESS_BOUNDS_S[_index] * 1e9)
BOUNDS_NS[BUCKETS - 1] = base.NEVER


class TimerBase:
    """Adds timeouts to the queue, and runs those that are due.

    A subclass sets `_timer_state` and `_executor`. It has `_wake` and `_refuse` for `new_timeout`,
    and the methods that `_run_due` calls.
    """

    _timer_state: base.TimerState

    def __init__(self, state: base.TimerState, executor: Executor | None) -> None:
        self._timer_state = state
        self._executor = executor
        self._stopped = False
        self._running = False  # whether a task runs
        self._buckets = native.integers(BUCKETS)
        self._reset_counts()

    def __cinit__(self) -> None:  # compiled only
        self._stopped = True  # until `__init__` has run

    def __dealloc__(self) -> None:  # compiled only
        native.free(self._buckets)

    def _reset_counts(self) -> None:
        self._fired = self._late_ns = self._max_late_ns = self._slowest_ns = 0
        self._window_end_ns = 0  # when the lateness of tasks is counted in a new window
        for index in range(BUCKETS):
            self._buckets[index] = 0

    def new_timeout(self, task: TaskLike, delay: Duration) -> base.Timeout:
        """Run `task` once, not before `delay` has passed.

        Args:
            task: Called as `task(timeout)`, or an object with `run(timeout)`. Runs on the timer's
                thread or event loop, which it must not block, or on the timer's executor.
            delay: Seconds or a `timedelta`. Zero or less: as soon as possible, but not in this
                call. Infinite: never; the timeout is pending until it is cancelled. The maximum is
                146 years.

        Returns:
            A handle. `handle.cancel()` returns True if and only if the task will never start.

        Raises:
            TypeError: `task` is not callable, or `delay` is no time.
            ConfigurationError: `delay` is NaN.
            TimerStopped: The timer was stopped.
            TooManyTimeouts: `max_pending` timeouts are pending.

        O(1). Safe in any thread, finalizer and signal handler. The task never starts early. It is
        late by less than one tick plus the wake-up of the thread or loop.
        """
        state = self._timer_state
        if delay is state.last_delay:  # atomic from here to the read of `last_ns`
            deadline_ns = state.last_ns + time.monotonic_ns()
        else:
            deadline_ns = state.deadline(delay)
        if not callable(task) and not callable(getattr(task, "run", None)):
            raise TypeError(
                f"task must be callable as task(timeout), or have run(timeout), not {task!r}"
            )
        timeout = base.Timeout.__new__(base.Timeout) if native.COMPILED else base.Timeout()
        timeout._task = task
        timeout._deadline_ns = deadline_ns
        timeout._timer_state = state
        queue = state.queue
        if queue._after < deadline_ns <= queue._until and queue._added < queue._limit:
            slot = queue._recent  # equal delays; atomic from the comparison on
            queue._added += 1
            timeout._slot = slot
            head = queue._heads[slot]
            if head is None:
                queue._heads[slot] = timeout
                timeout._prev = timeout
                timeout._next = timeout
                if queue._bounded:
                    queue._occupied[slot >> 6] |= base.ONE << (slot & 63)
            else:
                last = head._prev
                timeout._prev = last
                timeout._next = head
                last._next = timeout
                head._prev = timeout
        elif not queue.schedule(timeout):
            self._refuse()
        if deadline_ns < state.armed_ns:
            try:
                state.wake(deadline_ns)
            except BaseException:
                timeout.cancel()
                raise
        return timeout

    def _run_due(self, limit: int) -> bool:
        """Run at most `limit` tasks that are due; False if none was due."""
        state = self._timer_state
        queue = state.queue
        now_ns = state.now()
        if now_ns >= self._window_end_ns:
            self._begin_window(now_ns)
        count = 0
        while count < limit and not self._stopped:
            timeout = queue.pop(now_ns)
            if timeout is None:
                break
            count += 1
            late_ns = now_ns - timeout._deadline_ns
            self._fired += 1
            self._late_ns += late_ns
            if late_ns > self._max_late_ns:
                self._max_late_ns = late_ns
            self._buckets[native.bucket(BOUNDS_NS, late_ns)] += 1
            if self._executor is not None:
                self._submit(timeout, self._executor)
                now_ns = state.now()
                continue
            task = timeout._task
            self._running = True
            try:
                result = task(timeout) if callable(task) else task.run(timeout)  # type: ignore[attr-defined]
                if result is not None:
                    self._finish(timeout, result)
            except BaseException as error:
                if self._report(timeout, error):
                    raise
            finally:
                self._running = False
                timeout._task = None
            after_ns = state.now()
            took_ns = after_ns - now_ns
            if took_ns > self._slowest_ns or took_ns >= SLOW_NS:
                self._note_duration(task, took_ns)
            now_ns = after_ns
            task = result = None  # released before the next one runs
        return count > 0

    def _late_counts(self) -> tuple[int, ...]:
        """Return how many tasks were late by at most each of `LATENESS_BOUNDS_S`, and by more."""
        return tuple([self._buckets[index] for index in range(BUCKETS)])

    def _refuse(self) -> None:
        """Raise the reason why the queue did not accept the timeout."""
        raise NotImplementedError

    def _submit(self, timeout: base.Timeout, executor: Executor) -> None:
        """Give the task to the executor."""
        raise NotImplementedError

    def _finish(self, timeout: base.Timeout, result: object) -> None:
        """Handle the result of a task, which is not None."""
        raise NotImplementedError

    def _report(self, timeout: base.Timeout, error: BaseException) -> bool:
        """Report the exception of a task; True if it is to be raised to the user too."""
        raise NotImplementedError

    def _begin_window(self, now_ns: int) -> None:
        """Begin to count the lateness of tasks in a new window."""
        raise NotImplementedError

    def _note_duration(self, task: object, took_ns: int) -> None:
        """Note the slowest task, and report a slow one."""
        raise NotImplementedError
