"""The calls of a server of grpc.aio, as its table sees them, and the detector on its loop."""

import asyncio
import gc
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.idle_aio_server import STYLES, AioIdleServer, idle_server, use
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import idle
from rpcwheel._grpc.handlers import behavior_of
from rpcwheel.idle import peers
from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector
from rpcwheel.observe import ConnectionClosed, ConnectionKept, IdleLimited
from rpcwheel.timer import WheelTimer

on_linux = pytest.mark.skipif(not peers.SUPPORTED, reason="sockets are found on Linux only")

COUNTS = {"call": (1, 1), "down": (1, 3), "up": (2, 1), "both": (2, 2)}


def said(events, kind):
    return [event for event in events if isinstance(event, kind)]


async def passing(timer, look):
    """Let time pass until it comes true, and workers do what falls due."""
    while not look():
        timer.advance(1)
        await asyncio.sleep(0.005)


# --- What is seen --------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [style.__name__ for style in STYLES])
async def test_the_messages_of_each_kind_and_style_are_seen(timer, style):
    async with idle_server(timer) as server, server.channel() as channel:
        timer.advance(5)
        answers = await use(channel, style)
        assert b"".join(answers) in (b"1", b"111", b"12")
        await aio_wait_until(server.is_calm)
        one = server.connection()
        assert (one.messages_in, one.messages_out) == COUNTS[style.rpartition("_")[2]]
        assert (one.calls, one.heartbeats) == (1, 0)
        assert (one.first, one.last_read, one.last_write) == (5.0, 5.0, 5.0)
        assert one.peer.startswith("ipv4:127.0.0.1:")


async def test_handlers_keep_their_nature():
    table = ConnectionTable()

    async def seen(style):
        handler = AioIdleServer._handler(style)

        async def give(_):
            return handler

        details = type("Details", (), {"method": "/a/b"})
        return behavior_of(await table.intercept_service(give, details))

    for style in STYLES:
        for ask in (inspect.iscoroutinefunction, inspect.isasyncgenfunction):
            assert ask(await seen(style)) == ask(style), (style, ask)
        assert (await seen(style)).__name__ == style.__name__


async def test_a_call_is_open_while_it_runs_and_no_longer(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        call = channel.unary_unary("/test.Idle/Wait")(b"")
        stream = channel.unary_stream("/test.Idle/Hold")(b"")
        assert await stream.read() == b"open"
        await aio_wait_until(lambda: server.connection().calls_open == 1)
        assert server.connection().streams_open == 1
        call.cancel()
        stream.cancel()
        await aio_wait_until(server.is_calm)


async def test_heartbeats_are_told_by_method_and_by_metadata(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        with_settings = server.detect(heartbeats="/test.Idle/await_*")
        await use(channel, "await_call")
        assert (server.connection().calls, server.connection().heartbeats) == (0, 1)
        with_settings.change(heartbeats=())
        await use(channel, "await_call")
        call = channel.unary_unary("/test.Idle/plain_call")
        await call(b"", metadata=[("rpcwheel-heartbeat", "1")])
        assert (server.connection().calls, server.connection().heartbeats) == (1, 2)
        with_settings.close()


async def test_calls_leave_no_cycle_for_the_collector(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        await use(channel, "await_call")
        await aio_wait_until(server.is_calm)
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await use(channel, "await_call")
            await aio_wait_until(server.is_calm)
            for kind in ("Served", "Task"):
                left = [one for one in gc.get_objects() if type(one).__name__ == kind]
                assert len(left) < 10, kind
        finally:
            gc.enable()


async def test_an_interceptor_that_hides_who_calls_harms_no_call(timer, events):
    class Hidden(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            handler = await continuation(details)

            async def serve(request, context):
                return await handler.unary_unary(request, object())

            return grpc.unary_unary_rpc_method_handler(serve)

    async with idle_server(timer, before=[Hidden()]) as server, server.channel() as channel:
        assert await use(channel, "await_call") == [b"1"]
        assert server.table.snapshot() == ()
        async with server.detect() as detector:
            await detector.check()
            await aio_wait_until(lambda: said(events, IdleLimited))
        assert "context.peer() failed" in said(events, IdleLimited)[0].reason


async def test_a_handler_that_an_interceptor_runs_in_a_task_of_its_own_is_open_as_long(timer):
    class Apart(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            handler = await continuation(details)

            async def serve(request, context):
                answers = handler.unary_stream(request, context)
                while True:
                    yield await asyncio.create_task(answers.__anext__())

            return grpc.unary_stream_rpc_method_handler(serve)

    async with idle_server(timer, before=[Apart()]) as server, server.channel() as channel:
        stream = channel.unary_stream("/test.Idle/Hold")(b"")
        assert await stream.read() == b"open"
        await asyncio.sleep(0.05)
        assert server.connection().streams_open == 1
        stream.cancel()
        await aio_wait_until(server.is_calm)


# --- The wrong world -----------------------------------------------------------------------------


def test_a_threaded_server_is_told_which_table_to_take():
    with pytest.raises(TypeError, match=r"that of rpcwheel\.idle$"):
        ConnectionTable().intercept_service(lambda details: None, None)


async def test_a_table_of_the_other_world_is_refused():
    server = grpc.aio.server()
    with pytest.raises(TypeError, match=r"ConnectionTable of rpcwheel\.idle\.aio"):
        IdleConnectionDetector(server, connections=idle.ConnectionTable())


def test_a_detector_is_made_on_a_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        IdleConnectionDetector(object(), connections=ConnectionTable())


# --- The detector --------------------------------------------------------------------------------


@on_linux
async def test_an_idle_connection_is_closed_at_a_look_of_the_timers(timer, events):
    async with idle_server(timer) as server, server.channel() as channel, server.detect():
        await use(channel, "await_call")
        await aio_wait_until(server.is_calm)
        peer = server.connection().peer
        await asyncio.sleep(0.15)  # for the kernel it was used a moment ago
        await passing(timer, lambda: said(events, ConnectionClosed))
        assert said(events, ConnectionClosed)[0].peer == peer
        await aio_wait_until(lambda: not server.table.snapshot())


@on_linux
async def test_a_check_tells_what_is_idle(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        detector = server.detect(close="report")
        await use(channel, "await_call")
        await aio_wait_until(server.is_calm)
        assert await detector.check() == []
        timer.advance(31)
        (one,) = await detector.check()
        assert (one.peer, one.local_port) == (server.connection().peer, server.port)
        assert one.bytes_in > 0
        detector.close()
        assert await detector.check() == []


async def test_a_check_that_is_given_up_harms_nothing(timer, events):
    async with idle_server(timer) as server, server.detect() as detector:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(detector.check(), 0)
        assert await detector.check() == []
        assert events == []


@on_linux
@pytest.mark.parametrize("method", ["Wait", "Hold"])
async def test_what_is_open_ends_with_the_reason_and_its_handler_as_if_cancelled(timer, method):
    async with idle_server(timer) as server, server.channel() as channel:
        detector = server.detect(None, max_age=20, max_age_grace=1)
        kind = channel.unary_unary if method == "Wait" else channel.unary_stream
        call = kind(f"/test.Idle/{method}")(b"")
        await aio_wait_until(lambda: server.contexts)
        if method == "Hold":
            assert await call.read() == b"open"
        timer.advance(30)
        await detector.check()
        await asyncio.sleep(0.1)  # for what the server has said to be out
        await passing(timer, lambda: server.ends)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "closed by the server: connection open for 20 s"
        await aio_wait_until(lambda: [type(end) for end in server.ends] == [asyncio.CancelledError])
        detector.close()


@on_linux
async def test_a_call_that_waits_for_a_busy_loop_is_not_lost(events):
    """It has come in, but no handler has seen it, and the kernel has nothing to read any more."""
    with WheelTimer() as timer, ExitStack() as stack:
        async with idle_server(timer) as server, server.detect(0.4):
            target = f"127.0.0.1:{server.port}"
            channel = stack.enter_context(grpc.insecure_channel(target, options=IMPATIENT))
            method = channel.unary_unary("/test.Idle/await_call")
            first = method.future(b"1")
            await aio_wait_until(first.done)
            await asyncio.sleep(0.2)
            second = method.future(b"2")
            time.sleep(1.2)  # noqa: ASYNC251 - what this is about
            await aio_wait_until(second.done)
            assert second.code() is grpc.StatusCode.OK
            await aio_wait_until(lambda: said(events, ConnectionKept))


@on_linux
async def test_a_call_whose_request_is_on_its_way_is_not_lost():
    with WheelTimer() as timer:
        async with idle_server(timer) as server, server.channel() as channel:
            detector = server.detect(None)
            await use(channel, "await_call")
            call = channel.stream_unary("/test.Idle/await_call")()  # its headers, and no more
            await asyncio.sleep(0.2)
            detector.change(idle_timeout=0.4)
            await asyncio.sleep(1.0)
            await call.write(b"2")
            await call.done_writing()
            assert await call == b"2"
            detector.close()


@on_linux
async def test_a_call_that_a_late_loop_saw_and_whose_request_is_on_its_way_is_not_lost():
    """When it was seen says nothing of when it came."""
    come = threading.Event()

    def requests():
        come.wait(WAIT_S)
        yield b"2"

    with WheelTimer() as timer, ExitStack() as stack:
        async with idle_server(timer) as server, server.detect(None) as detector:
            target = f"127.0.0.1:{server.port}"
            channel = stack.enter_context(grpc.insecure_channel(target, options=IMPATIENT))
            first = channel.unary_unary("/test.Idle/await_call").future(b"1")
            await aio_wait_until(first.done)
            late = channel.stream_unary("/test.Idle/await_call").future(requests())
            time.sleep(0.5)  # noqa: ASYNC251 - what this is about
            await aio_wait_until(lambda: server.table._arriving)
            detector.change(idle_timeout=0.4)
            await asyncio.sleep(1.0)
            come.set()
            await aio_wait_until(late.done)
            assert late.code() is grpc.StatusCode.OK


@on_linux
async def test_a_plain_function_that_waits_for_its_pool_is_not_lost(events):
    """It has come in whole, but no thread is free to begin it."""
    gate = threading.Event()

    def slow(request, context):
        gate.wait(WAIT_S)
        return request

    with WheelTimer() as timer, ThreadPoolExecutor(1) as pool:
        table = ConnectionTable(timer=timer)
        server = grpc.aio.server(interceptors=[table], migration_thread_pool=pool)
        handler = grpc.unary_unary_rpc_method_handler(slow)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Idle", {"Slow": handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        detector = IdleConnectionDetector(server, 0.3, connections=table, ports=port, timer=timer)
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=IMPATIENT) for _ in range(2)
        ]
        calls = [channel.unary_unary("/test.Idle/Slow")(b"x") for channel in channels]
        await aio_wait_until(lambda: len(table._arriving) == 1 and table.open_calls == 1)
        assert table.coming_ago_ns(settled=True) > 0
        await aio_wait_until(lambda: said(events, ConnectionKept))
        gate.set()
        assert [await call for call in calls] == [b"x", b"x"]
        assert not table._arriving
        detector.close()
        for channel in channels:
            await channel.close()
        await server.stop(None)
    assert not said(events, ConnectionClosed)


async def test_a_threaded_server_is_refused():
    with pytest.raises(TypeError, match=r"server must be what grpc\.aio\.server\(\) gave"):
        IdleConnectionDetector(grpc.server(ThreadPoolExecutor(1)), connections=ConnectionTable())


async def test_that_unix_sockets_can_not_be_closed_is_said_where_the_detector_is_made(timer):
    async with idle_server(timer) as server:
        with pytest.warns(RuntimeWarning, match="can't be told apart, nor closed") as told:
            detector = IdleConnectionDetector(
                server.server, connections=server.table, ports="unix:/run/x.sock", timer=timer
            )
        assert told[0].filename == __file__
        detector.close()


async def test_it_ends_with_its_server(timer):
    async with idle_server(timer) as server:
        detector = server.detect()
        await detector.check()
        assert not detector.closed
    await passing(timer, lambda: detector.closed)
    assert timer.pending == 0


async def test_it_may_be_made_before_its_server_starts(timer):
    server = AioIdleServer(timer)
    detector = server.detect()
    assert await detector.check() == []
    assert not detector.closed
    await server.server.start()
    await detector.check()
    await server.server.stop(None)
    assert await detector.check() == []
    assert detector.closed


async def test_it_ends_with_the_block_and_leaves_nothing_on_the_timer(timer):
    async with idle_server(timer) as server:
        async with server.detect() as detector:
            assert timer.pending == 1
        assert detector.closed
        assert timer.pending == 0
        detector.close()
        async with server.detect():  # the table is free for another
            pass


async def test_many_threads_may_close_it_at_once(timer):
    async with idle_server(timer) as server:
        detector = server.detect()
        threads = [threading.Thread(target=detector.close) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert detector.closed
        assert timer.pending == 0
