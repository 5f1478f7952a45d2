"""`detector.connections()`: who is connected to a server, with `grpc` and with `grpc.aio`."""

import threading
from contextlib import contextmanager
from datetime import UTC, datetime

import grpc

from fixtures.certificates import mutual_credentials
from fixtures.grpc_servers import IMPATIENT
from fixtures.idle_server import echo
from fixtures.small_servers import ECHOING, METHOD, running
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import SyncWorld
from rpcwheel.idle import ConnectionState, ConnectionTable, IdleConnectionDetector

PUBLIC = {"change", "check", "close", "closed", "connections", "policy", "status"}


def public(instance: object) -> set[str]:
    return {name for name in dir(instance) if not name.startswith("_")}


def test_a_detector_and_its_table_have_only_documented_public_names(world, make_server):
    server = make_server(world)
    detector = server.detect()
    assert public(detector) == PUBLIC
    assert public(server.table) == {"intercept_service"}
    assert all(getattr(type(detector), name).__doc__ for name in PUBLIC)


def test_a_call_tells_the_user_agent_and_when_the_connection_was_used(world, make_server):
    server = make_server(world)
    detector = server.detect()
    server.gate = threading.Event()
    began = datetime.now(UTC)
    call = server.channel().unary_unary("/test.Idle/Echo").future(b"x")
    assert wait_until(lambda: server.tracked.open_calls == 1)
    (one,) = world.do(detector.connections)
    assert (one.state, one.calls_in_flight) == (ConnectionState.ACTIVE, 1)
    assert one.local_address == f"ipv4:127.0.0.1:{server.port}"
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    assert wait_until(server.is_calm)
    server.timer.advance(20)
    (one,) = world.do(detector.connections)
    assert one.user_agent.startswith("grpc-python/")
    assert one.tls_identity is None
    assert (one.state, one.calls_in_flight, one.calls_total) == (ConnectionState.IDLE, 0, 1)
    assert one.idle_s == 20.0
    assert one.last_used_at.tzinfo is UTC
    assert one.connected_at <= one.last_used_at <= datetime.now(UTC)
    assert began <= one.last_used_at


def test_connections_are_listed_oldest_first_and_none_after_close(server):
    detector = server.detect()
    for _ in range(3):
        echo(server.channel())
        assert wait_until(server.is_calm)
        server.timer.advance(1)
    assert [one.idle_s for one in detector.connections()] == [3.0, 2.0, 1.0]
    detector.close()
    assert detector.connections() == []


@contextmanager
def tls_server(credentials):
    table = ConnectionTable()
    options = {"interceptors": [table], "credentials": credentials}
    with (
        running(SyncWorld(), ECHOING, **options) as (server, port),
        IdleConnectionDetector(server, connections=table, ports=port) as detector,
    ):
        yield f"127.0.0.1:{port}", detector


def test_the_certificate_of_a_client_is_its_tls_identity(certificates):
    mutual = mutual_credentials("CN of the client", "shop.example")
    for server_credentials, channel_credentials, subject, names in (
        (*mutual, "CN of the client", ("shop.example",)),
        (certificates.server_credentials(), certificates.channel_credentials(), None, None),
    ):
        with (
            tls_server(server_credentials) as (target, detector),
            grpc.secure_channel(target, channel_credentials, options=IMPATIENT) as channel,
        ):
            assert channel.unary_unary(METHOD)(b"x", timeout=WAIT_S) == b"x"
            (one,) = detector.connections()
        assert one.user_agent
        if subject is None:
            assert one.tls_identity is None
        else:
            assert subject in one.tls_identity.subject
            assert one.tls_identity.alternative_names == names
