"""Hedged attempts: when they are made, and which of them end the call (gRFC A6)."""

import pytest

from rpcwheel.call import HedgingPolicy
from rpcwheel.call.attempts import Attempts, Wait
from rpcwheel.call.config import MethodConfig
from rpcwheel.call.policy import MethodPolicy
from rpcwheel.call.retry import RetryBudget, RetryThrottle
from rpcwheel.durations import NEVER
from rpcwheel.rpc import AttemptResult, NextAttempt, Stop

S = 1_000_000_000


def hedged(started_ns=0, deadline_ns=NEVER, *, budget=None, delay=1.0, **settings):
    hedging = HedgingPolicy(delay=delay, **settings)
    config = MethodConfig.from_policy(MethodPolicy(idempotent=True, hedging=hedging))
    return Attempts("/shop.Orders/Get", config, started_ns, deadline_ns, budget, hedged=True)


def fail(attempts, now_ns, code="UNAVAILABLE", **more):
    """Let an attempt fail; return what follows."""
    attempts.failed()
    attempts.decided(attempts.decide(now_ns, AttemptResult(code, **more)))
    return attempts.next(now_ns)


def test_an_attempt_is_due_after_each_delay_up_to_max_attempts():
    attempts = hedged(S, max_attempts=3)
    assert attempts.next(2 * S - 1) == Wait(2 * S)
    assert attempts.next(2 * S) == NextAttempt(2, 2 * S, NEVER)
    assert attempts.next(2 * S) == Wait(3 * S)
    assert attempts.next(3 * S) == NextAttempt(3, 3 * S, NEVER)
    assert attempts.next(99 * S) is None


def test_without_delay_all_attempts_are_sent_at_once():
    attempts = hedged(delay=0, max_attempts=4)
    assert [attempts.next(0).number for _ in range(3)] == [2, 3, 4]
    assert attempts.next(0) is None


def test_all_attempts_share_the_deadline_and_none_is_sent_after_it():
    attempts = hedged(0, 1.5 * S, max_attempts=3)
    assert attempts.next(S) == NextAttempt(2, S, 1.5 * S)
    assert attempts.next(S) is None


@pytest.mark.parametrize("code", ["INTERNAL", "DEADLINE_EXCEEDED"])
def test_a_fatal_failure_ends_the_call_while_other_attempts_run(code):
    attempts = hedged()
    assert attempts.next(S)
    assert isinstance(fail(attempts, S, code), Stop)
    assert attempts.next(S) is None


def test_after_a_non_fatal_failure_the_next_attempt_is_due_at_once():
    attempts = hedged(max_attempts=3)
    assert fail(attempts, 5) == NextAttempt(2, 5, NEVER)
    assert attempts.next(5) == Wait(S + 5)


def test_the_call_ends_with_its_last_attempt_when_all_have_failed():
    attempts = hedged(max_attempts=2)
    assert attempts.next(S)
    assert fail(attempts, S) is None
    assert isinstance(fail(attempts, S), Stop)


def test_the_policy_names_the_non_fatal_codes():
    attempts = hedged(non_fatal_codes={"INTERNAL"}, max_attempts=2)
    assert isinstance(fail(attempts, 0, "INTERNAL"), NextAttempt)
    assert isinstance(fail(hedged(non_fatal_codes=()), 0), Stop)


def test_pushback_delays_the_next_attempt():
    attempts = hedged(max_attempts=3)
    assert fail(attempts, 0, pushback_ns=7 * S) == Wait(7 * S)
    assert attempts.next(7 * S) == NextAttempt(2, 7 * S, NEVER)
    assert attempts.next(7 * S) == Wait(8 * S)


def test_a_negative_pushback_ends_hedging():
    attempts = hedged(max_attempts=5)
    assert attempts.next(S)
    assert fail(attempts, S, pushback_ns=-1) is None  # the second attempt still runs
    assert isinstance(fail(attempts, S), Stop)


def test_a_pushback_longer_than_max_pushback_ends_hedging():
    attempts = hedged(max_attempts=5, max_pushback=10.0)
    assert fail(attempts, 0, pushback_ns=10 * S) == Wait(10 * S)
    assert attempts.next(10 * S)
    assert isinstance(fail(attempts, 10 * S, pushback_ns=10 * S + 1), Stop)


def test_after_an_attempt_over_the_budget_no_more_are_made():
    attempts = hedged(budget=RetryBudget(0.0, 1), max_attempts=5)
    assert attempts.next(S)
    assert attempts.next(2 * S) is None
    assert fail(attempts, 2 * S) is None
    assert isinstance(fail(attempts, 2 * S), Stop)


REFUSED = {"code": "RESOURCE_EXHAUSTED", "refused": True}


def test_a_refused_attempt_is_not_fatal_and_its_pushback_delays_the_next_one():
    attempts = hedged(max_attempts=4)
    assert fail(attempts, 5, **REFUSED) == NextAttempt(2, 5, NEVER)
    assert fail(attempts, 6, **REFUSED, pushback_ns=7 * S) == Wait(7 * S + 6)
    assert isinstance(fail(hedged(), 0, "RESOURCE_EXHAUSTED"), Stop)  # of a handler


def test_after_a_refused_attempt_another_server_gets_the_next_one_at_once():
    attempts = hedged(max_attempts=4, max_pushback=1.0)
    refused = REFUSED | {"has_other_server": True}
    assert fail(attempts, 5, **refused, pushback_ns=7 * S) == NextAttempt(2, 5, NEVER)
    assert isinstance(fail(attempts, 6, **refused, pushback_ns=-1), Stop)


def test_a_refused_attempt_takes_a_token_of_the_throttle():
    attempts = hedged(budget=RetryThrottle(3, 0.1), max_attempts=4)
    assert isinstance(fail(attempts, 5, **REFUSED), NextAttempt)
    assert isinstance(fail(attempts, 5, **REFUSED), Stop)  # less than half of the tokens are left
