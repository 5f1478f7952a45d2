"""The heartbeat of one connection, in both worlds: real servers, time by hand."""

import re
import threading
import time

import grpc
import pytest

from fixtures.grpcio import VERSION
from fixtures.heartbeat_twins import NOT_SERVING, PUSH, SERVING, STRICT, kinds, settled, starve
from fixtures.waiting import wait_until
from rpcwheel.heartbeat import HealthProbe, HeartbeatState, MethodProbe
from rpcwheel.observe.events import (
    ConnectionAlive,
    ConnectionDead,
    ConnectionReplaced,
    HeartbeatMissed,
    ListenerFailed,
)

ALIVE, DEAD, UNUSED = HeartbeatState.ALIVE, HeartbeatState.DEAD, HeartbeatState.UNUSED
CLOSED, SUSPECT, OFF = HeartbeatState.CLOSED, HeartbeatState.SUSPECT, HeartbeatState.OFF


# --- When heartbeats are sent ---


def test_a_used_connection_is_asked_after_a_minute_of_silence(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    timer.advance(59.9)
    assert (heartbeat.sent, asked.checks) == (0, [])
    starve(timer, heartbeat, until=lambda: heartbeat.answered == 1)
    assert 60 < timer.now < 121
    assert asked.checks[0][1]["rpcwheel-heartbeat"] == "1"
    assert heartbeat.state is ALIVE
    assert (heartbeat.serving, heartbeat.misses, heartbeat.last_use) == (True, 0, 0.0)
    assert 0 <= heartbeat.rtt < 1.1
    assert 60 < heartbeat.last_write <= heartbeat.last_read <= timer.now


def test_a_busy_connection_is_never_asked(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    for _ in range(40):
        twin.call(channel)
        timer.advance(50.0)
    assert asked.calls == 40
    assert (heartbeat.sent, asked.checks) == (0, [])
    assert heartbeat.state is ALIVE


def test_an_unused_connection_is_left_alone(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    for _ in range(100):
        timer.advance(60.0)
    assert (heartbeat.sent, heartbeat.state, asked.checks) == (0, UNUSED, [])
    assert (
        heartbeat.last_read is heartbeat.last_write is heartbeat.last_use is heartbeat.rtt is None
    )
    assert timer.pending == 1


def test_a_connection_that_the_server_has_closed_is_not_made_again(
    twin, asked, channel, manager, timer
):
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    asked.stop()
    assert wait_until(lambda: twin.do(channel.is_idle))
    for _ in range(20):
        timer.advance(60.0)
        time.sleep(0.005)
    assert (heartbeat.sent, heartbeat.misses, heartbeat.state) == (0, 0, UNUSED)
    assert channel.number == 1


def test_a_thousand_attached_at_once_spread_over_the_interval(twin, asked, manager, timer):
    channels = [twin.do(twin.plain, asked.target) for _ in range(1000)]
    for channel in channels:
        twin.do(manager.attach, channel)
    assert timer.pending == 1000
    deadlines = sorted(heartbeat._timeout.deadline for heartbeat in manager.heartbeats)
    twin.do(manager.close)
    assert deadlines[0] > 60.0
    assert deadlines[-1] <= 120.6
    for tenth in range(10):  # about a hundred in each tenth of the interval
        low, high = 60 + 6 * tenth, 66 + 6 * tenth
        assert 40 <= sum(low <= at < high for at in deadlines) <= 180
    for channel in channels:
        twin.do(channel.close)


def test_a_heartbeat_can_be_asked_for_now(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    assert heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert heartbeat.state is ALIVE
    assert len(asked.checks) == 1


def test_switched_off_nothing_waits_and_nothing_is_asked(twin, asked, channel, timer):
    manager = twin.do(twin.manager, timer, interval=None)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    assert (heartbeat.state, timer.pending, heartbeat.beat()) == (OFF, 0, False)
    timer.advance(10_000)
    assert heartbeat.sent == 0
    twin.do(manager.close)
    assert heartbeat.state is CLOSED


def test_there_is_one_timeout_however_much_happens(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    for _ in range(30):
        timer.advance(45.0)
        heartbeat.beat()
        settled(timer, heartbeat)
        assert timer.pending == 1
    heartbeat.detach()
    assert timer.pending == 0


# --- Answers ---


@pytest.mark.parametrize("code", ["UNIMPLEMENTED", "INTERNAL", "PERMISSION_DENIED", "UNKNOWN"])
def test_any_status_of_the_server_s_is_an_answer(twin, asked, channel, manager, code):
    asked.answer = grpc.StatusCode[code]
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert (heartbeat.state, heartbeat.serving) == (ALIVE, None)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_what_a_client_makes_up_itself_is_no_answer(twin, asked, channel, manager, events, code):  # noqa: PLR0917
    asked.answer = grpc.StatusCode[code]
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.misses == 1)
    assert heartbeat.state is SUSPECT
    assert wait_until(lambda: HeartbeatMissed(channel.target, 1, 0.0, code) in events)


def test_a_server_that_does_not_serve_is_alive_unless_that_is_asked_for(
    twin, asked, channel, timer, events
):
    asked.answer = NOT_SERVING
    with_health = twin.do(twin.manager, timer)
    heartbeat = twin.do(with_health.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert (heartbeat.state, heartbeat.serving) == (ALIVE, False)
    twin.do(with_health.close)
    strict = twin.do(twin.manager, timer, probe=HealthProbe(require_serving=True))
    heartbeat = twin.do(strict.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.misses == 1)
    assert heartbeat.serving is False
    assert wait_until(lambda: HeartbeatMissed in kinds(events))
    assert next(e for e in events if isinstance(e, HeartbeatMissed)).answer == "NOT_SERVING"
    asked.answer = SERVING
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is ALIVE and heartbeat.serving)
    twin.do(strict.close)


def test_a_probe_of_the_user_s_is_called_and_may_raise(twin, asked, channel, manager, events):
    class Broken(MethodProbe):
        def judge(self, response):
            raise ValueError("my own")

    heartbeat = twin.do(manager.attach, channel, probe=Broken(PUSH, b"hello"))
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert asked.calls == 1
    assert wait_until(lambda: ListenerFailed in kinds(events))
    assert heartbeat.state is ALIVE


def test_a_heartbeat_nobody_answers_is_missed_when_its_time_is_over(
    twin, asked, channel, manager, timer
):
    asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: asked.checks)
    timer.advance(19.9)
    assert heartbeat.misses == 0
    timer.advance(0.2)
    assert wait_until(lambda: heartbeat.misses == 1)
    assert heartbeat.state is SUSPECT
    asked.answer.set()


# --- Dead ---


def test_a_dead_connection_is_replaced_asked_at_once_and_found_alive(  # noqa: PLR0917
    twin, asked, channel, manager, timer, events
):
    asked.answer = NOT_SERVING
    told = []
    heartbeat = twin.do(manager.attach, channel, probe=STRICT)
    heartbeat.add_listener(lambda *args: told.append(args))
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: heartbeat.state is SUSPECT)
    starve(timer, heartbeat, until=lambda: heartbeat.replaced)
    asked.answer = SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.state is ALIVE)
    assert 180 < timer.now < 205
    assert (channel.number, heartbeat.replaced) == (2, 1)
    assert twin.call(channel, b"again") == b"again"
    assert wait_until(lambda: kinds(events).count(ConnectionAlive) == 1)
    died = next(event for event in events if isinstance(event, ConnectionDead))
    assert died.silent_s > 180
    assert wait_until(lambda: ConnectionReplaced in kinds(events))
    replaced = next(event for event in events if isinstance(event, ConnectionReplaced))
    assert re.fullmatch(r"no answer to heartbeats for 18\d\.\d s", replaced.reason)
    assert wait_until(lambda: told and told[-1][2] is ALIVE)
    assert [(old, new) for _, old, new in told if DEAD in {old, new}] == [
        (SUSPECT, DEAD),
        (DEAD, ALIVE),
    ]


def test_what_drain_says_is_passed_on_with_the_replacement(twin, asked, channel, timer):
    given = []
    real = channel.replace
    asked.answer = NOT_SERVING
    channel.replace = lambda reason, **options: given.append(options) or real(reason, **options)
    manager = twin.do(twin.manager, timer, drain=7.5)
    heartbeat = twin.do(manager.attach, channel, probe=STRICT)
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: given)
    assert given[0] == {"drain": 7.5}
    twin.do(manager.close)


def test_a_channel_that_can_t_connect_again_is_told_and_tried_again(  # noqa: PLR0917
    twin, asked, channel, manager, timer, events, caplog
):
    asked.answer = NOT_SERVING
    tried = []

    def fail(reason, **_):
        tried.append((timer.now, threading.current_thread()))
        raise OSError("no more sockets")

    channel.replace = fail
    heartbeat = twin.do(manager.attach, channel, probe=STRICT)
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: len(tried) == 3)
    assert heartbeat.state is DEAD
    assert tried[2][0] - tried[1][0] >= 15  # a tick of 20, give or take when each was late
    assert threading.current_thread() not in {thread for _, thread in tried}
    assert wait_until(lambda: ListenerFailed in kinds(events))
    assert kinds(events).count(ConnectionDead) == 1
    caplog.clear()  # an error keeps its frames, and they the channel
    events.clear()


def test_a_withdrawn_target_is_neither_asked_nor_replaced(twin, asked, channel, manager, timer):
    asked.answer = NOT_SERVING
    heartbeat = twin.do(manager.attach, channel, probe=STRICT)
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: heartbeat.state is SUSPECT)
    heartbeat.withdraw()
    sent = heartbeat.sent
    assert (heartbeat.state, timer.pending) == (HeartbeatState.WITHDRAWN, 0)
    timer.advance(10_000)
    assert (heartbeat.sent, channel.number) == (sent, 1)
    heartbeat.withdraw()
    heartbeat.detach()
    assert heartbeat.state is CLOSED


def test_a_plain_channel_is_asked_each_interval_and_only_told_dead(
    twin, asked, manager, timer, events
):
    channel = twin.do(twin.plain, asked.target)
    heartbeat = twin.do(manager.attach, channel, probe=STRICT)
    known = VERSION >= (1, 83) or not isinstance(channel, grpc.aio.Channel)
    assert heartbeat.target == (asked.target if known else repr(channel))
    assert heartbeat.connection is channel
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: heartbeat.answered == 3)
    assert timer.now > 180
    asked.answer = NOT_SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.state is DEAD)
    began, sent = timer.now, heartbeat.sent
    starve(timer, heartbeat, until=lambda: timer.now > began + 500)
    assert heartbeat.sent > sent + 15
    assert wait_until(lambda: ConnectionDead in kinds(events))
    assert kinds(events).count(ConnectionDead) == 1
    assert not {ConnectionReplaced, ListenerFailed} & set(kinds(events))
    asked.answer = SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.state is ALIVE)
    assert heartbeat.last_use is None
    twin.do(channel.close)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is CLOSED)
