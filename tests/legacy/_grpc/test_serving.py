"""What a threaded server of grpc knows of the calls it serves and does not show."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc._cython import cygrpc

from fixtures.small_servers import METHOD, Gate, serving, small
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.handlers import with_behavior
from rpcwheel._grpc.serving import (
    ObservedPool,
    calls_held,
    end_call,
    has_ended,
    is_plain,
    is_running,
    pool_of,
    services_of,
)


def test_a_call_ends_with_unavailable_and_the_reason_while_its_handler_waits():
    contexts, ended = [], threading.Event()

    def silent(request, context):
        contexts.append(context)
        context.add_callback(ended.set)
        yield b"open"
        ended.wait(WAIT_S)

    with (
        serving(grpc.unary_stream_rpc_method_handler(silent)) as target,
        grpc.insecure_channel(target) as channel,
    ):
        call = channel.unary_stream(METHOD)(b"", timeout=WAIT_S)
        assert next(call) == b"open"
        end_call(contexts[0], "that was it")
        with pytest.raises(grpc.RpcError):
            next(call)
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "that was it")
        assert ended.wait(WAIT_S)
        end_call(contexts[0], "again")  # it is over: nothing


def test_a_context_of_anothers_make_is_cancelled():
    cancelled = []
    end_call(SimpleNamespace(cancel=lambda: cancelled.append(1)), "why")
    assert cancelled


def test_plaintext_is_told_from_everything_else():
    told = []

    def tell(request, context):
        told.append(is_plain(context))
        return b""

    with (
        serving(grpc.unary_unary_rpc_method_handler(tell)) as target,
        grpc.insecure_channel(target) as channel,
    ):
        channel.unary_unary(METHOD)(b"", timeout=WAIT_S)
    assert told == [True]
    assert not is_plain(SimpleNamespace(auth_context=lambda: {"transport_security_type": [b"ssl"]}))
    assert not is_plain(SimpleNamespace(auth_context=dict))


@pytest.mark.parametrize("auth_context", [None, 5, lambda: None])
def test_a_context_that_does_not_tell_is_not_surely_plaintext(auth_context):
    assert not is_plain(SimpleNamespace(auth_context=auth_context))
    assert not is_plain(object())


def test_the_calls_that_a_server_holds_are_counted_from_when_it_has_them():
    gate = Gate()
    with waiting_server(gate) as (server, channel):
        calls = [channel.unary_unary(METHOD).future(b"") for _ in range(2)]
        assert wait_until(lambda: calls_held(server) == 2)  # one in its thread, one before
        gate.opened.set()
        assert [call.result(WAIT_S) for call in calls] == [b"", b""]
        assert wait_until(lambda: calls_held(server) == 0)
    assert calls_held(object()) == 0
    assert pool_of(object()) is None


def test_a_server_that_takes_a_call_in_says_that_it_can_not_tell():
    taking, go_on = threading.Event(), threading.Event()

    class Slow(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            taking.set()
            go_on.wait(WAIT_S)
            return continuation(details)

    with waiting_server(lambda r, _: r, interceptors=[Slow()]) as (server, channel):
        call = channel.unary_unary(METHOD).future(b"x")
        assert taking.wait(WAIT_S)
        assert calls_held(server) is None
        go_on.set()
        assert call.result(WAIT_S) == b"x"


class Doors(grpc.ServerInterceptor):
    """Puts a door before each behavior, and notes whom it lets in, and where."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.came: list[tuple[str, str]] = []
        self.server = None
        self.found: list[object] = []
        self.ends = 0

    def ended(self) -> None:
        self.ends += 1

    def accept(self, context):
        self.came.append((context.peer(), threading.current_thread().name))
        return self

    def intercept_service(self, continuation, details):
        handler = continuation(details)

        def serve(request, context):
            self.found.append(self.here.call)
            self.here.call = None
            return handler.unary_unary(request, context)

        made = with_behavior(handler, serve)
        ObservedPool.install(made.unary_unary, pool_of(self.server), self.accept, self.here)
        return made


def test_a_call_is_told_of_before_it_has_a_thread_and_found_again_in_it():
    gate, doors = Gate(), Doors()
    with waiting_server(gate, interceptors=[doors]) as (doors.server, channel):
        calls = [channel.unary_unary(METHOD).future(b"") for _ in range(2)]
        assert wait_until(lambda: len(doors.came) == 2)
        assert wait_until(lambda: len(doors.found) == 1)
        gate.opened.set()
        assert [call.result(WAIT_S) for call in calls] == [b"", b""]
    assert doors.found == [doors, doors]
    assert {peer.partition(":")[0] for peer, _ in doors.came} == {"ipv4"}
    assert not any("pool" in thread for _, thread in doors.came)
    assert doors.ends == 0


def test_a_pool_of_the_behaviors_own_is_still_the_one_it_runs_in():
    doors, names = Doors(), []

    def serve(request, context):
        names.append(threading.current_thread().name)
        return request

    with ThreadPoolExecutor(1, thread_name_prefix="own") as own:
        serve.experimental_thread_pool = own
        with waiting_server(serve, interceptors=[doors]) as (doors.server, channel):
            assert channel.unary_unary(METHOD)(b"x", timeout=WAIT_S) == b"x"
    assert names[0].startswith("own")
    assert len(doors.came) == 1


def test_two_doors_one_behind_the_other_both_see_it():
    outer, inner = Doors(), Doors()
    with waiting_server(lambda r, _: r, interceptors=[outer, inner]) as (server, channel):
        outer.server = inner.server = server
        assert channel.unary_unary(METHOD)(b"x", timeout=WAIT_S) == b"x"
    assert (len(outer.came), len(inner.came)) == (1, 1)
    assert (outer.found, inner.found) == ([outer], [inner])


def test_a_call_that_no_pool_takes_is_over():
    doors = Doors()
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    door = ObservedPool(lambda: pool, lambda _: doors, doors.here)
    event = cygrpc.RequestCallEvent.__new__(
        cygrpc.RequestCallEvent, 0, True, None, None, None, None
    )
    with pytest.raises(RuntimeError, match="after shutdown"):
        door.submit(print, event, None)
    assert doors.ends == 1
    with pytest.raises(RuntimeError, match="is gone"):
        ObservedPool(lambda: None, doors.accept, doors.here).submit(print)
    door.shutdown()


@contextmanager
def waiting_server(behavior, interceptors=()):
    """A server with one thread, and a channel to it."""
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        server = grpc.server(pool, interceptors=interceptors)
        server.add_generic_rpc_handlers([small(grpc.unary_unary_rpc_method_handler(behavior))])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, channel
        server.stop(None).wait()


# What a server is, and what it serves


def handler_of(service):
    member = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    return grpc.method_handlers_generic_handler(service, {"Get": member})


def test_a_server_runs_from_its_start_to_the_end_of_its_calls_and_not_again():
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        assert (is_running(server), has_ended(server)) == (False, False)
        server.add_insecure_port("127.0.0.1:0")
        server.start()
        assert (is_running(server), has_ended(server)) == (True, False)
        server.stop(None).wait()
        assert has_ended(server)
        assert wait_until(lambda: not is_running(server))  # grpc tells the end before it says so


def test_of_a_server_of_another_make_it_is_not_known_whether_it_runs():
    assert is_running(object()) is None
    assert has_ended(object()) is False
    assert services_of(object()) == ()


def test_the_services_of_a_server_are_those_that_it_has_handlers_for():
    class Anything(grpc.GenericRpcHandler):
        def service(self, details):
            return None

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[handler_of("shop.Orders")])
        server.add_generic_rpc_handlers([handler_of("shop.Audit"), Anything()])
        add_registered = getattr(server, "add_registered_method_handlers", None)
        if add_registered is not None:  # since 1.63, for generated code
            add_registered("shop.Orders", {"Get": grpc.unary_unary_rpc_method_handler(len)})
        assert services_of(server) == ("shop.Orders", "shop.Audit")
        server.stop(None)
