"""`HeartbeatManager`, in both worlds."""

import pytest

from fixtures.heartbeats import IN_AIO, IN_SYNC
from fixtures.waiting import wait_until
from rpcwheel.heartbeat import HealthProbe, HeartbeatPolicy, HeartbeatState, MethodProbe
from rpcwheel.heartbeat.aio import HeartbeatManager


@IN_AIO
def test_from_policy_takes_its_settings(world, timer):
    policy = HeartbeatPolicy(interval=5, timeout=12, drain_timeout=None, reconnect=False)
    manager = world.do(HeartbeatManager.from_policy, policy, timer=timer, probe=MethodProbe("/a/b"))
    assert (manager.policy, manager.heartbeats) == (policy, ())
    assert HeartbeatManager(timer).policy == HeartbeatPolicy()


def test_a_connection_has_one_heartbeat_until_that_is_detached(world, channel, manager, timer):
    first = world.do(manager.attach, channel)
    assert world.do(manager.attach, channel, probe=HealthProbe("other")) is first
    assert (manager.heartbeats, timer.pending) == ((first,), 1)
    first.detach()
    second = world.do(manager.attach, channel)
    first.detach()
    assert second is not first
    assert (manager.heartbeats, timer.pending) == ((second,), 1)
    assert first.state is HeartbeatState.CLOSED


def test_attach_removes_heartbeats_of_dropped_channels(world, open_channel, channel, manager):
    dropped = open_channel()
    heartbeat = world.do(manager.attach, dropped)
    world.do(dropped.close) if world.name == "aio" else None
    del dropped
    assert wait_until(lambda: heartbeat.connection is None)
    kept = world.do(manager.attach, channel)
    assert manager.heartbeats == (kept,)
    assert repr(manager).startswith("<HeartbeatManager of 1 connections")


@IN_SYNC
def test_two_managers_can_watch_the_same_connection(world, channel, manager, make_manager):
    other = make_manager(interval=5)
    assert world.do(other.attach, channel) is not world.do(manager.attach, channel)
    world.do(other.close)
    assert len(manager.heartbeats) == 1


def test_close_detaches_all_and_refuses_more(world, channel, manager, timer):
    heartbeat = world.do(manager.attach, channel)
    world.do(manager.close)
    world.do(manager.close)
    assert heartbeat.state is HeartbeatState.CLOSED
    assert (manager.heartbeats, timer.pending) == ((), 0)
    assert not channel.closed
    with pytest.raises(RuntimeError, match="this HeartbeatManager is closed"):
        world.do(manager.attach, channel)


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
    channels = [world.channel(server.target) for _ in range(200)]
    for channel in channels:
        world.do(manager.attach, channel)
    times = sorted(heartbeat._timeout.deadline for heartbeat in manager.heartbeats)
    world.do(manager.close)
    assert times[0] > 60.0
    assert times[-1] <= 120.6
    for third in range(3):  # about 67 in each third of the interval
        low, high = 60 + 20 * third, 80 + 20 * third
        assert 30 <= sum(low <= time < high for time in times) <= 120


def test_heartbeats_on_a_new_connection_wait_for_it(world, channel, manager, timer):
    waits, real = [], channel.heartbeat_call

    def heartbeat_call(method):
        sends = real(method)

        def send(request, **options):
            waits.append(options["wait_for_ready"])
            return sends(request, **options)

        send.future = lambda request, **options: (
            waits.append(options["wait_for_ready"]) or sends.future(request, **options)
        )
        return send

    channel.heartbeat_call = heartbeat_call
    heartbeat = world.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert world.do(channel.reconnect, force=True)
    timer.advance(121.0)
    assert wait_until(lambda: heartbeat.answered >= 2)
    assert waits[:2] == [None, True]  # a third follows if the answer came while time moved
