"""Calls of `grpc`: the details that they are made with, and how they ended.

Some facts are not public in grpcio, or only as the text of a status. Each of these names the
versions of grpcio on which it was verified.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Metadata = tuple[tuple[str, str | bytes], ...]

__all__ = [
    "AioDetails",
    "AnyCall",
    "Details",
    "InternalCallback",
    "ask",
    "blocks",
    "call_at_end",
    "details_of",
    "details_with",
    "failure_of",
    "has_ended",
    "has_status",
    "is_channel_closed",
    "is_single_threaded",
    "metadata_from",
    "metadata_of",
]

AnyCall: TypeAlias = Any
"""A call of grpc, or the object that another interceptor returns in its place."""

# --- Call details and metadata ---


class Details(
    NamedTuple(
        "_Details",
        [
            ("method", str),
            ("timeout", "float | None"),
            ("metadata", "Metadata | None"),
            ("credentials", "grpc.CallCredentials | None"),
            ("wait_for_ready", "bool | None"),
            ("compression", "grpc.Compression | None"),
        ],
    ),
    grpc.ClientCallDetails,
):
    """Call details of `grpc`; `_replace` makes a changed copy."""


def details_of(given: Any) -> Details:
    """Copy any call details. An attribute that is missing becomes None, as in grpc."""
    fields: Any = (getattr(given, name, None) for name in Details._fields)
    return Details(*fields)


def details_with(given: Any, timeout: float | None) -> Details:
    """Copy any call details with another timeout.

    Runs for every call, so details with all attributes are copied without `getattr`.
    """
    try:
        return Details(
            given.method,
            timeout,
            given.metadata,
            given.credentials,
            given.wait_for_ready,
            given.compression,
        )
    except AttributeError:
        return details_of(given)._replace(timeout=timeout)


class AioDetails(grpc.aio.ClientCallDetails):
    """Call details of `grpc.aio`; `_replace` makes a changed copy."""


def metadata_of(given: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Return metadata of any form (None, list, tuple, `grpc.aio.Metadata`) as a tuple of pairs."""
    return () if given is None else tuple((key, value) for key, value in given)


def metadata_from(given: Iterable[tuple[str, str | bytes]] | None) -> grpc.aio.Metadata:
    """Return metadata of any form as `grpc.aio.Metadata`."""
    if isinstance(given, grpc.aio.Metadata):
        return given
    return grpc.aio.Metadata(*(given or ()))


# --- The style of a call, and its end ---


class InternalCallback(partial):  # type: ignore[type-arg]
    """A done-callback of rpcwheel, which only sets state or submits work to a worker.

    It may therefore run on gRPC's threads. Callbacks of users run on a worker.

    It is a `partial` for grpcio 1.85: if a plain function raises, the thread of its channel ends,
    because the error log reads `callback.func`.
    """


def blocks(continuation: object) -> bool | None:
    """Whether the caller of a unary call blocks until its end; None if that is not known.

    Decided by the names of gRPC's own closures (1.60 to 1.85, a canary in
    `tests/interop/grpcio/test_canaries_client.py`). For other functions it is not known; after the
    call, use `has_ended`.
    """
    name = getattr(continuation, "__qualname__", "")
    if name.endswith("._with_call.<locals>.continuation"):
        return True
    if name.endswith(".future.<locals>.continuation"):
        return False
    return None


def has_ended(call: AnyCall) -> bool:
    """Whether a call has ended. True for an object without `done()`: its end is never reported."""
    done = getattr(call, "done", None)
    return done is None or bool(done())


def failure_of(call: AnyCall) -> BaseException | None:
    """Return the failure of a call; None if it succeeded. Waits for the end of a running call.

    The failure of a call that was canceled on this side is a `grpc.FutureCancelledError`, which has
    no status.
    """
    exception = getattr(call, "exception", None)
    if exception is None:
        return call if isinstance(call, BaseException) else None
    try:
        error: BaseException | None = exception()
    except grpc.FutureCancelledError as canceled:
        return canceled
    return error


def has_status(error: BaseException) -> bool:
    """Whether an error is the status of a call, not a bug or a cancellation on this side."""
    return isinstance(error, grpc.RpcError) and callable(getattr(error, "code", None))


def ask(call: object, name: str) -> Any:
    """Call a method of a call or an error, such as `code`; None if it has no such method.

    An error of another interceptor may have only some of the methods.
    """
    method = getattr(call, name, None)
    return method() if callable(method) else None


def is_single_threaded(call: object) -> bool:
    """Whether a call is a response stream that makes progress only while it is read.

    grpcio (1.60 to 1.85) makes such streams with the option `SingleThreadedUnaryStream`.
    """
    return type(call).__name__ == "_SingleThreadedRendezvous"


def call_at_end(call: AnyCall, callback: Callable[[], object]) -> None:
    """Call a function when a call has ended, on any thread; does not keep the call alive.

    (`add_done_callback` keeps it alive; then a call that its user drops is not canceled.)
    """
    add = getattr(call, "add_callback", None)
    if add is None or not add(InternalCallback(callback)):
        callback()


# --- Closed channels ---

_CLOSED: Final = {
    "Cannot invoke RPC on closed channel!",  # `ValueError` of grpc, for calls with one response
    "Cannot invoke RPC: Channel closed!",  # the same, for response streams and futures
    "Channel is closed.",  # `UsageError` of grpc.aio
}
"""The errors of a call that is made on a closed channel (grpcio 1.60 to 1.85)."""

_CLOSED_DURING_CALL: Final = "Channel closed!"
"""The details of a call of `grpc` that ran when its channel was closed. A call of `grpc.aio` raises
a `CancelledError` without a text."""


def is_channel_closed(error: BaseException) -> bool:
    """Whether a call failed because its channel was closed on this side, before or during it."""
    if isinstance(error, grpc.RpcError):
        canceled = ask(error, "code") is grpc.StatusCode.CANCELLED
        return canceled and ask(error, "details") == _CLOSED_DURING_CALL
    return isinstance(error, (ValueError, grpc.aio.UsageError)) and str(error) in _CLOSED
