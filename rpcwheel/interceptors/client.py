"""The client interceptor for `grpc`: one object for all four kinds, with all policies.

A blocking call is carried out on its caller's thread, tries and waits and all. A call that the
caller holds while it runs (`.future()`, response streams) is handed through untouched where its
config asks for no more than a deadline; otherwise the caller gets a call of ours.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.details import details_with
from rpcwheel._grpc.styles import blocks, call_at_end, failure_of, has_ended
from rpcwheel.call._client_held import LiveCall, LiveStream
from rpcwheel.call.config import LOOK_INTERVAL_S, seconds_left
from rpcwheel.call.sync_call import Outgoing, opened_for
from rpcwheel.rpc import Kind, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from rpcwheel._grpc.styles import AnyCall
    from rpcwheel.call.config import ClientState
    from rpcwheel.rpc import NextAttempt

    Message: TypeAlias = Any
    Continuation: TypeAlias = Callable[[Any, Any], AnyCall]

__all__ = ["ClientInterceptor", "go_on", "hold_stream", "hold_unary", "wait_for"]


class ClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Carries out the policies of one channel's calls."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    def intercept_unary_unary(
        self,
        continuation: Continuation,
        client_call_details: grpc.ClientCallDetails,
        request: Message,
    ) -> AnyCall:
        """Carry out a call with one request and one response."""
        blocking = blocks(continuation)
        if blocking:
            return _blocking(self._state, continuation, client_call_details, request)
        return hold_unary(
            Outgoing(self._state, Kind.UNARY_UNARY, continuation, client_call_details, request),
            known=blocking is not None,
        )

    def intercept_stream_unary(
        self,
        continuation: Continuation,
        client_call_details: grpc.ClientCallDetails,
        request_iterator: Iterator[Any],
    ) -> AnyCall:
        """Carry out a call with many requests and one response."""
        outgoing = Outgoing(
            self._state, Kind.STREAM_UNARY, continuation, client_call_details, request_iterator
        )
        blocking = blocks(continuation)
        return wait_for(outgoing) if blocking else hold_unary(outgoing, known=blocking is not None)

    def intercept_unary_stream(
        self,
        continuation: Continuation,
        client_call_details: grpc.ClientCallDetails,
        request: Message,
    ) -> AnyCall:
        """Carry out a call with one request and many responses."""
        return hold_stream(
            Outgoing(self._state, Kind.UNARY_STREAM, continuation, client_call_details, request)
        )

    def intercept_stream_stream(
        self,
        continuation: Continuation,
        client_call_details: grpc.ClientCallDetails,
        request_iterator: Iterator[Any],
    ) -> AnyCall:
        """Carry out a call with many requests and many responses."""
        return hold_stream(
            Outgoing(
                self._state, Kind.STREAM_STREAM, continuation, client_call_details, request_iterator
            )
        )


def _blocking(
    state: ClientState,
    continuation: Continuation,
    details: Any,
    request: Message,
) -> AnyCall:
    """Carry out a call with one request whose caller waits for it.

    Most need no more than their first try, so that is made with nothing but its timeout.
    """
    method = details.method
    config = state.configs.of(method)
    opened = now_ns, deadline_ns, attempt_ns = opened_for(state, config, details)
    if now_ns >= deadline_ns:
        return Outgoing(state, Kind.UNARY_UNARY, continuation, details, request, opened).late()
    watch = state.watch(method, config)
    try:
        call = continuation(details_with(details, seconds_left(attempt_ns, now_ns)), request)
        if failure_of(call) is None:
            return call
        return go_on(
            Outgoing(state, Kind.UNARY_UNARY, continuation, details, request, opened), call
        )
    finally:
        if watch is not None:
            watch.cancel()


def hold_unary(outgoing: Outgoing, *, known: bool) -> AnyCall:
    """Carry out a unary call by `.future()`, if it is `known` to be one."""
    if not outgoing.config.recovers:
        return _hand_through(outgoing)
    return _hold(outgoing, LiveCall, known=known)


def hold_stream(outgoing: Outgoing) -> AnyCall:
    """Carry out a call with a response stream."""
    if outgoing.config.recovers or outgoing.config.has_message_timeout:
        return _hold(outgoing, LiveStream, known=True)
    return _hand_through(outgoing)


def _hold(outgoing: Outgoing, kind: type[LiveCall], *, known: bool) -> AnyCall:
    """Make a call that the caller holds while it runs."""
    if outgoing.is_late:
        return outgoing.late()
    try:
        call = outgoing.first()
    except BaseException:
        outgoing.close()
        raise
    if not hasattr(call, "add_done_callback"):  # some interceptor's generator: not to be followed
        outgoing.state.note_bare(outgoing.method)
        return call
    if not known and has_ended(call):  # somebody's own continuation: see what it gave
        return wait_for(outgoing, call)
    outgoing.keep()
    return kind(outgoing, call)


def _hand_through(outgoing: Outgoing) -> AnyCall:
    """Make a call whose config asks for no more than a deadline, and be told if it is slow."""
    if outgoing.is_late:
        return outgoing.late()
    watch = outgoing.state.watch(outgoing.method, outgoing.config)
    if watch is None:
        return outgoing.first()
    try:
        call = outgoing.first()
    except BaseException:
        watch.cancel()
        raise
    call_at_end(call, watch.cancel)
    return call


def wait_for(outgoing: Outgoing, call: AnyCall = None) -> AnyCall:
    """Carry out a call on this thread to its end; `call` is its first try, if that is made."""
    if outgoing.is_late:
        return outgoing.late()
    watch = outgoing.state.watch(outgoing.method, outgoing.config)
    try:
        return go_on(outgoing, outgoing.first() if call is None else call)
    finally:
        if watch is not None:
            watch.cancel()
        outgoing.close()


def go_on(outgoing: Outgoing, call: AnyCall) -> AnyCall:
    """Wait for a try's end, and make others after it as its failure asks."""
    while (error := failure_of(call)) is not None:
        step = outgoing.after(error)
        if isinstance(step, Stop) or not _pause(outgoing, step):
            return outgoing.end(call, error)
        call = outgoing.make(step)
    return call


def _pause(outgoing: Outgoing, attempt: NextAttempt) -> bool:
    """Wait on this thread until a try is due; False if the timer takes no more waits.

    A timer that is late, as a task holds its thread, is not waited for past the deadline.
    """
    state = outgoing.state
    delay_s = (attempt.at_ns - state.now_ns()) / 1e9
    if delay_s <= 0:
        return True
    due = threading.Event()
    timeout = state.wake(lambda _: due.set(), delay_s, f"retry of {outgoing.method}")
    if timeout is None:
        return False
    try:
        while not due.wait(min(LOOK_INTERVAL_S, (attempt.deadline_ns - state.now_ns()) / 1e9)):
            if state.timer.stopped:
                return False
            if state.now_ns() >= attempt.at_ns:
                break
        return True
    finally:
        timeout.cancel()
