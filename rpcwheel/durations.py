"""Conversion of durations: seconds in the public API, nanoseconds inside.

Users pass float seconds or a `timedelta`. Inside, each time is an integer of nanoseconds, because
floats lose a nanosecond after 104 days of uptime, and later ignore small delays (CPython issue
145703). All conversions are here, with one exception: `timer/_base.py` repeats the conversion of
plain floats, because a call would cost too much there.
"""

from __future__ import annotations

from datetime import timedelta

from rpcwheel.errors import ConfigurationError, short_repr

__all__ = ["MAX_NS", "NEVER", "Duration", "positive_ns", "to_ns", "to_seconds"]

Duration = float | timedelta
"""A length of time in the public API: seconds, or a `timedelta`."""

NEVER = (1 << 63) - 1
"""An infinite delay, and its deadline: later than any other time."""

MAX_NS = 1 << 62
"""The longest finite time, about 146 years; longer ones saturate."""

_NS_PER_SECOND = 1_000_000_000


def to_ns(value: Duration, *, subject: str = "delay") -> int:
    """Convert seconds or a `timedelta` to nanoseconds, to the nearest one.

    Args:
        value: Seconds (any real number) or a `timedelta`. Negative ones stay negative.
        subject: The subject of the error message: the name of the argument.

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
            f"{subject} must be seconds (int or float) or a timedelta, not {short_repr(value)}"
        )
    if value != value:  # noqa: PLR0124 - the one value that differs from itself
        raise ConfigurationError(f"{subject} is NaN; give seconds, or float('inf') for never")
    if value == float("inf"):
        return NEVER
    if abs(value) >= MAX_NS / _NS_PER_SECOND:
        return MAX_NS if value > 0 else -MAX_NS
    if isinstance(value, int):
        return value * _NS_PER_SECOND
    scaled = value * 1e9
    return int(scaled + 0.5) if scaled >= 0 else -int(0.5 - scaled)


def positive_ns(value: Duration, *, subject: str) -> int:
    """Convert as `to_ns`, for a time that must be finite and above zero (a tick, an interval).

    Raises:
        TypeError: Not a number nor a `timedelta`.
        ConfigurationError: NaN, infinite, zero, negative, or shorter than a nanosecond.
    """
    ns = to_ns(value, subject=subject)
    if ns <= 0 or ns == NEVER:
        raise ConfigurationError(
            f"{subject} must be a finite time above zero (at least 1 ns), not {short_repr(value)}"
        )
    return ns


def to_seconds(ns: int) -> float:
    """Convert nanoseconds to float seconds; `NEVER` is infinity."""
    return float("inf") if ns == NEVER else ns / 1e9
