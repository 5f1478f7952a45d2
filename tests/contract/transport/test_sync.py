"""A channel for threads is a channel of grpc in every respect, before and after a replacement."""

import contextlib
import gc
import inspect
import threading
import weakref

import grpc
import pytest
from tenacity import wait_exponential

import rpcwheel
from fixtures.leaks import descriptors
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import ConnectionReplaced
from rpcwheel.transport import ReconnectingChannel


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


STYLES = {
    "bare": lambda channel: channel,
    "intercepted by grpc": lambda channel: grpc.intercept_channel(channel, Note(), Note()),
    "intercepted by us": lambda channel: rpcwheel.intercept_channel(
        channel, rpcwheel.CallPolicy(retry=rpcwheel.RetryPolicy(retry_on={"UNAVAILABLE"}))
    ),
    "by a kit": lambda channel: grpc.intercept_channel(
        channel, *rpcwheel.Kit(timeout=WAIT_S).client_interceptors()
    ),
}


ARGUMENTS = inspect.signature(grpc.insecure_channel("127.0.0.1:1").unary_unary).parameters
REGISTERED = {"_registered_method": True} if "_registered_method" in ARGUMENTS else {}
"""What stubs that grpcio-tools generates say since 1.63."""


def members(channel):
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


@pytest.fixture
def channel(shop, timer):
    with ReconnectingChannel(shop.target, timer=timer) as channel:
        yield channel
    assert timer.pending == 0


# Calls


@pytest.mark.parametrize("style", STYLES)
def test_a_stub_made_before_a_replacement_works_after_it_on_another_connection(
    shop, channel, style
):
    calls = members(STYLES[style](channel))
    for number in (1, 2, 3):
        assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, b"ab")
        assert channel.number == number
        assert channel.reconnect(force=True)
    peers = [seen.peer for seen in shop.calls]
    assert len(peers) == 24
    assert [len(set(peers[at : at + 8])) for at in (0, 8, 16)] == [1, 1, 1]
    assert len(set(peers)) == 3
    assert wait_until(lambda: channel.calls == 0)


def test_what_grpc_takes_is_handed_on(shop, channel):
    call = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode, **REGISTERED)
    assert call("x", WAIT_S, (("key", "value"),), None, True, grpc.Compression.Gzip) == "x"
    answer, running = call.with_call("x", metadata=(("key", "value"),), wait_for_ready=True)
    assert (answer, running.code()) == ("x", grpc.StatusCode.OK)
    assert [seen.metadata["key"] for seen in shop.calls] == ["value", "value"]
    assert 0 < shop.calls[0].time_remaining <= WAIT_S + 1
    channel.reconnect()
    assert call("y") == "y"
    generated = channel.unary_unary(
        UNARY_UNARY,
        request_serializer=str.encode,
        response_deserializer=bytes.decode,
        **REGISTERED,
    )
    assert generated("z") == "z"


def test_a_request_that_can_not_be_made_into_bytes_fails_as_with_grpc(channel):
    def refuse(_):
        raise ValueError("no")

    for call in (
        lambda: channel.unary_unary(UNARY_UNARY, refuse)(b"x"),
        lambda: channel.unary_unary(UNARY_UNARY, refuse).future(b"x"),
        lambda: channel.unary_stream(UNARY_STREAM, refuse)(b"x"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert channel.calls == 0


def test_a_closed_channel_refuses_calls_as_grpc_does(channel):
    calls = members(channel)
    calls["unary"]()
    channel.close()
    channel.close()
    for call in (*calls.values(), *members(channel).values()):
        with pytest.raises(ValueError, match="Cannot invoke RPC on closed channel!"):
            call()
    assert (channel.closed, channel.calls, channel.reconnect(force=True)) == (True, 0, False)


def test_a_stream_that_its_user_drops_is_cancelled(shop, channel):
    stream = channel.stream_stream(STREAM_STREAM)(iter(lambda: b"x", None))
    assert (next(stream), channel.calls) == (b"x", 1)
    del stream
    assert wait_until(lambda: shop.calls[0].ended.is_set() and channel.calls == 0)


def test_a_single_threaded_stream_is_counted_to_its_end(shop):
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
    with ReconnectingChannel(shop.target, options=[option]) as channel:
        for end in ("dropped", "cancelled", "read"):
            stream = channel.unary_stream(UNARY_STREAM)(b"abc")
            assert type(stream).__name__ == "_SingleThreadedRendezvous"
            assert (next(stream), channel.calls) == (b"a", 1)
            if end == "read":
                assert (list(stream), channel.calls) == ([b"b", b"c"], 0)
            if end == "cancelled":
                stream.cancel()
            del stream
            assert wait_until(lambda: channel.calls == 0), end


# What it is made of


def test_each_connection_is_made_in_the_users_way(shop):
    made = []

    def connect(options):
        made.append(options)
        return grpc.intercept_channel(grpc.insecure_channel(shop.target, options), Note())

    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 0)]
    with ReconnectingChannel("shop", options=options, connect=connect) as channel:
        calls = members(channel)
        for _ in range(2):
            assert {call() for call in calls.values()} == {b"ab"}
            channel.reconnect()
        assert channel.get_state() is not None
        assert wait_until(lambda: channel.calls == 0)
    assert made == [[("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]] * 3
    assert made[0] is not made[1]
    assert channel.target == "shop"


def test_a_connection_may_have_credentials(shop):
    with (
        ReconnectingChannel(shop.target, grpc.ssl_channel_credentials()) as channel,
        pytest.raises(grpc.RpcError, match=r"handshake|SSL|TLS"),  # the server knows none
    ):
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)


def test_connect_that_raises_changes_nothing(shop, events):
    broken = []

    def connect(options):
        if broken:
            raise OSError("no such host")
        return grpc.insecure_channel(shop.target, options)

    with ReconnectingChannel("shop", connect=connect) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        call(b"x")
        broken.append(True)
        with pytest.raises(OSError, match="no such host"):
            channel.reconnect()
        assert (call(b"x"), channel.number, events) == (b"x", 1, [])
        broken.clear()
        assert channel.reconnect()
    assert len({seen.peer for seen in shop.calls}) == 1


def test_connect_has_to_make_a_new_channel_of_grpc(shop):
    with grpc.insecure_channel(shop.target) as one:
        with ReconnectingChannel("shop", connect=lambda _: one) as channel:
            with pytest.raises(ConfigurationError, match="new channel each time"):
                channel.reconnect()
            assert channel.unary_unary(UNARY_UNARY)(b"x") == b"x"
        with pytest.raises(TypeError, match=r"connect must return a new grpc.Channel, not None"):
            ReconnectingChannel("shop", connect=lambda _: None)


def test_connect_has_to_make_no_channel_that_still_drains(shop):
    goes_on, made = threading.Event(), []

    def connect(options):
        made.append(made[0] if len(made) == 2 else grpc.insecure_channel(shop.target, options))
        return made[-1]

    def requests():
        yield b"x"
        assert goes_on.wait(WAIT_S)

    with ReconnectingChannel("shop", connect=connect) as channel:
        call = channel.stream_unary(STREAM_UNARY).future(requests())
        channel.reconnect()
        with pytest.raises(ConfigurationError, match="new channel each time"):
            channel.reconnect(force=True)
        goes_on.set()
        assert call.result(WAIT_S) == b"x"
        assert wait_until(lambda: channel.calls == 0)
        assert channel.unary_unary(UNARY_UNARY)(b"x") == b"x"


# Replacing


def test_a_replacement_is_told(channel, events):
    assert channel.reconnect("it was silent")
    assert events == [ConnectionReplaced(channel.target, 2, "it was silent", 0)]


def test_the_backoff_holds_off_replacements_of_what_never_answered(shop, timer, events):
    backoff = wait_exponential(multiplier=1, max=60)
    with ReconnectingChannel(shop.target, timer=timer, backoff=backoff) as channel:
        assert [channel.reconnect() for _ in range(3)] == [True, False, False]
        timer.advance(1.999)
        assert not channel.reconnect()
        timer.advance(0.001)
        assert [channel.reconnect(), channel.reconnect()] == [True, False]
        assert channel.reconnect(force=True)
        channel.unary_unary(UNARY_UNARY)(b"x")
        assert [channel.reconnect(), channel.reconnect()] == [True, False]
        timer.advance(1.0)  # it worked in between: the wait begins anew
        assert channel.reconnect()
    assert [event.number for event in events] == [2, 3, 4, 5, 6]


def test_a_dropped_channel_closes_its_sockets_without_the_collector(shop):
    before = descriptors()
    channel = ReconnectingChannel(shop.target)
    call = channel.unary_unary(UNARY_UNARY)
    call(b"x")
    channel.reconnect()
    call(b"x")
    gc.disable()  # there is no cycle
    try:
        del channel
        assert call(b"x") == b"x"  # as with grpc, a stub keeps the connection
        assert descriptors() - before
        del call
        assert wait_until(lambda: not descriptors() - before)
    finally:
        gc.enable()


def test_multi_callables_made_for_each_call_do_not_pile_up(channel):
    """Interceptors of grpc make one for each call."""
    kept = []
    for number in range(700):

        def serialize(request):
            return request

        kept.append(weakref.ref(serialize))
        assert channel.unary_unary(UNARY_UNARY, serialize)(b"%d" % number) == b"%d" % number
    del serialize
    gc.collect()
    assert sum(one() is not None for one in kept) <= 512


def test_it_says_what_it_is(shop, channel):
    name = f"<ReconnectingChannel to {shop.target!r}"
    assert repr(channel) == f"{name}, connection 1, IDLE, calls in flight: 0>"
    channel.reconnect()
    channel.unary_unary(UNARY_UNARY)(b"x")
    assert repr(channel) == f"{name}, connection 2, READY, calls in flight: 0>"
    channel.close()
    assert "SHUTDOWN" in repr(channel)


def test_a_call_is_never_made_with_what_was_made_of_a_closed_channel(channel):
    """`_registered_method` on a closed channel of grpcio 1.85 ends the whole process."""
    for _ in range(50):
        call = channel.unary_unary(UNARY_UNARY, **REGISTERED)
        channel.reconnect(force=True, drain_timeout=0)
        assert call(b"x") == b"x"
    channel.close()
    with contextlib.suppress(ValueError):
        channel.unary_unary(UNARY_UNARY, **REGISTERED)(b"x")
