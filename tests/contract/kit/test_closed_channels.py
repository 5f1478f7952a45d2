"""The channels of a kit that are closed before it: their queued calls are delivered."""

import asyncio

import grpc
import pytest

import rpcwheel
import rpcwheel.aio
from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.worlds import RETRY, only_sync
from rpcwheel import FailbackPolicy, MethodPolicy, open_registry
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.errors import FailbackFull
from rpcwheel.journal import Filter, open_journal_backend
from rpcwheel.registry import ServiceInstance

LATER = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0)
SOON = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01)
SERVICE = "test.Shop"
QUEUED_OR_RETRIED = {
    UNARY_UNARY: MethodPolicy(failback=LATER),
    STREAM_UNARY: MethodPolicy(idempotent=True, retry=RETRY),
}
"""Policies by which some calls of a channel are queued and others are retried."""


@pytest.fixture(params=["address", "name"])
def target(request, shop, memory):
    """The target of the shop, and settings of its channel."""
    if request.param == "address":
        yield shop.target, {}
        return
    with open_registry(memory) as registry:
        instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.port)
        registry.register(instance, wait=WAIT_S)
        yield f"{memory}/{SERVICE}", {"balancer_policy": BalancerPolicy(pick_timeout=WAIT_S)}


def queue_one(world, shop, kit, target, **settings):
    """Make a channel and let it queue a call."""
    shop.then("UNAVAILABLE")
    channel = world.do(kit.channel, target, **settings)
    assert world.do(channel.unary_unary(UNARY_UNARY), b"a", timeout=WAIT_S) is None
    return channel


def release(shop, number):
    """Let the server answer a call that hangs."""
    shop.calls[number].ended.set()


def test_a_kit_delivers_the_queued_calls_of_closed_channels_at_its_end(world, shop, target):
    kit = world.api.Kit(failback=LATER)
    channel = queue_one(world, shop, kit, target[0], **target[1])
    member = channel.unary_unary(UNARY_UNARY)
    world.do(channel.close)
    with pytest.raises(world.closed_error):
        world.do(member, b"b")
    with pytest.raises(world.closed_error):
        world.call(channel)
    with pytest.raises(world.closed_error):
        world.do(channel.unary_stream(UNARY_STREAM), b"b")
    assert world.do(kit.close, WAIT_S) == []
    assert [seen.requests for seen in shop.calls] == [[b"a"], [b"a"]]


def test_a_closed_channel_keeps_its_connections_until_no_call_of_it_is_queued(world, shop, target):
    kit = world.api.Kit(failback=LATER.replace(max_pending=1), heartbeat=600.0)
    channel = queue_one(world, shop, kit, target[0], **target[1])
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackFull):  # which keeps no connection
        world.do(channel.unary_unary(UNARY_UNARY), b"a")
    world.do(channel.close)
    world.do(channel.close)  # idempotent
    assert len(kit.heartbeats) == 1
    assert world.do(kit.flush, WAIT_S)
    assert wait_until(lambda: not kit.heartbeats)
    world.do(kit.close)


def test_a_second_close_of_the_kit_leaves_the_connections_to_the_first(world, shop):
    kit = world.api.Kit(failback=LATER)
    channel = queue_one(world, shop, kit, shop.target)
    world.do(channel.close)
    shop.then(hang := Hang())
    closing = in_thread(world.do, kit.close, WAIT_S)
    assert hang.begun.wait(WAIT_S)
    assert world.do(kit.close, WAIT_S) == []
    release(shop, 1)
    assert closing.result(WAIT_S) == []


def test_closing_a_channel_with_queued_calls_ends_its_futures_and_streams(world, shop, target):
    kit = world.api.Kit(failback=LATER)
    channel = queue_one(world, shop, kit, target[0], **target[1])
    shop.then(hang := Hang())
    ended = world.call(channel, timeout=WAIT_S)
    assert hang.begun.wait(WAIT_S)
    shop.then(silent := Silent(after=1))
    stream = world.call(channel, "unary_stream", b"bc")
    assert stream.read() == b"b"
    assert silent.begun.wait(WAIT_S)
    world.do(channel.close)
    with pytest.raises(world.canceled_error):
        ended.result()
    assert stream.code() is grpc.StatusCode.CANCELLED
    assert world.do(kit.close, WAIT_S) == []


def test_a_call_that_waits_for_its_retry_ends_when_new_calls_are_refused(world, shop, timer):
    methods = QUEUED_OR_RETRIED | {
        STREAM_UNARY: MethodPolicy(idempotent=True, retry=RETRY.replace(backoff=30.0))
    }
    kit = world.do(world.api.Kit, methods=methods, timer=timer)
    channel = queue_one(world, shop, kit, shop.target)
    shop.then("UNAVAILABLE")
    call = world.call(channel, "stream_unary")
    wait_until(lambda: timer.pending == 2)
    refused = []

    def begin_another(_):
        multicallable = channel.unary_stream(UNARY_STREAM)
        try:
            multicallable(b"b").cancel()
        except world.closed_error:
            refused.append(True)
        else:
            refused.append(False)

    call.on_done(begin_another)
    world.do(channel.close)
    assert call.code() is grpc.StatusCode.CANCELLED
    wait_until(lambda: refused)
    assert refused == [True]
    world.do(kit.close, 0)


@only_sync
def test_a_blocking_call_that_waits_for_its_retry_ends_too(world, shop, timer):
    retried = MethodPolicy(idempotent=True, retry=RETRY.replace(backoff=30.0))
    kit = rpcwheel.Kit(methods=QUEUED_OR_RETRIED | {STREAM_UNARY: retried}, timer=timer)
    channel = queue_one(world, shop, kit, shop.target)
    shop.then("UNAVAILABLE")
    call = in_thread(channel.stream_unary(STREAM_UNARY), iter([b"b"]))
    wait_until(lambda: timer.pending == 2)
    channel.close()
    assert call.exception(WAIT_S).code() is grpc.StatusCode.CANCELLED
    kit.close(0)


def close_during_a_delivery(world, shop, kit):
    """Close a channel and the kit while a call is delivered; the delivery succeeds."""
    shop.then("UNAVAILABLE", hang := Hang())
    channel = world.do(kit.channel, shop.target)
    assert world.do(channel.unary_unary(UNARY_UNARY), b"a") is None
    assert hang.begun.wait(WAIT_S)
    world.do(channel.close)
    release(shop, 1)
    assert world.do(kit.close, WAIT_S) == []
    assert [seen.requests for seen in shop.calls] == [[b"a"], [b"a"]]


def test_closing_a_channel_does_not_cancel_deliveries(world, shop):
    close_during_a_delivery(world, shop, world.api.Kit(failback=SOON))


def test_with_a_journal_running_deliveries_end_and_other_calls_stay(world, shop, tmp_path):
    url = f"sqlite://{tmp_path}/calls.db"
    policy = FailbackPolicy(
        retry_on="UNAVAILABLE", journal=url, backoff=lambda state: state.attempt_number * 0
    )
    close_during_a_delivery(world, shop, world.api.Kit(failback=policy))
    kit = world.api.Kit(failback=policy.model_copy(update={"backoff": 60.0}))
    world.do(queue_one(world, shop, kit, shop.target).close)
    assert world.do(kit.close) == []
    backend = open_journal_backend(url)
    assert [call.attempts for call in backend.select(Filter(), limit=9)] == [1]
    backend.close()


def test_with_grpc_a_blocking_call_in_flight_continues_after_close_and_is_not_retried(shop):
    kit = rpcwheel.Kit(methods=QUEUED_OR_RETRIED)
    channel = kit.channel(shop.target)
    shop.then("UNAVAILABLE", hang := Hang(code="UNAVAILABLE"))
    assert channel.unary_unary(UNARY_UNARY)(b"a") is None
    call = in_thread(channel.stream_unary(STREAM_UNARY), iter([b"b"]), timeout=WAIT_S)
    assert hang.begun.wait(WAIT_S)
    channel.close()
    release(shop, 1)
    assert call.exception(WAIT_S).code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 2
    assert kit.close(WAIT_S) == []


async def test_with_aio_a_call_in_flight_continues_during_the_grace_and_is_not_retried(shop):
    kit = rpcwheel.aio.Kit(methods=QUEUED_OR_RETRIED)
    channel = kit.channel(shop.target)
    shop.then("UNAVAILABLE", hang := Hang(code="UNAVAILABLE"))
    assert await channel.unary_unary(UNARY_UNARY)(b"a") is None
    call = channel.stream_unary(STREAM_UNARY)(iter([b"b"]), timeout=WAIT_S)
    assert await asyncio.to_thread(hang.begun.wait, WAIT_S)
    closing = asyncio.create_task(channel.close(grace=WAIT_S))
    await asyncio.sleep(0)  # it waits for the call
    release(shop, 1)
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    await closing
    assert len(shop.calls) == 2
    assert await kit.close(WAIT_S) == []
