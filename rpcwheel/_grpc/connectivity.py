"""What grpc's core knows of the connection below a channel, and the end of all calls on it."""

from __future__ import annotations

import time
from typing import Any, Final

import grpc
from grpc._cython import cygrpc

__all__ = [
    "STATES",
    "core_below",
    "end_calls",
    "is_bare",
    "is_polled",
    "state_below",
    "wait_unpolled",
]

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


def core_below(channel: Any) -> Any:
    """The channel of grpc's core below a channel and its interceptors; None if it can't be found.

    grpcio 1.60 to 1.85 keep it, and each channel that interceptors are put on, as `_channel`.
    """
    for _ in range(DEEPEST):
        if channel is None or hasattr(channel, "check_connectivity_state"):
            return channel
        channel = getattr(channel, "_channel", None)
    return None


def is_bare(channel: Any) -> bool:
    """Whether it is a channel of grpc's make, without interceptors or wrappers on top."""
    return hasattr(getattr(channel, "_channel", None), "check_connectivity_state")


def state_below(
    channel: Any,
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


def is_polled(channel: Any) -> bool:
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


def _state_of(core: Any, try_to_connect: bool = False) -> int:
    return int(core.check_connectivity_state(try_to_connect))
