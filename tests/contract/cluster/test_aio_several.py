"""A call that is several at once waits, ends and is cancelled as any other."""

import asyncio

import grpc
import pytest

from fixtures.aio_clusters import counts
from fixtures.aio_doors import others, refused
from fixtures.clusters import instance
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.channel.aio import ReconnectingChannel
from rpcwheel.cluster import BroadcastFailed, ClusterPolicy
from rpcwheel.cluster.aio import BroadcastInvoker, ForkingInvoker


def forked(channel, forks=2):
    return ForkingInvoker(channel, forks).unary_unary(UNARY_UNARY)


def broadcast(channel):
    return BroadcastInvoker(channel).unary_unary(UNARY_UNARY)


@pytest.fixture
async def channels(shops, timer):
    """A channel to each server."""
    channels = [ReconnectingChannel(shop.target, timer=timer) for shop in shops]
    yield channels
    for channel in channels:
        await channel.close()


async def test_the_deadline_holds(shops, aio_cluster):
    for shop in shops:
        shop.then(Hang())
    error = await refused(forked(aio_cluster(*shops), 3)(b"x", timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_fork_waits_for_members_too(shops, aio_cluster, timer):
    channel = aio_cluster(policy=ClusterPolicy(wait=7))
    late, patient = (
        asyncio.ensure_future(_awaited(forked(channel)(b"x", timeout=WAIT_S, wait_for_ready=ready)))
        for ready in (None, True)
    )
    await asyncio.sleep(0.01)
    timer.advance(7.1)
    assert "known yet" in (await refused(late)).details()
    channel.update([instance(shops[0])])
    assert await patient == b"x"


async def test_closing_ends_a_fork_that_waits_for_members(aio_cluster):
    channel = aio_cluster()
    call = asyncio.ensure_future(_awaited(forked(channel)(b"x", timeout=WAIT_S)))
    await asyncio.sleep(0.01)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.parametrize("invoker", [lambda one: ForkingInvoker(one, 3), BroadcastInvoker])
@pytest.mark.parametrize("begun", [False, True])
async def test_cancelling_it_cancels_all(shops, aio_cluster, begun, invoker):
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    channel, before = aio_cluster(*shops), len(others())
    call = invoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    if begun:
        await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await aio_wait_until(lambda: (channel.calls, len(others())) == (0, before))


async def test_a_member_that_is_closed_meanwhile_is_an_error_of_its_own(shops, channels):
    for shop in shops:
        shop.then(Hang())
    call = asyncio.ensure_future(_awaited(broadcast(channels)(b"x", timeout=WAIT_S)))
    await aio_wait_until(lambda: counts(shops) == [1, 1, 1])
    await channels[0].close()
    for shop in shops[1:]:
        shop.calls[0].ended.set()
    with pytest.raises(BroadcastFailed) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert len(caught.value.answers) == 2


async def test_one_that_nobody_awaits_runs_to_its_end(shops, aio_cluster):
    channel = aio_cluster(*shops[:2])
    broadcast(channel)(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: counts(shops) == [1, 1, 0])
    await aio_wait_until(lambda: channel.calls == 0)


async def test_a_timeout_that_is_none_is_refused_at_once(shops, aio_cluster):
    with pytest.raises(TypeError, match="timeout must be seconds"):
        forked(aio_cluster(shops[0]))(b"x", timeout="soon")


async def _awaited(call):
    return await call
