"""What is no silence, what is passed by, and what is not touched, in both worlds."""

import threading
import time

import grpc
import pytest

from fixtures.heartbeat_twins import CHECK, NOT_SERVING, PUSH, SERVING, STRICT, kinds, starve
from fixtures.waiting import wait_until
from rpcwheel import CallPolicy, intercept_channel
from rpcwheel.aio import intercept_channel as aio_intercept_channel
from rpcwheel.heartbeat import HeartbeatState, MethodProbe, Verdict
from rpcwheel.observe.events import (
    ConnectionDead,
    ConnectionReplaced,
    HeartbeatMissed,
    ListenerFailed,
)

ALIVE, UNUSED, CLOSED = HeartbeatState.ALIVE, HeartbeatState.UNUSED, HeartbeatState.CLOSED
SUSPECT, DEAD = HeartbeatState.SUSPECT, HeartbeatState.DEAD


def test_unavailable_over_a_connection_that_is_there_condemns_nobody(  # noqa: PLR0917
    twin, asked, channel, manager, timer, events
):
    """A proxy says it of its upstream, and gRPC where call credentials can't be had."""
    asked.answer = grpc.StatusCode.UNAVAILABLE
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: timer.now > 400)
    assert (heartbeat.state, channel.number) == (SUSPECT, 1)
    assert heartbeat.misses >= 10
    assert ConnectionDead not in kinds(events)


def test_what_goes_wrong_on_our_own_side_condemns_nobody(  # noqa: PLR0917
    twin, asked, channel, manager, timer, events
):
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)

    def broken(method):
        raise ValueError("bad metadata")

    channel.heartbeat_call = broken
    starve(timer, heartbeat, until=lambda: timer.now > 400)
    assert (heartbeat.state, channel.number) == (SUSPECT, 1)
    assert wait_until(lambda: HeartbeatMissed in kinds(events))
    missed = next(event for event in events if isinstance(event, HeartbeatMissed))
    assert missed.answer == "ValueError"


def test_a_late_answer_counts(twin, asked, channel, manager, timer):
    slow = asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: len(asked.checks) == 1)
    asked.answer = threading.Event()
    timer.advance(20.1)
    assert wait_until(lambda: len(asked.checks) == 2)
    assert (heartbeat.state, heartbeat.misses) == (SUSPECT, 1)
    slow.set()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert (heartbeat.state, heartbeat.misses) == (ALIVE, 0)
    asked.answer.set()
    assert wait_until(lambda: heartbeat.answered == 2)


def test_older_ones_are_given_up_when_a_later_one_is_answered(twin, asked, channel, manager, timer):
    asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: len(asked.checks) == 1)
    asked.answer = SERVING
    timer.advance(20.1)
    assert wait_until(lambda: heartbeat.answered == 1)
    assert wait_until(lambda: asked.given_up == 1)
    assert (heartbeat.sent, heartbeat.state) == (2, ALIVE)


def test_a_heartbeat_that_fails_after_a_call_was_answered_is_harmless(
    twin, asked, channel, manager
):
    class Never(MethodProbe):
        def judge(self, response):
            return Verdict(alive=False)

    gate = asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel, probe=Never(CHECK))
    heartbeat.beat()
    assert wait_until(lambda: asked.checks)
    twin.call(channel)
    gate.set()
    assert wait_until(lambda: heartbeat.state is ALIVE)
    assert wait_until(lambda: not heartbeat._core.on_way)
    assert heartbeat.misses == 0


@pytest.mark.parametrize("verdict", [True, None, (True, None)])
def test_a_judge_that_gives_no_verdict_is_told_of_and_harms_nothing(  # noqa: PLR0917
    twin, asked, channel, manager, events, verdict
):
    class Careless(MethodProbe):
        def judge(self, response):
            return verdict

    heartbeat = twin.do(manager.attach, channel, probe=Careless(PUSH))
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert wait_until(lambda: ListenerFailed in kinds(events))
    failed = next(event for event in events if isinstance(event, ListenerFailed))
    assert "judge must return a rpcwheel.heartbeat.Verdict" in str(failed.error)
    assert heartbeat.state is ALIVE


def test_a_plain_channel_that_nobody_uses_is_not_connected(twin, asked, manager, timer):
    channel = twin.do(twin.plain, asked.target)
    heartbeat = twin.do(manager.attach, channel)
    for _ in range(10):
        timer.advance(60.0)
        time.sleep(0.005)
    assert (heartbeat.sent, heartbeat.state, asked.checks) == (0, UNUSED, [])
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: heartbeat.answered)
    assert heartbeat.state is ALIVE
    twin.do(channel.close)


def test_a_plain_channel_that_is_closed_is_attached_as_such(twin, asked, manager, timer):
    channel = twin.do(twin.plain, asked.target)
    twin.do(channel.close)
    heartbeat = twin.do(manager.attach, channel)
    assert (heartbeat.state, manager.heartbeats, timer.pending) == (CLOSED, (), 0)


def test_a_plain_channel_that_is_closed_later_is_detached(twin, asked, manager, timer):
    channel = twin.do(twin.plain, asked.target)
    heartbeat = twin.do(manager.attach, channel)
    twin.do(channel.close)
    timer.advance(121.0)
    assert wait_until(lambda: heartbeat.state is CLOSED)
    assert manager.heartbeats == ()


def test_interceptors_on_top_are_passed_by_and_the_connection_is_one(
    twin, asked, channel, manager, timer
):
    put = intercept_channel if twin.name == "sync" else aio_intercept_channel
    heartbeat = twin.do(manager.attach, twin.do(put, channel, CallPolicy(timeout=5.0)))
    assert twin.do(manager.attach, channel) is heartbeat
    assert heartbeat.connection is channel
    asked.answer = NOT_SERVING
    twin.call(channel)
    assert timer.pending == 1


def test_calls_that_only_wait_for_a_connection_are_not_ended(twin, asked, channel, timer):
    given = []
    real = channel.replace
    channel.replace = lambda reason, **options: given.append(options) or real(reason, **options)
    manager = twin.do(twin.manager, timer, drain=7.5, probe=STRICT)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    asked.answer = NOT_SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.state is SUSPECT)
    channel.get_state = lambda *_: grpc.ChannelConnectivity.TRANSIENT_FAILURE
    starve(timer, heartbeat, until=lambda: given)
    assert given[0] == {"drain": None}
    del channel.get_state
    twin.do(manager.close)
    asked.answer = SERVING


def test_a_death_is_told_before_the_replacement(  # noqa: PLR0917
    twin, asked, channel, timer, monkeypatch, slow_events
):
    monkeypatch.setattr("rpcwheel.heartbeat.sync.TOLD_S", 20.0)
    manager = twin.do(twin.manager, timer, probe=STRICT)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    asked.answer = NOT_SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.replaced)
    twin.do(manager.close)
    assert wait_until(lambda: ConnectionReplaced in kinds(slow_events))
    told = [kind for kind in kinds(slow_events) if kind in {ConnectionDead, ConnectionReplaced}]
    assert told[:2] == [ConnectionDead, ConnectionReplaced]
