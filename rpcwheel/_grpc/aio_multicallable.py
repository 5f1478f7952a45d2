"""Base classes for channels and multicallables of `grpc.aio` that wrap those of gRPC.

A subclass needs one implementation for the four kinds of call:

* A subclass of `Channel` defines `_multicallable(kind, method, ...)`, which makes multicallables of
  all kinds.
* A multicallable defines `_begin`, which gets the arguments of all kinds in one order: the request
  or the iterator of requests, timeout, metadata, credentials, wait_for_ready, compression. It
  returns the call. `classes_by_kind(Base, MULTICALLABLES)` (of `rpcwheel.rpc`) makes from a class
  with this method the four classes that callers expect.

`rpcwheel._grpc.multicallable` has the same for `grpc`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel.rpc import Kind

from .calls import ChannelMethods

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType


class Channel(ChannelMethods, grpc.aio.Channel):
    """Base of channels of `grpc.aio`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class _OneRequest:
    """gRPC's signature for one request, whose options are keywords only."""

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
    """gRPC's signature for a stream of requests, whose options may be positional."""

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
"""gRPC's abstract class of each kind, for multicallables that define `__call__` themselves."""

MULTICALLABLES: Final[Mapping[Kind, tuple[type, ...]]] = {
    kind: (_ManyRequests if kind.streams_requests else _OneRequest, *interface)
    for kind, interface in INTERFACES.items()
}
"""The bases of each kind for multicallables that define `_begin`: gRPC's signature, and gRPC's
abstract class."""
