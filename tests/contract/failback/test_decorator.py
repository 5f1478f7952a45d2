"""One decorator for functions, methods and coroutine functions."""

import functools
import inspect
import re
from concurrent.futures import Future

import grpc
import pytest
import tenacity

from fixtures.failback_queues import AsyncFar, Far, all_wait, aplay, play
from fixtures.grpc_servers import METHOD
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import FailbackDropped, FailbackQueued
from rpcwheel.failback import FailbackInvoker, FailedCall, aio, with_failback

# --- What it makes of a function ---


def test_a_function_is_called_as_before_and_has_its_queue(guard):
    far = Far(ConnectionError())

    @guard(default="later")
    def push(order, *, urgent=False):
        """Push an order."""
        return (*far(order), urgent)

    assert push("first") == "later"
    assert push("second", urgent=True) == ("second", True)
    assert (push.__name__, push.__doc__) == ("push", "Push an order.")
    assert str(inspect.signature(push)) == "(order, *, urgent=False)"
    assert isinstance(push.failback, FailbackInvoker)
    assert push.failback.pending == 1
    play(push.failback)
    assert far.calls == [("first",), ("second",), ("first",)]
    assert push.failback.close() == []


async def test_a_coroutine_function_stays_one(guard):
    far = AsyncFar(ConnectionError())

    @guard(default="later")
    async def push(order):
        """Push an order."""
        return await far(order)

    assert inspect.iscoroutinefunction(push)
    assert (push.__name__, push.__doc__) == ("push", "Push an order.")
    assert isinstance(push.failback, aio.FailbackInvoker)
    assert await push("order") == "later"
    assert await push.failback.flush(WAIT_S)
    assert far.calls == [("order",)] * 2
    assert await push.failback.close() == []


def test_methods_share_the_queue_of_their_class(guard):
    class Shop:
        def __init__(self, *failures):
            self.far = Far(*failures)

        @guard()
        def push(self, order):
            return self.far(order)

        @classmethod
        @guard()
        def of_class(cls, order):
            return cls, order

        @staticmethod
        @guard()
        def of_none(order):
            return order

    closed, open_ = Shop(ConnectionError()), Shop()
    assert closed.push("order") is None
    assert open_.push("order") == ("order",)
    assert closed.push.failback is open_.push.failback is Shop.push.failback
    assert Shop.push.failback.pending == 1
    play(Shop.push.failback)
    assert closed.far.calls == [("order",)] * 2
    assert Shop.of_class("order") == (Shop, "order")
    assert Shop.of_none("order") == "order"


async def test_methods_may_be_coroutine_functions(guard):
    class Shop:
        def __init__(self):
            self.far = AsyncFar(ConnectionError())

        @guard()
        async def push(self, order):
            return await self.far(order)

    shop = Shop()
    assert await shop.push("order") is None
    await aplay(shop.push.failback)
    assert shop.far.calls == [("order",)] * 2


def test_a_partial_and_an_object_that_is_callable_can_be_guarded(guard):
    far = Far(ConnectionError())
    push = guard()(functools.partial(far, "order"))
    assert push() is None
    play(push.failback)
    assert far.calls == [("order",)] * 2
    assert guard()(Far())(1) == (1,)


async def test_an_object_whose_call_is_a_coroutine_function_is_awaited(guard):
    far = AsyncFar(ConnectionError())
    push = guard()(far)
    assert inspect.iscoroutinefunction(push)
    assert await push("order") is None
    await aplay(push.failback)
    assert far.calls == [("order",)] * 2


def test_each_function_gets_a_queue_of_its_own_even_from_one_decorator(guard):
    decorator = guard()
    one, other = decorator(Far(ConnectionError())), decorator(Far())
    one()
    assert (one.failback.pending, other.failback.pending) == (1, 0)
    play(one.failback)


def test_the_queue_is_named_after_the_function_or_as_told(guard):
    def push():
        """Nothing."""

    assert repr(guard()(push).failback).endswith(f" '{__name__}.{push.__qualname__}'>")
    assert repr(guard(name="audit")(push).failback).endswith(" 'audit'>")


def test_a_stubs_member_can_be_guarded_directly(guard, grpc_server, channel):
    grpc_server.script.then("UNAVAILABLE")
    push = guard()(channel.unary_unary(METHOD))
    assert push(b"order") is None
    play(push.failback)
    assert grpc_server.script.received == [b"order"] * 2
    assert METHOD in repr(push.failback)


def test_a_function_that_returns_grpcs_future_gives_a_future(guard, grpc_server, channel):
    grpc_server.script.then("UNAVAILABLE")
    stub = channel.unary_unary(METHOD)

    @guard(default=b"later", retry_on=grpc.StatusCode.UNAVAILABLE)
    def push(order):
        return stub.future(order)

    answer = push(b"order")
    assert isinstance(answer, Future)
    assert answer.result(WAIT_S) == b"later"
    play(push.failback)
    assert grpc_server.script.received == [b"order"] * 2


# --- Settings ---


def test_the_defaults_are_as_the_manual_says():
    shown = inspect.signature(with_failback).parameters
    defaults = {
        name: one.default for name, one in shown.items() if name not in {"bare", "retry_on"}
    }
    assert defaults == {
        "max_attempts": 4,
        "backoff": 5.0,
        "stop": None,
        "default": None,
        "max_pending": 100,
        "timer": None,
        "journal": None,
        "name": None,
        "overflow": "raise",
        "dead_letter": None,
    }


def test_every_setting_reaches_the_queue(timer, events):
    far, letters = Far(*[ConnectionError()] * 9), []
    push = with_failback(
        retry_on=ConnectionError,
        max_attempts=2,
        backoff=1.5,
        default="later",
        max_pending=1,
        name="audit",
        overflow="drop",
        dead_letter=letters.append,
        timer=timer,
    )(far)
    assert [push(), push()] == ["later", "later"]
    assert [(type(event), event.name) for event in events] == [
        (FailbackQueued, "audit"),
        (FailbackDropped, "audit"),
    ]
    timer.advance(1.25)
    assert len(far.calls) == 2
    timer.advance(0.25)
    assert wait_until(lambda: push.failback.pending == 0)
    assert len(far.calls) == 3
    assert letters[0].attempts == 2


def test_a_stop_replaces_the_default_of_retries_but_not_a_three_that_was_written(timer):
    for written, tries in (({}, 7), ({"max_attempts": 4}, 4)):
        far = Far(*[OSError()] * 60)
        stop = tenacity.stop_after_delay(6)
        push = with_failback(retry_on=OSError, backoff=1, stop=stop, timer=timer, **written)(far)
        push()
        while push.failback.pending:
            timer.advance(1)
            wait_until(lambda push=push: all_wait(push.failback))
        assert len(far.calls) == tries


def test_tenacitys_objects_are_obeyed(timer):
    far = Far(*[ConnectionError("busy")] * 9)
    letters = []
    push = with_failback(
        retry_on=tenacity.retry_if_exception_message("busy"),
        backoff=tenacity.wait_exponential(multiplier=1),
        stop=tenacity.stop_after_attempt(4),
        dead_letter=letters.append,
        timer=timer,
    )(far)
    assert push() is None
    times = []
    while not letters:
        timer.advance(1)
        wait_until(lambda: all_wait(push.failback))
        times += [timer.now] * (len(far.calls) - 1 - len(times))
    assert times == [1, 3, 7]
    assert isinstance(letters[0], FailedCall)
    assert letters[0].attempts == 4


# --- What is refused, at decoration ---


def generator():
    yield 1


async def async_generator():
    yield 1


class Generator:
    def __call__(self):
        yield 1


def test_settings_that_make_no_sense_are_refused_before_anything_is_decorated():
    for settings, error, said in (
        ({"retry_on": None, "max_attempts": 4}, TypeError, "say which errors"),
        ({"journal": "sqlite:///calls.db"}, ConfigurationError, "durable journals are not in this"),
        ({"journal": object()}, ConfigurationError, "durable journals are not in this release"),
        ({"max_attempts": 0}, ConfigurationError, "max_attempts: "),
        ({"backoff": "5"}, TypeError, "wait must be"),
        ({"max_pending": 0}, ConfigurationError, "max_pending: "),
        ({"overflow": "wait"}, ConfigurationError, "overflow: "),
        ({"timer": 3}, TypeError, "timer must be a WheelTimer"),
    ):
        with pytest.raises(error, match=said):
            with_failback(**{"retry_on": OSError} | settings)
    with pytest.raises(ConfigurationError, match=r"`retry_on` is missing; say which .*StatusCode"):
        with_failback()


def test_without_parentheses_the_message_says_what_to_write():
    with pytest.raises(TypeError, match=re.escape("@with_failback(retry_on=...)")):

        @with_failback
        def push():
            """Nothing."""


def test_what_cannot_be_decorated_is_refused_in_words():
    for thing in (generator, async_generator, functools.partial(generator), Generator()):
        with pytest.raises(TypeError, match="is a generator function: what it has yielded"):
            with_failback(retry_on=OSError)(thing)
    for thing in (3, "push", None, object()):
        with pytest.raises(TypeError, match="with_failback decorates functions, not "):
            with_failback(retry_on=OSError)(thing)
    for kind in (classmethod, staticmethod):
        with pytest.raises(TypeError, match=f"write @{kind.__name__} above"):
            with_failback(retry_on=OSError)(kind(print))
