"""Calls of a balanced channel: each is sent on one READY subchannel."""

import gc
import weakref

import pytest

from fixtures.balanced_channels import (
    First,
    connect,
    counts,
    instance,
    subchannel_of,
    wait_until_lost,
)
from fixtures.shop import STREAM_UNARY, UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from fixtures.ways import FRONTS, failure_of, hanging_call, ways_to_call
from fixtures.worlds import KINDS, RETRY
from rpcwheel.balancer import Picker


def open_with_connect(world, open_balanced, kit):
    channel = open_balanced(
        connect=lambda one, options: world.grpc.insecure_channel(one.target, options)
    )
    return channel, channel


@pytest.mark.parametrize("open_styled", [*FRONTS, open_with_connect])
def test_a_stub_made_before_an_update_calls_the_instances_of_the_last_one(
    world, shops, open_balanced, open_styled
):
    kit = world.keep(world.api.Kit(timeout=WAIT_S, retry=RETRY))
    channel, front = open_styled(world, open_balanced, kit)
    ways = ways_to_call(world, front)
    for shop in shops:
        world.do(channel.update, [instance(shop)])
        assert {name: call() for name, call in ways.items()} == dict.fromkeys(ways, b"ab")
        assert len(shop.calls) == len(ways)
    assert wait_until(lambda: channel.calls == 0)


# The picker


class Noting(First):
    """Records the arguments of each pick."""

    def __init__(self):
        self.seen = []

    def prepare(self, subchannels, weights):
        return lambda *call: (self.seen.append(call), subchannels[0])[1]


def test_a_picker_sees_method_message_and_metadata(world, shops, open_balanced):
    picker = Noting()
    channel = open_balanced(shops[0], lb_policy=picker)
    connect(world, channel)
    metadata = (("a", "b"),)
    call = channel.unary_unary(UNARY_UNARY, str.encode, bytes.decode)
    assert world.do(call, "text", metadata=metadata, timeout=WAIT_S) == "text"
    assert picker.seen[-1] == (UNARY_UNARY, "text", metadata)
    assert world.call(channel, "stream_unary").result() == b"x"
    assert picker.seen[-1] == (STREAM_UNARY, None, None)


def test_a_picker_that_prepares_no_function_is_named_in_the_error_of_its_calls(
    world, shops, open_balanced
):
    class Mute(Picker):
        def prepare(self, subchannels, weights):
            return None

    channel = open_balanced(*shops, lb_policy=Mute())
    with pytest.raises(TypeError, match=r"Mute.prepare\(\) must return a function pick"):
        world.do(channel.unary_unary(UNARY_UNARY), b"x")


def test_a_stub_does_not_keep_removed_subchannels(world, shops, open_balanced):
    channel = open_balanced(shops[0])
    call = channel.unary_unary(UNARY_UNARY)
    world.do(call, b"x", timeout=WAIT_S)
    gone = weakref.ref(channel.subchannels[0])
    world.do(channel.update, [instance(shops[1])])
    world.do(call, b"x", timeout=WAIT_S)
    assert wait_until(lambda: (gc.collect(), gone())[1] is None)


# Servers that fail


def by_another_channel(world):
    """A `connect` that makes connections which can be replaced themselves."""
    kind = world.module("transport").ReconnectingChannel
    return lambda one, options: kind(one.target, options=options)


@pytest.mark.parametrize("connect_of", [lambda world: None, by_another_channel])
def test_no_call_fails_because_a_server_can_not_be_reached(
    world, shops, dead, open_balanced, connect_of
):
    channel = open_balanced(connect=connect_of(world))
    world.do(channel.update, [instance(shops[0]), instance(dead, weight=1000)])
    for call in ways_to_call(world, channel).values():
        assert [call() for _ in range(3)] == [b"ab"] * 3
    assert subchannel_of(channel, dead).healthy


def test_calls_whose_connection_breaks_are_not_repeated(world, shops, open_balanced):
    channel = open_balanced(*shops[:2])
    connect(world, channel)
    first = subchannel_of(channel, shops[0])
    running = [hanging_call(world, shops[0], first.channel, kind) for kind in KINDS]
    shops[0].kill()
    codes = {call.error().code().name for call in running}
    assert codes <= {"UNAVAILABLE", "CANCELLED"}
    wait_until_lost(world, channel, shops[0])
    ways = ways_to_call(world, channel)
    assert {name: call() for name, call in ways.items()} == dict.fromkeys(ways, b"ab")
    assert counts(shops) == [len(KINDS), len(ways), 0]
    shops[0].start()
    assert wait_until(lambda: (world.call(channel).result(), len(shops[0].calls) > len(KINDS))[1])


def test_if_no_server_can_be_reached_calls_fail_with_the_reason(world, dead, open_balanced):
    channel = open_balanced(dead)
    call = channel.unary_unary(UNARY_UNARY)
    begins = f"the only server of test.Shop can't be reached: 127.0.0.1:{dead}: "

    def has_reason():  # not if the probe that asks for it took too long
        code, details = failure_of(lambda: world.do(call, b"x", timeout=WAIT_S))
        assert code == "UNAVAILABLE"
        return details.startswith(begins) and "onnection refused" in details

    assert wait_until(has_reason)
