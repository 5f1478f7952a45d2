"""Calls of `grpc.aio` that have ended already: with a response, responses, or an error.

They are given to callers (and outer interceptors) in place of a call that the server answers, and
have the whole interface of a call of grpc.aio.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.rpc import Kind

from .calls import metadata_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable

    from rpcwheel.errors import FailbackError

__all__ = [
    "CANCELLED",
    "CANCELLED_HERE",
    "COLLECTED",
    "FINISHED",
    "OK",
    "FinishedCall",
    "failed_call",
    "failed_with",
    "finished_call",
    "refused_by",
    "status_of",
]

OK: Final = grpc.StatusCode.OK
CANCELLED: Final = grpc.StatusCode.CANCELLED

CANCELLED_HERE: Final = "Locally cancelled by application!"
"""The details that grpc.aio gives a call that was canceled on this side (1.60 to 1.85)."""

COLLECTED: Final = "Cancelled upon garbage collection!"
"""The same, when the call was dropped."""

FINISHED: Final = "RPC already finished."
"""What grpc.aio raises when a request is written to a call that has ended."""


def status_of(error: BaseException) -> grpc.aio.AioRpcError:
    """A failure as an error of grpc.aio; that of another interceptor may have only a code."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error
    return grpc.aio.AioRpcError(
        _said(error, "code") or grpc.StatusCode.UNKNOWN,
        metadata_from(_said(error, "initial_metadata")),
        metadata_from(_said(error, "trailing_metadata")),
        _said(error, "details") or f"{type(error).__name__}: {error}",
    )


def failed_with(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    """An error without metadata, for a failure that was found on this side.

    Before grpcio 1.82 an `AioRpcError` must be given metadata.
    """
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Refused(grpc.aio.AioRpcError):
    """The error of a call that failed and could not be queued; its text is the reason."""

    def __str__(self) -> str:
        return self.details() or ""


class FailbackFullRpc(_Refused, FailbackFull):
    """`FailbackFull` as an error of grpc.aio."""


class FailbackClosedRpc(_Refused, FailbackClosed):
    """`FailbackClosed` as an error of grpc.aio."""


def refused_by(refusal: FailbackError, error: BaseException) -> grpc.aio.AioRpcError:
    """Make the error of a call that could not be queued an error of `grpc.aio` too.

    `except grpc.RpcError` then catches it.

    Args:
        refusal: Why it could not be queued.
        error: How it failed; this one has its code and metadata.
    """
    kind = FailbackFullRpc if isinstance(refusal, FailbackFull) else FailbackClosedRpc
    status = status_of(error)
    made = kind(status.code(), status.initial_metadata(), status.trailing_metadata(), str(refusal))
    made.__cause__ = error
    return made


def _said(error: object, name: str) -> Any:
    method = getattr(error, name, None)
    return method() if callable(method) else None


class FinishedCall(grpc.aio.Call):
    """A call that has ended; see `finished_call`."""

    def __init__(
        self,
        *,
        result: Any = None,
        error: BaseException | None = None,
        status: Any = None,
    ) -> None:
        """Make a call that has ended.

        Args:
            result: The response, or the responses in a sequence (None is none).
            error: What awaiting or reading raises; None if there is a result.
            status: The `AioRpcError`, or another object with its methods, that has the status and
                the metadata.
        """
        self._result = result
        self.error = error
        self._status = status

    def cancelled(self) -> bool:
        return self._status_has("code") is CANCELLED

    def done(self) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None

    def cancel(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return metadata_from(self._status_has("initial_metadata"))

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return metadata_from(self._status_has("trailing_metadata"))

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = self._status_has("code")
        return code

    async def details(self) -> Any:
        return self._status_has("details")

    async def debug_error_string(self) -> str | None:
        text: str | None = self._status_has("debug_error_string")
        return text

    async def wait_for_connection(self) -> None:
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _status_has(self, name: str) -> Any:
        """Ask the status; the error of another interceptor may have no more than a code."""
        return _said(self._status, name)


class _Awaited(FinishedCall):
    """With one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        self._raise()
        yield from ()  # makes it a generator
        return self._result


class _Read(FinishedCall):
    """With any number of responses."""

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
    """With requests that were to be written."""

    _done_writing_flag = True  # what grpc.aio (1.85) asks of whatever an interceptor returns

    async def write(self, _: object) -> None:
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
    error: BaseException | None = None,
    initial: Iterable[tuple[str, str | bytes]] | None = None,
    trailing: Iterable[tuple[str, str | bytes]] | None = None,
) -> FinishedCall:
    """Make a call that has ended with this status.

    Args:
        kind: Which of the four it is.
        code: OK for a `result`.
        details: For people.
        result: The response, or the responses in a sequence (None is none).
        error: What awaiting or reading raises. None with a code other than OK: the status itself,
            or `CancelledError` if the call was canceled on this side, as grpc.aio does.
        initial: Metadata.
        trailing: Metadata.
    """
    status = grpc.aio.AioRpcError(
        code, metadata_from(initial), metadata_from(trailing), details, details
    )
    if error is None and code is not OK:
        error = (
            asyncio.CancelledError()
            if code is CANCELLED and details in {CANCELLED_HERE, COLLECTED}
            else status
        )
    return _FINISHED[kind](result=result, error=error, status=status)


def failed_call(kind: Kind, error: BaseException, status: object = None) -> FinishedCall:
    """Make a call that has ended with an error; `status` has code and metadata if it has not."""
    if status is None:
        rpc_error = isinstance(error, grpc.RpcError) and callable(getattr(error, "code", None))
        status = (
            error
            if rpc_error
            else failed_with(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
        )
    return _FINISHED[kind](error=error, status=status)
