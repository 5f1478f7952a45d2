"""One timeout for what comes next."""

import pytest

from fixtures.timers import eventually
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerStopped
from rpcwheel.registry.alarm import Alarm
from rpcwheel.timer import ManualTimer, WheelTimer, shared_timer

SECOND = 1_000_000_000


@pytest.fixture
def rung():
    return []


def made(timer, rung):
    def ring():
        rung.append(timer.now)
        alarm.rang()

    alarm = Alarm(timer, ring, rung.append)
    return alarm


def test_it_rings_at_the_earliest_time_it_was_given(timer, rung):
    alarm = made(timer, rung)
    for seconds in (3, 1, 2):
        alarm.wake(seconds * SECOND)
        assert timer.pending == 1
    timer.advance(5)
    assert (rung, timer.pending) == ([1.0], 0)
    alarm.wake(2 * SECOND)  # long ago
    timer.advance(1)
    assert len(rung) == 2


def test_never_is_no_time_and_clearing_leaves_nothing(timer, rung):
    alarm = made(timer, rung)
    alarm.wake(NEVER)
    assert timer.pending == 0
    alarm.wake(SECOND)
    alarm.clear()
    alarm.clear()
    timer.advance(2)
    assert (rung, timer.pending) == ([], 0)


def test_the_shared_timer_takes_the_place_of_one_that_was_stopped(rung):
    with WheelTimer() as own:
        pass
    alarm = Alarm(own, lambda: rung.append("rang"), rung.append)
    alarm.wake(alarm.now_ns() + 1)
    assert eventually(lambda: "rang" in rung)
    assert isinstance(rung[0], TimerStopped)
    alarm.rang()
    alarm.wake(alarm.now_ns() + 60 * SECOND)
    assert (len(rung), shared_timer().pending) == (2, 1)
    alarm.clear()
    assert shared_timer().pending == 0


def test_nothing_takes_the_place_of_a_manual_timer(rung):
    timer = ManualTimer()
    timer.stop()
    alarm = made(timer, rung)
    alarm.wake(SECOND)
    assert isinstance(rung[0], TimerStopped)
    assert shared_timer().pending == 0


def test_a_timer_is_wanted(rung):
    with pytest.raises(TypeError, match="timer must be"):
        made(5, rung)
