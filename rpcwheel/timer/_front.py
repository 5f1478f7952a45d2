# cython: language_level=3, annotation_typing=False
# cython: boundscheck=False, wraparound=False, cdivision=True, nonecheck=True
"""The front door of every timer; also built as `_front_c`, see `_base.py` for how."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import rpcwheel.timer._base as base

if TYPE_CHECKING:
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import TaskLike


class Front:
    """Takes timeouts in. A driver sets `_hub`, and gives `_wake` and `_refuse`."""

    _hub: base.Hub

    def new_timeout(self, task: TaskLike, delay: Duration) -> base.Timeout:
        """Run `task` once, not before `delay` has passed.

        Args:
            task: Called as `task(timeout)`, or an object with `run(timeout)`, on the timer's thread
                or loop, or on its executor if it has one. It must not block a thread or a loop.
            delay: Seconds or a `timedelta`. Zero or less: as soon as possible, never inline.
                Infinite: never, but counted and cancellable. Beyond 146 years it saturates.

        Returns:
            A handle. `handle.cancel()` is True if and only if the task will never start.

        Raises:
            TypeError: `task` can't be called, or `delay` is no time; nothing was counted.
            ConfigurationError: `delay` is NaN; nothing was counted.
            TimerStopped: After `stop()`; nothing was counted.
            TooManyTimeouts: `max_pending` timeouts wait already; nothing was counted.

        O(1). Safe from any thread, finalizer and signal handler. Never early; late by less than one
        tick and the wake-up of the thread or loop.
        """
        hub = self._hub
        if delay is hub.last_delay:  # straight from here to the read of `last_ns`
            deadline_ns = hub.last_ns + time.monotonic_ns()
        else:
            deadline_ns = hub.deadline(delay)
        if not callable(task) and not callable(getattr(task, "run", None)):
            raise TypeError(
                f"task must be callable as task(timeout), or have run(timeout); not {task!r}"
            )
        timeout = base.Timeout()
        timeout._task = task
        timeout._deadline_ns = deadline_ns
        timeout._hub = hub
        timeout._state = base.PENDING
        queue = hub.queue
        if queue._after < deadline_ns <= queue._until and queue._filed < queue._limit:
            slot = queue._recent  # a stream of equal delays; straight from the comparison on
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
        if deadline_ns < hub.armed_ns:
            try:
                hub.wake(deadline_ns)
            except BaseException:
                timeout.cancel()
                raise
        return timeout

    def _refuse(self) -> None:
        """Raise what tells why the queue took nothing in."""
        raise NotImplementedError
