"""Calls of `grpc.aio` that have ended before they began, and what a finished call tells at once.

`ended(kind, ...)` makes a call that no server answers (or no longer): it has its status, and either
a response, a sequence of them, or an error to raise. Outer interceptors and callers find all that
a call of grpc.aio has.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable

    from rpcwheel.errors import FailbackError

__all__ = [
    "CANCELLED_HERE",
    "FINISHED",
    "Ended",
    "blurred",
    "cancelled_here",
    "ended",
    "ended_by",
    "failed_with",
    "failure_of",
    "give_up",
    "has_ended",
    "immediately",
    "metadata_from",
    "refused_by",
    "status_of",
]

OK: Final = grpc.StatusCode.OK
CANCELLED: Final = grpc.StatusCode.CANCELLED

CANCELLED_HERE: Final = "Locally cancelled by application!"
"""The details that grpc.aio gives a call that was cancelled on this side (1.60 to 1.85)."""

COLLECTED: Final = "Cancelled upon garbage collection!"
"""The same, when the call was forgotten."""

FINISHED: Final = "RPC already finished."
"""What grpc.aio says to who writes to a call that has ended."""


BLURRED: Final = "Internal error from Core"
"""The details of the status INTERNAL that grpc.aio (1.60 to 1.85) makes up when a request can't be
written any more, though all that has happened may be that the server has ended the call early."""


class NotAtOnceError(Exception):
    """A coroutine had to wait."""


def immediately(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for, such as `code()` of a finished call.

    Raises:
        NotAtOnceError: It had to wait.
        BaseException: What it raised.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise NotAtOnceError


def failure_of(call: Any) -> BaseException | None:
    """What awaiting a finished call raises; None if it ended well.

    Raises:
        NotAtOnceError: It has not ended.
        BaseException: What an interceptor below raised instead of ending the call.
    """
    if isinstance(call, Ended):
        return call.error
    code = immediately(call.code())
    if code is OK:
        return None
    say = getattr(call, "debug_error_string", None)  # no part of the interface, but all have it
    error = grpc.aio.AioRpcError(
        code,
        immediately(call.initial_metadata()),
        immediately(call.trailing_metadata()),
        immediately(call.details()),
        None if say is None else immediately(say()),
    )
    return asyncio.CancelledError() if cancelled_here(error) else error


def status_of(error: BaseException) -> grpc.aio.AioRpcError:
    """A failure as grpc.aio tells it; one of an inner interceptor's may know only its code."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error
    return grpc.aio.AioRpcError(
        _said(error, "code") or grpc.StatusCode.UNKNOWN,
        metadata_from(_said(error, "initial_metadata")),
        metadata_from(_said(error, "trailing_metadata")),
        _said(error, "details") or f"{type(error).__name__}: {error}",
    )


def has_ended(call: Any) -> bool:
    """Whether a call has ended, if only because an interceptor of it raised.

    Before grpcio 1.83 its `done()` raises that too, if it is neither a status nor a cancellation;
    since then it is enough to ask that.
    """
    try:
        return bool(call.done())
    except Exception:  # noqa: BLE001 - whoever awaits the call gets it
        return True


def give_up(call: Any) -> bool:
    """Cancel a try, so that whoever writes to it learns of it; False if it had ended.

    Who waits to write the first request to a call of grpc.aio (1.60 to 1.85) waits for ever if it
    is cancelled before its metadata is on the way.
    """
    cancelled = bool(call.cancel())
    sent = getattr(call, "_metadata_sent", None)
    if isinstance(sent, asyncio.Event):
        sent.set()
    return cancelled


def failed_with(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    """A failure that was found on this side, so without metadata.

    Before grpcio 1.82 an `AioRpcError` can't be made without; since then it can be left out.
    """
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Refused(grpc.aio.AioRpcError):
    """The error of a call that failed and could not be queued. It reads as why."""

    def __str__(self) -> str:
        return self.details() or ""


class FailbackFullRpc(_Refused, FailbackFull):
    """`FailbackFull` as an error of grpc.aio."""


class FailbackClosedRpc(_Refused, FailbackClosed):
    """`FailbackClosed` as an error of grpc.aio."""


def refused_by(refusal: FailbackError, error: BaseException) -> grpc.aio.AioRpcError:
    """Make the error of a call that could not be queued one of `grpc.aio` too.

    So `except grpc.RpcError` finds it.

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


def blurred(call: Any) -> bool:
    """Whether a finished call may have another status than the one that it tells.

    The server's own status arrives an instant before or after the one that gRPC made up. If it
    arrives after, grpc.aio replaces the status but does not call the done-callbacks again (1.85.1).
    """
    return bool(immediately(call.details()) == BLURRED)


def cancelled_here(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call ended because it was cancelled on this side, by whomever."""
    return error.code() is CANCELLED and error.details() in (CANCELLED_HERE, COLLECTED)


def metadata_from(given: Iterable[tuple[str, str | bytes]] | None) -> grpc.aio.Metadata:
    """As `grpc.aio.Metadata`, from any form or None."""
    if isinstance(given, grpc.aio.Metadata):
        return given
    return grpc.aio.Metadata(*(given or ()))


class Ended(grpc.aio.Call):
    """A call that has ended; see `ended`."""

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
            status: The `AioRpcError`, or another with its methods, that tells the status and the
                metadata.
        """
        self._result = result
        self.error = error
        self._status = status

    def cancelled(self) -> bool:
        return self._tell("code") is CANCELLED

    def done(self) -> bool:
        return True

    def time_remaining(self) -> float | None:
        return None

    def cancel(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return metadata_from(self._tell("initial_metadata"))

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return metadata_from(self._tell("trailing_metadata"))

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = self._tell("code")
        return code

    async def details(self) -> Any:
        return self._tell("details")

    async def debug_error_string(self) -> str | None:
        text: str | None = self._tell("debug_error_string")
        return text

    async def wait_for_connection(self) -> None:
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _tell(self, name: str) -> Any:
        """What the status says; an inner interceptor's own error may know no more than a code."""
        return _said(self._status, name)


class _Answer(Ended):
    """One that has one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        self._raise()
        yield from ()  # makes it a generator
        return self._result


class _Answers(Ended):
    """One that has any number of responses."""

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


class _Written(Ended):
    """One that requests were to be written to."""

    _done_writing_flag = True  # what grpc.aio (1.85) asks of whatever an interceptor returns

    async def write(self, _: object) -> None:
        raise asyncio.InvalidStateError(FINISHED)

    async def done_writing(self) -> None:
        """Nothing: it has ended."""


class _UnaryUnary(_Answer, grpc.aio.UnaryUnaryCall[Any, Any]):
    pass


class _UnaryStream(_Answers, grpc.aio.UnaryStreamCall[Any, Any]):
    pass


class _StreamUnary(_Written, _Answer, grpc.aio.StreamUnaryCall[Any, Any]):
    pass


class _StreamStream(_Written, _Answers, grpc.aio.StreamStreamCall[Any, Any]):
    pass


_ENDED: Final = {
    Kind.UNARY_UNARY: _UnaryUnary,
    Kind.UNARY_STREAM: _UnaryStream,
    Kind.STREAM_UNARY: _StreamUnary,
    Kind.STREAM_STREAM: _StreamStream,
}


def ended(
    kind: Kind,
    code: grpc.StatusCode,
    details: str | None,
    *,
    result: Any = None,
    error: BaseException | None = None,
    initial: Iterable[tuple[str, str | bytes]] | None = None,
    trailing: Iterable[tuple[str, str | bytes]] | None = None,
) -> Ended:
    """Make a call that has ended with this status.

    Args:
        kind: Which of the four it is.
        code: OK for a `result`.
        details: For people.
        result: The response, or the responses in a sequence (None is none).
        error: What awaiting or reading raises. None with a code other than OK: the status itself,
            or `CancelledError` where it was cancelled on this side, as grpc.aio does.
        initial: Metadata.
        trailing: Metadata.
    """
    status = grpc.aio.AioRpcError(
        code, metadata_from(initial), metadata_from(trailing), details, details
    )
    if error is None and code is not OK:
        error = asyncio.CancelledError() if cancelled_here(status) else status
    return _ENDED[kind](result=result, error=error, status=status)


def ended_by(kind: Kind, error: BaseException, status: object = None) -> Ended:
    """Make a call that has ended with an error; `status` says code and metadata, if not itself."""
    if status is None:
        rpc_error = isinstance(error, grpc.RpcError) and callable(getattr(error, "code", None))
        status = (
            error
            if rpc_error
            else failed_with(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
        )
    return _ENDED[kind](error=error, status=status)
