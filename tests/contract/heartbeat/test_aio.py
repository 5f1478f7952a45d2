"""Heartbeats for channels of `grpc.aio`: loops, and timers of either kind."""

import asyncio
import threading

import grpc
import pytest

from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.heartbeat import HealthProbe, HeartbeatState
from rpcwheel.heartbeat.aio import HeartbeatManager
from rpcwheel.timer import AsyncWheelTimer, ManualTimer, WheelTimer
from rpcwheel.transport.aio import ReconnectingChannel


@pytest.fixture(params=[WheelTimer, AsyncWheelTimer], ids=["thread", "loop"])
async def any_timer(request):
    """A timer of either kind."""
    timer = request.param()
    yield timer
    timer.stop()


async def test_everything_runs_on_the_loop_with_either_kind_of_timer(server, any_timer):
    loop_thread, threads = threading.current_thread(), set()

    class Spy(HealthProbe):
        def judge(self, response):
            threads.add(threading.current_thread())
            return super().judge(response)

    async with (
        ReconnectingChannel(server.target) as channel,
        HeartbeatManager(any_timer, interval=0.05, timeout=WAIT_S, probe=Spy()) as manager,
    ):
        heartbeat = manager.attach(channel)
        heartbeat.add_listener(lambda *_: threads.add(threading.current_thread()))
        heartbeat.beat()
        await aio_wait_until(lambda: heartbeat.answered >= 3)
    assert threads == {loop_thread}
    assert heartbeat.state is HeartbeatState.CLOSED
    assert any_timer.pending == 0


async def test_aclose_waits_until_no_task_is_left(server, timer):
    server.answer = threading.Event()
    before = asyncio.all_tasks()
    async with ReconnectingChannel(server.target) as channel:
        async with HeartbeatManager(timer) as manager:
            heartbeat = manager.attach(channel)
            heartbeat.beat()
            await aio_wait_until(lambda: server.checks)
            assert asyncio.all_tasks() - before
        assert asyncio.all_tasks() == before
    server.answer.set()
    assert (heartbeat.answered, heartbeat.misses) == (0, 0)


def test_aclose_does_not_wait_for_tasks_of_another_loop(server, timer):
    server.answer = threading.Event()
    manager = HeartbeatManager(timer)

    async def begin():
        channel = ReconnectingChannel(server.target)
        manager.attach(channel).beat()
        await aio_wait_until(lambda: server.checks)
        return channel

    with asyncio.Runner() as runner:
        channel = runner.run(begin())
        asyncio.run(asyncio.wait_for(manager.aclose(), WAIT_S))
        server.answer.set()
        runner.run(channel.close())
    assert manager.heartbeats == ()


def test_attach_without_a_running_loop_raises(server, timer):
    class Channel:
        unary_unary = print

    manager = HeartbeatManager(timer)
    with pytest.raises(RuntimeError, match="no running event loop"):
        manager.attach(Channel())
    assert (manager.heartbeats, timer.pending) == ((), 0)


def test_a_closed_loop_ends_its_heartbeats(server):
    timer = ManualTimer()

    async def main():
        manager, channel = HeartbeatManager(timer), grpc.aio.insecure_channel(server.target)
        return manager, channel, manager.attach(channel)

    manager, _channel, heartbeat = asyncio.run(main())
    assert timer.pending == 1
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is HeartbeatState.CLOSED)
    assert (manager.heartbeats, timer.pending) == ((), 0)
    timer.stop()


def test_detach_ends_several_heartbeats_in_flight_on_a_closed_loop(server):
    timer = ManualTimer()
    server.answer = threading.Event()

    async def main():
        manager, channel = HeartbeatManager(timer), grpc.aio.insecure_channel(server.target)
        heartbeat = manager.attach(channel)
        heartbeat.beat()
        for count in (1, 2, 3):
            await aio_wait_until(lambda count=count: len(server.checks) == count)
            timer.advance(20.1)
        return manager, channel, heartbeat

    manager, _channel, heartbeat = asyncio.run(main())
    heartbeat.detach()
    server.answer.set()
    assert heartbeat.state is HeartbeatState.CLOSED
    assert (manager.heartbeats, timer.pending) == ((), 0)
    timer.stop()


async def test_a_heartbeat_whose_task_is_canceled_is_missed_after_a_tick(server, timer, events):
    """`asyncio.run` cancels all tasks at its end, which must not be reported as misses."""
    server.answer = threading.Event()
    async with ReconnectingChannel(server.target) as channel, HeartbeatManager(timer) as manager:
        before = asyncio.all_tasks()
        heartbeat = manager.attach(channel)
        heartbeat.beat()
        await aio_wait_until(lambda: server.checks)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        await heartbeat.ended()
        assert (heartbeat.misses, events) == (0, [])
        server.answer.set()
        timer.advance(20.1)
        await aio_wait_until(lambda: heartbeat.answered == 1)
        assert (heartbeat.sent, heartbeat.state) == (2, HeartbeatState.ALIVE)
