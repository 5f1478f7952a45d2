"""Calls in flight during a reconnect: they continue, or end with the reason."""

import re
import threading

import grpc
import pytest

from fixtures.leaks import descriptors, opened_since, wait_until_none
from fixtures.shop import Hang
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.ways import all_at_once, hanging_call, ways_to_call
from fixtures.worlds import KINDS
from rpcwheel.events import ConnectionReplaced, ExecutorRejected


def reason_of(call):
    """The status of a call that has failed; gRPC's core may have added text to the details."""
    error = call.error()
    return error.code().name, without_text_of_grpc(error.details())


def without_text_of_grpc(details):
    return re.sub(r"^Stream removed \((.*)\)$", r"\1", details)


@pytest.mark.parametrize("drain", [0, 3.0])
def test_calls_end_with_the_reason_after_the_drain_timeout(
    world, shop, reconnecting, timer, events, drain
):
    count = len(ways_to_call(world, reconnecting))
    shop.then(*(hangs := [Hang() for _ in range(count)]))

    def replace():
        assert all(hang.begun.wait(WAIT_S) for hang in hangs)
        assert world.do(reconnecting.reconnect, "no answer", drain_timeout=drain)
        if drain:
            assert timer.pending == 1
            timer.advance(2.9)
            assert world.call(reconnecting).result() == b"x"
            assert wait_until(lambda: reconnecting.calls == count)
            timer.advance(0.2)

    ends = all_at_once(world, reconnecting, replace).values()
    assert {(code, without_text_of_grpc(details)) for code, details in ends} == {
        ("UNAVAILABLE", "connection replaced: no answer")
    }
    assert wait_until(lambda: reconnecting.calls == 0)
    assert wait_until(lambda: all(seen.ended.is_set() for seen in shop.calls))
    assert events == [ConnectionReplaced(shop.target, 2, "no answer", count)]


@pytest.mark.parametrize("drain", [None, 60])
def test_calls_stay_on_their_connection_which_is_closed_when_they_end(
    world, shop, open_reconnecting, timer, drain
):
    made = []

    def connect(options):
        made.append(world.grpc.insecure_channel(shop.target, options=options))
        return made[-1]

    channel = open_reconnecting(connect=connect)
    calls = [hanging_call(world, shop, channel, kind) for kind in KINDS]
    stream = world.call(channel, "stream_stream", open_requests=True)
    stream.write(b"0")
    assert stream.read() == b"0"
    world.do(channel.reconnect, drain_timeout=drain)
    if drain is None:
        timer.advance(10**6)
    assert world.call(channel).result() == b"x"
    assert wait_until(lambda: channel.calls == len(KINDS) + 1)
    assert timer.pending == (drain == 60)
    for seen in shop.calls:
        seen.ended.set()  # the server's handlers continue and end the calls
    for call in calls:
        assert call.result() in (b"x", [b"x"])
    stream.write(b"1")
    assert stream.read() == b"1"
    assert channel.calls == 1
    stream.done_writing()
    assert stream.read() is None
    assert wait_until(lambda: (channel.calls, timer.pending) == (0, 0))
    *old, new = (seen.peer for seen in shop.calls)
    assert len(set(old)) == 1
    assert new not in old

    def is_closed():
        try:
            world.call(made[0]).result()
        except world.closed_error:
            return True
        except (grpc.RpcError, world.canceled_error):  # it is being closed
            return False
        return False

    assert wait_until(is_closed)


def test_each_reconnect_has_its_own_drain_timeout(world, shop, reconnecting, timer):
    first = hanging_call(world, shop, reconnecting)
    world.do(reconnecting.reconnect, "one", drain_timeout=5, force=True)
    second = hanging_call(world, shop, reconnecting)
    world.do(reconnecting.reconnect, "two", drain_timeout=2, force=True)
    assert timer.pending == 2
    timer.advance(2)
    assert reason_of(second) == ("UNAVAILABLE", "connection replaced: two")
    timer.advance(3)
    assert reason_of(first) == ("UNAVAILABLE", "connection replaced: one")


def test_calls_end_at_once_if_the_timer_is_stopped(world, shop, open_reconnecting, timer, events):
    timer.stop()
    channel = open_reconnecting()
    call = hanging_call(world, shop, channel)
    assert world.do(channel.reconnect, "why", drain_timeout=60)
    assert reason_of(call) == ("UNAVAILABLE", "connection replaced: why")
    assert any(isinstance(event, ExecutorRejected) for event in events)


def test_without_a_timer_the_shared_timer_ends_the_drain(world, shop, open_reconnecting):
    channel = open_reconnecting(timer=None)
    call = hanging_call(world, shop, channel)
    world.do(channel.reconnect, "why", drain_timeout=0.05)
    assert reason_of(call) == ("UNAVAILABLE", "connection replaced: why")


def test_calls_during_many_reconnects_succeed_and_are_sent_once(world, shop, open_reconnecting):
    channel = open_reconnecting(backoff=0)
    ways, made, wrong, over = ways_to_call(world, channel).values(), [], [], threading.Event()
    before = descriptors()

    def call_on():
        while not over.is_set():
            for call in ways:
                try:
                    assert call() == b"ab"
                except BaseException as error:  # noqa: BLE001
                    wrong.append(error)
                made.append(1)

    calling = [in_thread(call_on) for _ in range(8)]
    for _ in range(45):
        count = len(made)
        assert wait_until(lambda count=count: len(made) > count)
        assert world.do(channel.reconnect, "to and fro", force=True)
    over.set()
    for one in calling:
        one.result(WAIT_S)
    assert (wrong, channel.number) == ([], 46)
    assert wait_until(lambda: channel.calls == 0)
    assert len(shop.calls) == len(made) > 45
    # At most eight of nine reconnects in a row can wait for calls that had started before.
    assert len({seen.peer for seen in shop.calls}) > 4
    world.do(channel.close)
    assert not wait_until_none(lambda: opened_since(before))
