"""Behavior of gRPC options that `rpcwheel.options` warns of or needs.

A canary passes as long as grpcio behaves in this way. If one fails, grpcio has changed: its
docstring names the code of rpcwheel that is then wrong or no longer needed. Delete its row in
docs/grpcio.md too.
"""

import itertools
import socket
import time

import grpc
import pytest

from fixtures.raw_http2 import pings_borne, raw_client
from fixtures.waiting import wait_until

FLOOR = "grpc.http2.min_ping_interval_without_data_ms"
PINGS = [
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
IDLE_TOO = ("grpc.keepalive_permit_without_calls", 1)
QUICK_PINGS = {"count": 5, "every": 0.25}
REFUSED_AFTER = 3
"""One is free, two are forgiven."""


def borne(target: str) -> int:
    with raw_client(target) as connection:
        return pings_borne(connection, **QUICK_PINGS)


def ends_within(connection, *, seconds: float) -> bool:
    """Whether the peer closes the connection if nothing that it sends is answered."""
    end = time.monotonic() + seconds
    try:
        while True:
            connection.receive(end)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_an_unknown_option_is_accepted():
    """If this fails, `check_options` needs no list of names (options/names.py)."""
    grpc.insecure_channel("127.0.0.1:1", options=[("grpc.keep_alive_ms", 1)]).close()


def test_keepalive_timeout_ms_does_not_detect_a_silent_server(raw_server, open_channel):
    """If this fails, the presets need not set `ping_timeout_ms`, and check.py need not warn."""
    raw_server.answers = False
    open_channel(raw_server.target, [("grpc.keepalive_time_ms", 1000), *PINGS,
                                     ("grpc.keepalive_timeout_ms", 500)])  # fmt: skip
    assert wait_until(lambda: raw_server.pings)
    time.sleep(1.5)  # of itself gRPC waits a minute for the answer
    assert not raw_server.goaways


def test_ping_timeout_ms_ends_a_silent_connection(raw_server, open_channel):
    """The presets need it."""
    raw_server.answers = False
    open_channel(raw_server.target, [("grpc.keepalive_time_ms", 1000), *PINGS,
                                     ("grpc.http2.ping_timeout_ms", 500)])  # fmt: skip
    assert wait_until(lambda: raw_server.goaways)
    assert b"ping_timeout" in raw_server.goaways[0]


def test_keepalive_timeout_ms_does_not_detect_a_silent_client(serve):
    """As for the channel."""
    target = serve(("grpc.keepalive_time_ms", 1000), IDLE_TOO, ("grpc.keepalive_timeout_ms", 500))
    with raw_client(target) as silent:
        assert ends_within(silent, seconds=3.0) is False


def test_a_channel_pings_twice_and_then_once_a_minute(raw_server, open_channel):
    """If this fails, the presets need not set `max_pings_without_data`."""
    open_channel(raw_server.target, [("grpc.keepalive_time_ms", 1000), IDLE_TOO])
    assert wait_until(lambda: len(raw_server.pings) >= 2)
    time.sleep(2.5)  # the third comes after a minute
    assert len(raw_server.pings) == 2


def test_a_keepalive_of_zero_pings_every_second(raw_server, open_channel):
    """If this fails, options/check.py must not say that 0 means one second."""
    open_channel(raw_server.target, [("grpc.keepalive_time_ms", 0), *PINGS])
    assert wait_until(lambda: len(raw_server.pings) >= 3)
    assert min(after - before for before, after in itertools.pairwise(raw_server.pings)) > 0.5


def test_of_two_options_of_one_name_the_first_counts(serve):
    """Documented in `rpcwheel.options`; options/check.py reads options in this way."""
    assert borne(serve((FLOOR, 100), (FLOOR, 100_000), IDLE_TOO)) == QUICK_PINGS["count"]
    assert borne(serve((FLOOR, 100_000), (FLOOR, 100), IDLE_TOO)) == REFUSED_AFTER


@pytest.mark.parametrize("value", ["100", 100.0, b"100"])
def test_a_number_of_another_type_is_ignored(serve, value):
    """If this fails, options/check.py need not check types."""
    assert borne(serve((FLOOR, value), IDLE_TOO)) == REFUSED_AFTER


def test_the_name_with_recv_in_it_has_no_effect(serve):
    """If this fails, delete the name from `RETIRED` in options/names.py."""
    wrong = "grpc.http2.min_recv_ping_interval_without_data_ms"
    assert borne(serve((wrong, 100), IDLE_TOO)) == REFUSED_AFTER
    assert borne(serve((FLOOR, 100), IDLE_TOO)) == QUICK_PINGS["count"]


def test_without_calls_a_server_permits_no_pings_by_default(serve):
    """If this fails, options/check.py need not compare `keepalive_permit_without_calls`."""
    assert borne(serve((FLOOR, 100))) == REFUSED_AFTER


def test_a_server_tolerates_as_many_early_pings_as_its_strikes(serve):
    """options/check.py and the doctor need it."""
    assert borne(serve(("grpc.http2.max_ping_strikes", 0))) == QUICK_PINGS["count"]
    assert borne(serve(("grpc.http2.max_ping_strikes", 1))) == REFUSED_AFTER - 1


def test_pings_do_not_count_as_use_for_max_connection_idle_ms(serve):
    """If this fails, options/check.py must not say so."""
    target = serve(("grpc.max_connection_idle_ms", 1000), (FLOOR, 10), IDLE_TOO)
    with raw_client(target) as connection:
        assert pings_borne(connection, count=60, every=0.1) < 60


@pytest.mark.parametrize(("given", "fails"), [([("grpc.min_reconnect_backoff_ms", 500)], True),
                                              ([], False)])  # fmt: skip
def test_min_reconnect_backoff_ms_is_how_long_an_attempt_may_take(given, fails):
    """If this fails, `connect_timeout` must set another option, and check.py need not warn."""
    quick = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
    states = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        with grpc.insecure_channel(target, options=[*quick, *given]) as channel:
            channel.subscribe(states.append, try_to_connect=True)
            if fails:
                assert wait_until(lambda: grpc.ChannelConnectivity.TRANSIENT_FAILURE in states)
            else:
                time.sleep(2.0)  # without the option an attempt may take 20 s
                assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states
