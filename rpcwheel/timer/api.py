"""The words of a timer: what a task is, what a timer tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from datetime import timedelta

    from rpcwheel.timer._base import Timeout

__all__ = ["LATENESS_BOUNDS_S", "Lateness", "TaskLike", "Timer", "TimerStats", "TimerTask"]


@runtime_checkable
class TimerTask(Protocol):
    """A task with a name and a state of its own; a plain callable `task(timeout)` does as well.

    If its class also has a method `timer_stopped(timeout)`, that is called when the timer ends
    while the task waits in it: on the thread that stops the timer, so it must not block. What it
    raises is reported as a task's error.
    """

    def run(self, timeout: Timeout, /) -> object:
        """Do the work; called once, when the timeout has expired."""


TaskLike = Callable[["Timeout"], object] | TimerTask
"""What `new_timeout` takes: a callable of one argument, or an object with `run(timeout)`."""


class Timer(Protocol):
    """What the components ask of a timer, and every driver gives."""

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called."""

    @property
    def pending(self) -> int:
        """How many timeouts wait."""

    def new_timeout(self, task: TaskLike, delay: float | timedelta, /) -> Timeout:
        """Run `task` once, not before `delay` seconds have passed."""


LATENESS_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the buckets of `Lateness`, in seconds; the last bucket has none."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How long after their deadlines tasks were started; `buckets` as `LATENESS_BOUNDS_S` says."""

    count: int
    sum_s: float
    max_s: float
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimerStats:
    """A timer's counts since it was made; `started == pending + fired + cancelled`.

    `cancelled` includes what `stop()` returned, `failed` the tasks that raised, `refused` the
    hand-offs that an executor would not take; both are among the fired. `rejected` were never
    started.
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
