"""The server interceptor of `grpc.aio`: classes of handlers, tasks, generators, thread pools."""

import asyncio
import threading
from contextvars import ContextVar

import grpc
import pytest
from scenarios.served import ROUNDED, aio_ask, answering, begin, handler

from fixtures.call_counts import codes_of
from fixtures.grpc_servers import IMPATIENT
from fixtures.handlers import left, seconds, wrapping
from fixtures.small_servers import METHOD, aio_serving
from fixtures.waiting import WAIT_S, Gate, aio_wait_until
from rpcwheel.call import CallPolicy, Criticality, DeadlinePolicy, current_criticality
from rpcwheel.events import CallSlow
from rpcwheel.interceptors.aio import server_interceptors
from rpcwheel.rpc import CRITICALITY_KEY
from rpcwheel.timer import AsyncWheelTimer

LOOKED_AT = ContextVar("looked_at", default=None)


class EndedByItsClient:
    """The context of a call whose client ends it between its deadline and its refusal."""

    def time_remaining(self):
        return 0.0

    async def abort(self, *_):
        raise grpc.aio.InternalError("execute_batch failed")


async def test_a_refused_call_that_its_client_has_ended_is_not_logged_as_an_error():
    async def continuation(_):
        return grpc.unary_unary_rpc_method_handler(behavior)

    async def behavior(request, context):
        raise AssertionError("the deadline has passed")

    (interceptor,) = server_interceptors()
    details = type("Details", (), {"method": "/test.Small/Call", "invocation_metadata": ()})
    made = await interceptor.intercept_service(continuation, details)
    with pytest.raises(asyncio.CancelledError):
        await made.unary_unary(b"", EndedByItsClient())


async def test_a_plain_stream_sees_context_variables_of_outer_interceptors_on_any_thread():
    def wrap(behavior):
        def wrapped(request, context):
            LOOKED_AT.set("first")
            return behavior(request, context)

        return wrapped

    outer = wrapping("unary_stream", wrap, is_aio=True)
    made = handler("unary_stream", answering("unary_stream", lambda _context: LOOKED_AT.get()))
    async with aio_serving(made, interceptors=[outer, *server_interceptors()]) as target:
        assert await aio_ask(target, "unary_stream") == [b"'first'"]


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_blocking_handler_gets_the_criticality_without_the_metadata_of_its_context(kind):
    """It may run in the pool after its call, where grpc.aio has freed the metadata."""

    class WithoutMetadata:
        def __init__(self, context):
            self.time_remaining = context.time_remaining

    def wrap(behavior):
        def stream(request, context):
            yield from behavior(request, WithoutMetadata(context))

        def unary(request, context):
            return behavior(request, WithoutMetadata(context))

        return stream if kind == "unary_stream" else unary

    levels = []

    def look(context):
        levels.append(current_criticality())
        return left()

    made = handler(kind, answering(kind, look))
    metadata = ((CRITICALITY_KEY, "sheddable"),)
    around = wrapping(kind, wrap, is_aio=True)
    async with aio_serving(made, interceptors=[around, *server_interceptors()]) as target:
        answers = await aio_ask(target, kind, timeout=WAIT_S, metadata=metadata)
    assert 0 < seconds(answers) <= WAIT_S * ROUNDED
    assert levels == [Criticality.SHEDDABLE]


async def test_the_generator_of_a_handler_is_closed_with_its_wrapper(call_counts):
    """Not only when the garbage collector finds it; the call has ended before that."""
    (interceptor,) = server_interceptors()
    codes = []

    async def behavior(request, context):
        try:
            yield b"first"
        finally:
            codes.append(codes_of(call_counts.server))

    async def continuation(_details):
        return handler("unary_stream", behavior)

    made = await interceptor.intercept_service(continuation, type("", (), {"method": METHOD}))

    class Context:
        def time_remaining(self):
            return None

    answers = made.unary_stream(b"x", Context())
    assert await anext(answers) == b"first"
    await answers.aclose()
    assert codes == [{"CANCELLED": 1}]


async def test_a_timer_on_the_loop_of_the_server_may_be_used(events):
    gate = Gate()
    policy = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=0.01))
    made = handler("unary_unary", gate)
    async with (
        AsyncWheelTimer() as timer,
        aio_serving(made, interceptors=server_interceptors(policy, timer=timer)) as target,
    ):
        call = asyncio.create_task(aio_ask(target, "unary_unary"))
        await aio_wait_until(lambda: CallSlow(METHOD, "server", 0.01) in events)
        gate.opened.set()
        assert await call == [b"x"]


class TellingOfTheEnd(grpc.aio.ServerInterceptor):
    """Calls `over` at the end of the call's task, before done-callbacks that are added later."""

    def __init__(self, over):
        self.over = over

    async def intercept_service(self, continuation, details):
        asyncio.current_task().add_done_callback(self.over)
        return await continuation(details)


async def test_the_thread_of_a_plain_stream_is_released_after_its_client_has_canceled():
    """Without the interceptor the thread waits forever, and the pool can't shut down."""
    gone, closed = threading.Event(), threading.Event()

    def behavior(request, context):
        try:
            yield b"first"
            assert gone.wait(WAIT_S)
            yield b"not read"
        finally:
            closed.set()

    def over(_task):
        gone.set()
        closed.wait(WAIT_S)  # the loop has not run other callbacks yet

    interceptors = [TellingOfTheEnd(over), *server_interceptors()]
    async with (
        aio_serving(handler("unary_stream", behavior), interceptors=interceptors) as target,
        grpc.aio.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, "unary_stream")
        assert await call.read() == b"first"
        call.cancel()
        await aio_wait_until(closed.is_set)
    await asyncio.get_running_loop().shutdown_default_executor()
