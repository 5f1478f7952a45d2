"""Heartbeats for channels of `grpc`: what is on which thread."""

import threading

import grpc
import pytest

from fixtures.heartbeat_twins import CHECK, SERVING, SyncTwin
from fixtures.timers import PATIENCE, eventually
from rpcwheel.channel import ReconnectingChannel
from rpcwheel.heartbeat import HealthProbe, HeartbeatManager, HeartbeatState
from rpcwheel.observe import add_sink, remove_sink
from rpcwheel.timer import WheelTimer


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
        self.gate.wait(PATIENCE)
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
    assert eventually(lambda: heartbeat.answered == 1)
    assert probe.threads[0].startswith("rpcwheel-worker")


def test_listeners_are_called_on_workers_whoever_changes_the_state(channel, manager):
    threads = []
    heartbeat = manager.attach(channel)
    heartbeat.add_listener(lambda *_: threads.append(threading.current_thread().name))
    heartbeat.beat()
    assert eventually(lambda: heartbeat.answered == 1)
    heartbeat.detach()
    assert eventually(lambda: len(threads) == 3)
    assert all(name.startswith("rpcwheel-worker") for name in threads)


def test_the_user_s_interceptors_run_on_a_worker_and_don_t_stop_the_timer(asked):
    slow = Slow()
    with (
        WheelTimer(name="t") as timer,
        HeartbeatManager(timer, interval=0.05) as manager,
        grpc.insecure_channel(asked.target) as bare,
        ReconnectingChannel(asked.target) as other,
    ):
        stuck = manager.attach(grpc.intercept_channel(bare, slow))
        free = manager.attach(other)
        free.beat()
        assert eventually(lambda: slow.threads and free.answered >= 3)
        assert slow.threads[0].startswith("rpcwheel-worker")
        assert stuck.answered == 0
        slow.gate.set()


def test_sinks_and_listeners_that_hang_do_not_stop_the_timer(asked):
    gate, threads = threading.Event(), set()

    def sink(event):
        threads.add(threading.current_thread().name)
        gate.wait(PATIENCE)

    add_sink(sink)
    try:
        with (
            WheelTimer(name="t") as timer,
            HeartbeatManager(timer, interval=0.05) as manager,
            ReconnectingChannel(asked.target) as channel,
        ):
            heartbeat = manager.attach(channel)
            heartbeat.add_listener(lambda *_: gate.wait(PATIENCE))
            heartbeat.beat()
            assert eventually(lambda: heartbeat.answered >= 4)
            gate.set()
    finally:
        gate.set()
        remove_sink(sink)
    assert all(name.startswith("rpcwheel-worker") for name in threads)


def test_a_replacement_runs_on_a_worker(asked, channel, manager, timer):
    threads, real = [], channel.replace

    def replace(*args, **options):
        threads.append(threading.current_thread().name)
        return real(*args, **options)

    channel.replace = replace
    asked.answer = grpc.StatusCode.UNAVAILABLE
    heartbeat = manager.attach(channel)
    heartbeat.beat()
    while not threads:
        timer.advance(10)
        assert eventually(lambda: heartbeat._timeout is not None and heartbeat._core.probe is None)
    assert threads[0].startswith("rpcwheel-worker")


def test_interceptors_of_the_connection_s_own_see_the_mark(asked, timer):
    seen = []

    class Watch(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            seen.append((details.method, list(details.metadata)))
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
        assert eventually(lambda: heartbeat.answered == 1)
    assert seen == [(CHECK, [("rpcwheel-heartbeat", "1")])]
    assert asked.answer == SERVING
