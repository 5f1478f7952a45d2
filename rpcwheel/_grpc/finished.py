"""Calls of `grpc` that were ended by the client: with an error, or with a default response.

Each has the whole interface of `grpc.Call` and `grpc.Future`, for callers and outer interceptors.
"""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from .calls import FailureStatus, refused_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from rpcwheel.errors import FailbackError

    from .calls import Metadata


class FinishedCall(grpc.Call, grpc.Future):
    """A call that was ended by the client: before it was sent, or after it failed."""

    def __init__(
        self, code: grpc.StatusCode, details: str, initial: Metadata, trailing: Metadata
    ) -> None:
        super().__init__()
        self._code = code
        self._details = details
        self._initial = initial
        self._trailing = trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def debug_error_string(self) -> str:
        """Return an empty string: gRPC's core has no description of this end."""
        return ""

    def initial_metadata(self) -> Metadata:
        return self._initial

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float | None:
        return None

    def add_callback(self, _: Callable[[], object]) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        fn(self)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of RPC that terminated with:\n"
            f"\tstatus = {self._code}\n"
            f'\tdetails = "{self._details}"\n>'
        )


class FinishedError(grpc.RpcError, FinishedCall):
    """A call that failed in the client. It raises itself, or the error that it was given."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        *,
        initial: Metadata = (),
        trailing: Metadata = (),
        error: BaseException | None = None,
        cancelled: bool = False,
    ) -> None:
        """Make a failed call, which raises `error`, or itself if that is None.

        If its caller has `cancelled` it, `result` raises `FutureCancelledError`.
        """
        FinishedCall.__init__(self, code, details, initial, trailing)
        self._other_error = error
        self._cancelled = cancelled

    __str__ = __repr__ = FinishedCall.__repr__

    def cancelled(self) -> bool:
        return self._cancelled

    def result(self, timeout: float | None = None) -> Any:
        if self._cancelled:
            raise grpc.FutureCancelledError
        raise self._error

    def exception(self, timeout: float | None = None) -> BaseException:
        if self._cancelled:
            raise grpc.FutureCancelledError
        return self._error

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        if self._cancelled:
            raise grpc.FutureCancelledError
        return self._error.__traceback__

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        raise self._error

    next = __next__

    @property
    def _error(self) -> BaseException:
        return self if self._other_error is None else self._other_error


class _Refused(FinishedError):
    """A failed call that failback could not queue: code and metadata of the failure."""

    def __init__(self, refusal: FailbackError, error: BaseException) -> None:
        code, _, initial, trailing = FailureStatus.of(error)
        super().__init__(code, str(refusal), initial=initial, trailing=trailing)

    def __str__(self) -> str:
        return self.details()

    def __reduce__(self) -> tuple[object, ...]:
        # Errors of the system, such as `JournalUnavailable`, would lose the arguments.
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]


_refused_class: Final = refused_classes(_Refused, globals())


def refused_by(refusal: FailbackError, error: BaseException) -> FinishedError:
    """Make the error of a call that could not be queued: a `FailbackError` and a failed call.

    `except grpc.RpcError` catches it, and grpc passes it to outer interceptors as the call. It has
    the code and the metadata of `error`, with which the call failed.
    """
    refused = _refused_class(refusal)(refusal, error)
    refused.__cause__ = error
    return refused


class FinishedResponse(FinishedCall):
    """A call with status OK and a response that is not from a server."""

    def __init__(
        self,
        response: Any,
        details: str,
        *,
        initial: Metadata = (),
        trailing: Metadata = (),
    ) -> None:
        """Make a successful call, with the metadata of the failed one."""
        super().__init__(grpc.StatusCode.OK, details, initial, trailing)
        self._response = response

    def result(self, timeout: float | None = None) -> Any:
        return self._response

    def exception(self, timeout: float | None = None) -> None:
        """Return None: the call succeeded."""

    def traceback(self, timeout: float | None = None) -> None:
        """Return None: the call succeeded."""


class FinishedStream(FinishedResponse):
    """A response stream with status OK and messages that are not from a server."""

    def __init__(
        self,
        messages: Iterable[Any] | None,
        details: str,
        *,
        initial: Metadata = (),
        trailing: Metadata = (),
    ) -> None:
        super().__init__(None, details, initial=initial, trailing=trailing)
        self._messages = iter(() if messages is None else messages)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._messages)

    next = __next__
