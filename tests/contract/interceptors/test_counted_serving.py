"""Calls of handlers that push their responses are counted; `test_server.py` has the others."""

import contextlib
import threading
from collections import deque

import grpc
import pytest
from scenarios.served import (
    KINDS,
    STREAMS,
    aio_answering,
    answering,
    begin,
    handler,
)

from fixtures.call_counts import TYPES, codes_of, replace_call_counts
from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S
from rpcwheel.call.server import ServerState
from rpcwheel.interceptors import aio_server, server, sync

each_kind = pytest.mark.parametrize("kind", KINDS)

NOT_FOUND = grpc.StatusCode.NOT_FOUND


def ours(world) -> list:
    return world.interceptors.server_interceptors()


def ask(target: str, kind: str, *, timeout: float | None = WAIT_S) -> str:
    """Make a call of grpc, and return its status code."""
    with grpc.insecure_channel(target, options=IMPATIENT) as channel:
        call = begin(channel, kind, timeout=timeout)
        with contextlib.suppress(grpc.RpcError):
            deque(call if kind in STREAMS else (), maxlen=0)
        return call.code().name


def check(counts, kind: str, codes: dict[str, int]) -> None:
    """Check the calls by status code, when all have ended."""
    assert codes_of(counts.server) == codes
    assert {(one.method, one.kind) for one in counts.server.totals()} == {(METHOD, TYPES[kind])}


def pushing(act):
    """A handler whose behavior sends its responses by a function."""

    def behavior(request, context, push):
        act(context, push)

    behavior.experimental_non_blocking = True
    return handler("unary_stream", behavior)


def push_twice(context, push):
    push(b"x")
    push(None)


def push_and_set_code(context, push):
    push(b"x")
    context.set_code(NOT_FOUND)
    push(None)


def abort(context, push):
    context.abort(NOT_FOUND, "no")


@pytest.mark.parametrize(
    ("act", "code"), [(push_twice, "OK"), (push_and_set_code, "NOT_FOUND"), (abort, "NOT_FOUND")]
)
def test_a_handler_that_pushes_its_responses(call_counts, act, code):
    with serving(pushing(act), interceptors=sync.server_interceptors()) as target:
        assert ask(target, "unary_stream") == code
        check(call_counts, "unary_stream", {code: 1})


def test_a_pushing_handler_whose_client_cancels(call_counts):
    entered = threading.Event()
    made = pushing(lambda context, push: entered.set())
    with (
        serving(made, interceptors=sync.server_interceptors()) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, "unary_stream", timeout=None)
        assert entered.wait(WAIT_S)
        call.cancel()
        check(call_counts, "unary_stream", {"CANCELLED": 1})


@each_kind
def test_without_metrics_no_handler_has_another_wrapper(call_counts, world, kind):
    module, form = (server, answering) if world.name == "sync" else (aio_server, aio_answering)

    def wrapper() -> str:
        made = handler(kind, form(kind, repr))
        wrapped = ServerState(None, timer=None).wrap(made, METHOD, module._wrap)
        return getattr(wrapped, kind).__code__.co_qualname

    assert wrapper().startswith("_count_")
    counts = replace_call_counts(None)
    try:
        assert wrapper().startswith("_wrap_")
    finally:
        replace_call_counts(counts)
