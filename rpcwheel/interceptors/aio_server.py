"""The server interceptor for `grpc.aio`: sets the current deadline and criticality of each call.

A "behavior" is the function in a handler that implements a method. grpc.aio treats it as `inspect`
classifies it: it awaits a coroutine function, iterates over an asynchronous generator, and runs a
plain function in a thread pool. So each wrapper has the same form as its behavior. The deadline and
the criticality are context variables. The first two forms run in a task of the call, whose context
ends with it. The other wrappers set the variables in a context of their own, or restore them.

The interceptor itself runs in the task of the call too, and sets the criticality there: it has the
metadata already, while `context.invocation_metadata()` takes 1 to 4 µs each time (grpcio 1.85).
Only code on pool threads uses that.
"""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc

from rpcwheel._concurrency.loop import running_loop
from rpcwheel._grpc.aio_serving import abort
from rpcwheel._grpc.handlers import DEADLINE_PASSED, context_with_code
from rpcwheel._grpc.interceptors import AIO_SERVER, Interceptors
from rpcwheel.call.criticality import read_criticality
from rpcwheel.rpc import CRITICALITY, DEADLINE
from rpcwheel.telemetry.call_counts import CountedMessages

from .serving import (
    ServedCallEnd,
    ServerState,
    WatchedResponses,
    count_unary,
    early_code,
    served_code,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.rpc import Kind
    from rpcwheel.telemetry.call_counts import MethodCounts
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .serving import ServedMethod

    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


FOR_AIO: Final = (
    "these interceptors are for grpc.aio.server(); for a grpc.server() use "
    "rpcwheel.interceptors.server_interceptors, or rpcwheel.Kit"
)


def server_interceptors(
    policy: CallPolicy | None = None, *, timer: Timer | None = None
) -> list[grpc.aio.ServerInterceptor]:
    """Make the interceptors for `grpc.aio.server(interceptors=...)`; put them before all others.

    In a handler, `current_deadline()` is the deadline of its call, and it limits the calls that the
    handler makes; `current_criticality()` is that of its call, and its calls inherit it. A call
    whose deadline has passed before its handler runs is refused with DEADLINE_EXCEEDED (event
    `DeadlineExceededBeforeStart`).

    Args:
        policy: Only `timeout` and `limit` are used, those of methods too. The `timeout` limits the
            deadline of handlers, and calls that run longer than its `slow_call_threshold` (a
            stream: until its end) are reported as `CallSlow`. With a `limit`, calls wait until they
            may run, or are refused with RESOURCE_EXHAUSTED. None for neither.
        timer: Any rpcwheel timer; None for `shared_timer()`, which is made when it is needed.
    """
    state = ServerState(policy, timer=timer)
    interceptors: list[grpc.aio.ServerInterceptor] = [_ServerInterceptor(state)]
    limit = state.limit()
    if limit is not None:
        from rpcwheel.limit.aio_interceptor import LimitInterceptor

        interceptors.insert(0, LimitInterceptor(limit))
    return Interceptors(interceptors, AIO_SERVER, FOR_AIO)


class _ServerInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    # Deliberately not `async def`. If a list of the user's with this interceptor is given to a
    # `grpc.server()` by mistake, that server would take the coroutine for a handler, and the thread
    # that accepts its calls would end. An exception raised here fails only the one call, and is
    # logged.
    def intercept_service(  # type: ignore[override]  # grpc.aio takes None as grpc does
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Awaitable[grpc.RpcMethodHandler | None]:
        if running_loop() is None:
            raise TypeError(FOR_AIO)
        return self._intercept(continuation, handler_call_details)

    async def _intercept(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        # Details of another library's interceptor may have no metadata.
        metadata = getattr(details, "invocation_metadata", None)
        CRITICALITY.set(read_criticality(metadata, details.method))
        handler = await continuation(details)
        if handler is None:
            return None
        return self._state.wrap(handler, details.method, _wrap)


def _wrap(kind: Kind, behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a behavior in one of the same form; the order of the checks is that of grpc.aio."""
    if inspect.iscoroutinefunction(behavior):
        wrap, count = _wrap_coroutine_function, _count_coroutine_function
    elif inspect.isasyncgenfunction(behavior):
        wrap, count = _wrap_async_generator, _count_async_generator
    elif kind.streams_responses:
        wrap, count = _wrap_iterator, _count_iterator
    else:
        wrap, count = _wrap_plain_function, partial(count_unary, code_of=_blocking_code)
    wrapped = wrap(behavior, method)
    return wrapped if method.counts is None else count(wrapped, method.counts)


def _wrap_coroutine_function(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a coroutine function; if it streams responses, it sends them by `context.write()`."""

    async def serve(request: object, context: grpc.aio.ServicerContext[object, object]) -> object:
        if not method.set_deadline(context):
            await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED)
        timeout = method.start_slow_call_timeout()
        try:
            return await behavior(request, context)
        finally:
            if timeout is not None:
                timeout.cancel()

    return serve


def _wrap_async_generator(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap an asynchronous generator function."""

    async def serve(
        request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[object, None]:
        if not method.set_deadline(context):
            await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED)
        timeout = method.start_slow_call_timeout()
        responses: AsyncGenerator[object, None] = behavior(request, context)
        try:
            async for response in responses:
                yield response
        finally:
            if timeout is not None:
                timeout.cancel()
            await responses.aclose()

    return serve


def _wrap_plain_function(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a plain function, which grpc.aio runs in a pool without a context for each call."""

    def serve(request: object, context: grpc.ServicerContext) -> object:
        before = DEADLINE.get(), CRITICALITY.get()
        timeout = None
        try:
            if not method.set_current(context):
                _set_refused_status(context)
                return None
            timeout = method.start_slow_call_timeout()
            return behavior(request, context)
        finally:
            DEADLINE.set(before[0])
            CRITICALITY.set(before[1])
            if timeout is not None:
                timeout.cancel()

    return serve


def _wrap_iterator(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a plain function with a stream of responses: called on the loop, iterated in a pool."""

    def serve(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        own, task = copy_context(), _current_task()
        # On a pool thread, the context is not that of the call's task.
        set_current = method.set_deadline if task is not None else method.set_current
        if not own.run(set_current, context):
            _set_refused_status(context)
            return iter(())
        timeout = method.start_slow_call_timeout()
        try:
            responses: Iterator[object] = own.run(iter, own.run(behavior, request, context))
        except BaseException:
            if timeout is not None:
                timeout.cancel()
            raise
        return _Responses(partial(own.run, next, responses), timeout, task)

    return serve


class _Responses(WatchedResponses):
    """The responses of a blocking behavior, each produced in the context of the call.

    They end when the call has ended. Otherwise the thread would block forever: it puts a response
    into a queue that no coroutine reads (`generator_to_async_generator`, grpcio 1.85). Known limit:
    if the client cancels the call while a response is in that queue, the thread stays blocked.
    """

    __slots__ = ("_task",)

    def __init__(
        self,
        next_response: Callable[[], object],
        timeout: Timeout | None,
        task: asyncio.Task[object] | None,
    ) -> None:
        super().__init__(next_response, timeout)
        self._task = task
        if task is not None:
            task.add_done_callback(lambda _: self.cancel_timeout())

    def __next__(self) -> object:
        if not self._call_has_ended():
            response = super().__next__()
            if not self._call_has_ended():
                return response
        self.release_behavior()
        raise StopIteration

    def _call_has_ended(self) -> bool:
        return self._task is not None and self._task.done()


def _current_task() -> asyncio.Task[object] | None:
    """Return the task of the call; None on a pool thread.

    (Another interceptor may have wrapped the behavior in a generator function, which runs there.)
    """
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _set_refused_status(context: grpc.ServicerContext) -> None:
    """Set the status with which the call ends when the wrapper returns.

    `abort` waits for the loop: it would block a pool thread, and the loop's thread forever.
    """
    context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
    context.set_details(DEADLINE_PASSED)


# --- Counts ---


def _count_coroutine_function(behavior: Behavior, counts: MethodCounts) -> Behavior:
    async def serve(request: object, context: grpc.aio.ServicerContext[object, object]) -> object:
        began_ns = counts.begin()
        try:
            response = await behavior(request, context)
        except BaseException as error:
            counts.end(began_ns, served_code(context, error))
            raise
        counts.end(began_ns, served_code(context))
        return response

    return serve


def _count_async_generator(behavior: Behavior, counts: MethodCounts) -> Behavior:
    async def serve(
        request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[object, None]:
        end = ServedCallEnd(counts, context)
        responses: AsyncGenerator[object, None] = behavior(request, context)
        try:
            async for response in responses:
                yield response
        except BaseException as error:  # also `GeneratorExit`
            end.end(served_code(context, error))
            raise
        finally:
            await responses.aclose()
        end.end(served_code(context))

    return serve


def _count_iterator(behavior: Behavior, counts: MethodCounts) -> Behavior:
    def serve(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        end, task = ServedCallEnd(counts, context), _current_task()
        code = partial(_blocking_code, context, task=task)
        try:
            responses = behavior(request, context)
        except BaseException as error:
            end.end(code(error))
            raise
        if task is not None:
            task.add_done_callback(end.end_early)
        return CountedMessages(responses, end, code)

    return serve


def _blocking_code(
    context: object, error: BaseException | None = None, task: asyncio.Task[object] | None = None
) -> str:
    """Return the name of the status code of a call whose blocking behavior has ended.

    Args:
        context: The context of the call.
        error: What the behavior raised; None if it returned.
        task: The task of the call; None if it is not known. Then only the deadline ends it early.
    """
    early = early_code(context)
    if early == "DEADLINE_EXCEEDED" or (task is not None and task.done()):
        return early
    return served_code(context_with_code(context), error)
