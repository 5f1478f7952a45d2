"""The settings of `DeadlinePolicy` and `RetryPolicy`."""

from datetime import timedelta
from functools import partial

import grpc
import pytest

from fixtures.refusals import not_refused_so
from rpcwheel.call import DeadlinePolicy, RetryPolicy
from rpcwheel.errors import ConfigurationError


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


def retry(words, error=ConfigurationError, **settings):
    return partial(RetryPolicy, **{"retry_on": "UNAVAILABLE"} | settings), error, words


def test_invalid_settings_are_refused_with_what_is_allowed():
    nan, inf = float("nan"), float("inf")
    no_code = "`retry_on` must name status codes, such as 'UNAVAILABLE'"
    above_zero = "it must be a finite time above zero"
    no_bool = "propagate_deadline: it must be true or false, not 1"
    rows = [
        (RetryPolicy, ConfigurationError, "`retry_on` is missing; "),
        (RetryPolicy, ConfigurationError, "only calls of methods that are marked idempotent are"),
        (partial(DeadlinePolicy, propagate_deadline=1), TypeError, no_bool),
        retry("'UNAVAILBLE', which is not a gRPC status code; did you", retry_on="UNAVAILBLE"),
        retry("did you mean 'UNAVAILABLE'?", retry_on="unavailable"),
        retry("`retry_on` names the status code OK, which is not an error", retry_on="OK"),
        retry("`retry_on` is empty; name the status codes to retry after", retry_on=[]),
        *(retry(no_code, TypeError, retry_on=on) for on in (14, ConnectionError, [None], callable)),
        retry("max_attempts: it must be greater than or equal to 1, not 0", max_attempts=0),
        retry("wait must not be negative", backoff=-1),
        retry("backoff: `max` is missing", backoff={"initial": 1.0}),
        retry("retry_budget: it must be a share from 0 to 1, or", retry_budget=1.5),
        retry("retry_budget: ", retry_budget=nan),
        retry("min_retries: it must be greater than or equal to 0, not -1", min_retries=-1),
        retry("replay_buffer_bytes: ", replay_buffer_bytes=-1),
        retry(f"attempt_timeout: {above_zero}", attempt_timeout=0),
        retry("for no limit give None", attempt_timeout=inf),
        retry(f"max_pushback: {above_zero}", max_pushback=0),
        retry("max_pushback: ", max_pushback=nan),
        retry("for no limit give None", max_pushback=inf),
        retry("there is no setting 'retries'; ", retries=3),
        retry("did you mean 'max_attempts'?", attempts=3),
        retry("max_attempts: ", TypeError, max_attempts="3"),
        retry("max_attempts: ", TypeError, max_attempts=1.5),
        retry("retry_budget: ", TypeError, retry_budget="0.2"),
        retry("backoff: ", TypeError, backoff="1"),
    ]
    assert not_refused_so(rows) == []


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
