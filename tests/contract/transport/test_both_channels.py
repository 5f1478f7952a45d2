"""`ReconnectingChannel` and `BalancedChannel` behave like a channel of gRPC."""

import gc
import weakref

import grpc
import pytest

from fixtures.shop import STREAM_UNARY, UNARY_UNARY, Fail, Silent
from fixtures.waiting import WAIT_S, wait_until
from fixtures.ways import hanging_call, ways_to_call
from fixtures.worlds import KINDS
from rpcwheel.events import CallbackFailed

CLOSED = "Cannot invoke RPC on closed channel|Channel is closed"


@pytest.fixture(params=["reconnecting", "balanced"])
def channel(request, shop, open_reconnecting, open_balanced):
    """A channel of each class to the shop."""
    return open_reconnecting() if request.param == "reconnecting" else open_balanced(shop)


def test_the_options_of_a_call_reach_the_server(world, shop, channel):
    metadata = grpc.aio.Metadata(("key", "value")) if world.name == "aio" else (("key", "value"),)
    call = world.call(channel, timeout=500, metadata=metadata, compression=grpc.Compression.Gzip)
    assert (call.result(), call.code()) == (b"x", grpc.StatusCode.OK)
    (seen,) = shop.calls
    assert seen.metadata["key"] == "value"
    assert 400 < seen.time_remaining <= 501


def test_serializers_are_used_and_without_them_messages_are_bytes(world, channel):
    serializers = {"request_serializer": str.encode, "response_deserializer": bytes.decode}
    for method in (
        channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode),
        channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode, True),
        channel.unary_unary(UNARY_UNARY, _registered_method=True, **serializers),
    ):
        assert world.do(method, "text", timeout=WAIT_S) == "text"
    named = channel.unary_unary(UNARY_UNARY, _registered_method=True)
    assert world.do(named, b"bytes", timeout=WAIT_S) == b"bytes"
    streamed = channel.stream_unary(STREAM_UNARY, str.encode, bytes.decode)
    assert world.do(streamed, iter(["te", "xt"]), timeout=WAIT_S) == "text"


def test_the_status_of_the_server_reaches_the_caller(world, shop, channel):
    for code in ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"):
        shop.then(Fail(code, "no such thing", (("why", "so"),)))
        error = world.call(channel).error()
        assert (error.code().name, error.details()) == (code, "no such thing")
        assert ("why", "so") in tuple(error.trailing_metadata())
    assert wait_until(lambda: channel.calls == 0)


def test_calls_in_flight_are_counted_until_their_end(world, shop, channel):
    calls = [hanging_call(world, shop, channel, kind) for kind in KINDS]
    assert channel.calls == len(KINDS)
    assert world.do(repr, channel).endswith(f"calls in flight: {len(KINDS)}>")
    for call in calls:
        assert call.cancel()
        assert call.cancelled()
    assert wait_until(lambda: channel.calls == 0)
    with pytest.raises(TypeError):
        world.do(channel.unary_unary(UNARY_UNARY), b"x", wrong=True)
    assert channel.calls == 0


@pytest.mark.parametrize(("used", "reads"), [(False, True), (True, False), (True, True)])
def test_a_dropped_response_stream_is_canceled(world, shop, channel, used, reads):
    if used:
        world.call(channel).result()
    shop.then(silent := Silent(after=1))
    call = world.call(channel, "unary_stream", b"ab")
    if reads:
        assert call.read() == b"a"
    assert silent.begun.wait(WAIT_S)
    gone = weakref.ref(call.grpc_call)
    del call
    assert wait_until(lambda: (gc.collect(), gone())[1] is None)
    assert wait_until(lambda: channel.calls == 0)
    assert shop.calls[-1].ended.wait(WAIT_S)


@pytest.mark.parametrize("used", [False, True])
def test_calls_on_a_closed_channel_raise_as_with_grpc(world, channel, used):
    ways = ways_to_call(world, channel)
    for call in ways.values() if used else ():
        assert call() == b"ab"
    world.do(channel.close)
    world.do(channel.close)
    for call in (*ways.values(), *ways_to_call(world, channel).values()):
        with pytest.raises(world.closed_error, match=CLOSED):
            call()
    assert (channel.closed, channel.calls) == (True, 0)


def test_close_callbacks_are_called_once_although_one_raises(world, shop, channel, events):
    called = []
    call = hanging_call(world, shop, channel)
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: called.append(channel.closed))
    remove = channel.on_close(lambda: called.append("removed"))
    channel.on_close(lambda: called.append(call.grpc_call.done()))
    remove()
    remove()
    world.do(channel.close)
    world.do(channel.close)
    assert called == [True, False]
    assert call.code() is grpc.StatusCode.CANCELLED
    channel.on_close(lambda: called.append("late"))
    assert called == [True, False, "late"]
    (event,) = events
    assert (type(event), type(event.error)) == (CallbackFailed, ZeroDivisionError)
