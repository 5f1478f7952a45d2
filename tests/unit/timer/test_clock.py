"""`clock_of` and `checked_timer`."""

import time

import pytest

from rpcwheel.timer import ManualTimer, WheelTimer
from rpcwheel.timer.clock import checked_timer, clock_of


def test_the_clock_of_a_manual_timer_is_exact_to_the_nanosecond():
    with ManualTimer() as timer:
        now = clock_of(timer)
        timer.advance(0.1)
        assert now() == 100_000_000


def test_the_clock_of_other_timers_and_of_none_is_monotonic_ns():
    with WheelTimer() as timer:
        assert clock_of(timer) is time.monotonic_ns
    assert clock_of(None) is time.monotonic_ns


def test_checked_timer_returns_a_timer_or_none():
    with ManualTimer() as timer:
        assert checked_timer(timer) is timer
    assert checked_timer(None) is None


def test_checked_timer_raises_type_error_for_other_objects():
    for wrong in (1.0, "shared", object, ManualTimer.advance):
        with pytest.raises(TypeError, match=r"timer must be a WheelTimer.*or None for shared_tim"):
            checked_timer(wrong)
