"""The heartbeat of one connection, in both worlds: real servers, manual time."""

import asyncio
import re
import threading

import grpc
import pytest

from fixtures.grpcio import VERSION
from fixtures.heartbeats import (
    NOT_SERVING,
    SERVING,
    STRICT,
    advance,
    advance_until,
    kinds,
)
from fixtures.shop import UNARY_UNARY
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from fixtures.worlds import only_aio, only_sync
from rpcwheel import CallPolicy
from rpcwheel.errors import TimerStopped, TooManyTimeouts
from rpcwheel.events import (
    CallbackFailed,
    ConnectionAlive,
    ConnectionDead,
    ConnectionReplaced,
    ExecutorRejected,
    HeartbeatMissed,
)
from rpcwheel.heartbeat import HeartbeatState, MethodProbe
from rpcwheel.timer import AsyncWheelTimer, ManualTimer, WheelTimer

ALIVE, DEAD, UNUSED = HeartbeatState.ALIVE, HeartbeatState.DEAD, HeartbeatState.UNUSED
CLOSED, SUSPECT, OFF = HeartbeatState.CLOSED, HeartbeatState.SUSPECT, HeartbeatState.OFF


# --- Attributes ----------------------------------------------------------------------------------


@only_sync
def test_the_attributes_of_a_heartbeat(world, server, channel, manager, timer):
    heartbeat = world.do(manager.attach, channel)
    known = {
        "target": server.target,
        "state": "unused",
        **dict.fromkeys(["last_read", "last_write", "last_use", "rtt", "serving"], None),
        **dict.fromkeys(["misses", "sent", "answered", "replaced"], 0),
    }
    assert {name: getattr(heartbeat, name) for name in known} == known
    timer.advance(2.5)
    world.call(channel).result()
    timer.advance(1.0)
    heartbeat.beat()
    wait_until(lambda: heartbeat.last_read == 3.5)  # is set after `answered`
    known |= {"state": "alive", "last_read": 3.5, "last_write": 3.5, "last_use": 2.5}
    known |= {"rtt": 0.0, "sent": 1, "answered": 1, "serving": True}
    assert {name: getattr(heartbeat, name) for name in known} == known
    assert repr(heartbeat) == f"<Heartbeat of {server.target}: alive>"


# --- When heartbeats are sent --------------------------------------------------------------------


def test_a_used_connection_gets_a_heartbeat_after_the_interval(
    world, server, channel, manager, timer
):
    heartbeat = world.do(manager.attach, channel)
    world.call(channel).result()
    timer.advance(59.9)
    assert (heartbeat.sent, server.checks) == (0, [])
    advance_until(timer, heartbeat, until=lambda: heartbeat.answered == 1)
    assert 60 < timer.now < 121
    assert server.checks[0]["rpcwheel-heartbeat"] == "1"
    assert heartbeat.state is ALIVE
    assert (heartbeat.serving, heartbeat.misses, heartbeat.last_use) == (True, 0, 0.0)
    assert 0 <= heartbeat.rtt < 1.1
    assert 60 < heartbeat.last_write <= heartbeat.last_read <= timer.now


@only_aio
def test_a_heartbeat_does_not_reopen_a_connection_that_the_server_closed(
    world, server, channel, manager, timer
):
    heartbeat = world.do(manager.attach, channel)
    world.call(channel).result()
    server.kill()
    assert wait_until(lambda: world.do(channel.is_idle))
    for _ in range(20):
        advance(timer, 60.0)
    assert (heartbeat.sent, heartbeat.misses, heartbeat.state) == (0, 0, UNUSED)
    assert channel.number == 1


@only_sync
def test_a_heartbeat_does_not_connect_an_unused_plain_channel(world, server, manager, timer):
    channel = world.channel(server.target)
    heartbeat = world.do(manager.attach, channel)
    for _ in range(10):
        advance(timer, 60.0)
    assert (heartbeat.sent, heartbeat.state, server.checks) == (0, UNUSED, [])
    world.call(channel).result()
    advance_until(timer, heartbeat, until=lambda: heartbeat.answered)
    assert heartbeat.state is ALIVE


@only_aio
def test_without_an_interval_there_is_no_timeout_and_no_heartbeat(
    world, channel, make_manager, timer
):
    manager = make_manager(interval=None)
    heartbeat = world.do(manager.attach, channel)
    world.call(channel).result()
    assert (heartbeat.state, timer.pending, heartbeat.beat()) == (OFF, 0, False)
    timer.advance(10_000)
    assert heartbeat.sent == 0
    world.do(manager.close)
    assert heartbeat.state is CLOSED


# --- Answers -------------------------------------------------------------------------------------


@only_aio
@pytest.mark.parametrize(("code", "is_answer"), [("INTERNAL", True), ("UNAVAILABLE", False)])
def test_a_status_that_only_a_server_gives_is_an_answer(
    world, server, channel, manager, events, code, is_answer
):
    server.answer = grpc.StatusCode[code]
    heartbeat = world.do(manager.attach, channel)
    heartbeat.beat()
    state = ALIVE if is_answer else SUSPECT
    assert wait_until(lambda: heartbeat.state is state and heartbeat.answered + heartbeat.misses)
    assert (heartbeat.answered, heartbeat.misses) == (is_answer, not is_answer)
    assert heartbeat.serving is None
    if not is_answer:
        assert wait_until(lambda: HeartbeatMissed(channel.target, 1, 0.0, code) in events)


@only_aio
def test_not_serving_counts_as_an_answer_unless_the_probe_requires_serving(
    world, server, channel, make_manager, events
):
    server.answer = NOT_SERVING
    heartbeat = world.do(make_manager().attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is ALIVE and heartbeat.answered == 1)
    assert heartbeat.serving is False
    heartbeat.detach()
    heartbeat = world.do(make_manager(probe=STRICT).attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.misses == 1)
    assert heartbeat.serving is False
    assert wait_until(lambda: HeartbeatMissed in kinds(events))
    assert events.of(HeartbeatMissed)[0].answer == "NOT_SERVING"
    server.answer = SERVING
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is ALIVE and heartbeat.serving)


def test_a_probe_that_fails_is_reported_and_the_answer_counts(
    world, server, channel, manager, events
):
    class Careless(MethodProbe):
        def judge(self, response):
            return verdicts.pop()

    verdicts = [(True, None), None, True]
    heartbeat = world.do(manager.attach, channel, probe=Careless(UNARY_UNARY, b"hello"))
    for count in range(1, 5):  # the last time `pop` raises
        assert wait_until(heartbeat.beat)
        assert wait_until(lambda count=count: heartbeat.answered == count)
        assert wait_until(lambda count=count: kinds(events).count(CallbackFailed) == count)
    assert [seen.requests for seen in server.calls] == [[b"hello"]] * 4
    first, *_, last = (event.error for event in events.of(CallbackFailed))
    assert "judge must return a ProbeResult" in str(first)
    assert isinstance(last, IndexError)
    assert heartbeat.state is ALIVE


def test_an_answer_cancels_older_heartbeats(world, server, channel, manager, timer):
    server.answer = threading.Event()
    heartbeat = world.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: len(server.checks) == 1)
    server.answer = SERVING
    timer.advance(20.1)
    assert wait_until(lambda: heartbeat.answered == 1)
    assert wait_until(lambda: server.canceled == 1)
    assert (heartbeat.sent, heartbeat.state) == (2, ALIVE)


# --- Death and reconnects ------------------------------------------------------------------------


@pytest.mark.usefixtures("slow_handler")
def test_a_dead_connection_is_replaced_and_the_new_one_is_alive_after_an_answer(
    world, server, channel, manager, timer, events
):
    server.answer = NOT_SERVING
    changes = []
    heartbeat = world.do(manager.attach, channel, probe=STRICT)
    heartbeat.add_listener(lambda *args: changes.append(args))
    world.call(channel).result()
    advance_until(timer, heartbeat, until=lambda: heartbeat.state is SUSPECT)
    advance_until(timer, heartbeat, until=lambda: heartbeat.replaced)
    server.answer = SERVING
    advance_until(timer, heartbeat, until=lambda: heartbeat.state is ALIVE)
    assert timer.now > 180
    assert (channel.number, heartbeat.replaced) == (2, 1)
    assert world.call(channel, "unary_unary", b"again").result() == b"again"
    assert wait_until(lambda: kinds(events).count(ConnectionAlive) == 1)
    died = events.of(ConnectionDead)[0]
    assert died.silent_s > 180
    assert wait_until(lambda: ConnectionReplaced in kinds(events))
    emitted = [kind for kind in kinds(events) if kind in {ConnectionDead, ConnectionReplaced}]
    assert emitted == [ConnectionDead, ConnectionReplaced]
    replaced = events.of(ConnectionReplaced)[0]
    assert re.fullmatch(r"no answer to heartbeats for 1[89]\d\.\d s", replaced.reason)
    assert wait_until(lambda: changes and changes[-1][2] is ALIVE)
    assert [(old, new) for _, old, new in changes if DEAD in {old, new}] == [
        (SUSPECT, DEAD),
        (DEAD, ALIVE),
    ]


def test_a_reconnect_that_fails_is_reported_and_tried_again(
    world, server, channel, manager, timer, events, caplog
):
    server.answer = NOT_SERVING
    tried = []

    def fail(reason, **_):
        tried.append((timer.now, threading.current_thread()))
        if world.name == "sync" and len(tried) == 2:
            raise SystemExit
        raise OSError("no more sockets")

    channel.reconnect = fail
    heartbeat = world.do(manager.attach, channel, probe=STRICT)
    world.call(channel).result()
    advance_until(timer, heartbeat, until=lambda: len(tried) == 3)
    assert heartbeat.state is DEAD
    # Each follows a heartbeat, of which one is sent every 20 s, the first one soon after the death.
    assert tried[2][0] >= 180 + 20
    assert threading.current_thread() not in {thread for _, thread in tried}
    assert wait_until(lambda: CallbackFailed in kinds(events))
    assert kinds(events).count(ConnectionDead) == 1
    caplog.clear()  # the error's frames keep the channel alive
    events.clear()


def test_a_manual_timer_that_advances_far_at_once_is_not_taken_for_a_stall(
    world, server, channel, manager, timer
):
    server.answer = NOT_SERVING
    heartbeat = world.do(manager.attach, channel, probe=STRICT)
    world.call(channel).result()

    def advance_far_until_replaced():
        timer.advance(60.0)
        return heartbeat.replaced

    assert wait_until(advance_far_until_replaced)


def test_a_dead_plain_channel_is_reported_and_not_replaced(world, server, manager, timer, events):
    channel = world.channel(server.target)
    heartbeat = world.do(manager.attach, channel, probe=STRICT)
    known = VERSION >= (1, 83) or not isinstance(channel, grpc.aio.Channel)
    assert heartbeat.target == (server.target if known else repr(channel))
    assert heartbeat.connection is channel
    world.call(channel).result()
    advance_until(timer, heartbeat, until=lambda: heartbeat.answered == 3)
    assert timer.now > 180
    server.answer = NOT_SERVING
    advance_until(timer, heartbeat, until=lambda: heartbeat.state is DEAD)
    began, sent = timer.now, heartbeat.sent
    advance_until(timer, heartbeat, until=lambda: timer.now > began + 500)
    assert heartbeat.sent > sent + 15
    assert wait_until(lambda: ConnectionDead in kinds(events))
    assert kinds(events).count(ConnectionDead) == 1
    assert not {ConnectionReplaced, CallbackFailed} & set(kinds(events))
    server.answer = SERVING
    advance_until(timer, heartbeat, until=lambda: heartbeat.state is ALIVE)
    assert heartbeat.last_use is None
    world.do(channel.close)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is CLOSED)


@pytest.mark.parametrize("answer", ["UNAVAILABLE", "ValueError"])
def test_misses_while_the_channel_is_ready_do_not_lead_to_death(
    world, server, channel, manager, timer, events, answer
):
    """A proxy gives UNAVAILABLE if its own connection fails, and gRPC without call credentials."""
    heartbeat = world.do(manager.attach, channel)
    world.call(channel).result()

    def broken(method):
        raise ValueError("bad metadata")

    if answer == "ValueError":
        channel.heartbeat_call = broken
    else:
        server.answer = grpc.StatusCode.UNAVAILABLE
    advance_until(timer, heartbeat, until=lambda: timer.now > 400)
    assert (heartbeat.state, channel.number) == (SUSPECT, 1)
    assert heartbeat.misses >= 10
    assert wait_until(lambda: HeartbeatMissed in kinds(events))
    assert {e.answer for e in events.of(HeartbeatMissed)} == {answer}
    assert ConnectionDead not in kinds(events)


@only_sync
@pytest.mark.parametrize(
    ("state", "was_read", "drain_timeout"),
    [
        ("READY", True, 7.5),
        ("TRANSIENT_FAILURE", True, None),
        ("CONNECTING", False, None),
        ("CONNECTING", True, 7.5),
    ],
)
def test_a_reconnect_drains_only_calls_that_do_not_wait_for_a_connection(
    world, server, channel, make_manager, timer, state, was_read, drain_timeout
):
    given = []
    real = channel.reconnect
    channel.reconnect = lambda reason, **options: given.append(options) or real(reason, **options)
    heartbeat = world.do(make_manager(drain_timeout=7.5, probe=STRICT).attach, channel)
    world.call(channel).result()
    server.answer = NOT_SERVING
    advance_until(timer, heartbeat, until=lambda: heartbeat.state is SUSPECT)
    channel.get_state = lambda *_: grpc.ChannelConnectivity[state]
    if not was_read:
        channel.activity.last_read_ns = None
    advance_until(timer, heartbeat, until=lambda: given)
    assert given[0] == {"drain_timeout": drain_timeout}
    del channel.get_state
    server.answer = SERVING


# --- End -----------------------------------------------------------------------------------------


def test_closing_the_channel_detaches_its_heartbeat(world, open_channel, timer, manager):
    channel = open_channel()
    heartbeat = world.do(manager.attach, channel)
    world.call(channel).result()
    world.do(channel.close)
    assert (heartbeat.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())
    late = world.do(manager.attach, channel)
    assert (late.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())


def test_detach_cancels_the_heartbeat_in_flight(world, server, channel, manager, timer, events):
    server.answer = threading.Event()
    heartbeat = world.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: server.checks)
    heartbeat.detach()
    heartbeat.detach()
    assert (heartbeat.state, timer.pending, manager.heartbeats) == (CLOSED, 0, ())
    assert wait_until(lambda: server.canceled == 1)
    server.answer.set()
    assert world.call(channel).result() == b"x"
    assert (heartbeat.answered, heartbeat.misses, heartbeat.rtt) == (0, 0, None)
    assert timer.pending == 0
    assert HeartbeatMissed not in kinds(events)


def test_concurrent_detach_close_and_reconnect_end_in_state_closed(
    world, open_channel, manager, timer
):
    for _ in range(5):
        channel = open_channel()
        heartbeat = world.do(manager.attach, channel)
        world.call(channel).result()
        run_threads(
            heartbeat.detach,
            heartbeat.beat,
            lambda channel=channel: world.do(channel.reconnect, force=True),
            lambda channel=channel: world.do(channel.close),
            lambda: timer.advance(100.0),
        )
        assert wait_until(lambda heartbeat=heartbeat: heartbeat.state is CLOSED)
        assert wait_until(lambda: timer.pending == 0)
        assert manager.heartbeats == ()


def test_a_heartbeat_does_not_keep_its_channel_alive(world, open_channel, manager, timer):
    channel = open_channel()
    heartbeat = world.do(manager.attach, channel)
    world.do(channel.close) if world.name == "aio" else None
    del channel
    assert wait_until(lambda: heartbeat.connection is None)
    timer.advance(61)
    assert wait_until(lambda: heartbeat.state is CLOSED)
    assert (timer.pending, manager.heartbeats) == (0, ())


@only_aio
def test_attach_raises_what_its_timer_raises(world, channel, make_manager):
    with ManualTimer() as stopped, WheelTimer(max_pending=1) as full:
        stopped.stop()
        full.new_timeout(print, 1000)
        for timer, error in ((stopped, TimerStopped), (full, TooManyTimeouts)):
            manager = make_manager(timer)
            with pytest.raises(error):
                world.do(manager.attach, channel)
            assert manager.heartbeats == ()
        assert full.pending == 1


def test_a_timer_that_stops_ends_its_heartbeats_with_an_event(
    world, server, channel, make_manager, events
):
    timer = ManualTimer()
    manager = make_manager(timer)
    heartbeat = world.do(manager.attach, channel)
    server.answer = threading.Event()
    heartbeat.beat()
    assert wait_until(lambda: server.checks)
    timer.stop()
    server.answer.set()
    assert wait_until(lambda: heartbeat.state is CLOSED)
    assert wait_until(lambda: ExecutorRejected in kinds(events))
    event = events.of(ExecutorRejected)[0]
    assert event.task == f"heartbeat of {server.target}"
    assert isinstance(event.error, TimerStopped)
    assert manager.heartbeats == ()


def test_a_timer_whose_loop_was_closed_ends_its_heartbeats_with_an_event(
    world, channel, make_manager, events
):
    loop = asyncio.new_event_loop()

    async def make_timer():
        return AsyncWheelTimer()

    timer = loop.run_until_complete(make_timer())
    manager = make_manager(timer)
    heartbeat = world.do(manager.attach, channel)
    timer.new_timeout(print, 1)  # the timer refuses only what is due before all others
    loop.close()
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is CLOSED)
    assert wait_until(lambda: events.of(ExecutorRejected))
    assert isinstance(events.of(ExecutorRejected)[0].error, TimerStopped)
    timer.stop()


def test_a_full_timer_keeps_the_place_of_a_heartbeat(world, open_channel, make_manager):
    with WheelTimer(max_pending=1) as timer:
        channel = open_channel(timer)  # with the clock of the heartbeat
        taken, real = [], channel.get_state

        def get_state():  # called between one timeout and the next
            if not taken:
                taken.append(timer.new_timeout(print, 1000))
            return real()

        manager = make_manager(timer, interval=0.05)
        heartbeat = world.do(manager.attach, channel)
        world.call(channel).result()
        channel.get_state = get_state
        assert wait_until(lambda: heartbeat.answered >= 3)
        assert wait_until(lambda: timer.pending == 2)  # none is being sent
        world.do(manager.close)
        assert taken[0].cancel()
        assert wait_until(lambda: timer.pending == 0)
        world.do(channel.close)


@only_sync
def test_a_closed_plain_channel_is_not_watched(world, server, manager, timer):
    """grpcio 1.85 crashes if a closed channel is asked for its target."""
    channel = world.channel(server.target)
    world.do(channel.close)
    heartbeat = world.do(manager.attach, channel)
    assert (heartbeat.state, heartbeat.target) == (CLOSED, repr(channel))
    assert (manager.heartbeats, timer.pending) == ((), 0)


def test_attach_skips_interceptors_on_top_of_the_channel(world, channel, manager):
    intercepted = world.do(world.api.intercept_channel, channel, CallPolicy(timeout=5.0))
    heartbeat = world.do(manager.attach, intercepted)
    assert world.do(manager.attach, channel) is heartbeat
    assert heartbeat.connection is channel


# --- Listeners -----------------------------------------------------------------------------------


def test_listeners_are_called_in_order_and_one_that_raises_is_reported(
    world, server, channel, manager, events
):
    changes = []
    heartbeat = world.do(manager.attach, channel)

    def broken(*_):
        raise ValueError("my own")

    def listener(*args):
        changes.append(args)

    heartbeat.add_listener(broken)
    heartbeat.add_listener(listener)
    for count in range(1, 4):
        heartbeat.beat()
        assert wait_until(lambda count=count: heartbeat.answered == count)
    assert wait_until(lambda: len(changes) == 6)
    assert all(one is heartbeat for one, _, _ in changes)
    assert [old for _, old, _ in changes[1:]] == [new for _, _, new in changes[:-1]]
    assert wait_until(lambda: kinds(events).count(CallbackFailed) == 6)
    heartbeat.remove_listener(listener)
    heartbeat.remove_listener(listener)
    heartbeat.detach()
    assert wait_until(lambda: kinds(events).count(CallbackFailed) == 7)
    assert len(changes) == 6


@only_aio
def test_invalid_listeners_are_refused(world, channel, manager):
    async def coroutine(heartbeat, old, new):
        """A coroutine function."""

    class Listener:
        async def __call__(self, heartbeat, old, new):
            """An object whose calls must be awaited."""

    heartbeat = world.do(manager.attach, channel)
    short = lambda one, two: 0  # noqa: E731
    for wrong in (None, 5, lambda: 0, short, lambda *, heartbeat: 0, coroutine, Listener()):
        with pytest.raises(TypeError, match="listener must be a plain function"):
            heartbeat.add_listener(wrong)
    for right in (print, lambda *_: 0, lambda one, two, three, four=4: 0, max):
        heartbeat.add_listener(right)
        heartbeat.remove_listener(right)
