"""Conversion of arguments; refused arguments are in the contract tests."""

from datetime import timedelta

from tenacity import wait_fixed

from rpcwheel.durations import NEVER
from rpcwheel.transport.arguments import (
    OWN_CONNECTION,
    checked_backoff,
    checked_drain_ns,
    checked_options,
    checked_reason,
    checked_target,
)


def test_valid_values_are_accepted():
    assert checked_target("dns:///shop:50051") == "dns:///shop:50051"
    assert checked_reason("") == ""
    assert checked_backoff(wait_fixed(2)).next_delay_ns(1, elapsed_ns=0, error=None) == 2 * 10**9


def test_the_options_disable_shared_connections():
    other = ("grpc.keepalive_time_ms", 10_000)
    assert checked_options([other]) == [other, OWN_CONNECTION]
    assert checked_options(((OWN_CONNECTION[0], 0), other)) == [other, OWN_CONNECTION]
    assert OWN_CONNECTION == ("grpc.use_local_subchannel_pool", 1)


def test_drain_timeout_is_in_seconds_and_none_is_no_limit():
    values = {
        None: NEVER,
        float("inf"): NEVER,
        0: 0,
        1.5: 1_500_000_000,
        timedelta(seconds=2): 2_000_000_000,
    }
    assert {drain: checked_drain_ns(drain) for drain in values} == values
