"""Which of the process's sockets are a server's."""

import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.idle_server import IdleServer, echo, let_it_rest, said, soon
from fixtures.leaks import descriptors
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.idle.entry import Call, Sighting
from rpcwheel.idle.peers import SUPPORTED
from rpcwheel.idle.ports import Ports
from rpcwheel.idle.scan import Scan
from rpcwheel.idle.table import Connections
from rpcwheel.observe import ConnectionClosed, IdleLimited

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sockets are found on Linux only")


@pytest.mark.parametrize("given", ["127.0.0.1:{}", "[::]:{}", None])
def test_another_server_at_the_same_port_of_another_address_is_not_touched(server, events, given):
    gate = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        other = grpc.server(pool)
        handler = grpc.unary_unary_rpc_method_handler(lambda r, _: gate.wait(WAIT_S) and r)
        other.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Idle", {"Echo": handler})]
        )
        assert other.add_insecure_port(f"127.0.0.2:{server.port}") == server.port
        other.start()
        detector = server.detect(ports=given and given.format(server.port))
        mine = server.channel()
        with grpc.insecure_channel(f"127.0.0.2:{server.port}", options=IMPATIENT) as its:
            echo(mine)
            call = its.unary_unary("/test.Idle/Echo").future(b"x")
            assert wait_until(lambda: len(other._state.rpc_states) == 1)
            detector.check()
            let_it_rest()
            assert soon(server, lambda: said(events, ConnectionClosed))
            server.timer.advance(100)
            detector.check()
            gate.set()
            assert call.result(WAIT_S) == b"x"
            assert len(said(events, ConnectionClosed)) == 1
        other.stop(None).wait()


def test_calls_at_a_port_that_was_not_given_are_told(server, channel, events):
    other = IdleServer(server.timer)
    detector = server.detect(ports=other.port)
    echo(channel)
    detector.check()
    assert wait_until(lambda: said(events, IdleLimited))
    told = said(events, IdleLimited)[0].reason
    assert f"at port {server.port}, but no socket of that peer is open at port {other.port}" in told
    other.close()


def test_ten_thousand_connections_are_learned_from_in_no_time(timer):
    table, scan = Connections(timer=timer), Scan(Ports.of(None))
    found = [
        Sighting((f"10.0.{i >> 8}.{i & 255}", 40000), ("10.1.0.1", 50051), i, "", None)
        for i in range(10_000)
    ]
    began = time.process_time()
    scan._learn(found, {one.peer for one in found})
    assert time.process_time() - began < 1.0  # 5 s where each is counted among all
    assert scan._learned == {("10.1.0.1", 50051)}
    scan.slot.close()
    Call(table, "ipv4:10.0.0.1:1", streams=False, heartbeat=False)
    assert table.open_calls == 1


def test_a_process_without_a_free_descriptor_closes_its_idle_connections(server, events):
    detector = server.detect()
    channels = [server.channel() for _ in range(3)]
    for channel in channels:
        echo(channel)
    detector.check()
    let_it_rest()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(number) for number, _ in descriptors()) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    held = []
    try:
        with suppress(OSError):  # there is no more
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        server.timer._hub.manual_ns += 31_000_000_000
        detector.check()
        left = server.table.snapshot()
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert left == ()
    assert wait_until(lambda: len(said(events, ConnectionClosed)) == 3)
