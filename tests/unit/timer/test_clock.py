"""`clock_of`."""

import time

from rpcwheel.timer import ManualTimer, WheelTimer
from rpcwheel.timer.manual import clock_of


def test_the_clock_of_a_manual_timer_is_exact_to_the_nanosecond():
    with ManualTimer() as timer:
        now = clock_of(timer)
        timer.advance(0.1)
        assert now() == 100_000_000


def test_the_clock_of_other_timers_and_of_none_is_monotonic_ns():
    with WheelTimer() as timer:
        assert clock_of(timer) is time.monotonic_ns
    assert clock_of(None) is time.monotonic_ns
