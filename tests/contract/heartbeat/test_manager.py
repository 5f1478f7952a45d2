"""`HeartbeatManager`, in both worlds."""

import grpc
import pytest

from fixtures.forks import holds_in_child
from fixtures.waiting import wait_until
from fixtures.worlds import only_aio, only_sync
from rpcwheel.heartbeat import HealthProbe, HeartbeatPolicy, HeartbeatState, MethodProbe
from rpcwheel.heartbeat.aio import HeartbeatManager


@only_aio
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


@pytest.mark.parametrize("interval", [60, None])
def test_heartbeats_of_dropped_channels_are_removed(
    world, open_channel, channel, make_manager, interval
):
    manager = make_manager(interval=interval)
    dropped = open_channel()
    heartbeat = world.do(manager.attach, dropped)
    world.do(dropped.close) if world.name == "aio" else None
    del dropped
    assert wait_until(lambda: heartbeat.connection is None)
    kept = world.do(manager.attach, channel)
    if interval:  # otherwise `attach` does it
        assert manager.heartbeats == (kept,)
    assert repr(manager).startswith("<HeartbeatManager of 1 connections")
    assert manager.heartbeats == (kept,)


class PlainChannel:
    """A channel that counts how often its state is read."""

    unary_unary = print
    state = grpc.ChannelConnectivity.READY
    reads = 0

    def get_state(self):
        self.reads += 1
        return self.state


def test_attach_reads_no_state_of_other_channels(world, manager):
    first = PlainChannel()
    world.do(manager.attach, first)
    reads = first.reads
    others = [PlainChannel() for _ in range(3)]
    heartbeats = [world.do(manager.attach, other) for other in others]
    assert (first.reads, manager.heartbeats[1:]) == (reads, tuple(heartbeats))


def test_a_channel_of_another_type_may_have_calls_that_are_no_number(world, manager):
    channel = PlainChannel()
    channel.calls = ["/a/b"]
    heartbeat = world.do(manager.attach, channel)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.misses == 1)  # it makes no calls


def test_attach_of_a_closed_channel_ends_its_heartbeat(world, manager, timer):
    channel = PlainChannel()
    heartbeat = world.do(manager.attach, channel)
    channel.state = grpc.ChannelConnectivity.SHUTDOWN
    assert world.do(manager.attach, channel).state is HeartbeatState.CLOSED
    assert (heartbeat.state, timer.pending) == (HeartbeatState.CLOSED, 0)


@only_sync
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


@only_sync
def test_a_forked_child_has_none_of_its_parents_heartbeats(world, channel, manager):
    heartbeat = manager.attach(channel)

    def begins_anew():
        return manager.heartbeats == () and manager.attach(channel) is not heartbeat

    assert holds_in_child(begins_anew)
    assert manager.heartbeats == (heartbeat,)


@only_sync
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
