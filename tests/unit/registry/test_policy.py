"""What a user may set for registries, and the figures that follow."""

from datetime import timedelta
from unittest.mock import Mock

from tenacity import wait_fixed

from rpcwheel.durations import to_seconds
from rpcwheel.registry.policy import LEAST_RETRY_NS, RegistryPolicy, RegistryRules


def seconds(policy):
    rules = RegistryRules.from_policy(policy)
    figures = (
        rules.lease_ns,
        rules.renew_interval_ns,
        rules.timeout_ns,
        rules.jitter_ns,
        rules.stale_timeout_ns,
    )
    return [to_seconds(ns) for ns in figures]


def test_by_default_the_lease_is_15_s_and_other_times_follow_from_it():
    assert seconds(RegistryPolicy()) == [15, 5, 3, 5, 30]
    assert seconds(RegistryPolicy(lease_ttl=3.0)) == [3, 1, 3, 1, 6]
    assert seconds(RegistryPolicy(lease_ttl=60.0)) == [60, 20, 3, 5, 120]


def test_given_times_are_used():
    given = RegistryPolicy(
        lease_ttl=9, renew=1, timeout=timedelta(seconds=2), jitter=3.5, stale_timeout=4
    )
    assert seconds(given) == [9, 1, 2, 3.5, 4]


def test_the_default_backoff_doubles_from_200_ms_to_a_third_of_the_lease():
    for lease, longest in ((15.0, 5.0), (300.0, 30.0)):
        rules = RegistryRules.from_policy(RegistryPolicy(lease_ttl=lease))
        for attempt, most in ((1, 0.2), (2, 0.4), (3, 0.8), (20, longest), (100_000, longest)):
            waits = [rules.retry_ns(attempt, elapsed_ns=0, error=None) / 1e9 for _ in range(300)]
            assert 0.5 * most <= min(waits) <= 0.6 * most
            assert 0.9 * most <= max(waits) <= most


def test_a_custom_backoff_is_used_if_it_returns_a_finite_time():
    for retry, expected in (
        (wait_fixed(3), 3.0),
        (0.0, LEAST_RETRY_NS / 1e9),
        (Mock(side_effect=ZeroDivisionError()), 5.0),
        (Mock(side_effect=SystemExit(3)), 5.0),
        (wait_fixed(float("inf")), 5.0),
    ):
        rules = RegistryRules.from_policy(RegistryPolicy(backoff=retry))
        assert rules.retry_ns(1, elapsed_ns=0, error=None) / 1e9 == expected, retry
