"""Behavior of `grpc` and `grpc.aio` servers that rpcwheel works around or needs.

A canary passes as long as grpcio behaves in this way. If one fails, grpcio has changed: its
docstring names the code of rpcwheel that is then wrong or no longer needed. Delete its row in
docs/grpcio.md too.
"""

import asyncio
import contextlib
import contextvars
import json
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
from grpc._common import STATUS_CODE_TO_CYGRPC_STATUS_CODE as CORE_CODES
from grpc._server import _abort as abort

from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import since
from fixtures.programs import run_program
from fixtures.shop import FOR_EVER
from fixtures.small_servers import METHOD, aio_serving, serving
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel._grpc.handlers import context_with_code
from rpcwheel.limit.executor import CANCELED

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


def test_a_stream_is_open_until_python_has_freed_its_call():
    """The executor of a limit leaves no circle of references that keeps an ended call."""
    kept = []

    def handler(request, context):
        kept.append(context)
        return request

    options = [("grpc.max_concurrent_streams", 2)]
    with serving(unary(handler), options=options) as target, channel_to(target) as channel:
        call = channel.unary_unary(METHOD)
        with pytest.raises(grpc.RpcError) as refused:
            _ = [call(b"x", timeout=WAIT_S) for _ in range(4)]  # one more than the option says
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        kept.clear()
        assert call(b"x", timeout=WAIT_S) == b"x"


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


async def test_an_aio_server_encodes_a_str_before_its_serializer_gets_it():
    """Nothing of rpcwheel; a generic handler with JSON gets other types than on a `grpc.server`."""
    seen = []

    def serialize(response):
        seen.append(response)
        return b""

    async def answer(request, context):
        return "text"

    async with aio_serving(unary(answer, response_serializer=serialize)) as target:
        await aio_call(target)
    with serving(unary(lambda request, context: "text", response_serializer=serialize)) as target:
        call(target)
    assert seen == [b"text", "text"]


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


class Submitting(ThreadPoolExecutor):
    """The executor of a server: calls `act` with the event, the state and the context of a call."""

    def submit(self, fn, /, *args, **kwargs):
        ended = Future()

        def run():
            super(Submitting, self).submit(fn, *args, **kwargs).add_done_callback(ended.set_result)

        self.act(run, *args[1:3], fn.__self__)
        return ended

    def act(self, run, event, state, context):
        raise NotImplementedError


def test_a_server_submits_a_call_in_the_context_of_its_interceptors_with_its_deadline():
    """limit/executor.py: `submit` looks there for the call, `_deadline_ns` for its deadline."""
    left, contexts = [], []

    class Pool(Submitting):
        def act(self, run, event, state, context):
            contexts.append(context)
            left.append(event.call_details.deadline - time.time())
            run()

    mark = Before(lambda: SERVED_BY.set("the interceptor"))
    with serving(unary(lambda request, _: request), interceptors=[mark], executor=Pool) as target:
        assert call(target, timeout=WAIT_S) == b"x"
        assert call(target, timeout=None) == b"x"
    assert [context[SERVED_BY] for context in contexts] == ["the interceptor"] * 2
    assert 0 < left[0] <= WAIT_S * 1.01  # gRPC rounds a timeout up
    assert left[1] > 100 * FOR_EVER


def test_the_state_of_a_call_that_waits_for_a_thread_says_that_it_was_canceled():
    """limit/executor.py: `_run` does not take the time of such a call for that of a handler."""
    waiting = queue.SimpleQueue()

    class Pool(Submitting):
        def act(self, run, event, state, context):
            waiting.put((run, state))

    with serving(unary(naive), executor=Pool) as target, channel_to(target) as channel:
        future = channel.unary_unary(METHOD).future(b"x", timeout=WAIT_S)
        run, state = waiting.get(timeout=WAIT_S)
        assert state.client != CANCELED
        future.cancel()
        wait_until(lambda: state.client == CANCELED)
        run()


def test_a_call_that_was_submitted_can_be_ended_without_a_thread():
    """limit/executor.py: `_refuse` does it."""

    class Pool(Submitting):
        def act(self, run, event, state, context):
            with state.condition:
                state.trailing_metadata = (("key", "value"),)
                abort(state, event.call, CORE_CODES[grpc.StatusCode.RESOURCE_EXHAUSTED], b"busy")

    with serving(unary(naive), executor=Pool) as target, pytest.raises(grpc.RpcError) as caught:
        call(target)
    error = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
    assert ("key", "value") in error.trailing_metadata()


async def test_an_aio_interceptor_runs_in_the_task_of_the_call_before_its_request_is_read():
    """limit/aio_interceptor.py: calls wait there, and end with their tasks."""
    seen = []

    def note(name):
        seen.append((name, asyncio.current_task()))

    async def handler(request, context):
        note("handler")
        return request

    def read(request):
        note("request")
        return request

    served = unary(handler, request_deserializer=read)
    interceptor = AioBefore(lambda: note("interceptor"))
    async with aio_serving(served, interceptors=[interceptor]) as target:
        await aio_call(target)
    assert [name for name, _ in seen] == ["interceptor", "request", "handler"]
    assert len({task for _, task in seen}) == 1


async def test_a_call_that_its_client_cancels_ends_the_aio_interceptor_in_which_it_waits():
    """limit/aio_interceptor.py: `_wait` takes the call out of those that wait."""
    entered, ended = asyncio.Event(), asyncio.Event()

    class Waiting(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    async with aio_serving(unary(naive), interceptors=[Waiting()]) as target:
        waiting = asyncio.create_task(aio_call(target))
        await asyncio.wait_for(entered.wait(), WAIT_S)
        waiting.cancel()
        await asyncio.wait_for(ended.wait(), WAIT_S)
        await asyncio.gather(waiting, return_exceptions=True)


def test_a_server_uses_only_one_method_of_the_future_of_a_call():
    """limit/executor.py: `CallEnd` has only this one. gRPC counts a call until it is called."""

    class OnlyCallbacks:
        def add_done_callback(self, function):
            function(self)

    class Pool(ThreadPoolExecutor):
        def submit(self, fn, /, *args, **kwargs):
            event, state = args[1:3]
            with state.condition:
                abort(state, event.call, CORE_CODES[grpc.StatusCode.ABORTED], b"not now")
            return OnlyCallbacks()

    options = {"executor": Pool, "maximum_concurrent_rpcs": 1}
    with serving(unary(naive), **options) as target:
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match="not now"):
                call(target)


async def test_the_task_of_a_canceled_aio_call_is_not_canceled_but_knows_that_it_should_be():
    """limit/aio_interceptor.py: `_ended` looks at `cancelling()`, not at `cancelled()`."""
    tasks, entered, ended = [], asyncio.Event(), asyncio.Event()

    async def handler(request, context):
        tasks.append(asyncio.current_task())
        tasks[0].add_done_callback(lambda _: ended.set())
        entered.set()
        await asyncio.Event().wait()

    async with aio_serving(unary(handler)) as target:
        waiting = asyncio.create_task(aio_call(target))
        await asyncio.wait_for(entered.wait(), WAIT_S)
        waiting.cancel()
        await asyncio.wait_for(ended.wait(), WAIT_S)
        await asyncio.gather(waiting, return_exceptions=True)
    assert (tasks[0].cancelled(), tasks[0].cancelling()) == (False, 1)


async def test_an_aio_handler_that_sets_a_status_sends_an_empty_response_before_it():
    """limit/aio_interceptor.py: `_end` aborts, because clients of `grpc` deserialize it."""

    async def refuse(_, context):
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)

    def call(target):
        with grpc.insecure_channel(target, IMPATIENT) as channel:
            method = channel.unary_unary(METHOD, response_deserializer=json.loads)
            return method.future(b"x", timeout=WAIT_S).code()

    async with aio_serving(unary(refuse)) as target:
        assert await asyncio.to_thread(call, target) is grpc.StatusCode.INTERNAL


async def test_an_aio_server_ends_a_call_by_a_handler_of_another_kind_without_its_request():
    """limit/aio_interceptor.py: `_refusal` has a request stream, for calls of all kinds.

    gRPC raises the error of `abort` again if it is suppressed before the handler returns.
    """

    async def refuse(_, context):
        with contextlib.suppress(grpc.aio.AbortError):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")
        for response in ():
            yield response

    class Refuses(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            return grpc.stream_stream_rpc_method_handler(refuse)

    async with (
        aio_serving(unary(naive), interceptors=[Refuses()]) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        silent = channel.stream_unary(METHOD)(timeout=WAIT_S)  # never sends one
        for pending in (silent, channel.unary_unary(METHOD)(b"x", timeout=WAIT_S)):
            with pytest.raises(grpc.aio.AioRpcError, match="not now"):
                await pending
        stream = channel.unary_stream(METHOD)(b"x", timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="not now"):
            await stream.read()


WITHOUT_THREADS = """
import os, threading, grpc
from fixtures.small_servers import METHOD, serving

def refuse(thread):
    raise RuntimeError("can't start new thread")

threading.excepthook = lambda thread: print(thread.exc_value, flush=True)
with serving(grpc.unary_unary_rpc_method_handler(lambda request, context: request)) as target:
    call = grpc.insecure_channel(target).unary_unary(METHOD)
    start, threading.Thread.start = threading.Thread.start, refuse
    for _ in range(2):
        try:
            call(b"", timeout=1)
        except grpc.RpcError as error:
            print(error.code().name, flush=True)
        threading.Thread.start = start
    os._exit(0)
"""


def test_an_executor_without_threads_ends_its_server():
    """The executor of a server with a limit refuses such a call (limit/executor.py)."""
    output, errors = run_program(WITHOUT_THREADS)
    lines = ["can't start new thread", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"]
    assert output.splitlines() == lines, errors
