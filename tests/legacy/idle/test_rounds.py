"""The looks of a detector: where they run, that they never overlap, and how they end."""

import threading
import time
import warnings

import grpc
import pytest

from fixtures.idle_server import IdleServer, connect_from, echo, let_it_rest, reset, said, soon
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.idle import ConnectionTable, IdleConnectionDetector, IdlePolicy
from rpcwheel.idle import aio as idle_aio
from rpcwheel.idle import sync as idle_sync
from rpcwheel.observe import ConnectionClosed, ConnectionIdle, IdleLimited, add_sink, remove_sink
from rpcwheel.timer import ManualTimer, WheelTimer, shared_timer


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
        time.sleep(0.01)
        self.gate.wait(WAIT_S)
        super()._look()
        self.at_once -= 1


def test_looks_run_on_workers_and_never_two_at_once(events):
    with WheelTimer(name="the-timer") as timer:
        server = IdleServer(timer)
        detector = Watched(
            server.server, 0.005, connections=server.table, ports=server.port, timer=timer
        )
        run_threads(*[lambda: [detector.check() for _ in range(10)]] * 4)
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
    let_it_rest()
    detector._look()
    server.timer._hub.manual_ns += 31_000_000_000
    assert detector._decide([])
    detector.close()
    detector._close_marked(told := [])
    assert told == []
    assert server.connection().calls == 1


def test_a_sink_may_close_the_detector_that_tells_it(server, channel):
    detector = server.detect()
    done = threading.Event()

    def close(event) -> None:
        if isinstance(event, ConnectionIdle):
            detector.close()
            done.set()

    add_sink(close)
    try:
        echo(channel)
        let_it_rest()
        server.timer.advance(41)
        assert done.wait(WAIT_S)
    finally:
        remove_sink(close)
    assert detector.closed


def test_events_come_on_a_worker_and_in_order(server):
    seen = []

    def sink(event) -> None:
        seen.append((event.peer, type(event), threading.current_thread().name))

    add_sink(sink)
    try:
        detector = server.detect()
        raws = [server.raw(detector) for _ in range(20)]
        let_it_rest()
        assert soon(server, lambda: len(seen) == 40)
    finally:
        remove_sink(sink)
    for raw in raws:
        raw.close()
    assert {name.rpartition("-")[0] for _, _, name in seen} == {"rpcwheel-worker"}
    for peer in {peer for peer, _, _ in seen}:
        assert [kind for of, kind, _ in seen if of == peer] == [ConnectionIdle, ConnectionClosed]


def test_a_timer_that_has_stopped_raises_nothing(server, channel):
    timer = ManualTimer()
    detector = IdleConnectionDetector(
        server.server, 30, connections=server.table, ports=server.port, timer=timer
    )
    echo(channel)
    let_it_rest()
    timer.advance(29)
    timer.stop()
    assert detector.check() == []
    detector.change(idle_timeout=60)
    detector.close()


def test_it_goes_on_in_another_shared_timer_when_the_one_before_was_stopped(server, events):
    channel = server.channel()
    with make(server, idle_timeout=0.3, check=0.1, timer=None):
        echo(channel)
        shared_timer().stop()
        shared_timer()  # whoever asks for it
        assert wait_until(lambda: said(events, ConnectionClosed))


def test_a_timer_that_is_full_is_told(server, events):
    with WheelTimer(max_pending=1) as timer:
        taken = timer.new_timeout(lambda _: None, 1000)
        with make(server, timer=timer) as detector:
            assert wait_until(lambda: said(events, IdleLimited))
            assert "no more looks, until check() or change()" in events[0].reason
            taken.cancel()
            detector.check()
            assert timer.pending == 1


def test_a_change_to_reports_lets_go_of_what_was_marked(server, channel):
    detector = server.detect(close="goaway")
    echo(channel)
    entry = server.table.entries()[0]
    let_it_rest()
    server.timer.advance(41)
    assert wait_until(lambda: entry.mark is not None and entry.mark.left_ns is not None)
    detector.change(close="report")
    assert entry.mark is None


def test_descriptors_of_what_was_closed_are_free(server, events):
    detector = server.detect()
    raws = [server.raw(detector) for _ in range(10)]
    assert len(open_ports(server)) == 10
    let_it_rest()
    assert soon(server, lambda: len(said(events, ConnectionClosed)) == 10)
    assert wait_until(lambda: not open_ports(server))
    for raw in raws:
        raw.close()


def open_ports(server) -> list:
    from rpcwheel.idle.peers import open_sockets  # noqa: PLC0415

    return [one.text for one in open_sockets(lambda _, port: port == server.port)]


def test_a_port_that_is_used_again_is_a_new_connection(server):
    detector = server.detect()
    first = server.raw(detector)
    here = first.getsockname()
    server.timer.advance(25)
    reset(first)
    again = connect_from(here, server.port)
    assert wait_until(lambda: detector.check() == [] and first_seen(server) == [25])
    server.timer.advance(29)
    assert detector.check() == []
    again.close()


def first_seen(server) -> list[int]:
    return [round(one.first) for one in server.table.snapshot()]


# What it is given


def make(server, **settings) -> IdleConnectionDetector:
    settings = {"connections": server.table, "timer": server.timer} | settings
    return IdleConnectionDetector(server.server, **settings)


def test_settings_may_be_given_as_a_policy(server):
    policy = IdlePolicy(read_idle=5)
    with make(server, policy=policy) as detector:
        assert detector.policy is policy
    with make(server, read_idle=5, close="report") as detector:
        assert (detector.policy.read_idle, detector.policy.idle_timeout) == (5.0, 180.0)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"policy": IdlePolicy(), "read_idle": 5}, ConfigurationError, "not both"),
        ({"policy": IdlePolicy(), "idle_timeout": 5}, ConfigurationError, "not both"),
        ({"policy": {"idle_timeout": 5}}, TypeError, "policy must be an IdlePolicy, or None"),
        ({"connections": object()}, TypeError, "connections must be the ConnectionTable"),
        ({"idle": 5}, ConfigurationError, "there is no setting 'idle'"),
        ({"idle_timeout": -5}, ConfigurationError, "idle_timeout"),
        ({"ports": 0}, ConfigurationError, "which is no port"),
        ({"timer": 5}, TypeError, "timer must be a WheelTimer"),
    ],
)
def test_what_can_not_be_is_refused_and_nothing_is_begun(server, settings, error, said):
    with pytest.raises(error, match=said):
        make(server, **settings)
    assert server.timer.pending == 0
    make(server).close()  # the table is free


def test_a_table_has_one_detector_at_a_time(server):
    with make(server), pytest.raises(ConfigurationError, match="belongs to another detector"):
        make(server)
    make(server).close()


def test_a_change_that_can_not_be_changes_nothing(server):
    with make(server) as detector:
        before = detector.policy
        with pytest.raises(ConfigurationError):
            detector.change(idle_timeout=-1)
        assert detector.policy is before


@pytest.mark.parametrize("settings", [{"idle_timeout": 600}, {"close": "report"}])
def test_a_change_while_a_round_decides_holds_for_what_it_closes(server, channel, settings):
    detector = server.detect(1)
    echo(channel)
    let_it_rest()
    detector._look()
    server.timer._hub.manual_ns += 2_000_000_000
    entries = detector.connections.entries
    changed = []

    def then_change():
        found = entries()
        if not changed:
            changed.append(1)
            detector.change(**settings)
        return found

    detector.connections.entries = then_change  # as if the round were here already
    detector._decide([])
    detector._close_marked(told := [])
    assert told == []
    assert echo(channel) == b"x"
    assert server.connection().calls == 2


def test_a_construction_that_fails_leaves_the_table_to_the_next(server):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            make(server, ports="unix:/run/x.sock")
    make(server).close()


@pytest.mark.parametrize("ports", ["unix:/run/x.sock", 1])
def test_that_unix_sockets_can_not_be_closed_is_said_where_the_detector_is_made(server, ports):
    with pytest.warns(RuntimeWarning, match="can't be told apart, nor closed") as told:
        make(server, ports=ports).close()
    assert told[0].filename == __file__


@pytest.mark.parametrize("other", [None, object(), 5])
def test_what_is_no_server_is_refused(server, other):
    with pytest.raises(TypeError, match=r"server must be what grpc\.server\(\) gave"):
        IdleConnectionDetector(other, connections=server.table)
    make(server).close()


def test_a_table_of_the_other_world_is_refused(server):
    with pytest.raises(
        TypeError, match=r"connections must be the ConnectionTable of rpcwheel\.idle"
    ):
        make(server, connections=idle_aio.ConnectionTable())


def test_without_limits_nothing_is_ever_looked_at(server):
    with make(server, idle_timeout=None) as detector:
        assert server.timer.pending == 0
        detector.change(idle_timeout=30)
        assert server.timer.pending == 1


def test_where_connections_can_not_be_seen_they_are_told_of(server, channel, events, monkeypatch):
    monkeypatch.setattr("rpcwheel.idle.detector.SUPPORTED", False)
    with pytest.warns(RuntimeWarning, match="does not show a process its sockets"):
        detector = make(server, idle_timeout=30)
    echo(channel)
    let_it_rest()
    server.timer.advance(41)
    assert wait_until(lambda: said(events, ConnectionIdle))
    detector.close()
    assert echo(channel) == b"x"
    assert not said(events, ConnectionClosed)
    assert server.connection().calls == 2


def test_a_table_alone_costs_no_timer_and_shows_what_calls_do(channel, server):
    echo(channel)
    assert server.timer.pending == 0
    assert server.connection().calls == 1
    assert repr(server.table).endswith("1 connections>")


def test_the_table_is_no_interceptor_for_the_other_world():
    assert issubclass(ConnectionTable, grpc.ServerInterceptor)
    assert idle_sync.__all__ == ["ConnectionTable", "IdleConnectionDetector"]


def test_that_a_client_under_tls_can_not_be_asked_to_leave_is_told(server, channel, events):
    detector = server.detect(close="goaway")
    echo(channel)
    (entry,) = server.table.entries()
    assert entry.seen.plain
    entry.seen.plain = False  # as it is under TLS
    let_it_rest()
    server.timer.advance(31)
    detector.check()
    assert wait_until(lambda: said(events, IdleLimited))
    assert "under TLS can't be asked to leave" in said(events, IdleLimited)[0].reason
    assert soon(server, lambda: said(events, ConnectionClosed))
    assert said(events, ConnectionClosed)[0].how == "shutdown"


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
        told = threading.Thread(target=detector._tell, args=(IdleLimited("told"),))
        told.start()
        told.join(WAIT_S)
        assert not told.is_alive()
    change.join(WAIT_S)
    assert not change.is_alive()
    assert wait_until(lambda: said(events, IdleLimited))
    server.close()
