"""Request streams on a loop: sent again whole or not at all, and read once."""

import asyncio

import grpc
import pytest

from fixtures.aio_doors import doors, own, read_all, refused, sent  # noqa: F401 - fixtures
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, Fail, Hang
from fixtures.waiting import aio_wait_until
from rpcwheel.call import RetryPolicy
from rpcwheel.call._aio_requests import Requests
from rpcwheel.call.retry import COMMITTED
from rpcwheel.observe import RetryScheduled, RetryStopped

# ruff: noqa: F811 - fixtures are imported by name


async def test_a_stream_that_outgrows_the_limit_before_the_retry_fails_as_the_try_did(
    shop, own, timer, events
):
    """The retry is decided already, and waits for its time."""
    shop.kill()
    retry = RetryPolicy(on="UNAVAILABLE", wait=5.0, budget=None, replay_buffer_bytes=100)
    channel = own.retrying(timer=timer, retry=retry)
    call = channel.stream_unary(STREAM_UNARY)()
    await call.write(b"aa")
    await aio_wait_until(lambda: timer.pending)
    writing = asyncio.ensure_future(call.write(b"b" * 100))
    await asyncio.sleep(0.01)
    shop.start()
    await channel.channel_ready()
    timer.advance(5.0)
    error = await refused(asyncio.wait_for(call, 20))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    await refused(writing)
    assert not shop.calls
    assert [type(event) for event in events] == [RetryScheduled, RetryStopped]
    assert events[-1].reason == COMMITTED.reason


async def test_written_requests_are_sent_again_and_writing_goes_on(shop, own):
    shop.then(hang := Hang())
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.1, budget=None)
    call = own.retrying(retry=retry).stream_stream(STREAM_STREAM)()
    await call.write(b"a")
    await aio_wait_until(hang.begun.is_set)
    shop.kill()
    shop.start()
    await aio_wait_until(lambda: len(shop.calls) == 2)
    await call.write(b"b")
    await call.done_writing()
    assert [await call.read() for _ in range(3)] == [b"a", b"b", grpc.aio.EOF]
    assert shop.calls[1].requests == [b"a", b"b"]


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


async def test_a_write_that_the_end_of_the_call_overtakes_says_how_it_ended(shop, own):
    shop.then(Fail("NOT_FOUND"))
    call = own.retrying().stream_unary(STREAM_UNARY)()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
        await write_for_ever(call)
    assert await call.code() is grpc.StatusCode.NOT_FOUND


async def write_for_ever(call):
    while True:
        await call.write(b"a")


async def test_a_cancelled_write_cancels_the_call(shop, own):
    shop.kill()
    retry = RetryPolicy(on="UNAVAILABLE", wait=30.0, budget=None)
    call = own.retrying(retry=retry).stream_unary(STREAM_UNARY)()
    await call.write(b"a")
    writing = asyncio.ensure_future(call.write(b"b"))
    await asyncio.sleep(0.1)
    shop.start()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert call.cancelled()


# --- The feeds themselves ---


async def test_only_the_newest_feed_gets_what_comes():
    gate = asyncio.Event()

    async def source():
        yield b"a"
        await gate.wait()
        yield b"b"

    requests = Requests(source(), 100)
    old = requests.feed()
    assert await anext(old) == b"a"
    waiting = asyncio.ensure_future(anext(old, "end"))
    await asyncio.sleep(0)
    new = requests.feed()
    assert await waiting == "end"
    assert await anext(new) == b"a"
    rest = asyncio.ensure_future(read_all(new))
    gate.set()
    assert await rest == [b"b"]
    assert requests.complete


async def test_a_cancelled_try_takes_no_message_with_it():
    gate = asyncio.Event()

    async def source():
        await gate.wait()
        yield b"a"

    requests = Requests(source(), 100)
    waiting = asyncio.ensure_future(anext(requests.feed()))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    assert await read_all(requests.feed()) == [b"a"]


async def test_a_source_is_read_only_as_fast_as_it_is_sent():
    read = []

    async def source():
        for number in range(3):
            read.append(number)
            yield number

    feed = Requests(source(), 100).feed()
    await anext(feed)
    await asyncio.sleep(0)
    assert read == [0]


async def test_what_is_closed_is_read_no_more():
    async def source():
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.set()

    ended = asyncio.Event()
    requests = Requests(source(), 100)
    waiting = asyncio.ensure_future(anext(requests.feed(), "end"))
    await asyncio.sleep(0.01)
    requests.close()
    assert await waiting == "end"
    await ended.wait()
