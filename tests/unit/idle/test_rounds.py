"""The rounds of a detector: where they run, what they examine right before a shutdown, the end."""

import os
import socket
import threading
from contextlib import contextmanager

import grpc
import pytest

from fixtures.idle_server import (
    IdleServer,
    around,
    connect_from,
    echo,
    reset,
    sockets_at,
)
from fixtures.leaks import descriptors
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel.events import ConnectionClosed, ConnectionIdle, IdleCloseSkipped, IdleDetectionLimited
from rpcwheel.idle import IdleConnectionDetector, IdlePolicy
from rpcwheel.timer import WheelTimer

LIMIT_NS = 31_000_000_000


class Watched(IdleConnectionDetector):
    """Records the threads of its scans; each waits for a gate."""

    def __init__(self, server: IdleServer, policy, timer) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.threads: list[str] = []
        self.running = self.most = 0
        super().__init__(
            server.server, policy, connections=server.table, ports=server.port, timer=timer
        )

    def _scan(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.running += 1
        self.most = max(self.most, self.running)
        self.gate.wait(WAIT_S)
        super()._scan()
        self.running -= 1


def test_rounds_run_on_workers_and_never_two_at_once():
    with WheelTimer(name="the-timer") as timer:
        server = IdleServer(timer)
        detector = Watched(server, IdlePolicy(idle_timeout=0.005), timer)
        run_threads(*[lambda: [detector.check() for _ in range(5)]] * 4)
        assert wait_until(lambda: any(n.startswith("rpcwheel-worker") for n in detector.threads))
        detector.close()
        scans = len(detector.threads)
        assert timer.pending == 0
        assert not any("the-timer" in name for name in detector.threads)
        assert detector.most == 1
        server.close()
    assert len(detector.threads) == scans


def test_close_waits_for_a_round_that_runs(server):
    detector = Watched(server, None, server.timer)
    detector.gate.clear()
    server.timer.advance(60)
    assert wait_until(lambda: detector.running)
    closing = in_thread(detector.close)
    assert wait_until(lambda: detector.closed)
    assert detector.running == 1
    detector.gate.set()
    closing.result(WAIT_S)
    assert (detector.running, server.timer.pending) == (0, 0)


def decide(server, detector) -> list:
    """Let the idle timeout pass without a round of the timer, and decide what to close."""
    server.wait_until_quiet()
    detector._scan()
    server.timer._timer_state.manual_ns += LIMIT_NS
    detector._decide(events := [])
    assert [type(event) for event in events] == [ConnectionIdle]
    return events


def close_pending(detector) -> list:
    detector._close_pending(events := [])
    return events


def test_a_call_between_the_decision_and_the_shutdown_keeps_the_connection(server, channel):
    detector = server.detect()
    echo(channel)
    decide(server, detector)
    echo(channel)
    server.wait_until_quiet()
    (event,) = close_pending(detector)
    assert (type(event), event.reason) == (IdleCloseSkipped, "it is used again")
    assert echo(channel) == b"x"
    assert server.connection().calls_total == 3


@pytest.mark.parametrize("end", ["close", "change"])
def test_after_close_or_change_no_earlier_decision_is_carried_out(server, channel, end):
    detector = server.detect()
    echo(channel)
    decide(server, detector)
    if end == "close":
        detector.close()
    else:
        detector.change(idle_timeout=600)
    assert close_pending(detector) == []
    assert echo(channel) == b"x"
    assert server.connection().calls_total == 2


def test_another_connection_with_the_port_of_an_idle_one_is_not_closed(server):
    detector = server.detect()
    first = server.raw(detector)
    here = first.getsockname()
    decide(server, detector)
    (old,) = sockets_at(server.port)
    reset(first)
    assert wait_until(lambda: not is_open(old))  # else the detector closes the server's end
    with detector._scanner.open(old) as gone:
        assert gone is None
    again = connect_from(here, server.port)
    server.wait_until_quiet()
    assert close_pending(detector) == []
    again.settimeout(WAIT_S)
    again.recv(4096)  # the SETTINGS of the server
    again.setblocking(False)
    with pytest.raises(BlockingIOError):  # still open
        again.recv(4096)
    again.close()


def is_open(info) -> bool:
    """Whether the server has not yet closed its descriptor of a connection."""
    try:
        return os.fstat(info.descriptor).st_ino == info.inode
    except OSError:
        return False


class Kernel:
    """A socket whose kernel state a test sets."""

    def __init__(self) -> None:
        self.state = {"received_ago_ns": 10**12, "unread": 0, "unsent": 0}
        self.is_shut_down = False

    def __getattr__(self, name):
        return lambda: self.state[name]

    def shutdown(self) -> None:
        self.is_shut_down = True


class TcpInfoOfGvisor(socket.SocketType):
    """Says of a connection only the state, and the times and windows that gVisor knows."""

    def getsockopt(self, level, option, *size):
        value = super().getsockopt(level, option, *size)
        if (level, option) != (socket.IPPROTO_TCP, socket.TCP_INFO):
            return value
        return value[:1] + bytes(7) + b"\x40\x0d\x03\0" + bytes(212)


class RefusedTcpInfo(socket.SocketType):
    """Says nothing of a connection, as with a seccomp profile."""

    def getsockopt(self, level, option, *size):
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO):
            raise PermissionError("TCP_INFO")
        return super().getsockopt(level, option, *size)


def test_the_kernel_is_asked_right_before_the_shutdown(server, channel):
    detector, kernel = server.detect(), Kernel()
    echo(channel)
    decide(server, detector)
    detector._scanner.open = contextmanager(lambda info: iter([kernel]))
    detector._pause = lambda: True
    quiet = kernel.state
    for busy in ({"received_ago_ns": 50_000_000}, {"unread": 1}, {"unsent": 1}):
        kernel.state = quiet | busy
        assert close_pending(detector) == []
        assert not kernel.is_shut_down, busy
        server.timer._timer_state.manual_ns += 100_000_000
    kernel.state = quiet
    assert wait_until(lambda: close_pending(detector) or kernel.is_shut_down)
    assert kernel.is_shut_down


def test_no_duplicate_of_a_socket_exists_during_a_pause(server, channel):
    detector, held = server.detect(), []
    echo(channel)
    decide(server, detector)

    def pause() -> bool:
        held.append(dict(descriptors())[str(detector._scanner._slot._number)])
        return True

    detector._pause = pause
    close_pending(detector)
    assert held == ["/dev/null"]


def test_on_other_systems_idle_connections_are_only_reported(server, channel, events, monkeypatch):
    monkeypatch.setattr("rpcwheel.idle.detector.SUPPORTED", False)
    with pytest.warns(RuntimeWarning, match="does not show a process its sockets"):
        detector = server.detect()
    echo(channel)
    server.wait_until_quiet()
    server.timer.advance(41)
    assert wait_until(lambda: events.of(ConnectionIdle))
    assert [one.local_address for one in detector.connections()] == [None]
    detector.close()
    assert echo(channel) == b"x"
    assert not events.of(ConnectionClosed)


@pytest.mark.parametrize("kernel", [TcpInfoOfGvisor, RefusedTcpInfo])
def test_if_the_kernel_does_not_say_when_data_arrived_idle_connections_are_kept_and_reported(
    server, channel, events, monkeypatch, kernel
):
    monkeypatch.setattr("socket.SocketType", kernel)
    detector = server.detect()
    echo(channel)
    assert wait_until(server.is_calm)
    server.advance_until(lambda: events.of(IdleDetectionLimited))
    for _ in range(60):
        server.advance(1)
    assert detector.connections()[0].bytes_in is None
    assert not events.of(ConnectionClosed)
    assert not events.of(IdleCloseSkipped)
    assert echo(channel) == b"x"
    detector.change(max_age=60, max_age_grace=5)
    server.advance_until(lambda: events.of(ConnectionClosed))
    assert ["TCP_INFO" in event.reason for event in events.of(IdleDetectionLimited)] == [True]


def test_an_event_waits_for_no_change_of_settings(server, events):
    """A round that holds the lock of the table emits while `change()` waits for that lock."""
    detector = server.detect()

    def is_locked() -> bool:
        free = detector._lock.acquire(blocking=False)
        if free:
            detector._lock.release()
        return not free

    with server.tracked.lock:
        change = in_thread(detector.change, idle_timeout=7.0)
        assert wait_until(is_locked)
        run_threads(lambda: detector._report_limit("test", "the limit"))
    change.result(WAIT_S)
    assert wait_until(lambda: events.of(IdleDetectionLimited))


def test_a_handler_is_wrapped_once_and_those_of_one_call_are_not_kept(server):
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)

    def intercepted(one):
        details = type("Details", (), {"method": "/a.B/C"})
        return server.table.intercept_service(lambda _: one, details)

    assert intercepted(handler) is intercepted(handler)
    others = [grpc.unary_unary_rpc_method_handler(lambda *_: b"") for _ in range(10)]
    wrapped = [intercepted(one) for one in others]
    assert len({id(one) for one in wrapped}) == 10
    assert server.table._observed == {"/a.B/C": None}


def test_while_a_call_is_not_in_the_table_no_later_call_is_accounted_for(timer):
    """The call may have arrived at any time since then."""
    server = IdleServer(timer, workers=1, before=[around(lambda inner: inner)])
    detector = server.detect()
    server.gate = threading.Event()
    calls = [server.channel().unary_unary("/test.Idle/Echo").future(b"x") for _ in range(2)]
    assert wait_until(lambda: server.received_calls() == 2)
    assert wait_until(lambda: server.tracked.open_calls == 1)
    accounted_ns = server.tracked.accounted_ns
    for _ in range(3):
        detector.check()
        detector._pause()
    assert server.tracked.accounted_ns == accounted_ns
    assert detector._unknown_calls_since_ns(True) == accounted_ns
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x"] * 2
    assert wait_until(server.is_calm)
    assert wait_until(lambda: detector._pause() and server.tracked.accounted_ns > accounted_ns)
    assert wait_until(lambda: detector._unknown_calls_since_ns(True) is None)
    assert detector._unknown_calls_since_ns(False) is not None
    server.close()
