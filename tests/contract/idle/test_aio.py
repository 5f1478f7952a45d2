"""Idle connections of a grpc.aio server: which calls count, what is closed, what is listed."""

import asyncio
import gc
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.idle_aio_server import KINDS, STYLES, AioIdleServer, idle_server, use
from fixtures.idle_server import events_of
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import idle
from rpcwheel.events import ConnectionClosed, IdleCloseSkipped, IdleDetectionLimited
from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector
from rpcwheel.timer import ManualTimer

COUNTS = {"call": (1, 1), "down": (1, 3), "up": (2, 1), "both": (2, 2)}


# --- What is seen --------------------------------------------------------------------------------


async def test_messages_of_each_kind_and_style_are_counted():
    wrong = []
    for style in [style.__name__ for style in STYLES]:
        with ManualTimer() as timer:
            async with idle_server(timer) as server, server.channel() as channel:
                timer.advance(5)
                answers = await use(channel, style)
                assert b"".join(answers) in (b"1", b"111", b"12")
                await aio_wait_until(server.is_calm)
                one = server.connection()
                found = (one.messages_in, one.messages_out, one.calls_total, one.heartbeats_total)
                if found != (*COUNTS[style.rpartition("_")[2]], 1, 0):
                    wrong.append((style, found))
                assert one.idle_s == 0.0
                assert one.peer.startswith("ipv4:127.0.0.1:")
    assert not wrong


async def test_a_wrapped_handler_has_the_kind_and_name_of_the_original():
    table = ConnectionTable()
    for style in STYLES:
        handler = KINDS[style.__name__.rpartition("_")[2].capitalize()](style)

        async def give(_, handler=handler):
            return handler

        details = type("Details", (), {"method": "/a/" + style.__name__})
        made = await table.intercept_service(give, details)
        streams = (made.request_streaming, made.response_streaming)
        names = {
            (False, False): "unary_unary",
            (False, True): "unary_stream",
            (True, False): "stream_unary",
            (True, True): "stream_stream",
        }
        behavior = getattr(made, names[streams])
        for ask in (inspect.iscoroutinefunction, inspect.isasyncgenfunction):
            assert ask(behavior) == ask(style), (style, ask)
        assert behavior.__name__ == style.__name__


async def test_a_call_is_in_flight_until_it_ends(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        call = channel.unary_unary("/test.Idle/Wait")(b"")
        stream = channel.unary_stream("/test.Idle/Hold")(b"")
        assert await stream.read() == b"open"
        await aio_wait_until(lambda: server.connection().calls_in_flight == 2)
        assert server.connection().streams_in_flight == 1
        call.cancel()
        stream.cancel()
        await aio_wait_until(server.is_calm)


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
            for kind in ("_Call", "Task"):
                left = [one for one in gc.get_objects() if type(one).__name__ == kind]
                assert len(left) < 10, kind
        finally:
            gc.enable()


async def test_a_hidden_peer_is_reported_and_no_connection_is_closed(timer, events):
    class Hidden(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            handler = await continuation(details)

            async def serve(request, context):
                return await handler.unary_unary(request, object())

            return grpc.unary_unary_rpc_method_handler(serve)

    async with idle_server(timer, before=[Hidden()]) as server, server.channel() as channel:
        assert await use(channel, "await_call") == [b"1"]
        assert server.snapshot() == []
        async with server.detect() as detector:
            await detector.check()
            await aio_wait_until(lambda: events_of(events, IdleDetectionLimited))
        assert "context.peer() failed" in events_of(events, IdleDetectionLimited)[0].reason


async def test_a_handler_in_a_task_of_an_interceptor_is_in_flight_until_its_call_ends(timer):
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
        await aio_wait_until(lambda: server.contexts)  # it goes on in a task of its own
        assert server.connection().streams_in_flight == 1
        stream.cancel()
        await aio_wait_until(server.is_calm)


# --- The wrong world -----------------------------------------------------------------------------


def test_a_threaded_server_refuses_an_aio_table():
    with pytest.raises(TypeError, match=r"that of rpcwheel\.idle$"):
        ConnectionTable().intercept_service(lambda details: None, None)


def test_an_aio_detector_needs_a_running_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        IdleConnectionDetector(object(), connections=ConnectionTable())


# --- The detector --------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed(timer, events):
    async with idle_server(timer) as server, server.channel() as channel, server.detect():
        await use(channel, "await_call")
        await server.wait_until_quiet()
        peer = server.connection().peer
        await server.advance_until(lambda: events_of(events, ConnectionClosed))
        assert events_of(events, ConnectionClosed)[0].peer == peer
        await aio_wait_until(lambda: not server.snapshot())


async def test_a_call_ends_with_the_reason_and_its_handler_is_cancelled(timer):
    async with idle_server(timer) as server, server.channel() as channel:
        detector = server.detect(None, max_age=20, max_age_grace=1)
        call = channel.unary_unary("/test.Idle/Wait")(b"")
        await aio_wait_until(lambda: server.contexts)
        await server.wait_until_quiet(open_calls=1)
        await server.advance(30)
        await server.advance_until(lambda: server.ends)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "closed by the server: connection open for 20 s"
        await aio_wait_until(lambda: [type(end) for end in server.ends] == [asyncio.CancelledError])
        detector.close()


TRIES = (31, 0.1, 0.1)
"""The idle timeout passes, and the detector makes several attempts to close the connection."""


async def test_a_call_that_waits_for_a_blocked_loop_keeps_its_connection(timer, events):
    """gRPC has read its bytes, but no interceptor has seen it."""
    with ExitStack() as stack:
        async with idle_server(timer) as server, server.detect() as detector:
            target = f"127.0.0.1:{server.port}"
            channel = stack.enter_context(grpc.insecure_channel(target, options=IMPATIENT))
            method = channel.unary_unary("/test.Idle/await_call")
            first = method.future(b"1")
            await aio_wait_until(first.done)
            await server.wait_until_quiet()
            await detector.check()
            before = server.connection().bytes_in
            second = method.future(b"2")
            server.block_the_loop_until(lambda: server.bytes_in() > before)
            server.block_the_loop_and_advance(*TRIES)
            await aio_wait_until(second.done)
            assert second.code() is grpc.StatusCode.OK
    assert not events_of(events, ConnectionClosed)


async def test_a_call_whose_request_has_not_arrived_keeps_its_connection(timer, events):
    async with idle_server(timer) as server, server.channel() as channel:
        detector = server.detect()
        await use(channel, "await_call")
        await server.wait_until_quiet()
        await detector.check()
        before = server.connection().bytes_in
        call = channel.stream_unary("/test.Idle/await_call")()  # its headers, and no more
        await aio_wait_until(lambda: server.bytes_in() > before)
        await server.wait_until_quiet()
        for seconds in TRIES:
            await server.advance(seconds)
        await call.write(b"2")
        await call.done_writing()
        assert await call == b"2"
        detector.close()
    assert not events_of(events, ConnectionClosed)


async def test_a_call_that_a_blocked_loop_saw_late_keeps_its_connection(timer, events):
    """The time at which a call was seen is not the time of its arrival."""
    come = threading.Event()

    def requests():
        come.wait(WAIT_S)
        yield b"2"

    with ExitStack() as stack:
        async with idle_server(timer) as server, server.detect() as detector:
            target = f"127.0.0.1:{server.port}"
            channel = stack.enter_context(grpc.insecure_channel(target, options=IMPATIENT))
            first = channel.unary_unary("/test.Idle/await_call").future(b"1")
            await aio_wait_until(first.done)
            await server.wait_until_quiet()
            await detector.check()
            before = server.connection().bytes_in
            late = channel.stream_unary("/test.Idle/await_call").future(requests())
            server.block_the_loop_until(lambda: server.bytes_in() > before)
            server.block_the_loop_and_advance()
            for seconds in TRIES:
                await server.advance(seconds)
            come.set()
            await aio_wait_until(late.done)
            assert late.code() is grpc.StatusCode.OK
    assert not events_of(events, ConnectionClosed)


async def test_a_plain_function_that_waits_for_a_thread_keeps_its_connection(timer, events):
    """Its request has arrived, but no thread is free."""
    gate = threading.Event()

    def slow(request, context):
        gate.wait(WAIT_S)
        return request

    with ThreadPoolExecutor(1) as pool:
        async with idle_server(timer, migration_thread_pool=pool) as server:
            server.add("Slow", grpc.unary_unary_rpc_method_handler(slow))
            detector = server.detect()
            channels = [server.channel() for _ in range(2)]
            calls = [channel.unary_unary("/test.Idle/Slow")(b"x") for channel in channels]
            await aio_wait_until(lambda: server.waiting_calls() == 1)
            await server.wait_until_quiet(open_calls=1)
            await detector.check()
            assert len(await detector.connections()) == 2
            await server.advance(31)
            await server.advance_until(lambda: events_of(events, IdleCloseSkipped))
            gate.set()
            assert [await call for call in calls] == [b"x", b"x"]
            detector.close()
            for channel in channels:
                await channel.close()
    assert not events_of(events, ConnectionClosed)


async def test_refused_arguments_start_nothing(timer):
    server, table = grpc.aio.server(), ConnectionTable()
    threaded = grpc.server(ThreadPoolExecutor(1))
    for given, settings, text in (
        (threaded, {}, r"server must be what grpc\.aio\.server\(\) gave"),
        (None, {}, r"server must be what grpc\.aio\.server\(\) gave"),
        (
            server,
            {"connections": idle.ConnectionTable()},
            r"ConnectionTable of rpcwheel\.idle\.aio",
        ),
        (server, {"policy": "5"}, "policy must be an IdlePolicy"),
        (server, {"timer": 5}, "timer must be a WheelTimer"),
    ):
        with pytest.raises(TypeError, match=text):
            IdleConnectionDetector(given, **{"connections": table, "timer": timer} | settings)
    assert timer.pending == 0
    with pytest.warns(RuntimeWarning, match="cannot be distinguished or closed") as warned:
        detector = IdleConnectionDetector(
            server, connections=table, ports="unix:/run/x.sock", timer=timer
        )
    assert warned[0].filename == __file__
    detector.close()


async def test_detection_ends_with_the_server(timer):
    server = AioIdleServer(timer)
    detector = server.detect()
    assert await detector.check() == []
    assert not detector.closed  # the server has not started yet
    await server.server.start()
    await detector.check()
    assert not detector.closed
    await server.server.stop(None)
    await server.advance_until(lambda: detector.closed)
    assert await detector.check() == []
    assert timer.pending == 0


async def test_detection_ends_with_the_block_and_leaves_no_timeout(timer):
    async with idle_server(timer) as server:
        async with server.detect() as detector:
            assert timer.pending == 1
        assert detector.closed
        assert timer.pending == 0
        detector.close()
        again = server.detect()  # the table is free for another
        run_threads(*[again.close] * 8)
        assert again.closed
        assert timer.pending == 0
