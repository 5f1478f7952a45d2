"""The multi-callables of a channel of many members, for threads: grpc's four kinds."""

from __future__ import annotations

from typing import Any

import grpc

from ._pushing import Pushing
from ._tries import Method

__all__ = ["StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class UnaryUnary(Method, grpc.UnaryUnaryMultiCallable):
    """One request, one response."""

    __slots__ = ()

    def __call__(  # noqa: PLR0917 - as grpc has it
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait("__call__", request, *options)

    def with_call(  # noqa: PLR0917 - as grpc has it
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait("with_call", request, *options)

    def future(  # noqa: PLR0917 - as grpc has it
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin("future", request, *options)


class StreamUnary(Pushing, grpc.StreamUnaryMultiCallable):
    """Many requests, one response."""

    __slots__ = ()

    def __call__(  # noqa: PLR0917 - as grpc has it
        self,
        request_iterator: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait_streaming("__call__", request_iterator, *options)

    def with_call(  # noqa: PLR0917 - as grpc has it
        self,
        request_iterator: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._wait_streaming("with_call", request_iterator, *options)

    def future(  # noqa: PLR0917 - as grpc has it
        self,
        request_iterator: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin_streaming("future", request_iterator, *options)


class UnaryStream(Method, grpc.UnaryStreamMultiCallable):
    """One request, many responses."""

    __slots__ = ()

    def __call__(  # noqa: PLR0917 - as grpc has it
        self,
        request: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin("__call__", request, *options)


class StreamStream(Pushing, grpc.StreamStreamMultiCallable):
    """Many requests, many responses."""

    __slots__ = ()

    def __call__(  # noqa: PLR0917 - as grpc has it
        self,
        request_iterator: Any,  # noqa: ANN401
        timeout: float | None = None,
        metadata: Any = None,  # noqa: ANN401
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: FBT001
        compression: grpc.Compression | None = None,
    ) -> Any:  # noqa: ANN401
        options = timeout, metadata, credentials, wait_for_ready, compression
        return self._begin_streaming("__call__", request_iterator, *options)
