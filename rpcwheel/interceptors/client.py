"""Policies for a channel of `grpc`: as a channel, or as an interceptor.

`InterceptedChannel` has its own multicallables, which look up the configuration of their method
when they are made. A blocking unary call that succeeds is one call of the inner multicallable.
`ClientInterceptor` is for channels that the user intercepts.

`options` are gRPC's arguments of a call after the request, in their order: timeout, metadata,
credentials, wait_for_ready, compression. `Details` has the same fields after the method.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any, Final, Never, TypeAlias

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.calls import (
    CLOSED,
    Details,
    InternalCallback,
    failure_of,
    is_blocking_unary,
    outcome_of,
    reusable_metadata,
)
from rpcwheel._grpc.counted import begin_counted, counted_continuation, counted_multicallable
from rpcwheel._grpc.interceptors import Interceptors
from rpcwheel.call.client_state import seconds_left
from rpcwheel.call.config import CALL_OPTIONS
from rpcwheel.call.idempotency import with_key
from rpcwheel.call.metadata import call_metadata, new_nonce, with_attempt
from rpcwheel.call.sync_call import ClientCall
from rpcwheel.call.sync_retrying_call import begin
from rpcwheel.failback.stored_calls import StoredCalls
from rpcwheel.rpc import Kind, classes_by_kind
from rpcwheel.transport.probe import MARK, SERVER_HEALTH, SERVER_HEALTH_TIMEOUT_S, is_answered

from .admission import admitted_continuation, admitted_multicallable
from .applying import InterceptedChannelBase

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel._grpc.calls import AnyCall
    from rpcwheel.call.client_state import ClientState
    from rpcwheel.call.config import MethodConfig
    from rpcwheel.telemetry.call_counts import CallCounts

Continuation: TypeAlias = "Callable[[Any, Any], AnyCall]"

Begun: TypeAlias = "tuple[MethodConfig, int, int, int]"  # for `ClientCall`


FOR_THREADS: Final = (
    "these interceptors are for channels of grpc: grpc.intercept_channel(channel, *interceptors); "
    "for those of grpc.aio use rpcwheel.interceptors.aio.client_interceptors, or rpcwheel.aio.Kit"
)


class ClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Applies the policies to the calls of one channel, of all four kinds."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self.call_policy = state.policy
        state.begin_admission(None)
        if state.counts is not None:
            for kind in Kind:
                name = f"intercept_{kind.name.lower()}"
                count = partial(_intercept_counted, state.counts, kind, getattr(self, name))
                setattr(self, name, count)

    def _intercept(
        self, kind: Kind, continuation: Continuation, client_call_details: Any, request: Any
    ) -> AnyCall:
        """Make a call, or begin one of `.future()` or with a stream of responses."""
        state, method = self._state, client_call_details.method
        continuation = admitted_continuation(state, kind, method, continuation)
        call = ClientCall(state, kind, continuation, client_call_details, request)
        if kind.streams_responses:
            return begin(call)
        blocking = is_blocking_unary(continuation)
        return call.run() if blocking else begin(call, may_block=blocking is None)

    intercept_unary_unary: Any = partialmethod(_intercept, Kind.UNARY_UNARY)
    intercept_unary_stream: Any = partialmethod(_intercept, Kind.UNARY_STREAM)
    intercept_stream_unary: Any = partialmethod(_intercept, Kind.STREAM_UNARY)
    intercept_stream_stream: Any = partialmethod(_intercept, Kind.STREAM_STREAM)


def _intercept_counted(
    counts: CallCounts,
    kind: Kind,
    intercept: Callable[..., AnyCall],
    continuation: Continuation,
    client_call_details: Any,
    request: Any,
) -> AnyCall:
    """Make a call, and count it and its attempts."""
    key = client_call_details.method, kind.grpc_type
    start = counted_continuation(continuation, counts.attempts.method(*key))
    calls = counts.client.method(*key)
    return begin_counted(calls, intercept, start, client_call_details, request)


def interceptors_for(state: ClientState) -> list[grpc.UnaryUnaryClientInterceptor]:
    """Make the interceptor of one client, for all kinds of call."""
    return Interceptors([ClientInterceptor(state)], None, FOR_THREADS)


class InterceptedChannel(InterceptedChannelBase, multicallable.Channel):
    """Applies policies to the calls of the user's channel. Closing it closes the user's channel."""

    _channel_class = grpc.Channel
    _wrong_channel = (
        "channel must be a grpc channel, not {!r}; for a grpc.aio channel use "
        "rpcwheel.interceptors.aio.intercept_channel, or rpcwheel.aio.Kit"
    )

    def __init__(self, *args: Any) -> None:
        """Apply policies to a channel; arguments as of `InterceptedChannelBase`."""
        super().__init__(*args)
        self._subscribers: list[Callable[[grpc.ChannelConnectivity], None]] = []

    def _stored_calls(self) -> StoredCalls:
        state = self._state
        return StoredCalls(
            self._channel,
            state.counts,
            admitted=partial(admitted_multicallable, state),
            channel_calls=state.channel_calls,
        )

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Subscribe to the state of the user's channel."""
        if self._state.refuse is not None:  # closed
            return
        if self._owner is not None:
            self._subscribers.append(callback)
        self._channel.subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """End a subscription to the state of the user's channel."""
        with suppress(ValueError):
            self._subscribers.remove(callback)
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Close the user's channel, or, for a channel of a kit, all but its queued calls.

        If calls of a kit's channel are queued, its connections are kept until these are delivered
        or the kit is closed. New calls are refused, and calls in flight are canceled, except
        blocking ones that no other thread can cancel.
        """
        self._begin_close()
        state = self._state
        owner, keeper = self._owner, state.failback.keeper
        if owner is not None:
            state.refuse = _refuse
        # Before running calls end, for whose end others wait, and the connections may be closed.
        state.channel_calls.end_waiting()
        if owner is not None and keeper is not None and owner.keep(self, keeper):
            for callback in tuple(self._subscribers):
                self.unsubscribe(callback)
            for call in state.channel_calls.running:
                call.cancel()
        else:
            self._channel.close()
        if self._on_close is not None:
            self._on_close()

    def close_kept(self) -> None:
        """Close the connections that were kept for queued calls."""
        keeper = self._state.failback.keeper
        if keeper is not None:
            keeper.end()
        self._channel.close()

    def close_kept_soon(self) -> None:
        """Run `close_kept` on a worker thread."""
        EXECUTOR.submit(self, self.close_kept)

    def check_health(self, done: Callable[[bool], object]) -> bool:
        """Check the health of the server, for a circuit breaker."""
        try:
            check = self._channel.unary_unary(SERVER_HEALTH.method)
            call = check.future(SERVER_HEALTH.request, SERVER_HEALTH_TIMEOUT_S, MARK)
        except Exception:  # noqa: BLE001 - closed, or of an interceptor
            return False
        call.add_done_callback(InternalCallback(_health_checked, done))
        return True

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        state, counts = self._state, self._state.counts
        serialize = args[0] if args else options.get("request_serializer")
        attempts = getattr(self._channel, kind.name.lower())(method, *args, **options)
        if counts is not None:
            attempts = counted_multicallable(
                kind, attempts, counts.attempts.method(method, kind.grpc_type)
            )
        attempts = admitted_multicallable(state, kind, method, attempts)
        uncounted = _MULTICALLABLES[kind](state, method, attempts, serialize)
        if counts is None:
            return uncounted
        return counted_multicallable(kind, uncounted, counts.client.method(method, kind.grpc_type))


def _refuse() -> Never:
    raise ValueError(CLOSED)


def _health_checked(done: Callable[[bool], object], call: AnyCall) -> None:
    """Report the result of a health check. On gRPC's thread."""
    done(is_answered(*outcome_of(call)))


class _InterceptedMulticallable:
    """The part that is common to the four kinds of call."""

    kind: Kind

    def __init__(
        self,
        state: ClientState,
        method: str,
        below: Any,
        serialize: Callable[[Any], bytes] | None,
    ) -> None:
        self._state = state
        self._method = method
        self._config = state.configs.config_for(method)
        self._keeper = state.failback.keeper
        self._below = below
        self._serialize = serialize

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        """Begin a call of `.future()`, or a response stream."""
        call = self._new_call(self._begin_attempt, request, options)
        begun = begin(call)
        is_kept = self._keeper is not None and self._keeper.is_used
        if is_kept and hasattr(begun, "cancel"):  # a generator of an interceptor has no `cancel`
            self._state.channel_calls.add_running(begun)
            if self._state.refuse is not None:  # the channel was closed meanwhile
                begun.cancel()
        return begun

    def _wait(self, name: str, request: Any, *options: Any) -> Any:
        """Make a call on the caller's thread and return its response."""
        return _result(name, self._new_call(self._attempt, request, options).run())

    def _begin_attempt(self, details: Details, request: Any) -> AnyCall:
        """Begin an attempt of a call of `.future()`, or of a response stream."""
        begin = self._below if self.kind.streams_responses else self._below.future
        call: AnyCall = begin(request, *details[1:])
        return call

    def _attempt(self, details: Details, request: Any) -> AnyCall:
        """Make one attempt on the caller's thread. Returns a call that has ended."""
        try:
            return _Succeeded(*self._below.with_call(request, *details[1:]))
        except grpc.RpcError as error:
            return error

    def _new_call(
        self,
        start: Continuation,
        request: Any,
        options: tuple[Any, ...],
        begun: Begun | None = None,
    ) -> ClientCall:
        details = Details(self._method, *options)
        return ClientCall(
            self._state,
            self.kind,
            start,
            details,
            request,
            begun,
            start_delivery=self._begin_attempt,  # no worker thread is blocked
            serialize=self._serialize,
        )


class _Succeeded:
    """A blocking attempt that has succeeded, for `failure_of`."""

    def __init__(self, response: Any, call: AnyCall) -> None:
        self.response = response
        self.call = call

    def exception(self) -> None:
        pass


def _result(name: str, call: AnyCall) -> Any:
    """Return what `__call__` or `with_call` returns for a call that has ended; raises its error.

    The caller must keep no reference to a call that has failed, which may be the error.
    """
    if isinstance(call, _Succeeded):
        return call.response if name == "__call__" else (call.response, call.call)
    error = failure_of(call)  # `result()` would raise it in a frame that keeps it
    try:
        if error is not None:
            raise error
        response = call.result()
        return response if name == "__call__" else (response, call)
    finally:
        del call, error  # else a cycle: the error, its traceback, and this frame


class _InterceptedUnaryUnary(_InterceptedMulticallable, multicallable.UnaryUnary):
    kind = Kind.UNARY_UNARY

    def _wait(self, name: str, request: Any, *options: Any) -> Any:
        """Make a call on the caller's thread and return its response.

        Most calls need only their first attempt, so that is made without a `ClientCall`.
        """
        state, timeout = self._state, options[0]
        overridden = CALL_OPTIONS.get() is not None
        config = state.current_config(self._method) if overridden else self._config
        metadata = reusable_metadata(options[1])  # a retry sends it again
        metadata = call_metadata(metadata, config.criticality)
        if metadata is not options[1]:
            options = (timeout, metadata, *options[2:])
        if config.hedging is not None:
            return self._wait_hedged(name, request, *options)
        now_ns, deadline_ns, attempt_ns = state.begin(config, timeout)
        begun = config, now_ns, deadline_ns, attempt_ns
        if now_ns >= deadline_ns:
            return _result(name, self._new_call(self._attempt, request, options, begun).end_late())
        if config.durable:
            options = (timeout, with_key(options[1]), *options[2:])
        if config.wait_for_ready is not None and options[3] is None:
            options = (*options[:3], config.wait_for_ready, *options[4:])
        nonce, sent = None, options[1]
        if config.sends_nonces:
            nonce = new_nonce()
            sent = with_attempt(sent, 1, nonce)
        watch = state.watch_slow_call(self._method, config)
        try:
            return getattr(self._below, name)(
                request, seconds_left(attempt_ns, now_ns), sent, *options[2:]
            )
        except grpc.RpcError as error:
            begun_call = self._new_call(self._attempt, request, options, begun)
            begun_call.nonce = nonce
            call = begun_call.resume(error)
        finally:
            if watch is not None:
                watch.cancel()
        try:
            return _result(name, call)
        finally:
            del call

    def _wait_hedged(self, name: str, request: Any, *options: Any) -> Any:
        """Make a call whose attempts run at the same time, on gRPC's threads."""
        call = self._begin("future", request, *options)
        try:
            return _result(name, call)
        except BaseException:  # such as KeyboardInterrupt
            call.cancel()
            raise
        finally:
            del call


_MULTICALLABLES: Final = {
    **classes_by_kind(_InterceptedMulticallable, multicallable.MULTICALLABLES),
    Kind.UNARY_UNARY: _InterceptedUnaryUnary,
}
