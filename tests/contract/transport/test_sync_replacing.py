"""Calls of grpc in flight during a reconnect: they continue, or end with the reason."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.leaks import descriptors, wait_until_none
from fixtures.shop import (
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
    Silent,
)
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import ConnectionReplaced, ExecutorRejected
from rpcwheel.transport import ReconnectingChannel

MADE_BY_CLIENTS = {
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNKNOWN",
}
"""Statuses that gRPC may set without a server."""


@pytest.fixture
def channel(shop, timer):
    with ReconnectingChannel(shop.target, timer=timer) as channel:
        yield channel
    assert timer.pending == 0


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def failure(call):
    try:
        return call()
    except grpc.RpcError as error:
        words = error.details()  # unchanged, or with text of gRPC's core
        return error.code().name, re.sub(r"^Stream removed \((.*)\)$", r"\1", words)


def gated(gate, messages):
    """Requests, each sent when the gate allows one."""
    for message in messages:
        assert gate.acquire(timeout=WAIT_S)
        yield message


def begin(shop, channel, threads, name):
    """Start a call that hangs in the server; returns a function that waits for its end."""
    hang = Silent() if name in {"unary_stream", "stream_stream"} else Hang()
    shop.then(hang)
    unary, pushed = channel.unary_unary(UNARY_UNARY), channel.stream_unary(STREAM_UNARY)
    requests = iter([b"x"])
    match name:
        case "unary":
            ends = threads.submit(failure, lambda: unary(b"x")).result
        case "unary with_call":
            ends = threads.submit(failure, lambda: unary.with_call(b"x")).result
        case "unary future":
            call = unary.future(b"x")
            ends = lambda: failure(call.result)  # noqa: E731
        case "unary_stream":
            stream = channel.unary_stream(UNARY_STREAM)(b"x")
            ends = lambda: failure(lambda: list(stream))  # noqa: E731
        case "stream_unary":
            ends = threads.submit(failure, lambda: pushed(requests)).result
        case "stream_unary future":
            held = pushed.future(requests)
            ends = lambda: failure(held.result)  # noqa: E731
        case "stream_stream":
            both = channel.stream_stream(STREAM_STREAM)(requests)
            ends = lambda: failure(lambda: list(both))  # noqa: E731
    assert hang.begun.wait(WAIT_S)
    return ends


KINDS = [
    "unary",
    "unary with_call",
    "unary future",
    "unary_stream",
    "stream_unary",
    "stream_unary future",
    "stream_stream",
]


# Drain


def test_a_drain_timeout_of_zero_ends_calls_with_the_reason(shop, channel, threads, events):
    ends = {name: begin(shop, channel, threads, name) for name in KINDS}
    assert channel.reconnect("no answer for 3 s", drain_timeout=0)
    said = ("UNAVAILABLE", "connection replaced: no answer for 3 s")
    assert {name: end() for name, end in ends.items()} == dict.fromkeys(KINDS, said)
    assert wait_until(lambda: channel.calls == 0)
    assert wait_until(lambda: all(seen.ended.is_set() for seen in shop.calls))
    assert events == [ConnectionReplaced(channel.target, 2, "no answer for 3 s", len(KINDS))]


def test_calls_end_with_the_reason_after_the_drain_timeout(shop, channel, threads, timer):
    ends = {name: begin(shop, channel, threads, name) for name in KINDS}
    channel.reconnect("moved", drain_timeout=3)
    assert timer.pending == 1
    timer.advance(2.999)
    assert channel.unary_unary(UNARY_UNARY)(b"x") == b"x"
    assert wait_until(
        lambda: channel.calls == len(KINDS)
    )  # a response arrives before the end is reported
    timer.advance(0.001)
    said = ("UNAVAILABLE", "connection replaced: moved")
    assert {name: end() for name, end in ends.items()} == dict.fromkeys(KINDS, said)
    assert wait_until(lambda: channel.calls == 0)


@pytest.mark.parametrize("drain", [None, 60])
def test_calls_that_end_before_the_drain_timeout_are_not_affected(shop, channel, timer, drain):
    goes_on = threading.Semaphore(1)
    call = channel.stream_unary(STREAM_UNARY).future(gated(goes_on, [b"a", b"b"]))
    assert wait_until(lambda: shop.calls)
    channel.reconnect(drain_timeout=drain)
    assert timer.pending == (drain == 60)
    goes_on.release()
    assert call.result(WAIT_S) == b"ab"
    assert wait_until(lambda: (channel.calls, timer.pending) == (0, 0))


def test_a_stream_stays_on_its_connection_which_is_closed_when_it_ends(shop, channel, timer):
    before = descriptors()
    goes_on = threading.Semaphore(1)
    stream = channel.stream_stream(STREAM_STREAM)(gated(goes_on, [b"0", b"1", b"2"]))
    assert next(stream) == b"0"
    mine = descriptors() - before
    channel.reconnect(drain_timeout=60)
    assert channel.unary_unary(UNARY_UNARY)(b"x") == b"x"
    goes_on.release()
    assert next(stream) == b"1"
    assert wait_until(lambda: (channel.calls, timer.pending) == (1, 1))
    goes_on.release()
    assert list(stream) == [b"2"]
    assert stream.code() is grpc.StatusCode.OK
    assert wait_until(lambda: timer.pending == 0)  # no drain is left
    assert not wait_until_none(lambda: sorted(mine & descriptors()))
    stream_peer, other_peer = (seen.peer for seen in shop.calls)
    assert stream_peer != other_peer


def test_calls_end_at_once_if_the_timer_is_stopped(shop, timer, events):
    timer.stop()
    with ReconnectingChannel(shop.target, timer=timer) as channel:
        shop.then(hang := Hang())
        running = channel.unary_unary(UNARY_UNARY).future(b"x")
        assert hang.begun.wait(WAIT_S)
        assert channel.reconnect("why", drain_timeout=60)
        assert "connection replaced: why" in running.exception(WAIT_S).details()
    assert any(isinstance(event, ExecutorRejected) for event in events)


def test_each_reconnect_has_its_own_drain_timeout(shop, channel, threads, timer):
    first = begin(shop, channel, threads, "unary future")
    channel.reconnect("one", drain_timeout=5, force=True)
    second = begin(shop, channel, threads, "unary future")
    channel.reconnect("two", drain_timeout=2, force=True)
    assert timer.pending == 2
    timer.advance(2)
    assert second() == ("UNAVAILABLE", "connection replaced: two")
    timer.advance(3)
    assert first() == ("UNAVAILABLE", "connection replaced: one")


def test_a_done_callback_may_reconnect(shop, channel):
    """It runs on gRPC's thread, which reports the end of all calls of a channel."""
    hangs, ran_on, goes_on = Hang(), [], threading.Semaphore(0)

    def replace(_):
        channel.reconnect("by a callback", drain_timeout=0)
        ran_on.append(threading.current_thread())

    call = channel.stream_unary(STREAM_UNARY).future(gated(goes_on, [b"x"]))
    assert wait_until(lambda: shop.calls)
    shop.then(hangs)
    other = channel.unary_unary(UNARY_UNARY).future(b"y")
    assert hangs.begun.wait(WAIT_S)
    call.add_done_callback(replace)
    goes_on.release()
    assert failure(other.result) == ("UNAVAILABLE", "connection replaced: by a callback")
    assert wait_until(lambda: ran_on)
    assert ran_on != [threading.current_thread()]


def test_a_reason_that_is_not_valid_unicode_ends_calls(shop, channel, threads):
    ends = begin(shop, channel, threads, "unary")
    channel.reconnect("\udc80", drain_timeout=0)
    assert ends() == ("UNAVAILABLE", "connection replaced: \\udc80")


def test_calls_on_a_channel_of_another_type_are_canceled(shop, threads):
    with ReconnectingChannel("x", connect=lambda options: Hidden(shop.target, options)) as channel:
        ends = begin(shop, channel, threads, "unary")
        channel.reconnect(drain_timeout=0)
        assert ends() == ("CANCELLED", "Channel closed!")
        assert (channel.get_state(), channel.is_idle()) == (None, False)


class Hidden(grpc.Channel):
    """A channel of another type."""

    def __init__(self, target, options) -> None:
        self._inside = grpc.insecure_channel(target, options)
        for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(self, name, getattr(self._inside, name))

    def __getattribute__(self, name):
        mine = {"_inside", "__dict__", "__class__"}
        inside = object.__getattribute__(self, "__dict__").get("_inside")
        if name in mine or inside is None or name.startswith("_"):
            return object.__getattribute__(self, name)
        return getattr(inside, name)

    unary_unary = unary_stream = stream_unary = stream_stream = None
    subscribe = unsubscribe = close = __enter__ = __exit__ = None


# What was read and written


def test_messages_stamp_the_activity_of_their_connection(shop, channel, timer):
    seen = channel.activity
    assert (seen.last_read_ns, seen.last_write_ns, seen.last_use_ns) == (None, None, None)
    timer.advance(1)
    goes_on = threading.Semaphore(1)
    stream = channel.stream_stream(STREAM_STREAM)(gated(goes_on, [b"x", b"y"]))
    next(stream)
    first_ns = seen.last_write_ns
    assert seen.last_read_ns == first_ns == seen.last_use_ns
    timer.advance(1)
    channel.reconnect()
    goes_on.release()
    next(stream)
    assert seen.last_read_ns == seen.last_write_ns == first_ns + 1_000_000_000
    assert channel.activity is not seen
    assert channel.activity.last_use_ns is None
    assert list(stream) == []


def test_only_a_status_that_no_client_sets_is_a_read(shop, channel):
    read = {}
    for code in grpc.StatusCode:
        if code is grpc.StatusCode.OK:
            continue
        channel.reconnect(force=True)
        shop.then(Fail(code))
        assert failure(lambda: channel.unary_unary(UNARY_UNARY)(b"x"))[0] == code.name
        read[code.name] = channel.activity.last_read_ns is not None
        assert channel.activity.last_write_ns is not None
    assert {name for name, seen in read.items() if not seen} == MADE_BY_CLIENTS


def test_a_failure_in_the_client_is_not_a_read(shop, channel):
    def requests():
        yield b"x"
        raise KeyError("the user's")

    assert failure(lambda: channel.stream_unary(STREAM_UNARY)(requests()))[0] == "UNKNOWN"
    assert channel.activity.last_read_ns is None


def test_a_heartbeat_is_neither_use_nor_a_call_in_flight(shop, channel):
    beat = channel.heartbeat_call(UNARY_UNARY)
    shop.then(hang := Hang())
    call = beat.future(b"x")
    assert hang.begun.wait(WAIT_S)
    assert channel.calls == 0
    assert channel.reconnect(drain_timeout=None)  # no call in flight: it is closed at once
    assert failure(call.result)[0] in {"UNAVAILABLE", "CANCELLED"}
    assert (beat(b"x"), beat.with_call(b"y")[0], beat.future(b"z").result()) == (b"x", b"y", b"z")
    assert channel.activity.last_use_ns is None
    assert len({seen.peer for seen in shop.calls}) == 2
    channel.close()
    with pytest.raises(ValueError, match="closed"):
        beat(b"x")
