"""The attempts of a call: events, and what its caller gets in place of a failure.

`test_attempts_model.py` compares any sequence of attempts with a reference.
"""

import pytest
import tenacity

from rpcwheel.call import RetryPolicy
from rpcwheel.call.attempts import (
    NOT_SENT,
    Attempts,
    Enqueue,
    ReadRequests,
    Response,
    State,
    Wait,
)
from rpcwheel.call.budget import RetryBudget, RetryThrottle
from rpcwheel.call.config import MethodConfig
from rpcwheel.call.policy import DefaultResponsePolicy, HedgingPolicy, MethodPolicy
from rpcwheel.durations import NEVER
from rpcwheel.errors import FailbackFull
from rpcwheel.events import CallbackFailed, DefaultResponseUsed, RetryScheduled, RetryStopped
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import AttemptResult, NextAttempt, Stop

M = "/shop.Orders/Get"
S = 1_000_000_000
RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=tenacity.wait_fixed(0.25))
FAILED = AttemptResult("UNAVAILABLE")


def begun(*, started_ns=0, budget=None, hedged=False, **settings):
    """The attempts of a call whose first one was made."""
    config = MethodConfig.from_policy(MethodPolicy(**{"idempotent": True} | settings))
    return Attempts(M, config, started_ns, NEVER, budget, hedged=hedged)


def hedged(*, budget=None, **settings):
    """The attempts of a hedged call whose first one was made; the next one is due in a second."""
    return begun(budget=budget, hedged=True, hedging=HedgingPolicy(delay=1.0, **settings))


def fail(attempts, now_ns=0, result=FAILED, **facts):
    """Let an attempt fail; return what follows."""
    attempts.failed()
    attempts.decided(attempts.decide(now_ns, result))
    return attempts.next(now_ns, **facts)


# --- After a failed attempt ---


@pytest.mark.parametrize(
    ("ago_ns", "retried"),
    [(2.5 * S, True), (1.995 * S, True), (1.9 * S, False)],  # the server's clock may be ahead
)
def test_an_attempt_that_the_server_cancels_at_its_deadline_counts_as_deadline_exceeded(
    ago_ns, retried
):
    attempts = begun(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, attempt_timeout=2.0))
    step = fail(attempts, ago_ns, AttemptResult("CANCELLED"))
    assert isinstance(step, NextAttempt) is retried
    if retried:  # the second attempt has two seconds of its own
        assert isinstance(fail(attempts, ago_ns + S, AttemptResult("CANCELLED")), Stop)


def test_the_event_of_a_retry_has_its_delay(events):
    assert fail(begun(retry=RETRY), S) == Wait(1_250_000_000)
    assert events == [RetryScheduled(M, 1, "UNAVAILABLE", 0.25)]


def test_an_attempt_that_was_not_sent_ends_the_retries_and_counts_as_none_in_the_budget(events):
    settings = MethodPolicy(retry=RETRY.replace(max_attempts=9), idempotent=True)
    budget = RetryBudget(0.0, 1)  # allows one retry
    for _ in range(3):
        attempts = Attempts(M, MethodConfig.from_policy(settings), 0, NEVER, budget)
        assert isinstance(fail(attempts, S), Wait)
        attempts.next(2 * S)
        assert fail(attempts, 3 * S, AttemptResult("UNAVAILABLE", not_sent=True)) == NOT_SENT
    assert [type(event) for event in events] == [RetryScheduled, RetryStopped] * 3


def test_an_attempt_that_was_not_sent_takes_a_token_of_the_throttle():
    throttle = RetryThrottle(2, token_ratio=0.1)
    throttle.call(0)
    attempts = begun(retry=RETRY, budget=throttle)
    assert fail(attempts, S, AttemptResult("UNAVAILABLE", not_sent=True)) == NOT_SENT
    assert not throttle.take(S)


def test_after_a_hedge_that_was_not_sent_no_other_one_is_made():
    attempts = hedged(max_attempts=9)
    assert isinstance(attempts.next(S), NextAttempt)
    assert fail(attempts, S, AttemptResult("UNAVAILABLE", not_sent=True)) is None
    assert attempts.next_ns == NEVER
    assert isinstance(fail(attempts, 2 * S), Stop)


def test_the_policy_names_the_codes_after_which_hedging_goes_on():
    attempts = hedged(non_fatal_codes={"INTERNAL"}, max_attempts=2)
    assert isinstance(fail(attempts, result=AttemptResult("INTERNAL")), NextAttempt)
    assert isinstance(fail(hedged(non_fatal_codes=())), Stop)


def test_a_refused_hedge_takes_a_token_of_the_throttle():
    attempts = hedged(budget=RetryThrottle(3, 0.1), max_attempts=4)
    refused = AttemptResult("RESOURCE_EXHAUSTED", refused=True)
    assert isinstance(fail(attempts, 5, refused), NextAttempt)
    assert isinstance(fail(attempts, 5, refused), Stop)  # less than half of the tokens are left


def test_canceled_hedges_are_no_successes_for_the_throttle():
    throttle = RetryThrottle(10, token_ratio=1.0)
    for _ in range(5):
        throttle.call(0)
        throttle.failed(by_server=True)
    throttle.call(0)
    attempts = hedged(budget=throttle)
    assert isinstance(attempts.next(S), NextAttempt)
    attempts.canceled(2)
    assert not throttle.take(S)  # half of the tokens are left, as before the call


def test_the_event_of_a_retry_that_is_refused_has_the_reason(events):
    attempts = begun(retry=RETRY, idempotent=False)
    step = fail(attempts)
    assert end(attempts, OSError()) is None
    assert events == [RetryStopped(M, 1, "UNAVAILABLE", step.reason)]
    assert "not marked idempotent" in step.reason


def test_a_code_that_is_not_retried_causes_no_event(events):
    assert isinstance(fail(begun(retry=RETRY), result=AttemptResult("INTERNAL")), Stop)
    assert isinstance(fail(begun()), Stop)
    assert events == []


def test_a_wait_object_that_raises_is_reported_and_ends_the_call(events):
    attempts = begun(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=lambda _: 1 / 0))
    step = fail(attempts)
    failed, stopped = events
    assert isinstance(failed, CallbackFailed)
    assert stopped == RetryStopped(M, 1, "UNAVAILABLE", step.reason)


@pytest.mark.parametrize(
    ("fact", "facts", "reason"),
    [
        (Attempts.timer_stopped, {}, "its timer was stopped"),
        (lambda _: None, {"can_resend": False}, "requests are not buffered"),
    ],
)
def test_a_planned_retry_that_is_not_made_has_the_reason_in_its_event(events, fact, facts, reason):
    attempts = begun(retry=RETRY)
    assert fail(attempts) == Wait(S // 4)
    fact(attempts)
    step = attempts.next(S // 4, **facts)
    assert attempts.decide_response(S // 4, OSError(), received=False, buffered=True) is None
    assert events[1:] == [RetryStopped(M, 1, "UNAVAILABLE", step.reason)]
    assert reason in step.reason


# --- What the caller gets in place of a failure ---


def end(attempts, error, now_ns=0, *, received=False, buffered=True):
    return attempts.decide_response(now_ns, error, received=received, buffered=buffered)


def test_a_default_response_applies_to_the_errors_that_it_names(events):
    attempts = begun(default_response=DefaultResponsePolicy(on=ConnectionError, default=b"none"))
    error = ConnectionResetError()
    assert end(attempts, error) == Response(b"none", None)
    assert events == [DefaultResponseUsed(M, error)]
    assert end(attempts, OSError()) is None
    assert end(attempts, KeyboardInterrupt()) is None


def test_a_predicate_of_a_default_response_gets_attempts_and_elapsed_time():
    seen = []

    class Predicate(tenacity.retry_base):
        def __call__(self, state):
            seen.append((state.attempt_number, state.outcome_timestamp, state.outcome.exception()))
            return True

    retry = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=2, backoff=0)
    policy = DefaultResponsePolicy(on=Predicate())
    attempts = begun(started_ns=S, retry=retry, default_response=policy)
    fail(attempts)
    error = OSError()
    assert end(attempts, error, 3 * S) == Response(None, None)
    assert seen == [(2, 2.0, error)]


def test_a_predicate_that_raises_is_reported_and_its_policy_does_not_apply(events):
    for settings, buffered in (
        ({"default_response": DefaultResponsePolicy(on=lambda _: 1 / 0)}, True),
        ({"failback": FailbackPolicy(retry_on=lambda _: 1 / 0)}, False),
    ):
        assert end(begun(**settings), OSError(), buffered=buffered) is None
        assert isinstance(events.pop(), CallbackFailed)


def test_every_failure_is_offered_to_failback_whose_queue_decides(events):
    policy = FailbackPolicy(retry_on=ConnectionError)
    for error in (ConnectionError(), OSError()):
        assert end(begun(failback=policy), error) == Enqueue(policy)
    assert end(begun(), OSError()) is None
    assert events == []


def test_requests_are_read_for_failback_only_after_a_failure_that_is_queued():
    policy = FailbackPolicy(retry_on=ConnectionError)
    attempts, error = begun(failback=policy), ConnectionError()
    assert end(attempts, OSError(), buffered=False) is None
    assert end(attempts, error, buffered=False) == ReadRequests(policy)
    assert attempts.requests_read(policy, error, buffered=True) == Enqueue(policy)
    assert attempts.requests_read(policy, error, buffered=False) is None
    assert error.__notes__ == [f"{M}: not queued by failback, as not all requests are known"]


def test_the_caller_of_a_queued_call_gets_the_default_of_the_policy(events):
    policy = FailbackPolicy(retry_on=OSError, default=b"later")
    attempts, error = begun(failback=policy), OSError()
    assert attempts.queued(policy, error, "dropped") == Response(b"later", "dropped")
    assert attempts.queued(policy, error, None) is None
    refusal = FailbackFull("it is full")
    assert attempts.queued(policy, error, refusal) is refusal
    assert events == []
    assert attempts.queued(policy, error, ValueError("no")) is None
    assert isinstance(events.pop(), CallbackFailed)
    assert error.__notes__ == [f"{M}: not queued by failback: no"]


@pytest.mark.parametrize(
    "settings",
    [
        {"default_response": DefaultResponsePolicy(on=OSError)},
        {"failback": FailbackPolicy(retry_on=OSError)},
    ],
)
def test_after_received_messages_no_policy_applies(events, settings):
    assert end(begun(**settings), OSError(), received=True) is None
    assert events == []


def test_a_call_that_is_late_has_no_attempt():
    attempts = begun(retry=RETRY)
    attempts.late()
    assert (attempts.number, attempts.state) == (0, State.ENDING)
    assert attempts.next(0) is None
    attempts.ended()
    assert attempts.state is State.ENDED
