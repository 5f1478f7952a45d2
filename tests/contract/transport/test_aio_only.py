"""What only a channel of `grpc.aio` has: call objects, tasks, a loop, and `close(grace)`."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import hanging
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import aio_wait_until
from rpcwheel.transport.aio import ReconnectingChannel

SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


# Calls


@BUGS_OF_INTERCEPTORS
async def test_a_call_that_an_interceptor_does_not_start_is_not_counted(make):
    class Broken(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            raise KeyError("a bug")

    channel = make(interceptors=[Broken()])
    member = channel.unary_unary(UNARY_UNARY)
    with pytest.raises(KeyError):
        await member(b"awaited")
    assert channel.calls == 0
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # a callback of grpc.aio raises
    member(b"forgotten")
    await aio_wait_until(lambda: (gc.collect(), channel.calls)[1] == 0)


async def test_a_response_stamps_the_activity_after_other_calls_on_the_call_object(channel, timer):
    for number, question in enumerate(("code", "initial_metadata", "add_done_callback"), start=1):
        channel.reconnect(force=True)
        call = channel.unary_unary(UNARY_UNARY)(b"x")
        timer.advance(5)
        if question == "add_done_callback":
            call.add_done_callback(lambda _: None)
        else:
            await getattr(call, question)()
        assert await call == b"x"
        activity = channel.activity
        assert activity.last_read_ns == activity.last_use_ns == 5 * 10**9 * number


def test_reconnect_needs_a_running_loop():
    made = []

    async def use():
        made.append(ReconnectingChannel("127.0.0.1:1"))

    asyncio.run(use())
    with pytest.raises(RuntimeError, match="no running event loop"):
        made[0].reconnect()


# Closing


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
