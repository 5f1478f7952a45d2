"""Channels and multicallables of `grpc.aio`, with one implementation for the four kinds of call.

A subclass of `Channel` defines `_multicallable`. A class that precedes those of `MULTICALLABLES` in
the bases defines `_begin`, which gets the request or the requests, and gRPC's options in the order
of `grpc`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType


class Channel(grpc.aio.Channel):
    """A channel that makes the multicallables of all kinds in one method."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable. Gets all arguments of gRPC's own, such as `_registered_method`."""
        raise NotImplementedError

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable."""
        return self._multicallable(Kind.UNARY_UNARY, method, *args, **options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable."""
        return self._multicallable(Kind.UNARY_STREAM, method, *args, **options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable."""
        return self._multicallable(Kind.STREAM_UNARY, method, *args, **options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable."""
        return self._multicallable(Kind.STREAM_STREAM, method, *args, **options)


class _OneRequest:
    _begin: Callable[..., Any]

    def __call__(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(request, timeout, metadata, credentials, wait_for_ready, compression)


class _ManyRequests:
    _begin: Callable[..., Any]

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(
            request_iterator, timeout, metadata, credentials, wait_for_ready, compression
        )


INTERFACES: Final[Mapping[Kind, tuple[type, ...]]] = {
    Kind.UNARY_UNARY: (grpc.aio.UnaryUnaryMultiCallable,),
    Kind.UNARY_STREAM: (grpc.aio.UnaryStreamMultiCallable,),
    Kind.STREAM_UNARY: (grpc.aio.StreamUnaryMultiCallable,),
    Kind.STREAM_STREAM: (grpc.aio.StreamStreamMultiCallable,),
}
"""For `classes_by_kind`: gRPC's abstract classes."""

MULTICALLABLES: Final[Mapping[Kind, tuple[type, ...]]] = {
    kind: (_ManyRequests if kind.streams_requests else _OneRequest, *interface)
    for kind, interface in INTERFACES.items()
}
"""For `classes_by_kind`: classes with gRPC's signatures, which call `_begin`."""
