"""Which clock a component reads, and whether what it was given is a timer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .manual import ManualTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from .api import Timer

__all__ = ["checked_timer", "clock_of"]


def clock_of(timer: Timer | None) -> Callable[[], int]:
    """The clock by which a timer's times are measured, in nanoseconds.

    It is `time.monotonic_ns` itself, but for a `ManualTimer`, which has its own.
    """
    return timer._hub.now if isinstance(timer, ManualTimer) else time.monotonic_ns


def checked_timer(timer: Timer | None) -> Timer | None:
    """Give `timer` back.

    Raises:
        TypeError: It is neither a timer nor None.
    """
    if timer is not None and not callable(getattr(timer, "new_timeout", None)):
        raise TypeError(
            "timer must be a WheelTimer, AsyncWheelTimer or ManualTimer, or None for "
            f"shared_timer(), not {timer!r}"
        )
    return timer
