"""The plan of a hedged call: when attempts are made, and which of them end it (gRFC A6)."""

import pytest

from rpcwheel.call import HedgingPolicy
from rpcwheel.call.hedging import HedgingConfig, HedgingPlan
from rpcwheel.call.retry import RetryBudget
from rpcwheel.durations import NEVER
from rpcwheel.rpc import AttemptResult, NextAttempt

S = 1_000_000_000


def plan(started_ns=0, deadline_ns=NEVER, *, budget=None, delay=1.0, **settings):
    config = HedgingConfig.from_policy(HedgingPolicy(delay=delay, **settings))
    return HedgingPlan(started_ns, deadline_ns, config, budget)


def failed(code="UNAVAILABLE", **more):
    return AttemptResult(code, **more)


def test_an_attempt_is_due_after_each_delay_up_to_max_attempts():
    made = plan(S, max_attempts=3)
    assert made.next_ns == 2 * S
    assert made.due(2 * S - 1) is None
    assert made.due(2 * S) == NextAttempt(2, 2 * S, NEVER)
    assert made.due(2 * S) is None
    assert made.due(3 * S) == NextAttempt(3, 3 * S, NEVER)
    assert (made.next_ns, made.due(99 * S)) == (NEVER, None)


def test_without_delay_all_attempts_are_sent_at_once():
    made = plan(delay=0, max_attempts=4)
    assert [made.due(0).number for _ in range(3)] == [2, 3, 4]
    assert made.due(0) is None


def test_all_attempts_share_the_deadline_and_none_is_sent_after_it():
    made = plan(0, 1.5 * S, max_attempts=3)
    assert made.due(S) == NextAttempt(2, S, 1.5 * S)
    assert made.next_ns == NEVER


@pytest.mark.parametrize("code", ["INTERNAL", "DEADLINE_EXCEEDED"])
def test_a_fatal_failure_ends_the_call(code):
    made = plan()
    assert made.due(S)
    assert made.ended(S, failed(code)) is True


def test_after_a_non_fatal_failure_the_next_attempt_is_due_at_once():
    made = plan(max_attempts=3)
    assert made.ended(5, failed()) is False
    assert made.due(5) == NextAttempt(2, 5, NEVER)
    assert made.next_ns == S + 5


def test_the_call_ends_with_its_last_attempt_when_all_have_failed():
    made = plan(max_attempts=2)
    assert made.due(S)
    assert made.ended(S, failed()) is False
    assert not made.is_over
    assert made.ended(S, failed()) is True
    assert made.is_over


def test_the_policy_names_the_non_fatal_codes():
    made = plan(non_fatal_codes={"INTERNAL"}, max_attempts=2)
    assert made.ended(0, failed("INTERNAL")) is False
    assert plan(non_fatal_codes=()).ended(0, failed()) is True


def test_pushback_delays_the_next_attempt():
    made = plan(max_attempts=3)
    assert made.ended(0, failed(pushback_ns=7 * S)) is False
    assert made.next_ns == 7 * S
    assert made.due(7 * S) == NextAttempt(2, 7 * S, NEVER)
    assert made.next_ns == 8 * S


def test_a_negative_pushback_ends_hedging():
    made = plan(max_attempts=5)
    assert made.due(S)
    assert made.ended(S, failed(pushback_ns=-1)) is False  # the second attempt still runs
    assert made.next_ns == NEVER
    assert made.ended(S, failed()) is True


def test_a_pushback_longer_than_max_pushback_ends_hedging():
    made = plan(max_attempts=5, max_pushback=10.0)
    assert made.ended(0, failed(pushback_ns=10 * S)) is False
    assert made.due(10 * S)
    assert made.ended(10 * S, failed(pushback_ns=10 * S + 1)) is True


def test_after_an_attempt_over_the_budget_no_more_are_made():
    made = plan(budget=RetryBudget(0.0, 1), max_attempts=5)
    assert made.due(S)
    assert made.due(2 * S) is None
    assert made.next_ns == NEVER
    assert made.ended(2 * S, failed()) is False
    assert made.due(2 * S) is None
    assert made.ended(2 * S, failed()) is False
    assert made.due(2 * S) is None
    assert made.is_over
