"""Request streams of `grpc.aio`: a retry sends the whole stream, or is not made."""

import asyncio

import grpc
import pytest

from fixtures.aio_policy_channels import read_all, refused, sent
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, Fail
from fixtures.waiting import aio_wait_until
from rpcwheel.call import DeadlinePolicy, RetryPolicy
from rpcwheel.events import RetryStopped
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors.aio import FailbackQueues


@pytest.mark.parametrize(
    ("requests", "channels"),
    [(lambda: [b"a", b"b"], "interceptors"), (lambda: sent(b"a", b"b"), "channel")],
    indirect=["channels"],
)
async def test_a_retry_sends_all_messages_again(shop, channels, requests):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert await channels.retrying().stream_unary(STREAM_UNARY)(requests()) == b"ab"
    assert len(shop.calls) == 3
    assert shop.calls[-1].requests == [b"a", b"b"]


async def test_an_iterator_is_read_once_and_no_message_is_lost(shop, channels):
    shop.then("UNAVAILABLE")
    going = asyncio.Event()

    async def requests():
        yield b"a"
        await going.wait()
        yield b"b"
        yield b"c"

    call = channels.retrying().stream_unary(STREAM_UNARY)(requests())
    await aio_wait_until(lambda: len(shop.calls) == 2)
    going.set()
    assert await call == b"abc"


@pytest.mark.parametrize("kind", ["stream_unary", "stream_stream"])
async def test_a_stream_is_retried_up_to_its_limit_of_bytes(shop, own, events, kind):
    """A longer stream is sent once, completely."""
    messages = [b"aa", b"bb"]
    method = STREAM_UNARY if kind == "stream_unary" else STREAM_STREAM
    for limit, attempts in ((10_000, 2), (3, 1)):
        shop.reset()
        shop.then(Fail("UNAVAILABLE", read=True))
        retry = RetryPolicy(
            retry_on="UNAVAILABLE", backoff=0.0, retry_budget=None, replay_buffer_bytes=limit
        )
        call = getattr(own.retrying(retry=retry), kind)(method)(sent(*messages))
        ending = call if kind == "stream_unary" else read_all(call)
        if attempts == 2:
            answer = await ending
            assert (b"".join(answer) if kind == "stream_stream" else answer) == b"aabb"
        else:
            assert (await refused(ending)).code() is grpc.StatusCode.UNAVAILABLE
        assert [seen.requests for seen in shop.calls] == [messages] * attempts
    await aio_wait_until(lambda: any(isinstance(event, RetryStopped) for event in events))
    assert "can't be repeated" in events[-1].reason


async def test_write_is_refused_after_an_iterator_was_given(channels):
    for settings in ({}, {"retry": None, "timeout": DeadlinePolicy(slow_call_threshold=9)}):
        call = channels.retrying(**settings).stream_unary(STREAM_UNARY)(sent(b"a"))
        with pytest.raises(grpc.aio.UsageError):
            await call.write(b"b")
        with pytest.raises(grpc.aio.UsageError):
            await call.done_writing()
        assert await call == b"a"


async def test_without_retries_requests_may_be_written(channels):
    settings = {"retry": None, "timeout": DeadlinePolicy(slow_call_threshold=9)}
    call = channels.retrying(**settings).stream_unary(STREAM_UNARY)()
    await call.write(b"a")
    await call.done_writing()
    assert await call == b"a"


async def test_written_requests_are_not_sent_again(shop, own, events):
    shop.then(Fail("UNAVAILABLE", read=True))
    call = own.retrying().stream_unary(STREAM_UNARY)()
    await call.write(b"a")
    await call.done_writing()
    assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1
    await aio_wait_until(lambda: any(isinstance(event, RetryStopped) for event in events))
    assert "can't be repeated" in events[-1].reason


async def test_written_requests_are_not_queued_by_failback(shop, own):
    async with FailbackQueues() as queues:
        failback = FailbackPolicy(retry_on="UNAVAILABLE")
        channel = own.retrying(retry=None, failback=failback, queues=queues)
        shop.then(Fail("UNAVAILABLE", read=True))
        call = channel.stream_unary(STREAM_UNARY)()
        await call.write(b"a")
        await call.done_writing()
        error = await refused(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "its requests were written" in error.__notes__[0]
        assert queues.pending == 0


async def test_after_done_writing_no_more_is_written(own):
    call = own.retrying().stream_unary(STREAM_UNARY)()
    await call.write(b"a")
    await call.done_writing()
    await call.done_writing()
    with pytest.raises(asyncio.InvalidStateError, match="half closed"):
        await call.write(b"b")
    assert await call == b"a"
    with pytest.raises(asyncio.InvalidStateError, match="finished"):
        await call.write(b"b")


async def test_a_write_after_the_server_has_failed_the_call_raises(shop, own):
    shop.then(Fail("NOT_FOUND"))
    call = own.retrying().stream_unary(STREAM_UNARY)()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
        await write_for_ever(call)
    assert await call.code() is grpc.StatusCode.NOT_FOUND


async def write_for_ever(call):
    while True:
        await call.write(b"a")


async def test_an_iterator_that_raises_cancels_the_call(own):
    async def broken():
        yield b"a"
        raise KeyError

    def plain():
        yield b"a"
        raise KeyError

    for requests in (broken(), plain()):
        call = own.retrying().stream_unary(STREAM_UNARY)(requests)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_the_caller_gets_the_servers_status_if_it_ends_the_call_early(shop, channels):
    """Without rpcwheel every second such call ends with INTERNAL (grpcio 1.85)."""
    member = channels.retrying(retry=RetryPolicy(retry_on="UNAVAILABLE")).stream_stream(
        STREAM_STREAM
    )
    for _ in range(20):
        shop.then("NOT_FOUND")
        call = member([b"a", b"b"])
        error = await refused(read_all(call))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert await call.code() is grpc.StatusCode.NOT_FOUND
