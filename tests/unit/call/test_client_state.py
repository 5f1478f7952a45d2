"""The state of a client: clock, deadlines, budgets, and the decisions after a failure."""

import time

import pytest
import tenacity

from rpcwheel.call import DeadlinePolicy, RetryPolicy, call_options, deadline_scope
from rpcwheel.call.config import MAX_OPTION_BUDGETS, ClientState, seconds_left
from rpcwheel.call.policy import CallPolicy, DefaultResponsePolicy, MethodPolicy
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerStopped
from rpcwheel.events import (
    CallbackFailed,
    DefaultResponseUsed,
    ExecutorRejected,
    RetryScheduled,
    RetryStopped,
)
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import AttemptResult, NextAttempt, Stop
from rpcwheel.timer import ManualTimer, shared_timer

M = "/shop.Orders/Get"
S = 1_000_000_000
RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=tenacity.wait_fixed(0.25))
CUT_SHORT = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, attempt_timeout=2.0)
FAILED = AttemptResult("UNAVAILABLE")


@pytest.fixture
def make(timer):
    """Makes the state of a client on the manual timer, and the configuration of its method."""

    def make(**settings):
        state = ClientState(
            CallPolicy(**{"idempotent": True} | settings), timer=timer, queue_of=lambda *_: None
        )
        return state, state.configs.config_for(M)

    return make


# --- Time ---


def test_without_a_timer_the_shared_timer_is_used():
    state = ClientState(CallPolicy(), timer=None, queue_of=lambda *_: None)
    before = time.monotonic_ns()
    assert before <= state.now_ns() <= time.monotonic_ns()
    assert state.timer is shared_timer()


@pytest.mark.parametrize(
    ("deadline_ns", "now_ns", "left"),
    [
        (NEVER, 0, None),
        (NEVER, 5 * S, None),
        (5 * S, 3 * S, 2.0),
        (S, S - 1, 1e-9),
        (S, S, 0.0),
        (S, 9 * S, 0.0),
    ],
)
def test_the_timeout_for_grpc_is_never_negative(deadline_ns, now_ns, left):
    assert seconds_left(deadline_ns, now_ns) == left


# --- Deadlines and plans ---


def begun(state, config, own_ns=None):
    now_ns, deadline_ns, attempt_ns = state.begin(config, own_ns)
    late = now_ns >= deadline_ns
    return Stop("its deadline has passed") if late else NextAttempt(1, now_ns, attempt_ns)


def test_a_call_begins_now_with_the_earlier_of_both_timeouts(make, timer):
    state, config = make(timeout=5)
    timer.advance(2)
    assert begun(state, config) == NextAttempt(1, 2 * S, 7 * S)
    assert begun(state, config, 3 * S) == NextAttempt(1, 2 * S, 5 * S)


def test_the_deadline_of_the_call_being_served_applies_on_any_clock(make, timer):
    state, config = make(timeout=500)
    timer.advance(2)
    with deadline_scope(100):
        step = begun(state, config)
    assert 62 * S < step.deadline_ns <= 102 * S
    assert begun(state, config).deadline_ns == 502 * S


def test_a_plan_that_is_made_after_the_failure_counts_the_first_attempt(make, timer):
    state, config = make(
        retry=RetryPolicy(
            retry_on="UNAVAILABLE",
            max_attempts=2,
            backoff=tenacity.wait_fixed(0.25),
            retry_budget=0.0,
            min_retries=1,
        )
    )
    now_ns, deadline_ns, _ = state.begin(config, None)
    plan = state.retry_plan(config, now_ns, deadline_ns)
    timer.advance(1)
    assert state.next_step(M, config, plan, FAILED, 1) == NextAttempt(2, 1_250_000_000, NEVER)
    assert isinstance(state.next_step(M, config, plan, FAILED, 2), Stop)


# --- The budget ---


def test_the_budget_counts_each_call_once_and_late_calls_not_at_all(make):
    policy = RetryPolicy(retry_on="UNAVAILABLE", retry_budget=1.0, min_retries=0)
    state, config = make(retry=policy, timeout=5)
    for _ in range(4):
        state.retry_plan(config, *state.begin(config, None)[:2])
    state.begin(config, 0)  # late: no attempt is made
    assert sum(state.budget_of(config).take(0) for _ in range(9)) == 4


def test_methods_with_equal_budget_settings_share_a_budget(make):
    other = RetryPolicy(retry_on="UNAVAILABLE", retry_budget=0.5)
    free = RetryPolicy(retry_on="UNAVAILABLE", retry_budget=None)
    state, config = make(
        retry=RETRY,
        methods={
            "/a/Other": MethodPolicy(retry=other),
            "/a/Free": MethodPolicy(retry=free),
            "/a/None": MethodPolicy(retry=None),
        },
    )
    budget = state.budget_of(config)
    assert budget is not None
    assert state.budget_of(state.configs.config_for("/a/Same")) is budget
    assert state.budget_of(state.configs.config_for("/a/Other")) not in (budget, None)
    assert state.budget_of(state.configs.config_for("/a/Free")) is None
    assert state.budget_of(state.configs.config_for("/a/None")) is None


def test_a_client_keeps_the_budgets_of_its_policy_and_a_limited_number_of_others(make):
    state, config = make(retry=RETRY)
    before = state.budget_of(config)
    for share in range(5 * MAX_OPTION_BUDGETS):
        retry = RetryPolicy(retry_on="UNAVAILABLE", retry_budget=share / 10_000)
        with call_options(retry=retry):
            budget = state.budget_of(state.current_config(M))
        with call_options(retry=retry):
            assert state.budget_of(state.current_config(M)) is budget
    assert state.budget_of(config) is before
    assert len(state._budgets) + len(state._option_budgets) <= 1 + MAX_OPTION_BUDGETS


# --- After a failed attempt ---


def after(state, config, outcome, attempts=1):
    plan = state.retry_plan(config, *state.begin(config, None)[:2])
    return state.next_step(M, config, plan, outcome, attempts)


@pytest.mark.parametrize(
    ("ago_s", "retried"),
    [(2.5, True), (1.995, True), (1.9, False)],  # the server's clock may be ahead by an instant
)
def test_an_attempt_that_the_server_cancels_at_its_deadline_counts_as_deadline_exceeded(
    make, timer, ago_s, retried
):
    state, config = make(retry=CUT_SHORT, idempotent=True)
    plan = state.retry_plan(config, *state.begin(config, None)[:2])
    timer.advance(ago_s)
    step = state.next_step(M, config, plan, AttemptResult("CANCELLED"), 1)
    assert isinstance(step, NextAttempt) is retried
    if retried:  # the second attempt has two seconds of its own
        timer.advance(1.0)
        assert isinstance(state.next_step(M, config, plan, AttemptResult("CANCELLED"), 2), Stop)


def test_the_event_of_a_retry_has_its_delay(make, timer, events):
    state, config = make(retry=RETRY)
    timer.advance(1)
    assert after(state, config, FAILED).at_ns == 1_250_000_000
    assert events == [RetryScheduled(M, 1, "UNAVAILABLE", 0.25)]


def test_the_event_of_a_retry_that_is_refused_has_the_reason(make, events):
    state, config = make(retry=RETRY, idempotent=False)
    step = after(state, config, FAILED, attempts=2)
    assert events == [RetryStopped(M, 2, "UNAVAILABLE", step.reason)]
    assert "not marked idempotent" in step.reason


def test_a_code_that_is_not_retried_causes_no_event(make, events):
    state, config = make(retry=RETRY)
    assert isinstance(after(state, config, AttemptResult("INTERNAL")), Stop)
    state, config = make()
    assert isinstance(after(state, config, FAILED), Stop)
    assert events == []


# --- The policy for a failed call ---


def final_policy(state, config, error, **more):
    return state.final_policy(M, config, error, **{"attempts": 1, "started_ns": 0} | more)


def test_a_default_response_applies_to_the_errors_that_it_names(make, events):
    policy = DefaultResponsePolicy(on=ConnectionError)
    state, config = make(default_response=policy)
    error = ConnectionResetError()
    assert final_policy(state, config, error) is policy
    assert events == [DefaultResponseUsed(M, error)]
    assert final_policy(state, config, OSError()) is None
    assert final_policy(state, config, KeyboardInterrupt()) is None


def test_a_predicate_of_a_default_response_gets_attempts_and_elapsed_time(make, timer):
    seen = []

    class Predicate(tenacity.retry_base):
        def __call__(self, state):
            seen.append((state.attempt_number, state.outcome_timestamp, state.outcome.exception()))
            return True

    state, config = make(default_response=DefaultResponsePolicy(on=Predicate()))
    timer.advance(3)
    error = OSError()
    final_policy(state, config, error, attempts=4, started_ns=S)
    assert seen == [(4, 2.0, error)]


def test_a_predicate_of_a_default_response_that_raises_is_reported(make, events):
    state, config = make(default_response=DefaultResponsePolicy(on=lambda _: 1 / 0))
    assert final_policy(state, config, OSError()) is None
    (event,) = events
    assert isinstance(event, CallbackFailed)


def test_a_failback_policy_is_returned_for_every_error(make, events):
    policy = FailbackPolicy(retry_on=ConnectionError)
    for error in (ConnectionError(), OSError()):
        assert final_policy(*make(failback=policy), error) is policy
    assert final_policy(*make(), OSError()) is None
    assert events == []


@pytest.mark.parametrize(
    "settings",
    [
        {"default_response": DefaultResponsePolicy(on=OSError)},
        {"failback": FailbackPolicy(retry_on=OSError)},
    ],
)
def test_after_received_messages_no_policy_applies(make, events, settings):
    assert final_policy(*make(**settings), OSError(), received=True) is None
    assert events == []


def test_a_timer_that_takes_no_timeout_is_reported(events):
    with ManualTimer() as stopped:
        policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2))
        state = ClientState(policy, timer=stopped, queue_of=print)
    assert state.watch_slow_call(M, state.configs.config_for(M)) is None
    assert state.schedule(print, 1.0, "a retry") is None
    for event, what in zip(events, ["slow_call_threshold", "a retry"], strict=True):
        assert (type(event), event.timer, event.task) == (ExecutorRejected, "ManualTimer", what)
        assert isinstance(event.error, TimerStopped)
