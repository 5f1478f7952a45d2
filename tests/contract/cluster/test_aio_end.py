"""The end of a channel of many members for grpc.aio: all that it has begun ends with it."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_clusters import caller
from fixtures.aio_doors import refused
from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster.aio import ClusterChannel
from rpcwheel.observe import ListenerFailed


async def hanging(shop, channel):
    """A call that this server does not answer."""
    shop.then(hang := Hang())
    call = asyncio.ensure_future(_awaited(caller(channel)()))
    await aio_wait_until(hang.begun.is_set)
    return call


async def _awaited(call):
    return await call


@pytest.mark.parametrize("grace", [None, 0.05])
async def test_closing_ends_calls_probes_and_members(shops, dead, aio_cluster, timer, grace):
    channel, told = aio_cluster(shops[0]), []
    running = await hanging(shops[0], channel)
    waiting = asyncio.ensure_future(_awaited(caller(aio_cluster())()))
    member = channel.members[0]
    member.down("the test says so")
    channel.on_close(lambda: told.append(running.done()))
    await channel.close(grace)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (channel.closed, channel.members, member.state, told) == (True, (), "CLOSED", [False])
    for kind in ("unary_unary", "stream_unary"):
        with pytest.raises(grpc.aio.UsageError, match=r"Channel is closed\."):
            getattr(channel, kind)(UNARY_UNARY)(b"x")
    channel.on_close(lambda: told.append("late"))
    assert told == [False, "late"]
    waiting.cancel()


async def test_closing_cancels_who_waits_for_members(aio_cluster, timer):
    channel = aio_cluster()
    waiting = asyncio.ensure_future(_awaited(caller(channel)()))
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert timer.pending == 0


async def test_closing_ends_a_probe_that_waits_for_an_answer(dead, aio_cluster, timer):
    channel = aio_cluster(dead, policy=ClusterPolicy(probe=1.0, probe_timeout=500))
    await refused(caller(channel)())
    timer.advance(1.1)
    await aio_wait_until(lambda: channel._fleet._probes)
    await asyncio.wait_for(channel.close(), 20)
    assert not channel._fleet._probes


async def test_members_that_drain_are_closed_with_the_rest(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    running = await hanging(shops[0], channel)
    channel.update([])
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_close_that_is_cancelled_ends_all_at_once(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    running = await hanging(shops[0], channel)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.close(60), 0.05)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 20)


async def test_who_is_told_of_the_end_can_have_itself_forgotten_and_may_fail(
    shops, aio_cluster, events
):
    channel, told = aio_cluster(shops[0]), []
    forget = channel.on_close(lambda: told.append("forgotten"))
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: told.append("told"))
    forget()
    forget()
    await channel.close()
    assert told == ["told"]
    assert [type(event) for event in events] == [ListenerFailed]


async def test_one_that_is_dropped_is_gone(shops, timer):
    channel = ClusterChannel("s", [instance(one) for one in shops], timer=timer, options=IMPATIENT)
    await channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    channel.members[0].down("the test says so")
    forget, seen = channel.on_close(print), weakref.ref(channel._fleet)
    del channel
    await aio_wait_until(lambda: (gc.collect(), seen())[1] is None)
    timer.advance(60)  # what waits for a probe finds nobody
    forget()
    assert timer.pending == 0
