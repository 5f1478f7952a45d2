"""What a failed call tells: its status, and what the server asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.rpc import AttemptResult

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FORBID_NS", "is_channel_closed", "is_unprocessed", "outcome_of_error", "pushback_ns"]

PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
FORBID_NS: Final = -1
LONGEST_DIGITS: Final = 12
"""Thirty years. Python refuses to read a number of thousands of digits, which a server may send."""

_NEVER_SENT: Final = (
    "failed to connect to all addresses",
    "errors resolving ",
    "Name resolution failure",
    "DNS resolution failed",
    "connections to all backends failing",
    "no children in weighted_target",
    "empty address list",
    "no instance of ",
)
"""How gRPC's core begins the details of a call that it had no connection for (grpcio 1.60 to
1.85); the last one is how `rpcwheel.cluster` does."""

_CLOSED: Final = {
    "Cannot invoke RPC on closed channel!",  # `ValueError` of grpc, for calls with one answer
    "Cannot invoke RPC: Channel closed!",  # the same, for streams and futures
    "Channel is closed.",  # `UsageError` of grpc.aio
}
"""What a closed channel says to who makes a call (grpcio 1.60 to 1.85)."""

_CLOSED_MEANWHILE: Final = "Channel closed!"
"""The details of a call of `grpc` that ran when its channel was closed. One of `grpc.aio` raises a
bare `asyncio.CancelledError`."""


def pushback_ns(trailing: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """How long the server wants a retry to wait; `FORBID_NS` for never, None if it says nothing.

    What is no number means never (gRFC A6), and so does one that is longer than any wait.
    """
    for key, value in trailing or ():
        if key == PUSHBACK_KEY:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            number = text.isascii() and text.isdecimal() and len(text) <= LONGEST_DIGITS
            return int(text) * 1_000_000 if number else FORBID_NS
    return None


def is_unprocessed(code: str, details: str | None, trailing: object, initial: object) -> bool:
    """Whether a status has the text of one that gRPC makes before any server sees the request.

    This proves nothing: a server that passes on the failure of its own upstream sends the same
    text. Interceptors and channels do not use it. Users: `rpcwheel.cluster`, together with other
    signs, and the etcd provider, whose requests may be applied twice without harm.
    """
    if trailing or initial or not details:
        return False
    return code == "UNAVAILABLE" and details.startswith(_NEVER_SENT)


def is_channel_closed(error: BaseException) -> bool:
    """Whether a call failed because its channel was closed on this side, before it or meanwhile."""
    if isinstance(error, grpc.RpcError):
        cancelled = _said(error, "code") is grpc.StatusCode.CANCELLED
        return cancelled and _said(error, "details") == _CLOSED_MEANWHILE
    return isinstance(error, (ValueError, grpc.aio.UsageError)) and str(error) in _CLOSED


def outcome_of_error(
    error: Any,
    *,
    committed: bool = False,
) -> AttemptResult:
    """How a try ended that gave `error`: a `grpc.RpcError` with a code, or anything else.

    Takes the finished calls of `grpc` and the errors of both worlds, which answer at once, and
    errors of inner interceptors, which may know no more than their code.

    Args:
        error: What the try gave.
        committed: Whether it can't be made again.
    """
    code = _said(error, "code") if isinstance(error, grpc.RpcError) else None
    if not isinstance(code, grpc.StatusCode):
        return AttemptResult(code="UNKNOWN", error=error, committed=True)
    return AttemptResult(
        code=code.name,
        error=error,
        pushback_ns=pushback_ns(_said(error, "trailing_metadata")),
        committed=committed,
    )


def _said(error: grpc.RpcError, name: str) -> Any:
    answer = getattr(error, name, None)
    return answer() if callable(answer) else None
