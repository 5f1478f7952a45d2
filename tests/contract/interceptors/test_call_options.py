"""`call_options`: other policies for the calls of a block, in both worlds."""

import grpc
import pytest

import rpcwheel
from fixtures.shop import UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S
from rpcwheel import CallPolicy, DefaultResponsePolicy, RetryPolicy, aio, call_options
from rpcwheel.interceptors import client_interceptors, intercept_channel

RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, retry_budget=None)
POLICY = CallPolicy(retry=RETRY, idempotent=True)


@pytest.fixture(params=["intercept_channel", "client_interceptors"])
def channel(request, shop_channel):
    if request.param == "intercept_channel":
        return intercept_channel(shop_channel, POLICY)
    return grpc.intercept_channel(shop_channel, *client_interceptors(POLICY))


@pytest.fixture
def call(channel):
    return channel.unary_unary(UNARY_UNARY)


def test_a_timeout_holds_for_the_calls_of_the_block(shop, call):
    with call_options(timeout=60.0):
        call(b"")
    call(b"")
    inside, outside = shop.calls
    assert inside.time_remaining <= 61
    assert outside.time_remaining is None


def test_the_timeout_of_the_call_itself_still_counts(shop, call):
    with call_options(timeout=60.0):
        call(b"", timeout=30.0)
    assert shop.calls[0].time_remaining <= 31


def test_none_switches_a_policy_off(shop, call):
    shop.then("UNAVAILABLE")
    with call_options(retry=None), pytest.raises(grpc.RpcError):
        call(b"")
    assert len(shop.calls) == 1
    shop.then("UNAVAILABLE")
    assert call(b"x") == b"x"


def test_an_inner_block_takes_what_it_does_not_set_from_the_outer_one(shop, call):
    with call_options(timeout=60.0), call_options(retry=None):
        shop.then("UNAVAILABLE")
        with pytest.raises(grpc.RpcError):
            call(b"")
        assert shop.calls[0].time_remaining <= 61
    shop.then("UNAVAILABLE")
    assert call(b"x") == b"x"


@pytest.mark.parametrize("style", ["future", "stream"])
def test_futures_and_streams_follow_the_options_under_which_they_began(shop, channel, style):
    shop.then("UNAVAILABLE")
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=b"no")
    with call_options(default_response=default, retry=None):
        if style == "future":
            held = channel.unary_unary(UNARY_UNARY).future(b"x")
        else:
            held = channel.unary_stream(UNARY_STREAM)(b"x")
    assert (held.result(WAIT_S) if style == "future" else b"".join(held)) == b"no"
    assert len(shop.calls) == 1


def test_an_unknown_or_wrong_option_is_refused_before_the_block():
    with (
        pytest.raises(rpcwheel.ConfigurationError, match="did you mean 'timeout'"),
        call_options(timeuot=1.0),
    ):
        raise AssertionError
    with pytest.raises((TypeError, rpcwheel.ConfigurationError)), call_options(timeout="soon"):
        raise AssertionError


def test_both_worlds_export_the_same_function():
    assert aio.call_options is rpcwheel.call_options is call_options
