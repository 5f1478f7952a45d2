"""What a user may set for a channel of many members."""

import math

import pytest

from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster.member import Rules
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError

SECOND = 1_000_000_000


def test_the_defaults():
    policy = ClusterPolicy()
    assert (policy.wait, policy.drain, policy.probe_timeout) == (5.0, 30.0, 5.0)
    assert (policy.probe, policy.warmup, policy.zone) == (None, None, "")


@pytest.mark.parametrize("name", ["wait", "drain"])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_a_wait_is_finite_and_not_negative(name, value):
    with pytest.raises(ConfigurationError, match=name):
        ClusterPolicy(**{name: value})


@pytest.mark.parametrize("value", ["5", True, [5]])
def test_a_wait_is_a_number(value):
    with pytest.raises(TypeError):
        ClusterPolicy(wait=value)


def test_calls_on_a_removed_member_may_have_no_time_or_all_the_time():
    assert Rules.of(ClusterPolicy(drain=0)).drain_ns == 0
    assert Rules.of(ClusterPolicy(drain=None)).drain_ns == NEVER


@pytest.mark.parametrize("name", ["probe_timeout", "warmup"])
def test_a_time_to_do_something_is_above_zero(name):
    with pytest.raises(ConfigurationError, match=name):
        ClusterPolicy(**{name: 0})


def test_rules_are_the_policy_in_integers():
    rules = Rules.of(ClusterPolicy(wait=1, drain=2, probe_timeout=3, warmup=4, zone="b", probe=5))
    assert rules[:5] == (SECOND, 2 * SECOND, 3 * SECOND, 4 * SECOND, "b")
    assert rules.backoff.next_delay_ns(9, elapsed_ns=0, error=None) == 5 * SECOND


def test_a_probe_waits_at_random_up_to_half_a_second_then_longer_but_at_most_ten():
    backoff = Rules.of(ClusterPolicy()).backoff
    delays = [backoff.next_delay_ns(1, elapsed_ns=0, error=None) for _ in range(200)]
    assert max(delays) <= SECOND // 2
    assert len(set(delays)) > 1
    late = [backoff.next_delay_ns(64, elapsed_ns=0, error=None) for _ in range(200)]
    assert 5 * SECOND < max(late) <= 10 * SECOND
