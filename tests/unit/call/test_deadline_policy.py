"""The settings of `DeadlinePolicy` and `RetryPolicy`."""

import re
from datetime import timedelta

import grpc
import pytest

from rpcwheel.backoff import JitteredWait
from rpcwheel.call import DeadlinePolicy, RetryPolicy
from rpcwheel.errors import ConfigurationError


def test_the_defaults_of_a_deadline():
    policy = DeadlinePolicy()
    assert (policy.timeout, policy.message_timeout, policy.slow_call_threshold) == (
        None,
        None,
        None,
    )
    assert policy.propagate_deadline is True


def test_the_defaults_of_a_retry():
    policy = RetryPolicy(retry_on="UNAVAILABLE")
    assert policy.max_attempts == 3
    assert policy.backoff == JitteredWait(initial=0.1, max=2.0)
    assert policy.attempt_timeout is None
    assert (policy.retry_budget, policy.min_retries) == (0.2, 10)
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
def test_codes_may_be_names_or_members_of_grpcs_enum(on):
    assert RetryPolicy(retry_on=on).retry_on == {"UNAVAILABLE"}


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (
            "UNAVAILBLE",
            "`retry_on` names 'UNAVAILBLE', which is not a gRPC status code; did you mean",
        ),
        ("unavailable", "did you mean 'UNAVAILABLE'?"),
        ("OK", "`retry_on` names the status code OK, which is not an error"),
        (
            [],
            "`retry_on` is empty; name the status codes to retry after, such as retry_on=",
        ),
    ],
)
def test_unknown_codes_are_refused_with_the_allowed_ones(on, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        RetryPolicy(retry_on=on)


def test_without_codes_the_error_says_that_they_are_required():
    message = (
        r"`retry_on` is missing; .* only calls of methods that are marked idempotent are retried"
    )
    with pytest.raises(ConfigurationError, match=message):
        RetryPolicy()


@pytest.mark.parametrize("on", [14, ConnectionError, [None], lambda error: True])
def test_a_code_of_another_type_is_a_type_error(on):
    with pytest.raises(TypeError, match="`retry_on` must name status codes, such as 'UNAVAILABLE'"):
        RetryPolicy(retry_on=on)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_attempts": 0}, "max_attempts: it must be greater than or equal to 1, not 0"),
        ({"backoff": -1}, "wait must not be negative"),
        ({"backoff": {"initial": 1.0}}, "backoff: `max` is missing"),
        (
            {"retry_budget": 1.5},
            "retry_budget: it must be a share from 0 to 1, or",
        ),
        ({"retry_budget": float("nan")}, "retry_budget: "),
        ({"min_retries": -1}, "min_retries: it must be greater than or equal to 0, not -1"),
        ({"replay_buffer_bytes": -1}, "replay_buffer_bytes: "),
        ({"attempt_timeout": 0}, "attempt_timeout: it must be a finite time above zero"),
        ({"max_pushback": 0}, "max_pushback: it must be a finite time above zero"),
        ({"max_pushback": float("nan")}, "max_pushback: "),
        ({"max_pushback": float("inf")}, "for no limit give None"),
        ({"attempt_timeout": float("inf")}, "for no limit give None"),
        ({"retries": 3}, "there is no setting 'retries'; "),
        ({"attempts": 3}, "did you mean 'max_attempts'?"),
    ],
)
def test_retry_settings_out_of_range_are_refused_with_the_allowed_range(settings, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        RetryPolicy(retry_on="UNAVAILABLE", **settings)


@pytest.mark.parametrize(
    "settings",
    [{"max_attempts": "3"}, {"max_attempts": 1.5}, {"retry_budget": "0.2"}, {"backoff": "1"}],
)
def test_a_setting_of_a_wrong_type_is_a_type_error(settings):
    with pytest.raises(TypeError):
        RetryPolicy(retry_on="UNAVAILABLE", **settings)
    with pytest.raises(TypeError, match="propagate_deadline: it must be true or false, not 1"):
        DeadlinePolicy(propagate_deadline=1)


@pytest.mark.parametrize("name", ["message_timeout", "slow_call_threshold"])
@pytest.mark.parametrize("part", [2.0, timedelta(seconds=3)])
def test_a_limit_longer_than_the_timeout_is_refused(name, part):
    with pytest.raises(ConfigurationError, match=rf"^{name} .* would never be reached, .*\(2\.0\)"):
        DeadlinePolicy(timeout=2.0, **{name: part})
    assert getattr(DeadlinePolicy(timeout=3.1, **{name: part}), name) == part


def test_settings_that_are_not_set_are_inherited():
    general = DeadlinePolicy(
        timeout=10, message_timeout=2, slow_call_threshold=5, propagate_deadline=False
    )
    assert DeadlinePolicy(slow_call_threshold=1).over(general) == DeadlinePolicy(
        timeout=10, message_timeout=2, slow_call_threshold=1, propagate_deadline=False
    )
    assert DeadlinePolicy(message_timeout=None).over(general).message_timeout is None
    assert DeadlinePolicy(slow_call_threshold=1).over(None) == DeadlinePolicy(slow_call_threshold=1)


def test_inherited_limits_longer_than_the_timeout_are_ignored():
    general = DeadlinePolicy(timeout=10, message_timeout=2, slow_call_threshold=5)
    shorter = DeadlinePolicy(timeout=3).over(general)
    assert (shorter.timeout, shorter.message_timeout, shorter.slow_call_threshold) == (3, 2, None)
