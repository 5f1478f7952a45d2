"""Forks that may wait do so together, for whoever comes up first."""

import asyncio

import grpc
import pytest

from fixtures.aio_clusters import counts, in_order, states
from fixtures.aio_doors import others, refused
from fixtures.clusters import nobody_at
from fixtures.shop import UNARY_UNARY, Fail
from fixtures.waiting import aio_wait_until
from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster.aio import ForkingInvoker


def forked(channel, timeout=500.0):
    return ForkingInvoker(channel).unary_unary(UNARY_UNARY)(
        b"x", timeout=timeout, wait_for_ready=True
    )


async def test_they_do_not_wait_for_members_that_are_down_while_another_is_up(
    shops, dead, aio_cluster
):
    with nobody_at() as other:
        channel = in_order(aio_cluster, dead, other, shops[0])
        assert await asyncio.wait_for(_awaited(forked(channel, None)), 20) == b"x"


@pytest.mark.parametrize("how", ["a probe", "a try"])
async def test_they_wait_until_any_member_is_up(shops, dead, aio_cluster, timer, how):
    shop = shops[0]
    shop.kill()
    probe = 0.5 if how == "a probe" else 1000
    channel = in_order(aio_cluster, dead, shop, policy=ClusterPolicy(probe=probe))
    waiting = asyncio.create_task(_awaited(forked(channel)))
    await aio_wait_until(lambda: states(channel) == ["DOWN", "DOWN"])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    shop.start()
    while not waiting.done():
        timer.advance(1.1)
        await asyncio.sleep(0.05)
    assert await waiting == b"x"


async def test_when_the_time_is_over_they_say_so(dead, aio_cluster, timer):
    channel = in_order(aio_cluster, dead, policy=ClusterPolicy(probe=1000))
    waiting = asyncio.create_task(_awaited(forked(channel, timeout=30)))
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    timer.advance(31)
    error = await refused(waiting)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "failed to connect" in error.details()


async def test_a_failure_of_a_server_is_not_waited_past(shops, dead, aio_cluster):
    channel = in_order(aio_cluster, dead, shops[0])
    shops[0].then(Fail("NOT_FOUND"))
    assert (await refused(forked(channel))).code() is not grpc.StatusCode.OK
    assert counts(shops) == [1, 0, 0]


async def test_forks_that_wait_can_be_cancelled(dead, aio_cluster, timer):
    channel, before = in_order(aio_cluster, dead), len(others())
    call = forked(channel)
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    assert call.cancel()
    await aio_wait_until(lambda: len(others()) == before)


async def _awaited(call):
    return await call
