"""The settings of heartbeats."""

import re
from datetime import timedelta

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.heartbeat import HeartbeatPolicy


def test_the_defaults_are_those_of_dubbo():
    policy = HeartbeatPolicy()
    assert (policy.interval, policy.timeout, policy.drain_timeout) == (60.0, None, 0.0)
    assert policy.reconnect is True


def test_a_plain_number_stands_for_the_interval():
    assert HeartbeatPolicy.short == "interval"


def test_heartbeats_can_be_switched_off_with_any_timeout():
    assert HeartbeatPolicy(interval=None, timeout=1.0).interval is None


def test_valid_settings_are_accepted():
    for timeout in (20, 20.0, timedelta(seconds=20), 1000):  # twice the interval is enough
        assert HeartbeatPolicy(interval=10, timeout=timeout).timeout == timeout
    for drain in (0, 0.0, 2.5, timedelta(seconds=3), None):
        assert HeartbeatPolicy(drain_timeout=drain).drain_timeout == drain


REFUSED = [
    ({"interval": 0}, "interval: it must be a finite time above zero"),
    ({"interval": -1}, "interval: it must be a finite time above zero"),
    ({"interval": float("inf")}, "for no limit give None"),
    ({"timeout": 0}, "timeout: it must be a finite time above zero"),
    ({"interval": 10, "timeout": 19.9}, "timeout (19.9) is less than twice interval (10"),
    ({"timeout": 60}, "timeout (60.0) is less than twice interval (60.0)"),
    (
        {"drain_timeout": -0.1},
        "drain_timeout: it must be a finite time of zero or more, not -0.1",
    ),
    (
        {"drain_timeout": float("inf")},
        "drain_timeout: it must be a finite time; for no limit give None",
    ),
    (
        {"drain_timeout": float("nan")},
        "drain_timeout: it must be a finite time above zero, not NaN",
    ),
    ({"every": 10}, "there is no setting 'every'"),
]
MISTYPED = [
    {"interval": "10 s"},
    {"timeout": [1]},
    {"drain_timeout": "0"},
    {"drain_timeout": True},
    {"reconnect": 1},
]


def test_invalid_settings_are_refused_with_a_hint():
    rows = [(settings, ConfigurationError, text) for settings, text in REFUSED]
    rows += [(settings, TypeError, next(iter(settings))) for settings in MISTYPED]
    for settings, error, text in rows:
        with pytest.raises(error, match=re.escape(text)):
            HeartbeatPolicy(**settings)
