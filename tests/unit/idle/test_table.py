"""Which connections a server has: entries that calls make, and sockets that a look has found."""

import gc
import sys

import grpc
import pytest

from fixtures.timers import run_threads
from rpcwheel.idle.entry import Call, Sighting
from rpcwheel.idle.peers import TcpInfo
from rpcwheel.idle.table import MOST_METHODS, Connections

A, B = "ipv4:10.0.0.1:5001", "ipv4:10.0.0.1:5002"


@pytest.fixture
def table(timer):
    return Connections(timer=timer)


def call(table, peer=A, *, streams=False, heartbeat=False) -> Call:
    return Call(table, peer, streams=streams, heartbeat=heartbeat)


def sighting(peer=5001, inode=1, *, silent=0.0, port=50051) -> Sighting:
    info = TcpInfo(silent, silent, 10, 20)
    return Sighting(("10.0.0.1", peer), ("10.0.0.9", port), inode, f"ipv4:10.0.0.1:{peer}", info)


def look(table, *sightings) -> list:
    return table.reconcile(list(sightings), table.now_ns())


def peers(table) -> list[str]:
    return [one.peer for one in table.snapshot()]


def test_a_call_makes_an_entry_and_leaves_it_when_it_ends(table):
    one = call(table)
    assert table.snapshot()[0].calls_open == 1
    one.ended()
    one.ended()
    assert table.snapshot()[0].calls_open == 0
    assert peers(table) == [A]


def test_a_look_adds_what_never_made_a_call_with_the_time_it_has_been_silent(table, timer):
    timer.advance(100)
    look(table, sighting(silent=30.0))
    (one,) = table.snapshot()
    assert (one.peer, one.calls, one.first, one.local_port) == (A, 0, 70.0, 50051)
    assert (one.bytes_in, one.bytes_out) == (10, 20)


def test_a_call_on_a_connection_that_a_look_found_is_the_same_entry(table):
    look(table, sighting())
    call(table)
    assert len(table.snapshot()) == 1
    assert table.snapshot()[0].calls == 1


def test_grpcs_words_for_a_peer_may_be_others_than_ours(table):
    address = ("fe80::1", 5001)
    info = TcpInfo(0.0, 0.0, None, None)
    table.reconcile(
        [Sighting(address, ("fe80::9", 50051), 1, "ipv6:%5Bfe80::1%254%5D:5001", info)], 0
    )
    call(table, "ipv6:%5Bfe80::1%25eth0%5D:5001")
    assert peers(table) == ["ipv6:%5Bfe80::1%25eth0%5D:5001"]


def test_an_entry_whose_socket_is_gone_is_dropped(table, timer):
    call(table).ended()
    call(table, B).ended()
    timer.advance(1)
    look(table, sighting(5002, 2))
    assert peers(table) == [B]
    timer.advance(1)
    look(table)
    assert peers(table) == []
    assert table.find(("10.0.0.1", 5001)) is None


def test_an_entry_with_a_call_that_began_during_the_look_is_not_dropped(table, timer):
    timer.advance(1)
    began_ns = table.now_ns()
    timer.advance(1)
    call(table).ended()
    table.reconcile([], began_ns)
    assert peers(table) == [A]


def test_an_entry_with_an_open_call_is_not_dropped_but_told(table, timer):
    one = call(table)
    timer.advance(1)
    assert look(table) == [one.entry]
    assert peers(table) == [A]


def test_memory_is_bounded_by_the_connections_that_are_open(table, timer):
    for port in range(1000):
        call(table, f"ipv4:10.0.0.1:{port + 1}").ended()
    assert len(table.snapshot()) == 1000
    timer.advance(1)
    look(table, sighting())
    assert len(table._entries) == len(table._by_address) == 1


def test_without_looks_the_oldest_without_calls_are_forgotten(table, monkeypatch):
    monkeypatch.setattr("rpcwheel.idle.table.MOST_ENTRIES", 10)
    call(table, "ipv4:10.0.0.1:1")
    for port in range(2, 100):
        call(table, f"ipv4:10.0.0.1:{port}").ended()
    assert len(table.snapshot()) <= 10
    assert "ipv4:10.0.0.1:1" in peers(table)


def test_another_connection_from_the_same_port_is_a_new_one(table, timer):
    call(table).ended()
    look(table, sighting(inode=1))
    timer.advance(60)
    look(table, sighting(inode=2))
    (one,) = table.snapshot()
    assert (one.first, one.calls) == (60.0, 0)


def test_a_call_that_may_be_the_new_connections_goes_with_it(table, timer):
    old = call(table, streams=True)
    timer.advance(10)
    look(table, sighting(inode=1))
    timer.advance(10)
    new = call(table, streams=True)
    look(table, sighting(inode=2))
    (one,) = table.snapshot()
    assert one.streams_open == 1
    new.wrote()
    assert table.snapshot()[0].messages_out == 1
    old.ended()
    assert table.snapshot()[0].streams_open == 1
    new.ended()
    assert table.snapshot()[0].streams_open == 0


def test_two_sockets_of_one_address_are_never_one_connection(table):
    look(table, sighting(inode=1), sighting(inode=2, port=50052))
    entry = table.find(("10.0.0.1", 5001))
    assert entry.ambiguous
    look(table, sighting(inode=2, port=50052))
    assert not entry.ambiguous


def test_what_a_call_does_while_it_is_ended_by_us_does_not_count(table):
    one = call(table, streams=True)
    one.finished = True
    one.read()
    one.wrote()
    (seen,) = table.snapshot()
    assert (seen.messages_in, seen.messages_out) == (0, 0)


def test_methods_that_clients_make_up_take_no_memory_for_ever(table):
    for number in range(MOST_METHODS + 10):
        table._method(f"/made/up{number}")
    assert len(table._methods) <= MOST_METHODS


def handlers(table, made) -> list:
    return [table.around(one, "/a.B/C", lambda kind, behavior, method: behavior) for one in made]


def made() -> grpc.RpcMethodHandler:
    held = Held()
    return grpc.unary_unary_rpc_method_handler(lambda request, context: held)


class Held:
    """What a handler that is made for one call holds."""


def test_a_handler_is_made_once_and_those_of_one_call_are_not_kept(table):
    one = made()
    assert len({id(handler) for handler in handlers(table, [one] * 3)}) == 1
    for _ in range(10):
        handlers(table, [made()])
    gc.collect()
    assert sum(isinstance(each, Held) for each in gc.get_objects()) == 1  # that of `one`


def test_patterns_of_heartbeats_hold_for_methods_known_before(table):
    health, other = table._method("/grpc.health.v1.Health/Check"), table._method("/a.B/C")
    assert (health.heartbeat, other.heartbeat) == (True, False)
    table.set_heartbeats(("/a.B/*",))
    assert (health.heartbeat, other.heartbeat) == (False, True)


@pytest.mark.usefixtures("fast_switches")
def test_calls_of_many_threads_are_all_counted(table):
    def work():
        for _ in range(300):
            one = call(table, streams=True)
            one.read()
            one.wrote()
            one.ended()

    run_threads(*[work] * 6)
    (seen,) = table.snapshot()
    assert (seen.calls, seen.messages_in, seen.messages_out) == (1800, 1800, 1800)
    assert seen.streams_open == 0


@pytest.fixture
def fast_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
