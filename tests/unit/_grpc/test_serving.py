"""Private parts of gRPC's servers, and what is returned for objects that do not have them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from types import SimpleNamespace

import grpc
import grpc._server
import pytest
from grpc._cython import cygrpc

from fixtures.small_servers import METHOD, running, serving, small
from fixtures.waiting import WAIT_S, Gate, wait_until
from fixtures.worlds import SyncWorld
from rpcwheel._grpc import aio_serving
from rpcwheel._grpc.serving import (
    ObservedPool,
    end_call,
    has_terminated,
    is_receiving,
    is_running,
    pool_of,
    services_of,
    unfinished_calls,
)


def test_end_call_ends_a_call_that_is_served_with_the_details():
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
        end_call(contexts[0], "the reason")
        with pytest.raises(grpc.RpcError):
            next(call)
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "the reason")
        assert ended.wait(WAIT_S)
        end_call(contexts[0], "a second time")


def test_end_call_cancels_a_context_that_is_not_grpcs():
    canceled = []
    end_call(SimpleNamespace(cancel=lambda: canceled.append(1)), "the reason")
    assert canceled


def test_whether_a_call_receives_is_unknown_without_grpcs_state_or_token(monkeypatch):
    assert is_receiving(object()) is False
    context = SimpleNamespace(_state=SimpleNamespace(due={grpc._server._RECEIVE_MESSAGE_TOKEN}))
    assert is_receiving(context) is True
    monkeypatch.delattr(grpc._server, "_RECEIVE_MESSAGE_TOKEN")
    assert is_receiving(context) is False


def test_unfinished_calls_counts_calls_that_wait_for_a_thread():
    gate = Gate()
    service = small(grpc.unary_unary_rpc_method_handler(gate))
    with running(SyncWorld(), service, workers=1) as (server, port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [channel.unary_unary(METHOD).future(b"") for _ in range(2)]
            assert wait_until(lambda: unfinished_calls(server) == 2)
            gate.opened.set()
            assert [call.result(WAIT_S) for call in calls] == [b"", b""]
        assert wait_until(lambda: unfinished_calls(server) == 0)


def test_unfinished_calls_is_unknown_while_the_server_holds_its_lock():
    lock = threading.Lock()
    server = SimpleNamespace(_state=SimpleNamespace(lock=lock, rpc_states={1}))
    assert unfinished_calls(server) == 1
    with lock:
        assert unfinished_calls(server) is None


def test_an_observed_pool_reports_the_end_of_a_call_that_its_pool_refuses():
    ends = []
    call = SimpleNamespace(note_end=lambda: ends.append(1))
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    accepted, context = ContextVar("accepted"), Context()
    observed = ObservedPool(lambda: pool, lambda _: call, accepted)
    event = cygrpc.RequestCallEvent.__new__(
        cygrpc.RequestCallEvent, 0, True, None, None, None, None
    )
    with pytest.raises(RuntimeError, match="after shutdown"):
        observed.submit(context.run, print, event, None)
    assert (ends, context[accepted]) == ([1], call)
    with pytest.raises(RuntimeError, match="is gone"):
        ObservedPool(lambda: None, lambda _: call, accepted).submit(print)


def test_a_server_runs_from_its_start_to_its_stop():
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        assert (is_running(server), has_terminated(server)) == (False, False)
        server.add_insecure_port("127.0.0.1:0")
        server.start()
        assert (is_running(server), has_terminated(server)) == (True, False)
        server.stop(None).wait()
        assert has_terminated(server)
        assert wait_until(lambda: not is_running(server))  # gRPC sets its event first


async def test_a_server_of_grpc_aio_runs_from_its_start_to_its_stop():
    server = grpc.aio.server()
    assert aio_serving.is_running(server) is False
    await server.start()
    assert aio_serving.is_running(server) is True
    await server.stop(None)
    assert aio_serving.is_running(server) is False


def test_nothing_is_known_of_an_object_that_is_not_grpcs_server():
    other = object()
    assert is_running(other) is None
    assert aio_serving.is_running(other) is None
    assert has_terminated(other) is False
    assert services_of(other) == ()
    assert unfinished_calls(other) == 0
    assert pool_of(other) is None


def test_the_services_of_a_server_are_those_of_its_handlers():
    class AnyMethod(grpc.GenericRpcHandler):
        def service(self, details):
            return None

    def handler_of(service):
        member = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        return grpc.method_handlers_generic_handler(service, {"Get": member})

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[handler_of("shop.Orders")])
        server.add_generic_rpc_handlers([handler_of("shop.Audit"), AnyMethod()])
        add_registered = getattr(server, "add_registered_method_handlers", None)
        if add_registered is not None:  # since 1.63, for generated code
            add_registered("shop.Orders", {"Get": grpc.unary_unary_rpc_method_handler(len)})
        assert services_of(server) == ("shop.Orders", "shop.Audit")
        server.stop(None)
