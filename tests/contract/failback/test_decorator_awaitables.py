"""`with_failback` on plain functions that return awaitables."""

import asyncio

import pytest

from fixtures.failback_queues import FlakyCoroutine, aio_run_until_empty, run_until_empty
from fixtures.grpc_servers import METHOD, requests_of
from fixtures.waiting import aio_wait_until
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import FailbackGaveUp


async def test_a_function_that_returns_an_aio_call_is_treated_as_a_coroutine_function(
    decorate, flaky_server, aio_channel
):
    flaky_server.fail(2)
    stub = aio_channel.unary_unary(METHOD)

    @decorate(default=b"later")
    def push(order):
        return stub(order)

    assert await push(b"order") == b"later"
    assert push.failback.pending == 1
    await aio_run_until_empty(push.failback)
    assert requests_of(flaky_server) == [b"order"] * 3
    assert await push(b"next") == b"next"
    assert await push.failback.flush() is True
    assert await push.failback.close() == []
    flaky_server.fail(1)
    with pytest.raises(FailbackClosed):
        await push(b"late")


async def test_the_call_runs_even_if_its_result_is_not_awaited(decorate):
    function = FlakyCoroutine(ConnectionError())
    push = decorate()(lambda order: function(order))  # noqa: PLW0108 - a plain function
    push("order")
    await aio_wait_until(lambda: push.failback.pending == 1)
    await aio_run_until_empty(push.failback)
    assert function.calls == [("order",)] * 2


async def test_an_error_that_the_function_raises_is_raised_where_the_result_is_awaited(decorate):
    function, fails = FlakyCoroutine(), []

    @decorate(default="later")
    def push(order):
        if fails:
            raise fails.pop()
        return function(order)

    assert await push("first") == ("first",)
    fails += [ConnectionError()]
    assert await push("second") == "later"
    await aio_run_until_empty(push.failback)
    assert function.calls == [("first",), ("second",)]
    fails += [ValueError("mine")]
    with pytest.raises(ValueError, match="mine"):
        await push("third")


async def test_canceling_the_result_cancels_the_call_which_is_not_retried(decorate):
    begun = asyncio.Event()

    async def hang():
        begun.set()
        await asyncio.Event().wait()

    push = decorate(retry_on=Exception)(lambda: hang())  # noqa: PLW0108 - a plain function
    answer = push()
    await begun.wait()
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert push.failback.pending == 0


def test_without_a_running_loop_the_result_is_a_coroutine(decorate):
    push = decorate()(lambda order: FlakyCoroutine()(order))  # noqa: PLW0108 - a plain function
    assert asyncio.run(push("order")) == ("order",)


async def test_flush_and_close_can_be_awaited_before_the_first_call(decorate):
    push = decorate()(lambda: FlakyCoroutine()())  # noqa: PLW0108 - a plain function
    assert await push.failback.flush() is True
    assert await push.failback.close() == []


def test_flush_and_close_return_plain_results_where_no_loop_runs(decorate):
    push = decorate()(lambda: "response")
    assert push.failback.flush() is True
    assert type(push.failback.close()) is list


async def test_an_async_with_statement_closes_the_queue(decorate):
    function = FlakyCoroutine(ConnectionError())
    push = decorate()(lambda: function())  # noqa: PLW0108 - a plain function
    async with push.failback:
        assert await push() is None
    assert len(function.calls) == 2


def test_a_call_that_failed_before_the_first_awaitable_is_given_up(decorate, events):
    fails = [ConnectionError()]

    @decorate(default="later")
    def push():
        if fails:
            raise fails.pop()
        return FlakyCoroutine()()

    assert push() == "later"
    run_until_empty(push.failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "make it an `async def`" in str(events[-1].error)
