"""The client interceptor for `grpc`: one object for all four kinds, with all policies.

A blocking call is carried out on its caller's thread, tries and waits and all. A call that the
caller holds while it runs (`.future()`, response streams) is handed through untouched where its
rules ask for no more than a deadline; otherwise the caller gets a call of ours (`_client_live.py`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.styles import blocks, call_at_end, failure_of, has_ended
from rpcwheel.call import Finish, Kind

from ._client_call import Outgoing
from ._client_held import LiveCall, LiveStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from rpcwheel._grpc.styles import AnyCall
    from rpcwheel.call import Attempt
    from rpcwheel.failback.sync import FailbackInvoker

    from .state import ClientState

    Message: TypeAlias = Any
    Continuation: TypeAlias = Callable[[Any, Any], AnyCall]

__all__ = ["ClientInterceptor"]

PATIENCE_S: Final = 1.0
"""How often to look whether the timer was stopped, which tells nobody."""


class ClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Carries out the policies of one channel's calls."""

    def __init__(self, state: ClientState[FailbackInvoker]) -> None:
        self._state = state

    def intercept_unary_unary(
        self,
        continuation: Continuation,
        client_call_details: grpc.ClientCallDetails,
        request: Message,
    ) -> AnyCall:
        """Carry out a call with one request and one response."""
        outgoing = Outgoing(
            self._state, Kind.UNARY_UNARY, continuation, client_call_details, request
        )
        blocking = blocks(continuation)
        return _wait_for(outgoing) if blocking else _unary(outgoing, known=blocking is not None)

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
        return _wait_for(outgoing) if blocking else _unary(outgoing, known=blocking is not None)

    def intercept_unary_stream(
        self,
        continuation: Continuation,
        client_call_details: grpc.ClientCallDetails,
        request: Message,
    ) -> AnyCall:
        """Carry out a call with one request and many responses."""
        return _stream(
            Outgoing(self._state, Kind.UNARY_STREAM, continuation, client_call_details, request)
        )

    def intercept_stream_stream(
        self,
        continuation: Continuation,
        client_call_details: grpc.ClientCallDetails,
        request_iterator: Iterator[Any],
    ) -> AnyCall:
        """Carry out a call with many requests and many responses."""
        return _stream(
            Outgoing(
                self._state, Kind.STREAM_STREAM, continuation, client_call_details, request_iterator
            )
        )


def _unary(outgoing: Outgoing, *, known: bool) -> AnyCall:
    """Carry out a unary call by `.future()`, if it is `known` to be one."""
    if not outgoing.rules.recovers:
        return _hand_through(outgoing)
    return _hold(outgoing, LiveCall, known=known)


def _stream(outgoing: Outgoing) -> AnyCall:
    if outgoing.rules.recovers or outgoing.rules.has_message_timeout:
        return _hold(outgoing, LiveStream, known=True)
    return _hand_through(outgoing)


def _hold(outgoing: Outgoing, kind: type[LiveCall], *, known: bool) -> AnyCall:
    """Make a call that the caller holds while it runs."""
    step = outgoing.begin()
    if isinstance(step, Finish):
        return outgoing.late(step.reason)
    try:
        call = outgoing.make(step)
    except BaseException:
        outgoing.close()
        raise
    if not hasattr(call, "add_done_callback"):  # some interceptor's generator: not to be followed
        return call
    if not known and has_ended(call):  # somebody's own continuation: see what it gave
        return _wait_for(outgoing, call)
    return kind(outgoing, call)


def _hand_through(outgoing: Outgoing) -> AnyCall:
    """Make a call whose rules ask for no more than a deadline, and be told if it is slow."""
    step = outgoing.begin()
    if isinstance(step, Finish):
        return outgoing.late(step.reason)
    watch = outgoing.state.watch(outgoing.method, outgoing.rules)
    if watch is None:
        return outgoing.make(step)
    try:
        call = outgoing.make(step)
    except BaseException:
        watch.cancel()
        raise
    call_at_end(call, watch.cancel)
    return call


def _wait_for(outgoing: Outgoing, call: AnyCall = None) -> AnyCall:
    """Carry out a call on this thread to its end; `call` is its first try, if that is made."""
    state = outgoing.state
    watch = state.watch(outgoing.method, outgoing.rules)
    try:
        if call is None:
            step = outgoing.begin()
            if isinstance(step, Finish):
                return outgoing.late(step.reason)
            call = outgoing.make(step)
        while (error := failure_of(call)) is not None:
            step = outgoing.after(error)
            if isinstance(step, Finish) or not _pause(outgoing, step):
                return outgoing.end(call, error)
            call = outgoing.make(step)
        return call
    finally:
        if watch is not None:
            watch.cancel()
        if outgoing.feed is not None:
            outgoing.feed.close()


def _pause(outgoing: Outgoing, attempt: Attempt) -> bool:
    """Wait on this thread until a try is due; False if the timer takes no more waits."""
    state = outgoing.state
    delay_s = (attempt.at_ns - state.now_ns()) / 1e9
    if delay_s <= 0:
        return True
    due = threading.Event()
    timeout = state.wake(lambda _: due.set(), delay_s, f"retry of {outgoing.method}")
    if timeout is None:
        return False
    try:
        while not due.wait(PATIENCE_S):
            if state.timer.stopped:
                return False
        return True
    finally:
        timeout.cancel()
