"""Conversion of durations."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.durations import MAX_NS, NEVER, to_ns, to_seconds


@given(st.floats(0, 4e9))
def test_seconds_become_the_nearest_nanosecond(seconds: float) -> None:
    assert abs(to_ns(seconds) - Fraction(seconds) * 10**9) <= max(1, seconds * 2**-52 * 1e9)


@given(st.integers(-(10**9), 10**9))
def test_whole_seconds_and_whole_microseconds_are_exact(number: int) -> None:
    assert to_ns(number) == number * 10**9
    assert to_ns(timedelta(microseconds=number)) == number * 1000


def test_negative_times_are_rounded_as_positive_ones() -> None:
    for seconds in [0.3, 0.1, 2.675, 1e-9, 1.5]:
        assert to_ns(-seconds) == -to_ns(seconds)


def test_infinity_is_never_and_longer_times_are_max_ns() -> None:
    assert to_ns(float("inf")) == NEVER
    assert to_ns(1e300) == MAX_NS
    assert to_ns(10**30) == MAX_NS
    assert to_ns(timedelta.max) == MAX_NS
    assert to_ns(float("-inf")) == to_ns(-1e300) == to_ns(timedelta.min) == -MAX_NS
    assert MAX_NS < NEVER


def test_to_seconds_reverses_to_ns() -> None:
    assert to_seconds(1_500_000_000) == 1.5
    assert to_seconds(NEVER) == float("inf")
