"""The connections that a table knows, from calls and from scans."""

from datetime import UTC, datetime, timedelta

import pytest

from fixtures.idle_server import snapshot_of
from fixtures.timers import run_threads
from rpcwheel.idle import ConnectionState, TlsIdentity
from rpcwheel.idle.core import IdleLimit, IdleReason, Limits, PendingClose
from rpcwheel.idle.policy import IdlePolicy
from rpcwheel.idle.sockets import SocketInfo
from rpcwheel.idle.table import ConnectionEntry, ServedCall, Table
from rpcwheel.timer.manual import clock_of

S = 1_000_000_000
A, B = "ipv4:10.0.0.1:5001", "ipv4:10.0.0.1:5002"


@pytest.fixture
def table(timer) -> Table:
    timer.advance(1)
    table = Table()
    table.now_ns = clock_of(timer)
    return table


def call(table, peer=A, *, streams=False, heartbeat=False) -> ServedCall:
    return ServedCall(table, peer, streams=streams, heartbeat=heartbeat)


def socket(peer=5001, inode=1, *, silent=0, port=50051, **fields) -> SocketInfo:
    info = SocketInfo(
        descriptor=9,
        inode=inode,
        peer=("10.0.0.1", peer),
        local=("10.0.0.9", port),
        name=f"ipv4:10.0.0.1:{peer}",
        received_ago_ns=silent * S,
        sent_ago_ns=silent * S,
        bytes_in=10,
        bytes_out=20,
    )
    return info._replace(**fields)


def scan(table, *sockets: SocketInfo) -> None:
    table.reconcile(sockets, table.now_ns())


def peers(table) -> list[str]:
    return [one.peer for one in snapshot_of(table)]


# --- Calls ---------------------------------------------------------------------------------------


def test_a_call_counts_until_it_ends(table):
    one, stream = call(table), call(table, streams=True)
    (seen,) = snapshot_of(table)
    assert (seen.calls_in_flight, seen.streams_in_flight) == (2, 1)
    assert seen.state is ConnectionState.ACTIVE
    for served in (one, one, stream):
        served.note_end()
    (seen,) = snapshot_of(table)
    assert (seen.calls_in_flight, seen.calls_total, table.open_calls) == (0, 2, 0)
    assert seen.state is ConnectionState.IDLE
    (entry,) = table.entries()
    entry.pending = PendingClose(IdleReason(IdleLimit.IDLE, S, S), table.now_ns())
    assert snapshot_of(table)[0].state is ConnectionState.CLOSING


def test_what_a_call_does_after_the_detector_ended_it_is_no_use(table, timer):
    one = call(table, streams=True)
    one.ended_by_detector = True
    timer.advance(5)
    one.note_read()
    one.note_write()
    one.note_end()
    (seen,) = snapshot_of(table)
    assert (seen.messages_in, seen.messages_out, seen.idle_s) == (0, 0, 5.0)


def test_wall_clock_times_are_the_same_until_the_connection_is_used(table, timer):
    call(table, heartbeat=True).note_end()
    call(table).note_end()
    scan(table, socket(5001), socket(5002, 2, silent=5))
    first, second = snapshot_of(table), snapshot_of(table)
    assert [(one.connected_at, one.last_used_at) for one in first] == [
        (one.connected_at, one.last_used_at) for one in second
    ]
    timer.advance(20)
    call(table).note_end()
    timer.advance(30)
    earliest = datetime.now(UTC)
    used = next(one for one in snapshot_of(table) if one.peer == A)
    assert earliest <= used.last_used_at + timedelta(seconds=30) <= datetime.now(UTC)
    before = next(one for one in first if one.peer == A)
    assert used.connected_at == before.connected_at
    assert used.last_used_at != before.last_used_at


def test_heartbeats_are_no_use_unless_the_policy_counts_them(table, timer):
    timer.advance(10)
    call(table, heartbeat=True).note_end()
    timer.advance(5)
    (seen,) = snapshot_of(table)
    assert (seen.heartbeats_total, seen.calls_total, seen.last_used_at) == (1, 0, None)
    (seen,) = table.connections(Limits(IdlePolicy(count_heartbeats=True)), table.entries())
    assert (seen.last_used_at is None, seen.idle_s) == (False, 5.0)
    assert snapshot_of(table)[0].last_used_at is None


def test_the_first_call_tells_who_is_connected(table):
    class Context:
        def auth_context(self):
            return {
                "x509_subject": [b"CN=shop,O=Example"],
                "x509_subject_alternative_name": [b"shop.example", b"10.0.0.9"],
            }

    one = call(table)
    assert snapshot_of(table)[0].user_agent is None
    one.describe(Context(), [("a", b"b"), ("user-agent", "shop/1")])
    one.describe(object(), [("user-agent", "another")])
    (seen,) = snapshot_of(table)
    assert seen.user_agent == "shop/1"
    assert seen.tls_identity == TlsIdentity("CN=shop,O=Example", ("shop.example", "10.0.0.9"))


@pytest.mark.parametrize("context", [object(), {"transport_security_type": [b"ssl"]}])
def test_without_a_certificate_there_is_no_tls_identity(table, context):
    one = call(table)
    holder = type("Context", (), {"auth_context": lambda self: context})
    one.describe(holder(), [])
    (seen,) = snapshot_of(table)
    assert (seen.user_agent, seen.tls_identity) == (None, None)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_calls_of_many_threads_are_all_counted(table):
    def work():
        for _ in range(300):
            one = call(table, streams=True)
            one.note_read()
            one.note_write()
            one.note_end()

    run_threads(*[work] * 6)
    (seen,) = snapshot_of(table)
    assert (seen.calls_total, seen.messages_in, seen.messages_out) == (1800, 1800, 1800)
    assert seen.streams_in_flight == 0


# --- Scans ---------------------------------------------------------------------------------------


def test_a_scan_adds_connections_without_calls_with_the_time_since_their_last_bytes(table, timer):
    timer.advance(100)
    scan(table, socket(silent=30))
    (one,) = snapshot_of(table)
    assert (one.peer, one.calls_total, one.idle_s, one.last_used_at) == (A, 0, 30.0, None)
    assert (one.local_address, one.bytes_in, one.bytes_out) == ("ipv4:10.0.0.9:50051", 10, 20)


def test_grpc_may_name_the_scope_of_an_address_otherwise(table):
    scan(table, socket(peer=5001, name="ipv6:%5Bfe80::1%254%5D:5001")._replace(peer=("fe80::1", 1)))
    call(table, "ipv6:%5Bfe80::1%25eth0%5D:1")
    assert peers(table) == ["ipv6:%5Bfe80::1%25eth0%5D:1"]


def test_a_connection_whose_socket_is_gone_is_dropped_unless_a_call_is_in_flight(table, timer):
    for port in range(1000):
        call(table, f"ipv4:10.0.0.1:{port + 6000}").note_end()
    call(table, A)
    call(table, B).note_end()
    timer.advance(1)
    scan(table, socket(5002, 2))
    assert peers(table) == [A, B]
    assert len(table._entries) == len(table._by_address) == 2


def test_a_connection_that_was_used_during_the_scan_is_not_dropped(table, timer):
    began_ns = table.now_ns()
    timer.advance(1)
    call(table).note_end()
    table.reconcile([], began_ns)
    assert peers(table) == [A]


def test_without_scans_the_oldest_without_calls_are_forgotten(table, monkeypatch):
    monkeypatch.setattr("rpcwheel.idle.table.MAX_ENTRIES", 10)
    call(table, "ipv4:10.0.0.1:1")
    for port in range(2, 100):
        call(table, f"ipv4:10.0.0.1:{port}").note_end()
    assert len(table) <= 10
    assert "ipv4:10.0.0.1:1" in peers(table)


def test_another_connection_from_the_same_port_is_a_new_one_with_the_calls_in_flight(table, timer):
    call(table).note_end()
    stream = call(table, streams=True)
    scan(table, socket(inode=1))
    timer.advance(60)
    scan(table, socket(inode=2))
    (one,) = snapshot_of(table)
    assert (one.calls_total, one.streams_in_flight, one.idle_s) == (1, 1, 0.0)
    stream.note_end()
    assert (snapshot_of(table)[0].streams_in_flight, table.open_calls) == (0, 0)


def test_of_two_sockets_with_the_same_peer_neither_is_taken_for_the_connection(table):
    call(table).note_end()
    scan(table, socket(inode=1), socket(inode=2, port=50052))
    assert snapshot_of(table)[0].local_address is None
    scan(table, socket(inode=2, port=50052))
    assert snapshot_of(table)[0].local_address == "ipv4:10.0.0.9:50052"


# --- Entries -------------------------------------------------------------------------------------


def test_a_reason_note_report_once_until_the_connection_is_used():
    entry, limits = (
        ConnectionEntry(A, ("10.0.0.1", 5001), 0, datetime.now(UTC)),
        Limits(IdlePolicy()),
    )
    idle, age = (IdleReason(limit, 1, 2) for limit in (IdleLimit.IDLE, IdleLimit.AGE))
    assert entry.note_report(idle, limits)
    assert not entry.note_report(idle, limits)
    entry.activity.user.begin(5, streams=False)
    assert entry.note_report(idle, limits)
    assert entry.note_report(age, limits)
    entry.activity.user.end(6, streams=False)
    assert not entry.note_report(age, limits)


def test_connections_have_different_shares_of_the_spread_of_max_age():
    now = datetime.now(UTC)
    shares = {ConnectionEntry(A, ("10.0.0.1", 5001), 0, now).activity.age_jitter for _ in range(20)}
    assert len(shares) > 10
    assert all(0 <= share <= 1 for share in shares)
    assert ConnectionEntry("unix:", None, 0, now).activity.age_jitter is None
