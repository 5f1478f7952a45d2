"""The limit of a server of `grpc.aio`: an interceptor in which calls wait.

`grpc.aio` (1.60 to 1.85) runs interceptors in the task of the call, before it reads the request. So
a call waits in its interceptor, and the end of its task is the end of the call, whatever ends it.

It accepts one call per turn of the loop. While handlers compute, calls queue in gRPC's core, so the
limit makes pauses (`pause.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.aio_serving import abort
from rpcwheel._grpc.handlers import behavior_of, kind_of, time_left, with_behavior

from .limiter import CALL
from .pause import ROUND_S
from .server import CPU_EVERY_NS, ServerLimit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from .limiter import LimitedCall, RefusalReason

    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


LEAST_HANDLERS: Final = 2
"""The lowest adaptive limit: while one handler computes, gRPC reads the request of the next one."""


class LimitInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls wait, and refuses them."""

    def __init__(self, limit: ServerLimit) -> None:
        self._limit = limit
        limit.limiter.set_minimum(LEAST_HANDLERS)
        self._cpu_ns = self._cpu_due_ns = 0

    async def intercept_service(  # type: ignore[override]  # grpc.aio takes None as grpc does
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Wait until the call may run; return a handler that refuses it if it may not."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        limit = self._limit
        call = limit.call(handler_call_details, handler)
        CALL.set(call)
        if call is None or call.limit is None:
            return handler
        now_ns = time.monotonic_ns()
        with limit.lock:
            if now_ns >= self._cpu_due_ns:
                self._read_cpu(now_ns)
            limit.pause.arrivals += 1
            runs = limit.limiter.arrive(call, now_ns, must_wait=limit.pause.is_on(now_ns))
        if not runs:
            reason = call.refused
            if reason is None:
                reason = await self._wait(call)
            else:
                self._serve_waiting()  # reports it
            if reason is not None:
                return _refusal(*limit.refusal(call, reason))
            now_ns = time.monotonic_ns()
        method = call.method
        if handler is not method.handler:
            method.is_blocking, method.handler = _is_blocking(handler), handler
        if method.is_blocking:
            handler = self._on_thread(call, handler, now_ns)
        # A call that did not wait here may have waited in gRPC, if the loop was late.
        elif (call.has_waited or limit.overload.calls) and not method.is_stream:
            handler = self._checked(call, handler)
        task: Any = asyncio.current_task()
        task.add_done_callback(partial(self._ended, call, now_ns))
        return handler

    def _checked(self, call: LimitedCall, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Return a handler that refuses a call if less time is left than its method takes.

        `grpc.aio` shows the deadline only to the handler.
        """
        behavior = behavior_of(handler)
        if behavior is None:
            return handler

        async def serve(request: object, context: Any) -> object:
            left_s, now_ns = time_left(context), time.monotonic_ns()
            if left_s is not None:
                call.deadline_ns = now_ns + round(left_s * 1e9)
                with self._limit.lock:
                    self._limit.limiter.refuse_without_time(call, now_ns)
            reason = call.refused
            if reason is not None:
                self._serve_waiting()  # reports it, too
                code, details, metadata = self._limit.refusal(call, reason)
                try:
                    await abort(context, grpc.StatusCode[code], details, metadata)
                except grpc.aio.AbortError as error:
                    call.error = error
                    raise
            return await behavior(request, context)

        return with_behavior(handler, serve)

    def _on_thread(
        self, call: LimitedCall, handler: grpc.RpcMethodHandler, started_ns: int
    ) -> grpc.RpcMethodHandler:
        """Return a blocking handler that counts as running until its function has returned.

        `grpc.aio` runs it on a thread, and does not wait for it if the call ends before.
        """
        loop = asyncio.get_running_loop()
        behavior: Any = behavior_of(handler)
        call.is_gone = True  # until it has begun

        def serve(request: object, context: Any) -> object:
            with self._limit.lock:
                call.is_gone = not call.holders
                call.holders += not call.is_gone
            if call.is_gone:
                return None
            try:
                return behavior(request, context)
            finally:
                now_ns = time.monotonic_ns()
                limiter = self._limit.limiter
                with self._limit.lock:
                    call.holders -= 1
                    has_ended = not call.holders  # else its task goes on
                    if has_ended:
                        limiter.ended(call, started_ns, now_ns, self._cpu_ns, is_answered=False)
                if has_ended:
                    with suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(self._serve_waiting)

        return with_behavior(handler, serve)

    async def _wait(self, call: LimitedCall) -> RefusalReason | None:
        """Wait until a call may run (None), or is refused."""
        call.future = asyncio.get_running_loop().create_future()
        self._serve_waiting()
        try:
            reason: RefusalReason | None = await call.future
        except asyncio.CancelledError:
            call.is_gone = True
            with self._limit.lock:
                if call.is_waiting:
                    self._limit.limiter.forget(call)
            if not call.future.cancelled() and call.future.result() is None:
                self._release(call)  # it was started, but did not run
            raise
        return reason

    def _ended(self, call: LimitedCall, started_ns: int, task: asyncio.Task[object]) -> None:
        limit, now_ns = self._limit, time.monotonic_ns()
        limiter = limit.limiter
        if call.error is not None:
            call.error.__traceback__ = None
        with limit.lock:
            if now_ns >= self._cpu_due_ns:
                self._read_cpu(now_ns)
            call.holders -= 1
            if call.holders:  # its thread goes on
                return
            # gRPC cancels the task of a call that has ended early, and catches that in it.
            limiter.ended(call, started_ns, now_ns, self._cpu_ns, is_answered=not task.cancelling())
        if limiter.waiting:
            self._serve_waiting()

    def _release(self, call: LimitedCall) -> None:
        """Let others run in place of a call that was started and has not run."""
        now_ns = time.monotonic_ns()
        with self._limit.lock:
            self._limit.limiter.ended(call, now_ns, now_ns, 0)
        asyncio.get_running_loop().call_soon(self._serve_waiting)

    def _serve_waiting(self) -> None:
        """Start the waiting calls that may run, and refuse others."""
        limit, now_ns = self._limit, time.monotonic_ns()
        with limit.lock:
            if now_ns >= self._cpu_due_ns:
                self._read_cpu(now_ns)
            started, refused, expires_ns = limit.decide(now_ns)
        for call in started:
            if call.future.done():  # canceled
                call.is_gone = True
                self._release(call)
            else:
                call.future.set_result(None)
        if refused:
            for call, reason in refused:
                # One that was refused when it was started has not waited, or does not any more.
                if call.future is not None and not call.future.done():
                    call.future.set_result(reason)
            limit.report_refused(refused)
        if expires_ns is not None:
            delay_s = max(0, expires_ns - now_ns) / 1e9
            asyncio.get_running_loop().call_later(delay_s, self._expire, expires_ns)

    def _expire(self, expires_ns: int) -> None:
        with self._limit.lock:
            self._limit.has_expired(expires_ns)
        self._serve_waiting()

    def _read_cpu(self, now_ns: int) -> None:
        """Read the processor time of the loop; a pause may begin. The caller holds the lock."""
        self._cpu_ns, self._cpu_due_ns = time.thread_time_ns(), now_ns + CPU_EVERY_NS
        if self._limit.begin_pause(now_ns, self._cpu_ns):
            asyncio.get_running_loop().call_later(ROUND_S, self._end_pause)

    def _end_pause(self) -> None:
        """End the pause if gRPC has accepted the calls that have arrived, or look again later."""
        limit = self._limit
        with limit.lock:
            has_ended = limit.end_pause(time.monotonic_ns(), time.thread_time_ns())
        if has_ended:
            self._serve_waiting()
        else:
            asyncio.get_running_loop().call_later(ROUND_S, self._end_pause)


def _is_blocking(handler: grpc.RpcMethodHandler) -> bool:
    """Whether `grpc.aio` runs a handler with one response on a thread."""
    behavior = behavior_of(handler)
    return not (
        behavior is None
        or kind_of(handler).streams_responses
        or inspect.iscoroutinefunction(behavior)
    )


def _refusal(
    code: str, details: str, metadata: tuple[tuple[str, str], ...]
) -> grpc.RpcMethodHandler:
    """Return a handler that ends a call of any kind; it does not wait for the request.

    It has no response, so interceptors of others can't use one that is not there.
    """

    async def refuse(_: object, context: Any) -> AsyncIterator[object]:
        try:
            await abort(context, grpc.StatusCode[code], details, metadata)
        except grpc.aio.AbortError as error:  # gRPC raises it again
            error.__traceback__ = None
        none: tuple[object, ...] = ()
        for response in none:
            yield response

    # With a request stream: so gRPC reads no request before.
    handler: grpc.RpcMethodHandler = grpc.stream_stream_rpc_method_handler(refuse)
    return handler
