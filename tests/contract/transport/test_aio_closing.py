"""`close`, `drain` and garbage collection of channels of grpc.aio."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import KINDS, Stub, hanging, steps
from fixtures.aio_policy_channels import refused
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.events import CallbackFailed
from rpcwheel.transport.aio import ReconnectingChannel

SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


# Closed


@pytest.mark.parametrize("grace", [None, 0.05])
async def test_close_cancels_the_calls_on_all_connections(shop, channel, timer, grace):
    async def awaited(call):
        return await call

    calls = []
    for drain in (None, 60.0, None):
        calls.append(await hanging(shop, channel))
        channel.reconnect(drain_timeout=drain, force=True)
    waiting = [asyncio.create_task(awaited(call)) for call in calls]
    await steps()
    assert timer.pending == 1
    await channel.close(grace)
    for task in waiting:
        with pytest.raises(asyncio.CancelledError):
            await task
    seen = (channel.closed, channel.calls, timer.pending, channel.get_state(), channel.reconnect())
    assert seen == (True, 0, 0, SHUTDOWN, False)
    await channel.close()


async def test_the_grace_of_close_applies_to_all_connections(shop, channel):
    calls = [await hanging(shop, channel)]
    channel.reconnect()
    calls.append(await hanging(shop, channel))
    closing = asyncio.create_task(channel.close(WAIT_S))
    await steps()
    with pytest.raises(grpc.aio.UsageError):
        channel.unary_unary(UNARY_UNARY)(b"x")
    for seen in shop.calls:
        seen.ended.set()
    await closing
    assert [call.done() and not call.cancelled() for call in calls] == [True, True]


async def test_a_canceled_close_cancels_all_calls(shop, channel):
    calls = [await hanging(shop, channel)]
    channel.reconnect()
    calls.append(await hanging(shop, channel))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.close(60), 0.05)
    await aio_wait_until(lambda: all(call.cancelled() for call in calls))
    await aio_wait_until(lambda: (channel.calls, channel.get_state()) == (0, SHUTDOWN))


async def test_a_second_close_changes_the_grace(shop, channel):
    call = await hanging(shop, channel)
    first = asyncio.create_task(channel.close(60))
    await asyncio.sleep(0)
    await channel.close()
    await asyncio.wait_for(first, WAIT_S)
    assert call.cancelled()


async def test_the_channel_is_closed_although_a_close_callback_raises(shop, channel):
    call = await hanging(shop, channel)

    def callback():
        raise GeneratorExit

    channel.on_close(callback)
    with pytest.raises(GeneratorExit):
        await channel.close()
    assert call.cancelled()


async def test_close_callbacks_are_called_once(channel, events):
    notified = []
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: notified.append(1))
    forget = channel.on_close(lambda: notified.append("never"))
    forget()
    forget()
    await channel.close()
    await channel.close()
    assert notified == [1]
    channel.on_close(lambda: notified.append(2))
    assert notified == [1, 2]
    (event,) = events
    assert isinstance(event, CallbackFailed)


async def test_the_function_that_removes_a_callback_does_not_keep_the_channel_alive(shop):
    channel = ReconnectingChannel(shop.target)
    forget, gone = channel.on_close(print), weakref.ref(channel)
    del channel
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    forget()


async def test_a_dropped_channel_is_freed_although_a_drain_timeout_is_pending(shop, timer):
    async def dropped():
        # Not in a coroutine that waits: before 1.83 grpc.aio reads the variables of all waiting
        # frames when it closes a channel, and Python up to 3.12 keeps them.
        channel = ReconnectingChannel(shop.target, timer=timer)
        call = await hanging(shop, channel)
        channel.reconnect(drain_timeout=600)
        call.cancel()
        await aio_wait_until(lambda: timer.pending == 0)  # the lambda must not hold the channel
        return weakref.ref(channel)

    gone = await dropped()
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)


# Retired


async def test_a_draining_channel_finishes_calls_and_refuses_new_ones(shop, channel, timer):
    calls, notified = {kind: await hanging(shop, channel, kind) for kind in KINDS}, []
    channel.on_close(lambda: notified.append(channel.calls))
    channel.drain()
    for kind in KINDS:
        with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
            getattr(Stub(channel), kind)(b"")
    assert not channel.reconnect(force=True)
    assert (channel.closed, channel.calls, timer.pending, notified) == (False, len(KINDS), 0, [])
    for seen in shop.calls:
        seen.ended.set()
    for kind, call in calls.items():
        if kind.startswith("stream"):
            await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    await aio_wait_until(lambda: channel.closed)
    assert (channel.calls, notified) == (0, [0])
    await aio_wait_until(lambda: channel.get_state() is SHUTDOWN)


async def test_drain_closes_a_channel_without_calls_at_once(channel):
    await channel.unary_unary(UNARY_UNARY)(b"x")
    channel.drain(30.0)
    assert channel.closed
    assert not channel.reconnect(force=True)
    channel.drain()
    await channel.close()
    assert channel.get_state() is SHUTDOWN


async def test_calls_end_with_the_reason_after_the_drain_timeout(shop, channel, timer):
    calls = {kind: await hanging(shop, channel, kind) for kind in KINDS}
    channel.drain(3.0, reason="10.0.0.7:50051 was removed")
    timer.advance(2.9)
    await steps()
    assert not any(call.done() for call in calls.values())
    timer.advance(0.2)
    for kind, call in calls.items():
        error = await refused(call if kind.endswith("unary") else call.read())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "channel drained: 10.0.0.7:50051 was removed"
    assert (channel.closed, channel.calls, timer.pending) == (True, 0, 0)
    await aio_wait_until(lambda: all(seen.ended.is_set() for seen in shop.calls))


async def test_a_drain_timeout_of_zero_ends_calls_at_once(shop, channel):
    call = await hanging(shop, channel)
    channel.drain(0)
    assert channel.closed
    assert (await refused(call)).details() == "channel drained: asked for"


async def test_a_second_drain_can_only_shorten_the_timeout(shop, channel, timer):
    call = await hanging(shop, channel)
    for drain in (None, 9.0, 2.0, 60.0):
        channel.drain(drain, reason=f"within {drain}")
    assert timer.pending == 1
    timer.advance(2.1)
    assert (await refused(call)).details() == "channel drained: within None"


async def test_drain_waits_for_calls_on_replaced_connections(shop, channel, timer):
    old = await hanging(shop, channel)
    channel.reconnect("silent", drain_timeout=60.0)
    new = await hanging(shop, channel)
    channel.drain(5.0)
    new.cancel()
    await aio_wait_until(lambda: channel.calls == 1)
    assert not channel.closed
    timer.advance(5.1)
    assert (await refused(old)).details() == "connection replaced: silent"
    assert (channel.closed, timer.pending) == (True, 0)


async def test_close_ends_a_drain(shop, channel, timer):
    call = await hanging(shop, channel)
    channel.drain(60.0)
    await channel.close()
    assert (call.cancelled(), channel.closed, channel.calls, timer.pending) == (True, True, 0, 0)
    channel.drain(1.0)


async def test_a_channel_that_is_dropped_while_it_drains_is_freed(shop, timer):
    channel = ReconnectingChannel(shop.target, timer=timer)
    call = await hanging(shop, channel)
    channel.drain(600)
    call.cancel()
    del call
    gone = weakref.ref(channel)
    del channel
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
