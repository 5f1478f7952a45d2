"""The state of a client: clock, deadlines and budgets."""

import time

import pytest
import tenacity

from rpcwheel.call import DeadlinePolicy, RetryPolicy, call_options, deadline_scope
from rpcwheel.call.client_state import MAX_OPTION_BUDGETS, ClientState, seconds_left
from rpcwheel.call.policy import CallPolicy, MethodPolicy
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerStopped
from rpcwheel.events import ExecutorRejected
from rpcwheel.rpc import NextAttempt, Stop
from rpcwheel.timer import ManualTimer, shared_timer

M = "/shop.Orders/Get"
S = 1_000_000_000
RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=tenacity.wait_fixed(0.25))


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


def begun(state, config, timeout=None):
    now_ns, deadline_ns, attempt_ns = state.begin(config, timeout)
    late = now_ns >= deadline_ns
    return Stop("its deadline has passed") if late else NextAttempt(1, now_ns, attempt_ns)


def test_a_call_begins_now_with_the_earlier_of_both_timeouts(make, timer):
    state, config = make(timeout=5)
    timer.advance(2)
    assert begun(state, config) == NextAttempt(1, 2 * S, 7 * S)
    assert begun(state, config, 3) == NextAttempt(1, 2 * S, 5 * S)


def test_the_deadline_of_the_call_being_served_applies_on_any_clock(make, timer):
    state, config = make(timeout=500)
    timer.advance(2)
    with deadline_scope(100):
        step = begun(state, config)
    assert 62 * S < step.deadline_ns <= 102 * S
    assert begun(state, config).deadline_ns == 502 * S


# --- The budget ---


def test_the_budget_counts_each_call_once_and_late_calls_not_at_all(make):
    policy = RetryPolicy(retry_on="UNAVAILABLE", retry_budget=1.0, min_retries=0)
    state, config = make(retry=policy, timeout=5)
    for _ in range(4):
        state.begin(config, None)
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
    for share in range(2 * MAX_OPTION_BUDGETS):
        retry = RetryPolicy(retry_on="UNAVAILABLE", retry_budget=share / 10_000)
        with call_options(retry=retry):
            budget = state.budget_of(state.current_config(M))
        with call_options(retry=retry):
            assert state.budget_of(state.current_config(M)) is budget
    assert state.budget_of(config) is before
    assert len(state._budgets) + len(state._option_budgets) <= 1 + MAX_OPTION_BUDGETS


# --- Timeouts ---


def test_a_timer_that_takes_no_timeout_is_reported(events):
    with ManualTimer() as stopped:
        policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2))
        state = ClientState(policy, timer=stopped, queue_of=print)
    assert state.watch_slow_call(M, state.configs.config_for(M)) is None
    assert state.schedule(print, 1.0, "a retry") is None
    for event, what in zip(events, ["slow_call_threshold", "a retry"], strict=True):
        assert (type(event), event.timer, event.task) == (ExecutorRejected, "manual-timer", what)
        assert isinstance(event.error, TimerStopped)
