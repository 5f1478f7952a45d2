"""The types of a timer's interface: tasks, and the counts of a timer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from datetime import timedelta

    from rpcwheel.timer._base import Timeout

__all__ = [
    "LATENESS_BOUNDS_S",
    "Lateness",
    "TaskLike",
    "Timer",
    "TimerStats",
    "TimerStatus",
    "TimerTask",
]


@runtime_checkable
class TimerTask(Protocol):
    """A task as an object; a callable `task(timeout)` is a task too.

    Two optional methods of its class are called if the task will not run: `timer_stopped(timeout)`
    when the timer stops while the task is pending, on the thread that stops it, and
    `refused(timeout, error)` when the timer's executor did not accept the task. They must not
    block. Their exceptions are reported as those of tasks.
    """

    def run(self, timeout: Timeout, /) -> object:
        """Run the task; called once, when the timeout has expired."""


TaskLike = Callable[["Timeout"], object] | TimerTask
"""A callable of one argument, or an object with `run(timeout)`."""


class Timer(Protocol):
    """The interface of a timer that other packages of rpcwheel use."""

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called."""

    @property
    def pending(self) -> int:
        """The number of pending timeouts."""

    def new_timeout(self, task: TaskLike, delay: float | timedelta, /) -> Timeout:
        """Run `task` once, not before `delay` seconds have passed."""


LATENESS_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the buckets of `Lateness`, in seconds; the last bucket has none."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """A histogram of the times between deadlines and starts of tasks."""

    count: int
    sum_s: float
    max_s: float
    buckets: tuple[int, ...]
    """The counts of the buckets of `LATENESS_BOUNDS_S`."""


@dataclass(frozen=True, slots=True)
class TimerStats:
    """A timer's counts since its creation or fork; `started == pending + fired + cancelled`.

    `cancelled` includes the timeouts that `stop()` returned. `failed` counts tasks that raised,
    `refused` tasks that the executor did not accept; `fired` includes both. `rejected` counts calls
    of `new_timeout` that raised.
    """

    pending: int
    started: int
    fired: int
    cancelled: int
    rejected: int
    failed: int
    refused: int
    wakeups: int
    lateness: Lateness
    slowest_task: str | None
    slowest_task_s: float


LATE_S: Final = 0.1
"""A task is late if it starts so much after its deadline. One of `LATENESS_BOUNDS_S`."""

LATE_SHARE: Final = 0.01
"""The share of late tasks from which a timer has a problem."""


@dataclass(frozen=True, slots=True)
class TimerStatus:
    """A timer."""

    name: str
    queue: str
    """The class of its queue."""
    stats: TimerStats
    late_s: float
    """By how much its next wake-up is overdue now."""
    problem: str
    """What is wrong with it; "" if nothing is."""
