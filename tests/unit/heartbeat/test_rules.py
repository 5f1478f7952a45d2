"""The names of states, and the times that are derived from a policy."""

from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.durations import NEVER
from rpcwheel.heartbeat import HeartbeatPolicy
from rpcwheel.heartbeat.rules import HeartbeatRules, HeartbeatState

S = 10**9


def test_by_default_the_timeout_is_three_intervals_and_the_tick_a_third():
    rules = HeartbeatRules.from_policy(HeartbeatPolicy())
    grid, grace = 60 * S // 32, 20 * S // 8
    assert rules == HeartbeatRules(
        60 * S, 180 * S, 20 * S, 60 * S, grid, grace, grace, reconnect=True
    )


def test_without_an_interval_the_rules_say_never_whatever_the_timeout_is():
    policy = HeartbeatPolicy(interval=None, timeout=1.0)
    assert HeartbeatRules.from_policy(policy).interval_ns == NEVER


def test_the_random_delay_leaves_time_for_two_misses():
    for timeout, spread in ((20, 3020), (26, 9020), (30, 10_000), (999, 10_000)):
        rules = HeartbeatRules.from_policy(
            HeartbeatPolicy(interval=10, timeout=timeout, reconnect=False)
        )
        assert (rules.max_jitter_ns // 10**6, rules.reconnect) == (spread, False), timeout


def test_the_grace_is_an_eighth_of_the_tick_but_at_least_a_quarter_second():
    assert HeartbeatRules.from_policy(HeartbeatPolicy(interval=240)).grace_ns == 10 * S
    assert HeartbeatRules.from_policy(HeartbeatPolicy(interval=0.1)).grace_ns == S // 4


@given(st.integers(1, 10**15), st.integers(0, 10**15))
def test_the_latest_heartbeat_leaves_time_for_two_misses(interval_us, more_us):
    interval, timeout = interval_us / 1e6, (2 * interval_us + more_us) / 1e6
    if timeout < 2 * interval:
        return
    rules = HeartbeatRules.from_policy(HeartbeatPolicy(interval=interval, timeout=timeout))
    assert rules.tick_ns > 0
    assert 0 <= rules.max_jitter_ns <= rules.interval_ns
    late_ns = rules.interval_ns + rules.max_jitter_ns + rules.grid_ns
    assert late_ns + 2 * rules.tick_ns <= rules.timeout_ns


def test_states_are_strings_for_logs_and_metrics():
    assert [str(state) for state in HeartbeatState] == [
        *("off", "unused", "alive", "probing", "suspect", "dead", "closed")
    ]
