"""One call: its tries share a deadline, are made with restraint, and may end with a default."""

import threading
import time
from functools import partial

import grpc
import pytest

from fixtures.clients import gated
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import RetryPolicy, deadline_scope
from rpcwheel.interceptors import CallPolicy, FailsafePolicy, intercept_channel
from rpcwheel.observe import CallExcused


@pytest.fixture
def client(shop_channel):
    """Makes channels with policies; by default calls are retried after UNAVAILABLE, at once."""

    def make(*, timer=None, **settings):
        retry = RetryPolicy(on="UNAVAILABLE", wait=0.0, budget=None)
        given = {"retry": retry, "idempotent": True} | settings
        return intercept_channel(shop_channel, CallPolicy(**given), timer=timer)

    return make


def refused(make) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        make()
    return caught.value


# --- One deadline ---


def test_all_tries_together_end_by_the_callers_deadline(shop, client):
    retry = RetryPolicy(on={"UNAVAILABLE"}, wait=0.05, attempts=1000, budget=None)
    shop.then(*["UNAVAILABLE"] * 1000)
    began = time.monotonic()
    refused(lambda: client(retry=retry).unary_unary(UNARY_UNARY)(b"x", timeout=1.0))
    assert time.monotonic() - began < WAIT_S  # of the thousand, 50 s
    assert 2 <= len(shop.calls) <= 21
    left = [seen.time_remaining for seen in shop.calls]
    assert left == sorted(left, reverse=True)


def test_a_wait_that_would_pass_the_deadline_is_not_begun(shop, client, timer):
    shop.then("UNAVAILABLE")
    retry = RetryPolicy(on="UNAVAILABLE", wait=5.0)
    error = refused(
        lambda: client(retry=retry, timer=timer).unary_unary(UNARY_UNARY)(b"x", timeout=5.0)
    )
    assert error.code() is grpc.StatusCode.UNAVAILABLE


def test_a_try_may_have_a_deadline_of_its_own(shop, client):
    hang = Hang()
    shop.then(hang)
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.0, attempt_timeout=0.3, budget=None)
    assert client(retry=retry).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S) == b"x"
    assert [seen.time_remaining < 1 for seen in shop.calls] == [True, True]


def test_calls_get_what_is_left_of_the_scope_they_are_in(shop, client):
    with deadline_scope(3.0):
        client(timeout=10.0).unary_unary(UNARY_UNARY)(b"x", timeout=7.0)
    assert shop.calls[0].time_remaining < 3.1


@pytest.mark.parametrize("style", ["blocking", "future", "stream"])
@pytest.mark.parametrize("rules", [{}, {"retry": None}])
def test_a_call_whose_deadline_has_passed_is_not_made(shop, client, style, rules):
    channel = client(**rules)
    with deadline_scope(0.0):
        match style:
            case "blocking":
                error = refused(lambda: channel.unary_unary(UNARY_UNARY)(b"x"))
            case "future":
                error = channel.unary_unary(UNARY_UNARY).future(b"x").exception()
            case "stream":
                error = refused(lambda: next(channel.unary_stream(UNARY_STREAM)(b"x")))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "its deadline has passed" in error.details()
    assert shop.calls == []


# --- Restraint ---


def test_a_server_that_is_down_sees_a_fifth_more_calls_at_most(shop, client):
    shop.then(*["UNAVAILABLE"] * 1000)
    retry = RetryPolicy(on="UNAVAILABLE", wait=0.0, attempts=5, reserve=0)
    member = client(retry=retry).unary_unary(UNARY_UNARY)
    for _ in range(200):
        refused(partial(member, b"x"))
    assert 200 < len(shop.calls) <= 240


def test_a_server_that_says_when_to_come_back_is_obeyed(shop, client, timer, events):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "7000"),)))
    future = client(timer=timer).unary_unary(UNARY_UNARY).future(b"x")
    wait_until(lambda: timer.pending)
    assert events[0].delay_s == 7.0
    timer.advance(6.9)
    assert timer.pending == 1
    timer.advance(0.2)
    assert future.result(WAIT_S) == b"x"


def test_a_server_that_forbids_a_retry_is_obeyed(shop, client, events):
    shop.then(Fail("UNAVAILABLE", trailing=(("grpc-retry-pushback-ms", "-1"),)))
    refused(lambda: client().unary_unary(UNARY_UNARY)(b"x"))
    assert len(shop.calls) == 1
    assert events[0].reason == "the server asked not to try again"


# --- Failsafe ---


def test_failsafe_answers_with_its_default_and_says_so(shop, client, events):
    shop.then("NOT_FOUND")
    channel = client(failsafe=FailsafePolicy(on="NOT_FOUND", default=b"none"))
    answer, call = channel.unary_unary(UNARY_UNARY).with_call(b"x")
    assert answer == b"none"
    assert call.code() is grpc.StatusCode.OK
    assert call.details().startswith("failsafe after NOT_FOUND: scripted")
    assert call.trailing_metadata()[-1] == ("rpcwheel-answer", "failsafe")
    assert [type(event) for event in events] == [CallExcused]


def test_failsafe_comes_after_the_retries(shop, client):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client(failsafe=FailsafePolicy(on="UNAVAILABLE", default=(b"n",)))
    assert list(channel.unary_stream(UNARY_STREAM)(b"x")) == [b"n"]
    assert len(shop.calls) == 3


def test_no_default_follows_messages_that_were_handed_out(shop, client):
    shop.then(Fail("UNAVAILABLE", after=1, read=True))
    channel = client(failsafe=FailsafePolicy(on="UNAVAILABLE", default=(b"n",)))
    rest = threading.Event()
    stream = channel.stream_stream(STREAM_STREAM)(gated(b"x", rest))
    assert next(stream) == b"x"
    rest.set()
    assert refused(lambda: next(stream)).code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1
