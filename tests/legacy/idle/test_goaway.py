"""GOAWAY frames that the detector writes into gRPC's own sockets; they go with that."""

import random
import threading
import time

from fixtures.idle_server import IdleServer, echo, events_of
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import ConnectionClosed, IdleDetectionLimited
from rpcwheel.idle.peers import open_sockets
from rpcwheel.timer import WheelTimer


def has_no_connection(server) -> bool:
    return not list(open_sockets(lambda _, port: port == server.port))


def test_max_age_sends_goaway_to_a_busy_connection(server, channel, events):
    detector = server.detect(None, max_age=100, max_age_grace=1000, check=100)
    server.gate = threading.Event()
    call = channel.unary_unary("/test.Idle/Echo").future(b"x")
    server.wait_until_quiet(open_calls=1)
    server.advance(111)
    assert detector.check() == []
    (entry,) = server.table.entries()
    server.advance_until(lambda: entry.mark.left_ns is not None)
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    assert wait_until(lambda: has_no_connection(server))
    server.advance_until(lambda: events_of(events, ConnectionClosed))
    assert [event.how for event in events_of(events, ConnectionClosed)] == ["goaway"]


def test_an_idle_client_is_asked_to_leave(server, channel, events):
    server.detect(close="goaway", goaway_grace=1000)
    echo(channel)
    server.wait_until_quiet()
    server.advance(31)
    server.advance_until(lambda: has_no_connection(server))
    server.advance_until(lambda: events_of(events, ConnectionClosed))
    assert [event.how for event in events_of(events, ConnectionClosed)] == ["goaway"]
    assert echo(channel) == b"x"


def test_one_that_does_not_leave_is_shut(server, events):
    detector = server.detect(close="goaway")
    with server.raw(detector):
        server.wait_until_quiet()
        server.advance_until(lambda: events_of(events, ConnectionClosed))
    assert [event.how for event in events_of(events, ConnectionClosed)] == ["shutdown"]


def test_clients_asked_to_leave_that_call_in_the_same_moment_see_no_error():
    with WheelTimer() as timer:
        server = IdleServer(timer)
        server.detect(0.12, check=0.01, close="goaway", goaway_grace=1000)

        def call_now_and_then() -> None:
            channel = server.channel()
            for _ in range(6):
                assert echo(channel) == b"x"
                time.sleep(random.uniform(0.1, 0.15))

        run_threads(*[call_now_and_then] * 4)
        server.close()


def test_a_change_to_reports_lets_go_of_what_was_marked(server, channel):
    detector = server.detect(None, max_age=100, max_age_grace=1000, check=100)
    server.gate = threading.Event()
    call = channel.unary_unary("/test.Idle/Echo").future(b"x")
    server.wait_until_quiet(open_calls=1)
    server.advance(111)
    detector.check()
    (entry,) = server.table.entries()
    assert entry.mark is not None
    detector.change(close="report")
    assert entry.mark is None
    server.gate.set()
    assert call.result(WAIT_S) == b"x"


def test_that_a_client_under_tls_can_not_be_asked_to_leave_is_told(timer, certificates, events):
    server = IdleServer(timer, certificates=certificates)
    server.detect(close="goaway")
    echo(server.channel())
    server.wait_until_quiet()
    server.advance(31)
    server.advance_until(lambda: events_of(events, ConnectionClosed))
    assert events_of(events, ConnectionClosed)[0].how == "shutdown"
    assert wait_until(lambda: events_of(events, IdleDetectionLimited))
    assert "under TLS can't be asked to leave" in events_of(events, IdleDetectionLimited)[0].reason
    server.close()
