"""Hedged calls of `grpc.aio`: further attempts while the first one runs (gRFC A6)."""

import asyncio

import grpc
import pytest

from fixtures.aio_policy_channels import refused
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.call import CallPolicy, DefaultResponsePolicy, HedgingPolicy
from rpcwheel.events import HedgeSent
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors.aio import FailbackQueues

HEDGING = HedgingPolicy(delay=5.0, max_attempts=3, retry_budget=None)
AT_ONCE = HedgingPolicy(delay=0, max_attempts=3, retry_budget=None)


@pytest.fixture
def begin(channels, timer):
    """Begins hedged calls, through `intercept_channel` and through interceptors."""

    def begin(timeout=None, *, queues=None, **settings):
        policy = CallPolicy(**{"hedging": HEDGING, "idempotent": True} | settings)
        channel = channels.open(policy, timer=timer, queues=queues)
        return channel.unary_unary(UNARY_UNARY)(b"x", timeout=timeout)

    return begin


async def has_begun(hang):
    await aio_wait_until(hang.begun.is_set)


async def ended(*calls):
    await aio_wait_until(lambda: all(seen.ended.is_set() for seen in calls))


async def hedge(timer):
    """Advance the timer until the next attempt is due."""
    await aio_wait_until(lambda: timer.pending)
    timer.advance(5.0)


async def test_a_slow_call_is_sent_again_and_the_first_success_is_the_callers(
    shop, begin, timer, events
):
    slow = Hang()
    shop.then(slow)
    call = begin()
    await has_begun(slow)
    await hedge(timer)
    assert await call == b"x"
    first, second = shop.calls
    await ended(first)  # it was canceled
    assert "x-retry-attempt" not in first.metadata
    assert second.metadata["x-retry-attempt"] == "1"
    assert timer.pending == 0
    assert HedgeSent(UNARY_UNARY, 2) in events
    assert (await call.code(), call.done()) == (grpc.StatusCode.OK, True)


async def test_a_fast_call_is_sent_once(shop, begin, timer):
    assert await begin() == b"x"
    assert timer.pending == 0
    assert len(shop.calls) == 1


async def test_after_a_non_fatal_failure_the_next_attempt_is_sent_at_once(shop, begin):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert await begin() == b"x"
    assert len(shop.calls) == 3


async def test_a_fatal_failure_ends_the_call_and_cancels_the_others(shop, begin, timer):
    slow = Hang()
    shop.then(slow, "INTERNAL")
    call = begin()
    await has_begun(slow)
    await hedge(timer)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    await ended(shop.calls[0])
    assert len(shop.calls) == 2


async def test_if_all_attempts_fail_the_caller_gets_the_last_failure(shop, begin):
    shop.then("UNAVAILABLE", "UNAVAILABLE", Fail("UNAVAILABLE", "the third"))
    error = await refused(begin())
    assert error.details() == "the third"
    assert len(shop.calls) == 3


async def test_a_server_may_ask_for_a_delay_before_the_next_attempt(shop, begin, timer):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "60000"),)))
    call = asyncio.ensure_future(begin(hedging=HEDGING.model_copy(update={"delay": 1e6})))
    waited_s = 0
    while not call.done():  # it has failed at some moment that cannot be seen
        await asyncio.sleep(0.001)
        timer.advance(1)
        waited_s += 1
    assert waited_s >= 60
    assert call.result() == b"x"
    assert len(shop.calls) == 2


async def test_attempts_over_the_budget_are_not_sent(shop, begin):
    none_left = HedgingPolicy(delay=0, max_attempts=5, retry_budget=0.0, min_retries=2)
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    error = await refused(begin(hedging=none_left))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 3


async def test_a_method_that_is_not_idempotent_is_not_hedged(shop, begin, timer):
    slow = Hang()
    shop.then(slow)
    call = begin(idempotent=False)
    await has_begun(slow)
    assert timer.pending == 0
    call.cancel()


async def test_hedging_without_delay_sends_all_attempts_at_once(shop, begin):
    shop.then(Hang(), Hang())
    assert await begin(hedging=AT_ONCE) == b"x"
    await aio_wait_until(lambda: len(shop.calls) == 3)


async def test_canceling_a_hedged_call_cancels_all_its_attempts(shop, begin, timer):
    hangs = [Hang(), Hang()]
    shop.then(*hangs)
    call = begin()
    await has_begun(hangs[0])
    await hedge(timer)
    await has_begun(hangs[1])
    assert call.cancel()
    await ended(*shop.calls)
    assert timer.pending == 0


async def test_the_deadline_of_the_call_ends_all_its_attempts(shop, begin):
    shop.then(Hang(), Hang(), Hang())
    error = await refused(begin(0.2, hedging=AT_ONCE))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await ended(*shop.calls)


async def test_a_call_whose_deadline_has_passed_is_not_sent(shop, begin):
    default = DefaultResponsePolicy(on="DEADLINE_EXCEEDED", default=b"late")
    assert await begin(0, default_response=default) == b"late"
    assert not shop.calls


async def test_a_hedged_call_that_fails_for_good_is_answered_with_the_default(shop, begin):
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    assert await begin(default_response=default) == b"none"


async def test_a_hedged_call_that_fails_for_good_is_queued_by_failback(shop, begin, timer):
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    failback = FailbackPolicy(retry_on="UNAVAILABLE", default=b"later")
    async with FailbackQueues(timer) as queues:
        assert await begin(failback=failback, queues=queues) == b"later"
        assert queues.pending == 1
        assert await queues.flush(30)
    assert len(shop.calls) == 4


class AnswersWithTheResponse(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, details, request):
        return await (await continuation(details, request))


class IsCanceled(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, details, request):
        raise asyncio.CancelledError


async def test_an_inner_interceptor_may_return_the_response(shop, channels):
    policy = CallPolicy(hedging=HEDGING, idempotent=True)
    channel = channels.open(policy, inner=[AnswersWithTheResponse()])
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_a_call_ends_if_an_inner_interceptor_is_canceled(shop, channels):
    policy = CallPolicy(hedging=HEDGING, idempotent=True)
    channel = channels.open(policy, inner=[IsCanceled()])
    with pytest.raises(asyncio.CancelledError):
        await channel.unary_unary(UNARY_UNARY)(b"x")


async def test_a_channel_that_is_closed_with_a_grace_lets_running_attempts_end(shop, own, timer):
    slow = Hang()
    shop.then(slow)
    channel = own.open(CallPolicy(hedging=HEDGING, idempotent=True), timer=timer)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await has_begun(slow)
    closing = asyncio.ensure_future(channel.close(30))
    await asyncio.sleep(0)
    assert not call.done()
    call.cancel()
    await closing


async def test_a_request_of_a_wrong_type_raises(channels, timer):
    """gRPC's own call does not end then; only awaiting it raises."""
    channel = channels.open(CallPolicy(hedging=HEDGING, idempotent=True), timer=timer)
    with pytest.raises(TypeError):
        await asyncio.wait_for(channel.unary_unary(UNARY_UNARY)("text"), WAIT_S)
