"""The state of a channel of grpc.aio across reconnects."""

import asyncio
import itertools

import grpc
import pytest

from fixtures.aio_channels import hanging, steps
from fixtures.waiting import WAIT_S

IDLE, READY, SHUTDOWN = (grpc.ChannelConnectivity[name] for name in ("IDLE", "READY", "SHUTDOWN"))


async def test_wait_for_state_change_ignores_old_connections(shop, channel):
    waiting = asyncio.create_task(channel.wait_for_state_change(IDLE))
    await steps(5)
    channel.reconnect(force=True)  # idle again
    await steps(20)
    assert not waiting.done()
    channel.get_state(try_to_connect=True)
    await asyncio.wait_for(waiting, WAIT_S)


async def test_channel_ready_waits_across_reconnects(make, shop):
    targets = ["127.0.0.1:1", shop.target]
    channel = make(connect=lambda options: grpc.aio.insecure_channel(targets.pop(0), options))
    waiting = asyncio.create_task(channel.channel_ready())
    await steps(20)
    assert not waiting.done()  # no server listens on the first target
    channel.reconnect()
    await asyncio.wait_for(waiting, WAIT_S)
    assert channel.get_state() is READY


async def test_close_ends_waits_for_a_state(shop, channel):
    bare = grpc.aio.insecure_channel(shop.target)
    results = []
    for one in (bare, channel):
        await one.channel_ready()
        change = asyncio.create_task(one.wait_for_state_change(READY))
        await steps(20)
        await one.close()
        results.append(
            await asyncio.wait_for(asyncio.gather(change, return_exceptions=True), WAIT_S)
        )
        after = one.wait_for_state_change(SHUTDOWN)
        results[-1] += await asyncio.gather(after, one.channel_ready(), return_exceptions=True)
    assert [repr(end) for end in results[1]] == [repr(end) for end in results[0]]


async def test_a_canceled_wait_leaves_no_task(channel):
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.wait_for_state_change(IDLE), 0.01)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("busy", [False, True])
async def test_channel_ready_returns_if_reconnected_at_any_step_of_the_loop(shop, make, busy):
    """Every number of iterations of the loop between the two; a busy old connection stays open."""
    for count, drain in itertools.product(range(7), (None, 0)):
        channel = make(backoff=0)
        call = await hanging(shop, channel) if busy else None
        if busy:
            channel.reconnect(force=True)
        ready = asyncio.create_task(channel.channel_ready())
        await steps(count)
        channel.reconnect(drain_timeout=drain, force=True)
        await asyncio.wait_for(ready, WAIT_S)
        channel.reconnect(force=True)
        assert channel.get_state() is IDLE  # the last connection was READY
        if call is not None:
            call.cancel()
        await channel.close()


async def test_wait_for_state_change_misses_no_reconnect(shop, make):
    for count in range(4):
        channel = make()
        call = await hanging(shop, channel)  # so that the old connection stays open
        waiting = [asyncio.create_task(channel.wait_for_state_change(READY)) for _ in range(3)]
        await steps(count)
        channel.reconnect()
        await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
        call.cancel()
        await channel.close()
