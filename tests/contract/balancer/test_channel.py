"""A balanced channel is a channel: its state, its credentials, its end."""

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import grpc
import pytest

from fixtures.balanced_channels import connect, counts, instance, subchannel_of
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import Silent
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.ways import hanging_call, ways_to_call
from rpcwheel.errors import ConfigurationError

IDLE, CONNECTING, READY, FAILING, SHUTDOWN = (
    grpc.ChannelConnectivity[name]
    for name in ("IDLE", "CONNECTING", "READY", "TRANSIENT_FAILURE", "SHUTDOWN")
)

# State


def test_its_state_is_the_best_of_its_subchannels(world, shops, dead, open_balanced):
    channel = open_balanced()
    state = lambda: world.do(channel.get_state)  # noqa: E731
    assert isinstance(channel, world.grpc.Channel)
    assert (channel.name, channel.target) == ("test.Shop", "test.Shop")
    assert state() is CONNECTING
    world.do(channel.report_error, "the registry is away", wait=True)
    assert state() is CONNECTING
    world.do(channel.report_error, "the registry is away")
    assert state() is FAILING
    world.do(channel.update, [])
    assert state() is FAILING
    world.do(channel.update, [instance(dead), instance(shops[0])])
    assert state() is IDLE
    world.do(channel.subchannels[0].mark_unhealthy, "the test")
    name = {"sync": "BalancedChannel", "aio": "BalancedChannel of grpc.aio"}[world.name]
    end = "calls in flight: 0>"
    assert repr(channel) == f"<{name} 'test.Shop', 2 subchannels, 1 unhealthy, {end}"
    world.do(channel.get_state, try_to_connect=True)
    assert wait_until(lambda: state() is READY)
    world.do(channel.close)
    assert state() is SHUTDOWN
    assert repr(channel) == f"<{name} 'test.Shop', closed, {end}"


def test_a_wrong_update_or_grace_changes_nothing(world, open_balanced):
    channel = open_balanced(1)
    before = channel.subchannels
    with pytest.raises(TypeError, match="ServiceInstance"):
        world.do(channel.update, [instance(2), None])
    if world.name == "aio":
        with pytest.raises(ConfigurationError, match="grace must be 0 seconds or more"):
            world.do(channel.close, -1)
    assert (channel.subchannels, channel.closed) == (before, False)


# Threads


def test_no_call_fails_while_the_instances_change(world, shops, dead, open_balanced):
    """While subchannels are made, removed, drained and marked unhealthy on another thread."""
    channel = open_balanced(*shops)
    every = [instance(one) for one in (*shops, dead)]
    ways, failures, over = ways_to_call(world, channel), [], threading.Event()

    def make_calls():
        while not over.is_set():
            for name, call in ways.items():
                try:
                    assert call() == b"ab"
                except Exception as error:  # noqa: BLE001
                    failures.append((name, error))

    calling = [in_thread(make_calls) for _ in range(3)]
    for number in range(16):
        for one in channel.subchannels:
            one.mark_unhealthy("the test")
        chosen = [one for place, one in enumerate(every) if number >> place & 1 == 0]
        channel.update([*chosen, every[number % 3]])
        kept = subchannel_of(channel, shops[number % 3])
        world.do(lambda kept=kept: kept.channel.drain())
        for one in channel.subchannels:
            one.mark_healthy()
        made = sum(counts(shops))
        assert wait_until(lambda made=made: sum(counts(shops)) > made + 5 or failures)
    over.set()
    for one in calling:
        one.result(2 * WAIT_S)
    assert failures == []
    assert wait_until(lambda: channel.calls == 0)


# The end


def test_close_ends_calls_subchannels_and_health_checks(world, shops, open_balanced, timer):
    channel = open_balanced(shops[1])
    removed = hanging_call(world, shops[1], channel)
    world.do(channel.update, [instance(shops[0])])
    call = hanging_call(world, shops[0], channel)
    (subchannel,) = channel.subchannels
    world.do(subchannel.mark_unhealthy, "the test")
    assert timer.pending == 2  # a drain, and a health check
    world.do(channel.close)
    assert [one.code() for one in (call, removed)] == [grpc.StatusCode.CANCELLED] * 2
    assert (channel.closed, channel.subchannels) == (True, ())
    assert (world.do(lambda: subchannel.state), timer.pending) == (SHUTDOWN, 0)
    world.do(channel.update, [instance(shops[0])])
    world.do(channel.report_error, "late")
    assert channel.subchannels == ()


def test_close_closes_all_connections_although_one_raises(world, shops, open_balanced):
    made = []

    def make(one, options):
        made.append(world.grpc.insecure_channel(one.target, options))
        return made[-1]

    def broken(*_):
        raise OSError("the user's")

    channel = open_balanced(*shops, connect=make)
    connect(world, channel)
    made[0].close, close = broken, made[0].close
    with pytest.raises(OSError, match="the user's"):
        world.do(channel.close)
    world.do(close)
    for one in made:
        with pytest.raises(world.closed_error):
            world.call(one)


def test_a_channel_that_is_dropped_unclosed_leaves_nothing(world, shops, timer):
    instances = [instance(shop) for shop in shops]
    given = {"timer": timer, "options": IMPATIENT}
    channel = world.do(world.module("balancer").BalancedChannel, "s", instances, **given)
    connect(world, channel)
    world.do(channel.subchannels[0].mark_unhealthy, "the test")
    for shop in shops:
        shop.then(Silent(1))
    stream = world.call(channel, "unary_stream", b"ab")
    assert stream.read() == b"a"
    gone = [weakref.ref(channel), *(weakref.ref(one) for one in channel.subchannels)]
    forget = channel.on_close(print)
    del channel, stream
    assert wait_until(lambda: (gc.collect(), not any(one() for one in gone))[1])
    timer.advance(60)  # the health check has no subchannel any more
    forget()
    assert timer.pending == 0


def test_calls_that_are_made_during_close_end(world, shops, open_balanced):
    channel = open_balanced(*shops)
    ways, ends, begun = list(ways_to_call(world, channel).values()), [], threading.Semaphore(0)

    def make_calls():
        for number in range(1_000_000):
            if number == 5:
                begun.release()
            try:
                ways[number % len(ways)]()
            except world.closed_error as error:
                ends.append(error)
                return
            except (grpc.RpcError, grpc.FutureCancelledError, CancelledError):
                pass

    calling = [in_thread(make_calls) for _ in range(3)]
    for _ in calling:
        assert begun.acquire(timeout=WAIT_S)
    world.do(channel.close)
    for one in calling:
        one.result(WAIT_S)
    assert len(ends) == 3
