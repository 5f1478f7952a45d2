"""Calls of `grpc` that begin while no subchannel is READY: blocked threads, futures, workers."""

import gc
import os
import threading
import time

import grpc
import pytest

from fixtures.balanced_channels import connect, instance, wait_until_lost
from fixtures.forks import holds_in_child
from fixtures.shop import UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.ways import hanging_call
from fixtures.worlds import only_sync
from rpcwheel._concurrency import executor
from rpcwheel.balancer import RingHash

NO_LIMIT = {"pick_timeout": 3600}

HELD = pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"], ids=["future", "stream"])

pytestmark = [only_sync, pytest.mark.usefixtures("world")]


def block(channel, **options):
    return channel.unary_unary(UNARY_UNARY)(b"ab", **options)


class Counting(RingHash):
    """Picks no subchannel, and records when it was asked."""

    def __init__(self):
        super().__init__("x-user")
        self.asked_s = []

    def prepare(self, subchannels, weights):
        return lambda *_: self.asked_s.append(time.monotonic())


def test_the_wait_of_a_blocked_call_counts_towards_its_timeout(shops, open_balanced, set_limit):
    set_limit("balancer.channel.WAKE_INTERVAL_S", 2 * WAIT_S)  # a worker reads the states
    channel = open_balanced(1, lb_policy=(picker := Counting()), policy=NO_LIMIT)
    blocked = in_thread(block, channel, timeout=90)
    assert wait_until(lambda: picker.asked_s and picker.asked_s[-1] > picker.asked_s[0] + 0.3)
    picker.prepare = lambda subchannels, weights: lambda *_: subchannels[0]
    channel.update([instance(shops[0])])
    assert blocked.result(WAIT_S) == b"ab"
    assert shops[0].calls[0].time_remaining < 90 - 0.1  # gRPC rounds to tenths


@HELD
def test_a_future_or_stream_is_returned_at_once_and_begins_later(world, shops, open_balanced, kind):
    channel, called = open_balanced(policy=NO_LIMIT), []
    call = world.call(channel, kind, b"ab").grpc_call
    assert not call.done()
    assert call.is_active()
    call.add_done_callback(called.append)
    assert call.add_callback(lambda: called.append(None))
    call.add_done_callback("no function".join)
    channel.update([instance(shops[0])])
    assert (call.result(WAIT_S) if kind == "unary_unary" else b"".join(call)) == b"ab"
    assert call.code() is grpc.StatusCode.OK
    assert wait_until(lambda: len(called) == 2)
    assert call in called
    assert not call.add_callback(print)


@HELD
def test_a_dropped_future_or_stream_is_canceled(world, shops, open_balanced, kind):
    channel = open_balanced(policy=NO_LIMIT)
    world.call(channel, kind)
    gc.collect()
    shops[0].then(hang := Hang() if kind == "unary_unary" else Silent())
    channel.update([instance(shops[0])])
    connect(world, channel)
    call = world.call(channel, kind)
    assert hang.begun.wait(WAIT_S)
    del call
    assert wait_until(lambda: (gc.collect(), channel.calls == 0)[1])
    assert wait_until(shops[0].calls[0].ended.is_set)
    assert len(shops[0].calls) == 1


def test_the_wait_for_a_result_may_have_a_timeout(world, open_balanced):
    call = world.call(open_balanced(policy=NO_LIMIT)).grpc_call
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(timeout=0.01)


def test_blocked_calls_need_no_worker(shops, open_balanced, monkeypatch, set_limit):
    set_limit("balancer.channel.WAKE_INTERVAL_S", 0.01)

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(executor._Thread, "start", start)
    assert block(open_balanced(shops[0])) == b"ab"


@pytest.mark.parametrize("options", [{}, {"timeout": 0.05}])
def test_a_done_callback_may_make_a_blocking_call_while_no_server_can_be_reached(
    world, shops, open_balanced, options
):
    channel, ends = open_balanced(shops[0]), []
    connect(world, channel)

    def call_again(_):
        wait_until_lost(world, channel, shops[0])
        with pytest.raises(grpc.RpcError) as caught:
            block(channel, **options)
        ends.append(caught.value.code().name)

    call = hanging_call(world, shops[0], channel)
    call.on_done(call_again)
    shops[0].kill()
    assert wait_until(lambda: ends)
    # On a busy machine, the deadline may pass before the connection is refused.
    assert ends == ["UNAVAILABLE"] or (options and ends == ["DEADLINE_EXCEEDED"])


def test_a_forked_child_connects_although_a_thread_of_its_parent_does(world, shops, open_balanced):
    begun, gate, connected = threading.Event(), threading.Event(), []

    def connect(one, options):
        connected.append(os.getpid())
        begun.set()
        if os.getpid() == parent:
            gate.wait(WAIT_S)
        raise OSError("no connection")

    parent = os.getpid()
    channel = open_balanced(shops[0], connect=connect, policy=NO_LIMIT)
    thread = threading.Thread(target=world.call, args=[channel])
    thread.start()
    assert begun.wait(WAIT_S)

    def connects():
        call = world.call(channel)
        return wait_until(lambda: os.getpid() in connected) and call.cancel() is not None

    assert holds_in_child(connects)
    gate.set()
    thread.join(WAIT_S)


def test_a_call_of_a_forked_child_ends_while_one_of_its_parent_waits(world, open_balanced):
    channel = open_balanced(policy={"pick_timeout": 0.05})
    call_of_parent = world.call(channel, wait_for_ready=True)

    def is_ended_by_pick_timeout():
        call = world.call(channel)
        return wait_until(call.done) and call.code() is grpc.StatusCode.UNAVAILABLE

    assert holds_in_child(is_ended_by_pick_timeout)
    call_of_parent.cancel()
