"""Multicallables of `grpc` for the four kinds of call, reduced to two methods.

A class that precedes one of these in the bases defines `_wait` and `_begin`. Both get the name of
gRPC's method, the request or the iterator of requests, and gRPC's options in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class _Multicallable:
    __slots__ = ()

    _wait: Callable[..., Any]
    """Makes a call on the caller's thread and returns its response."""

    _begin: Callable[..., Any]
    """Begins a call and returns it."""


class UnaryUnary(_Multicallable, grpc.UnaryUnaryMultiCallable):
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


class StreamUnary(_Multicallable, grpc.StreamUnaryMultiCallable):
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


class UnaryStream(_Multicallable, grpc.UnaryStreamMultiCallable):
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


class StreamStream(_Multicallable, grpc.StreamStreamMultiCallable):
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
