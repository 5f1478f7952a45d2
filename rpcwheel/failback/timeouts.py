"""The timeouts of failback: a queue's, its pacers' and those of its looks at a journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpcwheel.durations import to_seconds
from rpcwheel.errors import TimerStopped
from rpcwheel.timer import ManualTimer, shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

TIMER_STOPPED = "its timer was stopped"


class Timeouts:
    """Calls functions later, on the timer of the user or on `shared_timer()`. Thread-safe."""

    def __init__(self, timer: Timer | None) -> None:
        """Set nothing yet. Without a timer, `shared_timer()` is used when it is first needed."""
        self.timer = checked_timer(timer)
        self.now_ns = clock_of(timer)
        self.is_manual = isinstance(timer, ManualTimer)

    @property
    def stopped(self) -> bool:
        """Whether the timer was stopped."""
        return self.timer is not None and getattr(self.timer, "stopped", False)

    def set(
        self,
        delay_ns: int,
        expired: Callable[[], object],
        stopped: Callable[[], object],
        label: str,
        *,
        limited: bool = False,
    ) -> Timeout:
        """Call a function after a delay.

        Args:
            delay_ns: The delay.
            expired: Called on the timer's thread; must not block.
            stopped: Called in place of it, on any thread, if the timer is stopped before.
            label: What is attempted, for the `repr` of the task.
            limited: Whether the `max_pending` of the timer applies: to a new call, which can be
                refused. Calls that were accepted must not be lost if the timer is full.

        Raises:
            TimerError: The timer was stopped, or is full and `limited` is set.
            RuntimeError: No thread can be started.
        """
        if self.stopped:  # a timer whose loop is closed would accept the timeout
            raise TimerStopped(TIMER_STOPPED)
        timer = shared_timer() if self.timer is None else self.timer
        submit: Callable[..., Timeout] = timer.new_timeout
        if not limited:  # a timer of another class may not have `resubmit`
            submit = getattr(timer, "resubmit", submit)
        return submit(_Task(expired, stopped, label), to_seconds(delay_ns))


@dataclass(slots=True, eq=False, repr=False)
class _Task:
    expired: Callable[[], object]
    stopped: Callable[[], object]
    label: str

    def run(self, _: Timeout) -> None:
        self.expired()

    def timer_stopped(self, _: Timeout) -> None:
        self.stopped()

    def __repr__(self) -> str:
        return f"retry of {self.label}"
