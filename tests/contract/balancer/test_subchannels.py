"""Subchannels of a balanced channel: connections, updates, health.

Picking, levels, subsets, ejection and health are tested without servers in `tests/unit/balancer`.
"""

import contextlib
import threading

import grpc
import pytest

from fixtures.balanced_channels import (
    READY,
    blocking,
    connect,
    counts,
    instance,
    states,
    subchannel_of,
)
from fixtures.heartbeats import NOT_SERVING, SERVING, HealthServer
from fixtures.shop import Fail
from fixtures.waiting import wait_until
from fixtures.ways import failure_of, hanging_call, ways_to_call
from rpcwheel.balancer import OutlierEjectionPolicy
from rpcwheel.events import (
    CallbackFailed,
    StaleInstancesKept,
    SubchannelHealthy,
    SubchannelUnhealthy,
)

IDLE, FAILING, SHUTDOWN = (
    grpc.ChannelConnectivity[name] for name in ("IDLE", "TRANSIENT_FAILURE", "SHUTDOWN")
)

CLOSED = "closed channel|Channel is closed"


# Updates


def test_an_update_changes_only_the_connections_that_differ(world, shops, open_balanced):
    channel = open_balanced(*shops[:2], compression=grpc.Compression.Gzip)
    connect(world, channel)
    for _ in range(4):
        world.call(channel).result()
    assert counts(shops) == [2, 2, 0]
    world.do(channel.update, [instance(shops[0], weight=10), instance(shops[2])])
    connect(world, channel)
    for _ in range(22):
        world.call(channel).result()
    assert len({seen.peer for seen in shops[0].calls}) == 1
    assert len(shops[0].calls) <= 5  # weight 10, the other 100
    assert len(shops[1].calls) == 2


def test_calls_of_a_removed_subchannel_go_on_until_the_drain_timeout(
    world, shops, open_balanced, timer
):
    removed = []
    policy = {"drain_timeout": 7}
    channel = open_balanced(shops[0], on_removed=removed.append, policy=policy)
    call, late = (hanging_call(world, shops[0], channel) for _ in range(2))
    (gone,) = channel.subchannels
    world.do(channel.update, [instance(shops[1])])
    assert (world.do(lambda: gone.state), channel.calls) == (SHUTDOWN, 2)
    assert (gone in channel.subchannels, removed) == (False, [gone])
    assert world.call(channel).result() == b"x"
    shops[0].calls[0].ended.set()
    assert call.result() == b"x"
    timer.advance(7.1)
    error = late.error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert f"channel drained: {shops[0].target} was removed from test.Shop" in error.details()
    assert wait_until(lambda: channel.calls == 0 and gone.channel.closed)


def test_a_removed_subchannel_that_was_never_used_neither_connects_nor_is_reported(
    world, shops, open_balanced, events
):
    removed = []
    channel = open_balanced(shops[0], on_removed=removed.append)
    (unused,) = channel.subchannels
    world.do(channel.update, [instance(shops[1])])
    with pytest.raises(world.closed_error, match=CLOSED):
        world.do(lambda: unused.channel)
    world.do(unused.mark_unhealthy)
    assert (world.do(lambda: unused.state), events, removed) == (SHUTDOWN, [], [])


def test_an_update_within_connect_leaves_no_connection_open(world, shops, open_balanced):
    made = []

    def connect(one, options):
        made.append(world.grpc.insecure_channel(one.target, options))
        channel.update([instance(shops[1])])
        return made[-1]

    channel = open_balanced(shops[0], connect=connect)
    assert world.call(channel).result() == b"x"
    assert counts(shops) == [0, 1, 0]
    with pytest.raises(world.closed_error, match=f"{CLOSED}|channel drained"):
        world.call(made[0])


# Connections


def test_callbacks_get_each_subchannel_and_may_raise(world, shops, open_balanced, events):
    begun, removed = [], []

    def on_subchannel(subchannel):
        begun.append((subchannel, subchannel.channel))
        raise RuntimeError(subchannel.id)

    def on_removed(subchannel):
        removed.append(subchannel)
        raise RuntimeError(subchannel.id)

    channel = open_balanced(shops[0], on_subchannel=on_subchannel, on_removed=on_removed)
    for _ in range(2):
        assert world.call(channel).result() == b"x"
    (first,) = channel.subchannels
    assert begun == [(first, first.channel)]
    world.do(channel.update, [instance(shops[1])])
    assert removed == [first]
    assert [type(event) for event in events] == [CallbackFailed] * 2


@pytest.mark.parametrize("end", ["close", "drain", "close what connect made"])
def test_a_subchannel_whose_channel_the_user_ends_gets_another(world, shops, open_balanced, end):
    made = []

    def connect(one, options):
        made.append(world.grpc.insecure_channel(one.target, options))
        return made[-1]

    channel = open_balanced(shops[0], connect=connect)
    running = hanging_call(world, shops[0], channel)
    for number, call in enumerate(ways_to_call(world, channel).values(), 1):
        before = channel.subchannels[0].channel
        world.do(made[-1].close if end not in ("close", "drain") else getattr(before, end))
        assert call() == b"ab"
        assert channel.subchannels[0].channel is not before
        assert len(made) == number + 1
    if end == "drain":
        shops[0].calls[0].ended.set()
        assert running.result() == b"x"
    else:
        assert running.code() is grpc.StatusCode.CANCELLED
    assert wait_until(lambda: channel.calls == 0)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_server_for_which_connect_raises_is_passed_over(
    world, shops, open_balanced, events, error
):
    def connect(one, options):
        if one.id == "a":
            raise error("no certificate for a")
        return world.grpc.insecure_channel(one.target, options)

    channel = open_balanced(connect=connect)
    world.do(channel.update, [instance(1, id="a"), instance(shops[0], id="b")])
    ways = ways_to_call(world, channel).values()
    for call in ways:
        assert call() == b"ab"
    assert {(type(event), event.callback) for event in events} == {(CallbackFailed, "connect a")}
    world.do(channel.update, [instance(1, id="a")])
    reason = f"connect raised {error.__name__}('no certificate for a')"
    for call in ways:
        assert failure_of(call) == (
            "UNAVAILABLE",
            f"the only server of test.Shop can't be reached: 127.0.0.1:1: {reason}",
        )
    with pytest.raises(error, match="no certificate"):
        world.do(lambda: channel.subchannels[0].channel)


# Health


@pytest.fixture
def health():
    """A server that is not serving."""
    with HealthServer() as server:
        server.answer = NOT_SERVING
        yield server


CHECKED = {"health_check_backoff": 1.0}


def test_an_unhealthy_server_gets_calls_again_when_its_health_check_reports_serving(
    world, health, shops, open_balanced, timer, events
):
    channel = open_balanced(health, shops[0], policy=CHECKED)
    connect(world, channel)
    one = subchannel_of(channel, health)
    world.do(one.mark_unhealthy, "the test")
    for checks in (1, 2):
        timer.advance(1.1)
        assert wait_until(lambda checks=checks: len(health.checks) == checks and timer.pending == 1)
    assert not one.healthy
    for _ in range(4):
        world.call(channel).result()
    assert counts(shops) == [4, 0, 0]
    health.answer = SERVING
    timer.advance(1.1)
    assert wait_until(lambda: one.healthy and len(events) == 2)
    unhealthy, healthy = events
    assert unhealthy == SubchannelUnhealthy("test.Shop", one.id, "the test")
    assert (type(healthy), healthy.subchannel) == (SubchannelHealthy, one.id)
    assert 2.2 < healthy.after_s < 4  # the answer may come while the time is advanced


def test_health_checks_go_on_after_the_user_closed_the_connection(
    world, health, open_balanced, timer
):
    channel = open_balanced(health, policy=CHECKED)
    connect(world, channel)
    (one,) = channel.subchannels
    health.answer = threading.Event()
    world.do(one.mark_unhealthy, "the test")
    timer.advance(1.1)
    assert wait_until(lambda: health.checks)
    world.do(one.channel.close)
    health.answer.set()
    assert wait_until(lambda: (timer.advance(1.1), one.healthy)[1])


def test_failures_of_calls_made_in_every_way_eject_a_server(
    world, shops, open_balanced, timer, events
):
    channel = open_balanced(*shops[:2], policy={"outlier_ejection": 3})
    connect(world, channel)
    one = subchannel_of(channel, shops[0])
    for call in ways_to_call(world, channel).values():
        shops[0].then(*[Fail("UNAVAILABLE")] * 1000)
        while one.healthy:
            with contextlib.suppress(grpc.RpcError):
                assert call() == b"ab"
        assert one.unhealthy_reason == "3 calls failed: UNAVAILABLE"
        # Until the event, the next call may be picked from the servers before the change.
        assert wait_until(lambda: SubchannelUnhealthy in map(type, events))
        events.clear()
        shops[0].reset()
        assert [call() for _ in range(4)] == [b"ab"] * 4
        assert not shops[0].calls
        world.do(one.mark_healthy)


def test_failures_that_are_long_over_do_not_delay_an_ejection(world, shops, open_balanced):
    ejection = OutlierEjectionPolicy(consecutive_failures=5, failure_percentage=None)
    channel = open_balanced(
        *shops[:2], policy={"outlier_ejection": ejection}, lb_policy="round_robin"
    )
    connect(world, channel)
    for shop in shops[:2]:
        shop.then(*[Fail("UNAVAILABLE")] * 4)
    for _ in range(8):
        with pytest.raises(grpc.RpcError):
            blocking(world, channel)
    for _ in range(120):
        assert blocking(world, channel) == b"x"
    one = subchannel_of(channel, shops[0])
    shops[0].then(*[Fail("UNAVAILABLE")] * 1000)
    while one.healthy:
        with contextlib.suppress(grpc.RpcError):
            blocking(world, channel)
    assert one.unhealthy_reason == "5 calls failed: UNAVAILABLE"


# Self-preservation


def test_if_all_instances_disappear_the_servers_that_answer_are_kept(
    world, shops, dead, open_balanced, events
):
    channel = open_balanced(*shops[:2], dead)
    connect(world, channel, *shops[:2])
    world.do(lambda: subchannel_of(channel, dead).channel.get_state(try_to_connect=True))
    assert wait_until(lambda: FAILING in states(world, channel))
    world.do(channel.update, [])
    assert wait_until(lambda: len(channel.subchannels) == 2)
    assert [one.stale for one in channel.subchannels] == [True, True]
    assert isinstance(events[0], StaleInstancesKept)
    killed = subchannel_of(channel, shops[0])
    shops[0].kill()
    # A call until then may fail.
    assert wait_until(lambda: world.do(lambda: killed.state is not READY))
    assert wait_until(lambda: (world.call(channel).result(), len(channel.subchannels) == 1)[1])
    shops[1].kill()
    unknown = "no instance of test.Shop is known"
    assert wait_until(lambda: world.call(channel).error().details() == unknown)
    assert channel.subchannels == ()
