"""A server that is frozen, for real: every connection to it is open, and nothing answers.

Each rule in both worlds, with a process that gets SIGSTOP. Times are short, and nothing is asserted
about them but that gRPC alone would have waited for much longer.
"""

import socket

import grpc
import pytest

from fixtures.heartbeat_worlds import TIMEOUT
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.observe import ConnectionAlive, ConnectionDead, ConnectionReplaced

REASON = "no answer to heartbeats"


@pytest.fixture
def shop(start_server):
    """The server that will freeze, and the one that takes its place."""
    return start_server(), start_server()


@pytest.fixture
def name(open_proxy, shop):
    """The name of the servers: `name.to(other.target)` is what a registry or DNS would do."""
    return open_proxy(shop[0].target)


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_without_heartbeats_each_call_hangs_until_its_deadline(shop, open_client):
    frozen, _ = shop
    client = open_client(frozen.target, interval=None)
    assert client.ping().pid == frozen.pid
    frozen.stop()
    for _ in range(2):
        assert client.ping(timeout=1.0).code == "DEADLINE_EXCEEDED"
    assert (client.state, client.bare.number) == ("OFF", 1)


def test_a_call_in_flight_is_told_and_the_next_is_answered_elsewhere(
    shop, name, open_client, events
):
    frozen, other = shop
    client = open_client(name.target)
    assert client.ping().pid == frozen.pid
    calls = client.slow(), client.follow()
    name.to(other.target)
    frozen.stop()
    for call in calls:
        ended = call.ended()
        assert ended.code == "UNAVAILABLE"
        assert REASON in ended.details
    assert client.ping().pid == other.pid
    assert wait_until(lambda: client.state == "ALIVE")
    assert (client.bare.number, client.heartbeat.replaced) == (2, 1)
    assert wait_until(lambda: of(events, ConnectionAlive))  # told in order
    (dead,) = of(events, ConnectionDead)
    assert (dead.target, dead.calls) == (name.target, 2)
    assert dead.silent_s > TIMEOUT
    assert wait_until(lambda: of(events, ConnectionReplaced))
    (replaced,) = of(events, ConnectionReplaced)
    assert (replaced.target, replaced.number) == (name.target, 2)
    assert REASON in replaced.reason


def test_nobody_need_call_for_it_to_be_noticed_and_mended(shop, name, open_client):
    frozen, other = shop
    client = open_client(name.target)
    assert client.ping().pid == frozen.pid
    name.to(other.target)
    frozen.stop()
    assert wait_until(lambda: client.bare.number == 2 and client.state == "ALIVE")
    assert client.ping(wait_for_ready=False).pid == other.pid


def test_the_other_address_of_a_name_is_taken(shop, open_client):
    frozen, other = shop
    client = open_client(f"ipv4:{frozen.target},{other.target}")
    assert client.ping().pid == frozen.pid
    call = client.slow()
    frozen.stop()
    assert call.ended().code == "UNAVAILABLE"
    assert client.ping().pid == other.pid


def test_the_other_family_of_localhost_is_taken(start_server, open_client):
    families = {family for family, *_ in socket.getaddrinfo("localhost", 1)}
    if families != {socket.AF_INET, socket.AF_INET6}:
        pytest.skip("localhost has only one family here")
    four = start_server()
    six = start_server(host="::1", port=four.port)
    servers = {server.pid: server for server in (four, six)}
    client = open_client(f"localhost:{four.port}")
    first = client.ping().pid
    servers[first].stop()
    assert wait_until(lambda: client.bare.number > 1 and client.state == "ALIVE")
    assert client.ping().pid == (set(servers) - {first}).pop()


def test_the_same_server_is_taken_again_once_it_is_thawed(start_server, open_client):
    server = start_server()
    client = open_client(server.target)
    assert client.ping().pid == server.pid
    call = client.slow()
    server.stop()
    assert call.ended().code == "UNAVAILABLE"
    assert client.ping(timeout=0.5).code == "DEADLINE_EXCEEDED"
    server.cont()
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.state == "ALIVE")


def test_a_freeze_shorter_than_the_timeout_harms_nothing(start_server, open_client, events):
    server = start_server()
    client = open_client(server.target, interval=0.3, timeout=WAIT_S)
    assert client.ping().pid == server.pid
    call = client.slow(2.0)
    server.stop()
    assert wait_until(lambda: client.heartbeat.misses > 0)
    server.cont()
    assert call.ended().pid == server.pid
    assert wait_until(lambda: client.state == "ALIVE" and client.heartbeat.misses == 0)
    assert (client.bare.number, of(events, ConnectionDead)) == (1, [])


def test_thawed_the_old_connection_disturbs_nothing(shop, name, open_client):
    """Its calls may end, as they were let; the new connection is judged by its own silence."""
    old, new = shop
    client = open_client(name.target, drain=None)
    assert client.ping().pid == old.pid
    stream, call = client.follow(0.02), client.slow(1.0)
    name.to(new.target)
    old.stop()
    assert wait_until(lambda: client.bare.number == 2 and client.state == "ALIVE")
    rtt = client.heartbeat.rtt
    old.cont()
    assert call.ended().pid == old.pid
    before = len(stream.messages)
    assert wait_until(lambda: len(stream.messages) > before + 10)
    assert (client.state, client.bare.number) == ("ALIVE", 2)
    assert client.heartbeat.rtt is not None
    assert rtt is not None
    new.stop()
    assert wait_until(lambda: client.bare.number > 2), "the old stream kept the new one alive"
    assert not stream.done.done()
    new.cont()
    assert client.ping().pid == new.pid


def test_a_channel_of_grpcs_is_only_told_of(start_server, open_client, events):
    server = start_server()
    make = grpc.insecure_channel if open_client.world == "sync" else grpc.aio.insecure_channel
    client = open_client(server.target, make=make)
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.heartbeat.answered > 0)
    call = client.slow(2.0)
    server.stop()
    assert wait_until(lambda: client.state == "DEAD")
    server.cont()
    assert wait_until(lambda: client.state == "ALIVE")
    assert call.ended().pid == server.pid
    assert wait_until(lambda: of(events, ConnectionAlive))  # told in order
    assert len(of(events, ConnectionDead)) == 1


def test_with_tls(certificates, start_server, open_proxy, open_client):
    frozen, other = (start_server(certificates=certificates) for _ in range(2))
    name = open_proxy(frozen.target)
    client = open_client(name.target, certificates.channel_credentials())
    assert client.ping().pid == frozen.pid
    call = client.slow()
    name.to(other.target)
    frozen.stop()
    assert call.ended().code == "UNAVAILABLE"
    assert client.ping().pid == other.pid
    assert wait_until(lambda: client.state == "ALIVE")
