"""The limit of a server of `grpc.aio`: blocking handlers, handlers that compute, the task's end."""

import asyncio
import gc
import time
from collections import Counter
from contextlib import AsyncExitStack

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT, aio_running, unary_service
from fixtures.limited_servers import LONG_S
from fixtures.small_servers import METHOD
from fixtures.waiting import WAIT_S, Gate, aio_wait_until, wait_until
from fixtures.worlds import only_aio
from rpcwheel.aio import Kit
from rpcwheel.limit import LimitPolicy
from rpcwheel.telemetry import components

ONE = LimitPolicy(max_concurrent=1, max_wait=LONG_S)


@pytest.fixture
async def serve():
    """Serves a function with a limit; returns the function of a client, and the limit."""
    async with AsyncExitStack() as opened:

        async def start(function, **settings):
            kit = await opened.enter_async_context(Kit(**settings))
            service, interceptors = unary_service(METHOD, function), kit.server_interceptors()
            running = aio_running(service, interceptors=interceptors)
            server = await opened.enter_async_context(running)
            channel = grpc.aio.insecure_channel(server.target, options=IMPATIENT)
            await opened.enter_async_context(channel)
            return channel.unary_unary(METHOD), components.of_kind("limit")[-1]

        yield start


@pytest.mark.parametrize("is_canceled", [False, True])
async def test_a_blocking_handler_counts_until_its_function_has_returned(serve, is_canceled):
    """If its call ends before, `grpc.aio` does not stop it: it runs on a thread."""
    gate = Gate()
    call, limit = await serve(lambda request, _: gate(request), limit=ONE)
    first = call(b"first", timeout=WAIT_S)
    await aio_wait_until(gate.entered.is_set)
    second = call(b"second", timeout=WAIT_S)
    await aio_wait_until(lambda: limit.status().waiting == 1)
    if is_canceled:
        first.cancel()
        await asyncio.sleep(0.1)  # in this time, the server notices that
    assert (limit.status().running, limit.status().waiting) == (1, 1)
    gate.opened.set()
    assert await second == b"second"
    assert is_canceled or await first == b"first"
    await aio_wait_until(lambda: limit.status().running == 0)


async def test_calls_run_although_handlers_compute_all_the_time(serve):
    """Before each handler, gRPC accepts what has arrived."""

    async def handler(request, _context):
        ends_at = time.thread_time() + 0.03
        while time.thread_time() < ends_at:
            pass
        return request

    call, limit = await serve(handler, limit=ONE)
    requests = [b"%d" % number for number in range(8)]
    calls = [call(request, timeout=WAIT_S) for request in requests]
    assert await asyncio.gather(*calls) == requests
    await aio_wait_until(lambda: limit.status().running == 0)


async def test_refused_calls_leave_no_more_garbage_than_others(serve):
    """What the garbage collector has to delete under overload stops the loop for up to 80 ms."""

    async def handler(request, _context):
        return request

    call, _ = await serve(handler, limit=LimitPolicy(max_concurrent=1, rate=0.001))
    assert await call(b"x", timeout=WAIT_S) == b"x"
    codes = []

    async def refuse(calls):
        for _ in range(calls):
            refused = call(b"x", timeout=WAIT_S)
            codes.append(await refused.code())

    await refuse(2)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await refuse(20)
        gc.collect()
        kinds = Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 22
    assert not {"RPCState", "_ServicerContext", "AbortError", "frame"} & kinds.keys()


@only_aio
def test_an_interceptor_before_that_fails_leaves_no_call_counted(limited):
    """The call ends with its task, also if it never gets to its handler."""

    class Failing(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            await continuation(details)
            raise ValueError("not today")

    server = limited(before=(Failing(),), limit=ONE)
    for _ in range(3):
        server.call(b"x").error()
    assert wait_until(server.is_idle)
