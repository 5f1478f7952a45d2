"""A plain function of a grpc.aio server that answers with a stream, and whose client has left."""

import asyncio
import threading

import grpc
import pytest
from scenarios.served import STREAMS, begin, handler

from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import aio_serving
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.interceptors._aio_server import server_interceptors


class TellingOfTheEnd(grpc.aio.ServerInterceptor):
    """Has `over` called at the end of the call's task, before all who asked for that later."""

    def __init__(self, over):
        self.over = over

    async def intercept_service(self, continuation, details):
        asyncio.current_task().add_done_callback(self.over)
        return await continuation(details)


@pytest.mark.parametrize("kind", STREAMS)
async def test_its_thread_is_given_back(kind):
    """Without the interceptor the thread waits for ever; the pool would not shut down."""
    gone, closed = threading.Event(), threading.Event()

    def behavior(request, context):
        try:
            yield b"first"
            assert gone.wait(WAIT_S)
            yield b"for nobody"
        finally:
            closed.set()

    def over(_task):
        gone.set()
        closed.wait(WAIT_S)  # the loop has not told anybody else yet

    interceptors = [TellingOfTheEnd(over), *server_interceptors()]
    async with (
        aio_serving(handler(kind, behavior), interceptors=interceptors) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        assert await call.read() == b"first"
        call.cancel()
        await aio_wait_until(closed.is_set)
    await asyncio.get_running_loop().shutdown_default_executor()
