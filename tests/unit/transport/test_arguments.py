"""Conversion of arguments; refused arguments are in the contract tests."""

from datetime import timedelta

from rpcwheel.durations import NEVER
from rpcwheel.transport.arguments import (
    checked_drain_ns,
)


def test_drain_timeout_is_in_seconds_and_none_is_no_limit():
    values = {
        None: NEVER,
        float("inf"): NEVER,
        0: 0,
        1.5: 1_500_000_000,
        timedelta(seconds=2): 2_000_000_000,
    }
    assert {drain: checked_drain_ns(drain) for drain in values} == values
