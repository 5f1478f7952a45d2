"""Idle connections of a grpc.aio server: handlers, tasks, and an event loop that is blocked.

`test_calls.py` and `test_detector.py` have the rules of both worlds.
"""

import asyncio
import gc
import threading

import grpc
import pytest

from fixtures.idle_server import echo, hold, is_quiet, is_working
from fixtures.leaks import no_garbage_collector
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.events import ConnectionClosed
from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector

ECHO = "/test.Idle/Echo"
TRIES = (31, 0.1, 0.1)
"""The idle timeout passes, and the detector makes several attempts to close the connection."""


@pytest.fixture
def server(aio_world, make_server):
    return make_server(aio_world)


# --- Handlers ------------------------------------------------------------------------------------


def test_calls_leave_no_cycle_for_the_collector(server):
    channel = server.channel()
    echo(channel)
    assert wait_until(server.is_calm)
    gc.collect()
    with no_garbage_collector():
        for _ in range(20):
            echo(channel)
        assert wait_until(server.is_calm)
        for kind in ("_Call", "Task"):
            left = [one for one in gc.get_objects() if type(one).__name__ == kind]
            assert len(left) < 10, kind


def test_a_handler_in_a_task_of_an_interceptor_is_in_flight_until_its_call_ends(
    aio_world, make_server
):
    class Apart(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            handler = await continuation(details)

            async def serve(request, context):
                answers = handler.unary_stream(request, context)
                while True:
                    yield await asyncio.create_task(answers.__anext__())

            return grpc.unary_stream_rpc_method_handler(serve)

    server = make_server(aio_world, before=[Apart()])
    stream = hold(server.channel())
    assert wait_until(lambda: server.waits)  # it goes on in a task of its own
    assert server.connection().streams_in_flight == 1
    stream.cancel()
    assert wait_until(server.is_calm)


# --- The detector --------------------------------------------------------------------------------


def block_the_loop(server):
    """Block the event loop until the event that is returned is set."""
    gate = Gate()
    server.world.loop.call_soon_threadsafe(gate)
    assert gate.entered.wait(WAIT_S)
    return gate.opened


def advance_without_the_loop(server, *seconds):
    """Let nothing be received any more, and time pass."""
    assert wait_until(lambda: is_quiet(server.port))
    for step in seconds:
        server.timer.advance(step)
        assert wait_until(lambda: not any(map(is_working, server._detectors)))


def test_a_call_that_waits_for_a_blocked_loop_keeps_its_connection(server, events):
    """gRPC has read its bytes, but no interceptor has seen it."""
    detector, method = server.detect(), server.channel().unary_unary(ECHO)
    assert method(b"1", timeout=WAIT_S) == b"1"
    server.wait_until_quiet()
    server.check(detector)
    before, go_on = server.bytes_in(), block_the_loop(server)
    second = method.future(b"2")
    assert wait_until(lambda: server.bytes_in() > before)
    advance_without_the_loop(server, *TRIES)
    go_on.set()
    assert second.result(WAIT_S) == b"2"
    assert not events.of(ConnectionClosed)


@pytest.mark.parametrize("is_seen_late", [False, True])
def test_a_call_whose_request_has_not_arrived_keeps_its_connection(server, events, is_seen_late):
    """The time at which a blocked loop has seen a call is not the time of its arrival."""
    detector, channel = server.detect(), server.channel()
    echo(channel)
    server.wait_until_quiet()
    server.check(detector)
    before, come = server.bytes_in(), threading.Event()
    go_on = block_the_loop(server) if is_seen_late else threading.Event()
    requests = (come.wait(WAIT_S) and b"2" for _ in range(1))
    late = channel.stream_unary(ECHO).future(requests)
    assert wait_until(lambda: server.bytes_in() > before)
    advance_without_the_loop(server)
    go_on.set()
    for seconds in TRIES:
        server.advance(seconds)
    come.set()
    assert late.result(WAIT_S) == b"2"
    assert not events.of(ConnectionClosed)


async def test_detection_ends_with_the_block_and_leaves_no_timeout(timer):
    table = ConnectionTable()
    server = grpc.aio.server(interceptors=[table])
    async with IdleConnectionDetector(server, 30, connections=table, timer=timer) as detector:
        assert timer.pending == 1
    assert (detector.closed, timer.pending) == (True, 0)
    IdleConnectionDetector(server, 30, connections=table, timer=timer).close()  # the table is free
    assert timer.pending == 0
