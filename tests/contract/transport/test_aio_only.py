"""What only a channel of `grpc.aio` has: call objects, tasks, a loop, and `close(grace)`."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import hanging, steps
from fixtures.aio_policy_channels import others
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.transport.aio import DEFAULT_BACKOFF, ReconnectingChannel

SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


# Calls


async def test_a_call_that_is_not_awaited_runs_and_is_counted_until_its_end(channel):
    channel.unary_unary(UNARY_UNARY)(b"x")
    assert channel.calls == 1
    await aio_wait_until(lambda: channel.calls == 0)


async def test_a_call_needs_no_task(shop, channel):
    bare, bare_tasks = grpc.aio.insecure_channel(shop.target), 0
    for one in (bare, channel):
        shop.then(*(hangs := [Hang(), Hang()]))
        before = len(others())
        calls = [one.unary_unary(UNARY_UNARY)(b"x"), one.unary_stream(UNARY_STREAM)(b"x")]
        await aio_wait_until(lambda hangs=hangs: all(hang.begun.is_set() for hang in hangs))
        if one is bare:
            bare_tasks = len(others()) - before
        else:
            await aio_wait_until(lambda most=before + bare_tasks: len(others()) <= most)
        for call in calls:
            call.cancel()
        await aio_wait_until(lambda before=before: len(others()) == before)
    await bare.close()


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


async def test_time_remaining_of_a_call(shop, channel):
    shop.then(Hang())
    call = channel.unary_unary(UNARY_UNARY)(b"x", timeout=500)
    assert 400 < call.time_remaining() <= 500
    call.cancel()
    assert channel.unary_unary(UNARY_UNARY)(b"x").time_remaining() is None


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


def test_the_default_backoff_is_a_second_at_first_and_a_minute_at_last():
    assert (DEFAULT_BACKOFF.initial, DEFAULT_BACKOFF.max, DEFAULT_BACKOFF.jitter) == (1, 60, 0.5)


# Closing


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


async def test_a_channel_that_is_dropped_while_it_drains_is_freed(shop, timer):
    channel = ReconnectingChannel(shop.target, timer=timer)
    call = await hanging(shop, channel)
    channel.drain(600)
    call.cancel()
    del call
    gone = weakref.ref(channel)
    del channel
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
