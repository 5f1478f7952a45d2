"""`close` and `drain` of channels."""

import gc
import weakref

import grpc
import pytest

from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from fixtures.ways import hanging_call, ways_to_call
from fixtures.worlds import KINDS, Stop

CLOSED = "closed|drained"


def details_of(call):
    error = call.error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    return error.details()


# Closed


def test_close_cancels_the_calls_on_all_connections(world, shop, reconnecting, timer):
    calls = [hanging_call(world, shop, reconnecting, kind) for kind in KINDS]
    world.do(reconnecting.reconnect, drain_timeout=60)
    calls += [hanging_call(world, shop, reconnecting, kind) for kind in KINDS]
    assert (reconnecting.calls, timer.pending) == (8, 1)
    world.do(reconnecting.close)
    assert {call.code().name for call in calls} == {"CANCELLED"}
    assert timer.pending == 0
    assert wait_until(lambda: reconnecting.calls == 0)


def test_the_channel_is_closed_although_a_close_callback_ends_the_thread(world, shop, reconnecting):
    def callback():
        raise Stop

    call = hanging_call(world, shop, reconnecting)
    reconnecting.on_close(callback)
    with pytest.raises(Stop):
        world.do(reconnecting.close)
    assert call.code() is grpc.StatusCode.CANCELLED


def test_close_closes_all_connections_although_one_raises(world, shop, open_reconnecting):
    made = []

    def connect(options):
        made.append(world.grpc.insecure_channel(shop.target, options))
        return made[-1]

    def broken(*_):
        raise OSError("the user's")

    channel = open_reconnecting(connect=connect)
    calls = []
    for _ in range(3):
        calls.append(hanging_call(world, shop, channel))
        world.do(channel.reconnect, force=True)
    made[0].close, close = broken, made[0].close
    with pytest.raises(OSError, match="the user's"):
        world.do(channel.close)
    world.do(close)
    assert {call.code().name for call in calls} == {"CANCELLED"}


def test_a_dropped_channel_is_freed_although_a_callback_can_be_removed(world, shop):
    class Listener:
        def closed(self):
            pass

    listener = Listener()
    channel = world.do(world.module("transport").ReconnectingChannel, shop.target)
    forget, gone = channel.on_close(listener.closed), weakref.ref(channel)
    kept = weakref.ref(listener)
    del channel
    assert wait_until(lambda: (world.do(gc.collect), gone())[1] is None)
    forget()
    del forget, listener
    assert wait_until(lambda: (gc.collect(), kept())[1] is None)


# Drained


def test_drain_closes_a_channel_without_calls(world, reconnecting):
    world.call(reconnecting).result()
    assert wait_until(lambda: reconnecting.calls == 0)
    world.do(reconnecting.drain, 30.0)
    assert wait_until(lambda: reconnecting.closed)
    assert not world.do(reconnecting.reconnect, force=True)
    world.do(reconnecting.drain, drain_timeout=1)
    assert world.do(reconnecting.get_state) is grpc.ChannelConnectivity.SHUTDOWN


def test_a_draining_channel_finishes_calls_and_refuses_new_ones(world, shop, reconnecting, timer):
    calls = [hanging_call(world, shop, reconnecting, kind) for kind in KINDS]
    notified, ways = [], ways_to_call(world, reconnecting)
    reconnecting.on_close(lambda: notified.append(reconnecting.calls))
    world.do(reconnecting.drain)
    for call in ways.values():
        with pytest.raises(world.closed_error, match=CLOSED):
            call()
    assert not world.do(reconnecting.reconnect, "late", force=True)
    assert (reconnecting.calls, reconnecting.closed) == (len(KINDS), False)
    assert (timer.pending, notified) == (0, [])
    for seen in shop.calls:
        seen.ended.set()  # the server's handlers continue and end the calls
    for call in calls:
        assert call.result() in (b"x", [b"x"])
    assert wait_until(lambda: (reconnecting.closed, notified) == (True, [0]))
    assert reconnecting.calls == 0


@pytest.mark.parametrize(
    ("given", "reason"), [({}, "asked for"), ({"reason": "orders-1 is gone"}, "orders-1 is gone")]
)
@pytest.mark.parametrize("drain", [0, 5])
def test_calls_end_with_the_reason_after_the_drain_timeout(
    world, shop, reconnecting, timer, drain, given, reason
):
    calls = [hanging_call(world, shop, reconnecting, kind) for kind in KINDS]
    world.do(reconnecting.drain, drain, **given)
    if drain:
        timer.advance(4.9)
        assert not any(call.done() for call in calls)
        timer.advance(0.2)
    for call in calls:
        assert f"channel drained: {reason}" in details_of(call)
    assert wait_until(lambda: (reconnecting.closed, reconnecting.calls) == (True, 0))
    assert all(seen.ended.wait(WAIT_S) for seen in shop.calls)


def test_a_second_drain_can_only_shorten_the_timeout(world, shop, reconnecting, timer):
    call = hanging_call(world, shop, reconnecting)
    for drain in (None, 9.0, 2.0, 60.0):
        world.do(reconnecting.drain, drain, reason=f"within {drain}")
    assert timer.pending == 1
    timer.advance(2.1)
    assert "channel drained: within None" in details_of(call)


def test_close_ends_a_drain(world, shop, reconnecting, timer):
    call = hanging_call(world, shop, reconnecting)
    world.do(reconnecting.drain, 60.0)
    world.do(reconnecting.close)
    assert call.code() is grpc.StatusCode.CANCELLED
    assert wait_until(lambda: (reconnecting.calls, timer.pending) == (0, 0))
    world.do(reconnecting.drain, 1.0)
    assert reconnecting.closed


def test_heartbeats_work_while_the_channel_drains_and_not_after(world, shop, reconnecting):
    running = hanging_call(world, shop, reconnecting)
    world.do(reconnecting.drain)
    ping = reconnecting.heartbeat_call(UNARY_UNARY)
    assert world.do(ping, b"p") == b"p"
    running.cancel()
    assert wait_until(lambda: reconnecting.closed)
    with pytest.raises(world.closed_error, match=CLOSED):
        world.do(ping, b"p")
