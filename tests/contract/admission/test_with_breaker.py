"""`with_breaker`: circuit breakers of functions."""

import asyncio
import gc
import pickle
import threading
from concurrent.futures import Future
from functools import partial

import grpc
import pytest

from fixtures.forks import holds_in_child
from fixtures.rpc_errors import CodeOnly
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import METHODS
from rpcwheel import with_breaker
from rpcwheel.admission import BreakerState
from rpcwheel.errors import BreakerOpen
from rpcwheel.events import BreakerOpened, CallbackFailed
from rpcwheel.telemetry import components

SETTINGS = {"window_calls": 4, "minimum_calls": 2, "half_open_calls": 1, "open_duration": 10.0}


@pytest.fixture
def guarded(timer):
    """A decorated function that raises its argument, or returns it; and the arguments so far."""
    calls = []

    @with_breaker(timer=timer, failures=(ConnectionError, "UNAVAILABLE"), **SETTINGS)
    def call(outcome):
        calls.append(outcome)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return call, calls


def fail(function, *errors):
    for error in errors:
        with pytest.raises(type(error)):
            function(error)


def make_half_open(breaker, timer):
    """Open a breaker, and wait until it lets one call through."""
    for _ in range(2):
        breaker.ended(breaker.enter(0), "UNKNOWN", 1, 0)
    timer.advance(10.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_function_is_not_called_after_too_many_failures(guarded, timer, events):
    call, calls = guarded
    fail(call, ConnectionError(), CodeOnly(grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(BreakerOpen, match=r"call was not called, because .* again in") as caught:
        call(1)
    assert len(calls) == 2
    assert 9.0 <= caught.value.retry_after <= 10.0
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    wait_until(lambda: events)
    assert isinstance(events[0], BreakerOpened)
    assert (events[0].target, events[0].method) == ("function", caught.value.name)
    timer.advance(10.0)
    assert call(2) == 2
    assert call.breaker.state is BreakerState.CLOSED


def test_other_errors_and_interrupts_are_no_failures(guarded):
    call, _ = guarded
    fail(call, *[ValueError()] * 4, *[KeyboardInterrupt()] * 4)
    assert call.breaker.state is BreakerState.CLOSED


def test_the_breaker_of_a_function_is_set_by_hand(guarded):
    call, calls = guarded
    call.breaker.force_open()
    with pytest.raises(BreakerOpen) as caught:
        call(1)
    assert caught.value.retry_after is None
    call.breaker.disable()
    fail(call, *[ConnectionError()] * 9)
    call.breaker.reset()
    assert call(1) == 1
    assert len(calls) == 10


def test_a_coroutine_function_is_awaited(timer):
    @with_breaker(timer=timer, **SETTINGS)
    async def call(outcome):
        await asyncio.sleep(0)
        if outcome is not None:
            raise outcome

    async def main():
        for _ in range(3):  # a call that is canceled is no failure
            task = asyncio.create_task(call(None))
            await asyncio.sleep(0)
            task.cancel()
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await call(ConnectionError())
        with pytest.raises(BreakerOpen):
            await call(None)

    asyncio.run(main())


def test_a_coroutine_that_a_plain_function_returns_counts_when_it_ends(timer):
    async def fail():
        await asyncio.sleep(0)
        raise ConnectionError

    @with_breaker(timer=timer, name="prices", **SETTINGS)
    def call():
        return fail()

    async def main():
        begun = [call() for _ in range(4)]
        assert begun[0].__qualname__ == "prices"
        for coroutine in begun:
            with pytest.raises(ConnectionError):
                await coroutine
        with pytest.raises(BreakerOpen):
            call()

    asyncio.run(main())


def test_a_coroutine_that_is_closed_counts_neither_way(timer):
    @with_breaker(timer=timer, **SETTINGS)
    def call():
        return asyncio.sleep(0)

    make_half_open(call.breaker, timer)
    call().close()  # before it has begun
    begun = call()
    begun.send(None)
    with pytest.raises(BreakerOpen):
        call()
    begun.close()
    assert call.breaker.state is BreakerState.HALF_OPEN
    asyncio.run(call())
    assert call.breaker.state is BreakerState.CLOSED


def test_the_end_of_a_future_counts(timer):
    """Predicates do not run on the thread that ends the future, which may be one of gRPC."""
    threads = []

    @with_breaker(
        timer=timer, failures=lambda _: not threads.append(threading.get_ident()), **SETTINGS
    )
    def call():
        return Future()

    futures = [call() for _ in range(4)]
    futures[0].cancel()
    futures[1].set_exception(ConnectionError())
    wait_until(lambda: threads)
    assert call.breaker.state is BreakerState.CLOSED
    futures[2].set_exception(ConnectionError())
    wait_until(lambda: call.breaker.state is BreakerState.OPEN)
    futures[3].set_result(None)
    assert threading.get_ident() not in threads


def test_the_end_of_a_task_counts(timer):
    async def end(error):
        if error is not None:
            raise error

    @with_breaker(timer=timer, **SETTINGS)
    def call(error=None):
        return asyncio.create_task(end(error))

    async def main():
        make_half_open(call.breaker, timer)
        task = call()
        task.cancel()
        await asyncio.wait([task])
        assert call.breaker.state is BreakerState.HALF_OPEN
        await call()
        assert call.breaker.state is BreakerState.CLOSED
        await asyncio.wait([call(ConnectionError()), call(ConnectionError())])
        assert call.breaker.state is BreakerState.OPEN

    asyncio.run(main())


@pytest.fixture
def guarded_call(world, shop, timer):
    """Begins a call of a kind through a decorated function; and the breaker of that."""
    channel = world.channel(shop.target)

    def guard(kind, **settings):
        multicallable = getattr(channel, kind)(METHODS[kind])
        decorate = with_breaker(timer=timer, **SETTINGS | settings)
        decorated = decorate(getattr(multicallable, "future", multicallable))
        decorated.future = decorated
        return partial(world.begin, decorated, kind, (b"x",)), decorated.breaker

    return guard


each_response_kind = pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])


@each_response_kind
def test_the_end_of_a_call_of_grpc_counts(kind, guarded_call, shop, timer):
    """Its error is matched as one that is raised, with its details."""
    begin, breaker = guarded_call(kind, failures=lambda error: error.details() == "too busy")
    make_half_open(breaker, timer)
    shop.then(Fail("UNAVAILABLE"))
    begin().error()  # no failure
    wait_until(lambda: breaker.state is BreakerState.CLOSED)
    shop.then(*[Fail("UNAVAILABLE", "too busy")] * 2)
    for call in [begin(), begin()]:
        call.error()
    wait_until(lambda: breaker.state is BreakerState.OPEN)
    with pytest.raises(BreakerOpen):
        begin()


@each_response_kind
def test_a_canceled_call_of_grpc_counts_neither_way(kind, guarded_call, shop, timer):
    begin, breaker = guarded_call(kind)
    make_half_open(breaker, timer)
    shop.then(hang := Hang())
    call = begin()
    wait_until(hang.begun.is_set)
    call.cancel()

    def begins():
        try:
            return begin()
        except BreakerOpen:
            return None

    second = wait_until(begins)
    assert second.result() in (b"x", [b"x"])
    wait_until(lambda: breaker.state is BreakerState.CLOSED)


def test_a_response_stream_that_is_dropped_is_canceled(shop, timer):
    with grpc.insecure_channel(shop.target) as channel:
        call = with_breaker(timer=timer, **SETTINGS)(channel.unary_stream(UNARY_STREAM))
        shop.then(hang := Hang())
        stream = call(b"x")
        wait_until(hang.begun.is_set)
        del stream
        gc.collect()
        wait_until(shop.calls[0].ended.is_set)


@pytest.mark.parametrize("fails", [False, True])
def test_a_future_of_grpc_that_is_dropped_after_its_end_counts(shop, timer, fails):
    dropped = threading.Event()
    with grpc.insecure_channel(shop.target) as channel:

        @with_breaker(timer=timer, failures=lambda error: error.details() == "busy", **SETTINGS)
        def begin():
            call = channel.unary_unary(UNARY_UNARY).future(b"x")
            call.add_callback(partial(dropped.wait, WAIT_S))  # before that of the breaker
            return call

        make_half_open(begin.breaker, timer)
        if fails:
            shop.then(Fail("UNAVAILABLE", "busy"))
        begin().code()
        gc.collect()
        dropped.set()
        end = BreakerState.OPEN if fails else BreakerState.CLOSED
        wait_until(lambda: begin.breaker.state is end)


def test_an_awaitable_whose_end_is_not_known_is_refused(timer):
    class Reply:
        def __await__(self):
            yield

    call = with_breaker(timer=timer, **SETTINGS)(Reply)
    make_half_open(call.breaker, timer)
    for _ in range(2):  # neither a success nor a failure
        with pytest.raises(TypeError, match=r"Reply has returned a Reply, which is awaitable"):
            call()
    assert call.breaker.state is BreakerState.HALF_OPEN


def test_a_predicate_that_raises_counts_as_a_failure(timer, events):
    bug = RuntimeError("of the predicate")

    def matches(error):
        raise bug

    @with_breaker(timer=timer, failures=matches, name="prices", **SETTINGS)
    def call(error):
        raise error

    fail(call, ConnectionError(), ConnectionError())
    assert call.breaker.state is BreakerState.OPEN
    assert events[:2] == [CallbackFailed("prices", "failures", bug)] * 2


def test_a_function_is_reported_from_its_first_call_on(timer):
    call = with_breaker(timer=timer, name="reported")(lambda: 1)

    def reported():
        states = (component.status() for component in components.of_kind("admission"))
        return [state[0].breaker for state in states if state and state[0].method == "reported"]

    assert reported() == []
    call()
    assert reported() == ["closed"]


def test_each_function_has_a_breaker_of_its_own(timer):
    decorate = with_breaker(timer=timer, name="shared", **SETTINGS)
    first, second = decorate(lambda: 1), decorate(lambda: 2)
    first.breaker.force_open()
    assert second() == 2
    assert first.breaker.method == "shared"


def test_a_forked_child_calls_a_function_whose_trial_runs_in_its_parent(timer):
    begun, over = threading.Event(), threading.Event()

    @with_breaker(timer=timer, half_open_timeout=None, **SETTINGS)
    def call(waits):
        begun.set()
        return waits and over.wait()

    make_half_open(call.breaker, timer)
    thread = threading.Thread(target=call, args=(True,))
    thread.start()
    begun.wait()
    try:
        assert holds_in_child(lambda: not call(False) and call.breaker.state is BreakerState.CLOSED)
    finally:
        over.set()
        thread.join()
