"""On a loop members come and go while calls run, are down and come back."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import ANSWERS, KINDS, STYLES, Stub
from fixtures.aio_clusters import caller, counts, hanging, states
from fixtures.aio_doors import others, refused
from fixtures.clusters import instance
from fixtures.shop import Fail, Shop
from fixtures.waiting import aio_wait_until
from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster.aio import ClusterChannel
from rpcwheel.observe import CallbackFailed
from rpcwheel.observe.events import MemberDown, MemberUp
from rpcwheel.transport.aio import ReconnectingChannel

PROBED = ClusterPolicy(probe=1.0)
READY = grpc.ChannelConnectivity.READY

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None
else:
    uvloop.new_event_loop().close()  # the first one opens a pipe that libuv keeps (signal.c)


TASKS = 8


async def many(channel, count):
    """So many calls, one after the other."""
    call = caller(channel)
    for _ in range(count):
        assert await call() == b"x"


# Coming and going


async def test_a_member_has_no_connection_before_it_is_called(shops, aio_cluster):
    channel = aio_cluster(*shops)
    assert states(channel) == ["IDLE"] * 3
    await many(channel, 1)
    assert sorted(states(channel)) == ["IDLE", "IDLE", "UP"]


async def test_new_instances_are_called_and_those_that_are_gone_are_not(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await many(channel, 1)
    channel.update([instance(shops[1]), instance(shops[2])])
    await many(channel, 6)
    assert counts(shops) == [1, 3, 3]


async def test_calls_on_a_member_that_is_gone_end_in_peace(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    running = await hanging(shops[0], channel)
    gone = channel.members[0]
    channel.update([instance(shops[1])])
    assert (gone.state, channel.calls, gone in channel.members) == ("DRAINING", 1, False)
    await many(channel, 1)
    shops[0].calls[0].ended.set()
    assert await running == b"x"
    await aio_wait_until(lambda: gone.state == "CLOSED")
    assert channel.calls == 0


async def test_when_their_time_is_over_they_end_with_the_reason(shops, aio_cluster, timer):
    channel = aio_cluster(shops[0], policy=ClusterPolicy(drain=7))
    running = await hanging(shops[0], channel)
    name = channel.members[0].id
    channel.update([])
    timer.advance(7.1)
    error = await refused(running)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == f"channel drained: {name} is gone from test.Shop"


async def test_a_member_that_was_never_called_can_not_be_connected_once_it_is_gone(
    shops, aio_cluster
):
    channel = aio_cluster(shops[0])
    member = channel.members[0]
    channel.update([])
    assert member.state == "CLOSED"
    with pytest.raises(grpc.aio.UsageError, match="Channel is closed"):
        member.channel  # noqa: B018


async def test_a_member_whose_channel_somebody_closed_gets_another(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await many(channel, 1)
    call = caller(channel)
    await call()
    await channel.members[0].channel.close()
    assert await call() == b"x"


async def test_who_is_told_of_members_may_fail(shops, aio_cluster, events):
    told = []

    def on_member(member):
        told.append((member, member.channel))
        raise RuntimeError(member.id)

    channel = aio_cluster(shops[0], on_member=on_member)
    await many(channel, 2)
    assert told == [(channel.members[0], channel.members[0].channel)]
    assert [type(event) for event in events] == [CallbackFailed]


async def test_what_connect_raises_is_the_callers(shops, aio_cluster):
    def connect(one, options):
        raise RuntimeError("no way")

    channel = aio_cluster(shops[0], connect=connect)
    with pytest.raises(RuntimeError, match="no way"):
        caller(channel)()
    assert channel.calls == 0


async def test_the_channel_of_a_member_is_one_whose_connection_can_be_replaced(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await many(channel, 1)
    inner = channel.members[0].channel
    assert type(inner) is ReconnectingChannel
    assert inner.reconnect("the test says so")
    await many(channel, 1)
    assert inner.number == 2


async def rolling(channel, shops):
    """Restart all servers one after the other, under load; gives what went wrong."""
    stub, wrong, over = Stub(channel), [], False

    async def work(number):
        kind, style = KINDS[number % 4], list(STYLES.values())[number // 4]
        while not over:
            try:
                answer = await style(stub, kind)
                if answer != ANSWERS[kind]:
                    wrong.append(answer)
            except Exception as error:  # noqa: BLE001 - whatever it is
                wrong.append(error)

    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(work(number))
        for place, old in enumerate(tuple(shops)):
            await aio_wait_until(lambda old=old: old.calls)
            gone = next(one for one in channel.members if one.address == old.target)
            channel.update([instance(one) for one in shops if one is not old])
            await aio_wait_until(lambda gone=gone: gone.state == "CLOSED")
            await asyncio.to_thread(old.kill)
            shops[place] = Shop()
            channel.update([instance(one) for one in shops])
        await aio_wait_until(lambda: all(shop.calls for shop in shops))
        over = True
    return wrong


@pytest.mark.parametrize("balance", ["round_robin", "least_active"])
async def test_a_rolling_restart_fails_no_call(shops, aio_cluster, balance):
    channel = aio_cluster(*shops, balance=balance)
    before = len(others())
    assert await rolling(channel, shops) == []
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(lambda: len(others()) == before)


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_it_is_the_same_on_uvloop(shops, timer):
    async def main():
        instances = [instance(shop) for shop in shops]
        async with ClusterChannel("test.Shop", instances, timer=timer) as channel:
            assert await rolling(channel, shops) == []

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
            before = made
            await aio_wait_until(lambda before=before: made > before)
            chosen = [one for place, one in enumerate(every) if number >> place & 1 == 0]
            channel.update([*chosen, every[number % 3]])
        over = True
    assert failed == []
    await aio_wait_until(lambda: channel.calls == 0)


async def test_a_kill_is_seen_by_the_calls_that_run_and_by_no_other(shops, aio_cluster):
    channel = aio_cluster(*shops[:2])
    call = caller(channel)
    await call(), await call()
    gone = next(one for one in channel.members if one.address == shops[0].target)
    running = await hanging(shops[0], gone.channel)
    await asyncio.to_thread(shops[0].kill)
    assert (await refused(running)).code().name in {"UNAVAILABLE", "CANCELLED"}
    await aio_wait_until(lambda: gone.channel.get_state() is not READY)
    for _ in range(20):
        assert await call() == b"x"


# Down and up


async def test_a_member_that_is_down_is_called_no_more(shops, dead, aio_cluster, events):
    channel = aio_cluster(dead, shops[0])
    await many(channel, 10)
    bad = next(one for one in channel.members if one.instance.port == dead)
    assert (bad.state, bad.reason) == ("DOWN", "no connection")
    assert events == [MemberDown("test.Shop", f"127.0.0.1:{dead}", "no connection")]


async def test_it_is_called_again_once_it_answers_a_probe(shops, aio_cluster, timer, events):
    channel = aio_cluster(shops[0], shops[1], policy=PROBED)
    await many(channel, 2)
    gone = next(one for one in channel.members if one.address == shops[0].target)
    await asyncio.to_thread(shops[0].kill)
    await aio_wait_until(lambda: gone.channel.get_state() is not READY)
    await many(channel, 4)
    assert gone.state == "DOWN"
    shops[0].start()
    # UNIMPLEMENTED is an answer: this server has no health service.
    await aio_wait_until(lambda: (timer.advance(1.1), gone.state != "DOWN")[1])
    assert [type(event) for event in events] == [MemberDown, MemberUp]
    assert events[1].after_s >= 1.0
    before = len(shops[0].calls)
    await many(channel, 4)
    assert len(shops[0].calls) == before + 2


class Sick(grpc.GenericRpcHandler):
    """Says NOT_SERVING until it is well."""

    answer = b"\x08\x02"

    def service(self, details):
        async def check(request, context):
            return self.answer

        return grpc.unary_unary_rpc_method_handler(check)


async def test_who_answers_that_it_does_not_serve_stays_down(timer, aio_cluster):
    sick, server = Sick(), grpc.aio.server()
    server.add_generic_rpc_handlers([sick])
    channel = aio_cluster(server.add_insecure_port("127.0.0.1:0"), policy=PROBED)
    await server.start()
    member = channel.members[0]
    member.down("the test says so")
    timer.advance(1.1)
    await aio_wait_until(lambda: member.probes == 1)
    assert member.state == "DOWN"
    sick.answer = b"\x08\x01"
    timer.advance(1.1)
    await aio_wait_until(lambda: member.state == "UP")
    await server.stop(None)


async def test_if_all_are_down_they_are_called_and_an_answer_brings_one_back(
    shops, aio_cluster, events
):
    channel = aio_cluster(shops[0], shops[1])
    for member in channel.members:
        member.down("the test says so")
    await many(channel, 1)
    assert [type(event) for event in events] == [MemberDown, MemberDown, MemberUp]
    assert sorted(states(channel)) == ["DOWN", "UP"]


async def test_no_probe_outlives_its_member(dead, shops, aio_cluster, timer):
    channel = aio_cluster(dead, shops[0])
    await many(channel, 2)
    assert timer.pending == 1
    channel.update([instance(shops[0])])
    assert timer.pending == 0


async def test_a_server_that_fails_is_up(shops, aio_cluster, events):
    channel = aio_cluster(shops[0])
    for code in ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"):
        shops[0].then(Fail(code))
        await refused(caller(channel)())
    assert (states(channel), events) == (["UP"], [])


async def test_it_is_called_again_when_it_is_said_to_be_up(shops, aio_cluster, timer, events):
    channel = aio_cluster(shops[0])
    member = channel.members[0]
    member.down("the test says so")
    member.down("again")
    assert (member.state, member.reason, timer.pending) == ("DOWN", "the test says so", 1)
    member.up()
    member.up()
    assert (member.state, timer.pending) == ("IDLE", 0)
    assert [type(event) for event in events] == [MemberDown, MemberUp]


async def test_other_threads_may_say_so(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await asyncio.to_thread(channel.members[0].down)
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    await asyncio.to_thread(channel.members[0].up)
    await aio_wait_until(lambda: states(channel) == ["IDLE"])


async def test_one_that_is_gone_changes_no_more(shops, aio_cluster, events):
    channel = aio_cluster(shops[0])
    member = channel.members[0]
    channel.update([])
    member.down()
    member.up()
    assert (member.state, events) == ("CLOSED", [])
