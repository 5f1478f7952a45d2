"""When a token bucket has a token: `TokenBucket`, against a bucket that counts."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.limit.rate import TokenBucket

SECOND = 1_000_000_000
START_NS = 7 * SECOND
"""Any time: the clock does not begin at 0."""


class CountingBucket:
    """A token bucket by its definition: a number of tokens, which is a fraction."""

    def __init__(self, interval_ns, burst):
        self._interval_ns, self._burst = interval_ns, burst
        self._tokens, self._now_ns = Fraction(burst), 0

    def wait_ns(self, now_ns, ahead):
        added = Fraction(now_ns - self._now_ns, self._interval_ns)
        self._tokens, self._now_ns = min(Fraction(self._burst), self._tokens + added), now_ns
        return max(0, (1 + ahead - self._tokens) * self._interval_ns)

    def add(self, number):
        self._tokens = min(Fraction(self._burst), self._tokens + number)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3_000_000_000),  # after which time
        st.integers(0, 3),  # how many others wait
        st.booleans(),  # whether the caller gives the token back
    ),
    max_size=60,
)


@given(rate=st.sampled_from([0.5, 1, 2, 4, 1000, 62.5]), burst=st.integers(1, 5), steps=STEPS)
def test_a_token_is_taken_or_refused_as_in_a_bucket_that_counts(rate, burst, steps):
    bucket = TokenBucket(rate, burst)
    reference = CountingBucket(int(SECOND / rate), burst)
    now_ns = 0
    for after_ns, ahead, is_returned in steps:
        now_ns += after_ns
        wait_ns = bucket.wait_ns(now_ns)
        assert wait_ns == reference.wait_ns(now_ns, 0)
        if wait_ns:  # others may wait
            assert bucket.wait_ns(now_ns, ahead) == reference.wait_ns(now_ns, ahead)
        taken = bucket.take(now_ns)
        assert taken == (wait_ns == 0)
        reference.add(-taken)
        if is_returned and taken:
            bucket.give_back(now_ns)
            reference.add(1)


def test_the_tokens_for_which_callers_wait_are_not_lost_if_they_are_late():
    bucket = TokenBucket(1, 1)
    assert bucket.take(START_NS)
    late = [bucket.take(START_NS + 3 * SECOND, has_waited=True) for _ in range(4)]
    assert late == [True, True, True, False]
    assert bucket.wait_ns(START_NS + 3 * SECOND) == SECOND


@pytest.mark.parametrize(("rate", "calls"), [(0.1, 1), (1, 1), (2.5, 3), (100, 100)], ids=str)
def test_a_burst_is_by_default_what_one_second_allows_and_at_least_one(rate, calls):
    bucket = TokenBucket(rate)
    assert [bucket.take(START_NS) for _ in range(calls + 1)] == [True] * calls + [False]


@pytest.mark.parametrize("rate", [3, 7.3, 999_983, 1e6, 1e-6])
def test_the_rate_is_exact_to_a_thousandth(rate):
    bucket = TokenBucket(rate, 1)
    assert bucket.take(START_NS)
    assert bucket.wait_ns(START_NS, 999) * rate == pytest.approx(1000 * SECOND, rel=1e-3)


def test_a_pause_does_not_save_more_tokens_than_the_burst():
    bucket = TokenBucket(10, 2)
    assert bucket.take(START_NS)
    assert [bucket.take(START_NS + 100 * SECOND) for _ in range(3)] == [True, True, False]
