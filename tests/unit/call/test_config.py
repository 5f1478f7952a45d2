"""The configuration of a method: its settings, the deadline of its calls, the cache."""

from datetime import timedelta

import pytest

from rpcwheel.call import DeadlinePolicy, RetryPolicy, config
from rpcwheel.call.config import MethodConfig, MethodConfigs, messages_of
from rpcwheel.call.policy import CallPolicy, DefaultResponsePolicy, MethodPolicy
from rpcwheel.durations import NEVER
from rpcwheel.failback import FailbackPolicy

S = 1_000_000_000
RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0)


def config_of(**settings):
    return MethodConfig.from_policy(MethodPolicy(**settings))


# --- Settings ---


def test_without_policies_nothing_is_set():
    assert (
        config_of()
        == MethodConfig()
        == MethodConfig(
            timeout_ns=NEVER,
            message_timeout_ns=NEVER,
            slow_ns=NEVER,
            propagate_deadline=True,
            retry=None,
            default_response=None,
            failback=None,
            default_matcher=None,
        )
    )


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


def test_retry_settings_have_whether_the_method_is_idempotent():
    assert config_of(retry=RETRY, idempotent=True).retry.idempotent is True
    assert config_of(retry=RETRY).retry.idempotent is False


def test_a_retry_policy_with_one_attempt_is_ignored():
    assert config_of(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=1)).retry is None
    two = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=2)
    assert config_of(retry=two).retry.max_attempts == 2


def test_default_response_and_failback_are_taken_over():
    default_response = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    failback = FailbackPolicy(retry_on="UNAVAILABLE")
    assert config_of(default_response=default_response).default_response is default_response
    assert config_of(default_response=default_response).default_matcher is not None
    assert config_of(failback=failback).failback is failback
    assert config_of(failback=failback).default_matcher is None


@pytest.mark.parametrize(
    ("settings", "handled"),
    [
        ({}, False),
        ({"timeout": 2}, False),
        ({"idempotent": True}, False),
        ({"retry": RetryPolicy(retry_on="UNAVAILABLE", max_attempts=1)}, False),
        ({"retry": RETRY}, True),
        ({"default_response": DefaultResponsePolicy(on=OSError)}, True),
        ({"failback": FailbackPolicy(retry_on=OSError)}, True),
    ],
)
def test_retry_default_response_and_failback_handle_failures(settings, handled):
    assert config_of(**settings).handles_failures is handled


# --- The deadline of a call ---


def deadline_of(made, now_ns=S, own_ns=None, left_ns=None):
    return made.deadline_ns(now_ns, own_ns, left_ns)


@pytest.mark.parametrize(
    ("timeout", "own_s", "left_s", "deadline_s"),
    [
        (None, None, None, None),
        (3, None, None, 4),
        (None, 2, None, 3),
        (None, None, 5, 6),
        (3, 2, 5, 3),
        (1, 2, 5, 2),
        (3, 2, 1, 2),
    ],
)
def test_the_deadline_is_the_earliest_of_policy_caller_and_the_call_being_served(
    timeout, own_s, left_s, deadline_s
):
    own_ns = None if own_s is None else own_s * S
    left_ns = None if left_s is None else left_s * S
    expected = NEVER if deadline_s is None else deadline_s * S
    assert deadline_of(config_of(timeout=timeout), S, own_ns, left_ns) == expected


def test_without_propagation_the_deadline_of_the_call_being_served_does_not_count():
    made = config_of(timeout=DeadlinePolicy(timeout=9, propagate_deadline=False))
    assert deadline_of(made, S, 5 * S, 1 * S) == 6 * S
    assert deadline_of(made, S, None, -5 * S) == 10 * S


@pytest.mark.parametrize(("own_ns", "left_ns"), [(None, 0), (None, -S), (0, None), (-1, 5 * S)])
def test_without_time_left_the_deadline_has_passed(own_ns, left_ns):
    assert deadline_of(config_of(timeout=9), S, own_ns, left_ns) <= S


# --- The configuration of all methods ---


def test_each_method_has_its_own_configuration_which_is_made_once():
    configs = MethodConfigs(
        CallPolicy(timeout=2.0, methods={"/shop.Orders/Get": MethodPolicy(timeout=1.0)})
    )
    assert configs.config_for("/shop.Orders/Get").timeout_ns == S
    assert configs.config_for("/shop.Orders/Push").timeout_ns == 2 * S
    assert configs.config_for("/shop.Orders/Get") is configs.config_for("/shop.Orders/Get")


def test_a_bounded_number_of_methods_is_cached(monkeypatch):
    monkeypatch.setattr(config, "MAX_METHODS", 3)
    configs = MethodConfigs(CallPolicy(timeout=2.0))
    for number in range(10):
        assert configs.config_for(f"/made.Up/{number}").timeout_ns == 2_000_000_000
        assert len(configs._configs) <= 3


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
    assert list(messages_of(default)) == messages
