"""The detector of a server: what it closes and keeps, its ports, and its end."""

import socket
import threading
from datetime import timedelta

import grpc
import pytest

from fixtures.idle_server import IdleServer, echo, hold
from fixtures.leaks import without_descriptors
from fixtures.small_servers import ECHOING, METHOD, running
from fixtures.timers import cannot_start, run_threads
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import SyncWorld
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import (
    ConnectionClosed,
    ConnectionIdle,
    IdleDetectionLimited,
    add_sink,
    remove_sink,
)
from rpcwheel.idle import ConnectionTable, IdleConnectionDetector, IdlePolicy
from rpcwheel.timer import ManualTimer, WheelTimer

ECHO = "/test.Idle/Echo"


def answers(channel) -> bool:
    try:
        return echo(channel) == b"x"
    except grpc.RpcError:
        return False


def is_open(connected: socket.socket) -> bool:
    """Whether nothing was received except the SETTINGS of the server."""
    connected.setblocking(False)
    try:
        while connected.recv(4096):
            pass
    except BlockingIOError:
        return True
    return False


# --- What is idle --------------------------------------------------------------------------------


def test_an_idle_connection_is_closed_and_its_client_reconnects(world, make_server, events):
    server = make_server(world)
    channel = server.channel()
    server.detect()
    echo(channel)
    peer = server.connection().peer
    server.wait_until_quiet()
    server.advance_until(lambda: events.of(ConnectionClosed))
    idle, closed = events.of(ConnectionIdle), events.of(ConnectionClosed)
    assert [(event.peer, event.reason) for event in idle] == [(peer, "connection idle for 30 s")]
    assert [event.peer for event in closed] == [peer]
    assert server.snapshot() == []
    assert wait_until(lambda: answers(channel))  # the client hears of it a moment later
    assert server.connection().peer != peer


def test_close_streams_ends_a_silent_stream_before_its_connection(world, make_server, events):
    server = make_server(world)
    server.detect(close_streams=True)
    call = hold(server.channel())
    server.wait_until_quiet(open_calls=1)
    server.advance_until(call.done)
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error.value.details() == "closed by the server: connection idle for 30 s"
    server.wait_until_quiet()
    server.advance_until(lambda: events.of(ConnectionClosed))
    idle = events.of(ConnectionIdle)[0]
    assert (idle.calls, idle.streams) == (0, 1)


# --- Age -----------------------------------------------------------------------------------------


def test_max_age_closes_a_used_connection(server, channel, events):
    detector = server.detect(None, max_age=100, check_interval=100)
    for _ in range(10):
        echo(channel)
        server.advance(10)
        assert wait_until(server.is_calm)
        assert detector.check() == []
    server.wait_until_quiet()
    server.timer.advance(11)  # the limit, and at most a tenth of it
    assert [one.calls_total for one in detector.check()] == [10]
    server.advance_until(lambda: events.of(ConnectionClosed))
    assert events.of(ConnectionClosed)[0].reason == "connection open for 100 s"
    assert wait_until(lambda: answers(channel))


def test_max_age_does_not_report_a_busy_connection_as_idle(server, channel, events):
    """Neither when it is found too old, nor by a later check while it is being closed."""
    detector = server.detect(None, max_age=100, check_interval=100)
    server.gate = threading.Event()
    call = channel.unary_unary(ECHO).future(b"x")
    server.wait_until_quiet(open_calls=1)
    server.advance(111)
    assert detector.check() == []
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    assert wait_until(server.is_calm)
    assert detector.check() == []
    server.wait_until_quiet()
    server.advance_until(lambda: events.of(ConnectionClosed))
    assert not events.of(ConnectionIdle)


# --- Reports and changes -------------------------------------------------------------------------


def test_action_report_emits_connection_idle_once_and_closes_nothing(server, channel, events):
    detector = server.detect(action="report")
    echo(channel)
    server.wait_until_quiet()
    server.advance(31)
    peer = server.connection().peer
    assert [one.peer for one in detector.check()] == [peer]
    server.advance(100)
    detector.check()
    assert wait_until(lambda: events.of(ConnectionIdle))
    echo(channel)
    server.wait_until_quiet()
    assert server.connection().peer == peer
    server.advance(31)
    detector.check()
    assert wait_until(lambda: len(events.of(ConnectionIdle)) >= 2)  # idle again is news
    assert len(events.of(ConnectionIdle)) == 2


def test_settings_can_change_while_detection_runs(server, channel, events):
    detector = server.detect(1000)
    echo(channel)
    server.wait_until_quiet()
    server.advance(100)
    assert detector.check() == []
    assert (changed := detector.change(idle_timeout=30)) is detector.policy
    with pytest.raises(ConfigurationError):
        detector.change(idle_timeout=-1)
    assert detector.policy is changed
    assert [one.calls_total for one in detector.check()] == [1]
    server.advance_until(lambda: events.of(ConnectionClosed))


# --- Connections, descriptors, events ------------------------------------------------------------


def test_only_sockets_of_the_server_are_closed(server, channel, events):
    """Not those of clients in this process, of other servers, or of plain TCP."""
    other = IdleServer(server.timer)
    stranger = other.channel()
    assert echo(stranger) == b"x"
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    server.detect()
    echo(channel)
    server.wait_until_quiet()
    server.advance_until(lambda: events.of(ConnectionClosed))
    server.advance(100)
    before = other.connection()
    assert echo(stranger) == b"x"
    assert other.connection().peer == before.peer
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
    assert len(events.of(ConnectionClosed)) == 1
    for one in (listener, client, accepted):
        one.close()
    other.close()


def test_a_process_without_a_free_descriptor_closes_its_idle_connections(server, events):
    server.detect()
    for channel in [server.channel() for _ in range(3)]:
        echo(channel)
    server.wait_until_quiet()
    with without_descriptors():
        server.advance(31)
        server.advance_until(lambda: not server.snapshot())
    assert wait_until(lambda: len(events.of(ConnectionClosed)) == 3)


def test_events_of_each_connection_are_emitted_in_order_on_a_worker(server):
    seen = []

    def sink(event) -> None:
        if isinstance(event, ConnectionIdle | ConnectionClosed):
            seen.append((event.peer, type(event), threading.current_thread().name))

    detector = server.detect()
    raws = [server.raw(detector) for _ in range(5)]
    add_sink(sink)
    try:
        server.wait_until_quiet()
        server.advance_until(lambda: len(seen) == 10)
    finally:
        remove_sink(sink)
    for raw in raws:
        raw.close()
    assert {name.rpartition("-")[0] for _, _, name in seen} == {"rpcwheel-worker"}
    for peer in {peer for peer, _, _ in seen}:
        assert [kind for of, kind, _ in seen if of == peer] == [ConnectionIdle, ConnectionClosed]


def test_a_sink_can_close_the_detector(server, channel):
    detector = server.detect()
    done = threading.Event()

    def close(event) -> None:
        if isinstance(event, ConnectionIdle):
            detector.close()
            done.set()

    add_sink(close)
    try:
        echo(channel)
        server.wait_until_quiet()
        server.advance(41)
        assert done.wait(WAIT_S)
    finally:
        remove_sink(close)
    assert detector.closed


# --- Where the server listens --------------------------------------------------------------------


def test_without_ports_a_server_is_where_its_calls_come_in(server, channel, events):
    other = IdleServer(server.timer)
    silent_there = other.raw()
    detector = server.detect(ports=None)
    silent = server.raw()
    detector.check()
    assert server.snapshot() == []
    echo(channel)
    assert wait_until(lambda: detector.check() == [] and len(server.snapshot()) == 2)
    assert {one.local_address for one in server.snapshot()} == {f"ipv4:127.0.0.1:{server.port}"}
    server.wait_until_quiet()
    server.advance_until(lambda: len(events.of(ConnectionClosed)) == 2)
    assert is_open(silent_there)
    silent.close()
    silent_there.close()
    other.close()


def test_ports_that_are_not_the_servers_are_reported(server, channel, events):
    other = IdleServer(server.timer)
    server.gate = threading.Event()
    detector = server.detect(ports=other.port)
    call = channel.unary_unary(ECHO).future(b"x")
    assert wait_until(server.snapshot)
    server.advance(1)
    detector.check()
    assert wait_until(lambda: events.of(IdleDetectionLimited))
    reason = events.of(IdleDetectionLimited)[0].reason
    assert (
        f"at port {server.port}, but no socket of that peer is open at port {other.port}" in reason
    )
    assert "are these the server's ports?" in reason
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    other.close()


def test_a_client_at_a_unix_socket_is_reported_and_not_closed(timer, tmp_path, events):
    table = ConnectionTable()
    address = f"unix:{tmp_path}/it.sock"
    with running(SyncWorld(), ECHOING, place=address, interceptors=[table]) as (server, _):
        with pytest.warns(RuntimeWarning, match="cannot be distinguished or closed") as warned:
            detector = IdleConnectionDetector(
                server, 30, connections=table, ports=address, timer=timer
            )
        assert warned[0].filename == __file__
        with detector, grpc.insecure_channel(address) as channel:
            assert channel.unary_unary(METHOD)(b"x") == b"x"
            assert wait_until(lambda: detector.connections()[0].calls_in_flight == 0)
            timer.advance(31)
            detector.check()
            assert wait_until(lambda: events.of(ConnectionIdle))
            assert [one.peer for one in detector.connections()] == ["unix:"]
            assert wait_until(lambda: events.of(IdleDetectionLimited))
            assert channel.unary_unary(METHOD)(b"x") == b"x"


# --- Construction, the timer and the end ---------------------------------------------------------


def make(server, **arguments) -> IdleConnectionDetector:
    arguments = {"connections": server.table, "timer": server.timer} | arguments
    return IdleConnectionDetector(server.server, **arguments)


def test_a_policy_may_be_given_as_the_seconds_of_its_idle_timeout(server):
    for given in (5, timedelta(seconds=5)):
        with make(server, policy=given) as detector:
            assert detector.policy == IdlePolicy(idle_timeout=given)
    with make(server) as detector:
        assert detector.policy == IdlePolicy()


def test_a_table_has_one_detector_at_a_time(server):
    with make(server), pytest.raises(ConfigurationError, match="belongs to another detector"):
        make(server)
    make(server).close()


def test_a_stopped_timer_ends_detection_and_is_reported(server, channel, events):
    timer = ManualTimer()
    detector = make(server, ports=server.port, timer=timer)
    echo(channel)
    timer.advance(29)
    timer.stop()
    assert wait_until(lambda: events.of(IdleDetectionLimited))
    reason = events.of(IdleDetectionLimited)[0].reason
    assert reason.startswith("detection has stopped because its timer was stopped")
    assert detector.check() == []
    detector.change(idle_timeout=60)
    detector.close()


def test_a_timer_that_is_full_is_reported(server, events):
    with WheelTimer(max_pending=1) as timer:
        taken = timer.new_timeout(lambda _: None, 1000)
        with make(server, timer=timer) as detector:
            assert wait_until(lambda: events.of(IdleDetectionLimited))
            assert "detection has stopped until check() or change()" in events[0].reason
            taken.cancel()
            detector.check()
            assert timer.pending == 1


def test_a_timer_that_can_start_no_thread_is_reported(server, events, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    with WheelTimer() as timer:
        detector = make(server, timer=timer)
        monkeypatch.undo()
        detector.check()
        assert timer.pending == 1
        assert wait_until(lambda: events.of(IdleDetectionLimited))
        (event,) = events.of(IdleDetectionLimited)
        assert event.reason.endswith("until check() or change() is called: can't start new thread")
        detector.close()


def test_after_close_by_many_threads_no_connection_is_closed(server, channel, events):
    detector = server.detect()
    echo(channel)
    server.wait_until_quiet()
    run_threads(*[detector.close] * 8)
    assert server.timer.pending == 0
    server.advance(1000)
    assert detector.check() == []
    assert not events
    server.detect().close()  # the table is free for another


def test_detection_begins_before_the_server_starts_and_ends_with_it(world, make_server):
    server = make_server(world, start=False)
    detector = server.detect()
    assert server.check(detector) == []
    world.do(server.server.start)
    server.check(detector)
    assert not detector.closed
    stopped = world.do(server.server.stop, None)
    assert world.name == "aio" or stopped.wait(WAIT_S)
    server.advance_until(lambda: detector.closed)
    assert server.check(detector) == []
    assert server.timer.pending == 0


def test_detection_ends_when_the_server_is_garbage_collected(timer):
    class Server:
        def wait_for_termination(self, timeout):
            return True

    detector = IdleConnectionDetector(Server(), connections=ConnectionTable(), timer=timer)
    timer.advance(60)
    assert wait_until(lambda: detector.closed)
    assert timer.pending == 0
