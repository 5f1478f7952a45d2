"""A policy's figures: each default once."""

from datetime import timedelta

import pytest
from tenacity import wait_fixed
from tenacity.wait import wait_base

from rpcwheel.durations import to_seconds
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.rules import LEAST_RETRY_NS, RegistryRules


def seconds(policy):
    rules = RegistryRules.of(policy)
    figures = (rules.lease_ns, rules.renew_ns, rules.timeout_ns, rules.jitter_ns, rules.hold_ns)
    return [to_seconds(ns) for ns in figures]


def test_by_default_a_lease_is_15_s_and_the_rest_follows_from_it():
    assert seconds(RegistryPolicy()) == [15, 5, 3, 5, 30]
    assert seconds(RegistryPolicy(lease=3.0)) == [3, 1, 3, 1, 6]
    assert seconds(RegistryPolicy(lease=60.0)) == [60, 20, 3, 5, 120]


def test_what_is_given_is_taken():
    given = RegistryPolicy(lease=9, renew=1, timeout=timedelta(seconds=2), jitter=3.5, hold=4)
    assert seconds(given) == [9, 1, 2, 3.5, 4]


@pytest.mark.parametrize(("lease", "longest"), [(15.0, 5.0), (300.0, 30.0)])
def test_tries_come_at_random_up_to_a_fifth_of_a_second_then_twice_that_up_to_a_third(
    lease, longest
):
    rules = RegistryRules.of(RegistryPolicy(lease=lease))
    for attempt, most in ((1, 0.2), (2, 0.4), (3, 0.8), (20, longest), (100_000, longest)):
        waits = [rules.retry_ns(attempt, elapsed_ns=0, error=None) / 1e9 for _ in range(300)]
        assert max(waits) <= most
        assert max(waits) > most * 0.8
        assert min(waits) < most * 0.2


class Broken(wait_base):
    def __call__(self, retry_state):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("retry", "expected"),
    [(2.0, 2.0), (wait_fixed(3), 3.0), (0.0, LEAST_RETRY_NS / 1e9), (Broken(), 5.0)],
)
def test_a_wait_of_ones_own_is_taken_as_long_as_it_is_one(retry, expected):
    rules = RegistryRules.of(RegistryPolicy(retry=retry))
    assert rules.retry_ns(1, elapsed_ns=0, error=None) / 1e9 == expected


def test_there_is_no_wait_without_end():
    rules = RegistryRules.of(RegistryPolicy(retry=wait_fixed(float("inf"))))
    assert rules.retry_ns(1, elapsed_ns=0, error=None) / 1e9 == 5.0
