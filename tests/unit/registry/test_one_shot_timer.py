"""One timeout for the next thing that a component has to do."""

import pytest

from fixtures.waiting import wait_until
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerStopped, TooManyTimeouts
from rpcwheel.registry.one_shot_timer import OneShotTimer
from rpcwheel.timer import WheelTimer, shared_timer

SECOND = 1_000_000_000


@pytest.fixture
def rung():
    return []


def made(timer, rung):
    return OneShotTimer(timer, lambda: rung.append(timer.now))


def test_the_callback_is_called_at_the_earliest_time(timer, rung):
    alarm = made(timer, rung)
    for seconds in (3, 1, 2):
        alarm.wake(seconds * SECOND)
        assert timer.pending == 1
    timer.advance(5)
    assert (rung, timer.pending) == ([1.0], 0)
    alarm.wake(2 * SECOND)  # long ago
    timer.advance(1)
    assert len(rung) == 2


def test_never_and_clear_leave_no_timeout(timer, rung):
    alarm = made(timer, rung)
    alarm.wake(NEVER)
    assert timer.pending == 0
    alarm.wake(SECOND)
    alarm.clear()
    alarm.clear()
    timer.advance(2)
    assert (rung, timer.pending) == ([], 0)


def test_only_the_first_start_adds_a_timeout(timer, rung):
    alarm = made(timer, rung)
    for _ in range(2):
        alarm.start()
    assert (timer.stats().started, timer.pending) == (1, 0)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_stopped_timer_is_reported_once_and_the_callback_is_not_called(rung, events, is_waiting):
    own, of_others = WheelTimer(), shared_timer().pending
    alarm = OneShotTimer(own, lambda: rung.append("rang"), "memory://", "renew")
    if is_waiting:
        alarm.wake(alarm.now_ns() + 60 * SECOND)
    own.stop()
    if not is_waiting:
        alarm.wake(alarm.now_ns() + 1)
    assert wait_until(lambda: events)
    alarm.wake(alarm.now_ns() + 1)
    assert (rung, len(events)) == ([], 1)
    assert shared_timer().pending <= of_others
    (failed,) = events
    assert (failed.registry, failed.request, failed.delay_s) == ("memory://", "renew", None)
    assert type(failed.error) is TimerStopped


def test_a_timeout_that_a_full_timer_refuses_waits_in_the_shared_timer(rung, events):
    with WheelTimer(max_pending=1) as own:
        own.new_timeout(lambda _: None, 60.0)
        alarm = OneShotTimer(own, lambda: rung.append("rang"), "memory://")
        alarm.wake(alarm.now_ns() + 1)
        assert wait_until(lambda: "rang" in rung)
    assert wait_until(lambda: [type(one.error) for one in events] == [TooManyTimeouts])
