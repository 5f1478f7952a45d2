"""Heartbeats for channels of `grpc`: what is on which thread."""

import contextlib
import threading
import time

import grpc
import pytest

from fixtures.heartbeat_twins import (
    CHECK,
    NOT_SERVING,
    SERVING,
    STRICT,
    SyncTwin,
    starve,
    wait_until_bookkeeping_is_done,
)
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import add_sink, remove_sink
from rpcwheel.heartbeat import HealthProbe, HeartbeatManager, HeartbeatState
from rpcwheel.timer import WheelTimer
from rpcwheel.transport import ReconnectingChannel


@pytest.fixture
def twin():
    return SyncTwin()


class Spy(HealthProbe):
    """A probe of the user's."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def judge(self, response):
        self.threads.append(threading.current_thread().name)
        return super().judge(response)


class Slow(grpc.UnaryUnaryClientInterceptor):
    """An interceptor of the user's that takes its time."""

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


def test_a_probe_of_the_user_s_is_asked_on_a_worker(channel, manager):
    probe = Spy()
    heartbeat = manager.attach(channel, probe=probe)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert probe.threads[0].startswith("rpcwheel-worker")


def test_listeners_are_called_on_workers_whoever_changes_the_state(channel, manager):
    threads = []
    heartbeat = manager.attach(channel)
    heartbeat.add_listener(lambda *_: threads.append(threading.current_thread().name))
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    heartbeat.detach()
    assert wait_until(lambda: len(threads) == 3)
    assert all(name.startswith("rpcwheel-worker") for name in threads)


def test_the_user_s_interceptors_run_on_a_worker_and_don_t_stop_the_timer(asked):
    slow = Slow()
    with (
        WheelTimer(name="t") as timer,
        HeartbeatManager(timer, interval=0.05, timeout=WAIT_S) as manager,
        contextlib.ExitStack() as opened,
    ):

        def connect(options):
            return grpc.intercept_channel(grpc.insecure_channel(asked.target, options), slow)

        several = [
            opened.enter_context(ReconnectingChannel(asked.target, connect=connect))
            for _ in range(6)
        ]
        for stuck in map(manager.attach, several):
            stuck.beat()
        free = manager.attach(opened.enter_context(ReconnectingChannel(asked.target)))
        free.beat()
        assert wait_until(lambda: len(slow.threads) >= 6 and free.answered >= 3)
        assert slow.threads[0].startswith("rpcwheel-worker")
        assert stuck.answered == 0
        slow.gate.set()


def test_sinks_and_listeners_that_hang_do_not_stop_the_timer(asked):
    gate, threads = threading.Event(), set()

    def sink(event):
        threads.add(threading.current_thread().name)
        gate.wait(WAIT_S)

    add_sink(sink)
    try:
        with (
            WheelTimer(name="t") as timer,
            HeartbeatManager(timer, interval=0.05, timeout=WAIT_S) as manager,
            ReconnectingChannel(asked.target) as channel,
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


def test_a_listener_that_hangs_delays_only_its_own_heartbeat(asked, channel, manager):
    gate, called = threading.Event(), []
    with contextlib.ExitStack() as opened:
        others = [opened.enter_context(ReconnectingChannel(asked.target)) for _ in range(6)]
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


def test_a_replacement_runs_on_a_worker(asked, channel, manager, timer):
    threads, real = [], channel.reconnect

    def reconnect(*args, **options):
        threads.append(threading.current_thread().name)
        return real(*args, **options)

    channel.reconnect = reconnect
    asked.answer = NOT_SERVING
    heartbeat = manager.attach(channel, probe=STRICT)
    heartbeat.beat()
    starve(timer, heartbeat, until=lambda: threads)
    assert threads[0].startswith("rpcwheel-worker")


def test_interceptors_of_the_connection_s_own_see_the_mark(asked, timer):
    seen = []

    class Watch(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            seen.append((details.method, list(details.metadata), details.wait_for_ready))
            return continuation(details, request)

    def connect(options):
        bare = grpc.insecure_channel(asked.target, options)
        return grpc.intercept_channel(bare, Watch())

    with (
        ReconnectingChannel(asked.target, connect=connect) as channel,
        HeartbeatManager(timer) as manager,
    ):
        heartbeat = manager.attach(channel)
        heartbeat.beat()
        assert wait_until(lambda: heartbeat.answered == 1)
        assert channel.reconnect(force=True)
        timer.advance(121.0)
        assert wait_until(lambda: heartbeat.answered == 2)
    mark = [("rpcwheel-heartbeat", "1")]
    # Patient with the new connection. A third follows if the answer came while time was moved.
    assert seen[:2] == [(CHECK, mark, None), (CHECK, mark, True)]
    assert asked.answer == SERVING


def test_heartbeats_that_are_due_together_are_sent_one_after_the_other(asked, timer):
    sending, most = [], []
    with contextlib.ExitStack() as opened:
        manager = opened.enter_context(HeartbeatManager(timer, interval=60.0))
        channels = [opened.enter_context(ReconnectingChannel(asked.target)) for _ in range(8)]
        for channel in channels:
            sends = channel.heartbeat_call(CHECK)

            def heartbeat_call(_, sends=sends):
                sending.append(1)
                time.sleep(0.002)  # long enough for another to come, if there was one
                most.append(len(sending))
                sending.pop()
                return sends

            channel.heartbeat_call = heartbeat_call
        heartbeats = [manager.attach(channel) for channel in channels]
        for heartbeat in heartbeats:
            heartbeat.beat()
        assert wait_until(lambda: all(heartbeat.answered for heartbeat in heartbeats))
    assert most == [1] * 8


def test_an_unused_connection_costs_no_worker(channel, manager, timer):
    looked, real = [], channel.get_state
    manager.attach(channel)
    channel.get_state = lambda: looked.append(None) or real()  # as the worker does
    for _ in range(10):
        timer.advance(60.0)
    wait_until_bookkeeping_is_done()
    assert looked == []


def test_a_channel_of_the_other_world_is_refused(manager):
    class Other(grpc.aio.Channel):
        """Of no other make than its class."""

    Other.__abstractmethods__ = frozenset()
    with pytest.raises(
        TypeError, match=r"other world: use rpcwheel\.heartbeat\.aio\.HeartbeatManager"
    ):
        manager.attach(Other())
