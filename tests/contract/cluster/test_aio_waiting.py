"""While there is nobody to call, a call waits: for a change, and no longer than it may."""

import asyncio
import contextvars
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub, steps
from fixtures.aio_clusters import begun, caller, counts, in_order, states
from fixtures.aio_doors import refused
from fixtures.clusters import instance, nobody_at
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.cluster import ClusterPolicy, ConsistentHash, Picker


async def test_calls_wait_until_instances_are_known(shops, aio_cluster):
    channel = aio_cluster()
    rows = [(style, kind) for style in STYLES.values() for kind in KINDS]
    waiting = [asyncio.create_task(style(Stub(channel), kind)) for style, kind in rows]
    await steps(20)
    assert not any(task.done() for task in waiting)
    channel.update([instance(shops[0])])
    answers = await asyncio.gather(*waiting)
    assert answers == [ANSWERS[kind] for _, kind in rows]


async def test_one_that_has_waited_has_the_metadata_of_its_call(shops, aio_cluster):
    channel = aio_cluster()
    metadata = grpc.aio.Metadata(("who", "me"))
    call = caller(channel)(metadata=metadata)
    metadata["who"] = "another"
    channel.update([instance(shops[0])])
    assert await call == b"x"
    assert shops[0].calls[0].metadata["who"] == "me"


async def test_one_that_has_waited_is_made_in_its_callers_context(shops, aio_cluster):
    seen, mine = [], contextvars.ContextVar("mine", default="nobody's")

    class Sees(Picker):
        def prepare(self, members, weights):
            return lambda *_: (seen.append(mine.get()), members[0])[1]

    channel = aio_cluster(balance=Sees())
    mine.set("the caller's")
    call = caller(channel)()
    mine.set("another's")
    channel.update([instance(shops[0])])
    assert await call == b"x"
    assert seen == ["the caller's"]


@pytest.mark.parametrize("own", [None, 3, 500])
async def test_it_waits_no_longer_than_it_may(aio_cluster, timer, own):
    channel = aio_cluster(policy=ClusterPolicy(wait=7))
    call = caller(channel)(timeout=own)
    waiting = begun(call)
    limit = 3 if own == 3 else 7
    timer.advance(limit - 0.1)
    await steps(20)
    assert not call.done()
    left = call.time_remaining()
    assert (left is None) if own is None else (0 < left <= own)
    timer.advance(0.2)
    error = await refused(waiting)
    assert error.code().name == ("DEADLINE_EXCEEDED" if own == 3 else "UNAVAILABLE")
    assert error.details() == "no instance of test.Shop is known yet"
    assert call.time_remaining() is None or call.time_remaining() >= 0


async def test_it_does_not_wait_where_that_is_not_allowed_or_vain(aio_cluster):
    channel = aio_cluster(policy=ClusterPolicy(wait=0))
    error = await refused(caller(channel)())
    assert error.details() == "no instance of test.Shop is known yet"
    channel.update([])
    assert (await refused(caller(channel)())).details() == "no instance of test.Shop is known"


async def test_who_waits_is_told_that_nothing_can_be_known(aio_cluster):
    channel = aio_cluster()
    waiting = [begun(caller(channel)()) for _ in range(2)]
    await asyncio.sleep(0)
    channel.fail("etcd://h:1 is unreachable")
    for task in waiting:
        details = (await refused(task)).details()
        assert details == "no instance of test.Shop is known: etcd://h:1 is unreachable"


async def test_one_that_may_wait_for_a_connection_waits_for_an_instance_too(
    shops, aio_cluster, timer
):
    channel = aio_cluster()
    channel.update([])
    waiting = begun(caller(channel, timeout=500)(wait_for_ready=True))
    late = begun(caller(channel, timeout=50)(wait_for_ready=True))
    for _ in range(6):
        timer.advance(10)
        await steps(20)
    assert (await refused(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not waiting.done()
    channel.update([instance(shops[0])])
    assert await waiting == b"x"


@pytest.mark.parametrize("how", ["an update", "a probe"])
async def test_one_that_may_wait_waits_until_any_member_is_up(shops, aio_cluster, timer, how):
    """Not for the one that it was begun on."""
    shop = shops[0]
    shop.kill()
    with nobody_at() as dead:
        channel = in_order(aio_cluster, dead, shop, policy=ClusterPolicy(probe=0.5))
        waiting = begun(caller(channel, timeout=500)(wait_for_ready=True))
        await aio_wait_until(lambda: states(channel) == ["DOWN", "DOWN"])
        await steps(20)
        assert not waiting.done()
        shop.start()
        if how == "a probe":
            timer.advance(0.6)
        else:
            channel.update([instance(shop, id="new")])
        assert await waiting == b"x"


async def test_while_all_are_down_it_is_tried_again_now_and_then(shops, aio_cluster, timer):
    shop = shops[0]
    shop.kill()
    channel = aio_cluster(shop, policy=ClusterPolicy(probe=1000))
    waiting = begun(caller(channel, timeout=5000)(wait_for_ready=True))
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    shop.start()
    # Slowly: each step that comes before the connection is time that the call has lost.
    await aio_wait_until(lambda: (timer.advance(0.05), waiting.done())[1])
    assert await waiting == b"x"
    assert states(channel) == ["UP"]


async def test_one_whose_deadline_is_over_while_all_are_down_says_so(dead, aio_cluster, timer):
    channel = aio_cluster(dead, policy=ClusterPolicy(probe=1000))
    waiting = begun(caller(channel, timeout=30)(wait_for_ready=True))
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    timer.advance(31)
    error = await refused(waiting)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "failed to connect" in error.details()


async def test_one_that_has_no_time_at_all_says_so(aio_cluster):
    error = await refused(caller(aio_cluster())(timeout=0))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_one_that_may_wait_does_so_though_its_connection_was_just_replaced(
    shops, aio_cluster, timer
):
    """As a heartbeat does with a dead one."""
    shop = shops[0]
    channel = aio_cluster(shop, policy=ClusterPolicy(probe=0.5))
    stream = channel.unary_stream(UNARY_STREAM)
    shop.then(Silent(after=1))
    old = stream(b"ab", timeout=500)
    assert await old.read() == b"a"
    shop.kill()
    channel.members[0].channel.reconnect("dead", force=True)
    waiting = begun(caller(channel, timeout=500)(wait_for_ready=True))
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    assert not waiting.done()
    shop.start()
    timer.advance(0.6)
    assert await waiting == b"x"
    old.cancel()


async def test_what_a_picker_raises_for_one_that_has_waited_is_no_others_business(
    shops, aio_cluster
):
    def key(_, request, __):
        return {b"good": "good"}[request]

    channel = aio_cluster(balance=ConsistentHash(key))
    calls = [caller(channel)(request) for request in (b"bad", b"good", b"bad", b"good")]
    await asyncio.sleep(0)
    channel.update([instance(shops[0])])
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in answers] == [KeyError, bytes, KeyError, bytes]


async def test_one_that_waits_can_be_cancelled(shops, aio_cluster, timer):
    channel = aio_cluster()
    calls = [caller(channel)() for _ in range(2)]
    task = begun(calls[1])
    await asyncio.sleep(0)
    assert calls[0].cancel()
    task.cancel()
    await asyncio.wait([task])
    assert [call.cancelled() for call in calls] == [True, True]
    assert timer.pending == 0
    channel.update([instance(shops[0])])
    assert await caller(channel)() == b"x"
    assert counts(shops) == [1, 0, 0]


async def test_a_stream_that_is_forgotten_while_it_waits_is_not_begun(shops, aio_cluster):
    channel = aio_cluster()
    call = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    gone = weakref.ref(call)
    del call
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)  # forgotten too, but it runs to its end
    channel.update([instance(shops[0])])
    await aio_wait_until(lambda: shops[0].calls)
    await steps(20)
    assert [seen.method for seen in shops[0].calls] == [UNARY_UNARY]


async def test_the_time_that_a_call_has_waited_counts(shops, aio_cluster, timer):
    channel = aio_cluster()
    call = caller(channel, timeout=500)(wait_for_ready=True)
    timer.advance(100)
    channel.update([instance(shops[0])])
    assert await call == b"x"
    assert 300 < shops[0].calls[0].time_remaining < 410
