"""The server interceptor for `grpc`: sets the current deadline and criticality of each call.

A threaded server runs each call in its own context (`contextvars`), also the body of a generator,
so both are unset after the call. Verified on grpcio 1.60 and 1.85;
`tests/contract/interceptors/test_server.py` fails if that changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import grpc

from rpcwheel._grpc.handlers import DEADLINE_PASSED, is_pushing
from rpcwheel._grpc.interceptors import SERVER, Interceptors
from rpcwheel.telemetry.call_counts import CountedMessages

from .serving import ServedStream, ServerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.rpc import Kind
    from rpcwheel.timer.api import Timer

    from .serving import ServedMethod


FOR_THREADS: Final = (
    "these interceptors are for grpc.server(); for a grpc.aio.server() use "
    "rpcwheel.interceptors.aio.server_interceptors, or rpcwheel.aio.Kit"
)


def server_interceptors(
    policy: CallPolicy | None = None, *, timer: Timer | None = None
) -> list[grpc.ServerInterceptor]:
    """Make the interceptors for `grpc.server(..., interceptors=...)`; put them before all others.

    In a handler, `current_deadline()` is the deadline of its call, and it limits the calls that the
    handler makes; `current_criticality()` is that of its call, and its calls inherit it. A call
    whose deadline has passed before its handler runs is refused with DEADLINE_EXCEEDED (event
    `DeadlineExceededBeforeStart`). If the call has no request stream, grpc itself drops it without
    an event.

    Args:
        policy: Only `timeout` and `limit` are used, those of methods too. The `timeout` limits the
            deadline of handlers, and calls that run longer than its `slow_call_threshold` (a
            stream: until its end) are reported as `CallSlow`. With a `limit`, calls wait until they
            may run, or are refused with RESOURCE_EXHAUSTED; it needs a
            `rpcwheel.limit.ServerExecutor` as the executor of the server. None for neither.
        timer: Any rpcwheel timer; None for `shared_timer()`, which is made when it is needed.
    """
    state = ServerState(policy, timer=timer)
    interceptors: list[grpc.ServerInterceptor] = [_ServerInterceptor(state)]
    limit = state.limit()
    if limit is not None:
        from rpcwheel.limit.executor import LimitInterceptor

        interceptors.insert(0, LimitInterceptor(limit))
    return Interceptors(interceptors, SERVER, FOR_THREADS)


class _ServerInterceptor(grpc.ServerInterceptor):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return self._state.wrap(handler, handler_call_details.method, _wrap)


def _wrap(kind: Kind, behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap the function that implements a method; called by `ServerState.wrap`."""
    if not kind.streams_responses:
        return _wrap_unary(behavior, method)
    if not method.observes_streams:
        return _wrap_unobserved(behavior, method)
    return (_wrap_pushing if is_pushing(behavior) else _wrap_iterator)(behavior, method)


def _wrap_unary(behavior: Behavior, method: ServedMethod) -> Behavior:
    def serve(request: object, context: grpc.ServicerContext) -> object:
        began_ns, timeout = method.begin(), None
        try:
            if not method.set_current(context):
                _refuse(context)
            timeout = method.start_slow_call_timeout()
            response = behavior(request, context)
        except BaseException as error:
            method.end(began_ns, timeout, context, error)
            raise
        method.end(began_ns, timeout, context)
        return response

    return serve


def _wrap_unobserved(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a behavior with a stream of responses whose end does not matter."""

    def serve(request: object, context: grpc.ServicerContext, *push: object) -> object:
        if not method.set_current(context):
            _refuse(context)
        return behavior(request, context, *push)

    return serve


def _wrap_iterator(behavior: Behavior, method: ServedMethod) -> Behavior:
    def serve(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        stream = ServedStream(method, context)
        try:
            if not method.set_current(context):
                _refuse(context)
            stream.start_timeout()
            responses: Iterator[object] = behavior(request, context)
        except BaseException as error:
            stream.end(stream.code(error))
            raise
        return CountedMessages(responses, stream, stream.code)

    return serve


def _wrap_pushing(behavior: Behavior, method: ServedMethod) -> Behavior:
    """Wrap a behavior that gets a third argument, a function that sends a response."""

    def serve(
        request: object, context: grpc.ServicerContext, push: Callable[[object], None]
    ) -> object:
        stream = ServedStream(method, context)

        def observed_push(response: object) -> None:
            if response is None:  # the end of the stream
                stream.end(stream.code())
            push(response)

        try:
            if not method.set_current(context):
                _refuse(context)
            stream.start_timeout()
            if not context.add_callback(stream.end_early):
                stream.end_early()
            return behavior(request, context, observed_push)
        except BaseException as error:
            stream.end(stream.code(error))
            raise

    return serve


def _refuse(context: grpc.ServicerContext) -> NoReturn:
    """End the call; raises, as `abort` does."""
    context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED)
    raise AssertionError("unreachable: `abort` has raised")
