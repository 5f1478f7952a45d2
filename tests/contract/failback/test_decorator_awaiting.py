"""A plain function that returns something to await is treated as a coroutine function."""

import asyncio

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.failback_queues import AsyncFar, aplay, play
from fixtures.grpc_servers import METHOD
from fixtures.waiting import aio_wait_until
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import FailbackGaveUp


async def test_a_plain_function_that_returns_an_aio_call_is_treated_as_a_coroutine_function(
    guard, aio_grpc_server, aio_channel
):
    aio_grpc_server.script.then("UNAVAILABLE", "UNAVAILABLE")
    stub = aio_channel.unary_unary(METHOD)

    @guard(default=b"later")
    def push(order):
        return stub(order)

    assert await push(b"order") == b"later"
    assert push.failback.pending == 1
    await aplay(push.failback)
    assert aio_grpc_server.script.received == [b"order"] * 3
    assert await push(b"next") == b"next"
    assert await push.failback.flush() is True
    assert await push.failback.close() == []
    aio_grpc_server.script.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed):
        await push(b"late")


async def test_its_call_goes_on_though_nobody_awaits_it(guard):
    far = AsyncFar(ConnectionError())
    push = guard()(lambda order: far(order))  # noqa: PLW0108 - a plain function
    push("order")
    await aio_wait_until(lambda: push.failback.pending == 1)
    await aplay(push.failback)
    assert far.calls == [("order",)] * 2


async def test_what_the_caller_does_to_a_message_while_its_call_is_open_is_not_seen(guard):
    seen, go_on = [], asyncio.Event()

    async def send(value):
        seen.append(value)
        await go_on.wait()
        if len(seen) == 1:
            raise ConnectionError

    push = guard()(lambda message: send(message.value))
    message = StringValue(value="order")
    answer = push(message)
    message.value = "something else"
    await asyncio.sleep(0)
    go_on.set()
    assert await answer is None
    await aplay(push.failback)
    assert seen == ["order", "order"]


async def test_once_it_awaits_a_failure_before_the_call_is_awaited_too(guard):
    far, fails = AsyncFar(), []

    @guard(default="later")
    def push(order):
        if fails:
            raise fails.pop()
        return far(order)

    assert await push("first") == ("first",)
    fails += [ConnectionError()]
    assert await push("second") == "later"
    await aplay(push.failback)
    assert far.calls == [("first",), ("second",)]
    fails += [ValueError("mine")]
    with pytest.raises(ValueError, match="mine"):
        await push("third")


async def test_cancelling_what_it_gave_cancels_the_call_and_nothing_is_retried(guard):
    begun = asyncio.Event()

    async def hang():
        begun.set()
        await asyncio.sleep(60)

    push = guard(retry_on=Exception)(lambda: hang())  # noqa: PLW0108 - a plain function
    answer = push()
    await begun.wait()
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert push.failback.pending == 0


def test_without_a_running_loop_it_gives_a_coroutine(guard):
    push = guard()(lambda order: AsyncFar()(order))  # noqa: PLW0108 - a plain function
    assert asyncio.run(push("order")) == ("order",)


async def test_it_can_be_closed_before_its_first_call_as_if_it_were_one(guard):
    push = guard()(lambda: AsyncFar()())  # noqa: PLW0108 - a plain function
    assert await push.failback.close() == []


async def test_it_closes_in_an_async_with_statement(guard):
    far = AsyncFar(ConnectionError())
    push = guard()(lambda: far())  # noqa: PLW0108 - a plain function
    async with push.failback:
        assert await push() is None
    assert len(far.calls) == 2


def test_a_first_failure_before_anything_was_awaited_is_given_up_with_the_remedy(guard, events):
    fails = [ConnectionError()]

    @guard(default="later")
    def push():
        if fails:
            raise fails.pop()
        return AsyncFar()()

    assert push() == "later"
    play(push.failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "make it an `async def`" in str(events[-1].error)
