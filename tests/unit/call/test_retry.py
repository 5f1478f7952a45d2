"""The plan of a call: the deadlines of its attempts, and what follows a failed attempt.

`test_attempts_model.py` compares any sequence of attempts with a reference.
"""

from datetime import timedelta
from unittest.mock import Mock

import pytest
import tenacity

from rpcwheel.call import RetryPolicy
from rpcwheel.call.attempts import RetryPlan
from rpcwheel.call.config import RetryConfig
from rpcwheel.durations import NEVER
from rpcwheel.rpc import AttemptResult, NextAttempt, Stop

MS = 1_000_000
S = 1000 * MS
TENTH = tenacity.wait_fixed(0.1)


def rules(*, idempotent=True, retry_on="UNAVAILABLE", backoff=TENTH, **settings):
    policy = RetryPolicy(retry_on=retry_on, backoff=backoff, **settings)
    return RetryConfig.from_policy(policy, idempotent=idempotent)


def plan(deadline_ns=NEVER, *, budget=None, **settings):
    """The plan of a call whose first attempt was made at 0."""
    return RetryPlan(0, deadline_ns, rules(**settings), budget)


def failed(code="UNAVAILABLE", **more):
    return AttemptResult(code, **more)


def refused(**more):
    """A refusal by a server, before its handler if more is given."""
    return failed("RESOURCE_EXHAUSTED", **more)


CLAIMED = {"refused": True}
PROVEN = CLAIMED | {"is_proven": True}
OTHER = {"has_other_server": True}
ONCE = {"idempotent": False}
NO_STRATEGY = Mock(side_effect=AssertionError("the wait was asked for"))
"""A backoff that must not be called."""


class OneRetry:
    """A budget that must be asked at most once."""

    def __init__(self):
        self.asked = []

    def call(self, now_ns):
        """Any number."""

    def failed(self, *, by_server):
        """Any number."""

    def take(self, now_ns):
        self.asked.append(now_ns)
        return len(self.asked) == 1


# --- The deadline of an attempt ---


def test_attempt_timeout_is_limited_by_the_deadline_of_the_call():
    made = plan(1800 * MS, attempt_timeout=1.0)
    assert made.attempt_ns == 1000 * MS
    step = made.after_failure(1000 * MS, failed("DEADLINE_EXCEEDED"))
    assert step == NextAttempt(2, 1100 * MS, 1800 * MS)


def test_attempt_timeout_counts_from_the_begin_of_each_attempt():
    made = plan(attempt_timeout=1.0)
    assert made.after_failure(S, failed()) == NextAttempt(2, 1100 * MS, 2100 * MS)


# --- What is not retried, and why ---


NOT_NAMED = "`retry_on` does not name its status"
NOT_IDEMPOTENT = (
    "its method is not marked idempotent; if the server may execute a call twice, set "
    "MethodPolicy(idempotent=True) for the method"
)
COMMITTED = "it can't be repeated: messages were received, or requests are not buffered"
FORBIDDEN = "the server asked for no retry"
NO_ATTEMPTS = "no attempts left"
NO_TIME = "its deadline is in {:g} s, and the next attempt would be in {:g} s"
INFINITE = "its `backoff` is infinite"
NO_BUDGET = "the retry budget of the target is used up"


@pytest.mark.parametrize(
    ("settings", "outcome", "reason"),
    [
        ({}, failed("INTERNAL"), NOT_NAMED),
        ({}, failed("DEADLINE_EXCEEDED"), NOT_NAMED),
        ({}, failed("INTERNAL", pushback_ns=0), NOT_NAMED),
        ({}, failed(committed=True), COMMITTED),
        (ONCE, failed(committed=True), COMMITTED),
        (ONCE, failed(), NOT_IDEMPOTENT),
        (ONCE, failed(pushback_ns=0), NOT_IDEMPOTENT),
        (ONCE | {"attempt_timeout": 1.0}, failed("DEADLINE_EXCEEDED"), NOT_NAMED),
        ({"max_attempts": 1}, failed(), NO_ATTEMPTS),
        ({}, failed(pushback_ns=-1), FORBIDDEN),
        ({}, refused(), NOT_NAMED),
        (ONCE, refused(**CLAIMED), NOT_NAMED),
        (ONCE | {"retry_on": "RESOURCE_EXHAUSTED"}, refused(**CLAIMED), NOT_IDEMPOTENT),
        (ONCE, refused(**PROVEN, committed=True), COMMITTED),
        (ONCE, refused(**PROVEN | OTHER, pushback_ns=-1), FORBIDDEN),
    ],
)
def test_a_failure_that_is_not_retried_has_a_reason_and_uses_no_budget(settings, outcome, reason):
    budget = OneRetry()
    made = plan(budget=budget, **settings | {"backoff": NO_STRATEGY})
    assert made.after_failure(0, outcome) == Stop(reason)
    assert budget.asked == []


@pytest.mark.parametrize(
    ("now_ns", "wait", "reason"),
    [
        (500 * MS, 0.5, NO_TIME.format(0.5, 0.5)),
        (500 * MS, 0.7, NO_TIME.format(0.5, 0.7)),
        (2 * S, 0.0, NO_TIME.format(0.0, 0.0)),
        (500 * MS, float("inf"), INFINITE),
    ],
)
def test_a_backoff_that_reaches_the_deadline_ends_the_call_at_once(now_ns, wait, reason):
    budget = OneRetry()
    made = plan(S, backoff=tenacity.wait_fixed(wait), budget=budget)
    assert made.after_failure(now_ns, failed()) == Stop(reason)
    assert budget.asked == []


def test_an_infinite_backoff_ends_the_call_even_without_a_deadline():
    assert plan(backoff=float("inf")).after_failure(0, failed()) == Stop(INFINITE)


TOO_LONG = "the server asked to wait {} s, which is longer than max_pushback ({} s)"


@pytest.mark.parametrize(
    ("settings", "pushback_ns", "reason"),
    [
        ({}, 300 * S + MS, TOO_LONG.format("300.001", "300")),
        ({}, 999_999_999_999 * MS, TOO_LONG.format("999999999.999", "300")),
        ({"max_pushback": 0.25}, 251 * MS, TOO_LONG.format("0.251", "0.25")),
        ({"max_pushback": timedelta(hours=1)}, 3601 * S, TOO_LONG.format("3601", "3600")),
    ],
)
def test_a_pushback_above_max_pushback_ends_the_retries(settings, pushback_ns, reason):
    budget = OneRetry()
    made = plan(backoff=NO_STRATEGY, budget=budget, **settings)
    assert made.after_failure(0, failed(pushback_ns=pushback_ns)) == Stop(reason)
    assert budget.asked == []


def test_without_max_pushback_any_is_waited_for():
    step = plan(max_pushback=None).after_failure(0, failed(pushback_ns=3601 * S))
    assert step == NextAttempt(2, 3601 * S, NEVER)


def test_the_budget_is_asked_last_and_its_refusal_ends_the_call():
    budget = OneRetry()
    made = plan(budget=budget)
    assert made.after_failure(S, failed()) == NextAttempt(2, 1100 * MS, NEVER)
    assert made.after_failure(2 * S, failed()) == Stop(NO_BUDGET)
    assert budget.asked == [S, 2 * S]


def test_a_backoff_object_gets_attempt_elapsed_time_and_error():
    seen, error = [], ConnectionError()

    def wait(state):
        seen.append((state.attempt_number, state.outcome_timestamp, state.outcome.exception()))
        return 0

    made = RetryPlan(5 * S, NEVER, rules(backoff=wait), None)
    made.after_failure(7 * S, failed(error=error))
    made.after_failure(8 * S, failed())
    assert seen == [(1, 2.0, error), (2, 3.0, None)]


def test_an_exception_of_a_backoff_object_is_raised_and_uses_no_budget():
    budget = OneRetry()
    made = plan(budget=budget, backoff=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.after_failure(0, failed())
    assert budget.asked == []


def test_the_pushback_of_a_server_that_has_refused_does_not_hold_for_another_one():
    outcome = refused(**PROVEN | OTHER, pushback_ns=301 * S)
    assert plan(**ONCE).after_failure(S, outcome) == NextAttempt(2, S, NEVER)


@pytest.mark.parametrize(
    ("settings", "outcome", "is_of_server"),
    [
        ({}, failed(), True),
        ({}, failed("INTERNAL"), False),
        ({}, failed("INTERNAL", pushback_ns=-1), True),
        (ONCE, refused(**PROVEN), True),
        (ONCE, refused(**CLAIMED), False),
        ({}, refused(**CLAIMED), True),
        ({}, refused(), False),
    ],
)
def test_a_failure_that_may_be_retried_takes_a_token_of_the_throttle(
    settings, outcome, is_of_server
):
    class Noting(OneRetry):
        def failed(self, *, by_server):
            assert by_server is is_of_server
            self.asked.append("failed")

    budget = Noting()
    plan(budget=budget, **settings).after_failure(0, outcome)
    assert "failed" in budget.asked
