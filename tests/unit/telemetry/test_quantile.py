"""The estimate of quantiles from the buckets of durations."""

import pytest

from rpcwheel.telemetry.call_counts import BOUNDS_S, quantile


def buckets(**counts: int) -> list[int]:
    """Buckets with these counts, by index."""
    return [counts.get(f"b{index}", 0) for index in range(len(BOUNDS_S) + 1)]


def test_without_calls_there_is_no_quantile():
    assert quantile([], 0.5) is None
    assert quantile(buckets(), 0.5) is None


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({"b0": 10}, 0.5, 0.0025),  # half way into the first bucket, which ends at 0.005
        ({"b1": 10}, 0.5, 0.0075),  # from 0.005 to 0.01
        ({"b0": 99, "b13": 1}, 0.99, 0.005),
        ({"b0": 98, "b13": 2}, 0.99, 8.75),
        ({"b14": 1}, 0.5, 10.0),  # the last bucket has no upper bound
    ],
)
def test_a_quantile_is_interpolated_in_its_bucket(counts, share, expected):
    assert quantile(buckets(**counts), share) == pytest.approx(expected)
