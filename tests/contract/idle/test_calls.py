"""Calls of a server: what is counted, and which keep their connection open."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from scenarios.served import handler

from fixtures.idle_server import around, echo, hold, snapshot_of
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import AioWorld, SyncWorld
from rpcwheel.events import ConnectionClosed, IdleDetectionLimited
from rpcwheel.idle import ConnectionTable
from rpcwheel.idle.core import NOT_YET

ECHO, SLOW = "/test.Idle/Echo", "/test.Idle/Slow"

# --- What is seen --------------------------------------------------------------------------------


def each(requests):
    return [requests] if isinstance(requests, bytes) else requests


def joining(requests, context):
    return b"".join(each(requests))


def repeating(requests, context):
    for request in each(requests):
        yield from (request, request)


async def aio_each(requests, context=None):
    """The one request, or those of a stream; with a context, by `read`."""
    if isinstance(requests, bytes):
        yield requests
    elif context is None:
        async for request in requests:
            yield request
    else:
        while (request := await context.read()) is not grpc.aio.EOF:
            yield request


async def aio_joining(requests, context):
    return b"".join([request async for request in aio_each(requests)])


async def aio_repeating(requests, context):
    async for request in aio_each(requests):
        yield request
        yield request


async def reading(requests, context):
    return b"".join([request async for request in aio_each(requests, context)])


async def writing(requests, context):
    async for request in aio_each(requests, context):
        await context.write(request)
        await context.write(request)


PLAIN = {joining: ("unary_unary", "stream_unary"), repeating: ("unary_stream", "stream_stream")}
HANDLERS = {
    "sync": PLAIN,
    "aio": PLAIN
    | {
        aio_joining: ("unary_unary", "stream_unary"),
        aio_repeating: ("unary_stream", "stream_stream"),
        reading: ("stream_unary",),
        writing: ("unary_stream", "stream_stream"),
    },
}
RESULTS = {
    "unary_unary": (b"1", 1, 1),
    "unary_stream": ([b"1", b"1"], 1, 2),
    "stream_unary": (b"12", 2, 1),
    "stream_stream": ([b"1", b"1", b"2", b"2"], 2, 4),
}
"""The responses, and the numbers of messages that the server receives and sends."""


def test_messages_of_each_kind_and_style_are_counted(world, timer, make_server):
    rows = [(function, kind) for function, of in HANDLERS[world.name].items() for kind in of]
    for function, kind in rows:
        server = make_server(world, methods={"Call": handler(kind, function)})
        timer.advance(5)
        messages = (b"1", b"2")[: 1 if kind.startswith("unary") else 2]
        call = SyncWorld().call(server.channel(), kind, *messages, method="/test.Idle/Call")
        responses = call.result()
        assert wait_until(server.is_calm)
        one = server.connection()
        assert (responses, one.messages_in, one.messages_out) == RESULTS[kind], (function, kind)
        assert (one.calls_total, one.heartbeats_total, one.idle_s) == (1, 0, 0.0)
        assert one.peer.startswith("ipv4:127.0.0.1:")


def test_a_call_is_in_flight_until_it_ends(world, make_server):
    server = make_server(world)
    server.gate = threading.Event()
    channel = server.channel()
    call = channel.unary_unary(ECHO).future(b"x")
    stream = hold(channel)
    assert wait_until(lambda: server.connection().calls_in_flight == 2)
    assert server.connection().streams_in_flight == 1
    stream.cancel()
    assert wait_until(lambda: server.connection().streams_in_flight == 0)
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    assert wait_until(server.is_calm)


def test_heartbeats_are_recognized_by_method_and_by_metadata(server, channel):
    detector = server.detect(heartbeats="/test.Idle/Ec*")
    echo(channel)
    assert (server.connection().calls_total, server.connection().heartbeats_total) == (0, 1)
    detector.change(heartbeats=())
    echo(channel)
    echo(channel, metadata=[("rpcwheel-heartbeat", "1")])
    assert (server.connection().calls_total, server.connection().heartbeats_total) == (1, 2)


def test_a_health_watch_occupies_no_thread(timer):
    table = ConnectionTable()
    pool = ThreadPoolExecutor(1)
    server = grpc.server(pool, interceptors=[table])
    servicer = health.HealthServicer(experimental_non_blocking=True)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S) for _ in range(3)]
        assert [next(watch).status for watch in watches] == [1, 1, 1]
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == 1
        (one,) = snapshot_of(table._table)
        assert (one.heartbeats_total, one.calls_in_flight) == (4, 0)
        for watch in watches:
            watch.cancel()
    server.stop(None).wait()
    pool.shutdown()


def test_the_end_of_a_pushed_stream_is_not_counted_as_a_message(make_server):
    def pushing(request, context, push):
        for answer in (b"a", b"b", None):
            push(answer)

    pushing.experimental_non_blocking = True
    methods = {"Push": grpc.unary_stream_rpc_method_handler(pushing)}
    server = make_server(methods=methods)
    call = server.channel().unary_stream("/test.Idle/Push")(b"x", timeout=WAIT_S)
    assert list(call) == [b"a", b"b"]
    assert wait_until(server.is_calm)
    assert (server.connection().messages_in, server.connection().messages_out) == (1, 2)


def test_a_hidden_peer_is_reported_and_no_connection_is_closed(world, make_server, events):
    server = make_server(world, before=[around(Hidden, world)])
    assert echo(server.channel()) == b"x"
    detector = server.detect()
    server.check(detector)
    server.wait_until_quiet()
    server.advance(31)
    server.check(detector)
    assert wait_until(lambda: events.of(IdleDetectionLimited))
    assert not events.of(ConnectionClosed)
    assert "context.peer() failed" in events.of(IdleDetectionLimited)[0].reason
    assert len(events.of(IdleDetectionLimited)) == 1


class InItsOwnTask(grpc.aio.ServerInterceptor):
    async def intercept_service(self, continuation, details):
        return await asyncio.create_task(continuation(details))


@pytest.mark.parametrize(("method", "calls", "hidden"), [(ECHO, [1], False), (SLOW, [], True)])
def test_an_interceptor_that_runs_others_in_a_task_hides_only_blocking_handlers(
    aio_world, make_server, method, calls, hidden
):
    server = make_server(aio_world, before=[InItsOwnTask()])
    server.gate = threading.Event()
    call = server.channel().unary_unary(method).future(b"x")
    assert wait_until(lambda: server.begun)
    assert [one.calls_in_flight for one in server.snapshot()] == calls
    assert (server.tracked.hidden_call_ns != NOT_YET) is hidden
    server.gate.set()
    assert call.result(WAIT_S) == b"x"


@pytest.mark.parametrize(
    ("change", "calls", "hidden"),
    [
        ({"auth_context": None}, [1], False),
        ({"add_callback": lambda callback: False}, [1], False),  # as gRPC: the call is over
        ({"peer": lambda: ""}, [], False),  # the client has gone
        ({"peer": None}, [], True),
        ({"add_callback": None}, [1], True),
    ],
    ids=["no auth_context", "over", "client gone", "no peer", "no add_callback"],
)
def test_contexts_of_other_packages_leave_no_call_in_flight(make_server, change, calls, hidden):
    def context(inner):
        names = ("peer", "add_callback", "invocation_metadata", "auth_context")
        return SimpleNamespace(**{name: getattr(inner, name) for name in names} | change)

    server = make_server(before=[around(context)])
    assert echo(server.channel()) == b"x"
    assert wait_until(server.is_calm)
    assert [one.calls_total for one in server.snapshot()] == calls
    assert (server.tracked.hidden_call_ns != NOT_YET) is hidden


def test_a_hidden_call_does_not_keep_connections_that_are_used_after_it(timer, make_server, events):
    hide = around(lambda inner: inner)
    server = make_server(before=[hide])
    server.detect()
    hide.context = Hidden
    assert echo(server.channel()) == b"x"
    hide.context = lambda inner: inner
    timer.advance(100)
    channel = server.channel()
    assert echo(channel) == b"x"  # since then none is hidden
    server.wait_until_quiet()
    server.advance(31)
    server.advance_until(lambda: events.of(ConnectionClosed))


class Hidden:
    """A context without the methods of gRPC's."""

    def __init__(self, inner):
        self.inner = inner


# --- Calls that no handler has begun yet ---------------------------------------------------------


def let_the_limit_pass(server, detector, open_calls: int) -> None:
    """Let the idle timeout pass, and the detector make several attempts to close connections."""
    server.wait_until_quiet(open_calls)
    server.advance(31)
    server.check(detector)
    for _ in range(3):
        server.advance(0.1)


BEHIND = pytest.mark.parametrize(
    "behind", [False, True], ids=["first", "behind another interceptor"]
)
"""The other interceptor creates a handler of its own for each call, as most do."""


@pytest.mark.parametrize(
    ("world", "behind"),
    [(SyncWorld, False), (SyncWorld, True), (AioWorld, False)],
    ids=["sync", "sync behind another interceptor", "aio"],
    indirect=["world"],
)
def test_a_connection_whose_first_call_waits_for_a_thread_is_kept(
    world, make_server, behind, events
):
    """In aio, that of a plain function, which runs in the pool."""
    server = make_server(world, workers=1, before=[around(lambda inner: inner)] * behind)
    detector = server.detect()
    server.gate = threading.Event()
    first = server.channel().unary_unary(SLOW).future(b"first")
    assert wait_until(lambda: server.tracked.open_calls == 1)
    waiting = server.channel().unary_unary(SLOW).future(b"x")
    assert wait_until(lambda: server.received_calls() == 2)
    server.check(detector)
    assert len(world.do(detector.connections)) == 2
    let_the_limit_pass(server, detector, open_calls=2 if world.name == "sync" and not behind else 1)
    server.gate.set()
    assert (first.result(WAIT_S), waiting.result(WAIT_S)) == (b"first", b"x")
    assert not events.of(ConnectionClosed)


@BEHIND
def test_a_connection_with_a_call_whose_request_has_not_arrived_is_kept(
    make_server, behind, events
):
    server = make_server(before=[around(lambda inner: inner)] * behind)
    detector = server.detect()
    channel, come = server.channel(), threading.Event()
    assert echo(channel) == b"x"
    assert wait_until(lambda: server.is_calm() and not server.received_calls())
    late = channel.stream_unary(ECHO).future(iter(lambda: come.wait(WAIT_S) and b"late", None))
    assert wait_until(lambda: server.received_calls() == 1)
    let_the_limit_pass(server, detector, open_calls=0 if behind else 1)
    assert not late.done()
    come.set()
    late.cancel()
    assert not events.of(ConnectionClosed)
    assert wait_until(lambda: server.tracked.open_calls == 0)  # and has not begun


def test_a_call_that_waits_for_a_thread_is_counted_once(make_server):
    server = make_server(workers=1)
    server.detect()
    server.gate = threading.Event()
    channel = server.channel()
    calls = [channel.unary_unary(ECHO).future(b"x") for _ in range(3)]
    assert wait_until(lambda: server.snapshot() and server.connection().calls_in_flight == 3)
    calls[2].cancel()
    assert wait_until(lambda: server.connection().calls_in_flight == 2)
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls[:2]] == [b"x"] * 2
    assert wait_until(server.is_calm)
    assert (server.connection().calls_total, server.tracked.open_calls) == (3, 0)


def test_a_server_without_the_table_as_interceptor_keeps_its_connections(make_server, events):
    server = make_server()
    server.table = ConnectionTable()  # the detector gets another one than the server
    server.tracked = server.table._table
    server.gate = threading.Event()
    detector = server.detect()
    channel = server.channel()
    call = channel.unary_unary(ECHO).future(b"x")
    assert wait_until(lambda: server.received_calls() == 1)
    let_the_limit_pass(server, detector, open_calls=0)
    assert not call.done()
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    let_the_limit_pass(server, detector, open_calls=0)  # the next would not be seen either
    assert echo(channel) == b"x"
    assert not events.of(ConnectionClosed)
    assert wait_until(lambda: events.of(IdleDetectionLimited))
    assert "is the ConnectionTable among" in events.of(IdleDetectionLimited)[0].reason
