"""Request streams: a retry sends the whole stream, or is not made.

With `grpc.aio`, requests may also be written, and are not sent again then.
"""

import asyncio
import threading
import weakref

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.aio_channels import refused, sent
from fixtures.clients import LATER, SYNC_WAYS, ways
from fixtures.counted_messages import CountedMessage
from fixtures.leaks import no_garbage_collector
from fixtures.shop import STREAM_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from fixtures.worlds import RETRY
from rpcwheel.call import CallPolicy, DeadlinePolicy, DefaultResponsePolicy
from rpcwheel.events import RetryStopped
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import intercept_channel
from rpcwheel.interceptors.aio import FailbackQueues


def test_a_retry_sends_all_messages_once_and_in_order(shop, client):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    messages = [bytes([n]) for n in range(50)]
    assert client.ask(client.open(), requests=iter(messages)) == b"".join(messages)
    assert shop.calls[-1].requests == messages
    assert len(shop.calls) == 3


def test_a_retry_sends_messages_that_arrive_after_its_begin(shop, client):
    shop.then("UNAVAILABLE")
    gate = threading.Event()
    requests = client.requests(b"a", b"b", b"c", gate=gate)
    call = client.begin(client.open(), requests=requests)
    wait_until(lambda: len(shop.calls) == 2 and shop.calls[1].requests == [b"a"])
    gate.set()  # the first attempt's thread reads the next message
    assert client.answer(call) == b"abc"


@pytest.mark.parametrize(("limit", "attempts"), [(10_000, 2), (6, 1)])
def test_a_stream_is_retried_up_to_its_limit_of_bytes(shop, client, events, limit, attempts):
    """A longer stream is sent once, completely."""
    messages = [b"abc", b"defg"]
    shop.then(Fail("UNAVAILABLE", read=True))
    channel = client.open(retry=RETRY.replace(replay_buffer_bytes=limit))
    call = client.begin(channel, requests=iter(messages))
    if attempts == 2:
        assert client.answer(call) == b"abcdefg"
    else:
        assert call.error().code() is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: any(isinstance(event, RetryStopped) for event in events))
        assert "can't be repeated" in events[-1].reason
    assert [seen.requests for seen in shop.calls] == [messages] * attempts


def test_a_retry_sends_each_message_of_a_stream_that_reuses_one_object(shop, client):
    def filled():
        message = StringValue()
        for text in "abc":
            message.value = text
            yield message

    shop.then(Fail("UNAVAILABLE", read=True))
    client.ask(client.open(), requests=filled(), serializer=StringValue.SerializeToString)
    wire = [StringValue(value=text).SerializeToString() for text in "abc"]
    assert [seen.requests for seen in shop.calls] == [wire, wire]


def test_the_copies_of_requests_are_freed_with_their_call(shop, client):
    """At once, and not by the garbage collector."""
    channel, copies = client.open(retry=RETRY), weakref.WeakSet()
    with no_garbage_collector():
        client.ask(channel, requests=iter([CountedMessage(copies)]), serializer=lambda _: b"x")
        assert shop.calls[-1].requests == [b"x"]
        assert wait_until(lambda: not copies)


class Broken:
    """The requests of a client: one message, and an error when the test calls `fail`."""

    def __init__(self, client) -> None:
        self._world = client.world
        self._gate, self._raises = threading.Event(), threading.Event()
        self.is_read = threading.Event()
        """Whether a thread, or a task, waits for the second message."""

    def fail(self) -> None:
        """Let the iterator raise, and wait until its reader has got the error."""
        self._gate.set()
        assert self._raises.wait(WAIT_S)
        if self._world.name == "sync":
            self._reader.join(WAIT_S)
        else:
            self._world.do(bool)  # behind the step in which it raises

    def requests(self):
        return self._iterate() if self._world.name == "sync" else self._iterate_on_loop()

    def _iterate(self):
        yield b"a"
        self._reader = threading.current_thread()
        self.is_read.set()
        self._gate.wait(WAIT_S)
        self._raises.set()
        raise ValueError("no more")

    async def _iterate_on_loop(self):
        yield b"a"
        self.is_read.set()
        await self._world.wait_for(self._gate)
        self._raises.set()
        raise ValueError("no more")


def test_a_stream_whose_iterator_raises_before_the_retry_is_not_sent_again(shop, client, timer):
    shop.then(hang := Hang(code="UNAVAILABLE"))
    broken = Broken(client)
    call = client.begin(client.open(retry=LATER, timer=timer), requests=broken.requests())
    assert hang.begun.wait(WAIT_S)
    assert broken.is_read.wait(WAIT_S)
    shop.calls[0].ended.set()
    wait_until(lambda: timer.pending == 1)
    broken.fail()
    timer.advance(5.0)
    assert call.error().code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


def broken():
    yield b"a"
    raise ValueError("no more")


@ways(*SYNC_WAYS)
def test_with_grpc_an_iterator_that_raises_ends_the_call_as_in_grpc(shop, client):
    channel = client.open(retry=RETRY.replace(retry_on={"UNKNOWN", "UNAVAILABLE"}))
    error = client.refused(channel, requests=broken())
    assert error.code() is grpc.StatusCode.UNKNOWN
    # gRPC also has "Stream removed (Exception iterating requests!)", if threads switch often.
    assert "Exception iterating requests!" in error.details()
    assert len(shop.calls) <= 1


def test_without_retries_a_request_stream_is_passed_to_grpc_unchanged(shop, shop_channel):
    channel = intercept_channel(shop_channel, CallPolicy(timeout=WAIT_S))
    shop.then(Hang())
    call = channel.stream_unary(STREAM_UNARY).future(iter([b"a", b"b"]))
    assert type(call).__module__ == "grpc._channel"
    call.cancel()


# --- grpc.aio ---


async def test_with_grpc_aio_an_iterator_that_raises_cancels_the_call(own):
    async def aio_broken():
        yield b"a"
        raise ValueError("no more")

    for requests in (aio_broken(), broken()):
        call = own.retrying().stream_unary(STREAM_UNARY)(requests)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_write_is_refused_after_an_iterator_was_given(channels):
    for settings in ({}, {"retry": None, "timeout": DeadlinePolicy(slow_call_threshold=9)}):
        call = channels.retrying(**settings).stream_unary(STREAM_UNARY)(sent(b"a"))
        with pytest.raises(grpc.aio.UsageError):
            await call.write(b"b")
        with pytest.raises(grpc.aio.UsageError):
            await call.done_writing()
        assert await call == b"a"


async def test_a_call_whose_requests_cannot_be_iterated_is_not_watched(own, timer):
    slow = DeadlinePolicy(slow_call_threshold=9.0)
    channel = own.retrying(timeout=slow, timer=timer)
    with pytest.raises(TypeError):
        channel.stream_unary(STREAM_UNARY)(5)
    assert timer.pending == 0


async def test_the_first_write_to_a_call_that_was_late_raises_its_status(own):
    default = DefaultResponsePolicy(on="INTERNAL", default=b"none")
    for settings in ({}, {"default_response": default}):
        call = own.retrying(**settings).stream_unary(STREAM_UNARY)(timeout=0)
        error = await refused(call.write(b"a"))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(asyncio.InvalidStateError, match="finished"):
            await call.write(b"a")


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
