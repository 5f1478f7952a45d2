"""The settings of `DeadlinePolicy` and `RetryPolicy`."""

from datetime import timedelta

import grpc
import pytest

from rpcwheel.call import DeadlinePolicy, RetryPolicy


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


@pytest.mark.parametrize("name", ["message_timeout", "slow_call_threshold"])
@pytest.mark.parametrize("part", [2.0, timedelta(seconds=3)])
def test_a_limit_may_be_shorter_than_the_timeout(name, part):
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
