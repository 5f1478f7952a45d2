"""Request streams on a loop: sent again whole or not at all, and read once."""

import asyncio

import grpc
import pytest

from fixtures.aio_doors import doors, own, read_all, refused, sent  # noqa: F401 - fixtures
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, Fail, Hang
from fixtures.waiting import aio_wait_until
from rpcwheel.deadline import DeadlinePolicy, RetryPolicy
from rpcwheel.deadline.core import COMMITTED
from rpcwheel.interceptors._aio_requests import Requests
from rpcwheel.observe import CallNotRetried, CallRetrying

# ruff: noqa: F811 - fixtures are imported by name


@pytest.mark.parametrize("requests", [lambda: [b"a", b"b"], lambda: sent(b"a", b"b")])
async def test_a_stream_is_sent_again_whole(shop, doors, requests):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert await doors.retrying().stream_unary(STREAM_UNARY)(requests()) == b"ab"
    assert len(shop.calls) == 3
    assert shop.calls[-1].requests == [b"a", b"b"]


async def test_an_iterator_is_read_once_and_no_message_is_lost(shop, doors):
    shop.then(Fail("UNAVAILABLE"))
    going = asyncio.Event()

    async def requests():
        yield b"a"
        await going.wait()
        yield b"b"
        yield b"c"

    call = doors.retrying().stream_unary(STREAM_UNARY)(requests())
    await aio_wait_until(lambda: len(shop.calls) == 2)
    going.set()
    assert await call == b"abc"


async def test_a_stream_that_outgrew_the_limit_is_not_sent_again(shop, doors, events):
    codes = {"UNAVAILABLE", "CANCELLED"}  # how a call fails whose server is stopped
    retry = RetryPolicy(on=codes, wait=0.0, budget=None, replay_bytes=3)
    shop.then(hang := Hang())
    call = doors.retrying(retry=retry).stream_unary(STREAM_UNARY)(sent(b"aa", b"bb"))
    await aio_wait_until(hang.begun.is_set)
    await asyncio.sleep(0.1)  # for the second message to be taken
    shop.kill()
    error = await refused(call)
    shop.start()
    assert error.code().name in codes
    assert len(shop.calls) == 1
    assert [event.reason for event in events] == [COMMITTED.reason]


async def test_a_stream_that_outgrows_the_limit_before_the_retry_fails_as_the_try_did(
    shop, own, timer, events
):
    """The retry is decided already, and waits for its time."""
    shop.kill()
    retry = RetryPolicy(on="UNAVAILABLE", wait=5.0, budget=None, replay_bytes=100)
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
    assert [type(event) for event in events] == [CallRetrying, CallNotRetried]
    assert events[-1].reason == COMMITTED.reason


async def test_a_stream_that_outgrew_the_limit_arrives_whole_the_first_time(shop, doors):
    retry = RetryPolicy(on="UNAVAILABLE", replay_bytes=3)
    call = doors.retrying(retry=retry).stream_unary(STREAM_UNARY)(sent(b"aa", b"bb", b"cc"))
    assert await call == b"aabbcc"


async def test_written_requests_are_sent_again_and_writing_goes_on(shop, doors):
    shop.then(hang := Hang())
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.1, budget=None)
    call = doors.retrying(retry=retry).stream_stream(STREAM_STREAM)()
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


@pytest.mark.parametrize("settings", [{}, {"retry": None, "timeout": DeadlinePolicy(slow_after=9)}])
async def test_who_gave_an_iterator_may_not_write(doors, settings):
    call = doors.retrying(**settings).stream_unary(STREAM_UNARY)(sent(b"a"))
    with pytest.raises(grpc.aio.UsageError):
        await call.write(b"b")
    with pytest.raises(grpc.aio.UsageError):
        await call.done_writing()
    assert await call == b"a"


async def test_without_retries_requests_are_written_to_the_try_itself(doors):
    settings = {"retry": None, "timeout": DeadlinePolicy(slow_after=9)}
    call = doors.retrying(**settings).stream_unary(STREAM_UNARY)()
    await call.write(b"a")
    await call.done_writing()
    assert await call == b"a"


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


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_an_iterator_that_raises_cancels_the_call(own, kind):
    async def broken():
        yield b"a"
        raise KeyError

    def plain():
        yield b"a"
        raise KeyError

    call = own.retrying().stream_unary(STREAM_UNARY)(plain() if kind == "plain" else broken())
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await call.code() is grpc.StatusCode.CANCELLED


async def test_the_servers_status_is_told_though_requests_were_under_way(shop, doors):
    """grpc.aio tells INTERNAL instead, in every second such call (1.85)."""
    member = doors.retrying(retry=RetryPolicy(on="UNAVAILABLE")).stream_stream(STREAM_STREAM)
    for _ in range(30):
        shop.then("NOT_FOUND")
        call = member([b"a", b"b"])
        error = await refused(read_all(call))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert await call.code() is grpc.StatusCode.NOT_FOUND


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
