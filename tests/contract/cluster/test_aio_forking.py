"""One call on several members: the first good answer and no loser left, or the answers of all."""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import steps
from fixtures.aio_clusters import InOrder, begun, counts, in_order, states
from fixtures.aio_doors import others, refused
from fixtures.clusters import instance, nobody_at
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import MethodPolicy, RetryPolicy
from rpcwheel.aio import Kit
from rpcwheel.cluster import BroadcastFailed, ClusterPolicy
from rpcwheel.cluster.aio import BroadcastInvoker, ForkingInvoker
from rpcwheel.errors import ConfigurationError
from rpcwheel.transport.aio import ReconnectingChannel


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


# Forking


async def test_the_first_good_answer_wins_and_the_rest_are_cancelled(shops, aio_cluster):
    shops[0].then(Hang())
    shops[1].then(Hang())
    channel, before = aio_cluster(*shops), len(others())
    call = forked(channel, 3)(b"x", timeout=WAIT_S)
    assert 0 < call.time_remaining() <= WAIT_S
    assert await call == b"x"
    assert await call.code() is grpc.StatusCode.OK
    await aio_wait_until(lambda: all(one.ended.is_set() for shop in shops for one in shop.calls))
    await aio_wait_until(lambda: channel.calls == 0)
    await aio_wait_until(lambda: len(others()) == before)


async def test_an_answer_that_is_an_error_is_waited_past(shops, aio_cluster):
    shops[0].then(Fail("NOT_FOUND"))
    shops[1].then(Fail("INTERNAL"))
    shops[2].then(hang := Hang())
    channel = aio_cluster(*shops)
    call = forked(channel, 3)(b"x", timeout=WAIT_S)
    await aio_wait_until(hang.begun.is_set)
    await aio_wait_until(lambda: channel.calls == 1)
    assert not call.done()
    shops[2].calls[0].ended.set()
    assert await call == b"x"


async def test_if_all_fail_the_last_error_is_the_callers(shops, aio_cluster):
    for shop in shops:
        shop.then(Fail("NOT_FOUND", "no such order", trailing=(("why", "so"),)))
    error = await refused(forked(aio_cluster(*shops), 3)(b"x", timeout=WAIT_S))
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no such order")
    assert ("why", "so") in tuple(error.trailing_metadata())


async def test_a_fork_that_found_nobody_goes_elsewhere(shops, dead, aio_cluster):
    channel = aio_cluster(dead, shops[0], shops[1])
    for shop in shops[:2]:
        shop.then(*[Fail("NOT_FOUND")] * 9)
    for _ in range(3):
        error = await refused(forked(channel, 2)(b"x", timeout=WAIT_S))
        assert error.code() is grpc.StatusCode.NOT_FOUND
    assert sorted(states(channel)) == ["DOWN", "UP", "UP"]


async def test_no_two_forks_go_to_one_member(shops, dead, aio_cluster):
    with nobody_at() as other:
        channel = aio_cluster(balance=InOrder())
        targets = (dead, other, *shops)
        channel.update([instance(one, id=f"{place}") for place, one in enumerate(targets)])
        for shop in shops:
            shop.then(*[Fail("NOT_FOUND")] * 2)
        await refused(forked(channel, 2)(b"x", timeout=WAIT_S))
    assert counts(shops) == [1, 1, 0]


async def test_no_fork_goes_to_an_instance_that_wants_no_calls_while_others_do(shops, aio_cluster):
    channel = aio_cluster()
    unwanted = instance(shops[1], weight=0), instance(shops[2], status="DRAINING")
    channel.update([instance(shops[0]), *unwanted])
    assert await forked(channel, 3)(b"x", timeout=WAIT_S) == b"x"
    assert counts(shops) == [1, 0, 0]


async def test_channels_of_ones_own_are_taken_in_turn(channels):
    call = forked(channels)
    for _ in range(3):
        assert await call(b"x", timeout=WAIT_S) == b"x"
    assert all(channel.activity.last_write_ns is not None for channel in channels)


# Broadcast


async def test_every_member_is_called_and_the_answers_come_by_target(shops, aio_cluster):
    channel = aio_cluster(*shops)
    channel.members[0].down("the test says so")
    call = broadcast(channel)(b"x", timeout=WAIT_S)
    assert await call == {shop.target: b"x" for shop in shops}
    assert await call.code() is grpc.StatusCode.OK
    assert counts(shops) == [1, 1, 1]


async def test_all_at_once(shops, aio_cluster):
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    call = broadcast(aio_cluster(*shops))(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    for shop in shops:
        shop.calls[0].ended.set()
    assert len(await call) == 3


async def test_a_failure_of_any_is_raised_with_the_answers_of_the_others(shops, dead, aio_cluster):
    shops[1].then(Fail("INTERNAL", "oops"))
    call = broadcast(aio_cluster(shops[0], shops[1], dead))(b"x", timeout=WAIT_S)
    with pytest.raises(BroadcastFailed) as caught:
        await call
    error = caught.value
    assert error.answers == {shops[0].target: b"x"}
    codes = {target: one.code().name for target, one in error.errors.items()}
    assert codes == {shops[1].target: "INTERNAL", f"127.0.0.1:{dead}": "UNAVAILABLE"}
    assert (await call.code(), await call.details()) == (error.code(), error.details())


@BUGS_OF_INTERCEPTORS
async def test_what_an_interceptor_raises_is_the_error_of_its_member(shops):
    class Broken(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            raise KeyError("a bug")

    broken = grpc.aio.insecure_channel(shops[0].target, interceptors=[Broken()])
    async with broken, grpc.aio.insecure_channel(shops[1].target) as well:
        with pytest.raises(BroadcastFailed, match="a bug") as caught:
            await broadcast([broken, well])(b"x", timeout=WAIT_S)
    assert caught.value.answers == {"channel #2": b"x"}


async def test_without_members_nothing_is_broadcast(aio_cluster):
    channel = aio_cluster()
    channel.update([])
    error = await refused(broadcast(channel)(b"x", timeout=WAIT_S))
    assert error.details() == "no instance of test.Shop is known"


async def test_channels_of_ones_own_are_known_by_their_targets(shops, channels):
    async with (
        grpc.aio.insecure_channel(shops[0].target) as bare,
        ReconnectingChannel(shops[0].target) as same,
    ):
        answers = await broadcast([*channels, bare, same])(b"x", timeout=WAIT_S)
    targets = {shop.target for shop in shops}
    assert set(answers) == targets | {"channel", f"{shops[0].target} #2"}


# What stands around them


async def test_the_state_is_that_of_the_channel(shops, aio_cluster, channels):
    view, ready = ForkingInvoker(aio_cluster(shops[0])), grpc.ChannelConnectivity.READY
    await view.channel_ready()
    assert view.get_state() is ready
    await view.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
    with pytest.raises(ConfigurationError, match="ask each"):
        ForkingInvoker(channels).get_state()


async def test_policies_stand_in_front_of_it(shops, aio_cluster):
    retry = RetryPolicy(retry_on={"INTERNAL"}, max_attempts=2, backoff=0.01)
    methods = {UNARY_UNARY: MethodPolicy(idempotent=True)}
    async with Kit(retry=retry, methods=methods, timeout=WAIT_S) as kit:
        shops[0].then(Fail("INTERNAL"))
        channel = aio_cluster(*shops)
        front = kit.intercept_channel(BroadcastInvoker(channel))
        answers = await front.unary_unary(UNARY_UNARY)(b"x")
        assert answers == {shop.target: b"x" for shop in shops}
        assert await kit.intercept_channel(ForkingInvoker(channel)).unary_unary(UNARY_UNARY)(b"x")


async def test_a_broadcast_that_may_wait_waits_for_all_members_at_once(shops, aio_cluster):
    channel = aio_cluster(*shops)
    for shop in shops:
        shop.kill()
    call = broadcast(channel)(b"x", timeout=2 * WAIT_S, wait_for_ready=True)
    first = [shop for shop in shops if shop is not shops[1]]
    for shop in first:
        shop.start()
    await aio_wait_until(lambda: all(shop.calls for shop in first))  # one is away still
    shops[1].start()
    assert await call == {shop.target: b"x" for shop in shops}


# Several at once wait, end and are cancelled as any other


async def test_the_deadline_holds(shops, aio_cluster):
    for shop in shops:
        shop.then(Hang())
    error = await refused(forked(aio_cluster(*shops), 3)(b"x", timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_fork_waits_for_members_too(shops, aio_cluster, timer):
    channel = aio_cluster(policy=ClusterPolicy(wait=7))
    late, patient = (
        begun(forked(channel)(b"x", timeout=500, wait_for_ready=ready)) for ready in (None, True)
    )
    await steps()
    timer.advance(7.1)
    assert "known yet" in (await refused(late)).details()
    channel.update([instance(shops[0])])
    assert await patient == b"x"


@pytest.mark.parametrize(
    ("runs", "invoker"), [(False, BroadcastInvoker), (True, lambda one: ForkingInvoker(one, 3))]
)
async def test_cancelling_it_cancels_all(shops, aio_cluster, runs, invoker):
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    channel, before = aio_cluster(*shops), len(others())
    call = invoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    if runs:
        await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await aio_wait_until(lambda: (channel.calls, len(others())) == (0, before))


async def test_a_member_that_is_closed_meanwhile_is_an_error_of_its_own(shops, channels):
    for shop in shops:
        shop.then(Hang())
    call = begun(broadcast(channels)(b"x", timeout=WAIT_S))
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


async def test_with_wait_for_ready_they_wait_until_any_is_up(shops, dead, aio_cluster, timer):
    shop = shops[0]
    shop.kill()
    channel = in_order(aio_cluster, dead, shop, policy=ClusterPolicy(probe=1000))
    waiting = begun(forked(channel)(b"x", timeout=5000, wait_for_ready=True))
    await aio_wait_until(lambda: states(channel) == ["DOWN", "DOWN"])
    shop.start()
    await aio_wait_until(lambda: (timer.advance(0.05), waiting.done())[1])
    assert await waiting == b"x"


async def test_forks_that_waited_until_their_deadline_say_so(dead, aio_cluster, timer):
    channel = in_order(aio_cluster, dead, policy=ClusterPolicy(probe=1000))
    waiting = begun(forked(channel)(b"x", timeout=30, wait_for_ready=True))
    await aio_wait_until(lambda: states(channel) == ["DOWN"])
    timer.advance(31)
    error = await refused(waiting)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "failed to connect" in error.details()
