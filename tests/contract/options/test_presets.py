"""The presets do what they say, over real sockets, and fit each other."""

import itertools
import time
from datetime import timedelta

import grpc

from fixtures.raw_http2 import raw_client
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.options import channel_options, check_options, server_options

PING_OPTIONS = {
    "grpc.keepalive_time_ms",
    "grpc.http2.ping_timeout_ms",
    "grpc.keepalive_permit_without_calls",
    "grpc.http2.max_pings_without_data",
}
READY = grpc.ChannelConnectivity.READY
QUICK = {"keepalive": 1.0, "ping_timeout": 1.0, "while_idle": True}
"""gRPC's own time-out is a minute, longer than any wait of the tests."""


def states_of(channel):
    """The states after READY; only changes are reported."""
    states = []
    channel.subscribe(states.append)
    return states


def test_each_channel_preset_fits_each_server_preset():
    for near, far in itertools.product(["any", "lan", "wan"], ["lan", "wan", None]):
        server = None if far is None else server_options(preset=far)
        found = check_options(channel_options(preset=near), server)
        assert bool(found) is (far is None and near != "any"), (near, far)


def test_the_default_channel_options_fit_any_server():
    assert channel_options() == [
        ("grpc.keepalive_time_ms", 330_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 30_000),
        ("grpc.min_reconnect_backoff_ms", 20_000),
    ]


def test_the_lan_and_wan_presets():
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


def test_the_default_server_options():
    assert server_options() == [
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def test_arguments_override_the_preset():
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


def test_an_infinite_keepalive_switches_pings_off():
    assert not PING_OPTIONS & dict(channel_options(keepalive=float("inf"))).keys()
    assert dict(server_options(keepalive=float("inf")))["grpc.keepalive_time_ms"] == 2**31 - 1


def test_a_channel_detects_a_dead_server(serve, open_channel, open_proxy):
    proxy = open_proxy(serve(*server_options(permit_every=0.5)))
    states = states_of(open_channel(proxy.target, channel_options(**QUICK)))
    assert wait_until(lambda: READY in states)
    proxy.blackhole(new=True)
    assert wait_until(lambda: states[-1] is not READY)


def test_a_server_detects_a_dead_client(serve):
    began = time.monotonic()
    with raw_client(serve(*server_options(keepalive=1.0, ping_timeout=1.0))) as silent:
        silent.sock.settimeout(WAIT_S)
        while silent.sock.recv(1000):
            pass
    assert time.monotonic() - began > 1.0
