"""Functions whose failed calls are in a journal, blocking and coroutine functions."""

import json
import runpy
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import wraps

import pytest
from pydantic import BaseModel

from fixtures.failback_queues import FlakyFunction, in_world
from fixtures.journals import store, stored, wait_for_dead, wait_for_none
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import FailbackQueued
from rpcwheel.failback import (
    FailbackInvoker,
    FailbackPolicy,
    aio,
    idempotency_key,
    with_failback,
)
from rpcwheel.failback.stored import StoredFunction, decode
from rpcwheel.journal.backend import CallState


class Order(BaseModel):
    number: int


@dataclass
class Line:
    shop: str


@pytest.fixture
def journaled(url):
    """`with_failback` with a journal. The queues are closed at the end."""
    made = []

    def decorate(function, **settings):
        usual = {"retry_on": ConnectionError, "backoff": 0.01, "name": "push", "journal": url}
        made.append(with_failback(**usual | settings)(function))
        return made[-1]

    yield decorate
    for function in made:
        if not isinstance(function.failback, aio.FailbackInvoker):
            function.failback.close(0)


@pytest.fixture
def journaled_in_world(world, journaled):
    """Decorates functions as users of the world write them."""

    def decorate(function, **settings):
        push = journaled(in_world(world, function), **settings)
        world.keep(push.failback)
        return push

    return decorate


# --- Delivery ---


def test_a_call_is_stored_before_its_caller_is_answered_and_then_delivered(
    world, journaled_in_world, url
):
    flaky = FlakyFunction(ConnectionError("busy"), ConnectionError())

    def function(order: Order, *lines: Line, note: bytes = b"", **others: int):
        return flaky(order, lines, note, others)

    def order_key(order, *lines, **others):
        return order.number

    push = journaled_in_world(function, backoff=60, default="later", order_key=order_key)
    assert world.do(push, Order(number=1), Line("a"), note=b"\xff", more=2) == "later"
    (call,) = stored(url)
    assert (call.queue, call.target, call.method, call.attempts) == ("push", "", "push", 1)
    assert call.order_key == "1"
    assert call.error == "ConnectionError: busy"
    assert call.key == flaky.keys[0]
    assert json.loads(decode(call.body).arguments)["order"] == {"number": 1}
    assert world.do(push.failback.flush, 0.1) is False
    wait_until(lambda: [one.attempts for one in stored(url, CallState.READY)] == [2])
    assert world.do(push.failback.flush, WAIT_S)
    assert flaky.calls == [(Order(number=1), (Line("a"),), b"\xff", {"more": 2})] * 3
    assert len(set(flaky.keys)) == 1
    assert stored(url) == []
    assert push.failback.stats().redelivered == 1
    assert world.do(push, Order(number=2)) == (Order(number=2), (), b"", {})


def test_flush_returns_false_if_the_queue_is_closed_meanwhile(world, journaled_in_world, script):
    failback = journaled_in_world(FlakyFunction()).failback
    script["retry"] = lambda: world.do(failback.close, 0)
    assert world.do(failback.flush) is False  # though it has no timeout


def test_calls_of_an_earlier_process_are_delivered_after_start(journaled, url):
    store(url, queue="push", method="push", body=StoredFunction(b'{"number": 1}').encoded())
    flaky = FlakyFunction()
    push = journaled(lambda number: flaky(number, 0))
    assert push.failback.pending == 1
    push.failback.start()
    wait_for_none(url)
    assert flaky.calls == [(1, 0)]


def test_a_stop_object_that_raises_makes_a_dead_letter(journaled, url):
    def stop(state):
        if state.attempt_number > 1:
            raise RuntimeError("\udcff")
        return False

    journaled(FlakyFunction(*[ConnectionError()] * 3), stop=stop)()
    assert "`stop` raised RuntimeError(" in wait_for_dead(url)[0].reason


def test_a_function_that_returns_a_future_is_delivered(journaled, url):
    flaky = FlakyFunction(ConnectionError(), ConnectionError())

    def push(number: int):
        future = Future()
        try:
            future.set_result(flaky(number))
        except ConnectionError as error:
            future.set_exception(error)
        return future

    assert journaled(push, default="later")(5).result(WAIT_S) == "later"
    wait_for_none(url)
    assert flaky.calls == [(5,)] * 3
    assert len(set(flaky.keys)) == 1


def test_a_plain_function_that_returns_an_awaitable_is_refused(journaled, url):
    async def push():
        """Nothing."""

    def plain():
        return push()

    with pytest.raises(TypeError, match=r"make it an `async def`"):
        journaled(plain)()
    assert stored(url) == []


# --- The idempotency key ---


def test_nested_functions_have_keys_of_their_own(journaled, url):
    seen = {}
    plain = with_failback(retry_on=ConnectionError)(idempotency_key)

    @journaled
    def inner():
        seen["inner"] = idempotency_key()

    def outer():
        before = idempotency_key()
        inner()
        seen["outer"] = {before, idempotency_key(), plain()}

    journaled(outer, name="outer")()
    assert len(seen["outer"]) == 1
    assert seen["inner"] not in seen["outer"]
    assert idempotency_key() is None
    assert plain() is None


async def test_a_function_without_a_journal_has_no_key():
    async def coroutine():
        return idempotency_key()

    @with_failback(retry_on=ConnectionError)
    def plain():
        return coroutine()

    assert [await plain(), await plain()] == [None, None]
    assert await with_failback(retry_on=ConnectionError)(coroutine)() is None


# --- Calls that are not queued ---


def notes_of(call, *args):
    with pytest.raises(ConnectionError) as caught:
        call(*args)
    return " ".join(getattr(caught.value, "__notes__", []))


def test_a_call_that_cannot_be_stored_raises_its_own_error_with_a_note(journaled, url, events):
    def failing(argument, *, order_key=None):
        fails = FlakyFunction(ConnectionError())
        push = journaled(lambda one: fails(one, 0), order_key=order_key)
        return notes_of(push, argument)

    assert "push: not queued, the argument 'one' cannot be stored" in failing(object())
    assert "push: not queued, argument 0 is an iterator" in failing(iter([]))
    assert "not queued, division by zero" in failing(1, order_key=lambda one: 1 / 0)
    assert "order_key must give a str" in failing(1.5, order_key="one")
    assert stored(url) == []
    assert events.of(FailbackQueued) == []


def test_a_call_that_is_enqueued_is_delivered(journaled, url):
    flaky = FlakyFunction()

    def push(number: int) -> None:
        flaky(number)

    failback = journaled(push).failback
    assert failback.enqueue(ConnectionError(), push, 7) == "queued"
    wait_for_none(url)
    assert flaky.calls == [(7,)]


def test_a_module_may_be_loaded_under_two_names(url, tmp_path):
    module = tmp_path / "tasks.py"
    module.write_text(
        f"""from functools import wraps
from rpcwheel.failback import with_failback

def traced(function):
    return wraps(function)(lambda: function())

@with_failback(retry_on=OSError, journal={url!r}, name="push")
@traced
def push():
    pass
"""
    )
    paths = {"__main__": f"{tmp_path}/./tasks.py", "tasks": str(module)}
    functions = [runpy.run_path(path, run_name=name)["push"] for name, path in paths.items()]
    for function in functions:
        function.failback.close(0)


def test_functions_of_two_modules_with_one_wrapper_need_two_names(journaled, tmp_path):
    def traced(function):
        @wraps(function)
        def run():
            return function()

        return run

    functions = []
    for name in ("orders", "mails"):
        module = tmp_path / f"{name}.py"
        module.write_text("def push():\n    pass\n")
        functions.append(traced(runpy.run_path(str(module), run_name=name)["push"]))
    journaled(functions[0])
    with pytest.raises(ConfigurationError, match="have the name 'push'"):
        journaled(functions[1])


def test_only_the_registered_function_can_be_stored(url):
    policy = FailbackPolicy(retry_on=ConnectionError, journal=url)
    with FailbackInvoker(policy) as failback:
        flaky = FlakyFunction(*[ConnectionError() for _ in range(2)])
        note = "not queued, only calls of functions decorated by with_failback"
        assert note in notes_of(failback.invoke, flaky)
        failback.register(lambda: None)
        assert note in notes_of(failback.invoke, flaky)
    in_memory = FailbackInvoker(FailbackPolicy(retry_on=OSError))
    with pytest.raises(TypeError, match="its policy has no journal"):
        in_memory.register(print)


async def test_enqueue_would_block_the_loop(journaled):
    async def function():
        """Nothing."""

    failback = journaled(function).failback
    with pytest.raises(RuntimeError, match="would block the event loop"):
        failback.enqueue(ConnectionError(), function)
    await failback.close(0)


def test_an_error_with_any_text_can_be_stored(journaled, url):
    class Odd(ConnectionError):
        def __str__(self):
            raise RuntimeError

    texts = ["\udcff\0" + "x" * 1000, "", "é"]
    push = journaled(
        FlakyFunction(*map(ConnectionError, texts), Odd()), backoff=60, name="push", default=1
    )
    for _ in range(4):
        assert push() == 1
    errors = [call.error for call in stored(url)]
    assert errors[0].startswith("ConnectionError: \ufffd\ufffdx")
    assert len(errors[0]) == 500
    assert errors[1:] == ["ConnectionError: ", "ConnectionError: é", "Odd"]


# --- Dead letters ---


def test_a_function_that_raises_cancelled_error_has_limited_attempts(journaled, url):
    flaky = FlakyFunction(*[CancelledError()] * 5)
    journaled(flaky, retry_on=CancelledError, max_attempts=3)()
    (call,) = wait_for_dead(url)
    assert (call.attempts, len(flaky.calls)) == (3, 3)


def test_flush_inside_the_dead_letter_hook_of_an_expired_call_is_refused(journaled, url):
    flushed, keys = Future(), []

    def hook(_):
        keys.append(idempotency_key())
        try:
            flushed.set_result(push.failback.flush(0))
        except RuntimeError as error:
            flushed.set_exception(error)

    body = StoredFunction(b"{}").encoded()
    store(url, queue="push", method="push", key="key-1", body=body, max_age_s=0.0)
    push = journaled(FlakyFunction(), dead_letter=hook)
    push.failback.start()
    with pytest.raises(RuntimeError, match="would wait for itself"):
        flushed.result(WAIT_S)
    assert keys == ["key-1"]
