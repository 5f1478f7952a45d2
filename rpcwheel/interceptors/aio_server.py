"""The server interceptor for `grpc.aio`: sets the current deadline of each call that is served.

grpc.aio treats a behavior as `inspect` classifies it: it awaits a coroutine function, iterates over
an asynchronous generator, and runs a plain function in a thread pool. So each wrapper is of the
same class as the behavior. The first two run in a task for each call, so the deadline is unset
after the call.
"""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

import grpc

from rpcwheel._concurrency.loop import running_loop
from rpcwheel._grpc.handlers import LATE
from rpcwheel.call.server import ServerState, WatchedResponses
from rpcwheel.rpc import DEADLINE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.call.server import ServedMethod
    from rpcwheel.rpc import Kind
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]

__all__ = ["server_interceptors"]


def server_interceptors(
    policy: CallPolicy | None = None, *, timer: Timer | None = None
) -> list[grpc.aio.ServerInterceptor]:
    """Make the interceptors for `grpc.aio.server(interceptors=...)`; put them before all others.

    In a handler, `current_deadline()` is the deadline of its call, and it limits the calls that the
    handler makes. A call whose deadline has passed before its handler runs is refused with
    DEADLINE_EXCEEDED (event `DeadlineExceededBeforeStart`).

    Args:
        policy: Only its `timeout` is used: `timeout.timeout` limits the deadline of handlers, and
            calls that run longer than `timeout.slow_call_threshold` (a stream: until its end) are
            reported as `CallSlow`. None for no limits.
        timer: Any rpcwheel timer; None for `shared_timer()`, which is made when it is needed.
    """
    return [_Interceptor(ServerState(policy, timer=timer))]


class _Interceptor(grpc.aio.ServerInterceptor):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    # Not a coroutine function: a server of grpc would use the coroutine as a handler, which ends
    # the thread that accepts all calls. An exception here fails one call, and is logged.
    def intercept_service(  # type: ignore[override]  # grpc.aio takes None as grpc does
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Awaitable[grpc.RpcMethodHandler | None]:
        if running_loop() is None:
            raise TypeError(
                "these interceptors are for grpc.aio.server(), and this is a grpc.server(); use "
                "rpcwheel.interceptors.server_interceptors, or rpcwheel.Kit"
            )
        return self._intercepted(continuation, handler_call_details)

    async def _intercepted(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        return self._state.wrap(handler, details.method, _wrapped)


def _wrapped(kind: Kind, behavior: Behavior, served: ServedMethod) -> Behavior:
    """Wrap a behavior in one of the same class; the order of the checks is that of grpc.aio."""
    if inspect.iscoroutinefunction(behavior):
        return _awaited(behavior, served)
    if inspect.isasyncgenfunction(behavior):
        return _generating(behavior, served)
    return (_iterating if kind.streams_responses else _plain)(behavior, served)


def _awaited(behavior: Behavior, served: ServedMethod) -> Behavior:
    """Wrap a coroutine function, which may use `context.read()` and `context.write()`."""

    async def serve(request: object, context: grpc.aio.ServicerContext[object, object]) -> object:
        if not served.begin(context):
            await _refuse(context)
        timeout = served.watch()
        if timeout is None:
            return await behavior(request, context)
        try:
            return await behavior(request, context)
        finally:
            timeout.cancel()

    return serve


def _generating(behavior: Behavior, served: ServedMethod) -> Behavior:
    async def serve(
        request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[object, None]:
        if not served.begin(context):
            await _refuse(context)
        timeout = served.watch()
        responses: AsyncGenerator[object, None] = behavior(request, context)
        try:
            async for response in responses:
                yield response
        finally:
            if timeout is not None:
                timeout.cancel()
            await responses.aclose()

    return serve


def _plain(behavior: Behavior, served: ServedMethod) -> Behavior:
    """Wrap a plain function, which grpc.aio runs in a pool without a context for each call."""

    def serve(request: object, context: grpc.ServicerContext) -> object:
        before = DEADLINE.get()
        timeout = None
        try:
            if not served.begin(context):
                _mark_refused(context)
                return None
            timeout = served.watch()
            return behavior(request, context)
        finally:
            DEADLINE.set(before)
            if timeout is not None:
                timeout.cancel()

    return serve


def _iterating(behavior: Behavior, served: ServedMethod) -> Behavior:
    """Wrap a plain function with a stream of responses: called on the loop, iterated in a pool."""

    def serve(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        own = copy_context()
        if not own.run(served.begin, context):
            _mark_refused(context)
            return iter(())
        timeout = served.watch()
        try:
            responses: Iterator[object] = own.run(iter, own.run(behavior, request, context))
        except BaseException:
            if timeout is not None:
                timeout.cancel()
            raise
        return _Responses(partial(own.run, next, responses), timeout, _current_task())

    return serve


class _Responses(WatchedResponses):
    """The responses of a blocking handler, each produced in the context of the call.

    They end when the call has ended. Otherwise the thread would block forever: it puts a response
    into a queue that no coroutine reads (`generator_to_async_generator`, grpcio 1.85). That still
    happens if the client cancels the call before it has read an earlier response.
    """

    __slots__ = ("_task",)

    def __init__(
        self,
        step: Callable[[], object],
        timeout: Timeout | None,
        task: asyncio.Task[object] | None,
    ) -> None:
        super().__init__(step, timeout)
        self._task = task
        if task is not None:
            task.add_done_callback(lambda _: self.unwatch())

    def __next__(self) -> object:
        response = None if self._call_has_ended() else super().__next__()
        if not self._call_has_ended():
            return response
        self._step = iter(()).__next__  # releases the handler
        raise StopIteration

    def _call_has_ended(self) -> bool:
        return self._task is not None and self._task.done()


def _current_task() -> asyncio.Task[object] | None:
    """Return the task of the call; None if an outer interceptor is a generator, run in a pool."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def _refuse(context: grpc.aio.ServicerContext[object, object]) -> None:
    """End the call; raises, as `abort` does."""
    try:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
    except grpc.aio.InternalError:  # the client has ended the call (grpcio 1.85)
        raise asyncio.CancelledError from None  # other exceptions are logged as handler errors


def _mark_refused(context: grpc.ServicerContext) -> None:
    """Set the status for when the handler returns; `abort` would block this thread for the loop."""
    context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
    context.set_details(LATE)
