"""Calls of a threaded server: what is counted, and which keep their connection open."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fixtures.idle_server import IdleServer, down, echo, events_of, snapshot_of
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import ConnectionClosed, IdleDetectionLimited
from rpcwheel.idle import ConnectionTable
from rpcwheel.idle.core import NOT_YET

ECHO = "/test.Idle/Echo"

# --- What is seen --------------------------------------------------------------------------------


def test_messages_of_each_kind_of_stream_are_counted(server, channel):
    ups = channel.stream_unary("/test.Idle/Up")
    assert ups(iter([b"a", b"b"])) == b"read"
    boths = channel.stream_stream("/test.Idle/Both")
    assert list(boths(iter([b"a", b"b", b"c"]))) == [b"a", b"b", b"c"]
    assert wait_until(server.is_calm)
    one = server.connection()
    assert (one.calls_total, one.messages_in, one.messages_out) == (2, 5, 4)


def test_a_stream_that_its_client_cancels_is_not_in_flight(server, channel):
    call = down(channel)
    assert server.connection().streams_in_flight == 1
    call.cancel()
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


def test_the_end_of_a_pushed_stream_is_not_counted_as_a_message(timer):
    def pushing(request, context, push):
        for answer in (b"a", b"b", None):
            push(answer)

    pushing.experimental_non_blocking = True
    methods = {"Push": grpc.unary_stream_rpc_method_handler(pushing)}
    server = IdleServer(timer, methods=methods)
    call = server.channel().unary_stream("/test.Idle/Push")(b"x", timeout=WAIT_S)
    assert list(call) == [b"a", b"b"]
    assert wait_until(server.is_calm)
    assert (server.connection().messages_in, server.connection().messages_out) == (1, 2)
    server.close()


def test_a_hidden_peer_is_reported_and_no_connection_is_closed(timer, events):
    server = IdleServer(timer, before=[around(Hidden)])
    channel = server.channel()
    assert echo(channel) == b"x"
    detector = server.detect()
    detector.check()
    server.wait_until_quiet()
    server.advance(31)
    detector.check()
    assert wait_until(lambda: events_of(events, IdleDetectionLimited))
    assert not events_of(events, ConnectionClosed)
    assert "context.peer() failed" in events_of(events, IdleDetectionLimited)[0].reason
    assert len(events_of(events, IdleDetectionLimited)) == 1
    server.close()


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
def test_contexts_of_other_packages_leave_no_call_in_flight(timer, change, calls, hidden):
    def context(inner):
        names = ("peer", "add_callback", "invocation_metadata", "auth_context")
        return SimpleNamespace(**{name: getattr(inner, name) for name in names} | change)

    server = IdleServer(timer, before=[around(context)])
    assert echo(server.channel()) == b"x"
    assert wait_until(server.is_calm)
    assert [one.calls_total for one in server.snapshot()] == calls
    assert (server.tracked.hidden_call_ns != NOT_YET) is hidden
    server.close()


def test_a_hidden_call_does_not_keep_connections_that_are_used_after_it(timer, events):
    hide = around(lambda inner: inner)
    server = IdleServer(timer, before=[hide])
    server.detect()
    hide.context = Hidden
    assert echo(server.channel()) == b"x"
    hide.context = lambda inner: inner
    timer.advance(100)
    channel = server.channel()
    assert echo(channel) == b"x"  # since then none is hidden
    server.wait_until_quiet()
    server.advance(31)
    server.advance_until(lambda: events_of(events, ConnectionClosed))
    server.close()


def around(context):
    """An interceptor that gives handlers `context(gRPC's context)`."""

    class Around(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            handler = continuation(details)

            def serve(request, inner):
                return handler.unary_unary(request, self.context(inner))

            return grpc.unary_unary_rpc_method_handler(serve)

    interceptor = Around()
    interceptor.context = context
    return interceptor


class Hidden:
    """A context without the methods of gRPC's."""

    def __init__(self, inner):
        self.inner = inner


# --- Calls that no handler has begun yet ---------------------------------------------------------


class Handing(grpc.ServerInterceptor):
    """Creates a handler of its own for each call, as most interceptors do."""

    def intercept_service(self, continuation, details):
        handler = continuation(details)

        def serve(request, context):
            return handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(serve)


def let_the_limit_pass(server, detector, open_calls: int) -> None:
    """Let the idle timeout pass, and the detector make several attempts to close connections."""
    server.wait_until_quiet(open_calls)
    server.advance(31)
    detector.check()
    for _ in range(3):
        server.advance(0.1)


BEFORE = pytest.mark.parametrize(
    "before", [[], [Handing()]], ids=["first", "behind another interceptor"]
)


@BEFORE
def test_a_connection_whose_first_call_waits_for_a_thread_is_kept(timer, before, events):
    server = IdleServer(timer, workers=1, before=before)
    detector = server.detect()
    server.gate = threading.Event()
    first = server.channel().unary_unary(ECHO).future(b"first")
    assert wait_until(lambda: server.tracked.open_calls == 1)
    waiting = server.channel().unary_unary(ECHO).future(b"x")
    assert wait_until(lambda: server.received_calls() == 2)
    known = 1 if before else 2
    let_the_limit_pass(server, detector, open_calls=known)
    server.gate.set()
    assert (first.result(WAIT_S), waiting.result(WAIT_S)) == (b"first", b"x")
    assert not events_of(events, ConnectionClosed)
    server.close()


@BEFORE
def test_a_connection_with_a_call_whose_request_has_not_arrived_is_kept(timer, before, events):
    server = IdleServer(timer, before=before)
    detector = server.detect()
    channel, come = server.channel(), threading.Event()
    assert echo(channel) == b"x"
    assert wait_until(lambda: server.is_calm() and not server.received_calls())
    late = channel.stream_unary(ECHO).future(iter(lambda: come.wait(WAIT_S) and b"late", None))
    assert wait_until(lambda: server.received_calls() == 1)
    let_the_limit_pass(server, detector, open_calls=0 if before else 1)
    assert not late.done()
    come.set()
    late.cancel()
    assert not events_of(events, ConnectionClosed)
    assert wait_until(lambda: server.tracked.open_calls == 0)  # and has not begun
    server.close()


def test_a_call_that_waits_for_a_thread_is_counted_once(timer):
    server = IdleServer(timer, workers=1)
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
    server.close()


def test_a_server_without_the_table_as_interceptor_keeps_its_connections(timer, events):
    gate = threading.Event()
    server = IdleServer(timer)
    with ThreadPoolExecutor(2) as pool:
        forgetful = grpc.server(pool)  # no interceptors
        echoing = grpc.unary_unary_rpc_method_handler(lambda r, _: gate.wait(WAIT_S) and r)
        forgetful.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Idle", {"Echo": echoing})]
        )
        server.server.stop(None).wait()
        server.server, server.table = forgetful, ConnectionTable()
        server.port = forgetful.add_insecure_port("127.0.0.1:0")
        forgetful.start()
        detector = server.detect()
        channel = server.channel()
        call = channel.unary_unary(ECHO).future(b"x")
        assert wait_until(lambda: server.received_calls() == 1)
        let_the_limit_pass(server, detector, open_calls=0)
        assert not call.done()
        gate.set()
        assert call.result(WAIT_S) == b"x"
        let_the_limit_pass(server, detector, open_calls=0)  # the next would not be seen either
        assert echo(channel) == b"x"
        assert not events_of(events, ConnectionClosed)
        assert wait_until(lambda: events_of(events, IdleDetectionLimited))
        assert "is the ConnectionTable among" in events_of(events, IdleDetectionLimited)[0].reason
        server.close()
