"""The server interceptor of grpc.aio: every call that is served has its deadline at hand.

What a handler is, it stays: grpc.aio asks a behavior by `inspect` whether it is a coroutine
function, a generator of coroutines, or plain, and awaits, iterates or takes it to a thread. Each
call of the first two runs in a task of its own, and what is set in the task's context ends with it.
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

    In a handler, `current_deadline()` is the deadline of its call, and the calls that the handler
    makes get what is left of it. A call whose deadline passed before its handler could run is
    refused with DEADLINE_EXCEEDED (event `DeadlineExceededBeforeStart`).

    Args:
        policy: Only its `timeout` has an effect: `timeout.timeout` limits the deadline that
            handlers see, and calls that run longer than `timeout.slow_call_threshold` (a stream:
            until its end) are reported as `CallSlow`. None: no limits.
        timer: Any rpcwheel timer; None takes `shared_timer()` when one is needed.
    """
    return [_Interceptor(ServerState(policy, timer=timer))]


class _Interceptor(grpc.aio.ServerInterceptor):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    # No coroutine function: a server of grpc would take the coroutine for a handler, which ends the
    # thread that serves all calls. What is raised here fails the one call, and is logged.
    def intercept_service(  # type: ignore[override]  # grpc.aio takes None as grpc does
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Awaitable[grpc.RpcMethodHandler | None]:
        if running_loop() is None:
            raise TypeError(
                "these interceptors are for grpc.aio.server(), and this is a grpc.server(); use "
                "those of rpcwheel.Kit, or of rpcwheel.interceptors"
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
    """The behavior in one of the same nature; asked in the same order as grpc.aio asks."""
    if inspect.iscoroutinefunction(behavior):
        return _awaited(behavior, served)
    if inspect.isasyncgenfunction(behavior):
        return _generating(behavior, served)
    return (_iterating if kind.streams_responses else _plain)(behavior, served)


def _awaited(behavior: Behavior, served: ServedMethod) -> Behavior:
    """For one answer, and for streams in the style of `context.read()` and `context.write()`."""

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
        answers: AsyncGenerator[object, None] = behavior(request, context)
        try:
            async for answer in answers:
                yield answer
        finally:
            if timeout is not None:
                timeout.cancel()
            await answers.aclose()

    return serve


def _plain(behavior: Behavior, served: ServedMethod) -> Behavior:
    """For a function that grpc.aio runs in a pool, whose threads have one context for all calls."""

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
    """For a plain function that answers with a stream: called on the loop, iterated in a pool."""

    def serve(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        own = copy_context()
        if not own.run(served.begin, context):
            _mark_refused(context)
            return iter(())
        timeout = served.watch()
        try:
            answers: Iterator[object] = own.run(iter, own.run(behavior, request, context))
        except BaseException:
            if timeout is not None:
                timeout.cancel()
            raise
        return _Steps(partial(own.run, next, answers), timeout, _task())

    return serve


class _Steps(WatchedResponses):
    """The responses of a blocking handler, each made in the call's own context, on any thread.

    They end with the call. Otherwise the thread would queue a response that no coroutine reads, and
    the next one would block it for ever (`generator_to_async_generator`, grpcio 1.85). That still
    happens if the client cancels while it has not read an earlier response.
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
        response = None if self._left() else super().__next__()
        if not self._left():
            return response
        self._step = iter(()).__next__  # frees the handler
        raise StopIteration

    def _left(self) -> bool:
        """Whether the call has ended; asked of the task, whose callbacks may come later."""
        return self._task is not None and self._task.done()


def _task() -> asyncio.Task[object] | None:
    """The task of the call; None if an interceptor before is a generator, and runs in a pool."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def _refuse(context: grpc.aio.ServicerContext[object, object]) -> None:
    """End the call; raises, as `abort` does."""
    try:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
    except grpc.aio.InternalError:  # the client has ended the call meanwhile (grpcio 1.85)
        raise asyncio.CancelledError from None  # anything else is logged as an error of the handler


def _mark_refused(context: grpc.ServicerContext) -> None:
    """End the call when the handler returns; `abort` would wait in its thread for the loop."""
    context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
    context.set_details(LATE)
