"""Frozen servers (SIGSTOP): their connections are open, but nothing answers."""

import grpc

from fixtures.heartbeat_clients import TIMEOUT, Client
from fixtures.server_process import PING
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, RetryPolicy, aio
from rpcwheel.events import ConnectionAlive, ConnectionDead, ConnectionReplaced

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
REASON = "no answer to heartbeats"


def test_calls_in_flight_end_and_the_next_call_reaches_the_other_server(
    shop, name, open_client, events
):
    frozen, other = shop
    client = open_client(name.target)
    assert client.ping() == frozen.pid
    calls = client.slow(), client.follow()
    name.to(other.target)
    frozen.stop()
    for call in calls:
        error = call.error()
        assert error.code() is UNAVAILABLE
        assert REASON in error.details()
    assert client.ping() == other.pid
    assert wait_until(lambda: client.state == "ALIVE")
    assert client.bare.number == client.heartbeat.replaced + 1 >= 2
    assert wait_until(lambda: events.of(ConnectionAlive))  # emitted in order
    dead = events.of(ConnectionDead)[0]
    assert (dead.target, dead.calls) == (name.target, 2)
    assert dead.silent_s > TIMEOUT
    assert wait_until(lambda: events.of(ConnectionReplaced))
    replaced = events.of(ConnectionReplaced)[0]
    assert (replaced.target, replaced.number) == (name.target, 2)
    assert REASON in replaced.reason


def test_the_new_connection_uses_the_other_address(shop, open_client):
    frozen, other = shop
    client = open_client(f"ipv4:{frozen.target},{other.target}")
    assert client.ping() == frozen.pid
    call = client.slow()
    frozen.stop()
    assert call.code() is UNAVAILABLE
    assert client.ping() == other.pid


def test_calls_succeed_after_the_frozen_server_continues(server, open_client):
    client = open_client(server.target)
    assert client.ping() == server.pid
    call = client.slow()
    server.stop()
    assert call.code() is UNAVAILABLE
    server.cont()
    assert client.ping() == server.pid
    assert wait_until(lambda: client.state == "ALIVE")


def test_a_freeze_shorter_than_the_timeout_ends_no_call(server, open_client, events):
    client = open_client(server.target, interval=0.1, timeout=10 * WAIT_S)
    assert client.ping() == server.pid
    call = client.slow()
    server.stop()
    client.heartbeat.beat()
    assert wait_until(lambda: client.heartbeat.sent > client.heartbeat.answered)
    server.cont()
    answered = client.heartbeat.answered
    assert wait_until(lambda: client.heartbeat.answered > answered)
    assert not call.done()
    assert (client.bare.number, events.of(ConnectionDead)) == (1, [])


def test_a_drained_connection_that_works_again_does_not_affect_the_new_one(shop, name, open_client):
    """Only activity of the active connection counts for its heartbeat."""
    old, new = shop
    client = open_client(name.target, drain_timeout=None)
    assert client.ping() == old.pid
    stream, call = client.follow(0.02), client.slow(1.0)
    name.to(new.target)
    old.stop()
    assert wait_until(lambda: client.bare.number >= 2 and client.state == "ALIVE")
    old.cont()
    assert int(call.result()) == old.pid
    number = client.bare.number
    new.stop()
    assert wait_until(lambda: stream.read() and client.bare.number > number), (
        "the old stream kept the new connection alive"
    )
    assert not stream.done()
    new.cont()
    assert client.ping() == new.pid


def test_a_frozen_server_with_tls(certificates, start_server, open_proxy):
    frozen, other = (start_server(certificates=certificates) for _ in range(2))
    name = open_proxy(frozen.target)
    with Client("sync", name.target, certificates.channel_credentials()) as client:
        assert client.ping() == frozen.pid
        call = client.slow()
        name.to(other.target)
        frozen.stop()
        assert call.code() is UNAVAILABLE
        assert client.ping() == other.pid
        assert wait_until(lambda: client.state == "ALIVE")


def test_a_health_handler_that_hangs_makes_the_connection_dead(start_server):
    """HTTP/2 pings are still answered, so gRPC's keepalive does not detect this."""
    server = start_server(health="hanging")
    with Client("sync", server.target) as client:
        assert client.ping() == server.pid
        error = client.slow().error()
        assert error.code() is UNAVAILABLE
        assert REASON in error.details()
        assert client.heartbeat.answered == 0


def test_a_kit_retries_idempotent_calls_on_the_new_connection(shop, name, open_client):
    """A multicallable outlives the connection, and idempotent calls are retried on the next."""
    frozen, other = shop
    retry = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=5, backoff=0.05)
    make = Kit if open_client.world == "sync" else aio.Kit
    kit = make(retry=retry, idempotent=True)
    client = open_client(name.target, around=kit.intercept_channel)
    multicallable = client.do(client.channel.unary_unary, PING)

    def ping() -> int:
        return int(client.do(multicallable, b"", timeout=WAIT_S, wait_for_ready=True))

    assert ping() == frozen.pid
    name.to(other.target)
    frozen.stop()
    assert int(client.begin_ping(wait_for_ready=False).result()) == other.pid
    assert client.bare.number >= 2
    assert ping() == other.pid
