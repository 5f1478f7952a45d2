"""How a call was made, and how it ended: what grpcio leaves its client interceptors to find out.

A blocking call and one by `.future()` come to an interceptor in the same way, but the first expects
a call that has ended and the second one that still runs. Nothing public tells them apart.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AnyCall",
    "InternalCallback",
    "blocks",
    "call_at_end",
    "failure_of",
    "has_ended",
    "has_status",
    "is_single_threaded",
]

AnyCall: TypeAlias = Any
"""A call of grpc, or whatever another interceptor made of one."""


class InternalCallback(partial):  # type: ignore[type-arg]
    """A function of ours, called when a call has ended: it takes note or hands over, no more.

    So it may run on any thread at once, where a user's has to wait for a worker. A partial for
    grpcio 1.85: a plain function that raises ends its channel's thread, because the error log asks
    for `callback.func`.
    """


def blocks(continuation: object) -> bool | None:
    """Whether a caller waits for the end of the unary call that `continuation` makes.

    By the names of grpcio's own closures (1.60 to 1.85); `tests/legacy/_grpc/test_styles.py` tells
    when they change. None for any other function: then `has_ended` tells it by what it returned.
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
