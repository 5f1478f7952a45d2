"""Networks that lose connections without a word, and servers that die: in both worlds, for real."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rpcwheel
from fixtures.proxy import TO_CLIENT, TO_SERVER
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import ConnectionDead

REASON = "no answer to heartbeats"
SEVERAL = 4
TESTS = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--map-root-user", "--net"]


@pytest.fixture
def network(open_proxy, server):
    return open_proxy(server.target)


@pytest.fixture
def client(network, server, open_client):  # closed first
    """One that has been used."""
    client = open_client(network.target)
    assert client.ping().pid == server.pid
    return client


@pytest.fixture
def patient(network, server, open_client):
    """One that has been used, and takes nobody for dead soon."""
    client = open_client(network.target, timeout=WAIT_S)
    assert client.ping().pid == server.pid
    return client


def test_a_connection_that_the_network_forgot_is_replaced(client, network, server):
    """What a firewall or NAT does with a flow it has forgotten: new ones pass."""
    calls = client.slow(), client.follow()
    network.blackhole()
    for call in calls:
        ended = call.ended()
        assert (ended.code, REASON in ended.details) == ("UNAVAILABLE", True)
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.state == "ALIVE")
    assert client.bare.number >= 2


def test_a_half_open_connection_is_replaced(client, network, server):
    call = client.slow()
    network.half_open(TO_SERVER if client.world == "sync" else TO_CLIENT)
    ended = call.ended()
    assert (ended.code, REASON in ended.details) == ("UNAVAILABLE", True)
    assert client.ping().pid == server.pid


def test_while_messages_come_in_nothing_is_dead(client, network):
    """Dubbo's rule: what is read decides. A stream that flows is worth more than our questions."""
    stream = client.follow(0.05)
    network.half_open(TO_SERVER)
    assert wait_until(lambda: client.heartbeat.sent - client.heartbeat.answered >= SEVERAL)
    before = len(stream.messages)
    assert wait_until(lambda: len(stream.messages) > before)
    assert (client.bare.number, client.heartbeat.replaced) == (1, 0)
    assert not stream.done.done()


def test_a_network_that_is_down_for_long_is_not_fought_with_and_comes_back(client, network, server):
    network.blackhole(new=True)
    assert client.slow().ended().code == "UNAVAILABLE"
    assert client.ping(timeout=0.5).code == "DEADLINE_EXCEEDED"  # nothing can answer
    network.heal()
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.state == "ALIVE")


def test_a_reset_in_the_middle_of_a_stream_is_grpcs_own_matter(patient, network, server, events):
    streams = patient.follow(0.02), patient.follow()
    network.reset()
    assert [stream.ended().code for stream in streams] == ["UNAVAILABLE"] * 2
    # gRPC may still send a call on the broken connection: "Stream removed (sendmsg: Broken pipe)".
    assert wait_until(lambda: patient.ping().code == "OK")
    assert patient.ping().pid == server.pid
    assert wait_until(lambda: patient.state == "ALIVE")
    assert not [event for event in events if isinstance(event, ConnectionDead)]
    assert patient.bare.number == 1


def test_a_killed_server_that_comes_back_is_found(start_server, open_client):
    server = start_server()
    client = open_client(server.target)
    assert client.ping().pid == server.pid
    call = client.slow()
    server.kill()
    assert call.ended().code == "UNAVAILABLE"
    assert client.ping(wait_for_ready=False).code == "UNAVAILABLE"
    server.restart()
    again = server.pid  # waits until it listens, which takes its time
    assert client.ping().pid == again
    assert wait_until(lambda: client.state == "ALIVE")


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or shutil.which("ip") is None
    or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no network namespace of its own: `unshare` or `ip` are not there, or not allowed",
)
def test_packets_that_the_kernel_drops_are_noticed():
    """In a network namespace of its own; `scenarios/dropped_packets.py` has the story."""
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
