"""`no_waits`: the waits of retries and failback are 0. The timers stand still."""

import asyncio

import grpc
import pytest

import rpcwheel
from fixtures.waiting import wait_until
from rpcwheel import RetryPolicy
from rpcwheel.backoff import Backoff, wait_of_call
from rpcwheel.durations import NEVER
from rpcwheel.events import FailbackDelivered, RetryScheduled, RetryStopped
from rpcwheel.testing import no_waits

GET = "/shop.Orders/Get"

RETRY = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=3600.0)


def make_calls(world, flaky_server, timer) -> None:
    """A call that succeeds at its third attempt, and one whose three attempts fail."""
    flaky_server.fail(times=2)
    kit = world.keep(world.do(world.api.Kit, retry=RETRY, idempotent=True, timer=timer))
    channel = world.keep(world.do(kit.channel, flaky_server.target))
    assert world.call(channel, method=GET).result() == b"x"
    flaky_server.fail(times=3)
    assert world.call(channel, method=GET).error().code() is grpc.StatusCode.UNAVAILABLE
    assert len(flaky_server.calls) == 6


def test_retries_do_not_wait_and_their_number_is_the_same(world, flaky_server, timer, events):
    with no_waits():
        make_calls(world, flaky_server, timer)
    assert [event.delay_s for event in events.of(RetryScheduled)] == [0.0] * 4
    assert [event.attempts for event in events.of(RetryStopped)] == [3]


def test_a_retry_does_not_wait_for_the_time_that_the_server_asks_for(flaky_server, timer, no_waits):
    flaky_server.fail(times=1, trailing_metadata=[("grpc-retry-pushback-ms", "60000")])
    kit = rpcwheel.Kit(
        retry=RETRY.model_copy(update={"max_pushback": None}), idempotent=True, timer=timer
    )
    with kit.channel(flaky_server.target) as channel, kit:
        assert channel.unary_unary(GET)(b"1") == b"1"


async def test_decorated_functions_run_without_waits():
    def function(argument):
        return argument, wait_of_call(5)

    async def coroutine(argument):
        await asyncio.sleep(0)
        return argument, wait_of_call(5)

    assert no_waits()(function)("argument") == ("argument", 0)
    assert await no_waits()(coroutine)("argument") == ("argument", 0)
    assert wait_of_call(5) == 5


def test_failback_does_not_wait(timer, events):
    failures = [ConnectionError(), ConnectionError()]

    @rpcwheel.with_failback(retry_on=ConnectionError, backoff=3600.0, timer=timer)
    def push():
        if failures:
            raise failures.pop()

    def delivered():
        timer.advance(0)
        return events.of(FailbackDelivered)

    with no_waits():
        push()
        (event,) = wait_until(delivered)
    push.failback.close()
    assert event.attempts == 3
    assert timer.now == 0


def test_an_endless_wait_and_the_end_of_the_attempts_remain():
    backoff = Backoff(5.0, max_attempts=2)
    with no_waits():
        with no_waits():
            assert wait_of_call(NEVER) == NEVER
        assert wait_of_call(5) == 0
        assert wait_of_call(backoff.next_delay_ns(2, elapsed_ns=0, error=None)) is None


def test_classes_and_generator_functions_are_refused():
    def generator():
        yield

    async def aio_generator():
        yield

    for thing in [generator, aio_generator, type("Tests", (), {})]:
        with pytest.raises(TypeError, match="write `with no_waits\\(\\):` in its body"):
            no_waits()(thing)
