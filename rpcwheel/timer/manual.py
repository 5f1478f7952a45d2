"""A timer whose time is moved by hand: for tests, and for simulations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel.durations import MAX_NS, NEVER, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.timer.core import TimerCore

if TYPE_CHECKING:
    from datetime import timedelta

    from rpcwheel.timer._base import Timeout, TimerQueue

__all__ = ["ManualTimer"]


class ManualTimer(TimerCore):
    """A timer that starts at 0 seconds and moves only when told.

    Everything runs on the thread that calls `advance`, in the order of the due ticks; time stands
    at each tick while its tasks run, so what they start is due as exactly as in a world without
    delays.
    """

    def __init__(self, queue: TimerQueue | None = None) -> None:
        super().__init__(queue, name="manual-timer", manual=True)
        self._hub.armed_ns = 0

    @property
    def now(self) -> float:
        """Seconds since the timer was made."""
        return self._hub.manual_ns / 1e9

    def advance(self, seconds: float | timedelta) -> int:
        """Let time pass, and run what falls due, step by step.

        Args:
            seconds: How long; 0 runs what is due already.

        Returns:
            How many tasks ran.

        Raises:
            TypeError, ConfigurationError: Not a finite time of zero or more.
            RuntimeError: Called by a task of this timer.
        """
        step_ns = to_ns(seconds, what="seconds")
        if step_ns < 0 or step_ns == NEVER:
            raise ConfigurationError(f"seconds must be finite and not negative, not {seconds!r}")
        if self._running:
            raise RuntimeError(
                "advance() can't be called by a task: time is being advanced already"
            )
        hub, fired = self._hub, self._fired
        target_ns = min(hub.manual_ns + step_ns, MAX_NS)
        while not self._stopped:
            wake_ns = hub.queue.next_wake()
            if wake_ns > target_ns:
                break
            hub.manual_ns = max(hub.manual_ns, wake_ns)
            self._run_due(1)
        hub.manual_ns = target_ns
        self._run_due(1)
        return self._fired - fired

    def stop(self) -> list[Timeout]:
        """Stop for good. Idempotent.

        Returns:
            The timeouts not delivered, by deadline, all cancelled; they keep their tasks.

        Raises:
            RuntimeError: Called by a task of this timer.
        """
        self._forbid_inside_task()
        self._stopped = True
        return self._end()

    def __del__(self) -> None:
        """Let go of what waits: the collector would not find it in the compiled form."""
        if not getattr(self, "_stopped", True):
            self._stopped = True
            self._end()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _wake(self, deadline_ns: int) -> None:
        """Nobody sleeps: `advance` looks for itself."""
