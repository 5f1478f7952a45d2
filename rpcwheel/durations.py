"""Seconds at the door, nanoseconds inside.

Users give float seconds or a `timedelta`; inside, every time is an integer of nanoseconds, because
floats lose a nanosecond after 104 days of uptime and stop adding small delays at all after some
more (CPython issue 145703). Each conversion of the package happens here, with one exception: the
timer's compiled front end repeats the first line of `to_ns` for plain floats, and hands everything
else to it.
"""

from __future__ import annotations

from datetime import timedelta

from rpcwheel.errors import ConfigurationError, short_repr

__all__ = ["MAX_NS", "NEVER", "Duration", "positive_ns", "to_ns", "to_seconds"]

Duration = float | timedelta
"""What users may give for a length of time: seconds, or a `timedelta`."""

NEVER = (1 << 63) - 1
"""The deadline of what is not to happen: later than any time (an infinite delay)."""

MAX_NS = 1 << 62
"""The longest finite time, about 146 years; longer ones saturate."""

_NS_PER_SECOND = 1_000_000_000


def to_ns(value: Duration, *, what: str = "delay") -> int:
    """Convert seconds or a `timedelta` to nanoseconds, to the nearest one.

    Args:
        value: Seconds (any real number) or a `timedelta`. Negative ones stay negative.
        what: The name of the argument, for the message.

    Returns:
        Nanoseconds; `NEVER` for infinity; at most `MAX_NS` (at least `-MAX_NS`) otherwise.

    Raises:
        TypeError: Not a number nor a `timedelta` (None, a string, a bool).
        ConfigurationError: NaN.
    """
    if isinstance(value, timedelta):
        whole = value // timedelta(microseconds=1) * 1_000
        return max(-MAX_NS, min(whole, MAX_NS))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{what} must be seconds (int or float) or a timedelta, not {short_repr(value)}"
        )
    if value != value:  # noqa: PLR0124 - the one value that differs from itself
        raise ConfigurationError(f"{what} is NaN; give seconds, or float('inf') for never")
    if value == float("inf"):
        return NEVER
    if abs(value) >= MAX_NS / _NS_PER_SECOND:
        return MAX_NS if value > 0 else -MAX_NS
    if isinstance(value, int):
        return value * _NS_PER_SECOND
    scaled = value * 1e9
    return int(scaled + 0.5) if scaled >= 0 else -int(0.5 - scaled)


def positive_ns(value: Duration, *, what: str) -> int:
    """As `to_ns`, for what must be finite and longer than nothing (a tick, an interval).

    Raises:
        TypeError: Not a number nor a `timedelta`.
        ConfigurationError: NaN, infinite, zero, negative, or shorter than a nanosecond.
    """
    ns = to_ns(value, what=what)
    if ns <= 0 or ns == NEVER:
        raise ConfigurationError(
            f"{what} must be a finite time above zero (at least 1 ns), not {short_repr(value)}"
        )
    return ns


def to_seconds(ns: int) -> float:
    """Convert nanoseconds to float seconds; `NEVER` is infinity."""
    return float("inf") if ns == NEVER else ns / 1e9
