"""What only a channel of `grpc` has: threads, callbacks on gRPC's thread, exits without `close`."""

import gc
import threading
import weakref

import grpc.experimental
import pytest

from fixtures.exiting_process import STARTS_THREADS
from fixtures.grpcio import opaque
from fixtures.leaks import descriptors, no_garbage_collector
from fixtures.programs import run_program
from fixtures.shop import UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import wait_until
from fixtures.ways import hanging_call
from fixtures.worlds import only_sync
from rpcwheel.transport import ReconnectingChannel

pytestmark = [only_sync, pytest.mark.usefixtures("world")]


@pytest.fixture
def channel(reconnecting):
    """A channel to the shop."""
    return reconnecting


# Calls


def test_a_single_threaded_stream_is_counted_until_its_end(shop):
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


def test_a_dropped_channel_closes_its_sockets_without_a_collection(shop):
    before = descriptors()
    channel = ReconnectingChannel(shop.target)
    call = channel.unary_unary(UNARY_UNARY)
    call(b"x")
    channel.reconnect()
    call(b"x")
    with no_garbage_collector():  # without cycles
        del channel
        assert call(b"x") == b"x"  # a stub keeps the connection open, as with grpc
        assert descriptors() - before
        del call
        assert wait_until(lambda: not descriptors() - before)


def test_multicallables_created_for_each_call_are_freed(channel):
    """Interceptors of grpc create one for each call."""
    kept = []
    for number in range(700):

        def serialize(request):
            return request

        kept.append(weakref.ref(serialize))
        assert channel.unary_unary(UNARY_UNARY, serialize)(b"%d" % number) == b"%d" % number
    del serialize
    gc.collect()
    assert sum(one() is not None for one in kept) <= 512


# Replacing


def test_a_done_callback_may_reconnect(world, shop, channel):
    """It runs on gRPC's thread, which reports the end of all calls of a channel."""
    ran_on = []

    def replace(_):
        channel.reconnect("by a callback", drain_timeout=0)
        ran_on.append(threading.current_thread())

    call, other = (hanging_call(world, shop, channel) for _ in range(2))
    call.on_done(replace)
    shop.calls[0].ended.set()
    assert "connection replaced: by a callback" in other.error().details()
    assert wait_until(lambda: ran_on)
    assert ran_on != [threading.current_thread()]


def test_a_reason_that_is_not_valid_unicode_ends_calls(world, shop, channel):
    call = hanging_call(world, shop, channel)
    channel.reconnect("\udc80", drain_timeout=0)
    assert "connection replaced: \\udc80" in call.error().details()


def test_calls_on_a_channel_of_another_type_are_canceled(world, shop):
    with ReconnectingChannel(
        "x", connect=lambda given: opaque(grpc.insecure_channel(shop.target, given))
    ) as channel:
        call = hanging_call(world, shop, channel)
        channel.reconnect(drain_timeout=0)
        assert (call.code().name, call.details()) == ("CANCELLED", "Channel closed!")
        assert (channel.get_state(), channel.is_idle()) == (None, False)


# Closing


def test_subscribers_do_not_delay_the_drain(channel):
    states = []
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: grpc.ChannelConnectivity.READY in states)
    channel.drain()
    assert wait_until(lambda: channel.closed)


# The exit of the interpreter

BEGIN = """
import sys, threading, time
import grpc
from rpcwheel.transport import ReconnectingChannel

def channel():
    return ReconnectingChannel(sys.argv[1], backoff=0)
"""

OPEN = """
subscribed = channel()
subscribed.subscribe(lambda state: None, try_to_connect=True)
replaced = channel()
replaced.subscribe(lambda state: None, try_to_connect=True)
time.sleep(0.1)
replaced.reconnect(force=True)
replaced.reconnect(force=True)
ready = channel()
grpc.channel_ready_future(ready).result()
busy = channel()
call = busy.unary_stream("/test.Shop/UnaryStream")
streams = [call(b"ab"), call(b"ab")]
next(streams[0])
busy.reconnect(drain_timeout=60)
busy.unary_unary("/test.Shop/UnaryUnary").future(b"x")
busy.reconnect(drain_timeout=0)
"""

SUBSCRIBED_BY_THREADS = """
looked_at = channel()

def look():
    while True:
        try:
            grpc.channel_ready_future(looked_at).result(0.01)
        except grpc.FutureTimeoutError:
            pass
        looked_at.reconnect(force=True)

for _ in range(3):
    threading.Thread(target=look, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(OPEN, id="open"),
        pytest.param(SUBSCRIBED_BY_THREADS, id="by threads", marks=STARTS_THREADS),
    ],
)
def test_a_program_exits_although_its_channels_were_not_closed(shop, program):
    """gRPC's polling thread is stopped at exit, and closing its channel waits for it."""
    program = f"{BEGIN}{program}print('end')"
    assert run_program(program, shop.target) == ("end\n", "")
