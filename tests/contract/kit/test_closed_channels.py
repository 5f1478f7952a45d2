"""The channels of a kit that are closed before it: their queued calls are delivered."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import FailbackPolicy, open_registry
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.journal import Filter, open_journal_backend
from rpcwheel.registry import ServiceInstance

LATER = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0)
SOON = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01)
SERVICE = "test.Shop"


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


def queue_one(kits, shop, kit, target, **settings):
    """Make a channel and let it queue a call."""
    shop.then("UNAVAILABLE")
    channel = kits.do(kit.channel, target, **settings)
    assert kits.do(channel.unary_unary(UNARY_UNARY), b"a", timeout=WAIT_S) is None
    return channel


def release(shop, number):
    """Let the server answer a call that hangs."""
    shop.calls[number].ended.set()


def test_a_kit_delivers_the_queued_calls_of_closed_channels_at_its_end(kits, shop, target):
    kit = kits.kit(failback=LATER)
    channel = queue_one(kits, shop, kit, target[0], **target[1])
    member = channel.unary_unary(UNARY_UNARY)
    kits.do(channel.close)
    with pytest.raises(kits.closed_error):
        kits.do(member, b"b")
    with pytest.raises(kits.closed_error):
        kits.begin(channel.unary_unary(UNARY_UNARY), b"b")
    with pytest.raises(kits.closed_error):
        kits.do(channel.unary_stream(UNARY_STREAM), b"b")
    assert kits.do(kit.close, WAIT_S) == []
    assert [seen.requests for seen in shop.calls] == [[b"a"], [b"a"]]


def test_a_closed_channel_keeps_its_connections_until_no_call_of_it_is_queued(kits, shop, target):
    kit = kits.kit(failback=LATER, heartbeat=600.0)
    channel = queue_one(kits, shop, kit, target[0], **target[1])
    kits.do(channel.close)
    kits.do(channel.close)  # idempotent
    assert len(kit.heartbeats) == 1
    assert kits.do(kit.flush, WAIT_S)
    assert wait_until(lambda: not kit.heartbeats)
    kits.do(kit.close)


def test_close_of_the_kit_returns_the_calls_of_closed_channels(kits, shop):
    kit = kits.kit(failback=LATER)
    kits.do(queue_one(kits, shop, kit, shop.target).close)
    (failed,) = kits.do(kit.close, 0)
    assert (failed.function, failed.args, failed.attempts) == (UNARY_UNARY, (b"a",), 1)


def test_a_second_close_of_the_kit_leaves_the_connections_to_the_first(kits, shop):
    kit = kits.kit(failback=LATER)
    channel = queue_one(kits, shop, kit, shop.target)
    kits.do(channel.close)
    shop.then(hang := Hang())
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(kits.do, kit.close, WAIT_S)
        assert hang.begun.wait(WAIT_S)
        assert kits.do(kit.close, WAIT_S) == []
        release(shop, 1)
        assert closing.result(WAIT_S) == []


def test_closing_a_channel_with_queued_calls_ends_its_futures_and_streams(kits, shop, target):
    kit = kits.kit(failback=LATER)
    channel = queue_one(kits, shop, kit, target[0], **target[1])
    shop.then(hang := Hang())
    ended = kits.begin(channel.unary_unary(UNARY_UNARY), b"b")
    assert hang.begun.wait(WAIT_S)
    shop.then(silent := Silent(after=1))
    stream = kits.do(channel.unary_stream(UNARY_STREAM), b"bc")
    assert kits.read(stream) == b"b"
    assert silent.begun.wait(WAIT_S)
    kits.do(channel.close)
    with pytest.raises(kits.ended_error):
        ended()
    assert kits.do(stream.code) is grpc.StatusCode.CANCELLED
    assert kits.do(kit.close, WAIT_S) == []


def test_closing_a_channel_does_not_cancel_deliveries(kits, shop):
    kit = kits.kit(failback=SOON)
    shop.then("UNAVAILABLE", hang := Hang())
    channel = kits.do(kit.channel, shop.target)
    assert kits.do(channel.unary_unary(UNARY_UNARY), b"a") is None
    assert hang.begun.wait(WAIT_S)
    kits.do(channel.close)
    release(shop, 1)
    assert kits.do(kit.close, WAIT_S) == []
    assert len(shop.calls) == 2


def test_with_a_journal_running_deliveries_end_and_other_calls_stay(kits, shop, tmp_path):
    url = f"sqlite://{tmp_path}/calls.db"
    policy = FailbackPolicy(
        retry_on="UNAVAILABLE", journal=url, backoff=lambda state: state.attempt_number * 0
    )
    kit = kits.kit(failback=policy)
    shop.then("UNAVAILABLE", hang := Hang())
    channel = kits.do(kit.channel, shop.target)
    assert kits.do(channel.unary_unary(UNARY_UNARY), b"a") is None
    assert hang.begun.wait(WAIT_S)
    kits.do(channel.close)
    release(shop, 1)
    assert kits.do(kit.close, WAIT_S) == []
    assert [seen.requests for seen in shop.calls] == [[b"a"], [b"a"]]
    kit = kits.kit(failback=policy.model_copy(update={"backoff": 60.0}))
    kits.do(queue_one(kits, shop, kit, shop.target).close)
    assert kits.do(kit.close) == []
    backend = open_journal_backend(url)
    assert [call.attempts for call in backend.select(Filter(), limit=9)] == [1]
    backend.close()


def test_with_grpc_a_blocking_call_continues_on_a_closed_channel_with_queued_calls(shop):
    from rpcwheel import Kit

    kit = Kit(failback=LATER)
    shop.then("UNAVAILABLE", hang := Hang())
    channel = kit.channel(shop.target)
    member = channel.unary_unary(UNARY_UNARY)
    assert member(b"a") is None
    results = []
    thread = threading.Thread(target=lambda: results.append(member(b"b", timeout=WAIT_S)))
    thread.start()
    assert hang.begun.wait(WAIT_S)
    channel.close()
    release(shop, 1)
    thread.join(WAIT_S)
    assert results == [b"b"]
    assert kit.close(WAIT_S) == []


async def test_with_aio_close_waits_for_calls_in_flight_as_long_as_its_grace(shop):
    from rpcwheel.aio import Kit

    kit = Kit(failback=LATER)
    shop.then("UNAVAILABLE", hang := Hang())
    channel = kit.channel(shop.target)
    member = channel.unary_unary(UNARY_UNARY)
    assert await member(b"a") is None
    call = member(b"b", timeout=WAIT_S)
    closing = asyncio.create_task(channel.close(grace=WAIT_S))
    assert await asyncio.to_thread(hang.begun.wait, WAIT_S)
    release(shop, 1)
    assert await call == b"b"
    await closing
    assert await kit.close(WAIT_S) == []
