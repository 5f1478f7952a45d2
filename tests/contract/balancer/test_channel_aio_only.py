"""What only a balanced channel of `grpc.aio` has: awaited states, its loop, and `close(grace)`."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import (
    Stub,
    awaiting,
    caller,
    connect_all,
    hanging,
    others,
    refused,
    steps,
    still_waits,
)
from fixtures.balanced_channels import counts, instance, subchannel_of
from fixtures.event_loops import uvloop
from fixtures.grpc_servers import IMPATIENT
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.balancer.aio import BalancedChannel

State = grpc.ChannelConnectivity

PATIENT = BalancerPolicy(pick_timeout=WAIT_S)


# State


async def test_channel_ready_connects_and_waits_across_updates(shops, dead, aio_balanced):
    channel = aio_balanced()
    ready = asyncio.create_task(channel.channel_ready())
    for instances in ([], [instance(dead)], [instance(dead), instance(shops[0])]):
        assert await still_waits(ready)
        channel.update(instances)
    await asyncio.wait_for(ready, WAIT_S)
    assert channel.get_state() is State.READY


async def test_channel_ready_raises_if_the_channel_is_closed(dead, aio_balanced):
    channel = aio_balanced(dead)
    ready = asyncio.create_task(channel.channel_ready())
    await steps(20)
    await channel.close()
    for waiting in (ready, channel.channel_ready()):
        with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
            await asyncio.wait_for(waiting, WAIT_S)


async def test_a_change_of_the_state_is_awaited_and_leaves_no_task(shops, aio_balanced):
    channel = aio_balanced(*shops[:2])
    await connect_all(channel)
    before = len(others())
    changed = asyncio.create_task(channel.wait_for_state_change(State.READY))
    assert await still_waits(changed)
    shops[0].kill()
    shops[1].kill()
    await asyncio.wait_for(changed, WAIT_S)
    await asyncio.wait_for(channel.wait_for_state_change(State.READY), WAIT_S)
    canceled = asyncio.create_task(channel.wait_for_state_change(State.SHUTDOWN))
    await asyncio.sleep(0)
    canceled.cancel()
    await aio_wait_until(lambda: len(others()) <= before)


async def test_subchannels_that_hide_their_state_count_as_ready(shops, aio_balanced, events):
    def hidden(*_, **__):
        raise NotImplementedError

    def connect(one, options):
        channel = grpc.aio.insecure_channel(one.target, options)
        channel.get_state = hidden
        return channel

    channel = aio_balanced(shops[0], connect=connect)
    assert await caller(channel)() == b"x"
    assert channel.get_state() is State.READY
    await channel.channel_ready()
    assert events == []


# Its loop, and other threads


def test_it_may_be_made_and_updated_before_there_is_a_loop(shops, timer):
    given = {"timer": timer, "balancer_policy": PATIENT, "options": IMPATIENT}
    made = BalancedChannel("test.Shop", [instance(shops[0])], **given)
    waiting = BalancedChannel("test.Shop", **given)
    waiting.update([instance(shops[2])])
    waiting.update([instance(shops[1])])
    made.subchannels[0].mark_unhealthy("the test wants it")
    assert (len(made.subchannels), len(waiting.subchannels)) == (1, 1)

    async def call():
        async with made, waiting:
            return [await caller(channel)() for channel in (made, waiting)]

    assert asyncio.run(call()) == [b"x", b"x"]
    assert (counts(shops), timer.pending) == ([1, 1, 0], 0)


def test_before_there_is_a_loop_updates_leave_nothing(timer):
    channel, removed = BalancedChannel("test.Shop", on_removed=print, timer=timer), []
    for port in range(1, 20):
        channel.update([instance(port)])
        removed.append(weakref.ref(channel.subchannels[0]))
    assert wait_until(lambda: (gc.collect(), not any(one() for one in removed[:-1]))[1])


def test_calls_wait_on_another_loop_after_one_that_ended_while_a_call_waited(shops, timer):
    channel = BalancedChannel("test.Shop", timer=timer, balancer_policy=PATIENT, options=IMPATIENT)

    async def begin():
        return caller(channel)()

    async def call():
        async with channel, asyncio.timeout(WAIT_S):
            waiting = awaiting(caller(channel)())
            await steps()
            channel.update([instance(shops[0])])
            return await waiting

    call_of_the_first = asyncio.run(begin())
    assert asyncio.run(call()) == b"x"
    del call_of_the_first


async def test_other_threads_may_update_it_and_report_an_error(shops, aio_balanced):
    channel = aio_balanced()
    failing, call = (awaiting(caller(channel)(wait_for_ready=wait)) for wait in (None, True))
    await asyncio.sleep(0)
    await asyncio.to_thread(channel.report_error, "the registry is unreachable")
    assert "the registry is unreachable" in (await refused(failing)).details()
    await asyncio.to_thread(channel.update, [instance(shops[0])])
    assert await call == b"x"
    for number in range(50):
        await asyncio.to_thread(channel.update, [instance(shops[number % 3])])
    with pytest.raises(TypeError, match="ServiceInstance"):
        await asyncio.to_thread(channel.update, [instance(shops[0]), None])
    assert [one.address for one in channel.subchannels] == [shops[1].target]
    assert await caller(channel)() == b"x"


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_calls_of_each_kind_and_their_end_on_uvloop(shops, timer):
    async def main():
        channel = BalancedChannel("test.Shop", timer=timer, balancer_policy=PATIENT)
        stub = Stub(channel)
        waiting = [awaiting(stub.unary_unary(b"ab")), awaiting(stub.stream_unary([b"a", b"b"]))]
        reading = awaiting(stub.unary_stream(b"ab").read())
        await asyncio.to_thread(channel.update, [instance(shop) for shop in shops])
        assert await asyncio.gather(*waiting, reading) == [b"ab", b"ab", b"a"]
        await channel.channel_ready()
        inner = subchannel_of(channel, shops[0]).channel
        ended = await hanging(shops[0], inner)
        inner.reconnect("it is dead", drain_timeout=0, force=True)
        with pytest.raises(grpc.aio.AioRpcError, match="it is dead"):
            await ended
        await channel.close()

    uvloop.run(main())


# Closing


async def test_a_waiting_call_begins_and_ends_within_the_grace(shops, aio_balanced):
    channel = aio_balanced()
    waiting = awaiting(caller(channel)())
    await asyncio.sleep(0)
    closing = asyncio.create_task(channel.close(WAIT_S))
    assert await still_waits(closing)
    channel.update([instance(shops[0])])
    assert await waiting == b"x"
    await closing


@pytest.mark.parametrize("grace", [None, 0.05, 1000])
async def test_waiting_calls_are_canceled_after_the_grace_or_with_close(aio_balanced, grace):
    channel = aio_balanced()
    stub = Stub(channel)
    waiting = [stub.unary_unary(b"x"), stub.unary_stream(b"x"), stub.stream_unary()]
    await asyncio.sleep(0)
    closing = asyncio.create_task(channel.close(grace))
    if grace == 1000:
        await steps()
        closing.cancel()
    await asyncio.wait([closing], timeout=WAIT_S)
    await aio_wait_until(lambda: all(call.cancelled() for call in waiting))
    assert channel.calls == 0


async def test_a_running_call_is_canceled_after_the_grace(shops, aio_balanced):
    channel = aio_balanced(shops[0])
    running = await hanging(shops[0], channel)
    await channel.close(0.01)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_closing_ends_a_health_check_that_runs(shops, aio_balanced):
    channel = aio_balanced(shops[0], policy={"health_check_timeout": 500})
    await connect_all(channel)
    shops[0].kill()
    channel.update([])  # checks with wait_for_ready whether it still answers
    await steps()
    await asyncio.wait_for(channel.close(), WAIT_S)
