"""One timeout for what comes next."""

import threading

import pytest

from fixtures.waiting import wait_until
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerStopped
from rpcwheel.registry.one_shot_timer import OneShotTimer
from rpcwheel.timer import WheelTimer, shared_timer

SECOND = 1_000_000_000


@pytest.fixture
def rung():
    return []


def made(timer, rung):
    def ring():
        rung.append(timer.now)
        alarm.rang()

    alarm = OneShotTimer(timer, ring, rung.append)
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
    alarm = OneShotTimer(own, lambda: rung.append("rang"), rung.append)
    alarm.wake(alarm.now_ns() + 1)
    assert wait_until(lambda: "rang" in rung)
    assert isinstance(rung[0], TimerStopped)
    alarm.rang()
    alarm.wake(alarm.now_ns() + 60 * SECOND)
    assert (len(rung), shared_timer().pending) == (2, 1)
    alarm.clear()
    assert shared_timer().pending == 0


def test_it_rings_though_the_timer_is_stopped_while_it_waits_there(rung):
    own = WheelTimer()
    alarm = OneShotTimer(own, lambda: rung.append("rang"), rung.append)
    alarm.wake(alarm.now_ns() + SECOND // 5)
    own.stop()
    assert wait_until(lambda: rung)
    alarm.rang()
    alarm.wake(alarm.now_ns() + 60 * SECOND)
    assert (rung[0], type(rung[1]), shared_timer().pending) == ("rang", TimerStopped, 1)
    alarm.clear()
    assert shared_timer().pending == 0


def test_it_rings_once_in_a_timer_that_works(rung):
    lock = threading.Lock()

    def ring():
        with lock:
            rung.append("rang")
            alarm.rang()

    with WheelTimer() as own:
        alarm = OneShotTimer(own, ring, rung.append)
        with lock:
            alarm.wake(alarm.now_ns() + 1)
            assert shared_timer().pending == 1
        assert wait_until(lambda: rung)
        assert wait_until(lambda: not shared_timer().pending)
        alarm.wake(alarm.now_ns() + 60 * SECOND)
        assert (own.pending, shared_timer().pending) == (1, 1)
        alarm.clear()
        assert (own.pending, shared_timer().pending, rung) == (0, 0, ["rang"])
