"""What only a `BroadcastChannel` of `grpc.aio` has: calls that are not awaited, or canceled."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import awaiting, others
from fixtures.balanced_channels import counts, hang_all
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.balancer.aio import BroadcastChannel
from rpcwheel.errors import ConfigurationError


def broadcast(channel):
    return BroadcastChannel(channel).unary_unary(UNARY_UNARY)


async def test_the_call_has_a_deadline_and_a_status(shops, aio_balanced):
    call = broadcast(aio_balanced(*shops))(b"x", timeout=WAIT_S)
    assert 0 < call.time_remaining() <= WAIT_S
    assert await call == {shop.target: b"x" for shop in shops}
    assert (await call.code(), await call.details()) == (grpc.StatusCode.OK, "")


@pytest.mark.parametrize("how", ["before it begins", "while it runs", "with its task"])
async def test_canceling_it_cancels_the_calls_on_all_servers(shops, aio_balanced, how):
    hangs = hang_all(shops)
    channel, before = aio_balanced(*shops), len(others())
    call = broadcast(channel)(b"x", timeout=WAIT_S)
    task = awaiting(call)
    if how != "before it begins":
        await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    assert task.cancel() if how == "with its task" else call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await call.code() is grpc.StatusCode.CANCELLED
    await aio_wait_until(lambda: (channel.calls, len(others())) == (0, before))


async def test_closing_the_channel_ends_a_call_that_waits_for_instances(aio_balanced):
    channel = aio_balanced()
    call = broadcast(channel)(b"x", wait_for_ready=True)
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_call_that_is_not_awaited_runs_to_its_end(shops, aio_balanced):
    channel = aio_balanced(*shops[:2])
    broadcast(channel)(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: counts(shops) == [1, 1, 0])
    await aio_wait_until(lambda: channel.calls == 0)


def eager_task(loop, coroutine, **_):
    """A task that ends in its first step, as `eager_task_factory` makes it from Python 3.12 on."""
    with pytest.raises(StopIteration):
        coroutine.send(None)
    ended = loop.create_future()
    ended.set_result(None)
    return ended


async def test_a_call_that_fails_in_the_first_step_of_an_eager_task_ends(aio_balanced):
    channel, loop = aio_balanced(), asyncio.get_running_loop()
    channel.update([])
    loop.set_task_factory(getattr(asyncio, "eager_task_factory", eager_task))
    call = broadcast(channel)(b"x")
    loop.set_task_factory(None)
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_state_is_that_of_the_balanced_channel(shops, aio_balanced):
    balanced = aio_balanced(shops[0])
    channel = BroadcastChannel(balanced)
    await channel.channel_ready()
    assert channel.get_state() is grpc.ChannelConnectivity.READY
    await channel.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
    with pytest.raises(ConfigurationError, match="has its own state"):
        BroadcastChannel([balanced]).get_state()
