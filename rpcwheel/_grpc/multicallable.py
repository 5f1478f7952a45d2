"""The four kinds of multicallables of `grpc`, reduced to two methods.

A channel that chooses a connection for each call defines `_wait` and `_begin` in a class that
precedes these in the bases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class _Kind:
    """The two ways; each is given the name of grpc's method, what is sent, and grpc's options."""

    __slots__ = ()

    _wait: Callable[..., Any]
    """Carries a call out on its caller's thread."""

    _begin: Callable[..., Any]
    """Begins a call that goes on by itself."""


class UnaryUnary(_Kind, grpc.UnaryUnaryMultiCallable):
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
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait("__call__", request, *options)

    def with_call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait("with_call", request, *options)

    def future(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin("future", request, *options)


class StreamUnary(_Kind, grpc.StreamUnaryMultiCallable):
    """Many requests, one response."""

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
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait("__call__", request_iterator, *options)

    def with_call(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait("with_call", request_iterator, *options)

    def future(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin("future", request_iterator, *options)


class UnaryStream(_Kind, grpc.UnaryStreamMultiCallable):
    """One request, many responses."""

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
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin("__call__", request, *options)


class StreamStream(_Kind, grpc.StreamStreamMultiCallable):
    """Many requests, many responses."""

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
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin("__call__", request_iterator, *options)
