"""What all calls of one client share."""

import time

import pytest
import tenacity

from rpcwheel.call import DeadlinePolicy, RetryPolicy, deadline_scope
from rpcwheel.call.config import ANSWER_KEY, ClientState, Outcome, answered_by, seconds_left
from rpcwheel.call.policy import CallPolicy, DefaultResponsePolicy, MethodPolicy
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerStopped
from rpcwheel.events import ExecutorRejected, RetryScheduled, RetryStopped
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import DEADLINE, AttemptResult, NextAttempt, Stop
from rpcwheel.timer import ManualTimer, shared_timer

M = "/shop.Orders/Get"
S = 1_000_000_000
RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.25)
CUT_SHORT = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, attempt_timeout=2.0)
FAILED = AttemptResult("UNAVAILABLE")


@pytest.fixture
def make(timer):
    """Makes a client's state on the manual timer, and the rules of its method."""

    def make(**settings):
        state = ClientState(
            CallPolicy(**{"idempotent": True} | settings), timer=timer, queue_of=lambda *_: None
        )
        return state, state.configs.config_for(M)

    return make


# --- Time ---


def test_the_time_is_that_of_the_timer_in_use(make, timer):
    state, _ = make()
    assert state.timer is timer
    assert state.now_ns() == 0
    timer.advance(2.5)
    assert state.now_ns() == 2_500_000_000


def test_without_a_timer_it_is_the_shared_one_and_real_time():
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
def test_what_grpc_is_given_as_timeout_is_never_negative(deadline_ns, now_ns, left):
    assert seconds_left(deadline_ns, now_ns) == left


# --- The plan ---


def begun(state, config, own_ns=None):
    now_ns, deadline_ns, attempt_ns = state.open(config, own_ns)
    late = now_ns >= deadline_ns
    return Stop("its deadline has passed") if late else NextAttempt(1, now_ns, attempt_ns)


def test_a_plan_begins_now_with_the_callers_timeout(make, timer):
    state, config = make(timeout=5)
    timer.advance(2)
    assert begun(state, config) == NextAttempt(1, 2 * S, 7 * S)
    assert begun(state, config, 3 * S) == NextAttempt(1, 2 * S, 5 * S)


def test_the_deadline_of_the_call_being_served_holds_though_its_clock_is_another(make, timer):
    state, config = make(timeout=500)
    timer.advance(2)
    with deadline_scope(100):
        step = begun(state, config)
    assert 62 * S < step.deadline_ns <= 102 * S
    assert begun(state, config).deadline_ns == 502 * S


def test_a_served_call_whose_deadline_has_passed_makes_none(make):
    state, config = make()
    token = DEADLINE.set(time.monotonic_ns() - 1)
    try:
        assert isinstance(begun(state, config), Stop)
    finally:
        DEADLINE.reset(token)


def test_a_policy_that_does_not_propagate_is_not_limited_by_the_call_being_served(make):
    state, config = make(timeout=DeadlinePolicy(timeout=500, propagate_deadline=False))
    with deadline_scope(0):
        assert begun(state, config).deadline_ns == 500 * S


def test_a_plan_that_is_made_late_goes_on_from_the_first_try(make, timer):
    state, config = make(
        retry=RetryPolicy(
            retry_on="UNAVAILABLE", max_attempts=2, backoff=0.25, retry_budget=0.0, min_retries=1
        )
    )
    now_ns, deadline_ns, _ = state.open(config, None)
    plan = state.resumed(config, now_ns, deadline_ns)
    timer.advance(1)
    assert state.after(M, config, plan, FAILED, 1) == NextAttempt(2, 1_250_000_000, NEVER)
    assert isinstance(state.after(M, config, plan, FAILED, 2), Stop)


# --- The budget ---


def test_each_call_is_counted_once(make):
    policy = RetryPolicy(retry_on="UNAVAILABLE", retry_budget=1.0, min_retries=0)
    state, config = make(retry=policy, timeout=5)
    for _ in range(4):
        state.resumed(config, *state.open(config, None)[:2])
    state.open(config, 0)  # is late: makes no try
    assert sum(state.budget_of(config).take(0) for _ in range(9)) == 4


def test_methods_of_one_retry_policy_share_a_budget_and_others_have_their_own(make):
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


def test_the_budget_is_made_with_the_share_and_the_reserve_of_the_policy(make):
    state, config = make(retry=RetryPolicy(retry_on="UNAVAILABLE", retry_budget=0.5, min_retries=3))
    budget = state.budget_of(config)
    assert sum(budget.take(0) for _ in range(9)) == 3
    for _ in range(20):
        budget.call(0)
    assert sum(budget.take(0) for _ in range(99)) == 7


def test_all_calls_of_a_client_take_their_retries_from_one_budget(make):
    state, config = make(
        retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0, retry_budget=0.0, min_retries=3)
    )
    steps = []
    for _ in range(5):
        plan = state.resumed(config, *state.open(config, None)[:2])
        steps.append(plan.ended(0, FAILED))
    assert [isinstance(step, NextAttempt) for step in steps] == [True] * 3 + [False] * 2


def test_two_clients_have_two_budgets(make):
    (one, config), (other, _) = make(retry=RETRY), make(retry=RETRY)
    assert one.budget_of(config) is not other.budget_of(config)


# --- After a failed try ---


def after(state, config, outcome, attempts=1):
    plan = state.resumed(config, *state.open(config, None)[:2])
    return state.after(M, config, plan, outcome, attempts)


@pytest.mark.parametrize(
    ("ago_s", "retried"),
    [(2.5, True), (1.995, True), (1.9, False)],  # the server's clock may be ahead by an instant
)
def test_a_try_that_is_cancelled_at_its_deadline_came_to_it(make, timer, ago_s, retried):
    state, config = make(retry=CUT_SHORT, idempotent=True)
    plan = state.resumed(config, *state.open(config, None)[:2])
    timer.advance(ago_s)
    step = state.after(M, config, plan, AttemptResult("CANCELLED"), 1)
    assert isinstance(step, NextAttempt) is retried
    if retried:  # the second try has two seconds of its own
        timer.advance(1.0)
        assert isinstance(state.after(M, config, plan, AttemptResult("CANCELLED"), 2), Stop)


def test_a_retry_is_told_with_its_wait(make, timer, events):
    state, config = make(retry=RETRY)
    timer.advance(1)
    assert after(state, config, FAILED).at_ns == 1_250_000_000
    assert events == [RetryScheduled(M, 1, "UNAVAILABLE", 0.25)]


def test_a_failure_of_a_code_that_is_retried_but_not_this_time_is_told_with_the_reason(
    make, events
):
    state, config = make(retry=RETRY, idempotent=False)
    step = after(state, config, AttemptResult("UNAVAILABLE"), attempts=2)
    assert events == [RetryStopped(M, 2, "UNAVAILABLE", step.reason)]
    assert "not marked idempotent" in step.reason


def test_a_failure_of_another_code_is_not_worth_an_event(make, events):
    state, config = make(retry=RETRY)
    assert isinstance(after(state, config, AttemptResult("INTERNAL")), Stop)
    state, config = make()
    assert isinstance(after(state, config, FAILED), Stop)
    assert events == []


# --- The answer ---


def answer(state, config, error, **more):
    return state.outcome(M, config, error, **{"attempts": 1, "started_ns": 0} | more)


def test_failsafe_is_told_how_often_and_how_long_it_was_tried(make, timer):
    seen = []

    class Look(tenacity.retry_base):
        def __call__(self, state):
            seen.append((state.attempt_number, state.outcome_timestamp))
            return True

    state, config = make(default_response=DefaultResponsePolicy(on=Look()))
    timer.advance(3)
    answer(state, config, OSError(), attempts=4, started_ns=S)
    assert seen == [(4, 2.0)]


def test_a_failure_that_is_raised_or_parked_is_told_by_others(make, events):
    assert (
        answer(*make(default_response=DefaultResponsePolicy(on=ConnectionError)), OSError())
        is Outcome.FAIL
    )
    assert answer(*make(failback=FailbackPolicy(retry_on=OSError)), OSError()) is Outcome.ENQUEUE
    assert answer(*make(), OSError()) is Outcome.FAIL
    assert events == []


@pytest.mark.parametrize(
    "settings",
    [
        {"default_response": DefaultResponsePolicy(on=OSError)},
        {"failback": FailbackPolicy(retry_on=OSError)},
    ],
)
def test_what_follows_messages_that_the_caller_has_is_the_failure(make, events, settings):
    assert answer(*make(**settings), OSError(), received=True) is Outcome.FAIL
    assert events == []


def test_an_answer_says_who_made_it_and_why():
    assert ANSWER_KEY == "rpcwheel-answer"
    assert answered_by(Outcome.ENQUEUE, "UNAVAILABLE", "gone") == (
        "failback",
        "queued by failback after UNAVAILABLE: gone",
    )
    assert answered_by(Outcome.DEFAULT_RESPONSE, "INTERNAL", "broken") == (
        "default-response",
        "default response after INTERNAL: broken",
    )


# --- Slow and silent calls ---


def test_a_method_that_may_be_slow_costs_no_timeout(make, timer):
    state, config = make(timeout=5)
    assert state.watch(M, config) is None
    assert timer.pending == 0


def test_a_timer_that_takes_no_more_fails_no_call_and_is_told(events):
    with ManualTimer() as stopped:
        policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2))
        state = ClientState(policy, timer=stopped, queue_of=print)
    assert state.watch(M, state.configs.config_for(M)) is None
    assert state.wake(print, 1.0, "a retry") is None
    for told, what in zip(events, ["slow_call_threshold", "a retry"], strict=True):
        assert (type(told), told.timer, told.task) == (ExecutorRejected, "ManualTimer", what)
        assert isinstance(told.error, TimerStopped)
