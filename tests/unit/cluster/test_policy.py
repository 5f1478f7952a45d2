"""The settings of a ClusterChannel: defaults, checks, conversion."""

import math

import grpc
import pytest

from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster.arguments import credentials_for, member_options, whole_state
from rpcwheel.cluster.member import Rules
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError

SECOND = 1_000_000_000


def test_the_defaults():
    policy = ClusterPolicy()
    assert (policy.wait, policy.drain, policy.probe_timeout) == (5.0, 30.0, 5.0)
    assert (policy.probe, policy.warmup, policy.zone) == (None, None, "")


def test_wrong_settings_are_refused():
    rows = [
        *((name, value) for name in ("wait", "drain") for value in (-1, math.inf, math.nan)),
        ("probe_timeout", 0),
        ("warmup", 0),
    ]
    for name, value in rows:
        with pytest.raises(ConfigurationError, match=name):
            ClusterPolicy(**{name: value})
    for value in ("5", True, [5]):
        with pytest.raises(TypeError):
            ClusterPolicy(wait=value)


def test_calls_on_a_removed_member_may_have_no_time_or_all_the_time():
    assert Rules.of(ClusterPolicy(drain=0)).drain_ns == 0
    assert Rules.of(ClusterPolicy(drain=None)).drain_ns == NEVER


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


# Arguments


def test_a_lost_server_is_looked_for_every_three_seconds_unless_it_is_told_otherwise():
    name = "grpc.max_reconnect_backoff_ms"
    assert dict(member_options([]))[name] == 3_000
    assert dict(member_options([(name, 50)]))[name] == 50
    assert dict(member_options([]))["grpc.use_local_subchannel_pool"] == 1


def test_tls_is_for_the_protocol_grpcs_or_for_all_if_credentials_are_given():
    own = grpc.ssl_channel_credentials()
    assert credentials_for("grpc", None) is None
    assert credentials_for("grpcs", None) is not None
    assert credentials_for("grpcs", own) is credentials_for("grpc", own) is own


def test_the_state_of_the_channel_is_the_best_of_its_members():
    rows = {
        "READY CONNECTING": "READY",
        "IDLE CONNECTING TRANSIENT_FAILURE": "CONNECTING",
        "TRANSIENT_FAILURE IDLE": "IDLE",
        "TRANSIENT_FAILURE": "TRANSIENT_FAILURE",
        "SHUTDOWN": "TRANSIENT_FAILURE",
        "": "TRANSIENT_FAILURE",
    }
    state = grpc.ChannelConnectivity
    got = {names: whole_state(state[name] for name in names.split()).name for names in rows}
    assert got == rows
