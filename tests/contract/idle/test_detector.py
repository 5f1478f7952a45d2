"""What a detector finds idle, by each of its rules, and what becomes of it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.idle_server import IdleServer, down, echo, let_it_rest, said, soon
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.idle import ConnectionTable, IdleConnectionDetector
from rpcwheel.observe import ConnectionClosed, ConnectionIdle, IdleLimited

# What is closed


def answers(channel) -> bool:
    try:
        return echo(channel) == b"x"
    except grpc.RpcError:
        return False


def test_an_idle_connection_is_closed_and_its_client_comes_again(server, channel, events):
    server.detect()
    echo(channel)
    peer = server.connection().peer
    let_it_rest()
    assert soon(server, lambda: said(events, ConnectionClosed))
    idle, closed = said(events, ConnectionIdle), said(events, ConnectionClosed)
    assert [(event.peer, event.reason) for event in idle] == [(peer, "connection idle for 30 s")]
    assert [(event.peer, event.how) for event in closed] == [(peer, "shutdown")]
    assert server.table.snapshot() == ()
    assert wait_until(lambda: answers(channel))  # the news takes a moment to the client
    assert server.connection().peer != peer


def test_a_busy_connection_stays_while_an_idle_one_goes(server, channel, events):
    server.detect()
    other = server.channel()
    echo(other)
    let_it_rest()
    echo(channel)
    while not said(events, ConnectionClosed):
        server.timer.advance(5)
        assert echo(channel) == b"x"
    assert len(said(events, ConnectionClosed)) == 1
    assert server.connection().calls > 1


def test_a_call_in_flight_holds_its_connection(server, channel, events):
    detector = server.detect(close_streams=True)
    server.gate = threading.Event()
    call = channel.unary_unary("/test.Idle/Echo").future(b"x")
    assert wait_until(server.table.snapshot)
    server.timer.advance(1000)
    let_it_rest()
    assert detector.check() == []
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    assert not said(events, ConnectionIdle)


def test_a_silent_stream_is_kept_unless_asked(server, channel):
    detector = server.detect()
    call = down(channel)
    let_it_rest()
    server.timer.advance(1000)
    assert detector.check() == []
    server.down.put(b"still")
    assert next(call) == b"still"
    call.cancel()


def test_a_silent_stream_is_ended_with_the_reason_and_then_its_connection(server, channel, events):
    server.detect(close_streams=True)
    call = down(channel)
    let_it_rest()
    server.timer.advance(41)
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error.value.details() == "closed by the server: connection idle for 30 s"
    let_it_rest()
    assert soon(server, lambda: said(events, ConnectionClosed))
    assert (said(events, ConnectionIdle)[0].calls, said(events, ConnectionIdle)[0].streams) == (
        0,
        1,
    )


def test_a_stream_that_only_writes_is_not_all_idle(server, channel):
    detector = server.detect(close_streams=True)
    call = down(channel)
    for _ in range(10):
        server.timer.advance(10)
        server.down.put(b"more")
        assert next(call) == b"more"
        assert detector.check() == []
    call.cancel()


def test_a_stream_that_only_reads_is_not_all_idle(server, channel):
    detector = server.detect(close_streams=True)
    lines = iter(lambda: wanted.wait(WAIT_S) and (wanted.clear() or b"line"), b"")
    wanted = threading.Event()
    call = channel.stream_unary("/test.Idle/Up").future(lines)
    for count in range(1, 6):
        wanted.set()
        assert wait_until(lambda: len(server.read) == count)  # noqa: B023
        server.timer.advance(15)
        assert detector.check() == []
    call.cancel()
    wanted.set()


def test_read_idle_closes_a_stream_that_only_writes(server, channel):
    server.detect(None, read_idle=30, close_streams=True)
    call = down(channel)
    let_it_rest()

    def go_on_writing():
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            server.down.put(b"more")
            server.timer.advance(10)
            next(call)

    with pytest.raises(grpc.RpcError) as error:
        go_on_writing()
    assert error.value.details() == "closed by the server: nothing read for 30 s"


def test_heartbeats_keep_nothing_open_unless_asked(server, channel):
    beat = {"metadata": [("rpcwheel-heartbeat", "1")]}
    detector = server.detect(close="report")
    echo(channel)
    assert wait_until(server.is_calm)
    for _ in range(3):
        server.timer.advance(10)
        echo(channel, **beat)
        assert detector.check() == []
    server.timer.advance(1)
    assert [one.heartbeats for one in detector.check()] == [3]


def test_counted_heartbeats_keep_a_connection_open(server, channel, events):
    detector = server.detect(count_heartbeats=True)
    for _ in range(10):
        echo(channel, metadata=[("rpcwheel-heartbeat", "1")])
        server.timer.advance(10)
        assert detector.check() == []


def test_a_connection_that_never_made_a_call_is_closed(server, events):
    detector = server.detect()
    with server.raw(detector) as raw:
        raw.settimeout(WAIT_S)
        assert server.connection().calls == 0
        let_it_rest()
        assert soon(server, lambda: said(events, ConnectionClosed))
        while raw.recv(4096):
            pass  # what the server says first
    assert server.table.snapshot() == ()


def test_an_old_connection_is_closed_though_it_is_used(server, channel, events):
    detector = server.detect(None, max_age=100, check=100)
    for _ in range(10):
        echo(channel)
        server.timer.advance(10)
        assert wait_until(server.is_calm)
        assert detector.check() == []
    let_it_rest()
    server.timer.advance(11)  # the limit, and at most a tenth of it
    assert [one.calls for one in detector.check()] == [10]
    assert soon(server, lambda: said(events, ConnectionClosed))
    assert said(events, ConnectionClosed)[0].reason == "connection open for 100 s"
    assert echo(channel) == b"x"


def test_a_stream_on_an_old_connection_has_its_grace(server, channel):
    detector = server.detect(None, max_age=100, max_age_grace=50, check=10)
    call = down(channel)
    let_it_rest()
    server.timer.advance(145)
    assert detector.check() == []
    server.timer.advance(49)
    assert detector.check() == []
    assert call.is_active()
    server.timer.advance(1)
    detector.check()
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.details() == "closed by the server: connection open for 100 s"


def test_a_report_closes_nothing_and_is_made_once(server, channel, events):
    detector = server.detect(close="report")
    echo(channel)
    let_it_rest()
    server.timer.advance(31)
    assert [one.peer for one in detector.check()] == [server.connection().peer]
    server.timer.advance(100)
    detector.check()
    assert wait_until(lambda: said(events, ConnectionIdle))
    peer = server.connection().peer
    echo(channel)
    assert wait_until(server.is_calm)
    assert server.connection().peer == peer
    assert len(said(events, ConnectionIdle)) == 1
    server.timer.advance(31)
    detector.check()
    assert wait_until(lambda: len(said(events, ConnectionIdle)) == 2)  # idle again is news


def test_settings_may_change_while_it_runs(server, channel, events):
    detector = server.detect(1000)
    echo(channel)
    let_it_rest()
    server.timer.advance(100)
    assert detector.check() == []
    assert detector.change(idle_timeout=30) is detector.policy
    assert [one.calls for one in detector.check()] == [1]
    assert soon(server, lambda: said(events, ConnectionClosed))


# Where the server listens


def test_without_ports_those_are_learned_where_calls_come_in(server, channel, events):
    other = IdleServer(server.timer)
    silent_there = other.raw()
    detector = server.detect(ports=None)
    silent = server.raw()
    detector.check()
    assert server.table.snapshot() == ()
    echo(channel)
    assert wait_until(lambda: detector.check() == [] and len(server.table.snapshot()) == 2)
    assert {one.local_port for one in server.table.snapshot()} == {server.port}
    let_it_rest()
    assert soon(server, lambda: len(said(events, ConnectionClosed)) == 2)
    silent_there.setblocking(False)
    silent_there.recv(4096)  # what the server says first
    with pytest.raises(BlockingIOError):  # still open
        silent_there.recv(4096)
    silent.close()
    silent_there.close()
    other.close()


def test_ports_that_are_not_the_servers_are_told(server, channel, events):
    server.gate = threading.Event()
    detector = server.detect(ports=2)
    call = channel.unary_unary("/test.Idle/Echo").future(b"x")
    assert wait_until(server.table.snapshot)
    server.timer.advance(1)
    detector.check()
    assert wait_until(lambda: said(events, IdleLimited))
    assert "are these the server's ports?" in said(events, IdleLimited)[0].reason
    server.gate.set()
    assert call.result(WAIT_S) == b"x"


def test_a_client_at_a_unix_socket_is_told_of_and_not_closed(timer, tmp_path, events):
    table = ConnectionTable(timer=timer)
    address = f"unix:{tmp_path}/it.sock"
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, interceptors=[table])
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "test.Idle", {"Echo": grpc.unary_unary_rpc_method_handler(lambda r, _: r)}
                )
            ]
        )
        server.add_insecure_port(address)
        server.start()
        with pytest.warns(RuntimeWarning, match="can't be told apart, nor closed"):
            detector = IdleConnectionDetector(
                server, 30, connections=table, ports=address, timer=timer
            )
        with detector, grpc.insecure_channel(address) as channel:
            echo(channel)
            assert wait_until(lambda: table.snapshot()[0].calls_open == 0)
            timer.advance(31)
            detector.check()
            assert wait_until(lambda: said(events, ConnectionIdle))
            assert [one.peer for one in table.snapshot()] == ["unix:"]
            assert said(events, IdleLimited)
            assert echo(channel) == b"x"
        server.stop(None).wait()


# The end


def test_it_may_be_closed_by_many_at_once_and_then_does_nothing(server, channel, events):
    detector = server.detect()
    echo(channel)
    let_it_rest()
    run_threads(*[detector.close] * 8)
    assert server.timer.pending == 0
    server.timer.advance(1000)
    assert detector.check() == []
    assert not events
    server.detect().close()  # the table is free for another
