"""Private parts of gRPC's channels: the state below interceptors, polling, the end of calls."""

from unittest.mock import Mock

import grpc
import pytest

from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.connectivity import (
    close_unavailable,
    core_channel,
    core_state,
    has_polling_thread,
    is_bare,
    wait_for_polling_end,
)
from rpcwheel.transport import ReconnectingChannel

IDLE = grpc.ChannelConnectivity.IDLE
READY = grpc.ChannelConnectivity.READY
SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


class PassThrough(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)

    intercept_unary_stream = intercept_unary_unary


def intercepted(channel):
    return grpc.intercept_channel(channel, PassThrough(), PassThrough())


@pytest.mark.parametrize("wrap", [lambda channel: channel, intercepted])
@pytest.mark.parametrize("kind", [grpc.insecure_channel, ReconnectingChannel])
def test_the_state_of_a_channel_is_found_below_its_interceptors(shop, kind, wrap):
    with kind(shop.target) as channel:
        assert core_state(wrap(channel)) is IDLE
        assert core_state(wrap(channel), try_to_connect=True) is IDLE
        assert wait_until(lambda: core_state(wrap(channel)) is READY)
    assert core_state(wrap(channel)) is SHUTDOWN


def test_a_channel_of_the_users_is_not_asked_for_its_state_and_counts_as_ready():
    channel = Mock(spec=grpc.Channel, get_state=Mock(return_value=IDLE))
    assert core_state(channel) is None
    with ReconnectingChannel("shop", connect=lambda _: channel) as reconnecting:
        assert reconnecting.is_ready()
    assert not reconnecting.is_ready()
    assert channel.get_state.mock_calls == []


def test_a_channel_with_interceptors_is_not_bare(shop_channel):
    assert is_bare(shop_channel)
    assert not any(map(is_bare, (intercepted(shop_channel), None, object())))


@pytest.mark.parametrize("other", [None, object(), grpc])
def test_nothing_is_known_of_an_object_that_is_not_grpcs(other):
    assert (core_channel(other), core_state(other), has_polling_thread(other)) == (
        None,
        None,
        False,
    )


def test_wait_for_polling_end_waits_for_grpcs_polling_threads_of_all_channels(shop_channel):
    callback = Mock()
    with grpc.insecure_channel("127.0.0.1:1") as other:
        for channel in (intercepted(shop_channel), other):
            channel.subscribe(callback)
            assert has_polling_thread(channel)
            channel.unsubscribe(callback)
        wait_for_polling_end(shop_channel, object(), intercepted(other))
        assert (has_polling_thread(shop_channel), has_polling_thread(other)) == (False, False)


def test_wait_for_polling_end_returns_after_its_steps_if_a_channel_stays_subscribed(
    shop_channel, monkeypatch
):
    callback = Mock()
    monkeypatch.setattr("rpcwheel._grpc.connectivity.POLL_STEPS", 10)
    shop_channel.subscribe(callback)
    wait_for_polling_end(shop_channel)
    assert has_polling_thread(shop_channel)
    shop_channel.unsubscribe(callback)


@pytest.mark.parametrize("wrap", [lambda channel: channel, intercepted])
def test_close_unavailable_ends_the_calls_with_the_details(shop, wrap):
    hang = Hang()
    channel = wrap(grpc.insecure_channel(shop.target))
    shop.then(hang)
    future = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    close_unavailable(channel, "not \udc80 encodable")
    close_unavailable(channel, "a second time")
    error = future.exception()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "not \\udc80 encodable" in error.details()
    with pytest.raises(ValueError, match="closed channel"):
        channel.unary_unary(UNARY_UNARY)(b"x")
