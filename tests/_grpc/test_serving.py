"""What a threaded server of grpc knows of the calls it serves and does not show."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from fixtures.small_servers import METHOD, Gate, serving, small
from fixtures.timers import PATIENCE, eventually
from rpcwheel._grpc.serving import calls_wait, end_call, is_plain


def test_a_call_ends_with_unavailable_and_the_reason_while_its_handler_waits():
    contexts, ended = [], threading.Event()

    def silent(request, context):
        contexts.append(context)
        context.add_callback(ended.set)
        yield b"open"
        ended.wait(PATIENCE)

    with (
        serving(grpc.unary_stream_rpc_method_handler(silent)) as target,
        grpc.insecure_channel(target) as channel,
    ):
        call = channel.unary_stream(METHOD)(b"", timeout=PATIENCE)
        assert next(call) == b"open"
        end_call(contexts[0], "that was it")
        with pytest.raises(grpc.RpcError):
            next(call)
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "that was it")
        assert ended.wait(PATIENCE)
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
        channel.unary_unary(METHOD)(b"", timeout=PATIENCE)
    assert told == [True]
    assert not is_plain(SimpleNamespace(auth_context=lambda: {"transport_security_type": [b"ssl"]}))
    assert not is_plain(SimpleNamespace(auth_context=dict))


def test_calls_that_wait_for_a_thread_are_known():
    gate = Gate()
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers([small(grpc.unary_unary_rpc_method_handler(gate))])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [channel.unary_unary(METHOD).future(b"") for _ in range(2)]
            assert gate.entered.wait(PATIENCE)
            assert eventually(lambda: calls_wait(server))
            gate.opened.set()
            assert [call.result(PATIENCE) for call in calls] == [b"", b""]
            assert eventually(lambda: not calls_wait(server))
        server.stop(None).wait()
    assert not calls_wait(object())
