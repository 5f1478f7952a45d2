"""What real servers answer to heartbeats, and what that says of them: in both worlds."""

import time

import pytest

from fixtures.heartbeat_worlds import INTERVAL, TIMEOUT
from fixtures.server_process import CHECK, PING
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.heartbeat import HealthProbe, MethodProbe

SEVERAL = 4


def test_a_hanging_health_handler_is_a_dead_connection(start_server, open_client):
    """HTTP/2 pings are answered all the while: gRPC's own keepalive sees nothing."""
    server = start_server(health="hanging")
    client = open_client(server.target)
    assert client.ping().pid == server.pid
    ended = client.slow().ended()
    assert ended.code == "UNAVAILABLE"
    assert "no answer to heartbeats" in ended.details
    assert client.heartbeat.answered == 0


def test_a_method_that_works_keeps_it_alive(start_server, open_client):
    server = start_server(health="hanging")
    client = open_client(server.target, probe=MethodProbe(PING))
    assert client.ping().pid == server.pid
    call = client.slow(1.5 * TIMEOUT)
    assert wait_until(lambda: client.heartbeat.answered >= SEVERAL)
    assert (client.state, client.bare.number) == ("ALIVE", 1)
    assert call.ended().pid == server.pid


def test_no_health_service_is_an_answer_too(start_server, open_client):
    server = start_server(health="missing")
    client = open_client(server.target, timeout=WAIT_S)
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.heartbeat.answered >= SEVERAL)
    assert (client.state, client.bare.number) == ("ALIVE", 1)
    assert client.heartbeat.serving is None


def test_not_serving_is_told_and_kept(start_server, open_client):
    server = start_server(health="not_serving")
    client = open_client(server.target, timeout=WAIT_S)
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.heartbeat.answered >= SEVERAL)
    assert client.heartbeat.serving is False
    assert (client.state, client.bare.number) == ("ALIVE", 1)


def test_not_serving_is_dead_where_serving_is_required(start_server, open_client):
    server = start_server(health="not_serving")
    client = open_client(server.target, probe=HealthProbe(require_serving=True))
    assert client.ping().pid == server.pid
    assert client.slow().ended().code == "UNAVAILABLE"
    assert client.heartbeat.serving is False


def test_serving_is_told(start_server, open_client):
    server = start_server()
    probe = HealthProbe(require_serving=True)
    client = open_client(server.target, probe=probe, timeout=WAIT_S)
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.heartbeat.answered >= SEVERAL)
    assert client.heartbeat.serving is True
    assert client.heartbeat.rtt > 0
    assert (client.state, client.bare.number) == ("ALIVE", 1)


def test_a_busy_connection_is_sent_no_heartbeat(start_server, open_client):
    server = start_server()
    client = open_client(server.target, interval=1.0, timeout=WAIT_S)
    end, last, longest = time.monotonic() + 4.0, time.monotonic(), 0.0
    while time.monotonic() < end:
        assert client.ping().pid == server.pid
        now = time.monotonic()
        last, longest = now, max(longest, now - last)
    if longest > 1.0:
        pytest.skip("the machine was too busy for a busy connection")
    calls = server.calls()
    assert calls[PING] > SEVERAL
    assert (calls[CHECK], calls["heartbeats"], client.heartbeat.sent) == (0, 0, 0)


def test_a_silent_one_is_sent_heartbeats_that_say_what_they_are(start_server, open_client):
    server = start_server()
    client = open_client(server.target, timeout=WAIT_S)
    assert client.ping().pid == server.pid
    assert wait_until(lambda: client.heartbeat.answered >= SEVERAL)
    calls = server.calls()
    assert calls["heartbeats"] == calls[CHECK] >= SEVERAL
    used = client.heartbeat.last_use
    assert client.heartbeat.last_read > used + INTERVAL


def test_an_unused_connection_is_never_made(start_server, open_client):
    server = start_server()
    client = open_client(server.target)
    time.sleep(3 * INTERVAL)  # nothing happens, and nothing else could show it
    assert (client.state, client.heartbeat.sent, client.bare.number) == ("UNUSED", 0, 1)
    assert server.calls()["heartbeats"] == 0
