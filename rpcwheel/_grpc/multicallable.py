"""Channels and multicallables of `grpc`, with one implementation for the four kinds of call.

A subclass of `Channel` defines `_multicallable`. The multicallables are reduced to two methods: a
class that precedes one of these in the bases defines `_wait` and `_begin`. Both get the name of
gRPC's method, the request or the iterator of requests, and gRPC's options in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel.rpc import Kind

from .calls import ChannelMethods

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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


class _MulticallableBase:
    __slots__ = ()

    _wait: Callable[..., Any]
    """Makes a call on the caller's thread and returns its response."""

    _begin: Callable[..., Any]
    """Begins a call and returns it."""


class UnaryUnary(_MulticallableBase, grpc.UnaryUnaryMultiCallable):
    """One request, one response."""

    __slots__ = ()

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._wait(
            "__call__", request, timeout, metadata, credentials, wait_for_ready, compression
        )

    def with_call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._wait(
            "with_call", request, timeout, metadata, credentials, wait_for_ready, compression
        )

    def future(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(
            "future", request, timeout, metadata, credentials, wait_for_ready, compression
        )


class StreamUnary(_MulticallableBase, grpc.StreamUnaryMultiCallable):
    """A stream of requests, one response."""

    __slots__ = ()

    def __call__(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._wait(
            "__call__",
            request_iterator,
            timeout,
            metadata,
            credentials,
            wait_for_ready,
            compression,
        )

    def with_call(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._wait(
            "with_call",
            request_iterator,
            timeout,
            metadata,
            credentials,
            wait_for_ready,
            compression,
        )

    def future(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(
            "future", request_iterator, timeout, metadata, credentials, wait_for_ready, compression
        )


class UnaryStream(_MulticallableBase, grpc.UnaryStreamMultiCallable):
    """One request, a stream of responses."""

    __slots__ = ()

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(
            "__call__", request, timeout, metadata, credentials, wait_for_ready, compression
        )


class StreamStream(_MulticallableBase, grpc.StreamStreamMultiCallable):
    """A stream of requests, a stream of responses."""

    __slots__ = ()

    def __call__(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(
            "__call__",
            request_iterator,
            timeout,
            metadata,
            credentials,
            wait_for_ready,
            compression,
        )


MULTICALLABLES: Final[Mapping[Kind, tuple[type, ...]]] = {
    Kind.UNARY_UNARY: (UnaryUnary,),
    Kind.UNARY_STREAM: (UnaryStream,),
    Kind.STREAM_UNARY: (StreamUnary,),
    Kind.STREAM_STREAM: (StreamStream,),
}
"""For `classes_by_kind`."""
