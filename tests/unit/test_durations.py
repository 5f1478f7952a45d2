"""Conversion of durations."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.durations import MAX_NS, NEVER, positive_ns, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError


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


def test_a_wrong_type_is_refused_with_the_name_of_the_argument() -> None:
    for wrong in [None, "1", True, b"1", [1.0], 1j]:
        with pytest.raises(TypeError, match=r"interval must be seconds .* not "):
            to_ns(wrong, subject="interval")  # type: ignore[arg-type]


def test_nan_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"NaN; give seconds, or float\('inf'\)"):
        to_ns(float("nan"))


def test_a_tick_must_be_finite_and_above_zero() -> None:
    for bad in [0, -1.0, float("inf"), 1e-10, timedelta(0), float("nan")]:
        with pytest.raises(ConfigurationError, match="tick"):
            positive_ns(bad, subject="tick")
        assert positive_ns(1e-9, subject="tick") == 1


def test_a_long_value_is_shortened_in_the_message() -> None:
    for wrong in ("x" * 50_000, [1] * 50_000, -(10**5000)):
        with pytest.raises((TypeError, ConfigurationError)) as refused:
            positive_ns(wrong, subject="tick")  # type: ignore[arg-type]
        assert len(str(refused.value)) < 300


def test_to_seconds_reverses_to_ns() -> None:
    assert to_seconds(1_500_000_000) == 1.5
    assert to_seconds(NEVER) == float("inf")
