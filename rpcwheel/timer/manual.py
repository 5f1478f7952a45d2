"""A timer whose clock is advanced by calls, for tests and simulations; and functions for any timer.

The functions return the clock and the name of a timer, check it, and start a timeout.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rpcwheel.durations import MAX_NS, NEVER, to_ns
from rpcwheel.errors import ConfigurationError, TimerError, short_repr
from rpcwheel.events.events import ExecutorRejected
from rpcwheel.events.hub import emit
from rpcwheel.timer.core import DEFAULT_NAME, TimerCore
from rpcwheel.timer.sync import shared_timer

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from rpcwheel.timer._base import Timeout, TimerQueue

    from .api import Timer


class ManualTimer(TimerCore):
    """A timer whose clock starts at 0 seconds and moves only in `advance`.

    Tasks run on the thread that calls `advance`, in the order of their due ticks. The clock stops
    at each tick while its tasks run, so timeouts that they start have exact deadlines.

    Failback that has the timer looks at its journal in `advance`, and journals in SQLite have the
    time of the timer, beginning with the time when it was made.
    """

    def __init__(self, queue: TimerQueue | None = None) -> None:
        super().__init__(queue, name="manual-timer", manual=True)
        self._timer_state.armed_ns = 0
        self._began_s = time.time()

    @property
    def now(self) -> float:
        """The time on the timer's clock, in seconds."""
        return self._timer_state.manual_ns / 1e9

    def advance(self, seconds: float | timedelta) -> int:
        """Advance the clock, and run the tasks that become due.

        Args:
            seconds: Seconds or a `timedelta`; 0 runs tasks that are due already.

        Returns:
            The number of tasks that ran.

        Raises:
            TypeError, ConfigurationError: `seconds` is not a finite time of zero or more.
            RuntimeError: Called by a task of this timer.
        """
        step_ns = to_ns(seconds, subject="seconds")
        if step_ns < 0 or step_ns == NEVER:
            raise ConfigurationError(f"seconds must be finite and not negative, not {seconds!r}")
        if self._running:
            raise RuntimeError("a task cannot call advance() of the timer that runs it")
        state, fired = self._timer_state, self._fired
        target_ns = min(state.manual_ns + step_ns, MAX_NS)
        while not self._stopped:
            wake_ns = state.queue.next_wake()
            if wake_ns > target_ns:
                break
            state.manual_ns = max(state.manual_ns, wake_ns)
            self._run_due(1)
        state.manual_ns = target_ns
        self._run_due(1)
        return self._fired - fired

    def stop(self) -> list[Timeout]:
        """Stop the timer. Idempotent.

        Returns:
            The pending timeouts, by deadline. They are cancelled and keep their tasks.

        Raises:
            RuntimeError: Called by a task of this timer.
        """
        self._forbid_inside_task(inside=self._running)
        self._stopped = True
        return self._end()

    def _wake(self, deadline_ns: int) -> None:
        """Do nothing: `advance` reads the queue."""


def clock_of(timer: Timer | None) -> Callable[[], int]:
    """Return the nanosecond clock of a timer: `time.monotonic_ns`, or that of a `ManualTimer`."""
    return timer._timer_state.now if isinstance(timer, ManualTimer) else time.monotonic_ns


def lease_clock_of(timer: Timer | None) -> Callable[[], int]:
    """Return the nanosecond clock for leases, which goes on while the machine is suspended.

    A `ManualTimer` has its own. On systems other than Linux, it is `time.monotonic_ns`, which may
    stand still meanwhile.
    """
    if isinstance(timer, ManualTimer) or not hasattr(time, "CLOCK_BOOTTIME"):
        return clock_of(timer)
    return lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def wall_clock_of(timer: Timer | None) -> Callable[[], float]:
    """Return the wall clock of a timer, in seconds.

    That of a `ManualTimer` begins when the timer is made, and moves in `advance`.
    """
    return (lambda: timer._began_s + timer.now) if isinstance(timer, ManualTimer) else time.time


def checked_timer(timer: Timer | None) -> Timer | None:
    """Return `timer`.

    Raises:
        TypeError: `timer` is neither a timer nor None.
    """
    if timer is not None and not callable(getattr(timer, "new_timeout", None)):
        raise TypeError(
            "timer must be a WheelTimer, AsyncWheelTimer or ManualTimer, or None for "
            f"shared_timer(), not {short_repr(timer)}"
        )
    return timer


def timer_name(timer: Timer | None) -> str:
    """Return the name of a timer in events. None is `shared_timer()`, also if it can't be made."""
    return DEFAULT_NAME if timer is None else str(getattr(timer, "name", type(timer).__name__))


def start_timeout(
    timer: Timer | None, task: Callable[[Timeout], object], delay_s: float, name: str = ""
) -> Timeout | None:
    """Start a timeout of a timer; None is `shared_timer()`.

    Returns:
        None if the timer takes none: it is stopped or full, or no thread can be started. If the
        task has a `name`, `ExecutorRejected` is emitted then.
    """
    try:
        return (shared_timer() if timer is None else timer).new_timeout(task, delay_s)
    except (TimerError, RuntimeError) as error:
        if name:
            emit(ExecutorRejected(timer_name(timer), name, error))
        return None
