"""What both twins are given is checked at once, in words that say what is allowed."""

from datetime import timedelta

import grpc
import pytest

from rpcwheel.channel.arguments import (
    OWN_CONNECTION,
    checked_backoff,
    checked_drain_ns,
    checked_options,
    checked_reason,
    checked_target,
    refuse_both,
)
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError


def test_what_is_right_passes():
    assert checked_target("dns:///shop:50051") == "dns:///shop:50051"
    assert checked_reason("") == ""
    assert checked_backoff(2.5).next_delay_ns(1, elapsed_ns=0, error=None) == 2_500_000_000


@pytest.mark.parametrize(
    ("check", "value", "error", "said"),
    [
        (checked_target, b"shop:1", TypeError, "target must be a string such as"),
        (checked_target, "", ConfigurationError, "target must not be empty"),
        (checked_options, {"grpc.a": 1}, TypeError, "options must be pairs"),
        (checked_options, [("grpc.a",)], TypeError, "options must be pairs"),
        (checked_options, [(1, 2)], TypeError, "options must be pairs"),
        (checked_backoff, "soon", TypeError, "backoff: wait must be seconds"),
        (checked_backoff, -1, ConfigurationError, "backoff: wait must not be negative"),
        (checked_reason, 7, TypeError, "reason must be a string"),
        (checked_drain_ns, "long", TypeError, "drain must be seconds"),
        (checked_drain_ns, float("nan"), ConfigurationError, "drain is NaN"),
    ],
)
def test_what_makes_no_sense_is_refused(check, value, error, said):
    with pytest.raises(error, match=said):
        check(value)


def test_each_channel_gets_a_connection_of_its_own_whatever_is_given():
    other = ("grpc.keepalive_time_ms", 10_000)
    assert checked_options([other]) == [other, OWN_CONNECTION]
    assert checked_options(((OWN_CONNECTION[0], 0), other)) == [other, OWN_CONNECTION]
    assert OWN_CONNECTION == ("grpc.use_local_subchannel_pool", 1)


@pytest.mark.parametrize(
    ("drain", "ns"),
    [
        (None, NEVER),
        (float("inf"), NEVER),
        (0, 0),
        (1.5, 1_500_000_000),
        (timedelta(seconds=2), 2_000_000_000),
    ],
)
def test_the_time_to_drain_is_in_seconds_and_none_is_for_ever(drain, ns):
    assert checked_drain_ns(drain) == ns


def test_a_negative_time_to_drain_is_refused_with_what_is_allowed():
    with pytest.raises(ConfigurationError, match="drain must be 0 seconds or more, or None"):
        checked_drain_ns(-1)


def test_connect_takes_the_place_of_what_channels_are_made_with():
    tls, gzip = grpc.ssl_channel_credentials(), grpc.Compression.Gzip
    refuse_both(None, credentials=tls, compression=gzip, interceptors=[])
    refuse_both(print, credentials=None, compression=None)
    with pytest.raises(ConfigurationError, match="credentials and interceptors: not together"):
        refuse_both(print, credentials=tls, compression=None, interceptors=[])
    for wrong in ({"credentials": 1}, {"compression": 1}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be"):
            refuse_both(None, **{"credentials": None, "compression": None} | wrong)
    with pytest.raises(TypeError, match="connect must be callable"):
        refuse_both(7, credentials=None, compression=None)
