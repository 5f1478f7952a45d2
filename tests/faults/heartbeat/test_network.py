"""Networks that drop connections silently, and killed servers, with real processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import rpcwheel
from fixtures.proxy import TO_SERVER
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import ConnectionDead

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
REASON = "no answer to heartbeats"
SEVERAL = 4
TESTS = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--map-root-user", "--net"]


@pytest.fixture
def network(open_proxy, server):
    return open_proxy(server.target)


@pytest.fixture
def client(network, server, open_client):  # closed first
    """A client that has made a call."""
    client = open_client(network.target)
    assert client.ping() == server.pid
    return client


@pytest.fixture
def long_timeout_client(network, server, open_client):
    """A client that has made a call, with a long heartbeat timeout."""
    client = open_client(network.target, timeout=WAIT_S)
    assert client.ping() == server.pid
    return client


def test_a_connection_that_the_network_forgot_is_replaced(client, network, server):
    """A firewall or NAT drops a known connection, and lets new ones pass."""
    calls = client.slow(), client.follow()
    network.blackhole()
    for call in calls:
        error = call.error()
        assert (error.code(), REASON in error.details()) == (UNAVAILABLE, True)
    assert client.ping() == server.pid
    assert wait_until(lambda: client.state == "ALIVE")
    assert client.bare.number >= 2


def test_a_connection_with_incoming_messages_is_not_dead(client, network):
    """Dubbo's rule: only reads count. Unanswered heartbeats alone do not make a connection dead."""
    stream = client.follow(0.05)
    network.half_open(TO_SERVER)
    beat = client.heartbeat
    assert wait_until(lambda: stream.read() and beat.sent - beat.answered >= SEVERAL)
    assert stream.read()
    assert (client.bare.number, beat.replaced) == (1, 0)
    assert not stream.done()


def test_calls_succeed_after_a_long_network_outage(client, network, server):
    network.blackhole(new=True)
    assert client.slow().code() is UNAVAILABLE
    assert client.begin_ping(0.5).code() is grpc.StatusCode.DEADLINE_EXCEEDED  # no server answers
    network.heal()
    assert client.ping() == server.pid
    assert wait_until(lambda: client.state == "ALIVE")


def test_a_connection_reset_is_handled_by_grpc_without_a_heartbeat_reconnect(
    long_timeout_client, network, server, events
):
    streams = long_timeout_client.follow(0.02), long_timeout_client.follow()
    network.reset()
    assert [stream.error().code() for stream in streams] == [UNAVAILABLE] * 2
    # gRPC may still send a call on the broken connection: "Stream removed (sendmsg: Broken pipe)".
    assert wait_until(lambda: long_timeout_client.begin_ping().code() is grpc.StatusCode.OK)
    assert long_timeout_client.ping() == server.pid
    assert wait_until(lambda: long_timeout_client.state == "ALIVE")
    assert not events.of(ConnectionDead)
    assert long_timeout_client.bare.number == 1


def test_calls_succeed_after_a_killed_server_restarts(start_server, open_client):
    server = start_server()
    client = open_client(server.target)
    assert client.ping() == server.pid
    call = client.slow()
    server.kill()
    assert call.code() is UNAVAILABLE
    assert client.begin_ping(wait_for_ready=False).code() is UNAVAILABLE
    server.restart()
    again = server.pid  # waits until it listens
    assert client.ping() == again
    assert wait_until(lambda: client.state == "ALIVE")


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or shutil.which("ip") is None
    or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs `unshare` and `ip`, and the permission to create a network namespace",
)
def test_a_connection_whose_packets_the_kernel_drops_is_replaced():
    """In a network namespace, by `scenarios/dropped_packets.py`."""
    package = Path(rpcwheel.__file__).parents[1]
    run = subprocess.run(
        [*NAMESPACE, sys.executable, "-W", "error", "-m", "scenarios.dropped_packets"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(TESTS)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * WAIT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
