"""Facts about calls of `grpc` and `grpc.aio`: what they are made with, and how they ended.

Several are not public in grpcio, or only by the text of a status: the versions on which they were
verified stand with each.
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

# --- What a call is made with ---


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
    """`grpc`'s call details; `_replace` makes a changed copy."""


def details_of(given: Any) -> Details:
    """Make ours of any call details; attributes that are missing are None, as grpc takes them."""
    fields: Any = (getattr(given, name, None) for name in Details._fields)
    return Details(*fields)


def details_with(given: Any, timeout: float | None) -> Details:
    """The same with another timeout. In one go where nothing is missing: it runs for every call."""
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
    """`grpc.aio`'s call details, a namedtuple too."""


def metadata_of(given: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Metadata as a tuple of pairs, from None, a list, a tuple or `grpc.aio.Metadata`."""
    return () if given is None else tuple((key, value) for key, value in given)


def metadata_from(given: Iterable[tuple[str, str | bytes]] | None) -> grpc.aio.Metadata:
    """Metadata as `grpc.aio.Metadata`, from any form or None."""
    if isinstance(given, grpc.aio.Metadata):
        return given
    return grpc.aio.Metadata(*(given or ()))


# --- How a call was begun, and whether it has ended ---

AnyCall: TypeAlias = Any
"""A call of grpc, or whatever another interceptor made of one."""


class InternalCallback(partial):  # type: ignore[type-arg]
    """A callback of rpcwheel at the end of a call. It only sets state, or submits work.

    So it may run on any thread at once, where a user's has to wait for a worker. A partial for
    grpcio 1.85: a plain function that raises ends its channel's thread, because the error log asks
    for `callback.func`.
    """


def blocks(continuation: object) -> bool | None:
    """Whether the caller of a unary call blocks until its end; None if that is not known.

    Decided by the names of gRPC's own closures (1.60 to 1.85, a canary in
    `tests/interop/grpcio/test_canaries_client.py`). For other functions it is not known; after the
    call, `has_ended` tells.
    """
    name = getattr(continuation, "__qualname__", "")
    if name.endswith("._with_call.<locals>.continuation"):
        return True
    if name.endswith(".future.<locals>.continuation"):
        return False
    return None


def has_ended(call: AnyCall) -> bool:
    """Whether a call has ended. What can't tell has: it is nothing to wait for."""
    done = getattr(call, "done", None)
    return done is None or bool(done())


def failure_of(call: AnyCall) -> BaseException | None:
    """How a call failed, once it has ended; None if it succeeded. Waits for a call that runs.

    A call that was cancelled on this side gives `grpc.FutureCancelledError`, which has no status.
    """
    tell = getattr(call, "exception", None)
    if tell is None:
        return call if isinstance(call, BaseException) else None
    try:
        error: BaseException | None = tell()
    except grpc.FutureCancelledError as cancelled:
        return cancelled
    return error


def has_status(error: BaseException) -> bool:
    """Whether it is a failure of a call, and not a bug or a cancellation on this side."""
    return isinstance(error, grpc.RpcError) and callable(getattr(error, "code", None))


def is_single_threaded(call: object) -> bool:
    """Whether it is a response stream that makes progress only while it is read.

    As grpcio (1.60 to 1.85) makes them with the option `SingleThreadedUnaryStream`.
    """
    return type(call).__name__ == "_SingleThreadedRendezvous"


def call_at_end(call: AnyCall, hook: Callable[[], object]) -> None:
    """Call `hook` when a call has ended, on any thread; the call itself is not kept for that.

    `add_done_callback` would hold the call, which then would not be cancelled when its user drops
    it.
    """
    add = getattr(call, "add_callback", None)
    if add is None or not add(InternalCallback(hook)):
        hook()


# --- How a call failed ---

_CLOSED: Final = {
    "Cannot invoke RPC on closed channel!",  # `ValueError` of grpc, for calls with one answer
    "Cannot invoke RPC: Channel closed!",  # the same, for streams and futures
    "Channel is closed.",  # `UsageError` of grpc.aio
}
"""The errors of a call that is made on a closed channel (grpcio 1.60 to 1.85)."""

_CLOSED_MEANWHILE: Final = "Channel closed!"
"""The details of a call of `grpc` that ran when its channel was closed. One of `grpc.aio` raises a
bare `asyncio.CancelledError`."""


def is_channel_closed(error: BaseException) -> bool:
    """Whether a call failed because its channel was closed on this side, before it or meanwhile."""
    if isinstance(error, grpc.RpcError):
        cancelled = _said(error, "code") is grpc.StatusCode.CANCELLED
        return cancelled and _said(error, "details") == _CLOSED_MEANWHILE
    return isinstance(error, (ValueError, grpc.aio.UsageError)) and str(error) in _CLOSED


def _said(error: grpc.RpcError, name: str) -> Any:
    answer = getattr(error, name, None)
    return answer() if callable(answer) else None
