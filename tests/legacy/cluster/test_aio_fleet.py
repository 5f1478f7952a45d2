"""On a loop members come and go while calls run; who can't be reached is left alone for a while."""

import asyncio
import socket
import time

import grpc
import pytest

from fixtures.aio_clusters import caller, counts, states
from fixtures.aio_doors import refused
from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import aio_wait_until
from rpcwheel.channel.aio import ReconnectingChannel
from rpcwheel.cluster import ClusterPolicy
from rpcwheel.observe import ListenerFailed
from rpcwheel.observe.events import MemberDown, MemberUp
from rpcwheel.timer import ManualTimer

PROBED = ClusterPolicy(probe=1.0)


async def many(channel, count):
    """So many calls, one after the other."""
    call = caller(channel)
    for _ in range(count):
        assert await call() == b"x"


async def hanging(shop, channel):
    """A call that this server does not answer."""
    shop.then(hang := Hang())
    call = asyncio.ensure_future(_awaited(caller(channel)()))
    await aio_wait_until(hang.begun.is_set)
    return call


async def _awaited(call):
    return await call


# Coming and going


async def test_a_member_has_no_channel_before_it_is_called(shops, aio_cluster):
    channel = aio_cluster(*shops)
    assert states(channel) == ["IDLE"] * 3
    await many(channel, 1)
    assert sorted(states(channel)) == ["IDLE", "IDLE", "UP"]
    assert sum(member.link is not None for member in channel.members) == 1


async def test_new_instances_are_called_and_those_that_are_gone_are_not(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await many(channel, 1)
    channel.update([instance(shops[1]), instance(shops[2])])
    await many(channel, 6)
    assert counts(shops) == [1, 3, 3]


async def test_an_update_leaves_the_connections_of_others_alone(shops, aio_cluster):
    channel = aio_cluster(shops[0], shops[1])
    await many(channel, 4)
    channel.update([instance(shops[0], weight=10), instance(shops[2])])
    await many(channel, 22)
    assert len({seen.peer for seen in shops[0].calls}) == 1
    assert len(shops[0].calls) <= 5  # weight 10 beside 100


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
    assert error.details() == f"channel retired: {name} is gone from test.Shop"


async def test_an_instance_that_comes_back_is_another_member(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await many(channel, 1)
    first = channel.members[0]
    channel.update([])
    channel.update([instance(shops[0])])
    await many(channel, 1)
    assert channel.members[0] is not first
    with pytest.raises(grpc.aio.UsageError, match="Channel is closed"):
        first.channel.unary_unary(UNARY_UNARY)(b"x")


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
    assert [type(event) for event in events] == [ListenerFailed]


async def test_what_connect_raises_is_the_callers(shops, aio_cluster):
    def connect(one, options):
        raise RuntimeError("no way")

    channel = aio_cluster(shops[0], connect=connect)
    with pytest.raises(RuntimeError, match="no way"):
        caller(channel)()
    assert channel.calls == 0


async def test_the_options_of_a_member_keep_grpc_from_waiting_for_minutes(shops, aio_cluster):
    seen = []

    def connect(one, options):
        seen.append(dict(options))
        return grpc.aio.insecure_channel(one.target, options)

    for options in ((), IMPATIENT):
        await caller(aio_cluster(shops[0], connect=connect, options=options))()
    assert [one["grpc.max_reconnect_backoff_ms"] for one in seen] == [3_000, 50]


async def test_the_channel_of_a_member_is_one_whose_connection_can_be_replaced(shops, aio_cluster):
    channel = aio_cluster(shops[0])
    await many(channel, 1)
    inner = channel.members[0].channel
    assert type(inner) is ReconnectingChannel
    assert inner.replace("the test says so")
    await many(channel, 1)
    assert inner.number == 2


# Down and up


async def test_who_is_unreachable_is_called_no_more(shops, dead, aio_cluster, events):
    channel = aio_cluster(dead, shops[0])
    await many(channel, 10)
    bad = next(one for one in channel.members if one.instance.port == dead)
    assert (bad.state, bad.reason) == ("DOWN", "no connection")
    assert events == [MemberDown("test.Shop", f"127.0.0.1:{dead}", "no connection")]


async def test_one_that_does_not_even_refuse_is_found_by_deadlines(aio_cluster, timer, events):
    """Its connection is not made when the time of a call is over, nor is it a second later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel's is all that answers
        silent = listener.getsockname()[1]
        ask = caller(aio_cluster(silent), timeout=0.3)
        for _ in range(2):
            assert events == []
            error = await refused(ask())
            timer.advance(1.1)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED without a connection"
    assert events == [MemberDown("test.Shop", f"127.0.0.1:{silent}", reason)]


async def test_it_is_called_again_once_it_answers_a_probe(shops, aio_cluster, timer, events):
    channel = aio_cluster(shops[0], shops[1], policy=PROBED)
    await many(channel, 2)
    await asyncio.to_thread(shops[0].kill)
    await many(channel, 4)
    assert [type(event) for event in events] == [MemberDown]
    shops[0].start()
    timer.advance(1.1)  # UNIMPLEMENTED is an answer: this server has no health service
    await aio_wait_until(lambda: len(events) == 2)
    assert events[1] == MemberUp("test.Shop", f"127.0.0.1:{shops[0].port}", events[1].after_s)
    assert events[1].after_s >= 1.0
    before = len(shops[0].calls)
    await many(channel, 4)
    assert len(shops[0].calls) == before + 2


async def test_a_probe_that_is_not_answered_is_followed_by_another(dead, shops, timer, aio_cluster):
    policy = ClusterPolicy(probe=lambda state: float(state.attempt_number), probe_timeout=0.05)
    channel = aio_cluster(dead, shops[0], policy=policy)
    await many(channel, 2)
    bad = next(one for one in channel.members if one.instance.port == dead)
    for failed in (1, 2, 3):
        timer.advance(failed + 0.1)
        await aio_wait_until(lambda failed=failed: bad.probes == failed)
        await aio_wait_until(lambda: timer.pending == 1)
    assert bad.state == "DOWN"


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


async def test_who_was_published_by_a_new_process_is_asked_at_once(shops, aio_cluster, timer):
    channel = aio_cluster()
    channel.update([instance(shops[0], epoch="a"), instance(shops[1])])
    member = next(one for one in channel.members if one.instance.port == shops[0].port)
    member.down("the test says so")
    channel.update([instance(shops[0], epoch="b"), instance(shops[1])])
    await aio_wait_until(lambda: member.state == "UP")  # no time has passed
    assert timer.pending == 0


async def test_no_probe_outlives_its_member(dead, shops, aio_cluster, timer):
    channel = aio_cluster(dead, shops[0])
    await many(channel, 2)
    assert timer.pending == 1
    channel.update([instance(shops[0])])
    assert timer.pending == 0


async def test_a_wait_object_that_raises_is_told_and_stands_for_a_second(
    shops, aio_cluster, timer, events
):
    channel = aio_cluster(shops[0], policy=ClusterPolicy(probe=lambda _: 1 / 0))
    channel.members[0].down("the test says so")
    assert [type(event) for event in events] == [MemberDown, ListenerFailed]
    timer.advance(1.1)
    await aio_wait_until(lambda: channel.members[0].state == "UP")


@pytest.mark.parametrize("timer_given", ["stopped", "none"])
async def test_without_a_timer_the_shared_one_wakes_probes(shops, aio_cluster, timer_given):
    stopped = ManualTimer()
    stopped.stop()
    timer = stopped if timer_given == "stopped" else None
    channel = aio_cluster(shops[0], timer=timer, policy=ClusterPolicy(probe=0.01))
    channel.members[0].down("the test says so")
    await aio_wait_until(lambda: channel.members[0].state == "UP")


# Growing weights


async def test_a_young_member_gets_more_and_more_calls(shops, aio_cluster, timer):
    channel = aio_cluster(policy=ClusterPolicy(warmup=100))
    channel.update([instance(shops[0]), instance(shops[1], started_at=time.time())])
    await many(channel, 50)
    assert len(shops[1].calls) <= 2
    for _ in range(21):
        timer.advance(5.1)
        await asyncio.sleep(0.005)
    await aio_wait_until(lambda: timer.pending == 0)
    before = len(shops[1].calls)
    await many(channel, 20)
    assert len(shops[1].calls) == pytest.approx(before + 10, abs=1)


async def test_a_server_that_fails_is_up(shops, aio_cluster, events):
    channel = aio_cluster(shops[0])
    for code in ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"):
        shops[0].then(Fail(code))
        await refused(caller(channel)())
    assert (states(channel), events) == (["UP"], [])
