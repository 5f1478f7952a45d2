"""Calls of a grpc.aio server: how the detector ends them, their contexts and their streams."""

import asyncio
import logging
import threading

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import complaints
from fixtures.idle_server import snapshot_of
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.idle.aio import ConnectionTable

METHOD = "/test.Calls/Call"
ONE, DOWN = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
DETAILS = "closed by the server: for a test"


class Serving:
    """A server with one handler behind a table; `end` ends the call in flight."""

    def __init__(self, handler) -> None:
        self.table = ConnectionTable()
        self._server = grpc.aio.server(interceptors=[self.table])
        service = grpc.method_handlers_generic_handler("test.Calls", {"Call": handler})
        self._server.add_generic_rpc_handlers([service])
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self):
        await self._server.start()
        target = f"127.0.0.1:{self._port}"
        self.channel = grpc.aio.insecure_channel(target, options=IMPATIENT)
        return self

    async def __aexit__(self, *_) -> None:
        await self.channel.close()
        await self._server.stop(None)

    def calls(self):
        return [call for entry in self.table._table.entries() for call in entry.calls]

    async def end(self) -> None:
        await aio_wait_until(self.calls)
        (call,) = self.calls()
        threads = [threading.Thread(target=call.finish, args=(DETAILS,)) for _ in range(3)]
        for thread in threads:
            thread.start()
            thread.join(WAIT_S)


class Ended(asyncio.Event):
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
async def test_the_client_gets_the_status_and_the_handler_is_cancelled(index, caplog):
    ended, reported = Ended(), complaints()
    behavior, kind = list(styles(ended).items())[index]
    async with Serving(kind(behavior)) as serving:
        if kind is ONE:
            call = serving.channel.unary_unary(METHOD)(b"")
        else:
            call = serving.channel.unary_stream(METHOD)(b"")
            assert await call.read() == b"open"
            await aio_wait_until(lambda: snapshot_of(serving.table._table)[0].messages_out)
        await serving.end()
        assert (await call.code(), await call.details()) == (grpc.StatusCode.UNAVAILABLE, DETAILS)
        await asyncio.wait_for(ended.wait(), WAIT_S)
        await aio_wait_until(lambda: not serving.calls())
    assert not reported
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_a_call_that_has_ended_can_be_ended_again():
    async def echo(request, context):
        seen.append(next(iter(serving.calls())))
        return request

    seen = []
    async with Serving(ONE(echo)) as serving:
        assert await serving.channel.unary_unary(METHOD)(b"x") == b"x"
        await aio_wait_until(lambda: not serving.calls())
        for _ in range(3):
            seen[0].finish(DETAILS)
        assert await serving.channel.unary_unary(METHOD)(b"y") == b"y"


async def test_calls_can_be_ended_at_any_moment():
    """What a call holds in gRPC is freed when its task has ended; to use it later would crash."""

    async def work(request, context):
        await asyncio.sleep(int(request) / 1e4)
        return request

    async with Serving(ONE(work)) as serving:
        calls = []
        for number in range(300):
            calls.append(serving.channel.unary_unary(METHOD)(str(number % 20).encode()))
            await asyncio.sleep(0)
            for call in serving.calls()[::2]:
                call.finish(DETAILS)
            if number % 3 == 0:
                calls[-1].cancel()
        codes = {await call.code() for call in calls}
        assert codes <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        }
        assert grpc.StatusCode.OK in codes
        await aio_wait_until(lambda: not serving.calls())


async def test_a_plain_function_in_a_pool_is_not_ended():
    gate = threading.Event()

    def plain(request, context):
        gate.wait(WAIT_S)
        return request

    async with Serving(ONE(plain)) as serving:
        call = serving.channel.unary_unary(METHOD)(b"x")
        await serving.end()
        gate.set()
        assert await call == b"x"


async def test_a_plain_generator_ends_when_its_client_leaves():
    asked, gate, made, closed = threading.Event(), threading.Event(), [], []

    def plain(request, context):
        yield b"open"
        asked.set()
        gate.wait(WAIT_S)
        try:
            for number in range(100):
                made.append(number)
                yield b"more"
        finally:
            closed.append(True)

    async with Serving(DOWN(plain)) as serving:
        call = serving.channel.unary_stream(METHOD)(b"")
        assert await call.read() == b"open"
        await aio_wait_until(asked.is_set)
        call.cancel()
        await aio_wait_until(lambda: not serving.calls())
        gate.set()
        await aio_wait_until(lambda: closed)
        assert made == [0]


async def test_a_context_behaves_as_grpcs_own():
    gone = asyncio.Event()

    async def serve(request, context):
        context.add_done_callback(lambda it: (given.append(it is context), gone.set()))
        context.set_trailing_metadata((("a", "b"),))
        given.append(context.peer() == snapshot_of(serving.table._table)[0].peer)
        given.append(context.time_remaining() > 5)
        with pytest.raises(AttributeError):
            context.nothing  # noqa: B018
        with pytest.raises(AttributeError):
            context.mine = 1  # grpc's own takes nothing either
        await context.write(request)

    given = []
    async with Serving(DOWN(serve)) as serving:
        call = serving.channel.unary_stream(METHOD)(b"x", timeout=WAIT_S)
        assert await call.read() == b"x"
        assert await call.code() is grpc.StatusCode.OK
        assert (await call.trailing_metadata())["a"] == "b"
        await asyncio.wait_for(gone.wait(), WAIT_S)
    assert given == [True, True, True]
