"""What connections and loops keep of heartbeats, by the private fields that hold it."""

import asyncio
import threading

from fixtures.waiting import aio_wait_until, wait_until
from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.heartbeat.aio import HeartbeatManager
from rpcwheel.timer import ManualTimer
from rpcwheel.transport.aio import ReconnectingChannel


def test_a_connection_keeps_nothing_of_heartbeats_that_were_detached(twin, channel, manager):
    for _ in range(5):
        twin.do(manager.attach, channel).detach()
    assert channel._close_callbacks._callbacks == []


def test_a_loop_that_is_gone_ends_its_heartbeats(asked):
    timer = ManualTimer()
    kept = []

    async def main():
        async with ReconnectingChannel(asked.target) as channel:
            manager = HeartbeatManager(timer)
            kept.extend((manager, manager.attach(channel)))
            kept[1]._when_over(None)
            # As if the loop had ended without closing it.
            channel._close_callbacks._callbacks.clear()

    asyncio.run(main())
    manager, heartbeat = kept
    assert timer.pending == 1
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.state is HeartbeatState.CLOSED)
    assert (manager.heartbeats, timer.pending) == ((), 0)
    timer.stop()


async def test_a_task_that_is_cancelled_meanwhile_is_missed_in_time_and_hurts_nobody(
    asked, timer, events
):
    """As `asyncio.run` cancels all of them when the program ends: that is not worth telling."""
    asked.answer = threading.Event()
    async with (
        ReconnectingChannel(asked.target) as channel,
        HeartbeatManager(timer) as manager,
    ):
        heartbeat = manager.attach(channel)
        heartbeat.beat()
        await aio_wait_until(lambda: asked.checks)
        for task in set(heartbeat._tasks):
            task.cancel()
        await heartbeat.ended()
        assert (heartbeat.misses, events) == (0, [])
        asked.answer.set()
        timer.advance(20.1)
        await aio_wait_until(lambda: heartbeat.answered == 1)
        assert (heartbeat.sent, heartbeat.state) == (2, HeartbeatState.ALIVE)


def test_many_attached_at_once_spread_over_the_interval(twin, asked, manager, timer):
    channels = [twin.do(twin.plain, asked.target) for _ in range(200)]
    for channel in channels:
        twin.do(manager.attach, channel)
    deadlines = sorted(heartbeat._timeout.deadline for heartbeat in manager.heartbeats)
    twin.do(manager.close)
    assert deadlines[0] > 60.0
    assert deadlines[-1] <= 120.6
    for third in range(3):  # about 67 in each third of the interval
        low, high = 60 + 20 * third, 80 + 20 * third
        assert 30 <= sum(low <= at < high for at in deadlines) <= 120
    for channel in channels:
        twin.do(channel.close)
