"""`close` and `drain` of channels of grpc, and the exit of programs that close none."""

import subprocess
import sys
import weakref

import grpc
import pytest

from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.transport import ReconnectingChannel

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def channel(shop, timer):
    with ReconnectingChannel(shop.target, timer=timer) as channel:
        yield channel
    assert timer.pending == 0


def hanging(shop, channel):
    """A call that the server does not answer."""
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x")
    assert hang.begun.wait(WAIT_S)
    return running


# Closed


def test_close_cancels_the_calls_on_all_connections(shop, channel, timer):
    def begun():
        shop.then(silent := Silent())
        stream = channel.stream_stream(STREAM_STREAM)(iter([b"x"]))
        assert silent.begun.wait(WAIT_S)
        return [hanging(shop, channel), stream]

    old = begun()
    channel.reconnect(drain_timeout=60)
    calls = old + begun()
    assert (channel.calls, timer.pending) == (4, 1)
    channel.close()
    assert {(call.code().name, call.details()) for call in calls} == {
        ("CANCELLED", "Channel closed!")
    }
    assert timer.pending == 0
    assert wait_until(lambda: channel.calls == 0)


def test_close_callbacks_are_called_once(channel):
    notified = []
    channel.on_close(lambda: notified.append(1))
    forget = channel.on_close(lambda: notified.append(2))
    channel.on_close(lambda: notified.append(channel.closed))
    forget()
    forget()
    channel.close()
    channel.close()
    assert notified == [1, True]
    channel.on_close(lambda: notified.append(3))
    assert notified == [1, True, 3]


def test_the_channel_is_closed_although_a_close_callback_raises(shop):
    inner = []

    def connect(options):
        inner.append(grpc.insecure_channel(shop.target, options))
        return inner[-1]

    def callback():
        raise SystemExit

    channel = ReconnectingChannel("shop", connect=connect)
    call = channel.unary_unary(UNARY_UNARY)
    channel.on_close(callback)
    with pytest.raises(SystemExit):
        channel.close()
    for each in (inner[0].unary_unary(UNARY_UNARY), call):
        with pytest.raises(ValueError, match="closed channel"):
            each(b"x")


def test_the_other_close_callbacks_are_called_although_one_raises(channel, events):
    notified = []
    channel.on_close(lambda: 1 / 0)
    channel.on_close(lambda: notified.append(1))
    channel.close()
    assert notified == [1]
    (event,) = events
    assert (type(event).__name__, type(event.error)) == ("CallbackFailed", ZeroDivisionError)


def test_the_function_that_removes_a_callback_does_not_keep_the_channel_alive(shop):
    class Listener:
        def closed(self):
            pass

    channel, listener = ReconnectingChannel(shop.target), Listener()
    forget, gone = channel.on_close(listener.closed), weakref.ref(channel)
    kept = weakref.ref(listener)
    del channel
    assert wait_until(lambda: gone() is None)
    forget()
    del forget, listener
    assert wait_until(lambda: kept() is None)


# Retired


def test_drain_closes_a_channel_without_calls(channel):
    channel.drain()
    assert wait_until(lambda: channel.closed)
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    channel.drain(drain_timeout=1)
    assert channel.closed


def test_a_draining_channel_finishes_calls_and_refuses_new_ones(channel, shop):
    notified = []
    channel.on_close(lambda: notified.append(channel.calls))
    shop.then(silent := Silent(after=1))
    stream = channel.unary_stream(UNARY_STREAM)(b"ab")
    assert next(stream) == b"a"
    assert silent.begun.wait(WAIT_S)
    channel.drain(drain_timeout=30)
    call = channel.unary_unary(UNARY_UNARY)
    for begin in (call, call.future, channel.unary_stream(UNARY_STREAM)):
        with pytest.raises(ValueError, match="on closed channel"):
            begin(b"y")
    assert not channel.reconnect("late", force=True)
    assert (channel.calls, channel.closed, notified) == (1, False, [])
    shop.calls[0].ended.set()  # the server's handler continues and ends the call
    assert list(stream) == [b"b"]
    assert wait_until(lambda: (channel.closed, channel.calls, notified) == (True, 0, [0]))


def test_calls_end_with_the_reason_after_the_drain_timeout(channel, shop, timer):
    running = hanging(shop, channel)
    channel.drain(drain_timeout=5, reason="orders-1 is gone")
    timer.advance(4.9)
    assert not running.done()
    timer.advance(0.2)
    error = running.exception(timeout=WAIT_S)
    assert error.code() is UNAVAILABLE
    assert "channel drained: orders-1 is gone" in error.details()  # gRPC may add text
    assert wait_until(lambda: channel.closed)


def test_the_drain_timeout_applies_to_replaced_connections(channel, shop, timer):
    running = hanging(shop, channel)
    channel.reconnect("dead")  # no drain timeout
    channel.drain(drain_timeout=5)
    assert not channel.closed
    timer.advance(5.1)
    assert "connection replaced: dead" in running.exception(timeout=WAIT_S).details()
    assert wait_until(lambda: channel.closed)


def test_a_second_drain_can_shorten_the_timeout(channel, shop, timer):
    running = hanging(shop, channel)
    channel.drain(drain_timeout=50)
    channel.drain(drain_timeout=5)
    assert timer.pending == 1
    timer.advance(5.1)
    assert running.exception(timeout=WAIT_S).code() is UNAVAILABLE


def test_subscribers_do_not_delay_the_drain(channel):
    states = []
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: grpc.ChannelConnectivity.READY in states)
    channel.drain()
    assert wait_until(lambda: channel.closed)


def test_heartbeats_work_while_the_channel_drains_and_not_after(channel, shop):
    running = hanging(shop, channel)
    channel.drain()
    ping = channel.heartbeat_call(UNARY_UNARY)
    assert ping.future(b"p").result(WAIT_S) == b"p"
    running.cancel()
    assert wait_until(lambda: channel.closed)
    with pytest.raises(ValueError, match="closed channel"):
        ping.future(b"p")


# The exit of the interpreter

BEGIN = """
import sys, threading, time
import grpc
from rpcwheel.transport import ReconnectingChannel

def channel():
    return ReconnectingChannel(sys.argv[1], backoff=0)
"""

SUBSCRIBED = """
subscribed = channel()
subscribed.subscribe(lambda state: None, try_to_connect=True)
time.sleep(0.2)
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
    [SUBSCRIBED, OPEN, SUBSCRIBED_BY_THREADS],
    ids=["subscribed", "open", "by threads"],
)
def test_a_program_exits_although_its_channels_were_not_closed(shop, pytestconfig, program):
    """gRPC's polling thread is stopped at exit, and closing its channel waits for it."""
    run = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}{program}print('end')", shop.target],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert (run.stdout, run.stderr) == ("end\n", "")
