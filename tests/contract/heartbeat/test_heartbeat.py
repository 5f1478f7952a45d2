"""The heartbeat of one connection, in both worlds: real servers, manual time."""

import re
import threading

import grpc
import pytest

from fixtures.grpcio import VERSION
from fixtures.heartbeat_twins import (
    CHECK,
    IN_AIO,
    IN_SYNC,
    NOT_SERVING,
    PUSH,
    SERVING,
    STRICT,
    advance,
    has_unanswered,
    kinds,
    settled,
    starve,
)
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel import CallPolicy, intercept_channel
from rpcwheel.aio import intercept_channel as aio_intercept_channel
from rpcwheel.errors import TimerStopped, TooManyTimeouts
from rpcwheel.events import (
    CallbackFailed,
    ConnectionAlive,
    ConnectionDead,
    ConnectionReplaced,
    ExecutorRejected,
    HeartbeatMissed,
)
from rpcwheel.heartbeat import HealthProbe, HeartbeatState, MethodProbe, ProbeResult
from rpcwheel.timer import ManualTimer, WheelTimer

ALIVE, DEAD, UNUSED = HeartbeatState.ALIVE, HeartbeatState.DEAD, HeartbeatState.UNUSED
CLOSED, SUSPECT, OFF = HeartbeatState.CLOSED, HeartbeatState.SUSPECT, HeartbeatState.OFF


# --- What is known of it -------------------------------------------------------------------------

KNOWN = (
    *("target", "state", "last_read", "last_write", "last_use", "rtt", "misses", "sent"),
    *("answered", "replaced", "serving"),
)


@IN_SYNC
def test_its_attributes_say_all_there_is_to_know(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    assert {name: getattr(heartbeat, name) for name in KNOWN} == {
        **dict.fromkeys(KNOWN, None),
        **dict.fromkeys(["misses", "sent", "answered", "replaced"], 0),
        "target": asked.target,
        "state": "unused",
    }
    timer.advance(2.5)
    twin.call(channel)
    timer.advance(1.0)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert {name: getattr(heartbeat, name) for name in KNOWN} == {
        "target": asked.target,
        "state": "alive",
        "last_read": 3.5,
        "last_write": 3.5,
        "last_use": 2.5,
        "rtt": 0.0,
        "misses": 0,
        "sent": 1,
        "answered": 1,
        "replaced": 0,
        "serving": True,
    }
    assert repr(heartbeat) == f"<Heartbeat of {asked.target}: alive>"
    for name in KNOWN[1:]:
        with pytest.raises(AttributeError):
            setattr(heartbeat, name, 1)


# --- When heartbeats are sent --------------------------------------------------------------------


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


@IN_AIO
def test_a_busy_connection_is_never_asked(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    for _ in range(40):
        twin.call(channel)
        timer.advance(50.0)
    assert asked.calls == 40
    assert (heartbeat.sent, asked.checks) == (0, [])
    assert heartbeat.state is ALIVE


@IN_SYNC
def test_an_unused_connection_is_left_alone(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    for _ in range(100):
        timer.advance(60.0)
    assert (heartbeat.sent, heartbeat.state, asked.checks) == (0, UNUSED, [])
    assert (
        heartbeat.last_read is heartbeat.last_write is heartbeat.last_use is heartbeat.rtt is None
    )
    assert timer.pending == 1


@IN_AIO
def test_a_connection_that_the_server_has_closed_is_not_made_again(
    twin, asked, channel, manager, timer
):
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    asked.stop()
    assert wait_until(lambda: twin.do(channel.is_idle))
    for _ in range(20):
        advance(timer, 60.0)
    assert (heartbeat.sent, heartbeat.misses, heartbeat.state) == (0, 0, UNUSED)
    assert channel.number == 1


@IN_SYNC
def test_a_plain_channel_that_nobody_uses_is_not_connected(twin, asked, manager, timer):
    channel = twin.do(twin.plain, asked.target)
    heartbeat = twin.do(manager.attach, channel)
    for _ in range(10):
        advance(timer, 60.0)
    assert (heartbeat.sent, heartbeat.state, asked.checks) == (0, UNUSED, [])
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: heartbeat.answered)
    assert heartbeat.state is ALIVE
    twin.do(channel.close)


def test_a_heartbeat_can_be_asked_for_now(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    assert heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert heartbeat.state is ALIVE
    assert len(asked.checks) == 1


@IN_AIO
def test_switched_off_nothing_waits_and_nothing_is_asked(twin, asked, channel, timer):
    manager = twin.do(twin.manager, timer, interval=None)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    assert (heartbeat.state, timer.pending, heartbeat.beat()) == (OFF, 0, False)
    timer.advance(10_000)
    assert heartbeat.sent == 0
    twin.do(manager.close)
    assert heartbeat.state is CLOSED


@IN_SYNC
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


# --- Answers -------------------------------------------------------------------------------------


@IN_AIO
def test_any_status_of_the_servers_is_an_answer(twin, asked, channel, manager):
    heartbeat = twin.do(manager.attach, channel)
    for count, code in enumerate(("UNIMPLEMENTED", "INTERNAL", "PERMISSION_DENIED", "UNKNOWN"), 1):
        asked.answer = grpc.StatusCode[code]
        assert wait_until(heartbeat.beat)
        assert wait_until(lambda count=count: heartbeat.answered == count)
        assert (heartbeat.state, heartbeat.serving) == (ALIVE, None), code


@IN_SYNC
def test_a_status_that_a_client_makes_up_itself_is_no_answer(twin, asked, channel, timer, events):
    for code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
        asked.answer = grpc.StatusCode[code]
        manager = twin.do(twin.manager, timer)
        heartbeat = twin.do(manager.attach, channel)
        heartbeat.beat()
        assert wait_until(lambda heartbeat=heartbeat: heartbeat.misses == 1)
        assert heartbeat.state is SUSPECT
        missed = HeartbeatMissed(channel.target, 1, 0.0, code)
        assert wait_until(lambda missed=missed: missed in events)
        twin.do(manager.close)


@IN_AIO
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
    assert wait_until(lambda: CallbackFailed in kinds(events))
    assert heartbeat.state is ALIVE


def test_a_heartbeat_that_is_not_answered_within_a_tick_is_missed(
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


@IN_SYNC
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


def test_older_heartbeats_are_cancelled_when_a_later_one_is_answered(
    twin, asked, channel, manager, timer
):
    asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: len(asked.checks) == 1)
    asked.answer = SERVING
    timer.advance(20.1)
    assert wait_until(lambda: heartbeat.answered == 1)
    assert wait_until(lambda: asked.given_up == 1)
    assert (heartbeat.sent, heartbeat.state) == (2, ALIVE)


@IN_AIO
def test_a_heartbeat_that_fails_after_a_call_was_answered_is_harmless(
    twin, asked, channel, manager
):
    class Never(MethodProbe):
        def judge(self, response):
            return ProbeResult(alive=False)

    gate = asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel, probe=Never(CHECK))
    heartbeat.beat()
    assert wait_until(lambda: asked.checks)
    twin.call(channel)
    gate.set()
    assert wait_until(lambda: heartbeat.state is ALIVE)
    assert wait_until(lambda: not has_unanswered(heartbeat))
    assert heartbeat.misses == 0


@IN_SYNC
def test_a_judge_that_gives_no_verdict_is_reported_and_harms_nothing(
    twin, asked, channel, manager, events
):
    class Careless(MethodProbe):
        verdict = None

        def judge(self, response):
            return self.verdict

    probe = Careless(PUSH)
    heartbeat = twin.do(manager.attach, channel, probe=probe)
    for count, probe.verdict in enumerate((True, None, (True, None)), 1):
        assert wait_until(heartbeat.beat)
        assert wait_until(lambda count=count: heartbeat.answered == count)
        assert wait_until(lambda count=count: kinds(events).count(CallbackFailed) == count)
    failed = next(event for event in events if isinstance(event, CallbackFailed))
    assert "judge must return a ProbeResult" in str(failed.error)
    assert heartbeat.state is ALIVE


# --- Dead ----------------------------------------------------------------------------------------


def test_a_dead_connection_is_replaced_asked_at_once_and_found_alive(
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


@IN_SYNC
def test_drain_is_passed_on_to_the_replacement(twin, asked, channel, timer):
    given = []
    real = channel.reconnect
    asked.answer = NOT_SERVING
    channel.reconnect = lambda reason, **options: given.append(options) or real(reason, **options)
    manager = twin.do(twin.manager, timer, drain_timeout=7.5)
    heartbeat = twin.do(manager.attach, channel, probe=STRICT)
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: given)
    assert given[0] == {"drain_timeout": 7.5}
    twin.do(manager.close)


def test_a_replacement_that_fails_is_reported_and_tried_again(
    twin, asked, channel, manager, timer, events, caplog
):
    asked.answer = NOT_SERVING
    tried = []

    def fail(reason, **_):
        tried.append((timer.now, threading.current_thread()))
        raise OSError("no more sockets")

    channel.reconnect = fail
    heartbeat = twin.do(manager.attach, channel, probe=STRICT)
    twin.call(channel)
    starve(timer, heartbeat, until=lambda: len(tried) == 3)
    assert heartbeat.state is DEAD
    assert tried[2][0] - tried[1][0] >= 15  # a tick of 20, give or take when each was late
    assert threading.current_thread() not in {thread for _, thread in tried}
    assert wait_until(lambda: CallbackFailed in kinds(events))
    assert kinds(events).count(ConnectionDead) == 1
    caplog.clear()  # an error keeps its frames, and they the channel
    events.clear()


@IN_AIO
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


def test_a_plain_channel_is_reported_dead_and_not_replaced(twin, asked, manager, timer, events):
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
    assert not {ConnectionReplaced, CallbackFailed} & set(kinds(events))
    asked.answer = SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.state is ALIVE)
    assert heartbeat.last_use is None
    twin.do(channel.close)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is CLOSED)


def test_unavailable_over_a_ready_connection_does_not_make_it_dead(
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


def test_a_heartbeat_that_cannot_be_sent_does_not_make_a_connection_dead(
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


@IN_SYNC
def test_calls_that_only_wait_for_a_connection_are_not_ended(twin, asked, channel, timer):
    given = []
    real = channel.reconnect
    channel.reconnect = lambda reason, **options: given.append(options) or real(reason, **options)
    manager = twin.do(twin.manager, timer, drain_timeout=7.5, probe=STRICT)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    asked.answer = NOT_SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.state is SUSPECT)
    channel.get_state = lambda *_: grpc.ChannelConnectivity.TRANSIENT_FAILURE
    starve(timer, heartbeat, until=lambda: given)
    assert given[0] == {"drain_timeout": None}
    del channel.get_state
    twin.do(manager.close)
    asked.answer = SERVING


def test_connection_dead_is_emitted_before_connection_replaced(
    twin, asked, channel, timer, slow_events
):
    manager = twin.do(twin.manager, timer, probe=STRICT)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    asked.answer = NOT_SERVING
    starve(timer, heartbeat, until=lambda: heartbeat.replaced)
    twin.do(manager.close)
    assert wait_until(lambda: ConnectionReplaced in kinds(slow_events))
    told = [kind for kind in kinds(slow_events) if kind in {ConnectionDead, ConnectionReplaced}]
    assert told[:2] == [ConnectionDead, ConnectionReplaced]


@IN_AIO
def test_an_answer_that_comes_after_the_replacement_changes_nothing(
    twin, asked, channel, manager, timer
):
    slow = asked.answer = threading.Event()
    heartbeat = twin.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: len(asked.checks) == 1)
    asked.answer = threading.Event()
    assert twin.do(channel.reconnect, drain_timeout=None, force=True)
    timer.advance(20.1)  # the replacement is seen; the new connection is asked at once
    assert wait_until(lambda: len(asked.checks) == 2)
    slow.set()
    asked.answer.set()
    assert wait_until(lambda: heartbeat.answered)
    assert wait_until(lambda: not has_unanswered(heartbeat))
    assert (heartbeat.sent, heartbeat.answered, heartbeat.state) == (2, 1, ALIVE)


# --- Its end -------------------------------------------------------------------------------------


def test_a_channel_that_is_closed_detaches_itself(twin, asked, timer, manager):
    channel = twin.do(twin.channel, asked.target)
    heartbeat = twin.do(manager.attach, channel)
    twin.call(channel)
    twin.do(channel.close)
    assert (heartbeat.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())
    late = twin.do(manager.attach, channel)
    assert (late.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())


def test_detaching_forgets_it_on_the_channel_and_cancels_the_heartbeat_on_its_way(
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


def test_detaching_closing_and_replacing_at_once_end_in_one_clean_state(
    twin, asked, manager, timer
):
    for _ in range(5):
        channel = twin.do(twin.channel, asked.target)
        heartbeat = twin.do(manager.attach, channel)
        twin.call(channel)
        run_threads(
            heartbeat.detach,
            heartbeat.beat,
            heartbeat.withdraw,
            lambda channel=channel: twin.do(channel.reconnect, force=True),
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


@IN_AIO
def test_attach_raises_what_its_timer_raises(twin, asked, channel):
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
    assert wait_until(lambda: ExecutorRejected in kinds(events))
    event = next(event for event in events if isinstance(event, ExecutorRejected))
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


@IN_SYNC
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


# --- Listeners -----------------------------------------------------------------------------------


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
    assert wait_until(lambda: kinds(events).count(CallbackFailed) == 6)
    heartbeat.remove_listener(listener)
    heartbeat.remove_listener(listener)
    heartbeat.detach()
    assert wait_until(lambda: kinds(events).count(CallbackFailed) == 7)
    assert len(told) == 6


@IN_AIO
def test_what_is_no_listener_is_refused(twin, channel, manager):
    async def coroutine(heartbeat, old, new):
        """Nobody would await it."""

    heartbeat = twin.do(manager.attach, channel)
    for wrong in (None, 5, lambda: 0, lambda one, two: 0, lambda *, heartbeat: 0, coroutine):
        with pytest.raises(TypeError, match="listener must be a plain function"):
            heartbeat.add_listener(wrong)
    for right in (print, lambda *_: 0, lambda one, two, three, four=4: 0, max):
        heartbeat.add_listener(right)
        heartbeat.remove_listener(right)
