"""`BroadcastChannel` of `rpcwheel.aio`: each unary call goes to all servers at once."""

import asyncio

import grpc
import pytest

import rpcwheel
from fixtures.aio_policy_channels import others, refused
from fixtures.balanced_channels import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import MethodPolicy, RetryPolicy
from rpcwheel.aio import Kit
from rpcwheel.balancer import BalancerPolicy, BroadcastFailed
from rpcwheel.balancer.aio import BalancedChannel, BroadcastChannel
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallbackFailed
from rpcwheel.transport.aio import ReconnectingChannel


@pytest.fixture
async def open_channel(timer):
    """Open balanced channels to servers or ports; without any, the instances are not known."""
    channels, before = [], others()

    def open_one(*targets, **settings):
        instances = [instance(one) for one in targets] if targets else None
        settings = {"timer": timer, "options": IMPATIENT} | settings
        channels.append(BalancedChannel("test.Shop", instances, **settings))
        return channels[-1]

    yield open_one
    for one in channels:
        await one.close()
    assert timer.pending == 0
    await aio_wait_until(lambda: len(others()) <= len(before))


@pytest.fixture
async def channels(shops, timer):
    """A channel to each server."""
    channels = [ReconnectingChannel(shop.target, timer=timer) for shop in shops]
    yield channels
    for channel in channels:
        await channel.close()


def broadcast(channel):
    return BroadcastChannel(channel).unary_unary(UNARY_UNARY)


def counts(shops):
    return [len(shop.calls) for shop in shops]


def hang_all(shops):
    hangs = [Hang() for _ in shops]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    return hangs


async def test_each_server_is_called_and_the_responses_are_by_address(shops, open_channel):
    channel = open_channel(*shops)
    call = broadcast(channel)(b"x", timeout=WAIT_S, metadata=grpc.aio.Metadata(("a", "b")))
    assert 0 < call.time_remaining() <= WAIT_S
    assert await call == {shop.target: b"x" for shop in shops}
    assert await call.code() is grpc.StatusCode.OK
    assert [shop.count_calls(a="b") for shop in shops] == [1, 1, 1]
    assert channel.calls == 0


async def test_unhealthy_and_draining_servers_are_called(shops, open_channel):
    channel = open_channel()
    channel.update([instance(shops[0]), instance(shops[1]), instance(shops[2], status="DRAINING")])
    channel.subchannels[0].mark_unhealthy("the test says so")
    await broadcast(channel)(b"x", timeout=WAIT_S)
    assert counts(shops) == [1, 1, 1]


async def test_all_servers_are_called_at_once(shops, open_channel):
    hangs = hang_all(shops)
    call = broadcast(open_channel(*shops))(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    for shop in shops:
        shop.calls[0].ended.set()
    assert len(await call) == 3


async def test_a_failure_is_raised_with_the_responses_of_the_others(shops, dead, open_channel):
    shops[1].then(Fail("INTERNAL", "oops"))
    call = broadcast(open_channel(shops[0], shops[1], dead))(b"x", timeout=WAIT_S)
    with pytest.raises(BroadcastFailed) as caught:
        await call
    error = caught.value
    assert error.responses == {shops[0].target: b"x"}
    codes = {address: one.code().name for address, one in error.errors.items()}
    assert codes == {shops[1].target: "INTERNAL", f"127.0.0.1:{dead}": "UNAVAILABLE"}
    assert (await call.code(), await call.details()) == (error.code(), error.details())


async def test_the_deadline_applies_to_each_call(shops, open_channel):
    shops[0].then(Hang())
    with pytest.raises(BroadcastFailed) as caught:
        await broadcast(open_channel(shops[0]))(b"x", timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_server_whose_connect_raises_is_one_of_the_errors(shops, open_channel, events):
    def connect(one, options):
        if one.id == "a":
            raise RuntimeError("no certificate")
        return grpc.aio.insecure_channel(one.target, options)

    channel = open_channel(connect=connect)
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    with pytest.raises(BroadcastFailed, match="no certificate") as caught:
        await broadcast(channel)(b"x", timeout=WAIT_S)
    assert caught.value.responses == {shops[0].target: b"x"}
    await aio_wait_until(lambda: any(isinstance(event, CallbackFailed) for event in events))


async def test_failures_count_for_outlier_ejection(shops, open_channel):
    channel = open_channel(*shops)
    shops[0].then(*[Fail("UNAVAILABLE")] * 5)
    for _ in range(5):
        with pytest.raises(BroadcastFailed):
            await broadcast(channel)(b"x", timeout=WAIT_S)
    assert [s.address for s in channel.subchannels if not s.healthy] == [shops[0].target]


# Without servers


async def test_without_instances_it_fails_as_a_call_of_the_channel_does(open_channel):
    channel = open_channel()
    channel.update([])
    error = await refused(broadcast(channel)(b"x", timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "no instance of test.Shop is known"


@pytest.mark.parametrize("options", [{}, {"wait_for_ready": True}, {"timeout": WAIT_S}])
async def test_it_waits_until_instances_are_known(shops, open_channel, options):
    channel = open_channel(balancer_policy=BalancerPolicy(pick_timeout=WAIT_S))
    call = broadcast(channel)(b"x", **options)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done()
    channel.update([instance(shops[0])])
    assert await call == {shops[0].target: b"x"}


@pytest.mark.parametrize(("limit", "code"), [(None, "UNAVAILABLE"), (0.02, "DEADLINE_EXCEEDED")])
async def test_it_waits_no_longer_than_pick_timeout_or_its_deadline(open_channel, limit, code):
    channel = open_channel(balancer_policy=BalancerPolicy(pick_timeout=0.05))
    error = await refused(broadcast(channel)(b"x", timeout=limit))
    assert (error.code().name, error.details()) == (code, "no instance of test.Shop is known yet")


async def test_with_wait_for_ready_it_waits_for_all_servers_at_once(shops, open_channel):
    channel = open_channel(*shops)
    for shop in shops:
        shop.kill()
    call = broadcast(channel)(b"x", timeout=2 * WAIT_S, wait_for_ready=True)
    first = [shops[0], shops[2]]
    for shop in first:
        shop.start()
    await aio_wait_until(lambda: all(shop.calls for shop in first))  # one is still down
    shops[1].start()
    assert await call == {shop.target: b"x" for shop in shops}


async def test_a_call_on_a_closed_channel_raises(open_channel, shops):
    channel = open_channel(shops[0])
    await channel.close()
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        broadcast(channel)(b"x")


# The end of the call


@pytest.mark.parametrize("runs", [False, True])
async def test_canceling_it_cancels_the_calls_on_all_servers(shops, open_channel, runs):
    hangs = hang_all(shops)
    channel, before = open_channel(*shops), len(others())
    call = broadcast(channel)(b"x", timeout=WAIT_S)
    if runs:
        await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await call.code() is grpc.StatusCode.CANCELLED
    await aio_wait_until(lambda: (channel.calls, len(others())) == (0, before))


async def test_canceling_the_task_that_awaits_it_cancels_the_calls(shops, open_channel):
    hangs = hang_all(shops)
    channel = open_channel(*shops)

    async def run():
        await broadcast(channel)(b"x", timeout=WAIT_S)

    task = asyncio.create_task(run())
    await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await aio_wait_until(lambda: all(shop.calls[0].ended.is_set() for shop in shops))


async def test_closing_the_channel_ends_a_call_that_waits_for_instances(open_channel):
    channel = open_channel()
    call = broadcast(channel)(b"x", wait_for_ready=True)
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_call_that_is_not_awaited_runs_to_its_end(shops, open_channel):
    channel = open_channel(*shops[:2])
    broadcast(channel)(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: counts(shops) == [1, 1, 0])
    await aio_wait_until(lambda: channel.calls == 0)


# Several channels


async def test_responses_of_channels_are_by_target(shops, channels):
    async with (
        grpc.aio.insecure_channel(shops[0].target) as bare,
        ReconnectingChannel(shops[0].target) as same,
    ):
        responses = await broadcast([*channels, bare, same])(b"x", timeout=WAIT_S)
    targets = [shop.target for shop in shops]
    assert list(responses) == [*targets, "channel", f"{shops[0].target} #2"]


@BUGS_OF_INTERCEPTORS
async def test_an_exception_of_an_interceptor_is_the_error_of_its_server(shops):
    class Broken(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            raise KeyError("a bug")

    broken = grpc.aio.insecure_channel(shops[0].target, interceptors=[Broken()])
    async with broken, grpc.aio.insecure_channel(shops[1].target) as well:
        with pytest.raises(BroadcastFailed, match="a bug") as caught:
            await broadcast([broken, well])(b"x", timeout=WAIT_S)
    assert caught.value.responses == {"channel #2": b"x"}


async def test_a_channel_that_is_closed_meanwhile_is_one_of_the_errors(shops, channels):
    hang_all(shops)
    call = broadcast(channels)(b"x", timeout=WAIT_S)
    await aio_wait_until(lambda: counts(shops) == [1, 1, 1])
    await channels[0].close()
    for shop in shops[1:]:
        shop.calls[0].ended.set()
    with pytest.raises(BroadcastFailed) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert len(caught.value.responses) == 2


# The channel


async def test_the_state_is_that_of_the_balanced_channel(shops, open_channel, channels):
    channel, ready = BroadcastChannel(open_channel(shops[0])), grpc.ChannelConnectivity.READY
    await channel.channel_ready()
    assert channel.get_state() is ready
    await channel.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
    with pytest.raises(ConfigurationError, match="has its own state"):
        BroadcastChannel(channels).get_state()


async def test_streams_are_refused(shops, open_channel):
    stream = BroadcastChannel(open_channel(shops[0])).unary_stream(UNARY_STREAM)
    with pytest.raises(ConfigurationError, match="for unary calls"):
        stream(b"x")


async def test_close_leaves_the_balanced_channel_open(shops, open_channel):
    channel = open_channel(shops[0])
    async with BroadcastChannel(channel):
        pass
    assert not channel.closed


async def test_other_arguments_than_channels_are_refused(shops, open_channel):
    for wrong in (None, [open_channel(shops[0]), None]):
        with pytest.raises(TypeError, match=r"must be a rpcwheel\.aio\.BalancedChannel, or a list"):
            BroadcastChannel(wrong)
    with pytest.raises(ConfigurationError, match="empty list"):
        BroadcastChannel([])
    async with Kit() as kit:
        with pytest.raises(TypeError, match="apply them to the result"):
            BroadcastChannel(kit.intercept_channel(open_channel(shops[0])))
    with (
        rpcwheel.transport.ReconnectingChannel("127.0.0.1:50051") as of_threads,
        pytest.raises(TypeError, match=r"rpcwheel\.BroadcastChannel"),
    ):
        BroadcastChannel(of_threads)


async def test_policies_apply_to_a_broadcast(shops, open_channel):
    retry = RetryPolicy(retry_on={"INTERNAL"}, max_attempts=2, backoff=0.01)
    methods = {UNARY_UNARY: MethodPolicy(idempotent=True)}
    async with Kit(retry=retry, methods=methods, timeout=WAIT_S) as kit:
        shops[0].then(Fail("INTERNAL"))
        front = kit.intercept_channel(BroadcastChannel(open_channel(*shops)))
        responses = await front.unary_unary(UNARY_UNARY)(b"x")
    assert responses == {shop.target: b"x" for shop in shops}
