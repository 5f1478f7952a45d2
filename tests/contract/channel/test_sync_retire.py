"""A retired channel takes no more calls, lets its own end, and closes itself."""

import grpc
import pytest

from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.channel import ReconnectingChannel
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError


@pytest.fixture
def channel(shop, timer):
    with ReconnectingChannel(shop.target, timer=timer) as channel:
        yield channel
    assert timer.pending == 0


def test_an_idle_channel_closes_itself_at_once(channel):
    channel.retire()
    assert wait_until(lambda: channel.closed)
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_calls_that_begin_later_raise_as_on_a_closed_channel(channel, shop):
    hang = Hang()
    shop.then(hang)
    call = channel.unary_unary(UNARY_UNARY)
    running = call.future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    channel.retire()
    assert not channel.closed
    for begin in (call, call.future, channel.unary_stream(UNARY_STREAM)):
        with pytest.raises(ValueError, match="on closed channel"):
            begin(b"y")
    running.cancel()
    assert wait_until(lambda: channel.closed)


def test_calls_in_flight_end_as_if_nothing_had_happened(channel, shop):
    silent = Silent(after=1)
    shop.then(silent)
    stream = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    assert next(stream) == b"a"
    channel.retire(drain=30)
    assert channel.calls == 1
    assert not channel.closed
    assert not channel.replace("late", force=True)
    stream.cancel()
    assert wait_until(lambda: channel.closed)
    assert wait_until(lambda: channel.calls == 0)


def test_when_the_time_is_over_calls_end_as_unavailable_with_the_reason(channel, shop, timer):
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    channel.retire(drain=5, reason="orders-1 is gone")
    timer.advance(4.9)
    assert not running.done()
    timer.advance(0.2)
    error = running.exception(timeout=WAIT_S)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "channel retired: orders-1 is gone" in error.details()  # core may add its own words
    assert wait_until(lambda: channel.closed)


def test_a_connection_that_was_replaced_before_ends_by_then_too(channel, shop, timer):
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    channel.replace("dead")  # may take as long as it takes
    channel.retire(drain=5)
    assert not channel.closed
    timer.advance(5.1)
    assert "connection replaced: dead" in running.exception(timeout=WAIT_S).details()
    assert wait_until(lambda: channel.closed)


def test_asked_again_the_time_can_become_shorter(channel, shop, timer):
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    channel.retire(drain=50)
    channel.retire(drain=5)
    assert timer.pending == 1
    timer.advance(5.1)
    assert running.exception(timeout=WAIT_S).code() is grpc.StatusCode.UNAVAILABLE


def test_who_waits_for_the_end_is_told_when_it_has_come(channel, shop):
    told = []
    channel.on_close(lambda: told.append(channel.calls))
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    channel.retire()
    assert told == []
    running.cancel()
    assert wait_until(lambda: told == [0])


def test_who_subscribes_does_not_hold_it_up(channel, shop):
    states = []
    channel.subscribe(states.append, try_to_connect=True)
    assert wait_until(lambda: grpc.ChannelConnectivity.READY in states)
    channel.retire()
    assert wait_until(lambda: channel.closed)


def test_a_heartbeat_goes_on_while_it_drains_and_not_after(channel, shop):
    shop.then(hang := Hang())
    running = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    assert hang.begun.wait(20)
    channel.retire()
    ping = channel.heartbeat_call(UNARY_UNARY)
    assert ping.future(b"p", timeout=WAIT_S).result() == b"p"
    running.cancel()
    assert wait_until(lambda: channel.closed)
    with pytest.raises(ValueError, match="closed channel"):
        ping.future(b"p", timeout=WAIT_S)


def test_a_closed_channel_is_retired_without_an_effect(channel):
    channel.close()
    channel.retire(drain=1)
    assert channel.closed


@pytest.mark.parametrize(("drain", "error"), [(-1, ConfigurationError), ("1", TypeError)])
def test_a_wrong_time_changes_nothing(channel, drain, error):
    with pytest.raises(error, match="drain"):
        channel.retire(drain)
    assert channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S) == b"x"


def test_between_the_last_call_and_the_close_a_heartbeat_raises_too(channel):
    channel._switch.links.retire(NEVER)  # what `retire` does first
    with pytest.raises(ValueError, match="closed channel"):
        channel.heartbeat_call(UNARY_UNARY).future(b"p", timeout=WAIT_S)
