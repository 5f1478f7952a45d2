"""One timeout for the next thing to come, whatever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of
from rpcwheel.timer.manual import ManualTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

__all__ = ["Alarm"]


class Alarm:
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
                and calls `rang`.
            refused: Told if the timer is full, or was stopped. The shared one goes on in its place.
        """
        self.now_ns = clock_of(timer)
        self._timer = checked_timer(timer)
        self._ring = ring
        self._refused = refused
        self._timeout: Timeout | None = None
        self._wake_ns = NEVER

    def wake(self, wake_ns: int) -> None:
        """Ring then, or before; `NEVER` changes nothing."""
        if wake_ns >= self._wake_ns:
            return
        self.clear()
        self._timeout = self._new_timeout(to_seconds(max(0, wake_ns - self.now_ns())))
        if self._timeout is not None:
            self._wake_ns = wake_ns

    def rang(self) -> None:
        """Take note that it has."""
        self._timeout, self._wake_ns = None, NEVER

    def clear(self) -> None:
        """Do not ring."""
        if self._timeout is not None:
            self._timeout.cancel()
        self.rang()

    def _new_timeout(self, delay_s: float) -> Timeout | None:
        try:
            timer = shared_timer() if self._timer is None else self._timer
            return timer.new_timeout(self._expired, delay_s)
        except TimerError as error:
            self._refused(error)
        if isinstance(self._timer, ManualTimer):  # a clock of its own
            return None
        self._timer = None  # from now on: no instance may be lost as a timer is full
        try:
            return shared_timer().new_timeout(self._expired, delay_s)
        except TimerError:  # the program ends
            return None

    def _expired(self, _: object) -> None:
        self._ring()
