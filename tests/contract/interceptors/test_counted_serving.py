"""Calls of servers are counted, each once, if they end before their handler.

`test_server.py` has those that their handler ends.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque

import grpc
import pytest
from scenarios.served import (
    KINDS,
    ONE_ANSWER,
    STREAMS,
    aio_answering,
    answering,
    begin,
    handler,
)

from fixtures.call_counts import TYPES, codes_of, replace_call_counts
from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import IN_TIME, METHOD, serving, serving_in
from fixtures.waiting import WAIT_S
from fixtures.worlds import AioWorld
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


# --- Calls that end before their handler ---


class Waiting:
    """Behaviors that wait until their call has ended."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.until_deadline = False
        """Whether they wait for the deadline too, which the client may notice earlier."""

    def _wait(self, context) -> None:
        ended = threading.Event()
        context.add_callback(ended.set)
        self.entered.set()
        ended.wait(2 * WAIT_S)
        while self.until_deadline and context.time_remaining():
            time.sleep(0.001)

    async def _wait_aio(self, context) -> None:
        self.entered.set()
        try:
            await asyncio.sleep(2 * WAIT_S)
        finally:
            while self.until_deadline and context.time_remaining():
                time.sleep(0.001)  # noqa: ASYNC251 - not to be canceled again

    def behavior_in(self, world, kind: str):
        return self.behavior(kind) if world.name == "sync" else self.aio_behavior(kind)

    def behavior(self, kind: str):
        def unary(request, context):
            self._wait(context)
            return b"x"

        def stream(request, context):
            yield b"x"
            self._wait(context)
            yield b"x"

        return unary if kind in ONE_ANSWER else stream

    def aio_behavior(self, kind: str):
        async def unary(request, context):
            await self._wait_aio(context)

        async def stream(request, context):
            yield b"x"
            await self._wait_aio(context)

        return unary if kind in ONE_ANSWER else stream


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def cancel(target: str, kind: str, entered: threading.Event) -> None:
    """Begin a call without a deadline, and cancel it when its handler runs."""
    with grpc.insecure_channel(target, options=IMPATIENT) as channel:
        call = begin(channel, kind, timeout=None)
        assert entered.wait(WAIT_S)
        call.cancel()


def let_expire(target: str, kind: str, entered: threading.Event) -> None:
    """Make calls until the deadline of one passes while its handler runs."""
    for timeout in IN_TIME:
        assert ask(target, kind, timeout=timeout) == "DEADLINE_EXCEEDED"
        if entered.is_set():
            return
    raise AssertionError("no call has reached its handler before its deadline")


@each_kind
def test_a_call_that_its_client_cancels(world, call_counts, waiting, kind):
    made = handler(kind, waiting.behavior_in(world, kind))
    with serving_in(world, made, *ours(world)) as target:
        cancel(target, kind, waiting.entered)
        check(call_counts, kind, {"CANCELLED": 1})


@each_kind
def test_a_call_whose_deadline_passes(world, call_counts, waiting, kind):
    waiting.until_deadline = True
    made = handler(kind, waiting.behavior_in(world, kind))
    with serving_in(world, made, *ours(world)) as target:
        let_expire(target, kind, waiting.entered)
        assert set(codes_of(call_counts.server)) == {"DEADLINE_EXCEEDED"}


@pytest.mark.parametrize("world", [AioWorld], indirect=True)
def test_an_aio_call_of_a_blocking_stream_that_its_client_cancels(world, call_counts):
    entered, go_on = threading.Event(), threading.Event()

    def stream(request, context):
        yield b"x"
        entered.set()
        go_on.wait(2 * WAIT_S)
        yield b"x"

    made = handler("unary_stream", stream)
    with serving_in(world, made, *ours(world)) as target:
        try:
            cancel(target, "unary_stream", entered)
            check(call_counts, "unary_stream", {"CANCELLED": 1})
        finally:
            go_on.set()


# --- Handlers that push their responses ---


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
    with serving(made, interceptors=sync.server_interceptors()) as target:
        cancel(target, "unary_stream", entered)
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
