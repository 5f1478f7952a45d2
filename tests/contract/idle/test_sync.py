"""A threaded server's calls, as its table sees them, and the detector that ends with it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fixtures.idle_server import IdleServer, down, echo, let_it_rest, said, soon
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.idle import ConnectionTable, IdleConnectionDetector
from rpcwheel.observe import ConnectionClosed, ConnectionKept, IdleLimited

# What is seen


def test_a_call_is_seen_with_its_messages_and_its_end(server, channel):
    server.timer.advance(5)
    assert echo(channel) == b"x"
    assert wait_until(server.is_calm)
    one = server.connection()
    assert one.peer.startswith("ipv4:127.0.0.1:")
    assert (one.calls, one.messages_in, one.messages_out, one.heartbeats) == (1, 1, 1, 0)
    assert (one.first, one.last_read, one.last_write) == (5.0, 5.0, 5.0)


def test_a_call_is_open_until_its_answer_is_out(server, channel):
    server.gate = threading.Event()
    call = channel.unary_unary("/test.Idle/Echo").future(b"x")
    assert wait_until(lambda: server.table.snapshot() and server.connection().calls_open == 1)
    server.gate.set()
    assert call.result(WAIT_S) == b"x"
    assert wait_until(server.is_calm)


def test_the_messages_of_each_kind_of_stream_are_seen(server, channel):
    ups = channel.stream_unary("/test.Idle/Up")
    assert ups(iter([b"a", b"b"])) == b"read"
    boths = channel.stream_stream("/test.Idle/Both")
    assert list(boths(iter([b"a", b"b", b"c"]))) == [b"a", b"b", b"c"]
    assert wait_until(server.is_calm)
    one = server.connection()
    assert (one.calls, one.messages_in, one.messages_out) == (2, 5, 4)


def test_a_stream_that_its_client_leaves_is_no_longer_open(server, channel):
    call = down(channel)
    assert server.connection().streams_open == 1
    call.cancel()
    assert wait_until(server.is_calm)


def test_heartbeats_are_told_by_method_and_by_metadata(server, channel):
    detector = server.detect(heartbeats="/test.Idle/Ec*")
    echo(channel)
    assert (server.connection().calls, server.connection().heartbeats) == (0, 1)
    detector.change(heartbeats=())
    echo(channel)
    echo(channel, metadata=[("rpcwheel-heartbeat", "1")])
    assert (server.connection().calls, server.connection().heartbeats) == (1, 2)


def test_a_health_watch_keeps_its_nature_and_holds_no_thread(timer):
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
        (one,) = table.snapshot()
        assert (one.heartbeats, one.streams_open) == (4, 0)
        for watch in watches:
            watch.cancel()
    server.stop(None).wait()
    pool.shutdown()


def test_the_end_of_a_stream_that_is_pushed_is_no_message(timer):
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


def test_an_interceptor_that_hides_who_calls_harms_no_call(timer, events):
    server = IdleServer(timer, before=[around(Hidden)])
    channel = server.channel()
    assert echo(channel) == b"x"
    detector = server.detect()
    detector.check()
    let_it_rest()
    timer.advance(31)  # for the kernel it was used a moment ago
    detector.check()
    detector.check()
    assert wait_until(lambda: said(events, ConnectionKept))
    assert not said(events, ConnectionClosed)
    assert "context.peer() failed" in said(events, IdleLimited)[0].reason
    assert len(said(events, IdleLimited)) == 1
    server.close()


def test_a_context_that_does_not_tell_what_it_is_takes_no_call_from_the_count(timer, events):
    class Context:
        """Of another's make: all that a table needs, and no more."""

        def __init__(self, inner):
            self.peer, self.add_callback = inner.peer, inner.add_callback
            self.invocation_metadata = inner.invocation_metadata

    server = IdleServer(timer, before=[around(Context)])
    assert echo(server.channel()) == b"x"
    assert wait_until(server.is_calm)
    server.detect().check()
    assert server.connection().calls == 1
    assert not server.table.uncounted
    server.close()


def test_a_call_that_is_over_before_its_handler_begins_is_not_open_for_ever(timer):
    class Context:
        def __init__(self, inner):
            self.peer, self.auth_context = inner.peer, inner.auth_context
            self.invocation_metadata = inner.invocation_metadata

        def add_callback(self, callback):
            return False  # as grpc's own: it is over

    server = IdleServer(timer, before=[around(Context)])
    assert echo(server.channel()) == b"x"
    assert server.is_calm()
    server.close()


@pytest.mark.parametrize("broken", ["add_callback", "peer"])
def test_what_fails_while_a_call_is_counted_leaves_nothing_open(timer, broken):
    class Context:
        def __init__(self, inner):
            self.peer, self.add_callback = inner.peer, inner.add_callback
            self.invocation_metadata = inner.invocation_metadata
            setattr(self, broken, None)

    server = IdleServer(timer, before=[around(Context)])
    assert echo(server.channel()) == b"x"
    assert server.table.uncounted == 1
    assert server.table.open_calls == 0
    server.close()


def test_a_call_whose_client_has_gone_is_no_connection(timer):
    class Context:
        def __init__(self, inner):
            self.invocation_metadata = inner.invocation_metadata

        def peer(self):
            return ""

    server = IdleServer(timer, before=[around(Context)])
    assert echo(server.channel()) == b"x"
    assert (server.table.snapshot(), server.table.uncounted) == ((), 0)
    server.close()


def test_calls_whose_peer_is_hidden_keep_connections_only_as_long_as_they_may_be_on_them(
    timer, events
):
    hide = around(lambda inner: inner)
    server = IdleServer(timer, before=[hide])
    detector = server.detect()
    hide.context = Hidden
    assert echo(server.channel()) == b"x"
    hide.context = lambda inner: inner
    timer.advance(100)
    channel = server.channel()
    assert echo(channel) == b"x"  # since then none is hidden
    assert wait_until(server.is_calm)
    let_it_rest()
    timer.advance(31)
    detector.check()
    assert soon(server, lambda: said(events, ConnectionClosed))
    server.close()


def around(context):
    """An interceptor that gives handlers this context, made of grpc's."""

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
    """A context that tells nothing."""

    def __init__(self, inner):
        self.inner = inner


# The end


def test_it_ends_with_its_server(timer):
    server = IdleServer(timer)
    detector = server.detect()
    server.server.stop(None).wait()
    timer.advance(10)
    assert wait_until(lambda: detector.closed)
    assert timer.pending == 0
    server.close()


def test_it_ends_when_its_server_is_dropped(timer):
    class Server:
        def wait_for_termination(self, timeout):
            return True

    detector = IdleConnectionDetector(Server(), connections=ConnectionTable(), timer=timer)
    timer.advance(60)
    assert wait_until(lambda: detector.closed)
    assert timer.pending == 0
