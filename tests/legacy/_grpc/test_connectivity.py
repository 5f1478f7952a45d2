"""What is known of the connection below a channel, and the end of its calls."""

import grpc
import pytest

from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.connectivity import (
    core_below,
    end_calls,
    is_bare,
    is_polled,
    state_below,
    wait_unpolled,
)


class Through(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """An interceptor that waits for nothing."""

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)

    intercept_unary_stream = intercept_unary_unary


def intercepted(channel):
    return grpc.intercept_channel(channel, Through(), Through())


@pytest.mark.parametrize("wrap", [lambda channel: channel, intercepted])
def test_the_state_of_a_channel_is_found_below_its_interceptors(shop, wrap):
    with grpc.insecure_channel(shop.target) as channel:
        assert state_below(wrap(channel)) is grpc.ChannelConnectivity.IDLE
        assert state_below(wrap(channel), try_to_connect=True) is grpc.ChannelConnectivity.IDLE
        assert wait_until(lambda: state_below(wrap(channel)) is grpc.ChannelConnectivity.READY)
    assert state_below(wrap(channel)) is grpc.ChannelConnectivity.SHUTDOWN


def test_the_states_are_in_the_order_of_grpcs_core(shop):
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        state_below(channel, try_to_connect=True)
        failing = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        assert wait_until(lambda: state_below(channel) is failing)


def test_a_channel_is_bare_without_interceptors(shop_channel):
    assert is_bare(shop_channel)
    assert not any(map(is_bare, (intercepted(shop_channel), None, object())))


@pytest.mark.parametrize("other", [None, object(), grpc])
def test_of_a_channel_of_another_make_nothing_is_known(other):
    assert (core_below(other), state_below(other), is_polled(other)) == (None, None, False)


def test_a_channel_is_polled_while_somebody_subscribes_and_a_little_longer(shop_channel):
    told = []
    channel = intercepted(shop_channel)
    assert not is_polled(channel)
    channel.subscribe(told.append)
    assert is_polled(channel)
    channel.unsubscribe(told.append)
    assert wait_until(lambda: not is_polled(channel))


def test_who_waits_until_no_channel_is_polled_waits_for_all(shop_channel):
    told = []
    with grpc.insecure_channel("127.0.0.1:1") as other:
        for channel in (shop_channel, other):
            channel.subscribe(told.append)
            channel.unsubscribe(told.append)
        wait_unpolled(shop_channel, object(), intercepted(other))
        assert (is_polled(shop_channel), is_polled(other)) == (False, False)
    wait_unpolled()


def test_who_waits_for_a_channel_that_stays_polled_gives_up(shop_channel):
    told = []
    shop_channel.subscribe(told.append)
    wait_unpolled(shop_channel)
    assert is_polled(shop_channel)
    shop_channel.unsubscribe(told.append)
    wait_unpolled(shop_channel)


@pytest.mark.parametrize("wrap", [lambda channel: channel, intercepted])
def test_all_calls_of_a_channel_end_with_the_words_they_are_given(shop, wrap):
    hang, silent = Hang(), Silent(after=1)
    channel = wrap(grpc.insecure_channel(shop.target))
    shop.then(hang)
    future = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    shop.then(silent)
    stream = channel.unary_stream(UNARY_STREAM)(b"x")
    assert next(stream) == b"x"
    assert silent.begun.wait(WAIT_S)
    end_calls(channel, "no more")
    end_calls(channel, "again")
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    for error in future.exception(), caught.value:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() in {"no more", "Stream removed (no more)"}  # as grpc's core likes it
    with pytest.raises(ValueError, match="closed channel"):
        channel.unary_unary(UNARY_UNARY).with_call(b"x")[0]


def test_details_that_are_no_text_end_the_calls_too(shop):
    hang = Hang()
    channel = grpc.insecure_channel(shop.target)
    shop.then(hang)
    future = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    end_calls(channel, "no \udc80 more")
    assert future.exception().details() == "no \\udc80 more"
