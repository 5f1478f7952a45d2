"""One timeout for the next thing to come, whatever that is.

A timer may end while a timeout waits in it: it is stopped, its loop is closed, a task of another
hangs on its thread. It drops what waits without a word, so beside each timeout in a timer that was
given there is a second one, later, in `shared_timer()`, which rings if the first did not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of
from rpcwheel.timer.manual import ManualTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

__all__ = ["OneShotTimer"]

LEAST_SLACK_NS: Final = 100_000_000
"""A timer that is later than this, and than half the delay, is given up on: that is before a lease
ends that is renewed each third of it. A coarse wheel has ticks of as much."""


class OneShotTimer:
    """Rings when it is time. Its owner's lock is held for all of it but the ringing."""

    def __init__(
        self,
        timer: Timer | None,
        ring: Callable[[], object],
        refused: Callable[[TimerError], object],
    ) -> None:
        """Set nothing yet.

        Args:
            timer: None for `shared_timer()`, when it is first needed.
            ring: Called on the timer's thread, without the lock; must not block. It takes the lock,
                and calls `rang`. It may be called one extra time, on the shared timer's thread.
            refused: Told if the timer is full, or was stopped. The shared one goes on in its place.
        """
        self.now_ns = clock_of(timer)
        self._timer = checked_timer(timer)
        self._ring = ring
        self._refused = refused
        self._timeout: Timeout | None = None
        self._waits_in: Timer | None = None
        self._guard: Timeout | None = None
        self._wake_ns = self._late_ns = NEVER

    def wake(self, wake_ns: int) -> None:
        """Ring then, or before; `NEVER` changes nothing.

        What waits in a timer that has ended meanwhile waits in the shared one from now on.
        """
        if self._is_dropped():
            wake_ns = min(wake_ns, self._wake_ns)
        elif wake_ns >= self._wake_ns:
            return
        self.clear()
        delay_ns = max(0, wake_ns - self.now_ns())
        self._timeout = self._new_timeout(to_seconds(delay_ns))
        if self._timeout is not None:
            self._wake_ns = wake_ns
            slack_ns = max(LEAST_SLACK_NS, delay_ns // 2)
            self._late_ns = wake_ns + slack_ns
            self._guard = self._new_guard(self._timeout, to_seconds(delay_ns + slack_ns))

    def rang(self) -> None:
        """Take note that it has."""
        self.clear()  # the other one, too

    def clear(self) -> None:
        """Do not ring."""
        for timeout in (self._timeout, self._guard):
            if timeout is not None:
                timeout.cancel()
        self._timeout = self._guard = None
        self._wake_ns = self._late_ns = NEVER

    def _is_dropped(self) -> bool:
        """Whether it should ring, and will not."""
        if self._timeout is None:
            return False
        return self._late_ns < self.now_ns() or getattr(self._waits_in, "stopped", False)

    def _new_timeout(self, delay_s: float) -> Timeout | None:
        self._waits_in = None
        try:
            self._waits_in = shared_timer() if self._timer is None else self._timer
            return self._waits_in.new_timeout(self._expired, delay_s)
        except TimerError as error:
            self._refused(error)
        if isinstance(self._timer, ManualTimer):  # a clock of its own
            return None
        self._timer = None  # from now on: no instance may be lost as a timer is full
        try:
            self._waits_in = shared_timer()
            return self._waits_in.new_timeout(self._expired, delay_s)
        except TimerError:  # the program ends
            return None

    def _new_guard(self, timeout: Timeout, delay_s: float) -> Timeout | None:
        if self._timer is None or isinstance(self._timer, ManualTimer):
            return None
        try:
            return shared_timer().new_timeout(partial(self._missed, timeout), delay_s)
        except (TimerError, RuntimeError):  # the program ends, or there are no more threads
            return None

    def _expired(self, _: object) -> None:
        self._ring()

    def _missed(self, timeout: Timeout, _: object) -> None:
        """The timer has not rung. On the shared one's thread."""
        timeout.cancel()
        self._ring()
