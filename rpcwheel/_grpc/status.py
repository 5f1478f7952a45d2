"""What a failed call tells: its status, what the server asked for, whether it was ever sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.call import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FORBID_NS", "is_unprocessed", "outcome_of_error", "pushback_ns"]

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
)
"""How gRPC's core begins the details of a call that it had no connection for (grpcio 1.60 to
1.85)."""

_REFUSED: Final = "Concurrent RPC limit exceeded!"
"""How a Python server with `maximum_concurrent_rpcs` refuses a call that it did not begin."""


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
    """Whether a failure is one that gRPC makes before any server has seen the request.

    A server that hands on the details of a failure of its own may look the same if it sends no
    metadata with it; hence no more than this is taken for sure.
    """
    if trailing or initial or not details:
        return False
    if code == "UNAVAILABLE":
        return details.startswith(_NEVER_SENT)
    return code == "RESOURCE_EXHAUSTED" and details == _REFUSED


def outcome_of_error(error: Any, *, committed: bool = False) -> Outcome:  # noqa: ANN401
    """How a try ended that gave `error`: a `grpc.RpcError` with a code, or anything else.

    Takes the finished calls of `grpc` and the errors of both worlds, which answer at once, and
    errors of inner interceptors, which may know no more than their code.
    """
    code = _said(error, "code") if isinstance(error, grpc.RpcError) else None
    if not isinstance(code, grpc.StatusCode):
        return Outcome(code="UNKNOWN", error=error, committed=True)
    trailing, initial = _said(error, "trailing_metadata"), _said(error, "initial_metadata")
    return Outcome(
        code=code.name,
        error=error,
        pushback_ns=pushback_ns(trailing),
        unprocessed=is_unprocessed(code.name, _said(error, "details"), trailing, initial),
        committed=committed,
    )


def _said(error: grpc.RpcError, name: str) -> Any:  # noqa: ANN401
    answer = getattr(error, name, None)
    return answer() if callable(answer) else None
