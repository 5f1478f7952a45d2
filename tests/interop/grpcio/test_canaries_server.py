"""Behavior of `grpc` and `grpc.aio` servers that rpcwheel works around or needs.

A canary passes as long as grpcio behaves in this way. If one fails, grpcio has changed: its
docstring names the code of rpcwheel that is then wrong or no longer needed. Delete its row in
docs/grpcio.md too.
"""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import since
from fixtures.shop import FOR_EVER
from fixtures.small_servers import METHOD, Gate, aio_serving, serving
from fixtures.waiting import WAIT_S
from rpcwheel._grpc.handlers import context_with_code

unary = grpc.unary_unary_rpc_method_handler
SERVED_BY = contextvars.ContextVar("served_by", default="nobody")


class Before(grpc.ServerInterceptor):
    """Calls a function, then returns the handler, or the result of `wrap` for its function."""

    def __init__(self, act=lambda: None, wrap=lambda behavior: behavior) -> None:
        self.act, self.wrap = act, wrap

    def intercept_service(self, continuation, details):
        self.act()
        handler = continuation(details)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self.wrap(handler.unary_stream))
        return unary(self.wrap(handler.unary_unary))


class AioBefore(grpc.aio.ServerInterceptor):
    """The same for `grpc.aio`, with a change of the call details."""

    def __init__(self, act, change=lambda details: details) -> None:
        self.act, self.change = act, change

    async def intercept_service(self, continuation, details):
        self.act()
        return await continuation(self.change(details))


def naive(behavior):
    """A wrapper as most interceptors have it."""

    def wrapped(request, context):
        return behavior(request, context)

    return wrapped


def channel_to(target):
    return grpc.insecure_channel(target, options=IMPATIENT)


def call(target, request=b"x", timeout=WAIT_S):
    with channel_to(target) as channel:
        return channel.unary_unary(METHOD)(request, timeout=timeout)


async def aio_call(target, request=b"x", timeout=WAIT_S):  # noqa: ASYNC109 - the call's own
    async with grpc.aio.insecure_channel(target, options=IMPATIENT) as channel:
        return await channel.unary_unary(METHOD)(request, timeout=timeout)


def test_time_remaining_without_a_deadline_is_a_huge_number():
    """`time_left` in _grpc/handlers.py takes more than a lifetime for no deadline."""
    seen = []

    def look(request, context):
        seen.append(context.time_remaining())
        return request

    with serving(unary(look)) as target:
        call(target, timeout=None)
    assert seen[0] > 100 * FOR_EVER


async def test_time_remaining_of_an_aio_server_without_a_deadline_is_none():
    """`time_left` in _grpc/handlers.py takes None for no deadline."""
    seen = []

    async def look(request, context):
        seen.append(context.time_remaining())
        return request

    async with aio_serving(unary(look)) as target:
        await aio_call(target, timeout=None)
    assert seen == [None]


def test_a_handler_does_not_pass_its_deadline_on(shop):
    """The server interceptor sets `current_deadline()`, and client calls obey it."""

    def ask_further(request, context):
        with channel_to(shop.target) as channel:
            return channel.unary_unary("/test.Shop/UnaryUnary")(request)

    with serving(unary(ask_further)) as target:
        assert call(target, b"x", timeout=WAIT_S) == b"x"
    assert shop.calls[0].time_remaining is None


async def test_an_aio_handler_does_not_pass_its_deadline_on(shop):
    """The server interceptor sets `current_deadline()`, and client calls obey it."""

    async def ask_further(request, context):
        async with grpc.aio.insecure_channel(shop.target, options=IMPATIENT) as channel:
            return await channel.unary_unary("/test.Shop/UnaryUnary")(request)

    async with aio_serving(unary(ask_further)) as target:
        assert await aio_call(target, b"x", timeout=WAIT_S) == b"x"
    assert shop.calls[0].time_remaining is None


def test_a_slow_interceptor_delays_all_calls_of_its_server():
    """`intercept_service` of rpcwheel only wraps the handler, which runs in its own thread.

    All interceptors of a server run on the single thread that polls for events.
    """
    gates, threads = [Gate(), Gate()], []

    def wait():
        threads.append(threading.current_thread().name)
        gates[min(len(threads), 2) - 1](b"")

    with (
        serving(unary(lambda request, _: request), interceptors=[Before(wait)]) as target,
        channel_to(target) as channel,
    ):
        gates[1].opened.set()  # the second call meets no obstacle of its own
        futures = [channel.unary_unary(METHOD).future(b"x", timeout=WAIT_S)]
        assert gates[0].entered.wait(WAIT_S)
        futures.append(channel.unary_unary(METHOD).future(b"x", timeout=WAIT_S))
        with pytest.raises(grpc.FutureTimeoutError):
            futures[1].result(0.3)
        assert not gates[1].entered.is_set()
        gates[0].opened.set()
        assert [future.result(WAIT_S) for future in futures] == [b"x", b"x"]
    assert not any(name.startswith("grpc-server") for name in threads)


def test_interceptors_run_for_calls_that_are_then_refused():
    """`intercept_service` of rpcwheel counts nothing; calls are counted when the handler begins."""
    asked, gate = [], Gate()
    interceptor = Before(lambda: asked.append(1))
    handler = unary(lambda request, _: gate(request))
    with (
        serving(handler, interceptors=[interceptor], maximum_concurrent_rpcs=1) as target,
        channel_to(target) as channel,
    ):
        first = channel.unary_unary(METHOD).future(b"x", timeout=WAIT_S)
        assert gate.entered.wait(WAIT_S)
        refused = channel.unary_unary(METHOD).future(b"y", timeout=WAIT_S).exception()
        gate.opened.set()
        assert first.result(WAIT_S) == b"x"
    assert len(asked) == 2
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_wrapper_takes_a_handler_out_of_its_own_thread_pool():
    """_grpc/handlers.py copies the attributes of the function that it wraps."""

    def name_thread(request, context):
        return threading.current_thread().name.encode()

    with ThreadPoolExecutor(1, thread_name_prefix="own") as own:
        name_thread.experimental_thread_pool = own
        with serving(unary(name_thread)) as target:
            assert call(target).startswith(b"own")
        with serving(unary(name_thread), interceptors=[Before(wrap=naive)]) as target:
            assert call(target).startswith(b"grpc-server")


def test_a_wrapper_breaks_a_handler_that_answers_by_callback():
    """_grpc/handlers.py copies the attribute; `_pushing` in interceptors/server.py has `push`.

    `Health.Watch` is such a handler.
    """

    def push(request, context, on_next):
        on_next(request)
        on_next(None)

    push.experimental_non_blocking = True
    handler = grpc.unary_stream_rpc_method_handler(push)
    with serving(handler) as target, channel_to(target) as channel:
        assert list(channel.unary_stream(METHOD)(b"x", timeout=WAIT_S)) == [b"x"]
    with (
        serving(handler, interceptors=[Before(wrap=naive)]) as target,
        channel_to(target) as channel,
        pytest.raises(grpc.RpcError) as failed,
    ):
        list(channel.unary_stream(METHOD)(b"x", timeout=WAIT_S))
    assert failed.value.code() is grpc.StatusCode.UNKNOWN


def test_abort_raises_a_bare_exception():
    """rpcwheel does not classify the exceptions of handlers by their types."""
    raised = []

    def abort(request, context):
        try:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such order")
        except Exception as error:
            raised.append(error)
            raise

    with serving(unary(abort)) as target, pytest.raises(grpc.RpcError, match="no such order"):
        call(target)
    assert type(raised[0]) is Exception
    assert raised[0].args == ()


async def test_an_aio_server_calls_an_object_with_an_async_call_as_a_sync_handler():
    """`_wrapped` in interceptors/aio_server.py tests for it in the same way as grpcio."""

    class Handler:
        async def __call__(self, request, context):
            return request

    async def function(request, context):
        return request

    async with aio_serving(unary(function)) as target:
        assert await aio_call(target) == b"x"
    async with aio_serving(unary(Handler())) as target:
        with (
            pytest.warns(RuntimeWarning, match="never awaited"),
            pytest.raises(grpc.RpcError) as failed,
        ):
            await aio_call(target)
    assert failed.value.code() is grpc.StatusCode.UNKNOWN


@since(1, 85, 1, reason="(1.83.0 at least) it takes any")
async def test_an_aio_server_refuses_modified_call_details():
    """rpcwheel does not modify call details on a server."""

    class Details(grpc.HandlerCallDetails):
        method = METHOD
        invocation_metadata = ()

    async def echo(request, context):
        return request

    interceptor = AioBefore(lambda: None, change=lambda _: Details())
    async with aio_serving(unary(echo), interceptors=[interceptor]) as target:
        with pytest.raises(grpc.RpcError, match="TypeError"):
            await aio_call(target)


@pytest.mark.parametrize("make", [unary, grpc.stream_unary_rpc_method_handler])
def test_calls_of_a_sync_server_share_no_context_on_one_thread(make):
    """interceptors/server.py sets the deadline and does not reset it.

    If this fails, it must be reset at the end of a call, or the next call on the thread has it.
    """
    threads = set()

    def handler(request, context):
        threads.add(threading.get_ident())
        before = SERVED_BY.get()
        SERVED_BY.set("me")
        return before.encode()

    with serving(make(handler), workers=1) as target:
        assert [call(target), call(target)] == [b"nobody", b"nobody"]
    assert len(threads) == 1


async def test_calls_of_an_aio_server_share_no_context():
    """interceptors/aio_server.py sets the deadline and does not reset it."""
    both = asyncio.Barrier(2)

    async def handler(request, context):
        before = SERVED_BY.get()
        SERVED_BY.set(request.decode())
        await both.wait()
        return f"{before} {SERVED_BY.get()}".encode()

    async with aio_serving(unary(handler)) as target:
        answers = await asyncio.gather(aio_call(target, b"a"), aio_call(target, b"b"))
    assert answers == [b"nobody a", b"nobody b"]


async def test_the_context_of_a_blocking_aio_handler_has_no_code_but_refers_to_one_that_has():
    """_grpc/handlers.py: `context_with_code` looks for the context that has it."""
    codes = []

    def handler(request, context):
        context.set_code(grpc.StatusCode.ABORTED)
        codes.append(getattr(context, "code", None))
        codes.append(context_with_code(context).code())

    async with aio_serving(unary(handler)) as target:
        with pytest.raises(grpc.aio.AioRpcError):
            await aio_call(target)
    assert codes == [None, grpc.StatusCode.ABORTED]
