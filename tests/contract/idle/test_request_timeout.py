"""`request_timeout` of IdlePolicy: calls whose single request does not arrive."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import grpc
import grpc._server
import pytest
from grpc._cython import cygrpc

import rpcwheel.idle.aio
from fixtures.idle_aio_server import idle_server
from fixtures.idle_server import IdleServer, echo, events_of
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.events import IdleDetectionLimited

ECHO, UP = "/test.Idle/Echo", "/test.Idle/Up"
LATE = "the request did not arrive within 30 s"
NO_EFFECT = "request_timeout has no effect with this version of grpcio"


@pytest.fixture
def small_server(timer):
    """A threaded server with one thread."""
    server = IdleServer(timer, workers=1)
    yield server
    server.close()


def headers_only(opened: ExitStack, channel: grpc.Channel, method: str):
    """A call without its request, and the event that sends the request."""
    go_on = threading.Event()
    opened.callback(go_on.set)
    requests = iter(lambda: go_on.wait(WAIT_S) and b"late", None)
    return channel.stream_unary(method).future(requests), go_on


def limits_reported(events):
    """The reasons of the `IdleDetectionLimited` events, without explanations."""
    return [event.reason.partition(":")[0] for event in events_of(events, IdleDetectionLimited)]


# --- grpc ----------------------------------------------------------------------------------------


def test_a_call_whose_request_does_not_arrive_ends_and_frees_its_thread(small_server):
    small_server.detect(None, request_timeout=30)
    channel = small_server.channel()
    with ExitStack() as opened:
        late, _ = headers_only(opened, channel, ECHO)
        assert wait_until(lambda: small_server.received_calls() == 1)
        other = channel.unary_unary(ECHO).future(b"x", timeout=WAIT_S)
        small_server.advance_until(late.done)
        assert (late.code(), late.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
        assert other.result() == b"x"  # on the same connection, in the same thread


def test_a_handler_may_take_longer_than_a_request_may_take_to_arrive(small_server):
    small_server.detect(None, request_timeout=30)
    small_server.gate = threading.Event()
    calls = [small_server.channel().unary_unary(ECHO).future(b"x") for _ in range(2)]
    assert wait_until(lambda: small_server.received_calls() == 2 and small_server.begun)
    for _ in range(10):  # one waits for the thread
        small_server.advance(30)
    small_server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x", b"x"]


def test_a_request_stream_may_be_silent_for_longer_than_the_request_timeout(small_server):
    small_server.detect(None, request_timeout=30)
    with ExitStack() as opened:
        call, go_on = headers_only(opened, small_server.channel(), UP)
        assert wait_until(lambda: small_server.received_calls() == 1)
        for _ in range(10):
            small_server.advance(30)
        go_on.set()
        assert wait_until(lambda: b"late" in small_server.read)
        call.cancel()


def test_the_request_timeout_can_be_changed_and_removed(small_server):
    detector = small_server.detect(None, request_timeout=None)
    assert small_server.timer.pending == 0
    detector.change(request_timeout=30)
    assert small_server.timer.pending == 1
    with ExitStack() as opened:
        late, _ = headers_only(opened, small_server.channel(), ECHO)
        assert wait_until(lambda: small_server.received_calls() == 1)
        small_server.advance_until(late.done)
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    detector.change(request_timeout=None)
    assert small_server.timer.pending == 0
    assert echo(small_server.channel()) == b"x"


def test_a_request_timeout_that_has_no_effect_with_this_grpcio_is_reported_once(
    small_server, events, monkeypatch
):
    monkeypatch.delattr(grpc._server, "_RECEIVE_MESSAGE_TOKEN")
    small_server.detect(None, request_timeout=30)
    assert wait_until(lambda: small_server.advance(10) or events_of(events, IdleDetectionLimited))
    small_server.advance(30)
    assert limits_reported(events) == [NO_EFFECT]


# --- grpc.aio ------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["await", "plain"])
async def test_an_aio_call_whose_request_does_not_arrive_ends(timer, style):
    async with idle_server(timer) as server, server.channel() as channel:
        with closing(server.detect(None, request_timeout=30)):
            late = channel.stream_unary(f"/test.Idle/{style}_call")()  # its headers, and no more
            await aio_wait_until(lambda: server.waiting_calls() == 1)
            await server.advance_until(late.done)
            assert (await late.code(), await late.details()) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                LATE,
            )
            await aio_wait_until(lambda: server.waiting_calls() == 0)
            method = channel.unary_unary(f"/test.Idle/{style}_call")
            assert await method(b"x") == b"x"  # on the same connection


async def test_an_aio_handler_may_take_longer_than_a_request_may_take_to_arrive(timer):
    gate = threading.Event()

    def slow(request, context):
        gate.wait(WAIT_S)
        return request

    with ThreadPoolExecutor(1) as pool:
        async with idle_server(timer, migration_thread_pool=pool) as server:
            server.add("Slow", grpc.unary_unary_rpc_method_handler(slow))
            async with server.channel() as channel:
                with closing(server.detect(None, request_timeout=30)):
                    method = channel.unary_unary("/test.Idle/Slow")
                    calls = [method(b"x") for _ in range(2)]  # one waits for the thread
                    await aio_wait_until(
                        lambda: (server.tracked.open_calls, server.waiting_calls()) == (1, 1)
                    )
                    for _ in range(10):
                        await server.advance(30)
                    gate.set()
                    assert [await call for call in calls] == [b"x", b"x"]


async def test_an_aio_request_stream_may_be_silent_for_longer_than_the_request_timeout(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        with closing(server.detect(None, request_timeout=30)):
            for name in ("await_up", "read_up"):
                call = channel.stream_unary(f"/test.Idle/{name}")()
                await aio_wait_until(lambda: server.tracked.open_calls == 1)
                for _ in range(10):
                    await server.advance(30)
                await call.write(b"late")
                await call.done_writing()
                assert await call == b"late"
                await aio_wait_until(lambda: server.tracked.open_calls == 0)


async def test_an_aio_request_that_arrives_before_its_call_is_ended_is_served(timer):
    tasks, arrived, answer = [], asyncio.Event(), asyncio.Event()

    async def serve(request, context):
        await answer.wait()
        return request

    def delaying(loop, coroutine, **options):
        """Start the tasks of `rpcwheel.idle.aio` only when the request has arrived."""
        code = getattr(coroutine, "cr_code", None)
        if code is None or code.co_filename != rpcwheel.idle.aio.__file__:
            return asyncio.Task(coroutine, loop=loop, **options)

        async def delayed():
            await arrived.wait()
            return await coroutine

        tasks.append(asyncio.Task(delayed(), loop=loop, **options))
        return tasks[-1]

    async with idle_server(timer) as server, server.channel() as channel:
        server.add("Serve", grpc.unary_unary_rpc_method_handler(serve))
        with closing(server.detect(None, request_timeout=30)):
            call = channel.stream_unary("/test.Idle/Serve")(timeout=WAIT_S)
            await aio_wait_until(lambda: server.waiting_calls() == 1)
            asyncio.get_running_loop().set_task_factory(delaying)
            await server.advance_until(lambda: tasks)
            await call.write(b"x")
            await call.done_writing()
            await aio_wait_until(lambda: server.waiting_calls() == 0)
            arrived.set()
            await asyncio.gather(*tasks)
            answer.set()
            assert await call == b"x"


@pytest.mark.parametrize("missing", ["RPCState", "_ServicerContext"])
async def test_an_aio_request_timeout_that_has_no_effect_with_this_grpcio_is_reported_once(
    timer, events, monkeypatch, missing
):
    monkeypatch.delattr(cygrpc, missing)
    async with idle_server(timer) as server, server.channel() as channel:
        with closing(server.detect(None, request_timeout=30)):
            call = channel.stream_unary("/test.Idle/await_call")()
            await aio_wait_until(lambda: server.waiting_calls() == 1)
            await server.advance_until(lambda: events_of(events, IdleDetectionLimited))
            await server.advance(30)
            assert limits_reported(events) == [NO_EFFECT]
            await call.write(b"late")
            await call.done_writing()
            assert await call == b"late"
