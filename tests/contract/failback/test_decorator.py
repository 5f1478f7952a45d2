"""`with_failback` on functions, methods and coroutine functions."""

import asyncio
import functools
import inspect

import pytest
import tenacity

from fixtures.failback_queues import (
    FlakyCoroutine,
    FlakyFunction,
    all_wait,
)
from fixtures.grpc_servers import METHOD, requests_of
from fixtures.waiting import aio_wait_until, wait_until
from rpcwheel import with_breaker
from rpcwheel.errors import FailbackClosed
from rpcwheel.failback import FailbackInvoker, aio, with_failback

# --- The decorated function ---


def test_a_decorated_function_is_called_as_before_and_has_a_queue(decorate, run_until_empty):
    function = FlakyFunction(ConnectionError())

    @decorate(default="later")
    def push(order, *, urgent=False):
        """Push an order."""
        return (*function(order), urgent)

    assert push("first") == "later"
    assert push("second", urgent=True) == ("second", True)
    assert (push.__name__, push.__doc__) == ("push", "Push an order.")
    assert str(inspect.signature(push)) == "(order, *, urgent=False)"
    assert isinstance(push.failback, FailbackInvoker)
    assert push.failback.pending == 1
    run_until_empty(push.failback)
    assert function.calls == [("first",), ("second",), ("first",)]
    assert push.failback.close() == []


def test_a_coroutine_function_a_method_and_a_callable_object_stay_coroutine_functions(decorate):
    class Shop:
        @decorate()
        async def push(self, order):
            """Push an order."""

    @decorate()
    async def push(order):
        """Push an order."""

    for function in (push, Shop().push, decorate()(FlakyCoroutine())):
        assert inspect.iscoroutinefunction(function)
        assert isinstance(function.failback, aio.FailbackInvoker)
    assert (push.__name__, push.__doc__) == ("push", "Push an order.")


def test_the_methods_of_all_instances_share_a_queue(decorate, run_until_empty):
    class Shop:
        def __init__(self, *failures):
            self.function = FlakyFunction(*failures)

        @decorate()
        def push(self, order):
            return self.function(order)

        @classmethod
        @decorate()
        def of_class(cls, order):
            return cls, order

        @staticmethod
        @decorate()
        def of_none(order):
            return order

    closed, open_ = Shop(ConnectionError()), Shop()
    assert closed.push("order") is None
    assert open_.push("order") == ("order",)
    assert closed.push.failback is open_.push.failback is Shop.push.failback
    assert Shop.push.failback.pending == 1
    run_until_empty(Shop.push.failback)
    assert closed.function.calls == [("order",)] * 2
    assert Shop.of_class("order") == (Shop, "order")
    assert Shop.of_none("order") == "order"


def test_a_partial_and_a_callable_object_can_be_decorated(decorate, run_until_empty):
    function = FlakyFunction(ConnectionError())
    push = decorate()(functools.partial(function, "order"))
    assert push() is None
    run_until_empty(push.failback)
    assert function.calls == [("order",)] * 2
    assert decorate()(FlakyFunction())(1) == (1,)


def test_each_function_has_a_queue_of_its_own_also_from_one_decorator(decorate, run_until_empty):
    decorator = decorate()
    one, other = decorator(FlakyFunction(ConnectionError())), decorator(FlakyFunction())
    one()
    assert (one.failback.pending, other.failback.pending) == (1, 0)
    run_until_empty(one.failback)


def test_the_queue_has_the_name_of_the_function_or_the_given_one(decorate):
    def push():
        """Nothing."""

    assert repr(decorate()(push).failback).endswith(f" '{__name__}.{push.__qualname__}'>")
    assert repr(decorate(name="audit")(push).failback).endswith(" 'audit'>")


# --- Settings ---


def test_a_queued_call_waits_for_an_open_circuit_breaker(timer):
    """What the breaker refuses is no attempt, and needs no place in `retry_on`."""
    function = FlakyFunction(*[ConnectionError()] * 2)
    guarded = with_breaker(
        window_calls=2, minimum_calls=2, half_open_calls=1, open_duration=10.0, timer=timer
    )(function)
    push = with_failback(
        retry_on=ConnectionError, max_attempts=2, backoff=tenacity.wait_fixed(1), timer=timer
    )(guarded)
    push("first")
    push("second")
    began = timer.now
    timer.advance(1)
    wait_until(lambda: all_wait(push.failback))
    assert (push.failback.pending, len(function.calls)) == (2, 2)
    while push.failback.pending:
        timer.advance(1)
        wait_until(lambda: all_wait(push.failback))
    assert timer.now - began > 5.0
    # None while the breaker is open; then it may refuse one call while the other one is its probe.
    assert push.failback.stats().attempts in (4, 5)
    assert function.calls[2:] in ([("first",), ("second",)], [("second",), ("first",)])


# --- Plain functions that return awaitables ---


async def test_a_function_that_returns_an_aio_call_is_treated_as_a_coroutine_function(
    decorate, flaky_server, aio_channel, aio_run_until_empty
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


async def test_the_call_runs_even_if_its_result_is_not_awaited(decorate, aio_run_until_empty):
    function = FlakyCoroutine(ConnectionError())
    push = decorate()(lambda order: function(order))  # noqa: PLW0108 - a plain function
    push("order")
    await aio_wait_until(lambda: push.failback.pending == 1)
    await aio_run_until_empty(push.failback)
    assert function.calls == [("order",)] * 2


async def test_an_error_that_the_function_raises_is_raised_where_the_result_is_awaited(
    decorate, aio_run_until_empty
):
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
    assert (push.failback.pending, push.failback.stats().failed) == (0, 1)


def test_without_a_running_loop_the_result_is_a_coroutine(decorate):
    push = decorate()(lambda order: FlakyCoroutine()(order))  # noqa: PLW0108 - a plain function
    assert asyncio.run(push("order")) == ("order",)


async def test_flush_and_close_can_be_awaited_before_the_first_call(decorate):
    push = decorate()(lambda: FlakyCoroutine()())  # noqa: PLW0108 - a plain function
    assert await push.failback.flush() is True
    assert await push.failback.close() == []


async def test_an_async_with_statement_closes_the_queue(decorate):
    function = FlakyCoroutine(ConnectionError())
    push = decorate()(lambda: function())  # noqa: PLW0108 - a plain function
    async with push.failback:
        assert await push() is None
    assert len(function.calls) == 2
