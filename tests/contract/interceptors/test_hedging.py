"""Hedged calls: further attempts while the first one runs (gRFC A6)."""

import asyncio

import grpc
import pytest

from fixtures.client_interceptors import aio_interceptor
from fixtures.grpcio import BUGS_OF_INTERCEPTORS, WAITING_ENDS_WITH_ITS_CHANNEL
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.call import CallPolicy, DefaultResponsePolicy, HedgingPolicy, MethodPolicy
from rpcwheel.events import HedgeSent
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import client_interceptors, intercept_channel

HEDGING = HedgingPolicy(delay=5.0, max_attempts=3, retry_budget=None)
AT_ONCE = HedgingPolicy(delay=0, max_attempts=3, retry_budget=None)
POLICY = CallPolicy(hedging=HEDGING, idempotent=True)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

each_style = pytest.mark.parametrize(
    ("client", "api"),
    [
        ("sync blocking", "channel"),
        ("sync future", "channel"),
        ("aio unary", "channel"),
        ("aio unary", "interceptors"),
    ],
    indirect=["client"],
)
"""The ways whose adapters hedge, each on its own."""

each_world = pytest.mark.parametrize(
    ("client", "api"),
    [("sync future", "channel"), ("aio unary", "interceptors")],
    indirect=["client"],
)


@pytest.fixture
def begin(client, api, timer):
    """Begins hedged calls."""

    def begin(*, queues=None, timeout=None, **settings):
        given = {"retry": None, "hedging": HEDGING} | settings
        channel = client.open(api=api, timer=timer, queues=queues, **given)
        return client.begin(channel, timeout=timeout)

    return begin


def has_begun(hang) -> None:
    assert hang.begun.wait(WAIT_S)


def have_ended(calls) -> bool:
    return all(seen.ended.wait(WAIT_S) for seen in calls)


def hedge(timer) -> None:
    """Advance the timer until the next attempt is due."""
    wait_until(lambda: timer.pending)
    timer.advance(5.0)


@each_style
def test_a_slow_call_is_sent_again_and_the_first_success_is_the_callers(
    shop, client, begin, timer, events
):
    shop.then(slow := Hang())
    call = begin()
    has_begun(slow)
    hedge(timer)
    if client.style != "blocking":
        assert call.initial_metadata() == call.trailing_metadata() == {}
    assert call.result() == b"x"
    assert (call.code(), call.done()) == (grpc.StatusCode.OK, True)
    first, second = shop.calls
    assert have_ended([first])  # it was canceled
    assert "x-retry-attempt" not in first.metadata
    assert second.metadata["x-retry-attempt"] == "1"
    wait_until(lambda: timer.pending == 0)
    wait_until(lambda: HedgeSent(UNARY_UNARY, 2) in events)


@each_style
def test_a_fatal_failure_ends_the_call_and_cancels_the_others(shop, begin, timer):
    shop.then(slow := Hang(), "INTERNAL")
    call = begin()
    has_begun(slow)
    hedge(timer)
    assert call.error().code() is grpc.StatusCode.INTERNAL
    assert have_ended(shop.calls)
    assert len(shop.calls) == 2


@each_style
def test_if_all_attempts_fail_the_caller_gets_the_last_failure_or_the_default(shop, begin):
    shop.then("UNAVAILABLE", "UNAVAILABLE", Fail("UNAVAILABLE", "the third"))
    assert begin().error().details() == "the third"
    assert len(shop.calls) == 3
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    assert begin(default_response=default).result() == b"none"


def pushback(milliseconds: str) -> Fail:
    return Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", milliseconds),))


@each_world
def test_a_method_that_is_not_idempotent_is_not_hedged(shop, begin, timer):
    shop.then(slow := Hang())
    call = begin(idempotent=False)
    has_begun(slow)
    assert timer.pending == 0
    call.cancel()


@each_world
def test_canceling_a_hedged_call_cancels_all_its_attempts(shop, begin, timer):
    hangs = [Hang(), Hang()]
    shop.then(*hangs)
    call = begin()
    has_begun(hangs[0])
    hedge(timer)
    has_begun(hangs[1])
    assert call.cancel()
    assert (call.cancelled(), call.code()) == (True, grpc.StatusCode.CANCELLED)
    assert have_ended(shop.calls)
    wait_until(lambda: timer.pending == 0)


@each_world
def test_the_deadline_of_the_call_ends_all_its_attempts(shop, begin):
    shop.then(Hang(), Hang(), Hang())
    error = begin(hedging=AT_ONCE, timeout=0.2).error()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert have_ended(shop.calls)


@each_style
def test_a_call_whose_deadline_has_passed_is_not_sent(shop, begin):
    default = DefaultResponsePolicy(on="DEADLINE_EXCEEDED", default=b"late")
    assert begin(timeout=0, default_response=default).result() == b"late"
    assert not shop.calls


@each_world
def test_hedged_calls_that_fail_for_good_are_queued_once_by_failback(shop, client, begin, queues):
    """Also if their attempts fail at the same moment."""
    failback = FailbackPolicy(retry_on="UNAVAILABLE", default=b"later", max_pending=1000)
    number = 30
    shop.then(*["UNAVAILABLE"] * (3 * number))
    for _ in range(number):
        assert begin(hedging=AT_ONCE, failback=failback, queues=queues).result() == b"later"
    assert queues.pending == number
    assert client.world.do(queues.flush, WAIT_S)
    assert len(shop.calls) == 4 * number


@pytest.mark.parametrize(("client", "api"), [("sync future", "channel")], indirect=["client"])
def test_a_call_that_waits_for_a_stopped_timer_ends_with_the_last_failure(shop, begin, timer):
    shop.then(pushback("60000"))
    timer.stop()
    assert begin().error().code() is UNAVAILABLE


@pytest.mark.parametrize(
    ("client", "api"),
    [
        ("sync future", "channel"),
        pytest.param("aio unary", "interceptors", marks=WAITING_ENDS_WITH_ITS_CHANNEL),
    ],
    indirect=["client"],
)
def test_closing_the_channel_ends_a_call_that_waits_for_its_next_attempt(shop, client, api, timer):
    shop.then(pushback("60000"))
    channel = client.open(api=api, timer=timer, retry=None, hedging=HEDGING)
    call = client.begin(channel)
    wait_until(lambda: shop.calls and shop.calls[0].ended.is_set())
    client.world.do(channel.close)
    # UNAVAILABLE if the failure of the attempt is read only now.
    assert call.code() in {grpc.StatusCode.CANCELLED, UNAVAILABLE}
    wait_until(lambda: timer.pending == 0)


# --- Only `grpc` ---


def test_dropping_a_hedged_call_cancels_all_its_attempts(shop, shop_channel, timer):
    shop.then(slow := Hang())
    channel = intercept_channel(shop_channel, POLICY, timer=timer)
    call = channel.unary_unary(UNARY_UNARY).future(b"x")
    has_begun(slow)
    del call
    assert have_ended(shop.calls)
    wait_until(lambda: timer.pending == 0)


def test_a_future_through_an_interceptor_is_hedged(shop, shop_channel, timer):
    shop.then(slow := Hang())
    policy = CallPolicy(hedging=HEDGING, methods={"*": MethodPolicy(idempotent=True)})
    with pytest.warns(match="hedges only calls of .future\\(\\)"):
        interceptors = client_interceptors(policy, timer=timer)
    channel = grpc.intercept_channel(shop_channel, *interceptors)
    call = channel.unary_unary(UNARY_UNARY).future(b"x")
    has_begun(slow)
    hedge(timer)
    assert call.result(WAIT_S) == b"x"


# --- Only `grpc.aio` ---


async def test_an_inner_interceptor_may_return_the_response(shop, channels):
    async def respond(continuation, details, request):
        return await (await continuation(details, request))

    channel = channels.open(POLICY, inner=[aio_interceptor(respond)])
    assert await channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


async def test_a_call_ends_if_an_inner_interceptor_is_canceled(shop, channels):
    async def is_canceled(*_):
        raise asyncio.CancelledError

    channel = channels.open(POLICY, inner=[aio_interceptor(is_canceled)])
    with pytest.raises(asyncio.CancelledError):
        await channel.unary_unary(UNARY_UNARY)(b"x")


async def test_a_channel_that_is_closed_with_a_grace_lets_running_attempts_end(shop, own, timer):
    shop.then(slow := Hang())
    channel = own.open(POLICY, timer=timer)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(slow.begun.is_set)
    closing = asyncio.ensure_future(channel.close(30))
    await asyncio.sleep(0)
    assert not call.done()
    call.cancel()
    await closing


@BUGS_OF_INTERCEPTORS
async def test_an_error_of_an_inner_interceptor_ends_a_call_while_its_channel_closes(
    shop, own, timer
):
    begun, fails = asyncio.Event(), asyncio.Event()

    async def fail_in_the_second_attempt(continuation, details, request):
        if shop.calls:
            begun.set()
            await fails.wait()
            raise LookupError
        return await continuation(details, request)

    shop.then(slow := Hang())
    inner = [aio_interceptor(fail_in_the_second_attempt)]
    channel = own.open(POLICY, timer=timer, inner=inner)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    await aio_wait_until(slow.begun.is_set)
    await aio_wait_until(lambda: timer.pending)
    timer.advance(5.0)
    await begun.wait()
    closing = asyncio.ensure_future(channel.close(WAIT_S))
    await asyncio.sleep(0)
    fails.set()
    with pytest.raises(LookupError):
        await asyncio.wait_for(call, WAIT_S)
    await closing


async def test_a_request_of_a_wrong_type_raises(channels, timer):
    """gRPC's own call does not end then; only awaiting it raises."""
    channel = channels.open(POLICY, timer=timer)
    with pytest.raises(TypeError):
        await asyncio.wait_for(channel.unary_unary(UNARY_UNARY)("text"), WAIT_S)
