"""The room for loops shows its names; a channel of many members lives through what comes."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_clusters import caller
from fixtures.aio_doors import others
from fixtures.clusters import instance
from fixtures.shop import Shop
from fixtures.waiting import aio_wait_until
from rpcwheel import RetryPolicy
from rpcwheel.cluster import aio, sync
from rpcwheel.cluster.aio import ClusterChannel
from rpcwheel.interceptors import CallPolicy
from rpcwheel.interceptors.aio import intercept_channel
from rpcwheel.observe import CallNotRetried, CallRetrying

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None
else:
    uvloop.new_event_loop().close()  # the first one opens a pipe that libuv keeps (signal.c)

TASKS = 8


def test_the_room_has_the_names_of_the_one_for_threads():
    assert aio.__all__ == sync.__all__
    assert not any(getattr(aio, name) is getattr(sync, name) for name in aio.__all__)


async def rolling(channel, shops):
    """Restart all servers one after the other, under load; gives what went wrong, and how much."""
    stub, wrong, well, over = Stub(channel), [], 0, False

    async def work(number):
        nonlocal well
        kind, style = KINDS[number % 4], list(STYLES.values())[number // 4]
        while not over:
            try:
                answer = await style(stub, kind)
                if answer != ANSWERS[kind]:
                    wrong.append(answer)
            except Exception as error:  # noqa: BLE001 - whatever it is
                wrong.append(error)
            well += 1

    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(work(number))
        for place, old in enumerate(tuple(shops)):
            await aio_wait_until(lambda old=old: old.calls)
            channel.update([instance(one) for one in shops if one is not old])
            await aio_wait_until(lambda: not channel._fleet.roster.leaving)
            await asyncio.to_thread(old.kill)
            shops[place] = Shop()
            channel.update([instance(one) for one in shops])
        await aio_wait_until(lambda: all(shop.calls for shop in shops))
        over = True
    return wrong, well


@pytest.mark.parametrize("balance", ["round_robin", "weighted_random", "least_active"])
async def test_a_rolling_restart_fails_no_call(shops, aio_cluster, balance):
    channel = aio_cluster(*shops, balance=balance)
    before = len(others())
    wrong, well = await rolling(channel, shops)
    assert (wrong, channel.calls) == ([], 0)
    assert well > TASKS
    await aio_wait_until(lambda: len(others()) == before)


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_it_is_the_same_on_uvloop(shops, timer):
    async def main():
        instances = [instance(shop) for shop in shops]
        async with ClusterChannel("test.Shop", instances, timer=timer) as channel:
            assert (await rolling(channel, shops))[0] == []

    uvloop.run(main())


async def test_members_that_come_and_go_under_load_fail_no_call(shops, dead, aio_cluster):
    channel = aio_cluster(*shops)
    every = [instance(one) for one in (*shops, dead)]
    failed, made, over = [], 0, False

    async def work():
        nonlocal made
        call = caller(channel)
        while not over:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - whatever it is
                failed.append(error)
            made += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(TASKS):
            group.create_task(work())
        for number in range(100):
            await asyncio.sleep(0.002)
            chosen = [one for place, one in enumerate(every) if number >> place & 1 == 0]
            channel.update([*chosen, every[number % 3]])
        over = True
    assert failed == []
    assert made > TASKS
    await aio_wait_until(lambda: (channel.calls, channel._fleet.roster.leaving) == (0, []))


async def test_a_kill_is_seen_by_the_calls_that_run_and_by_no_other(shops, aio_cluster):
    channel = aio_cluster(*shops[:2])
    call = caller(channel)
    await call(), await call()
    await asyncio.to_thread(shops[0].kill)
    for _ in range(20):
        assert await call() == b"x"


@pytest.mark.parametrize("idempotent", [False, True])
async def test_only_an_idempotent_method_is_retried_though_no_member_was_reached(
    shops, dead, aio_cluster, events, idempotent
):
    channel = aio_cluster(dead)
    retry = RetryPolicy(on={"UNAVAILABLE"}, attempts=2, wait=0.0)
    outer = intercept_channel(channel, CallPolicy(retry=retry, idempotent=idempotent))
    with pytest.raises(grpc.aio.AioRpcError):
        await caller(outer)()
    told = [event for event in events if isinstance(event, (CallRetrying, CallNotRetried))]
    assert len(told) == (2 if idempotent else 1)
    assert ("not marked idempotent" in told[-1].reason) is not idempotent
    channel.update([instance(dead), instance(shops[0])])
    assert await caller(outer)() == b"x"
