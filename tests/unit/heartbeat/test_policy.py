"""What a user may set for heartbeats."""

import re
from datetime import timedelta

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.heartbeat import HeartbeatPolicy


def test_the_defaults_are_dubbo_s():
    policy = HeartbeatPolicy()
    assert (policy.interval, policy.timeout, policy.drain) == (60.0, None, 0.0)
    assert policy.replace is True


def test_a_plain_number_stands_for_the_interval():
    assert HeartbeatPolicy.short == "interval"


def test_heartbeats_can_be_switched_off_whatever_the_timeout_is():
    assert HeartbeatPolicy(interval=None, timeout=1.0).interval is None


@pytest.mark.parametrize("timeout", [20, 20.0, timedelta(seconds=20), 1000])
def test_a_timeout_of_twice_the_interval_is_enough(timeout):
    assert HeartbeatPolicy(interval=10, timeout=timeout).timeout == timeout


@pytest.mark.parametrize("drain", [0, 0.0, 2.5, timedelta(seconds=3), None])
def test_calls_may_drain_for_any_time_or_for_ever(drain):
    assert HeartbeatPolicy(drain=drain).drain == drain


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"interval": 0}, "interval: it must be a finite time above zero"),
        ({"interval": -1}, "interval: it must be a finite time above zero"),
        ({"interval": float("inf")}, "for no limit leave it out, or give None"),
        ({"timeout": 0}, "timeout: it must be a finite time above zero"),
        ({"interval": 10, "timeout": 19.9}, "timeout (19.9) is less than twice interval (10"),
        ({"timeout": 60}, "timeout (60.0) is less than twice interval (60.0)"),
        ({"drain": -0.1}, "drain: it must be a finite time of zero or more; None lets calls"),
        ({"drain": float("inf")}, "drain: it must be a finite time of zero or more"),
        ({"drain": float("nan")}, "drain: it is NaN"),
        ({"every": 10}, "there is no setting 'every'"),
    ],
)
def test_what_can_t_work_is_refused_with_what_is_allowed(settings, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        HeartbeatPolicy(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"interval": "10 s"}, {"timeout": [1]}, {"drain": "0"}, {"drain": True}, {"replace": 1}],
)
def test_what_is_no_time_is_a_type_error(settings):
    with pytest.raises(TypeError, match=next(iter(settings))):
        HeartbeatPolicy(**settings)
