"""Idle connections of real servers are closed, and no others, with `grpc` and `grpc.aio`."""

import os
import random
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress

import grpc
import pytest
from hyperframe.frame import HeadersFrame

from fixtures.idle_clients import frozen_client
from fixtures.idle_server import IdleServer, echo, hold
from fixtures.leaks import descriptors, opened_since
from fixtures.ports import has_ipv6
from fixtures.raw_http2 import raw_client
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from fixtures.worlds import AioWorld, SyncWorld
from rpcwheel.events import ConnectionClosed, ConnectionIdle
from rpcwheel.idle.sockets import SUPPORTED
from rpcwheel.timer import ManualTimer, WheelTimer

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sockets are found on Linux only")

KINDS = (ConnectionIdle, ConnectionClosed)
IDLE_TIMEOUT = 0.6


@contextmanager
def serve(world, timer=None, host="127.0.0.1", certificates=None, **settings):
    """A server and its detector; `settings` are those of the policy."""
    server = IdleServer(timer, world, workers=32, host=host, certificates=certificates)
    with closing(server):
        yield server, server.detect(**settings)


def closed(events) -> set[str]:
    return {event.peer for event in events if isinstance(event, ConnectionClosed)}


def headers_of_a_call(method: str, stream: int = 1) -> HeadersFrame:
    """The frame that opens a call in HTTP/2; field numbers as in RFC 7541, appendix A."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    fields = b"\x83\x86"  # ":method: POST", ":scheme: http"
    fields += b"\x04" + text(method)  # ":path"
    fields += b"\x01" + text("localhost")  # ":authority"
    fields += b"\x0f\x10" + text("application/grpc")  # "content-type"
    fields += b"\x00" + text("te") + text("trailers")
    return HeadersFrame(stream, fields, flags=["END_HEADERS"])


@pytest.mark.parametrize(
    ("world", "count", "transport"),
    [(SyncWorld, 100, "IPv4"), (AioWorld, 40, "TLS"), (AioWorld, 40, "IPv6")],
    ids=["sync", "aio with TLS", "aio with IPv6"],
    indirect=["world"],
)
def test_exactly_the_idle_connections_are_closed(world, count, transport, certificates, events):
    """The others have an open stream, which lasts for twice `WAIT_S`, so they are kept."""
    if transport == "IPv6" and not has_ipv6():
        pytest.skip("this machine has no ::1")
    settings = {
        "host": "[::1]" if transport == "IPv6" else "127.0.0.1",
        "certificates": certificates if transport == "TLS" else None,
    }
    with serve(world, **settings, idle_timeout=None) as (server, detector):
        several = [server.channel() for _ in range(count)]
        busy, idle = several[: count // 5], several[count // 5 :]
        streams = [hold(channel) for channel in busy]
        kept, before = server.peers(), descriptors()
        for channel in idle:
            echo(channel)
        doomed = server.peers() - kept
        assert len(doomed) == len(idle)
        detector.change(idle_timeout=IDLE_TIMEOUT)
        assert wait_until(lambda: server.peers() == kept)
        assert wait_until(lambda: len(closed_events(events)) == len(KINDS) * len(doomed))
        for _ in range(2):
            assert server.check(detector) == []
        assert server.peers() == kept
        assert all(stream.is_active() for stream in streams)
        assert wait_until(lambda: descriptors() <= before)  # others may have been closed meanwhile
        found = closed_events(events)
        detector.change(idle_timeout=None)
        assert [echo(channel, b"again") for channel in idle] == [b"again"] * len(idle)
    assert Counter((type(event), event.peer) for event in found) == Counter(
        (kind, peer) for kind in KINDS for peer in doomed
    )
    assert all(event.idle_s > IDLE_TIMEOUT for event in found)
    assert {event.reason for event in found} == {"connection idle for 0.6 s"}


def closed_events(events) -> list:
    return [event for event in events if isinstance(event, KINDS)]


def test_connections_of_a_frozen_process_are_closed(world, events):
    kinds = ("Echo", "Hold", "")
    with (
        serve(world, idle_timeout=None, close_streams=True) as (server, detector),
        frozen_client(server, *kinds),
    ):
        doomed = server.peers()
        assert len(doomed) == len(kinds)
        detector.change(idle_timeout=IDLE_TIMEOUT)
        assert wait_until(lambda: not server.peers())
        assert wait_until(lambda: closed(events) == doomed)
        assert wait_until(lambda: not world.do(detector.connections))


def test_a_frozen_client_with_a_full_receive_buffer_is_disconnected(world):
    """The status of its stream cannot be sent."""
    with (
        serve(world, idle_timeout=None, close_streams=True) as (server, detector),
        frozen_client(server, "Flood"),
    ):
        assert server.peers()
        detector.change(idle_timeout=IDLE_TIMEOUT)
        assert wait_until(lambda: not server.peers())


def test_a_connection_with_requests_that_never_arrive_is_closed(world, events):
    limits = {"idle_timeout": IDLE_TIMEOUT, "request_timeout": IDLE_TIMEOUT}
    with serve(world, **limits) as (server, _), raw_client(server.target) as client:
        for number in range(4):
            headers = headers_of_a_call("/test.Idle/Echo", stream=2 * number + 1)
            client.send(headers)  # and nothing more
        assert wait_until(lambda: not server.peers())
        assert wait_until(lambda: len(closed(events)) == 1)
        assert echo(server.channel()) == b"x"


def test_a_call_is_in_flight_until_its_client_has_read_the_response(world):
    with (
        ManualTimer() as timer,
        serve(world, idle_timeout=30, timer=timer) as (server, detector),
        frozen_client(server, "Big"),
    ):
        kept = server.peers()
        assert wait_until(lambda: server.connection().messages_out == 1)
        timer.advance(31)
        assert server.check(detector) == []
        assert server.connection().calls_in_flight == 1
        assert server.peers() == kept


def test_many_connections_that_come_and_go_leave_nothing(world):
    with serve(world, idle_timeout=0.5) as (server, detector), server.channel() as channel:
        echo(channel)
        assert wait_until(lambda: not server.peers())  # what gRPC opens once, it has opened
        before = descriptors()
        for number in range(150):
            with server.raw() as client:
                if number % 4 == 0:
                    client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            if number % 30 == 0:
                with server.channel() as once:
                    echo(once)
                server.check(detector)
        assert wait_until(lambda: not server.peers())
        assert wait_until(lambda: not server.check(detector))
        assert wait_until(lambda: not world.do(detector.connections))
        assert wait_until(lambda: not leaked(before)), leaked(before)


def leaked(before):
    """Descriptors opened since, except the detector's own, which may have been a socket then."""
    numbers = {number for number, _ in before}
    return [one for one in opened_since(before) if one[1] != os.devnull or one[0] not in numbers]


def test_no_call_of_a_recently_active_client_fails(world, events):
    """Clients call at random times around the timeout, so that calls and shutdowns coincide.

    A call that fails had its connection closed after the previous call began and before the failure
    was seen. If less than the timeout lies between, the connection was not idle.
    """
    idle_timeout = 0.4
    failed, gaps = [], []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        with server.channel() as channel:
            before = last = time.monotonic()
            for _ in range(5):
                began = time.monotonic()
                gaps.append(began - last)
                try:
                    echo(channel, wait_for_ready=True)
                except grpc.RpcError as error:
                    failed.append((time.monotonic() - before, error.code(), error.details()))
                before, last = began, time.monotonic()
                time.sleep(rng.uniform(0.1, 0.7))

    with serve(world, idle_timeout=idle_timeout) as (server, _):
        run_threads(*(lambda seed=seed: use(seed) for seed in range(16)))
    assert [one for one in failed if one[0] < idle_timeout] == []
    assert {code for _, code, _ in failed} <= {grpc.StatusCode.UNAVAILABLE}
    assert wait_until(lambda: closed(events))
    assert len([gap for gap in gaps if gap > idle_timeout]) > 5


def test_checks_changes_and_close_can_run_at_the_same_time(world):
    over = threading.Event()

    def again(work):
        def run() -> None:
            while not over.is_set():
                work()

        return run

    def settings() -> None:
        detector.change(idle_timeout=random.choice([0.05, 0.2, 5, None]))
        detector.change(close_streams=random.random() < 0.5, action="shutdown")

    def use() -> None:
        with server.channel() as channel, suppress(grpc.RpcError):  # the limits are that short
            for _ in range(3):
                echo(channel, wait_for_ready=True)

    def end() -> None:
        time.sleep(0.5)
        for _ in range(3):
            detector.close()
        assert server.check(detector) == []
        over.set()

    with (
        WheelTimer() as timer,
        serve(world, idle_timeout=0.1, timer=timer) as (server, detector),
        server.raw(),
    ):
        look = again(lambda: server.check(detector))
        show = again(lambda: repr((world.do(detector.connections), detector)))
        run_threads(look, look, again(settings), show, again(use), again(use), end, end)
        assert detector.closed
        assert timer.pending == 0
        with server.raw():
            assert wait_until(server.peers)
            assert server.check(detector) == []
            assert server.peers()
