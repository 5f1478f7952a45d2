"""`ReconnectingChannel` and `BalancedChannel` of `grpc.aio`: tasks, and `close(grace)`."""

import asyncio
import gc

import grpc
import pytest

from fixtures.aio_channels import hanging, others, steps
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, aio_wait_until

CLASSES = ["reconnecting", "balanced"]


@pytest.fixture(params=CLASSES)
async def channel(request, shop, make, aio_balanced):
    """A channel of each class that is connected to the shop."""
    channel = make() if request.param == "reconnecting" else aio_balanced(shop)
    await channel.channel_ready()
    return channel


@pytest.fixture(params=CLASSES)
async def running(request, shop, make, aio_balanced):
    """A channel of each class, and a call in flight on each connection."""
    if request.param == "balanced":
        channel = aio_balanced(shop)
        return channel, [await hanging(shop, channel)]
    channel = make()
    calls = [await hanging(shop, channel)]
    channel.reconnect()
    return channel, [*calls, await hanging(shop, channel)]


async def test_a_call_that_is_not_awaited_runs_and_is_counted_until_its_end(shop, channel):
    channel.unary_unary(UNARY_UNARY)(b"x")
    gc.collect()
    assert channel.calls == 1
    await aio_wait_until(lambda: channel.calls == 0)
    assert len(shop.calls) == 1


async def test_a_call_needs_no_task(shop, channel):
    bare, most = grpc.aio.insecure_channel(shop.target), 0
    for one in (bare, channel):
        shop.then(*(hangs := [Hang(), Hang()]))
        before = len(others())
        calls = [one.unary_unary(UNARY_UNARY)(b"x"), one.unary_stream(UNARY_STREAM)(b"x")]
        await aio_wait_until(lambda hangs=hangs: all(hang.begun.is_set() for hang in hangs))
        if one is bare:
            most = len(others()) - before
        else:
            await aio_wait_until(lambda allowed=before + most: len(others()) <= allowed)
        for call in calls:
            call.cancel()
        await aio_wait_until(lambda before=before: len(others()) == before)
    await bare.close()


async def test_metadata_of_a_wrong_type_raises_its_error_to_the_caller(channel):
    metadata = (("retries", 5),)
    with pytest.raises(TypeError, match="Expected str"):
        await channel.unary_unary(UNARY_UNARY)(b"x", metadata=metadata)
    with pytest.raises(TypeError, match="Expected str"):
        await channel.stream_unary(STREAM_UNARY)(iter([b"x"]), metadata=metadata)
    for method in (channel.unary_stream(UNARY_STREAM), channel.stream_stream(STREAM_STREAM)):
        requests = b"x" if isinstance(method, grpc.aio.UnaryStreamMultiCallable) else iter([b"x"])
        with pytest.raises(TypeError, match="Expected str"):
            await method(requests, metadata=metadata).read()
    await aio_wait_until(lambda: channel.calls == 0)


async def test_calls_end_within_the_grace_of_close(shop, running):
    channel, calls = running
    waiting = asyncio.create_task(channel.wait_for_state_change(channel.get_state()))
    await steps()
    closing = asyncio.create_task(channel.close(WAIT_S))
    await asyncio.wait_for(waiting, WAIT_S)
    assert (closing.done(), channel.closed) == (False, True)
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    with pytest.raises(grpc.aio.UsageError):
        channel.unary_unary(UNARY_UNARY)(b"x")
    for seen in shop.calls:
        seen.ended.set()
    assert [await call for call in calls] == [b""] * len(calls)
    await closing


async def test_a_canceled_close_cancels_the_calls(running):
    channel, calls = running
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.close(1000), 0.05)
    await aio_wait_until(lambda: all(call.cancelled() for call in calls))
    shutdown = grpc.ChannelConnectivity.SHUTDOWN
    await aio_wait_until(lambda: (channel.calls, channel.get_state()) == (0, shutdown))


async def test_a_second_close_without_a_grace_ends_the_first(running):
    channel, calls = running
    first = asyncio.create_task(channel.close(1000))
    await steps()
    await channel.close()
    await asyncio.wait_for(first, WAIT_S)
    assert [call.cancelled() for call in calls] == [True] * len(calls)
