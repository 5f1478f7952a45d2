"""The settings of a balanced channel: defaults, bounds, conversion."""

import math

import pytest

from rpcwheel import BalancerPolicy, ConfigurationError, OutlierEjectionPolicy
from rpcwheel.balancer.base import subchannel_options
from rpcwheel.balancer.policy import Settings
from rpcwheel.durations import NEVER

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
    assert Settings.of(BalancerPolicy(outlier_ejection=None)).ejection is None


def test_calls_of_a_removed_instance_may_have_no_time_or_all_the_time():
    assert Settings.of(BalancerPolicy(drain_timeout=0)).drain_ns == 0
    assert Settings.of(BalancerPolicy(drain_timeout=None)).drain_ns == NEVER


def test_durations_are_converted_to_nanoseconds():
    settings = Settings.of(
        BalancerPolicy(
            pick_timeout=1,
            drain_timeout=2,
            health_check_timeout=3,
            slow_start=4,
            health_check_backoff=5,
        )
    )
    assert settings.pick_timeout_ns == 1 * SECOND
    assert settings.drain_ns == 2 * SECOND
    assert settings.check_timeout_ns == 3 * SECOND
    assert settings.slow_start_ns == 4 * SECOND
    assert settings.check_backoff.next_delay_ns(9, elapsed_ns=0, error=None) == 5 * SECOND


def test_health_checks_back_off_at_random_from_half_a_second_to_ten():
    backoff = Settings.of(BalancerPolicy()).check_backoff
    delays = [backoff.next_delay_ns(1, elapsed_ns=0, error=None) for _ in range(200)]
    assert max(delays) <= SECOND // 2
    assert len(set(delays)) > 1
    late = [backoff.next_delay_ns(64, elapsed_ns=0, error=None) for _ in range(200)]
    assert 5 * SECOND < max(late) <= 10 * SECOND


def test_subchannels_reconnect_every_three_seconds_unless_an_option_says_otherwise():
    name = "grpc.max_reconnect_backoff_ms"
    assert dict(subchannel_options([]))[name] == 3_000
    assert dict(subchannel_options([(name, 50)]))[name] == 50
