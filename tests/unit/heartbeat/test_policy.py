"""The settings of heartbeats."""

from datetime import timedelta

from rpcwheel.heartbeat import HeartbeatPolicy


def test_the_defaults_are_those_of_dubbo():
    policy = HeartbeatPolicy()
    assert (policy.interval, policy.timeout, policy.drain_timeout) == (60.0, None, 0.0)
    assert (policy.reconnect, policy.short) == (True, "interval")


def test_valid_settings_are_accepted():
    assert HeartbeatPolicy(interval=None, timeout=1.0).interval is None  # with any timeout
    for timeout in (20, 20.0, timedelta(seconds=20), 1000):  # twice the interval is enough
        assert HeartbeatPolicy(interval=10, timeout=timeout).timeout == timeout
    for drain in (0, 0.0, 2.5, timedelta(seconds=3), None):
        assert HeartbeatPolicy(drain_timeout=drain).drain_timeout == drain
