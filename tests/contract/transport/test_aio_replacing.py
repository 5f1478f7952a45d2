"""Calls of grpc.aio in flight during a reconnect: they continue, or end with the reason.

A call that ends with its connection is distinguished from a call that its caller cancels.
"""

import asyncio
import itertools

import grpc
import pytest

from fixtures.aio_channels import KINDS, Stub, hanging, steps
from fixtures.shop import UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import RetryPolicy, aio

REASON = "connection replaced: it is dead"
SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


def passing(kind):
    """An interceptor of this kind that does nothing."""
    base = getattr(grpc.aio, f"{kind.title().replace('_', '')}ClientInterceptor")

    async def intercept(self, continuation, details, request):
        return await continuation(details, request)

    return type("Passing", (base,), {f"intercept_{kind}": intercept})()


@pytest.fixture(params=["plain", "interceptors", "kit"])
def way(request, make):
    """A channel for stubs, and the channel below it."""
    given = [passing(kind) for kind in KINDS] if request.param == "interceptors" else None
    channel = make(interceptors=given)
    if request.param == "kit":
        retry = RetryPolicy(retry_on="UNAVAILABLE")
        return aio.Kit(timeout=2 * WAIT_S, retry=retry).intercept_channel(channel), channel
    return channel, channel


async def iterate(call):
    return await anext(aiter(call))


def read(call):
    return call.read()


def itself(call):
    return call


WAITS = (
    ("unary_unary", itself),
    ("stream_unary", itself),
    ("unary_stream", read),
    ("stream_stream", read),
    ("unary_stream", iterate),
    ("stream_stream", iterate),
)
"""The ways to wait for the response, by kind."""


def begin(outer, kind):
    """Start a call; it may not have been sent yet."""
    return getattr(Stub(outer), kind)(b"x" if kind.startswith("unary") else None)


def task_of(wait, call):
    async def waiting():
        return await wait(call)

    return asyncio.create_task(waiting())


async def end_of(task):
    """The exception of the task."""
    await asyncio.wait([task], timeout=WAIT_S)
    try:
        return task.exception() if task.done() else None
    except asyncio.CancelledError as error:
        return error


def has_reason(error):
    """Whether this is the status of a call that was ended with its connection."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    return (error.code().name, error.details()) == ("UNAVAILABLE", REASON)


# Ended with its connection, or cancelled by its caller


async def test_a_call_ended_with_its_connection_raises_its_status(shop, way):
    outer, channel = way
    calls = [await hanging(shop, outer, kind) for kind, _ in WAITS]
    shop.then(*[Hang()] * len(WAITS))
    calls += [begin(outer, kind) for kind, _ in WAITS]  # these may not have been sent
    waiting = [task_of(wait, call) for (_, wait), call in zip(WAITS * 2, calls, strict=True)]
    await asyncio.sleep(0)
    channel.reconnect("it is dead", drain_timeout=0, force=True)
    for task, call in zip(waiting, calls, strict=True):
        assert has_reason(await end_of(task)), call
        assert (await call.code()).name == "UNAVAILABLE"
        assert await call.details() == REASON
        assert not call.cancelled()
        assert not call.cancel()
    assert channel.calls == 0


@pytest.mark.parametrize("when", ["before", "after", "a step after"])
async def test_a_canceled_caller_stays_canceled(shop, way, when):
    """Its task is canceled before the reconnect, after it, or when that may have been reported."""
    outer, channel = way
    calls = [await hanging(shop, outer, kind) for kind, _ in WAITS]
    waiting = [task_of(wait, call) for (_, wait), call in zip(WAITS, calls, strict=True)]
    await steps()
    if when != "before":
        channel.reconnect("it is dead", drain_timeout=0, force=True)
    if when == "a step after":
        await asyncio.sleep(0)
    canceled = [task.cancel() for task in waiting]
    channel.reconnect("it is dead", drain_timeout=0, force=True)
    for task, was_canceled in zip(waiting, canceled, strict=True):
        end = await end_of(task)
        if when == "a step after" and not task.cancelled():
            assert has_reason(end)
        else:
            assert (task.cancelled(), was_canceled) == (True, True)
    await aio_wait_until(lambda: channel.calls == 0)


# What else is asked of a call that ends with its connection


async def test_status_and_metadata_of_a_call_ended_with_its_connection(shop, way):
    outer, channel = way
    asks = ("code", "details", "trailing_metadata", "initial_metadata")
    shop.then(*[Silent()] * len(asks))
    calls = [begin(outer, "unary_stream") for _ in asks]
    asking = [
        task_of(lambda call, ask=ask: getattr(call, ask)(), call)
        for call, ask in zip(calls, asks, strict=True)
    ]
    await steps()
    channel.reconnect("it is dead", drain_timeout=0, force=True)
    code, details, *_ = [await asyncio.wait_for(task, WAIT_S) for task in asking]
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, REASON)


async def test_wait_for_connection_ends_with_its_connection(shop, channel):
    shop.then(*[Hang()] * len(KINDS))
    calls = [begin(channel, kind) for kind in KINDS]
    waiting = [task_of(lambda call: call.wait_for_connection(), call) for call in calls]
    await asyncio.sleep(0)
    channel.reconnect("it is dead", drain_timeout=0, force=True)
    assert [has_reason(await end_of(task)) for task in waiting] == [True] * len(KINDS)


async def test_write_ends_with_its_connection(shop, way):
    """In grpc.aio 1.85 `write` hangs if the call is canceled before it was sent."""
    outer, channel = way

    async def write(call):
        while True:
            await call.write(bytes(10**6))  # more than the flow-control window

    # Calls that may never reach the server come last: the server hangs in the first one.
    for begun, kind in itertools.product((True, False), ("stream_unary", "stream_stream")):
        shop.then(hang := Hang())
        call = begin(outer, kind)
        if begun:
            await aio_wait_until(hang.begun.is_set)
        writing = asyncio.create_task(write(call))
        await steps(20 if begun else 1)
        channel.reconnect("it is dead", drain_timeout=0, force=True)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await asyncio.wait_for(writing, WAIT_S)
        assert (await call.code()).name == "UNAVAILABLE"
        await asyncio.wait_for(call.done_writing(), WAIT_S)


async def test_messages_that_were_read_before_the_end_are_delivered(shop, channel):
    shop.then(Silent(after=2))
    call = Stub(channel).unary_stream(b"ab")
    assert [await call.read(), await call.read()] == [b"a", b"b"]
    channel.reconnect("it is dead", drain_timeout=0)
    with pytest.raises(grpc.aio.AioRpcError, match=REASON):
        await call.read()


async def test_a_status_that_arrived_before_the_end_is_kept(shop, channel):
    shop.then(Fail("NOT_FOUND", "no such thing"))
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(call.done)
    channel.reconnect("it is dead", drain_timeout=0)
    with pytest.raises(grpc.aio.AioRpcError, match="no such thing"):
        await call


async def test_the_request_iterator_is_closed_with_its_call(shop, channel):
    closed = asyncio.Event()

    async def requests():
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            closed.set()

    call = Stub(channel).stream_stream(requests())
    assert await call.read() == b"a"
    channel.reconnect("it is dead", drain_timeout=0)
    await asyncio.wait_for(closed.wait(), WAIT_S)
