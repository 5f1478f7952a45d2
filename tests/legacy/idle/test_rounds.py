"""How a detector's looks are made: where they run, what they decide and do, and their locks."""

import threading
import time

import grpc
import pytest

from fixtures.idle_server import IdleServer, connect_from, echo, events_of, reset
from fixtures.leaks import descriptors
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import ConnectionClosed, ConnectionIdle, IdleCloseSkipped, IdleDetectionLimited
from rpcwheel.idle import IdleConnectionDetector, IdlePolicy, closing
from rpcwheel.idle.closing import FRESH_NS, Settled, _finishing
from rpcwheel.idle.core import NOTHING, TRY_NS, Mark, judge
from rpcwheel.idle.entry import Call
from rpcwheel.idle.limits import Limits
from rpcwheel.idle.peers import TcpInfo
from rpcwheel.idle.table import Connections
from rpcwheel.timer import WheelTimer


class Watched(IdleConnectionDetector):
    """Tells where its looks ran and how many at once; each takes its time, and waits for a gate."""

    def __init__(self, *args, **settings) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.threads: list[str] = []
        self.at_once = self.most = 0
        super().__init__(*args, **settings)

    def _look(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        time.sleep(0.002)
        self.gate.wait(WAIT_S)
        super()._look()
        self.at_once -= 1


def test_looks_run_on_workers_and_never_two_at_once(events):
    with WheelTimer(name="the-timer") as timer:
        server = IdleServer(timer)
        detector = Watched(
            server.server, 0.005, connections=server.table, ports=server.port, timer=timer
        )
        run_threads(*[lambda: [detector.check() for _ in range(5)]] * 4)
        assert wait_until(
            lambda: any(name.startswith("rpcwheel-worker") for name in detector.threads)
        )
        detector.close()
        seen = len(detector.threads)
        assert timer.pending == 0
        assert not any("the-timer" in name for name in detector.threads)
        assert detector.most == 1
        server.close()
    assert len(detector.threads) == seen


def test_close_waits_for_the_look_that_is_under_way(server):
    detector = Watched(
        server.server, connections=server.table, ports=server.port, timer=server.timer
    )
    detector.gate.clear()
    server.timer.advance(60)
    assert wait_until(lambda: detector.at_once)
    closing = threading.Thread(target=detector.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    detector.gate.set()
    closing.join(WAIT_S)
    assert (closing.is_alive(), detector.at_once) == (False, 0)
    assert server.timer.pending == 0


def test_what_was_marked_is_not_closed_after_close(server, channel):
    detector = server.detect()
    echo(channel)
    server.wait_until_quiet()
    detector._look()
    server.timer._timer_state.manual_ns += 31_000_000_000
    assert detector._decide([])
    detector.close()
    detector._close_marked(told := [])
    assert told == []
    assert server.connection().calls == 1


def test_a_change_while_a_round_decides_holds_for_what_it_closes(server, channel):
    detector = server.detect(1)
    echo(channel)
    server.wait_until_quiet()
    detector._look()
    server.timer._timer_state.manual_ns += 2_000_000_000
    entries = detector.connections.entries
    changed = []

    def then_change():
        found = entries()
        if not changed:
            changed.append(1)
            detector.change(idle_timeout=600)
        return found

    detector.connections.entries = then_change  # as if the round were here already
    detector._decide([])
    detector._close_marked(told := [])
    assert told == []
    assert echo(channel) == b"x"
    assert server.connection().calls == 2


def test_where_connections_can_not_be_seen_they_are_told_of(server, channel, events, monkeypatch):
    monkeypatch.setattr("rpcwheel.idle.detector.SUPPORTED", False)
    with pytest.warns(RuntimeWarning, match="does not show a process its sockets"):
        detector = server.detect()
    echo(channel)
    server.wait_until_quiet()
    server.timer.advance(41)
    assert wait_until(lambda: events_of(events, ConnectionIdle))
    detector.close()
    assert echo(channel) == b"x"
    assert not events_of(events, ConnectionClosed)
    assert server.connection().calls == 2


def test_what_is_told_under_the_lock_of_the_table_waits_for_no_change_of_settings(timer, events):
    server = IdleServer(timer)
    detector = server.detect()

    def is_free():
        free = detector._lock.acquire(blocking=False)
        if free:
            detector._lock.release()
        return free

    with server.table.lock:  # as a round that decides
        change = threading.Thread(target=detector.change, kwargs={"idle_timeout": 7.0})
        change.start()
        assert wait_until(lambda: not is_free())
        told = threading.Thread(target=detector._events.emit, args=(IdleDetectionLimited("told"),))
        told.start()
        told.join(WAIT_S)
        assert not told.is_alive()
    change.join(WAIT_S)
    assert not change.is_alive()
    assert wait_until(lambda: events_of(events, IdleDetectionLimited))
    server.close()


def test_a_call_between_the_decision_and_the_end_keeps_the_connection(server, channel, events):
    detector = server.detect()
    echo(channel)
    server.wait_until_quiet()
    detector._look()
    server.timer._timer_state.manual_ns += 31_000_000_000  # without a round of the timer's
    told = []
    assert len(detector._decide(told)) == 1
    echo(channel)
    server.wait_until_quiet()
    detector._close_marked(told)
    assert [type(event) for event in told] == [ConnectionIdle, IdleCloseSkipped]
    assert told[1].reason == "it is used again"
    assert echo(channel) == b"x"
    assert server.connection().calls == 3


def test_another_connection_from_the_port_of_a_marked_one_is_not_touched(server):
    detector = server.detect()
    first = server.raw(detector)
    here = first.getsockname()
    server.wait_until_quiet()
    server.timer._timer_state.manual_ns += 31_000_000_000
    assert len(detector._decide([])) == 1
    reset(first)
    again = connect_from(here, server.port)
    server.wait_until_quiet()
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


class KernelSays:
    """A socket of which the kernel says what a test wants."""

    peer, inode = ("10.0.0.1", 1), 7

    def __init__(self) -> None:
        self.received_ago_s, self.waiting, self.unsent_bytes = 1000.0, 0, 0
        self.shut = False

    def info(self) -> TcpInfo:
        return TcpInfo(self.received_ago_s, 1000.0, 100, 100)

    def unread(self) -> int:
        return self.waiting

    def unsent(self) -> int:
        return self.unsent_bytes

    def shutdown(self) -> None:
        self.shut = True


def test_what_the_kernel_says_is_asked_right_before_the_end(timer, monkeypatch):
    table, limits = Connections(timer=timer), Limits.from_policy(IdlePolicy(idle_timeout=30))
    Call(table, "ipv4:10.0.0.1:1", streams=False, heartbeat=False).ended()
    (entry,) = table.entries()
    entry.inode, kernel = 7, KernelSays()
    timer.advance(31)
    due = judge(entry.seen, limits, table.now_ns())
    entry.mark = Mark(due, entry.seen.moves(limits, due.reason), table.now_ns())
    monkeypatch.setattr(closing, "open_sockets", lambda *_, **__: (each for each in [kernel]))
    scan = closing.Closing(table, lambda: limits, Settled(lambda: True), lambda _: NOTHING)
    for name, value in (("received_ago_s", 0.05), ("waiting", 1), ("unsent_bytes", 1)):
        before = getattr(kernel, name)
        setattr(kernel, name, value)
        scan.run()
        assert not kernel.shut, name
        setattr(kernel, name, before)
        timer.advance(0.1)
    assert entry.mark.tries == 3
    scan.run()
    assert kernel.shut
    assert [type(event) for event in scan.events] == [ConnectionClosed]


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
    server.wait_until_quiet()
    detector._look()
    server.timer._timer_state.manual_ns += 31_000_000_000
    held = []

    def settle() -> bool:
        hand = detector._scan.slot._hand
        held.append(dict(descriptors())[str(hand)])
        return True

    def close() -> bool:  # more than once, if the machine stands still after the server's moment
        detector._decide([])
        detector._close_marked([])
        server.timer._timer_state.manual_ns += TRY_NS
        return server.table.snapshot() == ()

    detector._settle = settle
    assert wait_until(close)
    assert set(held) == {"/dev/null"}


class Hiding(grpc.ServerInterceptor):
    """Makes a handler of its own for each call, as most do."""

    def intercept_service(self, continuation, details):
        handler = continuation(details)

        def serve(request, context):
            return handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(serve)


def test_while_a_call_is_not_known_nothing_counts_as_heard(timer):
    """It may wait since then, whatever else its connection does meanwhile."""
    server = IdleServer(timer, workers=1, before=[Hiding()])
    detector = server.detect()
    server.gate = threading.Event()
    calls = [server.channel().unary_unary("/test.Idle/Echo").future(b"x") for _ in range(2)]
    assert wait_until(lambda: server.received_calls() == 2)
    assert wait_until(lambda: server.table.open_calls == 1)
    heard_ns = server.table.heard_ns
    for _ in range(3):
        detector.check()
        detector._settle()
    assert server.table.heard_ns == heard_ns
    assert detector._coming_ago_ns(settled=True) > 0
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x"] * 2
    assert wait_until(server.is_calm)
    assert wait_until(lambda: detector.check() is not None and server.table.heard_ns > heard_ns)
    assert wait_until(lambda: detector._coming_ago_ns(settled=True) == NOTHING)
    assert detector._coming_ago_ns(settled=False) > 0
    server.close()
