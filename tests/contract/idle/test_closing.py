"""How a connection is closed, what is kept at the last moment, and what is never touched."""

import socket
import threading
import time

import grpc
import pytest

from fixtures.idle_server import IdleServer, connect_from, echo, let_it_rest, reset, said, soon
from fixtures.leaks import descriptors
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.idle import closing
from rpcwheel.idle.closing import FRESH_NS, Settled, _finishing
from rpcwheel.idle.core import QUIET_NS, TRY_NS
from rpcwheel.idle.entry import Call
from rpcwheel.idle.table import Connections
from rpcwheel.observe import ConnectionClosed, ConnectionIdle, ConnectionKept
from rpcwheel.timer import WheelTimer

# Asked to leave


def test_a_client_that_is_asked_to_leave_goes_and_no_call_fails(events):
    with WheelTimer() as timer:
        server = IdleServer(timer)
        server.detect(None, max_age=0.2, max_age_grace=30, close="goaway", check=0.05)
        channel = server.channel()
        end, peers = time.monotonic() + 2, set()
        while time.monotonic() < end:
            assert echo(channel) == b"x"
            peers |= {one.peer for one in server.table.snapshot()}
        server.close()
    assert len(peers) > 3  # of about six; that they have gone is noticed within a second
    assert {event.how for event in said(events, ConnectionClosed)} == {"goaway"}


def test_what_is_too_old_and_busy_is_asked_to_leave_by_default_and_not_called_idle(
    server, channel, events
):
    detector = server.detect(None, max_age=100, check=100)
    server.gate = threading.Event()
    call = channel.unary_unary("/test.Idle/Echo").future(b"x")
    assert wait_until(server.table.snapshot)
    let_it_rest()
    server.timer.advance(111)
    assert detector.check() == []
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    assert soon(server, lambda: said(events, ConnectionClosed))
    assert [(type(event), event.how) for event in events] == [(ConnectionClosed, "goaway")]


def test_an_idle_client_is_asked_to_leave(server, channel, events):
    server.detect(close="goaway")
    echo(channel)
    let_it_rest()
    assert soon(server, lambda: said(events, ConnectionClosed))
    assert [event.how for event in said(events, ConnectionClosed)] == ["goaway"]
    assert echo(channel) == b"x"


def test_one_that_does_not_leave_is_shut(server, events):
    detector = server.detect(close="goaway")
    with server.raw(detector):
        let_it_rest()
        assert soon(server, lambda: said(events, ConnectionClosed))
    assert [event.how for event in said(events, ConnectionClosed)] == ["shutdown"]


# What is left alone


def test_a_call_between_the_decision_and_the_end_keeps_the_connection(server, channel, events):
    detector = server.detect()
    echo(channel)
    let_it_rest()
    detector._look()
    server.timer._hub.manual_ns += 31_000_000_000  # without a round of the timer's
    told = []
    assert len(detector._decide(told)) == 1
    echo(channel)
    let_it_rest()
    detector._close_marked(told)
    assert [type(event) for event in told] == [ConnectionIdle, ConnectionKept]
    assert told[1].reason == "it is used again"
    assert echo(channel) == b"x"
    assert server.connection().calls == 3


def test_bytes_that_have_just_come_keep_the_connection(server, channel):
    detector = server.detect()
    took_ns = QUIET_NS
    while took_ns >= QUIET_NS:  # a machine that stood still: they have not just come
        echo(channel)
        let_it_rest()
        detector._look()
        server.timer._hub.manual_ns += 31_000_000_000
        detector._decide(told := [])
        began_ns = time.monotonic_ns()
        with pytest.raises(grpc.RpcError):  # no handler sees it
            channel.unary_unary("/test.Idle/Unknown")(b"x", timeout=WAIT_S)
        detector._close_marked(told)
        took_ns = time.monotonic_ns() - began_ns
    assert [type(event) for event in told] == [ConnectionIdle]
    assert len(server.table.snapshot()) == 1


def test_a_call_that_waits_for_a_thread_keeps_its_connection(timer, events):
    server = IdleServer(timer, workers=1)
    detector = server.detect()
    busy, waiting = server.channel(), server.channel()
    echo(waiting)
    server.gate = threading.Event()
    calls = [busy.unary_unary("/test.Idle/Echo").future(b"x")]
    assert wait_until(lambda: not server.is_calm())
    calls.append(waiting.unary_unary("/test.Idle/Echo").future(b"y"))
    assert wait_until(lambda: server.table.open_calls == 2)
    let_it_rest()
    timer.advance(31)
    assert detector.check() == []
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x", b"y"]
    assert not events
    server.close()


def test_another_connection_from_the_port_of_a_marked_one_is_not_touched(server):
    detector = server.detect()
    first = server.raw(detector)
    here = first.getsockname()
    let_it_rest()
    server.timer._hub.manual_ns += 31_000_000_000
    assert len(detector._decide([])) == 1
    reset(first)
    again = connect_from(here, server.port)
    let_it_rest()
    detector._close_marked(told := [])
    assert told == []
    again.setblocking(False)
    again.recv(4096)  # what the server says first
    with pytest.raises(BlockingIOError):  # still open
        again.recv(4096)
    again.close()


def test_an_open_call_is_ended_once(timer):
    table = Connections(timer=timer)
    call = Call(table, "ipv4:10.0.0.1:1", streams=True, heartbeat=False)
    assert _finishing(call.entry, "why") == [(call, "why")]
    assert _finishing(call.entry, "why") == []


def call_around_the_limit(server: IdleServer) -> list[grpc.StatusCode]:
    """Make calls at the very time at which connections are found idle; the codes of failures."""
    failed = []

    def call_now_and_then(pause: float) -> None:
        channel = server.channel()
        for turn in range(12):
            try:
                assert echo(channel) == b"x"
            except grpc.RpcError as error:
                failed.append(error.code())
            time.sleep(pause + turn / 500)

    run_threads(*(lambda p=p: call_now_and_then(p) for p in (0.1, 0.11, 0.12, 0.13)))
    return failed


def test_clients_asked_to_leave_that_call_in_the_same_moment_see_no_error():
    with WheelTimer() as timer:
        server = IdleServer(timer)
        server.detect(0.12, check=0.01, close="goaway")
        assert call_around_the_limit(server) == []
        server.close()


def test_of_clients_that_call_as_their_connection_is_shut_only_those_on_the_way_see_it(events):
    with WheelTimer() as timer:
        server = IdleServer(timer)
        server.detect(0.12, check=0.01)
        failed = call_around_the_limit(server)
        server.close()
    assert set(failed) <= {grpc.StatusCode.UNAVAILABLE}
    assert wait_until(lambda: len(failed) < len(said(events, ConnectionClosed)))


def test_no_socket_but_the_servers_own_is_touched(server, channel, events):
    """Not a client's in this process, not another server's, not a plain one."""
    other = IdleServer(server.timer)
    stranger = other.channel()
    assert echo(stranger) == b"x"
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    server.detect()
    echo(channel)
    let_it_rest()
    assert soon(server, lambda: said(events, ConnectionClosed))
    server.timer.advance(100)
    before = other.connection()
    assert echo(stranger) == b"x"
    assert other.connection().peer == before.peer
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
    assert len(said(events, ConnectionClosed)) == 1
    for one in (listener, client, accepted):
        one.close()
    other.close()


# The server's moment


class Clock:
    """Time that moves by hand."""

    now_ns = 100

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_a_moment_is_given_again_when_it_is_over_and_no_more_if_it_was_not_had(monkeypatch):
    monkeypatch.setattr(closing, "time", clock := Clock())
    given = iter([True, True, False])
    settled = Settled(lambda: next(given))
    assert settled.seen_ago_ns() is None
    settled.renew()
    clock.now_ns += FRESH_NS
    settled.renew()
    assert settled.seen_ago_ns() == FRESH_NS
    clock.now_ns += 1
    settled.renew()
    assert settled.seen_ago_ns() == 0
    clock.now_ns += FRESH_NS + 1
    settled.renew()
    settled.renew()
    assert settled.seen_ago_ns() is None


def test_what_comes_while_the_server_has_its_moment_counts_as_not_seen(monkeypatch):
    monkeypatch.setattr(closing, "time", clock := Clock())

    def settle() -> bool:
        clock.now_ns += 70
        return True

    settled = Settled(settle)
    settled.renew()
    clock.now_ns += 1
    assert settled.seen_ago_ns() == 71


def test_no_socket_is_held_while_the_server_has_its_moment(server, channel):
    detector = server.detect()
    echo(channel)
    let_it_rest()
    detector._look()
    server.timer._hub.manual_ns += 31_000_000_000
    held = []

    def settle() -> bool:
        hand = detector._scan.slot._hand
        held.append(dict(descriptors())[str(hand)])
        return True

    def close() -> bool:  # more than once, if the machine stands still after the server's moment
        detector._decide([])
        detector._close_marked([])
        server.timer._hub.manual_ns += TRY_NS
        return server.table.snapshot() == ()

    detector._settle = settle
    assert wait_until(close)
    assert set(held) == {"/dev/null"}
