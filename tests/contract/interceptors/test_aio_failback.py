"""Failback on a loop: the caller has its answer, the call is delivered later."""

import asyncio

import grpc
import pytest

from fixtures.aio_doors import doors, own, read_all, refused, sent  # noqa: F401 - fixtures
from fixtures.shop import (
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
)
from fixtures.waiting import aio_wait_until
from rpcwheel.deadline import DeadlinePolicy, RetryPolicy
from rpcwheel.errors import FailbackFull
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors.aio import Queues
from rpcwheel.observe import HookFailed

# ruff: noqa: F811 - fixtures are imported by name

CALLS = {
    "unary_unary": (UNARY_UNARY, lambda: b"ab"),
    "unary_stream": (UNARY_STREAM, lambda: b"ab"),
    "stream_unary": (STREAM_UNARY, lambda: sent(b"a", b"b")),
    "stream_stream": (STREAM_STREAM, lambda: [b"a", b"b"]),
}
LATER = FailbackPolicy(on="UNAVAILABLE", wait=30.0, default=(b"later",))


@pytest.fixture
async def queues(timer):
    queues = Queues(timer)
    yield queues
    await queues.close(0)


async def answer_of(call, kind):
    return await read_all(call) if kind.endswith("stream") else list(await call)


@pytest.mark.parametrize("kind", CALLS)
async def test_a_failed_call_is_answered_now_and_delivered_later(shop, doors, queues, kind):
    method, request = CALLS[kind]
    shop.then(Fail("UNAVAILABLE", "gone", (("k", "v"),)))
    channel = doors.retrying(retry=None, failback=LATER, queues=queues)
    call = getattr(channel, kind)(method)(request(), metadata=(("id", "7"),))
    assert await answer_of(call, kind) == [b"later"]
    assert await call.code() is grpc.StatusCode.OK
    assert await call.details() == "queued by failback after UNAVAILABLE: gone"
    assert tuple(await call.trailing_metadata()) == (("k", "v"), ("rpcwheel-answer", "failback"))
    assert queues.pending == 1
    assert await queues.flush(20)
    assert b"".join(shop.calls[-1].requests) == b"ab"
    assert shop.calls[-1].metadata["id"] == "7"
    assert shop.calls[-1].metadata["grpc-previous-rpc-attempts"] == "1"
    assert 50 < shop.calls[-1].time_remaining < 61
    assert queues.stats()["*"].delivered_later == 1


async def test_a_delivery_that_fails_is_made_again(shop, doors, queues):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    channel = doors.retrying(retry=None, failback=LATER, queues=queues)
    await channel.unary_unary(UNARY_UNARY)(b"x", timeout=3.0)
    assert not await queues.flush(0.2)
    assert await queues.flush(20)
    told = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert told == [None, "1", "2"]
    assert shop.calls[-1].time_remaining < 3.5


async def test_stale_tokens_are_left_out(shop, doors, queues):
    shop.then("UNAVAILABLE")
    channel = doors.retrying(retry=None, failback=LATER, queues=queues)
    await channel.unary_unary(UNARY_UNARY)(b"x", metadata=(("authorization", "old"), ("k", "v")))
    assert await queues.flush(20)
    first, second = shop.calls
    assert "authorization" in first.metadata
    assert "authorization" not in second.metadata
    assert second.metadata["k"] == "v"


async def test_retries_come_before_failback(shop, doors, queues):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = doors.retrying(failback=LATER, queues=queues)
    await channel.unary_unary(UNARY_UNARY)(b"x")
    assert (len(shop.calls), queues.pending) == (3, 1)


async def test_a_server_that_is_down_gets_the_whole_stream_later(shop, doors, queues):
    shop.kill()
    channel = doors.retrying(retry=None, failback=LATER, queues=queues)
    assert await channel.stream_unary(STREAM_UNARY)(sent(b"a", b"b")) == (b"later",)
    shop.start()
    await aio_wait_until(
        lambda: channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE
    )
    await queues.flush(20)
    assert shop.calls[-1].requests == [b"a", b"b"]


async def test_a_stream_too_big_to_keep_fails(shop, doors, queues):
    shop.then("UNAVAILABLE")
    big = [b"x" * 600_000] * 2
    channel = doors.retrying(retry=None, failback=LATER, queues=queues)
    error = await refused(channel.stream_unary(STREAM_UNARY)(sent(*big)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert not queues.pending


async def test_a_stream_that_does_not_end_in_time_fails(shop, doors, queues):
    async def endless():
        yield b"a"
        await asyncio.Event().wait()

    shop.then("UNAVAILABLE")
    deadline = DeadlinePolicy(timeout=0.4)
    channel = doors.retrying(retry=None, failback=LATER, timeout=deadline, queues=queues)
    await refused(channel.stream_unary(STREAM_UNARY)(endless()))
    assert not queues.pending


async def test_failures_that_failback_does_not_name_are_the_callers(shop, doors, queues):
    shop.then("NOT_FOUND")
    channel = doors.retrying(failback=LATER, queues=queues)
    error = await refused(channel.unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_a_full_queue_says_so(shop, doors, queues):
    full = LATER.model_copy(update={"max_pending": 1})
    member = doors.retrying(retry=None, failback=full, queues=queues).unary_unary(UNARY_UNARY)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    await member(b"x")
    call = member(b"y")
    with pytest.raises(FailbackFull) as caught:
        await call
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_predicate_that_raises_leaves_the_failure(shop, doors, queues, events):
    shop.then("NOT_FOUND")
    broken = FailbackPolicy(on=lambda _: 1 / 0)
    channel = doors.retrying(failback=broken, queues=queues)
    error = await refused(channel.unary_unary(UNARY_UNARY)(b"x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert HookFailed in map(type, events)


async def test_what_the_caller_cancelled_is_not_parked(shop, doors, queues):
    shop.then(hang := Hang())
    cancelled = FailbackPolicy(on="CANCELLED")
    retry = RetryPolicy(on={"CANCELLED", "UNAVAILABLE"})
    channel = doors.retrying(failback=cancelled, retry=retry, queues=queues)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(hang.begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not queues.pending
    assert len(shop.calls) == 1


async def test_a_request_that_changes_later_is_delivered_as_it_was(shop, own, queues):
    shop.then("UNAVAILABLE")
    channel = own.retrying(retry=None, failback=LATER, queues=queues)
    member = channel.unary_unary(UNARY_UNARY, request_serializer=b"".join)
    await member(request := [b"a"])
    request.append(b"b")
    assert await queues.flush(20)
    assert shop.calls[-1].requests == [b"a"]
