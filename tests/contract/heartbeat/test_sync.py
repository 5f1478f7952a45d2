"""Heartbeats for channels of `grpc`: what runs on which thread."""

import contextlib
import threading
import time

import grpc
import pytest

from fixtures.heartbeats import (
    CHECK,
    NOT_SERVING,
    SERVING,
    STRICT,
    SyncWorld,
    advance_until,
    wait_until_bookkeeping_is_done,
)
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import TaskSlow, add_sink, remove_sink
from rpcwheel.heartbeat import HealthProbe, HeartbeatManager, HeartbeatState
from rpcwheel.timer import WheelTimer
from rpcwheel.transport import ReconnectingChannel


@pytest.fixture
def world():
    return SyncWorld()


class Spy(HealthProbe):
    """A probe of the user."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def judge(self, response):
        self.threads.append(threading.current_thread().name)
        return super().judge(response)


class Slow(grpc.UnaryUnaryClientInterceptor):
    """An interceptor of the user that blocks."""

    def __init__(self):
        self.threads = []
        self.gate = threading.Event()

    def intercept_unary_unary(self, continuation, details, request):
        self.threads.append(threading.current_thread().name)
        self.gate.wait(WAIT_S)
        return continuation(details, request)


def test_a_manager_is_a_context_manager(channel, timer):
    with HeartbeatManager(timer) as manager:
        heartbeat = manager.attach(channel)
    assert heartbeat.state is HeartbeatState.CLOSED
    assert timer.pending == 0


def test_a_probe_of_the_user_runs_on_a_worker_thread(channel, manager):
    probe = Spy()
    heartbeat = manager.attach(channel, probe=probe)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert probe.threads[0].startswith("rpcwheel-worker")


def test_listeners_run_on_a_worker_thread(channel, manager):
    threads = []
    heartbeat = manager.attach(channel)
    heartbeat.add_listener(lambda *_: threads.append(threading.current_thread().name))
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    heartbeat.detach()
    assert wait_until(lambda: len(threads) == 3)
    assert all(name.startswith("rpcwheel-worker") for name in threads)


def test_interceptors_that_hang_do_not_delay_the_timer(server):
    slow = Slow()
    with (
        WheelTimer(name="t") as timer,
        HeartbeatManager(timer, interval=0.05, timeout=WAIT_S) as manager,
        contextlib.ExitStack() as opened,
    ):

        def connect(options):
            return grpc.intercept_channel(grpc.insecure_channel(server.target, options), slow)

        several = [
            opened.enter_context(ReconnectingChannel(server.target, connect=connect))
            for _ in range(6)
        ]
        for stuck in map(manager.attach, several):
            stuck.beat()
        free = manager.attach(opened.enter_context(ReconnectingChannel(server.target)))
        free.beat()
        assert wait_until(lambda: len(slow.threads) >= 6 and free.answered >= 3)
        assert slow.threads[0].startswith("rpcwheel-worker")
        assert stuck.answered == 0
        slow.gate.set()


def test_event_handlers_and_listeners_that_hang_do_not_delay_the_timer(server):
    gate, threads = threading.Event(), set()

    def sink(event):
        if not isinstance(event, TaskSlow):  # of a stall, on the timer's thread
            threads.add(threading.current_thread().name)
            gate.wait(WAIT_S)

    add_sink(sink)
    try:
        with (
            WheelTimer(name="t") as timer,
            HeartbeatManager(timer, interval=0.05, timeout=WAIT_S) as manager,
            ReconnectingChannel(server.target) as channel,
        ):
            heartbeat = manager.attach(channel)
            heartbeat.add_listener(lambda *_: gate.wait(WAIT_S))
            heartbeat.beat()
            assert wait_until(lambda: heartbeat.answered >= 4)
            gate.set()
    finally:
        gate.set()
        remove_sink(sink)
    assert all(name.startswith("rpcwheel-worker") for name in threads)


def test_a_listener_that_hangs_delays_only_its_own_heartbeat(server, channel, manager):
    gate, called = threading.Event(), []
    with contextlib.ExitStack() as opened:
        others = [opened.enter_context(ReconnectingChannel(server.target)) for _ in range(6)]
        opened.callback(gate.set)
        free, stuck = manager.attach(channel), [manager.attach(other) for other in others]
        for one in stuck:
            one.add_listener(lambda *_: gate.wait(WAIT_S))
        free.add_listener(lambda *args: called.append(args))
        for count in range(1, 4):
            for one in (*stuck, free):
                one.beat()
            assert wait_until(
                lambda count=count: all(one.answered == count for one in (*stuck, free))
            )
        assert wait_until(lambda: len(called) == 6)


def test_a_reconnect_runs_on_a_worker_thread(server, channel, manager, timer):
    threads, real = [], channel.reconnect

    def reconnect(*args, **options):
        threads.append(threading.current_thread().name)
        return real(*args, **options)

    channel.reconnect = reconnect
    server.answer = NOT_SERVING
    heartbeat = manager.attach(channel, probe=STRICT)
    heartbeat.beat()
    advance_until(timer, heartbeat, until=lambda: threads)
    assert threads[0].startswith("rpcwheel-worker")


def test_interceptors_below_the_channel_see_the_metadata_of_heartbeats(server, timer):
    seen = []

    class Watch(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            seen.append((details.method, list(details.metadata), details.wait_for_ready))
            return continuation(details, request)

    def connect(options):
        bare = grpc.insecure_channel(server.target, options)
        return grpc.intercept_channel(bare, Watch())

    with (
        ReconnectingChannel(server.target, connect=connect) as channel,
        HeartbeatManager(timer) as manager,
    ):
        heartbeat = manager.attach(channel)
        heartbeat.beat()
        assert wait_until(lambda: heartbeat.answered == 1)
        assert channel.reconnect(force=True)
        timer.advance(121.0)
        assert wait_until(lambda: heartbeat.answered == 2)
    mark = [("rpcwheel-heartbeat", "1")]
    # It waits for the new connection. A third one follows if the answer came while time moved.
    assert seen[:2] == [(CHECK, mark, None), (CHECK, mark, True)]
    assert server.answer == SERVING


def test_heartbeats_that_are_due_together_are_sent_one_after_another(server, timer):
    sending, most = [], []
    with contextlib.ExitStack() as opened:
        manager = opened.enter_context(HeartbeatManager(timer, interval=60.0))
        channels = [opened.enter_context(ReconnectingChannel(server.target)) for _ in range(8)]
        for channel in channels:
            sends = channel.heartbeat_call(CHECK)

            def heartbeat_call(_, sends=sends):
                sending.append(1)
                time.sleep(0.002)  # long enough for another one to be sent, if it could be
                most.append(len(sending))
                sending.pop()
                return sends

            channel.heartbeat_call = heartbeat_call
        heartbeats = [manager.attach(channel) for channel in channels]
        for heartbeat in heartbeats:
            heartbeat.beat()
        assert wait_until(lambda: all(heartbeat.answered for heartbeat in heartbeats))
    assert most == [1] * 8


def test_an_unused_connection_uses_no_worker_thread(channel, manager, timer):
    calls, real = [], channel.get_state
    manager.attach(channel)
    channel.get_state = lambda: calls.append(None) or real()  # a worker thread calls it
    for _ in range(10):
        timer.advance(60.0)
    wait_until_bookkeeping_is_done()
    assert calls == []


def test_a_channel_of_grpc_aio_is_refused(manager):
    class Other(grpc.aio.Channel):
        """A subclass without methods."""

    Other.__abstractmethods__ = frozenset()
    with pytest.raises(TypeError, match=r"for grpc\.aio use rpcwheel\.heartbeat\.aio;"):
        manager.attach(Other())
