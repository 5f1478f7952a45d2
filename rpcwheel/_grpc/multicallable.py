"""Channels and multicallables of `grpc`, with one implementation for the four kinds of call.

A subclass of `Channel` defines `_multicallable`. The multicallables are reduced to two methods,
which a class that precedes one of these in the bases defines: `_wait` makes a call on the caller's
thread and returns its response, `_begin` begins a call and returns it. Both get the name of gRPC's
method, the request or the iterator of requests, and gRPC's options in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel.rpc import Kind

from .calls import ChannelMethods

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


class Channel(ChannelMethods, grpc.Channel):
    """Base of channels of `grpc`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()  # type: ignore[no-untyped-call]


def _with_request(action: str, qualname: str) -> Any:
    """Make a method for one request, with gRPC's arguments; `action` is `_wait` or `_begin`."""
    name = qualname.rpartition(".")[2]

    def method(
        self: Any,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        call = getattr(self, action)
        return call(name, request, timeout, metadata, credentials, wait_for_ready, compression)

    method.__name__, method.__qualname__ = name, qualname  # for Python's errors
    return method


def _with_requests(action: str, qualname: str) -> Any:
    """Make a method for a stream of requests, with gRPC's arguments; as `_with_request`."""
    name = qualname.rpartition(".")[2]

    def method(
        self: Any,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        call = getattr(self, action)
        return call(
            name, request_iterator, timeout, metadata, credentials, wait_for_ready, compression
        )

    method.__name__, method.__qualname__ = name, qualname
    return method


class UnaryUnary(grpc.UnaryUnaryMultiCallable):
    """One request, one response."""

    __call__ = _with_request("_wait", "UnaryUnary.__call__")
    with_call = _with_request("_wait", "UnaryUnary.with_call")
    future = _with_request("_begin", "UnaryUnary.future")


class StreamUnary(grpc.StreamUnaryMultiCallable):
    """A stream of requests, one response."""

    __call__ = _with_requests("_wait", "StreamUnary.__call__")
    with_call = _with_requests("_wait", "StreamUnary.with_call")
    future = _with_requests("_begin", "StreamUnary.future")


class UnaryStream(grpc.UnaryStreamMultiCallable):
    """One request, a stream of responses."""

    __call__ = _with_request("_begin", "UnaryStream.__call__")


class StreamStream(grpc.StreamStreamMultiCallable):
    """A stream of requests, a stream of responses."""

    __call__ = _with_requests("_begin", "StreamStream.__call__")


MULTICALLABLES: Final[Mapping[Kind, tuple[type, ...]]] = {
    Kind.UNARY_UNARY: (UnaryUnary,),
    Kind.UNARY_STREAM: (UnaryStream,),
    Kind.STREAM_UNARY: (StreamUnary,),
    Kind.STREAM_STREAM: (StreamStream,),
}
"""For `classes_by_kind`."""
