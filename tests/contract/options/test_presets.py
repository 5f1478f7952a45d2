"""The presets do what they say, over real sockets, and fit each other."""

import itertools
import time
from datetime import timedelta

import grpc
import pytest

from fixtures.raw_http2 import pings_borne, raw_client
from fixtures.small_servers import METHOD, Gate, serving
from fixtures.waiting import wait_until
from rpcwheel import ConfigurationError
from rpcwheel.options import channel_options, check_options, server_options

PING_OPTIONS = {
    "grpc.keepalive_time_ms",
    "grpc.http2.ping_timeout_ms",
    "grpc.keepalive_permit_without_calls",
    "grpc.http2.max_pings_without_data",
}
FLOOR = "grpc.http2.min_ping_interval_without_data_ms"
READY = grpc.ChannelConnectivity.READY
SLOW_MACHINE = 5.0
"""gRPC's own time-out is a minute."""

QUICK = {"keepalive": 1.0, "ping_timeout": 1.0, "while_idle": True}


def states_of(channel):
    """What comes after READY: only changes are told."""
    states = []
    channel.subscribe(states.append)
    return states


@pytest.mark.parametrize(
    ("near", "far"), list(itertools.product(["any", "lan", "wan"], ["lan", "wan", None]))
)
def test_each_preset_for_a_channel_fits_each_for_a_server(near, far):
    server = None if far is None else server_options(preset=far)
    found = check_options(channel_options(preset=near), server)
    assert bool(found) is (far is None and near != "any")


def test_a_channel_has_by_default_what_any_server_bears():
    assert channel_options() == [
        ("grpc.keepalive_time_ms", 330_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 30_000),
        ("grpc.min_reconnect_backoff_ms", 20_000),
    ]


def test_the_lan_is_quicker():
    assert channel_options(preset="lan") == [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.min_reconnect_backoff_ms", 5_000),
    ]
    assert dict(channel_options(preset="wan"))["grpc.keepalive_time_ms"] == 60_000
    assert dict(server_options(preset="lan"))["grpc.keepalive_time_ms"] == 10_000


def test_a_server_has_by_default_what_our_channels_need():
    assert server_options() == [
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def test_what_is_given_counts_more_than_the_preset():
    given = channel_options(
        preset="lan",
        keepalive=timedelta(seconds=2),
        ping_timeout=0.0004 + 0.0002,
        while_idle=False,
        first_reconnect=0.05,
        longest_reconnect=0.2,
        connect_timeout=3,
        client_idle=float("inf"),
        own_connection=True,
    )
    assert [value for _, value in given] == [2000, 1, 0, 0, 50, 200, 3000, 2**31 - 1, 1]
    ages = server_options(connection_idle=60, connection_age=600, connection_grace=30)
    assert ages[4:] == [
        ("grpc.max_connection_idle_ms", 60_000),
        ("grpc.max_connection_age_ms", 600_000),
        ("grpc.max_connection_age_grace_ms", 30_000),
    ]


def test_a_keepalive_of_for_ever_is_no_keepalive():
    assert not PING_OPTIONS & dict(channel_options(keepalive=float("inf"))).keys()
    assert dict(server_options(keepalive=float("inf")))["grpc.keepalive_time_ms"] == 2**31 - 1


@pytest.mark.parametrize("make", [channel_options, server_options])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "moon"}, "preset must be one of .*lan, wan, not 'moon'"),
        ({"keepalive": 0.9}, "keepalive must be at least 1 s"),
        ({"keepalive": 0}, "keepalive must be a finite time above zero"),
        ({"ping_timeout": float("nan")}, "ping_timeout is NaN"),
        ({"ping_timeout": 1e-6}, "ping_timeout must be at least 0.001 s"),
    ],
)
def test_what_gRPC_would_ignore_is_refused(make, given, said):  # noqa: N802 - its name
    with pytest.raises(ConfigurationError, match=said):
        make(**given)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigurationError, match="is shorter than first_reconnect"):
        channel_options(first_reconnect=3, longest_reconnect=2)
    with pytest.raises(ConfigurationError, match="give both"):
        server_options(connection_grace=2)
    with pytest.raises(TypeError, match="keepalive must be seconds"):
        channel_options(keepalive="10s")
    with pytest.raises(TypeError, match="while_idle must be True or False, not 'yes'"):
        server_options(while_idle="yes")


def test_a_pair_outlives_pings_that_end_a_connection_to_a_stock_server(serve, open_channel):
    ours = open_channel(serve(*server_options(permit_every=0.5)), channel_options(**QUICK))
    strangers = open_channel(serve(), channel_options(**QUICK))
    kept, lost = states_of(ours), states_of(strangers)
    assert wait_until(lambda: any(state is not READY for state in lost))
    time.sleep(1.5)
    assert set(kept) <= {READY}


def test_a_channel_goes_on_to_ping_while_nothing_is_called(raw_server, open_channel):
    open_channel(raw_server.target, channel_options(**QUICK))
    assert wait_until(lambda: len(raw_server.pings) >= 4)
    gaps = [after - before for before, after in itertools.pairwise(raw_server.pings)]
    assert min(gaps) > 0.5
    assert (raw_server.goaways, raw_server.connections) == ([], 1)


def test_a_server_bears_pings_as_often_as_it_permits(serve):
    with raw_client(serve(*server_options(permit_every=0.1))) as connection:
        assert pings_borne(connection, count=6, every=0.25) == 6


def test_a_black_hole_is_found_by_the_channel_in_the_time_promised(serve, open_channel, open_proxy):
    proxy = open_proxy(serve(*server_options(permit_every=0.5)))
    states = states_of(open_channel(proxy.target, channel_options(**QUICK)))
    assert wait_until(lambda: READY in states)
    proxy.blackhole(new=True)
    began = time.monotonic()
    assert wait_until(lambda: states[-1] is not READY)
    assert time.monotonic() - began < QUICK["keepalive"] + QUICK["ping_timeout"] + SLOW_MACHINE


def test_a_silent_client_is_found_by_the_server_in_the_time_promised(serve):
    with raw_client(serve(*server_options(keepalive=1.0, ping_timeout=1.0))) as silent:
        began = time.monotonic()
        silent.sock.settimeout(10.0)
        while silent.sock.recv(1000):
            pass
    assert 1.0 < time.monotonic() - began < 1.0 + 1.0 + SLOW_MACHINE


def test_a_ping_a_tenth_slower_than_the_floor_is_borne_during_a_call():
    """So that `"any"` is: a call that is silent for 5 s, floors of 1 and 3 s, pings each 1.1 s."""
    gate = Gate()
    held = grpc.unary_unary_rpc_method_handler(gate)
    pings = channel_options(keepalive=1.1, own_connection=True)
    with (
        serving(held, options=[(FLOOR, 1_000)]) as patient,
        serving(held, options=[(FLOOR, 3_000)]) as strict,
        grpc.insecure_channel(patient, options=pings) as kept,
        grpc.insecure_channel(strict, options=pings) as lost,
    ):
        answer, refused = (each.unary_unary(METHOD).future(b"a") for each in (kept, lost))
        assert wait_until(refused.done)  # at the fourth ping
        time.sleep(0.5)
        gate.opened.set()
        assert (refused.code().name, refused.details()) == ("UNAVAILABLE", "Too many pings")
        assert answer.result(10) == b"a"
