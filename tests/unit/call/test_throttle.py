"""gRPC's retry throttling (gRFC A6): when the bucket of tokens allows further attempts."""

from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.call import HedgingPolicy, RetryPolicy, RetryThrottling
from rpcwheel.call.budget import RetryThrottle, budget_key

THROTTLING = RetryThrottling(max_tokens=10, token_ratio=0.1)


@given(
    max_tokens=st.integers(1, 12),
    thousandths=st.integers(1, 3000),
    below_thousandth=st.sampled_from([0, 0.0009]),
    ends=st.lists(st.sampled_from(["success", "failure of the server", "other failure"])),
)
def test_the_bucket_must_be_more_than_half_full(max_tokens, thousandths, below_thousandth, ends):
    """Decimal places of the ratio after the third are ignored."""
    throttle = RetryThrottle(max_tokens, thousandths / 1000 + below_thousandth)
    full = tokens = max_tokens * 1000
    for end in ends:
        throttle.call(0)
        if end == "success":
            tokens = min(full, tokens + thousandths)
        else:
            by_server = end == "failure of the server"
            throttle.failed(by_server=by_server)
            tokens = max(0, tokens - 1000 * by_server)
        allowed = throttle.take(0)
        if allowed:
            throttle.failed(by_server=False)
        assert allowed is (tokens > full / 2)


def test_policies_with_equal_throttling_share_one_bucket():
    other = RetryThrottling(max_tokens=10, token_ratio=0.1)
    hedging = HedgingPolicy(delay=0, retry_budget=other)
    assert budget_key(RetryPolicy(retry_on="ABORTED", retry_budget=THROTTLING)) == other
    assert hash(budget_key(hedging)) == hash(THROTTLING)
    assert budget_key(RetryPolicy(retry_on="ABORTED", retry_budget=None)) is None


def test_a_share_makes_a_retry_budget():
    assert budget_key(RetryPolicy(retry_on="ABORTED", retry_budget=1, min_retries=3)) == (1, 3)


def test_throttling_may_be_given_as_a_table():
    table = {"max_tokens": 10, "token_ratio": 0.1}
    assert RetryPolicy(retry_on="ABORTED", retry_budget=table).retry_budget == THROTTLING
