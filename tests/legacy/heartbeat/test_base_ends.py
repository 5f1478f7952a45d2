"""The end of a heartbeat, races, and the user's code in it, in both worlds."""

import threading
import time

import pytest

from fixtures.heartbeat_twins import kinds
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.errors import TimerStopped, TooManyTimeouts
from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.observe.events import (
    HandOffRefused,
    HeartbeatMissed,
    ListenerFailed,
)
from rpcwheel.timer import ManualTimer, WheelTimer

ALIVE, DEAD, UNUSED = HeartbeatState.ALIVE, HeartbeatState.DEAD, HeartbeatState.UNUSED
CLOSED, SUSPECT, OFF = HeartbeatState.CLOSED, HeartbeatState.SUSPECT, HeartbeatState.OFF


# --- Ends and races ---


def test_a_channel_that_is_closed_detaches_itself(twin, asked, timer, manager):
    channel = twin.do(twin.channel, asked.target)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    twin.do(channel.close)
    assert (heartbeat.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())
    late = twin.do(manager.attach, channel)
    assert (late.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())


def test_detaching_forgets_it_on_the_channel_and_cancels_the_heartbeat_on_its_way(  # noqa: PLR0917
    twin, asked, channel, manager, timer, events
):
    asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: asked.checks)
    heartbeat.detach()
    heartbeat.detach()
    assert (heartbeat.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())
    assert wait_until(lambda: asked.given_up == 1)
    asked.answer.set()
    assert twin.call(channel) == b"x"
    assert (heartbeat.answered, heartbeat.misses, heartbeat.rtt) == (0, 0, None)
    assert timer.pending == 0
    assert HeartbeatMissed not in kinds(events)


def test_an_answer_that_comes_after_the_replacement_changes_nothing(
    twin, asked, channel, manager, timer
):
    slow = asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: len(asked.checks) == 1)
    asked.answer = threading.Event()
    assert twin.do(channel.replace, drain=None, force=True)
    timer.advance(20.1)  # the replacement is seen; the new connection is asked at once
    assert wait_until(lambda: len(asked.checks) == 2)
    slow.set()
    time.sleep(0.05)
    assert (heartbeat.sent, heartbeat.answered, heartbeat.last_read) == (2, 0, None)
    asked.answer.set()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert heartbeat.state is ALIVE


def test_detaching_closing_and_replacing_at_once_end_in_one_clean_state(
    twin, asked, manager, timer
):
    for _ in range(15):
        channel = twin.do(twin.channel, asked.target)
        heartbeat = twin.do(manager.attach, channel)
        twin.call(channel)
        run_threads(
            heartbeat.detach,
            heartbeat.beat,
            heartbeat.withdraw,
            lambda channel=channel: twin.do(channel.replace, force=True),
            lambda channel=channel: twin.do(channel.close),
            lambda: timer.advance(100.0),
        )
        assert wait_until(lambda heartbeat=heartbeat: heartbeat.state is CLOSED)
        assert wait_until(lambda: timer.pending == 0)
        assert manager.heartbeats == ()


def test_a_channel_that_its_user_drops_is_not_kept_alive(twin, asked, manager, timer):
    channel = twin.do(twin.channel, asked.target)
    heartbeat = twin.do(manager.attach, channel)
    twin.do(channel.close) if twin.name == "aio" else None
    del channel
    assert wait_until(lambda: heartbeat.orphaned)
    timer.advance(61)
    assert wait_until(lambda: heartbeat.state is CLOSED)
    assert (timer.pending, manager.heartbeats) == (0, ())


def test_a_timer_that_takes_nothing_is_told_by_attach(twin, asked, channel):
    with ManualTimer() as stopped:
        stopped.stop()
        manager = twin.do(twin.manager, stopped)
        with pytest.raises(TimerStopped):
            twin.do(manager.attach, channel)
        assert manager.heartbeats == ()
    with WheelTimer(max_pending=1) as full:
        full.new_timeout(print, 1000)
        manager = twin.do(twin.manager, full)
        with pytest.raises(TooManyTimeouts):
            twin.do(manager.attach, channel)
        assert manager.heartbeats == ()
        assert full.pending == 1


def test_a_timer_that_stops_ends_the_heartbeat_with_an_event(twin, asked, channel, events):
    timer = ManualTimer()
    manager = twin.do(twin.manager, timer)
    heartbeat = twin.do(manager.attach, channel)
    asked.answer = threading.Event()
    heartbeat.beat()
    assert wait_until(lambda: asked.checks)
    timer.stop()
    asked.answer.set()
    assert wait_until(lambda: heartbeat.state is CLOSED)
    assert wait_until(lambda: HandOffRefused in kinds(events))
    event = next(event for event in events if isinstance(event, HandOffRefused))
    assert event.task == f"heartbeat of {asked.target}"
    assert isinstance(event.error, TimerStopped)
    assert manager.heartbeats == ()


def test_a_timer_that_is_full_keeps_the_place_of_a_heartbeat(twin, asked):
    with WheelTimer(max_pending=1) as timer:
        channel = twin.do(twin.channel, asked.target, timer=timer)  # or it had another clock
        taken, real = [], channel.get_state

        def get_state():  # asked when the timeout has expired, and the next one is not set yet
            if not taken:
                taken.append(timer.new_timeout(print, 1000))
            return real()

        manager = twin.do(twin.manager, timer, interval=0.05)
        heartbeat = twin.do(manager.attach, channel)
        twin.call(channel)
        channel.get_state = get_state
        assert wait_until(lambda: heartbeat.answered >= 3)
        assert wait_until(lambda: timer.pending == 2)  # not while one is sent
        twin.do(manager.close)
        assert taken[0].cancel()
        assert wait_until(lambda: timer.pending == 0)
        twin.do(channel.close)


# --- The user's code ---


def test_listeners_are_told_in_order_and_one_that_raises_harms_nothing(
    twin, asked, channel, manager, events
):
    told = []
    heartbeat = twin.do(manager.attach, channel)

    def broken(*_):
        raise ValueError("my own")

    def listener(*args):
        told.append(args)

    heartbeat.add_listener(broken)
    heartbeat.add_listener(listener)
    for count in range(1, 4):
        heartbeat.beat()
        assert wait_until(lambda count=count: heartbeat.answered == count)
    assert wait_until(lambda: len(told) == 6)
    assert all(one is heartbeat for one, _, _ in told)
    assert [old for _, old, _ in told[1:]] == [new for _, _, new in told[:-1]]
    assert wait_until(lambda: kinds(events).count(ListenerFailed) == 6)
    heartbeat.remove_listener(listener)
    heartbeat.remove_listener(listener)
    heartbeat.detach()
    assert wait_until(lambda: kinds(events).count(ListenerFailed) == 7)
    assert len(told) == 6


@pytest.mark.parametrize("listener", [None, 5])
def test_a_listener_is_callable(twin, channel, manager, listener):
    heartbeat = twin.do(manager.attach, channel)
    with pytest.raises(TypeError, match="listener must be a plain function"):
        heartbeat.add_listener(listener)
