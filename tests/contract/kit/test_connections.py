"""Heartbeats and idle detection of a kit."""

import itertools
from contextlib import contextmanager

import grpc
import pytest

from fixtures.forks import holds_in_child
from fixtures.grpcio import TARGET_IS_KNOWN
from fixtures.heartbeats import SERVING, HealthServer
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.small_servers import ECHOING, running
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import AioWorld, SyncWorld, only_sync
from rpcwheel import ConfigurationError, HeartbeatPolicy, IdlePolicy, Kit
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.events import CallbackFailed, IdleDetectionLimited
from rpcwheel.heartbeat import HeartbeatState, MethodProbe
from rpcwheel.idle import ConnectionTable
from rpcwheel.registry import ServiceInstance


@pytest.fixture
def kit(world, timer):
    """Makes kits with manual time, which are closed at the end."""
    return lambda **settings: world.keep(world.api.Kit(timer=timer, **settings))


@contextmanager
def serving(world, kit):
    """A server with all that the kit gives it."""
    interceptors = kit.server_interceptors()
    given = {"interceptors": interceptors, "options": kit.server_options()}
    with running(world, ECHOING, **given) as (server, port):
        yield server, port, interceptors


def test_closing_a_kit_ends_heartbeats_and_leaves_channels_open(shop, world, kit, timer):
    made = kit(heartbeat=10.0)
    channel = world.keep(world.do(made.channel, shop.target))
    assert world.call(channel).result() == b"x"
    world.do(made.close)
    assert made.heartbeats == ()
    assert timer.pending == 0
    assert world.call(channel).result() == b"x"
    for refused in (made.channel, lambda target: made.intercept_channel(bare(world, target))):
        with pytest.raises(RuntimeError, match="this kit is closed"):
            world.do(refused, shop.target)


def bare(world, target):
    api = grpc if world.name == "sync" else grpc.aio
    return api.insecure_channel(target)


def reconnecting(world, target):
    transport = world.module("transport")
    return transport.ReconnectingChannel(target)


@pytest.mark.parametrize(
    ("world", "between", "make"),
    [
        *itertools.product([SyncWorld], [False, True], [bare, reconnecting]),
        pytest.param(AioWorld, False, bare, marks=TARGET_IS_KNOWN),  # grpc.aio's has its own
        (AioWorld, False, reconnecting),
    ],
    indirect=["world"],
)
def test_an_intercepted_channel_has_one_heartbeat_until_it_is_closed(
    shop, world, kit, make, between
):
    made = kit(heartbeat=10.0)
    inner = world.keep(world.do(make, world, shop.target))
    below = grpc.intercept_channel(inner, *Kit().client_interceptors()) if between else inner
    channel = world.do(made.intercept_channel, below)
    other = world.do(made.intercept_channel, inner)
    assert world.call(channel).result() == b"x"
    (heartbeat,) = made.heartbeats
    assert heartbeat.target == shop.target
    world.do(channel.close)
    assert made.heartbeats == ()
    assert heartbeat.state is HeartbeatState.CLOSED
    world.do(other.close)


def test_closing_a_plain_channel_ends_its_heartbeat(shop, timer):
    with Kit(heartbeat=10.0, timer=timer) as kit:
        with grpc.insecure_channel(shop.target) as plain:
            kit.intercept_channel(plain)
            assert len(kit.heartbeats) == 1
        assert kit.heartbeats == ()


def test_client_interceptors_warn_once_that_heartbeat_has_no_effect(world, kit):
    made = kit(heartbeat=10.0)
    with pytest.warns(RuntimeWarning, match="has no effect on this channel") as caught:
        made.client_interceptors()
    assert [one.filename for one in caught] == [__file__]
    made.client_interceptors()
    kit().client_interceptors()
    kit(heartbeat=HeartbeatPolicy(interval=None)).client_interceptors()


def test_each_subchannel_of_a_balanced_channel_has_a_heartbeat(shop, world, kit, timer):
    made, another = kit(heartbeat=10.0), kit(heartbeat=10.0)
    instance = ServiceInstance(service="shop", host="127.0.0.1", port=shop.port)
    balancer = world.module("balancer")
    settings = {"timer": timer, "balancer_policy": BalancerPolicy(self_preservation=False)}
    balanced = world.keep(world.do(balancer.BalancedChannel, "shop", [instance], **settings))
    channel = world.do(made.intercept_channel, balanced)
    assert world.call(channel).result() == b"x"
    (subchannel,) = balanced.subchannels
    (heartbeat,) = made.heartbeats
    assert heartbeat.target == subchannel.instance.target
    world.do(another.intercept_channel, balanced)  # its subchannel has a channel by now
    assert len(another.heartbeats) == 1
    world.do(another.close)
    shop.then(hang := Hang())
    call = world.call(channel)  # which the removed subchannel still serves
    assert hang.begun.wait(WAIT_S)
    world.do(balanced.update, [])
    wait_until(lambda: made.heartbeats == ())
    call.cancel()
    for use, of in ((another.intercept_channel, balanced), (another.channel, shop.target)):
        with pytest.raises(RuntimeError, match="this kit is closed"):
            world.do(use, of)


def test_an_answered_heartbeat_ends_what_a_missed_heartbeat_began_and_nothing_else(
    world, kit, timer, balanced
):
    made, states = kit(heartbeat=10.0), []
    world.do(made.intercept_channel, balanced)

    def beat(state):
        assert heartbeat.beat()
        assert wait_until(lambda: states and states[-1] is state)
        states.clear()

    with HealthServer() as server:
        instance = ServiceInstance(service="shop", host="127.0.0.1", port=server.port)
        world.do(balanced.update, [instance])
        assert world.call(balanced).result() == b"x"
        (subchannel,), (heartbeat,) = balanced.subchannels, made.heartbeats
        heartbeat.add_listener(lambda _, __, new: states.append(new))  # after that of the kit
        beat(HeartbeatState.ALIVE)
        subchannel.mark_unhealthy("the test")
        beat(HeartbeatState.ALIVE)
        assert subchannel.unhealthy_reason == "the test"
        subchannel.mark_healthy()
        server.answer = grpc.StatusCode.UNAVAILABLE
        beat(HeartbeatState.SUSPECT)
        assert subchannel.unhealthy_reason == "a heartbeat was not answered"
        server.answer = SERVING
        beat(HeartbeatState.ALIVE)
        assert subchannel.healthy
        world.do(made.close)


@pytest.fixture
def balanced(world, timer):
    """Makes a balanced channel, which counts the listeners that are added to it."""
    balancer = world.module("balancer")

    class Balanced(balancer.BalancedChannel):
        listeners = 0

        def add_listener(self, *callbacks):
            self.listeners += 1
            super().add_listener(*callbacks)

    return world.keep(world.do(Balanced, "shop", timer=timer))


def test_a_kit_watches_a_balanced_channel_once(world, kit, balanced):
    made = kit(heartbeat=10.0)
    for _ in range(3):
        world.do(made.intercept_channel, balanced)
    assert balanced.listeners == 1


@only_sync
def test_a_forked_child_watches_a_balanced_channel_of_its_parent(shop, world, kit, balanced):
    made = kit(heartbeat=10.0)
    made.intercept_channel(balanced)
    balanced.update([ServiceInstance(service="shop", host="127.0.0.1", port=shop.port)])
    connection = balanced.subchannels[0].channel

    def watches_anew():
        before = made.heartbeats
        made.intercept_channel(balanced)
        return before == () and [each.connection for each in made.heartbeats] == [connection]

    assert holds_in_child(watches_anew)


def test_each_channel_of_a_broadcast_has_a_heartbeat(shop, world, kit, balanced):
    made = kit(heartbeat=10.0)
    plain = world.channel(shop.target)
    replaceable = world.keep(world.do(reconnecting, world, shop.target))
    broadcast = world.module("balancer").BroadcastChannel([plain, replaceable, balanced])
    channel = world.do(made.intercept_channel, broadcast)
    instance = ServiceInstance(service="shop", host="127.0.0.1", port=shop.port)
    world.do(balanced.update, [instance])
    assert len(world.do(channel.unary_unary(UNARY_UNARY), b"x", timeout=WAIT_S)) == 3
    watched = [plain, replaceable, balanced.subchannels[0].connection]
    assert [heartbeat.connection for heartbeat in made.heartbeats] == watched
    world.do(channel.close)  # the channels below stay open
    assert len(made.heartbeats) == 3


def test_a_closed_kit_ignores_new_subchannels(shop, world, kit, balanced, events):
    made = kit(heartbeat=10.0)
    world.do(made.intercept_channel, balanced)
    world.do(made.close)
    instance = ServiceInstance(service="shop", host="127.0.0.1", port=shop.port)
    world.do(balanced.update, [instance])
    assert world.call(balanced).result() == b"x"
    assert not events.of(CallbackFailed)


def test_each_server_has_its_own_connection_table(world, kit):
    made = kit(idle=60.0)
    with serving(world, made) as one, serving(world, made) as other:
        with pytest.raises(ConfigurationError, match=r"2 servers .*connections=interceptors"):
            world.do(made.detect_idle, one[0], one[1])
        detector = world.do(made.detect_idle, one[0], one[1], connections=one[2][0])
        other_detector = world.do(made.detect_idle, other[0], other[1])
        assert made.detectors == (detector, other_detector)
        world.do(detector.close)
        assert made.detectors == (other_detector,)
        with pytest.raises(ConfigurationError, match="no server waits for a detector"):
            world.do(made.detect_idle, other[0], other[1])
        assert other_detector.policy == IdlePolicy(idle_timeout=60.0)
        assert not other_detector.closed
        world.do(made.close)
        assert other_detector.closed


# --- What both kits have in common ---


def test_without_the_settings_there_are_no_heartbeats_and_no_connection_tables(shop):
    with Kit(timeout=WAIT_S) as kit, kit.channel(shop.target):
        assert kit.heartbeats == ()
        assert not any(isinstance(one, ConnectionTable) for one in kit.server_interceptors())


def test_a_heartbeat_uses_the_probe_of_its_channel(shop, timer):
    probe = MethodProbe(UNARY_UNARY)
    with Kit(heartbeat=10.0, timer=timer) as kit, kit.channel(shop.target, probe=probe) as channel:
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        (heartbeat,) = kit.heartbeats
        heartbeat.beat()
        wait_until(lambda: heartbeat.answered)
        assert [seen.method for seen in shop.calls] == [UNARY_UNARY] * 2


def test_close_reports_servers_without_detect_idle(events):
    with Kit(idle=60.0) as kit:
        kit.server_interceptors()
    (limited,) = events.of(IdleDetectionLimited)
    assert "detect_idle(server) was not called for 1 of its servers" in limited.reason


def test_server_options_follow_the_heartbeat_unless_they_are_set():
    for heartbeat, keepalive, answer in (
        (None, 60_000, 20_000),
        (10.0, 10_000, 20_000),
        (HeartbeatPolicy(interval=0.5, timeout=2.0), 1_000, 1_500),
        (HeartbeatPolicy(interval=None), 60_000, 20_000),
    ):
        options = dict(Kit(heartbeat=heartbeat).server_options())
        assert options["grpc.keepalive_time_ms"] == keepalive
        assert options["grpc.http2.ping_timeout_ms"] == answer
    overridden = dict(Kit(heartbeat=10.0).server_options(keepalive=30.0, connection_age=3600.0))
    assert overridden["grpc.keepalive_time_ms"] == 30_000
    assert overridden["grpc.http2.ping_timeout_ms"] == 20_000
    assert overridden["grpc.max_connection_age_ms"] == 3_600_000
