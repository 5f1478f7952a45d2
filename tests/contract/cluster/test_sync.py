"""The room for threads shows its names, and the channel behaves as one of grpc through any door."""

import grpc
import pytest

import rpcwheel.cluster
from fixtures.clusters import instance
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S
from rpcwheel import CallPolicy, Kit, RetryPolicy, intercept_channel
from rpcwheel.cluster import sync
from rpcwheel.observe import CallNotRetried, CallRetrying


def test_the_room_shows_what_is_for_threads():
    assert {name: getattr(rpcwheel.cluster, name) for name in sync.__all__} == {
        name: getattr(sync, name) for name in sync.__all__
    }


class Note(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """An interceptor of somebody's, that hands all through."""

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)

    intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = (
        intercept_unary_unary
    )


RETRY = RetryPolicy(on={"UNAVAILABLE"}, attempts=3, wait=0.01)
STYLES = {
    "bare": lambda channel: channel,
    "intercepted by grpc": lambda channel: grpc.intercept_channel(channel, Note(), Note()),
    "intercepted by us": lambda channel: intercept_channel(channel, CallPolicy(retry=RETRY)),
    "by a kit": lambda channel: grpc.intercept_channel(
        channel, *Kit(timeout=WAIT_S, retry=RETRY).client_interceptors()
    ),
}


def calls_of(channel):
    """Every way to make a call of each kind, as functions of nothing."""
    unary = channel.unary_unary(UNARY_UNARY)
    pulled = channel.unary_stream(UNARY_STREAM)
    pushed = channel.stream_unary(STREAM_UNARY)
    both = channel.stream_stream(STREAM_STREAM)
    return {
        "unary": lambda: unary(b"ab", timeout=WAIT_S),
        "unary with_call": lambda: unary.with_call(b"ab", timeout=WAIT_S)[0],
        "unary future": lambda: unary.future(b"ab", timeout=WAIT_S).result(),
        "pulled": lambda: b"".join(pulled(b"ab", timeout=WAIT_S)),
        "pushed": lambda: pushed(iter([b"a", b"b"]), timeout=WAIT_S),
        "pushed with_call": lambda: pushed.with_call(iter([b"a", b"b"]), timeout=WAIT_S)[0],
        "pushed future": lambda: pushed.future(iter([b"a", b"b"]), timeout=WAIT_S).result(),
        "both": lambda: b"".join(both(iter([b"a", b"b"]), timeout=WAIT_S)),
    }


@pytest.mark.parametrize("style", STYLES)
def test_a_stub_made_before_an_update_works_after_it(shops, open_cluster, style):
    channel = open_cluster(shops[0])
    calls = calls_of(STYLES[style](channel))
    for shop in shops:
        channel.update([instance(shop)])
        assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, b"ab")
        assert len(shop.calls) == len(calls)
    assert channel.calls == 0


@pytest.mark.parametrize("style", STYLES)
def test_nobody_sees_a_member_that_is_away(shops, dead, open_cluster, style):
    channel = open_cluster(dead, shops[0])
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    calls = calls_of(STYLES[style](channel))
    assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, b"ab")


@pytest.mark.parametrize("idempotent", [False, True])
def test_only_an_idempotent_method_is_retried_though_no_member_was_reached(
    shops, dead, open_cluster, events, idempotent
):
    channel = open_cluster(dead)
    retry = RetryPolicy(on={"UNAVAILABLE"}, attempts=2, wait=0.0)
    policy = CallPolicy(retry=retry, idempotent=idempotent)
    call = intercept_channel(channel, policy).unary_unary(UNARY_UNARY)
    with pytest.raises(grpc.RpcError):
        call(b"x", timeout=WAIT_S)
    told = [event for event in events if isinstance(event, (CallRetrying, CallNotRetried))]
    assert len(told) == (2 if idempotent else 1)
    assert ("not marked idempotent" in told[-1].reason) is not idempotent
    channel.update([instance(dead), instance(shops[0])])
    assert call(b"x", timeout=WAIT_S) == b"x"
