"""A channel of grpc.aio that is retired: no new calls, and closed when the last one has ended."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import KINDS, Stub, hanging
from fixtures.aio_doors import refused
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import aio_wait_until
from rpcwheel.channel.aio import ReconnectingChannel
from rpcwheel.errors import ConfigurationError

SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_runs_goes_on_and_none_may_begin(shop, channel, timer, kind):
    call, told = await hanging(shop, channel, kind), []
    channel.on_close(lambda: told.append(channel.calls))
    channel.retire()
    for one in KINDS:
        with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
            getattr(Stub(channel), one)(b"")
    assert not channel.replace(force=True)
    assert (channel.closed, channel.calls, timer.pending, told) == (False, 1, 0, [])
    shop.calls[-1].ended.set()
    if kind.startswith("stream"):
        await call.done_writing()
    await aio_wait_until(lambda: channel.closed)
    assert await call.code() is grpc.StatusCode.OK
    assert (channel.calls, told) == (0, [0])
    await aio_wait_until(lambda: channel.get_state() is SHUTDOWN)


async def test_one_without_calls_is_closed_at_once(channel):
    await channel.unary_unary(UNARY_UNARY)(b"x")
    channel.retire(30.0)
    assert channel.closed
    assert not channel.replace(force=True)
    channel.retire()
    await channel.close()
    assert channel.get_state() is SHUTDOWN


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_that_are_out_of_time_end_with_the_reason(shop, channel, timer, kind):
    call = await hanging(shop, channel, kind)
    channel.retire(3.0, reason="10.0.0.7:50051 was removed")
    timer.advance(2.9)
    await asyncio.sleep(0.01)
    assert not call.done()
    timer.advance(0.2)
    error = await refused(call if kind.endswith("unary") else call.read())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "channel retired: 10.0.0.7:50051 was removed"
    assert (channel.closed, channel.calls, timer.pending) == (True, 0, 0)
    await aio_wait_until(shop.calls[-1].ended.is_set)


async def test_without_time_they_are_ended_now(shop, channel):
    call = await hanging(shop, channel)
    channel.retire(0)
    assert channel.closed
    assert (await refused(call)).details() == "channel retired: asked for"


async def test_the_time_can_only_become_shorter(shop, channel, timer):
    call = await hanging(shop, channel)
    for drain in (None, 9.0, 2.0, 60.0):
        channel.retire(drain, reason=f"within {drain}")
    assert timer.pending == 1
    timer.advance(2.1)
    assert (await refused(call)).details() == "channel retired: within None"


async def test_calls_on_connections_that_were_replaced_are_waited_for_too(shop, channel, timer):
    old = await hanging(shop, channel)
    channel.replace("silent", drain=60.0)
    new = await hanging(shop, channel)
    channel.retire(5.0)
    new.cancel()
    await aio_wait_until(lambda: channel.calls == 1)
    assert not channel.closed
    timer.advance(5.1)
    assert (await refused(old)).details() == "connection replaced: silent"
    assert (channel.closed, timer.pending) == (True, 0)


async def test_close_ends_what_still_drains(shop, channel, timer):
    call = await hanging(shop, channel)
    channel.retire(60.0)
    await channel.close()
    assert (call.cancelled(), channel.closed, channel.calls, timer.pending) == (True, True, 0, 0)
    channel.retire(1.0)


async def test_what_makes_no_sense_is_refused_and_changes_nothing(channel):
    with pytest.raises(TypeError):
        channel.retire("soon")
    with pytest.raises(ConfigurationError):
        channel.retire(-1)
    with pytest.raises(TypeError):
        channel.retire(reason=7)
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_one_that_is_dropped_while_it_drains_is_gone(shop, timer):
    channel = ReconnectingChannel(shop.target, timer=timer)
    call = await hanging(shop, channel)
    channel.retire(600)
    call.cancel()
    del call
    gone = weakref.ref(channel)
    del channel
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
