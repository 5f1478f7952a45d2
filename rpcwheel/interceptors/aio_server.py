"""The server interceptor for `grpc.aio`: sets the current deadline and criticality of each call.

A "behavior" is the function in a handler that implements a method. grpc.aio treats it as `inspect`
classifies it: it awaits a coroutine function, iterates over an asynchronous generator, and runs a
plain function in a thread pool. So each wrapper has the same form as its behavior. The deadline and
the criticality are context variables. The first two forms run in a task of the call, whose context
ends with it. The other wrappers set the variables in a context of their own, or restore them.

The interceptor itself runs in the task of the call too, and has the metadata. No wrapper reads that
of the context: after the task, its memory belongs to others (grpcio 1.85), and a function in the
pool may run for longer.
"""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.loop import running_loop
from rpcwheel._grpc.aio_serving import abort
from rpcwheel._grpc.handlers import (
    DEADLINE_PASSED,
    behavior_of,
    context_with_code,
    with_behavior,
)
from rpcwheel._grpc.interceptors import AIO_SERVER, Interceptors
from rpcwheel.call.criticality import read_criticality
from rpcwheel.rpc import CRITICALITY, DEADLINE
from rpcwheel.telemetry.call_counts import CountedMessages

from .serving import ServedStream, ServerState, early_code, served_code

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
    from contextvars import Context

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.rpc import Criticality, Kind
    from rpcwheel.timer.api import Timer

    from .serving import ServedMethod

    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


BLOCKS: Final = "_rpcwheel_blocks"
"""The attribute of a wrapper that grpc.aio runs, or over whose result it iterates, in a pool."""

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
        criticality = read_criticality(metadata, details.method)
        CRITICALITY.set(criticality)
        handler = await continuation(details)
        if handler is None:
            return None
        wrapped = self._state.wrap(handler, details.method, _wrap)
        behavior = behavior_of(wrapped)
        if not getattr(behavior, BLOCKS, False):
            return wrapped
        return with_behavior(wrapped, _with_criticality(behavior, criticality))


def _wrap(kind: Kind, behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a behavior in one of the same form; the order of the checks is that of grpc.aio."""
    if inspect.iscoroutinefunction(behavior):
        return _wrap_coroutine_function(behavior, method)
    if inspect.isasyncgenfunction(behavior):
        return _wrap_async_generator(behavior, method)
    wrap = _wrap_iterator if kind.streams_responses else _wrap_plain_function
    wrapped = wrap(behavior, method)
    setattr(wrapped, BLOCKS, True)
    return wrapped


def _with_criticality(behavior: Any, criticality: Criticality | None) -> Behavior:
    """Wrap a blocking behavior for one call: `CRITICALITY` has its value while it runs."""

    def serve(request: object, context: grpc.ServicerContext) -> object:
        before = CRITICALITY.get()
        CRITICALITY.set(criticality)
        try:
            return behavior(request, context)
        finally:
            CRITICALITY.set(before)

    return serve


def _wrap_coroutine_function(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a coroutine function; if it streams responses, it sends them by `context.write()`."""

    async def serve(request: object, context: grpc.aio.ServicerContext[object, object]) -> object:
        began_ns, timeout = method.begin(), None
        try:
            if not method.set_deadline(context):
                await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED)
            timeout = method.start_slow_call_timeout()
            response = await behavior(request, context)
        except BaseException as error:
            method.end(began_ns, timeout, context, error)
            raise
        method.end(began_ns, timeout, context)
        return response

    return serve


def _wrap_async_generator(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap an asynchronous generator function."""

    async def serve(
        request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[object, None]:
        stream = ServedStream(method, context)
        responses: AsyncGenerator[object, None] | None = None
        try:
            if not method.set_deadline(context):
                await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED)
            stream.start_timeout()
            responses = behavior(request, context)
            async for response in responses:
                yield response
        except BaseException as error:
            # After `GeneratorExit` the call has ended; the cleanup of the behavior may take long.
            stream.end(stream.code(error))
            raise
        finally:
            if responses is not None:
                await responses.aclose()
        stream.end(stream.code())

    return serve


def _wrap_plain_function(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a plain function, which grpc.aio runs in a pool without a context for each call."""

    def serve(request: object, context: grpc.ServicerContext) -> object:
        before = DEADLINE.get()
        began_ns, timeout, response = method.begin(), None, None
        try:
            if method.set_deadline(context):
                timeout = method.start_slow_call_timeout()
                response = behavior(request, context)
            else:
                _set_refused_status(context)
        except BaseException as error:
            method.end(began_ns, timeout, context, error, _blocking_code)
            raise
        finally:
            DEADLINE.set(before)
        method.end(began_ns, timeout, context, code_of=_blocking_code)
        return response

    return serve


def _wrap_iterator(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a plain function with a stream of responses: called on the loop, iterated in a pool."""

    def serve(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        own, task = copy_context(), _current_task()
        stream = ServedStream(method, context, partial(_blocking_code, task=task))
        try:
            if own.run(method.set_deadline, context):
                stream.start_timeout()
                responses = own.run(iter, own.run(behavior, request, context))
            else:
                _set_refused_status(context)
                responses = iter(())
        except BaseException as error:
            stream.end(stream.code(error))
            raise
        return _Responses(responses, stream, own, task)

    return serve


class _Responses(CountedMessages):
    """The responses of a blocking behavior, each produced in the context of the call.

    They end when the call has ended. Otherwise the thread would block forever: it puts a response
    into a queue that no coroutine reads (`generator_to_async_generator`, grpcio 1.85). Known limit:
    if the client cancels the call while a response is in that queue, the thread stays blocked.
    """

    def __init__(
        self,
        responses: Iterator[object],
        stream: ServedStream,
        own: Context,
        task: asyncio.Task[object] | None,
    ) -> None:
        super().__init__(responses, stream, stream.code)
        self._own = own
        self._task = task
        if task is not None:
            task.add_done_callback(stream.end_early)

    def __next__(self) -> object:
        if not self._call_has_ended():
            response: object = self._own.run(super().__next__)
            if not self._call_has_ended():
                return response
        self._messages = iter(())  # drops the iterator of the behavior, which may run cleanup code
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
