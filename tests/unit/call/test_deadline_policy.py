"""What a user may set for the time of a call and for its retries."""

import re
from datetime import timedelta

import grpc
import pytest
import tenacity

from rpcwheel.call import DeadlinePolicy, RetryPolicy
from rpcwheel.errors import ConfigurationError


def test_the_defaults_of_a_deadline():
    policy = DeadlinePolicy()
    assert (policy.timeout, policy.message_timeout, policy.slow_call_threshold) == (
        None,
        None,
        None,
    )
    assert policy.propagate is True


def test_the_defaults_of_a_retry():
    policy = RetryPolicy(on="UNAVAILABLE")
    assert policy.attempts == 3
    assert (policy.wait.multiplier, policy.wait.max, policy.wait.exp_base) == (0.1, 2.0, 2)
    assert isinstance(policy.wait, tenacity.wait_random_exponential)
    assert policy.attempt_timeout is None
    assert (policy.budget, policy.reserve) == (0.2, 10)
    assert policy.replay_buffer_bytes == 1 << 20
    assert policy.max_pushback == 300.0


@pytest.mark.parametrize(
    "on",
    [
        "UNAVAILABLE",
        grpc.StatusCode.UNAVAILABLE,
        ["UNAVAILABLE"],
        {grpc.StatusCode.UNAVAILABLE},
        ("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_codes_may_be_given_one_or_many_by_name_or_by_grpc_s_enum(on):
    assert RetryPolicy(on=on).on == {"UNAVAILABLE"}


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("UNAVAILBLE", "`on` names 'UNAVAILBLE', which is no gRPC status code; did you mean"),
        ("unavailable", "did you mean 'UNAVAILABLE'?"),
        ("OK", "`on` names the status code OK, which is no failure"),
        ([], '`on` is empty; name the status codes to retry after, such as on={"UNAVAILABLE"}'),
    ],
)
def test_codes_that_are_none_are_refused_with_what_is_allowed(on, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        RetryPolicy(on=on)


def test_without_codes_the_message_says_what_is_retried():
    said = r"`on` is missing; .* only calls of methods that are marked idempotent are retried"
    with pytest.raises(ConfigurationError, match=said):
        RetryPolicy()


@pytest.mark.parametrize("on", [14, ConnectionError, [None], lambda error: True])
def test_what_is_no_code_is_a_type_error(on):
    with pytest.raises(TypeError, match="`on` must name status codes, such as 'UNAVAILABLE'"):
        RetryPolicy(on=on)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attempts": 0}, "attempts: Input should be greater than or equal to 1, not 0"),
        ({"wait": -1}, "wait must not be negative"),
        ({"wait": {"initial": 1.0}}, "wait: `max` is missing"),
        ({"budget": 1.5}, "budget: Input should be less than or equal to 1, not 1.5"),
        ({"budget": float("nan")}, "budget: "),
        ({"reserve": -1}, "reserve: Input should be greater than or equal to 0, not -1"),
        ({"replay_buffer_bytes": -1}, "replay_buffer_bytes: "),
        ({"attempt_timeout": 0}, "attempt_timeout: it must be a finite time above zero"),
        ({"max_pushback": 0}, "max_pushback: it must be a finite time above zero"),
        ({"max_pushback": float("nan")}, "max_pushback: "),
        ({"max_pushback": float("inf")}, "for no limit leave it out, or give None"),
        ({"attempt_timeout": float("inf")}, "for no limit leave it out, or give None"),
        ({"retries": 3}, "there is no setting 'retries'; "),
        ({"attempt": 3}, "did you mean 'attempts'?"),
    ],
)
def test_a_retry_that_makes_no_sense_is_refused_with_what_is_allowed(settings, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        RetryPolicy(on="UNAVAILABLE", **settings)


@pytest.mark.parametrize(
    "settings", [{"attempts": "3"}, {"attempts": 1.5}, {"budget": "0.2"}, {"wait": "1"}]
)
def test_a_setting_of_a_wrong_type_is_a_type_error(settings):
    with pytest.raises(TypeError):
        RetryPolicy(on="UNAVAILABLE", **settings)
    with pytest.raises(TypeError, match="propagate: it must be true or false, not 1"):
        DeadlinePolicy(propagate=1)


@pytest.mark.parametrize("name", ["message_timeout", "slow_call_threshold"])
@pytest.mark.parametrize("part", [2.0, timedelta(seconds=3)])
def test_a_limit_that_the_whole_call_does_not_last_for_is_refused(name, part):
    with pytest.raises(ConfigurationError, match=rf"^{name} .* would never be reached, .*\(2\.0\)"):
        DeadlinePolicy(timeout=2.0, **{name: part})
    assert getattr(DeadlinePolicy(timeout=3.1, **{name: part}), name) == part


def test_a_deadline_takes_from_a_more_general_one_what_it_does_not_set():
    general = DeadlinePolicy(timeout=10, message_timeout=2, slow_call_threshold=5, propagate=False)
    assert DeadlinePolicy(slow_call_threshold=1).over(general) == DeadlinePolicy(
        timeout=10, message_timeout=2, slow_call_threshold=1, propagate=False
    )
    assert DeadlinePolicy(message_timeout=None).over(general).message_timeout is None
    assert DeadlinePolicy(slow_call_threshold=1).over(None) == DeadlinePolicy(slow_call_threshold=1)


def test_a_shorter_timeout_leaves_out_what_it_inherits_and_would_not_reach():
    general = DeadlinePolicy(timeout=10, message_timeout=2, slow_call_threshold=5)
    shorter = DeadlinePolicy(timeout=3).over(general)
    assert (shorter.timeout, shorter.message_timeout, shorter.slow_call_threshold) == (3, 2, None)
