"""What grpc's core knows of the connection below a channel, and the end of all calls on it.

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

import time
from typing import Any, Final

import grpc
from grpc._cython import cygrpc

__all__ = [
    "STATES",
    "core_below",
    "end_calls",
    "is_cut_off",
    "is_polled",
    "state_below",
    "wait_unpolled",
]

TRANSIENT_FAILURE: Final = 3
"""Of core's `grpc_connectivity_state`."""

STATES: Final = (
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.CONNECTING,
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
"""In the order of core's `grpc_connectivity_state`."""

DEEPEST: Final = 32
"""Interceptors that a call is looked up through."""

LONGEST_POLL_S: Final = 0.5
POLL_S: Final = 0.005
"""How long, and how often, to look whether gRPC's polling thread has ended; it takes 0.2 s, or
twice that if it has just been asked to connect."""


def is_cut_off(continuation: Any) -> bool:  # noqa: ANN401 - grpcio's, or anybody's
    """Whether it is sure that the channel of a continuation has no connection now.

    Asked right after a call has ended. A channel on the way that has more than one connection says
    so itself, by a method of the same name. Never raises; some microseconds.
    """
    try:
        owner = _walk(_owner_of(continuation), "is_cut_off", "check_connectivity_state")
        own: Any = getattr(owner, "is_cut_off", None)
        if own is not None:
            return bool(own())
        return owner is not None and _state_of(owner) == TRANSIENT_FAILURE
    except Exception:  # noqa: BLE001 - closed, or of another make: nothing is proved
        return False


def core_below(channel: Any) -> Any:  # noqa: ANN401 - any make of channel, and core's own
    """The channel of grpc's core below a channel and its interceptors; None if it can't be found.

    grpcio 1.60 to 1.85 keep it, and each channel that interceptors are put on, as `_channel`.
    """
    return _walk(channel, "check_connectivity_state")


def state_below(
    channel: Any,  # noqa: ANN401
    *,
    try_to_connect: bool = False,
) -> grpc.ChannelConnectivity | None:
    """The state of the connection below a channel; None if it can't be known, SHUTDOWN if closed.

    Args:
        channel: Of grpc's make, or with interceptors on.
        try_to_connect: Whether to begin to connect if it is IDLE.
    """
    core = core_below(channel)
    if core is None:
        return None
    try:
        return STATES[_state_of(core, try_to_connect)]
    except ValueError:  # "Cannot invoke RPC: Channel closed!"
        return grpc.ChannelConnectivity.SHUTDOWN


def end_calls(channel: grpc.Channel, details: str) -> None:
    """Close a channel; its calls end with UNAVAILABLE and these details.

    Of a channel whose core can't be found they end with CANCELLED, as `close` does it. Waits until
    grpc's thread has told the ends, so any thread but that one; any number of times.

    Args:
        channel: Of grpc's make, or with interceptors on.
        details: Why; what no UTF-8 can say of it is replaced.
    """
    core = core_below(channel)
    try:
        if core is not None:
            readable = details.encode(errors="backslashreplace").decode()
            core.close(cygrpc.StatusCode.unavailable, readable)
    finally:
        channel.close()


def is_polled(channel: Any) -> bool:  # noqa: ANN401
    """Whether a thread of grpc's still looks for changes of a channel's state.

    It does so for up to 0.2 s after nobody has subscribed any more, and raises if the channel is
    closed in the wrong moment of that (grpc #18995).
    """
    for _ in range(DEEPEST):
        state = getattr(channel, "_connectivity_state", None)
        if state is not None:
            return bool(getattr(state, "polling", False))
        channel = getattr(channel, "_channel", None)
    return False


def wait_unpolled(*channels: object) -> None:
    """Wait until no thread of grpc's looks for changes of these channels' states any more.

    Nobody may subscribe to them meanwhile. At most `LONGEST_POLL_S`, whatever comes.
    """
    until = time.monotonic() + LONGEST_POLL_S
    while any(map(is_polled, channels)) and time.monotonic() < until:
        time.sleep(POLL_S)


def _state_of(core: Any, try_to_connect: bool = False) -> int:  # noqa: ANN401, FBT001, FBT002 - as core has it
    return int(core.check_connectivity_state(try_to_connect))


def _owner_of(continuation: Any) -> Any:  # noqa: ANN401
    """What a continuation makes its calls with, the channel or something on top of it."""
    function = getattr(continuation, "func", None)  # a partial: of a method, or of what is in one
    aio = getattr(function, "__self__", None) or _free(function, "self")  # before grpcio 1.83
    if aio is not None:
        return aio
    return _free(getattr(_free(continuation, "self"), "_thunk", None), "self")


def _walk(owner: Any, *names: str) -> Any:  # noqa: ANN401
    """The first, from `owner` down through its channels, that has a method of such a name."""
    for _ in range(DEEPEST):
        if owner is None:
            break
        for name in names:  # any() of a generator would be five calls more for each heartbeat
            if hasattr(owner, name):
                return owner
        owner = getattr(owner, "_channel", None)
    return None


def _free(function: Any, name: str) -> Any:  # noqa: ANN401
    """What a function holds under this name from where it was made."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents
