"""The configuration of a method: its settings, the deadline of its calls, the cache."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.call import DeadlinePolicy, RetryPolicy
from rpcwheel.call.config import MethodConfig, MethodConfigs
from rpcwheel.call.failed_calls import default_messages
from rpcwheel.call.policy import CallPolicy, MethodPolicy
from rpcwheel.durations import NEVER

S = 1_000_000_000


def config_of(**settings):
    return MethodConfig.from_policy(MethodPolicy(**settings))


# --- Settings ---


def test_times_are_converted_to_nanoseconds():
    deadline = DeadlinePolicy(
        timeout=2.5, message_timeout=timedelta(seconds=1), slow_call_threshold=0.25
    )
    made = config_of(timeout=deadline)
    assert made.timeout_ns == 2_500_000_000
    assert made.message_timeout_ns == S
    assert made.slow_ns == 250_000_000
    assert made.propagate_deadline is True
    assert made.has_message_timeout
    assert not config_of(timeout=2).has_message_timeout


def test_a_retry_policy_with_one_attempt_is_ignored():
    assert config_of(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=1)).retry is None
    two = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=2)
    assert config_of(retry=two).retry.max_attempts == 2


# --- The deadline of a call ---


nanoseconds = st.none() | st.integers(-S, 9 * S)


@given(st.none() | st.integers(1, 9), nanoseconds, nanoseconds, st.booleans())
def test_the_deadline_is_the_earliest_of_policy_caller_and_the_call_being_served(
    timeout, own_ns, left_ns, propagate
):
    made = config_of(timeout=DeadlinePolicy(timeout=timeout, propagate_deadline=propagate))
    limits = [timeout and timeout * S, own_ns, left_ns if propagate else None]
    earliest = min((S + limit for limit in limits if limit is not None), default=NEVER)
    assert made.deadline_ns(S, own_ns, left_ns) == earliest


# --- The configuration of all methods ---


def test_each_method_has_its_own_configuration_which_is_made_once():
    configs = MethodConfigs(
        CallPolicy(timeout=2.0, methods={"/shop.Orders/Get": MethodPolicy(timeout=1.0)})
    )
    assert configs.config_for("/shop.Orders/Get").timeout_ns == S
    assert configs.config_for("/shop.Orders/Push").timeout_ns == 2 * S
    assert configs.config_for("/shop.Orders/Get") is configs.config_for("/shop.Orders/Get")


@pytest.mark.parametrize(
    ("default", "messages"),
    [
        (None, []),
        ([], []),
        ([b"a", b"b"], [b"a", b"b"]),
        ((b"a",), [b"a"]),
        (b"abc", [b"abc"]),
        ("abc", ["abc"]),
        (7, [7]),
    ],
)
def test_the_default_of_a_response_stream_is_a_list_of_messages_or_one_message(default, messages):
    assert list(default_messages(default)) == messages
