"""A member that no call can be made on is one that can't be reached: another is called."""

import asyncio
import socket

import grpc
import pytest

from fixtures.aio_clusters import caller, counts, in_order, states
from fixtures.aio_doors import refused
from fixtures.clusters import instance
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.cluster import BroadcastFailed, ClusterPolicy
from rpcwheel.cluster.aio import BroadcastInvoker, ForkingInvoker
from rpcwheel.observe.events import ListenerFailed, MemberDown, MemberUp


def connecting(*broken):
    """Makes channels, but for members that are broken: those ids, which may be mended."""

    def connect(one, options):
        if one.id in connect.broken:
            raise KeyError("no certificate")
        connect.made[one.id] = made = grpc.aio.insecure_channel(one.target, options)
        return made

    connect.broken, connect.made = set(broken), {}
    return connect


# `connect` raises


@pytest.mark.parametrize("kind", ["unary_unary", "stream_unary"])
async def test_where_connect_raises_another_member_is_called(shops, aio_cluster, events, kind):
    channel = in_order(aio_cluster, *shops[:2], connect=connecting("000"))
    for _ in range(3):
        request = b"x" if kind == "unary_unary" else iter([b"x"])
        method = getattr(channel, kind)(f"/test.Shop/{kind.title().replace('_', '')}")
        assert await method(request, timeout=WAIT_S) == b"x"
    assert (counts(shops), states(channel)) == ([0, 3, 0], ["DOWN", "UP"])
    assert events == [MemberDown("test.Shop", "000", "connect: KeyError('no certificate')")]


async def test_what_connect_raises_for_all_is_the_callers(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=connecting("000", "001"))
    for _ in range(2):
        with pytest.raises(KeyError, match="no certificate"):
            caller(channel)()
    assert (channel.calls, states(channel)) == (0, ["DOWN", "DOWN"])


async def test_a_probe_finds_that_connect_raises_no_more(shops, aio_cluster, events, timer):
    connect = connecting("000")
    policy = ClusterPolicy(probe=0.5)
    channel = in_order(aio_cluster, *shops[:2], connect=connect, policy=policy)
    assert await caller(channel)() == b"x"
    timer.advance(0.6)
    await aio_wait_until(lambda: [one for one in events if isinstance(one, ListenerFailed)])
    connect.broken.clear()
    timer.advance(0.6)
    await aio_wait_until(lambda: isinstance(events[-1], MemberUp))
    assert states(channel) == ["UP", "UP"]


async def test_a_call_that_was_not_sent_goes_past_it_too(shops, dead, aio_cluster):
    channel = in_order(aio_cluster, dead, shops[0], shops[1], connect=connecting("001"))
    assert await caller(channel)() == b"x"
    assert counts(shops) == [0, 1, 0]


async def test_if_there_is_nobody_behind_it_the_failure_of_the_call_is_told(
    shops, dead, aio_cluster
):
    channel = in_order(aio_cluster, dead, shops[0], connect=connecting("001"))
    assert "failed to connect" in (await refused(caller(channel)())).details()


async def test_one_that_has_waited_goes_past_it_too(shops, aio_cluster):
    channel = in_order(aio_cluster, connect=connecting("000", "001"))
    channel.update([])
    calls = [caller(channel)(wait_for_ready=True) for _ in range(2)]
    channel.update([instance(shop, id=f"{place:03}") for place, shop in enumerate(shops)])
    assert [await call for call in calls] == [b"x", b"x"]
    channel.update([])
    calls = [caller(channel)(wait_for_ready=True) for _ in range(2)]
    channel.update([instance(shops[0], id="000")])
    for call in calls:
        with pytest.raises(KeyError):
            await call


async def test_a_broadcast_tells_of_it_beside_the_answers(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops[:2], connect=connecting("000"))
    call = BroadcastInvoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    with pytest.raises(BroadcastFailed, match="no certificate") as caught:
        await call
    assert caught.value.answers == {shops[1].target: b"x"}
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "000: connect: KeyError('no certificate')" in caught.value.details()


async def test_forks_go_past_it(shops, aio_cluster):
    channel = in_order(aio_cluster, *shops, connect=connecting("000"))
    shops[1].then(Fail("NOT_FOUND"))
    shops[2].then(hang := Hang())
    call = ForkingInvoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    await aio_wait_until(hang.begun.is_set)
    await aio_wait_until(lambda: counts(shops) == [0, 1, 1])
    shops[2].calls[0].ended.set()
    assert await call == b"x"


# Its connection takes long


async def test_a_call_of_little_time_does_not_prove_that_there_is_no_connection(
    aio_cluster, timer, events
):
    with socket.create_server(("127.0.0.1", 0)) as slow:  # which never says that it is there
        channel = in_order(aio_cluster, slow.getsockname()[1], policy=ClusterPolicy(probe=1000))
        for state in ("UP", "UP", "DOWN"):
            timer.advance(0.6)
            error = await refused(caller(channel, timeout=0.1)())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert states(channel) == [state]
    assert [event.reason for event in events] == ["DEADLINE_EXCEEDED without a connection"]


async def test_the_time_that_a_call_waited_for_a_member_is_not_that_of_the_connection(
    aio_cluster, timer
):
    with socket.create_server(("127.0.0.1", 0)) as slow:
        channel = aio_cluster(policy=ClusterPolicy(probe=1000, wait=50))
        timer.advance(1)
        call = caller(channel, timeout=5)()
        await asyncio.sleep(0)
        timer.advance(4.9)
        channel.update([instance(slow.getsockname()[1])])
        assert (await refused(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert states(channel) == ["UP"]


# The user has closed it


async def test_a_connection_that_the_user_has_closed_is_no_hindrance_for_others(shops, aio_cluster):
    connect = connecting()
    channel = in_order(aio_cluster, *shops[:2], connect=connect)
    assert await caller(channel)() == b"x"
    await connect.made["000"].close()
    assert await caller(channel)() == b"x"
    assert (counts(shops), states(channel)) == ([1, 1, 0], ["DOWN", "UP"])


async def test_where_it_was_the_only_one_the_caller_hears_of_it(shops, aio_cluster):
    connect = connecting()
    channel = in_order(aio_cluster, shops[0], connect=connect)
    assert await caller(channel)() == b"x"
    await connect.made["000"].close()
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        caller(channel)()


@pytest.mark.parametrize("closes", [True, False])
async def test_a_member_whose_channel_the_user_has_retired_gets_another(shops, aio_cluster, closes):
    channel = in_order(aio_cluster, shops[0])
    shops[0].then(Silent(after=1))
    stream = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    assert await stream.read() == b"a"
    former = channel.members[0].channel
    former.retire()
    assert await caller(channel)() == b"x"
    assert not former.closed
    if closes:
        await channel.close()
    else:
        stream.cancel()
    await aio_wait_until(lambda: former.closed)


async def test_a_broadcast_to_channels_tells_of_one_that_is_closed(shops):
    async with grpc.aio.insecure_channel(shops[0].target) as well:
        closed = grpc.aio.insecure_channel(shops[1].target)
        await closed.close()
        with pytest.raises(BroadcastFailed, match="Channel is closed") as caught:
            await BroadcastInvoker([well, closed]).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
        assert list(caught.value.answers.values()) == [b"x"]
        forked = ForkingInvoker([well, closed]).unary_unary(UNARY_UNARY)
        assert await forked(b"x", timeout=WAIT_S) == b"x"
