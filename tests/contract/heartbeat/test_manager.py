"""`HeartbeatManager`, in both worlds."""

import re

import pytest

from fixtures.heartbeats import IN_AIO, IN_SYNC, timeout_of
from fixtures.waiting import wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.heartbeat import HealthProbe, HeartbeatPolicy, HeartbeatState, MethodProbe


@IN_SYNC
def test_the_defaults_are_those_of_the_policy(world):
    manager = world.do(world.manager)
    assert manager.policy == HeartbeatPolicy()
    assert manager.heartbeats == ()


@IN_AIO
def test_from_policy_takes_its_settings(world, timer):
    policy = HeartbeatPolicy(interval=5, timeout=12, drain_timeout=None, reconnect=False)
    manager = world.do(world.manager.from_policy, policy, timer=timer, probe=MethodProbe("/a/b"))
    assert manager.policy == policy


def test_a_connection_attached_twice_has_one_heartbeat(world, channel, manager, timer):
    heartbeat = world.do(manager.attach, channel)
    assert world.do(manager.attach, channel, probe=HealthProbe("other")) is heartbeat
    assert manager.heartbeats == (heartbeat,)
    assert timer.pending == 1


@IN_AIO
def test_a_connection_that_was_detached_can_be_attached_again(world, channel, manager, timer):
    first = world.do(manager.attach, channel)
    first.detach()
    second = world.do(manager.attach, channel)
    first.detach()
    assert second is not first
    assert manager.heartbeats == (second,)
    assert (first.state, timer.pending) == (HeartbeatState.CLOSED, 1)


def test_attach_removes_heartbeats_of_dropped_channels(world, server, channel, manager):
    dropped = world.do(world.channel, server.target)
    heartbeat = world.do(manager.attach, dropped)
    world.do(dropped.close) if world.name == "aio" else None
    del dropped
    assert wait_until(lambda: heartbeat.connection is None)
    kept = world.do(manager.attach, channel)
    assert manager.heartbeats == (kept,)
    assert repr(manager).startswith("<HeartbeatManager of 1 connections")


@IN_SYNC
def test_two_managers_can_watch_the_same_connection(world, channel, manager, timer):
    other = world.do(world.manager, timer, interval=5)
    assert world.do(other.attach, channel) is not world.do(manager.attach, channel)
    world.do(other.close)
    assert len(manager.heartbeats) == 1


def test_close_detaches_all_and_refuses_more(world, channel, manager, timer):
    heartbeat = world.do(manager.attach, channel)
    world.do(manager.close)
    world.do(manager.close)
    assert (heartbeat.state, manager.heartbeats, timer.pending) == (
        *(HeartbeatState.CLOSED, ()),
        0,
    )
    assert not channel.closed
    with pytest.raises(RuntimeError, match="this HeartbeatManager is closed"):
        world.do(manager.attach, channel)


def test_invalid_settings_are_refused(world):
    for settings, error, text in (
        ({"interval": 0}, ConfigurationError, "interval: it must be a finite time above zero"),
        ({"interval": 10, "timeout": 15}, ConfigurationError, "less than twice interval"),
        ({"interval": "10"}, TypeError, "interval"),
        ({"probe": HealthProbe}, TypeError, "probe must be HealthProbe()"),
        ({"probe": "/a/b"}, TypeError, "probe must be HealthProbe()"),
        ({"timer": "wheel"}, TypeError, "timer must be a WheelTimer"),
        ({"timer": 60.0}, TypeError, "for seconds: interval=60.0"),
        (
            {"timer": HeartbeatPolicy()},
            TypeError,
            "for a policy call HeartbeatManager.from_policy",
        ),
    ):
        with pytest.raises(error, match=re.escape(text)):
            world.do(world.manager, **settings)
    with pytest.raises(TypeError, match="policy must be a HeartbeatPolicy"):
        world.manager.from_policy(5.0)


class Probe:
    """A probe of the user."""

    def __init__(self, method, request):
        self.method, self.request = method, request

    def judge(self, response):
        """Never called."""


def test_attach_refuses_invalid_arguments(world, channel, manager, timer):
    for connection in ("127.0.0.1:1", None, 5):
        with pytest.raises(TypeError, match="connection must be a gRPC channel"):
            world.do(manager.attach, connection)
    with pytest.raises(ConfigurationError, match="full name such as"):
        world.do(manager.attach, channel, probe=Probe("Ping", b""))
    with pytest.raises(TypeError, match="a probe's request must be serialized"):
        world.do(manager.attach, channel, probe=Probe("/a/b", "text"))
    assert (manager.heartbeats, timer.pending) == ((), 0)


@IN_SYNC
def test_detach_removes_its_callback_from_the_channel(world, channel, manager, monkeypatch):
    callbacks = []

    def on_close(callback):
        callbacks.append(callback)
        return callbacks.clear

    monkeypatch.setattr(channel, "on_close", on_close)
    heartbeat = world.do(manager.attach, channel)
    assert len(callbacks) == 1
    heartbeat.detach()
    assert callbacks == []


def test_heartbeats_of_channels_attached_together_spread_over_an_interval(
    world, server, manager, timer
):
    channels = [world.do(world.plain, server.target) for _ in range(200)]
    for channel in channels:
        world.do(manager.attach, channel)
    times = sorted(timeout_of(heartbeat).deadline for heartbeat in manager.heartbeats)
    world.do(manager.close)
    assert times[0] > 60.0
    assert times[-1] <= 120.6
    for third in range(3):  # about 67 in each third of the interval
        low, high = 60 + 20 * third, 80 + 20 * third
        assert 30 <= sum(low <= time < high for time in times) <= 120
    for channel in channels:
        world.do(channel.close)


def test_the_target_of_a_channel_that_does_not_know_it_is_its_repr(world, manager):
    class Channel:
        unary_unary = print

        def __repr__(self):
            return "<my channel>"

    channel = Channel()
    assert world.do(manager.attach, channel).target == "<my channel>"


@IN_SYNC
def test_a_closed_plain_channel_has_its_repr_as_target(world, server, manager):
    """grpcio 1.85 crashes if a closed channel is asked for its target."""
    channel = world.do(world.plain, server.target)
    world.do(channel.close)
    assert world.do(manager.attach, channel).target == repr(channel)
