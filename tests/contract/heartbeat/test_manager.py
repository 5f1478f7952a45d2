"""Who keeps the heartbeats of many connections, in both worlds."""

import pytest

from fixtures.heartbeat_twins import IN_AIO, IN_SYNC
from fixtures.waiting import wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.heartbeat import HealthProbe, HeartbeatPolicy, HeartbeatState, MethodProbe


@IN_SYNC
def test_the_defaults_are_those_of_the_policy(twin):
    manager = twin.do(twin.manager)
    assert manager.policy == HeartbeatPolicy()
    assert manager.heartbeats == ()


@IN_AIO
def test_a_manager_can_be_made_of_a_policy(twin, timer):
    policy = HeartbeatPolicy(interval=5, timeout=12, drain_timeout=None, reconnect=False)
    manager = twin.do(twin.manager.from_policy, policy, timer=timer, probe=MethodProbe("/a/b"))
    assert manager.policy == policy


def test_a_connection_attached_twice_has_one_heartbeat(twin, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    assert twin.do(manager.attach, channel, probe=HealthProbe("other")) is heartbeat
    assert manager.heartbeats == (heartbeat,)
    assert timer.pending == 1


@IN_AIO
def test_a_connection_that_was_detached_can_be_attached_again(twin, channel, manager, timer):
    first = twin.do(manager.attach, channel)
    first.detach()
    second = twin.do(manager.attach, channel)
    first.detach()
    assert second is not first
    assert manager.heartbeats == (second,)
    assert (first.state, timer.pending) == (HeartbeatState.CLOSED, 1)


def test_attaching_lets_go_of_connections_that_were_dropped(twin, asked, channel, manager):
    dropped = twin.do(twin.channel, asked.target)
    heartbeat = twin.do(manager.attach, dropped)
    twin.do(dropped.close) if twin.name == "aio" else None
    del dropped
    assert wait_until(lambda: heartbeat.orphaned)
    assert manager.heartbeats == ((heartbeat,) if twin.name == "sync" else ())
    kept = twin.do(manager.attach, channel)
    assert manager.heartbeats == (kept,)
    assert repr(manager).startswith("<HeartbeatManager of 1 connections")


@IN_SYNC
def test_two_managers_watch_a_connection_each_in_its_own_way(twin, channel, manager, timer):
    other = twin.do(twin.manager, timer, interval=5)
    assert twin.do(other.attach, channel) is not twin.do(manager.attach, channel)
    twin.do(other.close)
    assert len(manager.heartbeats) == 1


def test_closing_detaches_all_and_takes_no_more(twin, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    twin.do(manager.close)
    twin.do(manager.close)
    assert (heartbeat.state, manager.heartbeats, timer.pending) == (
        *(HeartbeatState.CLOSED, ()),
        0,
    )
    assert not channel.closed
    with pytest.raises(RuntimeError, match="this HeartbeatManager is closed"):
        twin.do(manager.attach, channel)


def test_arguments_that_are_refused(twin):
    wrong = []
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
            "of a policy: HeartbeatManager.from_policy(policy)",
        ),
    ):
        try:
            twin.do(twin.manager, **settings)
        except Exception as raised:  # noqa: BLE001 - compared with what is wanted
            if isinstance(raised, error) and text in str(raised):
                continue
            wrong.append((settings, raised))
        else:
            wrong.append((settings, "accepted"))
    assert not wrong
    with pytest.raises(TypeError, match="policy must be a HeartbeatPolicy"):
        twin.manager.from_policy(5.0)


class Probe:
    """A probe of the user's."""

    def __init__(self, method, request):
        self.method, self.request = method, request

    def judge(self, response):
        """Never asked."""


def test_arguments_that_attach_refuses(twin, channel, manager, timer):
    for connection in ("127.0.0.1:1", None, 5):
        with pytest.raises(TypeError, match="connection must be a gRPC channel"):
            twin.do(manager.attach, connection)
    with pytest.raises(ConfigurationError, match="full name such as"):
        twin.do(manager.attach, channel, probe=Probe("Ping", b""))
    with pytest.raises(TypeError, match="a probe's request is the serialised message"):
        twin.do(manager.attach, channel, probe=Probe("/a/b", "text"))
    assert (manager.heartbeats, timer.pending) == ((), 0)
