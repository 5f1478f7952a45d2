"""A channel of `grpc` with the policies in front of the channel below it.

The multicallables look up the rules of their method once, when they are made. So a call costs less
than behind any interceptor of `grpc.intercept_channel`: a blocking unary call that succeeds is one
call of the multicallable below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import grpc

from rpcwheel._grpc import kinds
from rpcwheel._grpc.details import Details
from rpcwheel.call.config import seconds_left
from rpcwheel.call.sync_call import Outgoing
from rpcwheel.durations import to_ns
from rpcwheel.rpc import Kind

from .client import go_on, hold_stream, hold_unary, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rpcwheel._grpc.styles import AnyCall
    from rpcwheel.call.config import ClientState

__all__ = ["InterceptedChannel"]


class InterceptedChannel(grpc.Channel):
    """The user's channel, with the policies in front. Closing it closes the user's channel."""

    def __init__(self, channel: grpc.Channel, state: ClientState) -> None:
        """Put the policies in front of a channel.

        Raises:
            TypeError: `channel` is no channel of grpc.
        """
        if not isinstance(channel, grpc.Channel):
            raise TypeError(
                f"channel must be a grpc channel, not {channel!r}; for those of grpc.aio there is "
                "rpcwheel.interceptors.aio.intercept_channel, or rpcwheel.aio.Kit"
            )
        self._channel = channel
        self._state = state

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """As the user's channel."""
        self._channel.subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """As the user's channel."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Close the user's channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    # The arguments are those of the channel below: `_registered_method` came with 1.63, for one.

    def unary_unary(self, method: str, *args: Any, **options: Any) -> _UnaryUnary:
        """Make a multicallable."""
        below = self._channel.unary_unary(method, *args, **options)
        return _UnaryUnary(self._state, Kind.UNARY_UNARY, method, below)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> _UnaryStream:
        """Make a multicallable."""
        below = self._channel.unary_stream(method, *args, **options)
        return _UnaryStream(self._state, Kind.UNARY_STREAM, method, below)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> _StreamUnary:
        """Make a multicallable."""
        below = self._channel.stream_unary(method, *args, **options)
        return _StreamUnary(self._state, Kind.STREAM_UNARY, method, below)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> _StreamStream:
        """Make a multicallable."""
        below = self._channel.stream_stream(method, *args, **options)
        return _StreamStream(self._state, Kind.STREAM_STREAM, method, below)


class _Multicallable:
    """What the four kinds have in common."""

    __slots__ = ("_below", "_config", "_kind", "_method", "_state")

    def __init__(
        self,
        state: ClientState,
        kind: Kind,
        method: str,
        below: Any,
    ) -> None:
        self._state = state
        self._kind = kind
        self._method = method
        self._config = state.configs.of(method)
        self._below = below

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        """Begin a call that the caller holds while it runs."""
        start = getattr(self._below, name)
        outgoing = self._outgoing(
            lambda details, request: start(request, *details[1:]), request, options
        )
        if self._kind.streams_responses:
            return hold_stream(outgoing)
        return hold_unary(outgoing, known=True)

    def _wait(self, name: str, request: Any, *options: Any) -> Any:
        """Carry out a call on its caller's thread."""
        return _finished(name, wait_for(self._outgoing(self._attempt, request, options)))

    def _attempt(self, details: Details, request: Any) -> AnyCall:
        """Make one attempt on the caller's thread; gives a call that has ended."""
        try:
            return _Answered(*self._below.with_call(request, *details[1:]))
        except grpc.RpcError as error:
            return error

    def _outgoing(
        self,
        start: Callable[[Any, Any], AnyCall],
        request: Any,
        options: tuple[Any, ...],
        opened: tuple[int, int, int] | None = None,
    ) -> Outgoing:
        details = Details(self._method, *options)
        return Outgoing(self._state, self._kind, start, details, request, opened)


class _Answered:
    """An attempt that has succeeded."""

    __slots__ = ("call", "response")

    def __init__(self, response: Any, call: AnyCall) -> None:
        self.response = response
        self.call = call

    def exception(self) -> None:
        """There is none."""

    def done(self) -> bool:
        """It has ended."""
        return True

    def result(self) -> Any:
        """The response."""
        return self.response

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """It has ended."""
        callback(self)


def _finished(name: str, call: AnyCall) -> Any:
    """What a blocking call by `__call__` or `with_call` returns when it has ended so, or raises."""
    if isinstance(call, _Answered):
        return call.response if name == "__call__" else (call.response, call.call)
    tell = getattr(call, "result", None)
    if tell is None:
        raise call  # an error of an interceptor below, which is no call
    response = tell()
    return response if name == "__call__" else (response, call)


class _UnaryUnary(_Multicallable, kinds.UnaryUnary):
    __slots__ = ()

    def _wait(self, name: str, request: Any, *options: Any) -> Any:
        state, config, timeout = self._state, self._config, options[0]
        own_ns = None if timeout is None else to_ns(timeout, what="timeout")
        opened = now_ns, deadline_ns, attempt_ns = state.open(config, own_ns)
        if now_ns >= deadline_ns:
            outgoing = self._outgoing(self._attempt, request, options, opened)
            return _finished(name, outgoing.late())
        watch = state.watch(self._method, config)
        try:
            return getattr(self._below, name)(
                request, seconds_left(attempt_ns, now_ns), *options[1:]
            )
        except grpc.RpcError as error:
            outgoing = self._outgoing(self._attempt, request, options, opened)
            call = go_on(outgoing, error)
        finally:
            if watch is not None:
                watch.cancel()
        return _finished(name, call)


class _StreamUnary(_Multicallable, kinds.StreamUnary):
    __slots__ = ()


class _UnaryStream(_Multicallable, kinds.UnaryStream):
    __slots__ = ()


class _StreamStream(_Multicallable, kinds.StreamStream):
    __slots__ = ()
