"""When a token bucket has a token: `TokenBucket`, against a bucket that counts."""

from fractions import Fraction
from itertools import permutations

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

    def _refill(self, now_ns):
        added = Fraction(now_ns - self._now_ns, self._interval_ns)
        self._tokens, self._now_ns = min(Fraction(self._burst), self._tokens + added), now_ns

    def take(self, now_ns, max_wait_ns):
        self._refill(now_ns)
        wait_ns = max(0, (1 - self._tokens) * self._interval_ns)
        if wait_ns > max_wait_ns:
            return None
        self._tokens -= 1  # below 0 if it was reserved
        return wait_ns

    def give_back(self, now_ns):
        self._refill(now_ns)
        self._tokens = min(Fraction(self._burst), self._tokens + 1)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3_000_000_000),  # after which time
        st.one_of(st.just(0), st.integers(0, 2_000_000_000)),  # how long the caller would wait
        st.booleans(),  # whether the caller gives the token back
    ),
    max_size=60,
)


@given(rate=st.sampled_from([0.5, 1, 2, 4, 1000, 62.5]), burst=st.integers(1, 5), steps=STEPS)
def test_a_token_is_taken_reserved_or_refused_as_in_a_bucket_that_counts(rate, burst, steps):
    bucket = TokenBucket(rate, burst)
    reference = CountingBucket(int(SECOND / rate), burst)
    now_ns = 0
    for after_ns, max_wait_ns, is_returned in steps:
        now_ns += after_ns
        free_in_ns = bucket.wait_ns(now_ns)
        wait_ns = bucket.take(now_ns, max_wait_ns)
        assert wait_ns == reference.take(now_ns, max_wait_ns)
        assert wait_ns is None or wait_ns == free_in_ns <= max_wait_ns
        assert wait_ns is not None or free_in_ns > max_wait_ns
        if is_returned and wait_ns is not None:
            bucket.give_back(bucket.full_ns)
            reference.give_back(now_ns)


@pytest.mark.parametrize(("rate", "calls"), [(0.1, 1), (1, 1), (2.5, 3), (100, 100)], ids=str)
def test_a_burst_is_by_default_what_one_second_allows_and_at_least_one(rate, calls):
    bucket = TokenBucket(rate)
    waits = [bucket.take(START_NS) for _ in range(calls + 1)]
    assert waits == [0] * calls + [None]


@pytest.mark.parametrize("rate", [3, 7.3, 999_983, 1e6, 1e-6])
def test_the_rate_is_exact_to_a_thousandth(rate):
    bucket = TokenBucket(rate, 1)
    assert bucket.take(START_NS) == 0
    waits_ns = [bucket.take(START_NS, 10**20) for _ in range(1000)]
    assert waits_ns[-1] * rate == pytest.approx(1000 * SECOND, rel=1e-3)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_tokens_that_are_returned_in_any_order_are_free(order):
    bucket, reserved = TokenBucket(1, 2), []
    assert [bucket.take(START_NS) for _ in range(2)] == [0, 0]
    for _ in order:
        bucket.take(START_NS, 10 * SECOND)
        reserved.append(bucket.full_ns)
    for index in order:
        bucket.give_back(reserved[index])
    assert bucket.wait_ns(START_NS) == SECOND


def test_a_token_before_one_that_is_used_is_not_free():
    bucket = TokenBucket(1, 1)
    assert bucket.take(START_NS) == 0
    returned_ns = bucket.full_ns
    assert bucket.take(START_NS, SECOND) == SECOND
    bucket.give_back(returned_ns)
    assert bucket.wait_ns(START_NS) == 2 * SECOND


def test_a_bucket_that_is_never_full_again_drops_returned_tokens_of_the_past():
    bucket = TokenBucket(1, 1)
    assert bucket.take(START_NS) == 0
    for second in range(100):
        now_ns = START_NS + second * SECOND
        bucket.take(now_ns, 10 * SECOND)
        returned_ns = bucket.full_ns
        bucket.take(now_ns, 10 * SECOND)
        bucket.give_back(returned_ns)
    assert len(bucket.returned_ns) <= 10
