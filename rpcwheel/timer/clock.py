"""The clock of a timer, and the check of a `timer=` argument."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .manual import ManualTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from .api import Timer

__all__ = ["checked_timer", "clock_of", "wall_clock_of"]


def clock_of(timer: Timer | None) -> Callable[[], int]:
    """Return the nanosecond clock of a timer: `time.monotonic_ns`, or that of a `ManualTimer`."""
    return timer._timer_state.now if isinstance(timer, ManualTimer) else time.monotonic_ns


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
            f"shared_timer(), not {timer!r}"
        )
    return timer
