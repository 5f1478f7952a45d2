"""`RetryBudget`: a share of the recent calls of a target, and at least `min_retries`."""

import gc
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fixtures.timers import run_threads
from rpcwheel.call.budget import RetryBudget

S = 1_000_000_000
YEAR = 365 * 24 * 3600 * S


def budget(share=0.2, min_retries=10):
    return RetryBudget(share, min_retries)


def taken(one, now_ns=0, count=1000):
    """Return how many of `count` retries are allowed."""
    return sum(one.take(now_ns) for _ in range(count))


def test_an_old_time_does_not_reset_a_newer_second():
    one = budget(min_retries=10)
    assert taken(one, 5 * S) == 10
    one.call(4 * S)
    assert not one.take(4 * S)
    assert not one.take(5 * S)


def test_a_very_old_time_counts_in_the_newer_slot():
    one = budget(share=0.2, min_retries=0)
    for _ in range(50):
        one.call(15 * S)  # in the place that second 5 had
    one.call(5 * S)
    assert taken(one, 5 * S, count=4) == 4
    assert taken(one, 15 * S) == 6


class AgainstAModel(RuleBasedStateMachine):
    """A model: a queue of all calls and retries of the last ten seconds."""

    @initialize(share=st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_retries=st.integers(0, 12))
    def begin(self, share, min_retries):
        self.budget = RetryBudget(share, min_retries)
        self.share, self.min_retries = share, min_retries
        self.now_ns = 0
        self.calls, self.retries = deque(), deque()

    def recent(self, happened):
        while happened and happened[0] <= self.now_ns // S - 10:
            happened.popleft()
        return len(happened)

    def limit(self):
        return max(self.min_retries, self.share * self.recent(self.calls))

    @rule(step_ns=st.one_of(st.integers(0, 3 * S), st.sampled_from([10 * S, 11 * S, YEAR])))
    def pass_time(self, step_ns):
        self.now_ns += step_ns

    @rule(number=st.integers(1, 20))
    def call(self, number):
        for _ in range(number):
            self.budget.call(self.now_ns)
            self.calls.append(self.now_ns // S)

    @rule(number=st.integers(1, 5))
    def take(self, number):
        for _ in range(number):
            allowed = self.recent(self.retries) + 1 <= self.limit()
            assert self.budget.take(self.now_ns) is allowed
            if allowed:
                self.retries.append(self.now_ns // S)

    @invariant()
    def no_slot_is_negative(self):
        assert all(min(slot[1:]) >= 0 for slot in self.budget._slots)


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=50)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_concurrent_threads_never_get_more_retries_than_allowed():
    for min_retries in range(1, 30):
        one, got = budget(share=0.0, min_retries=min_retries), []
        run_threads(*[lambda one=one, got=got: got.append(taken(one, 0, 40))] * 4)
        assert sum(got) <= min_retries
        assert taken(one, 0) == min_retries - sum(got)  # what none of them got is still there


@pytest.mark.usefixtures("frequent_thread_switches")
def test_after_concurrent_use_all_counts_expire():
    one = budget(share=0.5, min_retries=0)

    def hammer():
        for step in range(5_000):
            now_ns = step * S // 125  # 40 seconds, each thread at a place of its own
            one.call(now_ns)
            one.take(now_ns)

    run_threads(*[hammer] * 4)
    assert all(min(slot[1:]) >= 0 for slot in one._slots)
    assert taken(one, 51 * S) == 0
    for _ in range(20):
        one.call(51 * S)
    assert taken(one, 51 * S) == 10


@pytest.mark.usefixtures("frequent_thread_switches")
def test_no_call_is_lost_when_threads_count_in_the_same_second():
    one = budget(share=1.0, min_retries=0)
    run_threads(*[lambda: [one.call(3 * S) for _ in range(5000)]] * 4)
    assert taken(one, 3 * S, count=20_001) == 20_000


def test_no_call_is_lost_that_a_finalizer_counts_as_a_second_begins():
    def collected(*_):  # it may call finalizers, and let other threads run
        budgets[-1].call(S)
        counted.append(S)

    budgets, before = [], gc.get_threshold()  # kept: else the lists of slots are used again
    gc.callbacks.append(collected)
    try:
        for _ in range(50):
            gc.set_threshold(0)
            counted = []
            budgets.append(budget(share=1.0, min_retries=0))
            gc.set_threshold(1)
            budgets[-1].call(S)
            gc.set_threshold(0)
            assert taken(budgets[-1], S) == len(counted) + 1
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
