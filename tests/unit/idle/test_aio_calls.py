"""Calls of a grpc.aio server: how the detector ends them, their contexts and their streams."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import grpc
import pytest

from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.idle.aio import ConnectionTable
from rpcwheel.idle.core import NOT_YET

METHOD = "/test.Idle/Call"
ONE, DOWN = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
DETAILS = "closed by the server: for a test"


@pytest.fixture
def serve(aio_world, make_server):
    """Starts a server with one handler; returns it, and a channel of `grpc`."""

    def start(handler):
        server = make_server(aio_world, methods={"Call": handler})
        return server, server.channel()

    return start


def calls_of(server):
    """The calls in flight; on the loop, which adds and removes them."""
    entries = server.tracked.entries
    return server.world.do(lambda: [call for entry in entries() for call in entry.calls])


def end_the_call(server) -> None:
    assert wait_until(lambda: calls_of(server))
    (call,) = calls_of(server)
    run_threads(*[lambda: call.finish(DETAILS)] * 3)


class Ended(threading.Event):
    """Set when a handler is cancelled."""

    async def wait_for_it(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.set()
            raise


def styles(ended):
    async def one(request, context):
        await ended.wait_for_it()

    async def generator(request, context):
        yield b"open"
        await ended.wait_for_it()

    async def by_hand(request, context):
        await context.write(b"open")
        await ended.wait_for_it()

    async def swallows(request, context):
        await context.write(b"open")
        try:
            await ended.wait_for_it()
        except asyncio.CancelledError:
            return

    return {one: ONE, generator: DOWN, by_hand: DOWN, swallows: DOWN}


@pytest.mark.parametrize("index", range(4), ids=["one", "generator", "by hand", "swallows"])
def test_the_client_gets_the_status_and_the_handler_is_cancelled(serve, caplog, index):
    ended = Ended()
    behavior, kind = list(styles(ended).items())[index]
    server, channel = serve(kind(behavior))
    if kind is ONE:
        call = channel.unary_unary(METHOD).future(b"")
    else:
        call = channel.unary_stream(METHOD)(b"")
        assert next(call) == b"open"
        assert wait_until(lambda: server.connection().messages_out)
    end_the_call(server)
    assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, DETAILS)
    assert ended.wait(WAIT_S)
    assert wait_until(lambda: not calls_of(server))
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_calls_can_be_ended_at_any_moment_and_after_their_end(serve):
    """What a call holds in gRPC is freed when its task has ended; to use it later would crash."""

    async def work(request, context):
        await asyncio.sleep(int(request) / 1e4)
        return request

    server, channel = serve(ONE(work))
    calls, seen = [], []
    for number in range(300):
        calls.append(channel.unary_unary(METHOD).future(str(number % 20).encode()))
        seen = calls_of(server) or seen
        for call in seen[::2]:
            call.finish(DETAILS)
        if number % 3 == 0:
            calls[-1].cancel()
    codes = {call.code() for call in calls}
    statuses = grpc.StatusCode
    assert codes <= {statuses.OK, statuses.UNAVAILABLE, statuses.CANCELLED}
    assert statuses.OK in codes
    assert wait_until(lambda: not calls_of(server))
    for call in seen:
        call.finish(DETAILS)
    assert channel.unary_unary(METHOD)(b"1") == b"1"


def test_a_plain_function_in_a_pool_is_not_ended(serve):
    gate = Gate()
    server, channel = serve(ONE(gate))
    call = channel.unary_unary(METHOD).future(b"x")
    end_the_call(server)
    gate.opened.set()
    assert call.result(WAIT_S) == b"x"


def test_a_plain_generator_ends_when_its_client_leaves(serve):
    asked, gate, made, closed = threading.Event(), threading.Event(), [], threading.Event()

    def plain(request, context):
        yield b"open"
        asked.set()
        gate.wait(WAIT_S)
        try:
            for number in range(100):
                made.append(number)
                yield b"more"
        finally:
            closed.set()

    server, channel = serve(DOWN(plain))
    call = channel.unary_stream(METHOD)(b"")
    assert next(call) == b"open"
    assert asked.wait(WAIT_S)
    call.cancel()
    assert wait_until(lambda: not calls_of(server))
    gate.set()
    assert closed.wait(WAIT_S)
    assert made == [0]


async def test_a_blocking_handler_that_begins_after_its_call_asks_its_context_nothing():
    """gRPC has freed the call; `peer()` of its context would crash the process."""
    asked = []

    class Context:
        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    async def continuation(_):
        return ONE(lambda request, _context: request)

    details = SimpleNamespace(method=METHOD, invocation_metadata=())
    table = ConnectionTable()

    async def _handle_exceptions():  # the name of the coroutine of gRPC's task
        return await table.intercept_service(continuation, details)

    handler = await asyncio.create_task(_handle_exceptions())
    assert await asyncio.to_thread(handler.unary_unary, b"x", Context()) == b"x"
    assert asked == []
    assert table._table.hidden_call_ns == NOT_YET


def test_a_context_behaves_as_grpcs_own(serve):
    gone, given = threading.Event(), []

    async def respond(request, context):
        context.add_done_callback(lambda it: (given.append(it is context), gone.set()))
        context.set_trailing_metadata((("a", "b"),))
        given.append(context.peer() == server.connection().peer)
        given.append(context.time_remaining() > 5)
        with pytest.raises(AttributeError):
            context.nothing  # noqa: B018
        with pytest.raises(AttributeError):
            context.mine = 1  # grpc's own takes nothing either
        await context.write(request)

    server, channel = serve(DOWN(respond))
    call = channel.unary_stream(METHOD)(b"x", timeout=WAIT_S)
    assert list(call) == [b"x"]
    assert ("a", "b") in call.trailing_metadata()
    assert gone.wait(WAIT_S)
    assert given == [True, True, True]
