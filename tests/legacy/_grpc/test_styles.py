"""What tells the styles of grpcio's calls apart, and how a call ended, whatever it is."""

import functools

import grpc
import pytest

from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Silent
from fixtures.waiting import wait_until
from rpcwheel._grpc.calls import (
    blocks,
    call_at_end,
    failure_of,
    has_ended,
    has_status,
    is_single_threaded,
)
from rpcwheel._grpc.finished import FinishedError, FinishedResponse

CODE = grpc.StatusCode.DEADLINE_EXCEEDED


class Styles(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor):
    """Notes what it is told of each call's style, and what the continuation then gives."""

    def __init__(self) -> None:
        self.told = []

    def intercept_unary_unary(self, continuation, details, request):
        call = continuation(details, request)
        self.told.append((blocks(continuation), has_ended(call)))
        return call

    intercept_stream_unary = intercept_unary_unary


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["unary_unary", "stream_unary"])
def test_the_names_of_grpcs_own_continuations_tell_the_style(shop_channel, kind, layers):
    styles = Styles()
    channel = grpc.intercept_channel(shop_channel, *[styles] * layers)
    method, request = {
        "unary_unary": (UNARY_UNARY, lambda: b"x"),
        "stream_unary": (STREAM_UNARY, lambda: iter([b"x"])),
    }[kind]
    member = getattr(channel, kind)(method)
    member(request())
    member.with_call(request())
    assert styles.told == [(True, True)] * 2 * layers
    styles.told.clear()
    member.future(request()).result()
    assert [blocking for blocking, _ in styles.told] == [False] * layers


def test_any_other_continuation_has_no_style():
    assert blocks(lambda details, request: None) is None
    assert blocks(functools.partial(print)) is None


def test_how_a_call_failed_is_told_for_all_that_may_be_one(shop_channel):
    error = FinishedError(CODE, "")
    assert failure_of(error) is error
    assert failure_of(FinishedResponse(b"", "")) is None
    plain = grpc.RpcError()
    assert failure_of(plain) is plain
    assert failure_of(b"an answer") is None
    future = shop_channel.unary_unary(UNARY_UNARY).future(b"x")
    assert failure_of(future) is None
    cancelled = shop_channel.unary_stream(UNARY_STREAM)(b"x")
    cancelled.cancel()
    assert isinstance(failure_of(cancelled), grpc.FutureCancelledError)


def test_only_failures_of_calls_have_a_status():
    assert has_status(FinishedError(CODE, ""))
    assert not has_status(grpc.RpcError())
    assert not has_status(ValueError())
    assert not has_status(grpc.FutureCancelledError())


def test_a_hook_at_the_end_keeps_no_call_alive(shop, shop_channel):
    silent, told = Silent(), []
    shop.then(silent)
    call = shop_channel.unary_stream(UNARY_STREAM)(b"x")
    call_at_end(call, lambda: told.append(1))
    assert silent.begun.wait(20)
    assert told == []
    del call
    wait_until(lambda: told)
    done = shop_channel.unary_unary(UNARY_UNARY).with_call(b"x")[1]
    call_at_end(done, lambda: told.append(2))
    call_at_end(object(), lambda: told.append(3))
    wait_until(lambda: told == [1, 2, 3])


def test_single_threaded_streams_are_known(shop, shop_channel):
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
    with grpc.insecure_channel(shop.target, options=[option]) as channel:
        assert is_single_threaded(channel.unary_stream(UNARY_STREAM)(b"x"))
    assert not is_single_threaded(shop_channel.unary_stream(UNARY_STREAM)(b"x"))
