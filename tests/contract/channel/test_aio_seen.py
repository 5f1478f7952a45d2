"""What is seen of a channel of grpc.aio: its state across replacements."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import hanging
from fixtures.shop import UNARY_UNARY

IDLE, READY, FAILING, SHUTDOWN = (
    grpc.ChannelConnectivity[name] for name in ("IDLE", "READY", "TRANSIENT_FAILURE", "SHUTDOWN")
)


async def test_its_state_is_that_of_the_active_connection(channel):
    assert channel.get_state() is IDLE
    assert channel.is_idle()
    await asyncio.wait_for(channel.channel_ready(), 20)
    assert channel.get_state() is READY
    assert not channel.is_idle()
    channel.replace()
    assert channel.is_idle()
    await channel.close()
    assert not channel.is_idle()


async def test_a_replacement_is_a_change_of_state(shop, channel):
    call = await hanging(shop, channel)  # so that the old connection stays as it is
    waiting = [asyncio.create_task(channel.wait_for_state_change(READY)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    channel.replace()
    await asyncio.wait_for(asyncio.gather(*waiting), 20)
    await channel.wait_for_state_change(READY)  # at once: it is idle
    call.cancel()


async def test_who_waits_for_another_state_is_woken_by_no_old_connection(shop, channel):
    waiting = asyncio.create_task(channel.wait_for_state_change(IDLE))
    await asyncio.sleep(0.01)
    channel.replace(force=True)  # idle again
    await asyncio.sleep(0.05)
    assert not waiting.done()
    channel.get_state(try_to_connect=True)
    await asyncio.wait_for(waiting, 20)


async def test_ready_is_waited_for_across_replacements(make, shop):
    targets = ["127.0.0.1:1", shop.target]
    channel = make(connect=lambda options: grpc.aio.insecure_channel(targets.pop(0), options))
    waiting = asyncio.create_task(channel.channel_ready())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    channel.replace()
    await asyncio.wait_for(waiting, 20)
    assert channel.get_state() is READY


async def test_close_wakes_who_waits_as_grpc_does(shop, channel):
    bare = grpc.aio.insecure_channel(shop.target)
    told = []
    for one in (bare, channel):
        await one.channel_ready()
        change = asyncio.create_task(one.wait_for_state_change(READY))
        await asyncio.sleep(0.01)
        await one.close()
        told.append(await asyncio.wait_for(asyncio.gather(change, return_exceptions=True), 20))
        after = one.wait_for_state_change(SHUTDOWN)
        told[-1] += await asyncio.gather(after, one.channel_ready(), return_exceptions=True)
    assert [repr(end) for end in told[1]] == [repr(end) for end in told[0]]


async def test_to_stop_waiting_leaves_nothing(channel):
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.wait_for_state_change(IDLE), 0.01)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("drain", [None, 0])
@pytest.mark.parametrize("steps", range(7))
async def test_ready_comes_at_whatever_step_the_connection_is_replaced(shop, make, steps, drain):
    """A step of the loop may be between any two of who waits."""
    for calls in (False, True):  # then the old connection is not closed at once
        channel = make(backoff=0)
        call = await hanging(shop, channel) if calls else None
        if calls:
            channel.replace(force=True)
        waiting = asyncio.create_task(channel.channel_ready())
        for _ in range(steps):
            await asyncio.sleep(0)
        channel.replace(drain=drain, force=True)
        await asyncio.wait_for(waiting, 20)
        if call is not None:
            call.cancel()


@pytest.mark.parametrize("steps", range(5))
async def test_who_waits_as_grpc_says_is_woken_at_whatever_step(shop, make, steps):
    channel = make(backoff=0)

    async def ready():
        state = channel.get_state(try_to_connect=True)
        while state is not READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state()  # it was asked for once

    waiting = asyncio.create_task(ready())
    for _ in range(steps):
        await asyncio.sleep(0)
    channel.replace(force=True)
    channel.replace(force=True)
    await asyncio.wait_for(waiting, 20)
    channel.replace(force=True)
    assert not channel.links.active.wanted  # the last one had its connection


@pytest.mark.parametrize("steps", range(4))
async def test_who_waits_for_a_change_misses_no_replacement(shop, channel, steps):
    call = await hanging(shop, channel)  # so that the old connection stays as it is
    waiting = asyncio.create_task(channel.wait_for_state_change(READY))
    for _ in range(steps):
        await asyncio.sleep(0)
    channel.replace()
    await asyncio.wait_for(waiting, 20)
    call.cancel()


async def test_it_says_what_it_is(shop, channel):
    said = repr(channel)
    await channel.unary_unary(UNARY_UNARY)(b"x")
    channel.replace()
    call = await hanging(shop, channel)
    name = f"<ReconnectingChannel of grpc.aio to {shop.target!r}"
    assert said == f"{name}, connection 1, IDLE, calls in flight: 0>"
    assert repr(channel) == f"{name}, connection 2, READY, calls in flight: 1>"
    call.cancel()
    await channel.close()
    assert "SHUTDOWN" in repr(channel)
