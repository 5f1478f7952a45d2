"""One timeout for the next thing that a component has to do."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import TimerError, TimerStopped
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

__all__ = ["OneShotTimer"]


class OneShotTimer:
    """Calls a function at the earliest of the times that it is given.

    The owner's lock is held for all methods; the functions are called without it, unless it says
    so. A user's timer that is full is replaced by `shared_timer()` for that one timeout, so that no
    lease is lost. One that was stopped is not replaced: it is reported once, and nothing is called
    any more.
    """

    def __init__(
        self,
        timer: Timer | None,
        expired: Callable[[], object],
        refused: Callable[[TimerError], object] | None = None,
    ) -> None:
        """Set nothing yet.

        Args:
            timer: None for `shared_timer()`, when it is first needed.
            expired: Called on the timer's thread; must not block. It takes the lock, and calls
                `clear`.
            refused: Called if the timer is full or stopped, perhaps under the lock; must not block.
                None: not reported.
        """
        self.now_ns = clock_of(timer)
        self._timer = checked_timer(timer)
        self._expired = expired
        self._refused = refused or (lambda _: None)
        self._timeout: Timeout | None = None
        self._wake_ns = NEVER
        self._is_stopped = False

    def wake(self, wake_ns: int) -> None:
        """Call the function then, or earlier; `NEVER` changes nothing."""
        if wake_ns >= self._wake_ns or self._is_stopped:
            return
        self.clear()
        delay_s = to_seconds(max(0, wake_ns - self.now_ns()))
        try:
            timer = shared_timer() if self._timer is None else self._timer
            if timer.stopped:  # one whose loop is closed would take the timeout
                self._stopped()
                return
            self._timeout = timer.new_timeout(self, delay_s)
        except TimerStopped:
            self._stopped()
        except TimerError as error:
            self._refused(error)
            with suppress(TimerError):  # the program ends
                self._timeout = shared_timer().new_timeout(self, delay_s)
        if self._timeout is not None:
            self._wake_ns = wake_ns

    def set(self, wake_ns: int) -> None:
        """Call the function then, and not earlier; `NEVER`: do not call it."""
        if wake_ns != self._wake_ns:
            self.clear()
            self.wake(wake_ns)

    def clear(self) -> None:
        """Do not call the function. When it is called, it does this first."""
        if self._timeout is not None:
            self._timeout.cancel()
        self._timeout, self._wake_ns = None, NEVER

    # As a task of the timer

    def run(self, _: Timeout) -> None:
        """The timeout has expired."""
        self._expired()

    def timer_stopped(self, _: Timeout) -> None:
        """The timer was stopped while the timeout waited in it."""
        self._stopped()

    def _stopped(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._refused(
                TimerStopped(
                    "the timer was stopped, so nothing is renewed, retried or refreshed any more; "
                    "give a timer that outlives this registry, or none"
                )
            )
