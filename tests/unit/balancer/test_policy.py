"""The settings of a balanced channel: defaults, bounds, conversion."""

import math

import pytest

from rpcwheel import BalancerPolicy, ConfigurationError
from rpcwheel.backoff import Backoff
from rpcwheel.balancer import OutlierEjectionPolicy
from rpcwheel.balancer.policy import DEFAULT_HEALTH_CHECK_BACKOFF
from rpcwheel.balancer.subchannels import subchannel_options

SECOND = 1_000_000_000


def test_settings_out_of_range_are_refused_by_name():
    rows = [
        *((name, value) for name in ("pick_timeout", "drain_timeout") for value in (-1, math.nan)),
        ("pick_timeout", math.inf),
        ("health_check_timeout", 0),
        ("slow_start", 0),
        ("subset_size", 0),
        ("outlier_ejection", 0),
    ]
    for name, value in rows:
        with pytest.raises(ConfigurationError, match=name):
            BalancerPolicy(**{name: value})
    for name in ("max_ejection_percent", "failure_percentage"):
        with pytest.raises(ConfigurationError, match=name):
            OutlierEjectionPolicy(**{name: 101})
    for value in ("5", True, [5]):
        with pytest.raises(TypeError):
            BalancerPolicy(pick_timeout=value)


def test_a_number_for_outlier_ejection_is_that_of_consecutive_failures():
    policy = BalancerPolicy(outlier_ejection=3)
    assert policy.outlier_ejection == OutlierEjectionPolicy(consecutive_failures=3)


def test_health_checks_back_off_from_half_a_second_to_ten():
    backoff = Backoff(DEFAULT_HEALTH_CHECK_BACKOFF)
    delays = [backoff.next_delay_ns(1, elapsed_ns=0, error=None) for _ in range(200)]
    assert max(delays) <= SECOND // 2
    assert len(set(delays)) > 1
    late = [backoff.next_delay_ns(64, elapsed_ns=0, error=None) for _ in range(200)]
    assert 5 * SECOND < max(late) <= 10 * SECOND


def test_subchannels_reconnect_every_three_seconds_unless_an_option_says_otherwise():
    name = "grpc.max_reconnect_backoff_ms"
    assert dict(subchannel_options([]))[name] == 3_000
    assert dict(subchannel_options([(name, 50)]))[name] == 50
