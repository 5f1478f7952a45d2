"""Heartbeats for channels of `grpc`: what runs on which thread."""

import contextlib
import threading
import time

import grpc
import pytest

from fixtures.client_interceptors import interceptor
from fixtures.heartbeats import CHECK, NOT_SERVING, advance_until, wait_until_bookkeeping_is_done
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import only_sync
from rpcwheel.events import TaskSlow, add_sink, remove_sink
from rpcwheel.heartbeat import HealthProbe, HeartbeatManager, HeartbeatState
from rpcwheel.timer import WheelTimer
from rpcwheel.transport import ReconnectingChannel

pytestmark = [only_sync, pytest.mark.usefixtures("world")]


def test_code_of_the_user_and_reconnects_run_on_worker_threads(server, channel, manager, timer):
    threads, real = {}, channel.reconnect

    def note(what):
        threads.setdefault(what, []).append(threading.current_thread().name)

    class Spy(HealthProbe):
        def judge(self, response):
            note("probe")
            return super().judge(response)

    def reconnect(*args, **options):
        note("reconnect")
        return real(*args, **options)

    channel.reconnect = reconnect
    server.answer = NOT_SERVING
    heartbeat = manager.attach(channel, probe=Spy(require_serving=True))
    heartbeat.add_listener(lambda *_: note("listener"))
    heartbeat.beat()
    advance_until(timer, heartbeat, until=lambda: "reconnect" in threads)
    assert wait_until(lambda: len(threads) == 3)
    assert all(n.startswith("rpcwheel-worker") for names in threads.values() for n in names)
    with manager:
        assert heartbeat.state is not HeartbeatState.CLOSED
    assert heartbeat.state is HeartbeatState.CLOSED


def test_interceptors_that_hang_do_not_delay_the_timer(server):
    threads, gate = [], threading.Event()

    def hang(continuation, details, request):
        threads.append(threading.current_thread().name)
        gate.wait(WAIT_S)
        return continuation(details, request)

    with (
        WheelTimer(name="t") as timer,
        HeartbeatManager(timer, interval=0.05, timeout=WAIT_S) as manager,
        contextlib.ExitStack() as opened,
    ):

        def connect(options):
            bare = grpc.insecure_channel(server.target, options)
            return grpc.intercept_channel(bare, interceptor(hang))

        several = [
            opened.enter_context(ReconnectingChannel(server.target, connect=connect))
            for _ in range(6)
        ]
        for stuck in map(manager.attach, several):
            stuck.beat()
        free = manager.attach(opened.enter_context(ReconnectingChannel(server.target)))
        free.beat()
        assert wait_until(lambda: len(threads) >= 6 and free.answered >= 3)
        assert threads[0].startswith("rpcwheel-worker")
        assert stuck.answered == 0
        gate.set()


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
        for stuck in map(manager.attach, others):
            stuck.add_listener(lambda *_: gate.wait(WAIT_S))
            stuck.beat()
        assert wait_until(lambda: all(stuck.answered for stuck in manager.heartbeats))
        free = manager.attach(channel)
        free.add_listener(lambda *args: called.append(args))
        free.beat()
        assert wait_until(lambda: len(called) == 2)  # suspect, and alive


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
