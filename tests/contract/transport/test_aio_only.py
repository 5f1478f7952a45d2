"""What only a channel of `grpc.aio` has: call objects, tasks, a loop, and `close(grace)`."""

import asyncio
import gc
import weakref

import grpc
import pytest

from fixtures.aio_channels import Stub, hanging, steps
from fixtures.client_interceptors import aio_interceptor, pass_on
from fixtures.grpcio import BUGS_OF_INTERCEPTORS
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from fixtures.worlds import KINDS
from rpcwheel import RetryPolicy, aio
from rpcwheel.transport.aio import ReconnectingChannel

SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


# Calls


@BUGS_OF_INTERCEPTORS
async def test_a_call_that_an_interceptor_does_not_start_is_not_counted(make):
    async def fail(*_):
        raise KeyError("a bug")

    channel = make(interceptors=[aio_interceptor(fail)])
    member = channel.unary_unary(UNARY_UNARY)
    with pytest.raises(KeyError):
        await member(b"awaited")
    assert channel.calls == 0
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # a callback of grpc.aio raises
    member(b"forgotten")
    await aio_wait_until(lambda: (gc.collect(), channel.calls)[1] == 0)


async def test_a_response_stamps_the_activity_after_other_calls_on_the_call_object(channel, timer):
    for number, question in enumerate(("code", "initial_metadata", "add_done_callback"), start=1):
        channel.reconnect(force=True)
        call = channel.unary_unary(UNARY_UNARY)(b"x")
        timer.advance(5)
        if question == "add_done_callback":
            call.add_done_callback(lambda _: None)
        else:
            await getattr(call, question)()
        assert await call == b"x"
        activity = channel.activity
        assert activity.last_read_ns == activity.last_use_ns == 5 * 10**9 * number


async def test_time_remaining_of_a_call(shop, channel):
    shop.then(Hang())
    call = channel.unary_unary(UNARY_UNARY)(b"x", timeout=500)
    assert 400 < call.time_remaining() <= 500
    call.cancel()
    assert channel.unary_unary(UNARY_UNARY)(b"x").time_remaining() is None


def test_reconnect_needs_a_running_loop():
    made = []

    async def use():
        made.append(ReconnectingChannel("127.0.0.1:1"))

    asyncio.run(use())
    with pytest.raises(RuntimeError, match="no running event loop"):
        made[0].reconnect()


# Calls that end with their connection


@pytest.fixture(params=["plain", "interceptors", "kit"])
def way(request, make):
    """A channel for stubs, and the channel below it."""
    given = [aio_interceptor(pass_on, kind) for kind in KINDS]
    channel = make(interceptors=given if request.param == "interceptors" else None)
    if request.param == "kit":
        retry = RetryPolicy(retry_on="UNAVAILABLE")
        return aio.Kit(timeout=2 * WAIT_S, retry=retry).intercept_channel(channel), channel
    return channel, channel


WAITS = (
    ("unary_unary", lambda call: call),
    ("stream_unary", lambda call: call),
    ("unary_stream", lambda call: call.read()),
    ("stream_stream", lambda call: call.read()),
    ("unary_stream", lambda call: anext(aiter(call))),
    ("stream_stream", lambda call: anext(aiter(call))),
)
"""The ways to wait for the response, by kind."""


async def end_of(wait, call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wait(call)
    return caught.value.code().name, caught.value.details()


async def test_a_call_ended_with_its_connection_raises_its_status(shop, way):
    outer, channel = way
    calls = [await hanging(shop, outer, kind) for kind, _ in WAITS]
    shop.then(*[Hang()] * len(WAITS))
    stub = Stub(outer)
    for kind, _ in WAITS:  # these may not have been sent
        calls.append(getattr(stub, kind)(b"x" if kind.startswith("unary") else None))
    waiting = [
        asyncio.create_task(end_of(wait, call))
        for (_, wait), call in zip(WAITS * 2, calls, strict=True)
    ]
    await asyncio.sleep(0)
    channel.reconnect("it is dead", drain_timeout=0, force=True)
    end = ("UNAVAILABLE", "connection replaced: it is dead")
    for task, call in zip(waiting, calls, strict=True):
        assert await asyncio.wait_for(task, WAIT_S) == end
        assert ((await call.code()).name, await call.details()) == end
        assert not call.cancelled()
        assert not call.cancel()
    assert channel.calls == 0


async def write_on(call):
    while True:
        await call.write(bytes(10**6))  # more than the flow-control window


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
async def test_a_call_in_the_cleanup_of_a_canceled_task_raises_its_status(shop, way, again):
    outer, channel = way
    begun, ends = [], []

    async def clean_up(kind, wait):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            begun.append(call := await hanging(shop, outer, kind))
            try:
                await wait(call)
            except BaseException as error:  # noqa: BLE001 - any exception
                ends.append((kind, error))
            raise

    tasks, waits = [], [*WAITS, ("stream_unary", write_on)]
    for kind, wait in waits:
        tasks.append(asyncio.create_task(clean_up(kind, wait)))
        await asyncio.sleep(0)
        tasks[-1].cancel()
        await aio_wait_until(lambda: len(begun) == len(tasks))
    await steps(20)
    assert not again or all(task.cancel() for task in tasks)
    channel.reconnect("it is dead", drain_timeout=0, force=True)
    await asyncio.wait(tasks, timeout=WAIT_S)
    assert [task.cancelled() for task in tasks] == [True] * len(tasks)
    status = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
    expected = asyncio.CancelledError if again else status
    assert [type(end) for _, end in ends if not isinstance(end, expected)] == []
    assert len(ends) == len(waits)


async def test_a_call_that_may_not_have_been_sent_ends_with_its_connection(shop, channel):
    """In grpc.aio 1.85 `write` hangs if the call is canceled before it was sent."""
    stub = Stub(channel)
    shop.then(*[Hang()] * (len(KINDS) + 1))
    calls = [getattr(stub, kind)(b"" if "unary_" in kind else None) for kind in KINDS]
    waiting = [end_of(lambda call: call.wait_for_connection(), call) for call in calls]
    waiting = [asyncio.create_task(waits) for waits in waiting]
    writing = asyncio.create_task(write_on(stub.stream_unary()))
    await asyncio.sleep(0)
    channel.reconnect("it is dead", drain_timeout=0, force=True)
    for task in waiting:
        assert (await asyncio.wait_for(task, WAIT_S))[0] == "UNAVAILABLE"
    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
        await asyncio.wait_for(writing, WAIT_S)


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


# Closing


async def test_a_dropped_channel_is_freed_although_a_drain_timeout_is_pending(shop, timer):
    async def dropped():
        # Not in a coroutine that waits: before 1.83 grpc.aio reads the variables of all waiting
        # frames when it closes a channel, and Python up to 3.12 keeps them.
        channel = ReconnectingChannel(shop.target, timer=timer)
        call = await hanging(shop, channel)
        channel.reconnect(drain_timeout=600)
        call.cancel()
        await aio_wait_until(lambda: timer.pending == 0)  # the lambda must not hold the channel
        return weakref.ref(channel)

    gone = await dropped()
    await aio_wait_until(lambda: (gc.collect(), gone())[1] is None)
