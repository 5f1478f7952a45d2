"""Calls of `grpc.aio` that were ended by the client: with an error, or with a response.

Each has the whole interface of a call of its kind, for callers and outer interceptors.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.rpc import Kind

from .calls import (
    ENDED_HERE,
    FailureStatus,
    aio_metadata,
    has_status,
    metadata_of,
    refused_classes,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable

    from rpcwheel.errors import FailbackError

OK: Final = grpc.StatusCode.OK
CANCELLED: Final = grpc.StatusCode.CANCELLED

FINISHED: Final = "RPC already finished."
"""The text of grpc.aio's error for a write to a call that has ended."""

HALF_CLOSED: Final = 'RPC is half closed after calling "done_writing".'
"""The text of grpc.aio's error for a write after `done_writing`."""


def failed_with(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    """Make an error with empty metadata, which `AioRpcError` requires before grpcio 1.82."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Refused(grpc.aio.AioRpcError):
    """The error of a failed call that failback could not queue; its text is the reason."""

    def __str__(self) -> str:
        return self.details() or ""


_refused_class: Final = refused_classes(_Refused, globals())


def refused_by(refusal: FailbackError, error: BaseException) -> grpc.aio.AioRpcError:
    """Make the error of a call that could not be queued: a `FailbackError` and an `AioRpcError`.

    It has the code and the metadata of `error`, with which the call failed.
    """
    code, _, initial, trailing = FailureStatus.of(error)
    kind = _refused_class(refusal)
    refused = kind(code, aio_metadata(initial), aio_metadata(trailing), str(refusal))
    refused.__cause__ = error
    return refused


def _copy(error: BaseException) -> BaseException:
    """Copy a status, as grpc.aio makes a new one each time that it raises it.

    A call would be in a cycle with a status that it keeps and raises: by the frames.
    """
    kind = type(error)
    if kind is not grpc.aio.AioRpcError and not isinstance(error, _Refused):
        return error
    copy = kind.__new__(kind)
    vars(copy).update(vars(error))  # also notes, and the marks of `set_not_sent`
    copy.__cause__, copy.__context__ = error.__cause__, error.__context__
    copy.__suppress_context__ = error.__suppress_context__
    return copy.with_traceback(error.__traceback__)  # of an interceptor


class FinishedCall(grpc.aio.Call):
    """A call that has ended. Made by `finished_call` and `failed_call`."""

    is_new = False
    """Whether the call ended when it began, and its caller does not know yet."""

    def __init__(
        self, *, result: Any = None, error: BaseException | None = None, status: object = None
    ) -> None:
        """Make a call that has ended.

        Args:
            result: The response, or a sequence of responses; None for no responses.
            error: The exception to raise when the call is awaited or read; None if it succeeded.
            status: An object with the status and metadata, such as an `AioRpcError`. The error of
                another interceptor may have only a code.
        """
        self._result = result
        self.error = error
        self._status = status

    def cancelled(self) -> bool:
        return value_of(self._status, "code") is CANCELLED

    def done(self) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None

    def cancel(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return aio_metadata(metadata_of(self._status, "initial_metadata"))

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return aio_metadata(metadata_of(self._status, "trailing_metadata"))

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = value_of(self._status, "code")
        return code

    async def details(self) -> Any:
        return value_of(self._status, "details")

    async def debug_error_string(self) -> str | None:
        text: str | None = value_of(self._status, "debug_error_string")
        return text

    async def wait_for_connection(self) -> None:
        self._raise()

    def failure(self) -> BaseException | None:
        """Return the exception that the call raises; None if it succeeded."""
        return None if self.error is None else _copy(self.error)

    def _raise(self) -> None:
        if self.error is not None:
            raise _copy(self.error)  # in no variable: this frame would be in a cycle with it


class _Awaited(FinishedCall):
    """A call with one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        self._raise()
        yield from ()  # makes it a generator
        return self._result


class _Read(FinishedCall):
    """A call with a stream of responses."""

    _unread: AsyncIterator[Any] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._unread is None:
            self._unread = self._iterate()
        return self._unread

    async def read(self) -> Any:
        async for message in self:
            return message
        self._raise()
        return grpc.aio.EOF

    async def _iterate(self) -> AsyncIterator[Any]:
        self._raise()
        for message in () if self._result is None else self._result:
            yield message


class _Written(FinishedCall):
    """A call with a stream of requests."""

    _done_writing_flag = True  # grpc.aio (1.85) reads it from any call that an interceptor returns

    async def write(self, _: object) -> None:
        """Raise the status if the call ended when it began and this is its first `write`."""
        if self.is_new:
            self.is_new = False
            self._raise()
        raise asyncio.InvalidStateError(FINISHED)

    async def done_writing(self) -> None:
        """Do nothing: the call has ended."""


class _UnaryUnary(_Awaited, grpc.aio.UnaryUnaryCall[Any, Any]):
    pass


class _UnaryStream(_Read, grpc.aio.UnaryStreamCall[Any, Any]):
    pass


class _StreamUnary(_Written, _Awaited, grpc.aio.StreamUnaryCall[Any, Any]):
    pass


class _StreamStream(_Written, _Read, grpc.aio.StreamStreamCall[Any, Any]):
    pass


_FINISHED: Final = {
    Kind.UNARY_UNARY: _UnaryUnary,
    Kind.UNARY_STREAM: _UnaryStream,
    Kind.STREAM_UNARY: _StreamUnary,
    Kind.STREAM_STREAM: _StreamStream,
}


def finished_call(
    kind: Kind,
    code: grpc.StatusCode,
    details: str | None,
    *,
    result: Any = None,
    initial: Iterable[tuple[str, str | bytes]] | None = None,
    trailing: Iterable[tuple[str, str | bytes]] | None = None,
) -> FinishedCall:
    """Make a call that has ended with a status.

    If the code is not OK, the call raises the status. If the client canceled it (code CANCELLED
    with the details of grpc.aio), it raises `CancelledError`, as calls of grpc.aio do. The `result`
    of a response stream is a sequence of responses, or None.
    """
    status = grpc.aio.AioRpcError(
        code, aio_metadata(initial), aio_metadata(trailing), details, details
    )
    error: BaseException | None = None if code is OK else status
    if code is CANCELLED and details in ENDED_HERE:
        error = asyncio.CancelledError()
    return _FINISHED[kind](result=result, error=error, status=status)


def failed_call(kind: Kind, error: BaseException) -> FinishedCall:
    """Make a call that has ended with an error. Without a status its code is UNKNOWN."""
    if has_status(error):
        return _FINISHED[kind](error=error, status=error)
    status = failed_with(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
    return _FINISHED[kind](error=error, status=status)
