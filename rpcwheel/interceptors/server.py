"""The server interceptor for `grpc`: sets the current deadline of each call that is served.

A threaded server runs each call in its own context (`contextvars`), also the body of a generator,
so the deadline is unset after the call. Verified on grpcio 1.60 and 1.85;
`tests/contract/interceptors/test_server.py` fails if that changes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import grpc

from rpcwheel._grpc.handlers import LATE, is_pushing
from rpcwheel.call.server import ServerState, WatchedResponses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.call.server import ServedMethod
    from rpcwheel.rpc import Kind
    from rpcwheel.timer.api import Timer

__all__ = ["server_interceptors"]


def server_interceptors(
    policy: CallPolicy | None = None, *, timer: Timer | None = None
) -> list[grpc.ServerInterceptor]:
    """Make the interceptors for `grpc.server(..., interceptors=...)`; put them before all others.

    In a handler, `current_deadline()` is the deadline of its call, and it limits the calls that the
    handler makes. A call whose deadline has passed before its handler runs is refused with
    DEADLINE_EXCEEDED (event `DeadlineExceededBeforeStart`). If the call has no request stream, grpc
    itself drops it without an event.

    Args:
        policy: Only its `timeout` is used: `timeout.timeout` limits the deadline of handlers, and
            calls that run longer than `timeout.slow_call_threshold` (a stream: until its end) are
            reported as `CallSlow`. None for no limits.
        timer: Any rpcwheel timer; None for `shared_timer()`, which is made when it is needed.
    """
    return [_Interceptor(ServerState(policy, timer=timer))]


class _Interceptor(grpc.ServerInterceptor):
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
        return self._state.wrap(handler, handler_call_details.method, _wrapped)


def _wrapped(kind: Kind, behavior: Behavior, served: ServedMethod) -> Behavior:
    if not kind.streams_responses:
        return _unary(behavior, served)
    return _pushing(behavior, served) if is_pushing(behavior) else _iterating(behavior, served)


def _unary(behavior: Behavior, served: ServedMethod) -> Behavior:
    def serve(request: object, context: grpc.ServicerContext) -> object:
        if not served.begin(context):
            _refuse(context)
        timeout = served.watch()
        if timeout is None:
            return behavior(request, context)
        try:
            return behavior(request, context)
        finally:
            timeout.cancel()

    return serve


def _iterating(behavior: Behavior, served: ServedMethod) -> Behavior:
    def serve(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        if not served.begin(context):
            _refuse(context)
        timeout = served.watch()
        if timeout is None:
            responses: Iterator[object] = behavior(request, context)
            return responses
        try:
            return WatchedResponses(partial(next, behavior(request, context)), timeout)
        except BaseException:
            timeout.cancel()
            raise

    return serve


def _pushing(behavior: Behavior, served: ServedMethod) -> Behavior:
    def serve(
        request: object, context: grpc.ServicerContext, push: Callable[[object], None]
    ) -> object:
        if not served.begin(context):
            _refuse(context)
        timeout = served.watch()
        if timeout is not None and not context.add_callback(timeout.cancel):
            timeout.cancel()  # the call has ended already
        return behavior(request, context, push)

    return serve


def _refuse(context: grpc.ServicerContext) -> None:
    """End the call; raises, as `abort` does."""
    context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
