"""Whether the channel behind a continuation has a connection.

gRPC fails a call at once, and sends nothing, only while its channel is in TRANSIENT_FAILURE: every
attempt to connect has failed since it last was connected. The status of such a call proves nothing
by itself, as a server that hands on a failure of its own upstream says the same words; together
with the state of the channel it does. A channel that has reconnected meanwhile says READY, which
errs on the safe side.

Interceptors are not told their channel, so it is looked up in what grpcio's own continuations hold
(proved on 1.60 and 1.85; `tests/_grpc/test_connectivity.py` will tell). Where it can't be found, as
behind a wrapper of somebody else's, nothing is proved.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["is_cut_off"]

TRANSIENT_FAILURE: Final = 3
"""Of core's `grpc_connectivity_state`."""

DEEPEST: Final = 32
"""Interceptors that a call is looked up through."""


def is_cut_off(continuation: Any) -> bool:  # noqa: ANN401 - grpcio's, or anybody's
    """Whether it is sure that the channel of a continuation has no connection now.

    Never raises; some microseconds.
    """
    try_to_connect = False
    try:
        channel = _core_channel(continuation)
        return channel is not None and (
            channel.check_connectivity_state(try_to_connect) == TRANSIENT_FAILURE
        )
    except Exception:  # noqa: BLE001 - closed, or of another make: nothing is proved
        return False


def _core_channel(continuation: Any) -> Any:  # noqa: ANN401
    """The channel of grpc's core; None if it can't be found."""
    aio = getattr(getattr(continuation, "func", None), "__self__", None)  # a partial of a method
    owner = _free(continuation, "self") if aio is None else aio
    if aio is None:
        owner = _free(getattr(owner, "_thunk", None), "self")
    for _ in range(DEEPEST):
        if owner is None or hasattr(owner, "check_connectivity_state"):
            return owner
        owner = getattr(owner, "_channel", None)
    return None


def _free(function: Any, name: str) -> Any:  # noqa: ANN401
    """What a function holds under this name from where it was made."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents
