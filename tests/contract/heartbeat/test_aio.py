"""Heartbeats for channels of `grpc.aio`: loops, and timers of either kind."""

import asyncio
import threading

import grpc
import pytest

from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.heartbeat import HealthProbe, HeartbeatState
from rpcwheel.heartbeat.aio import HeartbeatManager
from rpcwheel.timer import AsyncWheelTimer, WheelTimer
from rpcwheel.transport import ReconnectingChannel as SyncChannel
from rpcwheel.transport.aio import ReconnectingChannel


@pytest.fixture(params=[WheelTimer, AsyncWheelTimer], ids=["thread", "loop"])
async def any_timer(request):
    """A timer of either kind."""
    timer = request.param()
    yield timer
    timer.stop()


async def test_any_timer_will_do(asked, any_timer):
    loop_thread, threads = threading.current_thread(), set()

    class Spy(HealthProbe):
        def judge(self, response):
            threads.add(threading.current_thread())
            return super().judge(response)

    async with (
        ReconnectingChannel(asked.target) as channel,
        HeartbeatManager(any_timer, interval=0.05, timeout=WAIT_S, probe=Spy()) as manager,
    ):
        heartbeat = manager.attach(channel)
        heartbeat.add_listener(lambda *_: threads.add(threading.current_thread()))
        heartbeat.beat()
        await aio_wait_until(lambda: heartbeat.answered >= 3)
    assert threads == {loop_thread}
    assert heartbeat.state is HeartbeatState.CLOSED
    assert any_timer.pending == 0


async def test_the_end_of_the_context_waits_until_no_task_is_left(asked, timer):
    asked.answer = threading.Event()
    before = asyncio.all_tasks()
    async with ReconnectingChannel(asked.target) as channel:
        async with HeartbeatManager(timer) as manager:
            heartbeat = manager.attach(channel)
            heartbeat.beat()
            await aio_wait_until(lambda: asked.checks)
            assert asyncio.all_tasks() - before
        assert asyncio.all_tasks() == before
    asked.answer.set()
    assert (heartbeat.answered, heartbeat.misses) == (0, 0)


async def test_a_plain_close_is_enough_too(asked, timer):
    asked.answer = threading.Event()
    before = asyncio.all_tasks()
    async with ReconnectingChannel(asked.target) as channel:
        manager = HeartbeatManager(timer)
        manager.attach(channel).beat()
        await aio_wait_until(lambda: asked.checks)
        manager.close()
        await aio_wait_until(lambda: asyncio.all_tasks() == before)
    asked.answer.set()


async def test_a_heartbeat_may_be_ended_and_asked_for_from_any_thread(asked, timer):
    async with ReconnectingChannel(asked.target) as channel:
        heartbeat = HeartbeatManager(timer).attach(channel)
        assert await asyncio.to_thread(heartbeat.beat)
        await aio_wait_until(lambda: heartbeat.answered == 1)
        asked.answer = threading.Event()
        heartbeat.beat()
        await aio_wait_until(lambda: len(asked.checks) == 2)
        await asyncio.to_thread(heartbeat.detach)
        await heartbeat.ended()
        asked.answer.set()
    assert (heartbeat.state, heartbeat.answered) == (HeartbeatState.CLOSED, 1)
    assert timer.pending == 0


def test_without_a_loop_nothing_is_attached(asked, timer):
    class Channel:
        unary_unary = print

    manager = HeartbeatManager(timer)
    with pytest.raises(RuntimeError, match="no running event loop"):
        manager.attach(Channel())
    assert (manager.heartbeats, timer.pending) == ((), 0)


async def test_heartbeats_on_a_new_connection_wait_for_it(asked, timer):
    patient = []

    class Watch(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            patient.append(details.wait_for_ready)
            return await continuation(details, request)

    async with (
        ReconnectingChannel(asked.target, interceptors=[Watch()]) as channel,
        HeartbeatManager(timer) as manager,
    ):
        heartbeat = manager.attach(channel)
        heartbeat.beat()
        await aio_wait_until(lambda: heartbeat.answered == 1)
        assert channel.reconnect(force=True)
        timer.advance(121.0)
        await aio_wait_until(lambda: heartbeat.answered == 2)
    assert patient == [None, True]


async def test_a_channel_of_the_other_world_is_refused(asked, timer):
    """It would block the loop."""
    manager = HeartbeatManager(timer)
    refused = pytest.raises(
        TypeError, match=r"other world: use rpcwheel\.heartbeat\.HeartbeatManager"
    )
    with SyncChannel(asked.target) as channel, refused:
        manager.attach(channel)
    assert timer.pending == 0
