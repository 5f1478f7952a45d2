"""Calls of grpc.aio in flight during a reconnect: they continue, or end with the reason.

A call that ends with its connection is distinguished from a call that its caller cancels.
"""

import asyncio

import grpc
import pytest

from fixtures.aio_channels import KINDS, Stub, hanging, steps
from fixtures.shop import Hang, Silent
from fixtures.waiting import WAIT_S
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
