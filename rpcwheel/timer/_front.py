# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""The base class of all timers: `new_timeout`. Also built as `_front_c`, as `_base.py` says."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import rpcwheel.timer._base as base

if TYPE_CHECKING:
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import TaskLike


class TimerBase:
    """Adds timeouts to the queue. A subclass sets `_timer_state`, and has `_wake` and `_refuse`."""

    _timer_state: base.TimerState

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
        timeout = base.Timeout()
        timeout._task = task
        timeout._deadline_ns = deadline_ns
        timeout._timer_state = state
        timeout._state = base.PENDING
        queue = state.queue
        if queue._after < deadline_ns <= queue._until and queue._filed < queue._limit:
            slot = queue._recent  # equal delays; atomic from the comparison on
            queue._filed += 1
            last = slot._prev
            timeout._tick = queue._recent_tick
            timeout._prev = last
            timeout._next = slot
            last._next = timeout
            slot._prev = timeout
            if slot.bit:
                slot.level.occupied |= slot.bit
        elif not queue.schedule(timeout):
            self._refuse()
        if deadline_ns < state.armed_ns:
            try:
                state.wake(deadline_ns)
            except BaseException:
                timeout.cancel()
                raise
        return timeout

    def _refuse(self) -> None:
        """Raise the reason why the queue did not accept the timeout."""
        raise NotImplementedError
