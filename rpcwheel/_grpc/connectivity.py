"""What gRPC's core knows of the connection below a channel, and how to end all calls on it.

grpcio has no public names for any of this: `_channel`, `_connectivity_state` and the channel of
cygrpc are private (verified on 1.66 and 1.85; `tests/unit/_grpc/test_connectivity.py` tells when
they change).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc._cython import cygrpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "READY_STATE",
    "channels_below",
    "core_below",
    "end_calls",
    "is_bare",
    "is_polled",
    "state_below",
    "state_reader",
    "target_below",
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

READY_STATE: Final = STATES.index(grpc.ChannelConnectivity.READY)

MAX_DEPTH: Final = 32
"""Channels with interceptors on top of one another that are searched."""

POLL_TIMEOUT_S: Final = 0.5
POLL_INTERVAL_S: Final = 0.005
"""How long, and how often, to check whether gRPC's polling thread has ended; it takes 0.2 s, or
twice that if it has just been asked to connect."""


def channels_below(channel: Any) -> Iterator[Any]:
    """The channel, and what each below it has as its inner channel, down to that of core.

    grpcio keeps core's channel, and each channel that interceptors are put on, as `_channel`.
    """
    for _ in range(MAX_DEPTH):
        if channel is None:
            return
        yield channel
        channel = getattr(channel, "_channel", None)


def state_reader(channel: Any) -> Callable[[bool], int]:
    """A function that reads the state of the connection below a channel; quick, for each call.

    It gives `READY_STATE` if the connection is READY, or if its state can't be known. It raises
    ValueError once the channel is closed. Its argument: whether to begin to connect.
    """
    core = core_below(channel)
    if core is None:
        return lambda _: READY_STATE
    reader: Callable[[bool], int] = core.check_connectivity_state
    return reader


def core_below(channel: Any) -> Any:
    """The channel of gRPC's core below a channel; None if it can't be found."""
    for inner in channels_below(channel):
        if hasattr(inner, "check_connectivity_state"):
            return inner
    return None


def is_bare(channel: Any) -> bool:
    """Whether it is a channel of gRPC's make, without interceptors or wrappers on top."""
    return hasattr(getattr(channel, "_channel", None), "check_connectivity_state")


def state_below(
    channel: Any,
    *,
    try_to_connect: bool = False,
) -> grpc.ChannelConnectivity | None:
    """The state of the connection below a channel; None if it can't be known, SHUTDOWN if closed.

    Args:
        channel: Of gRPC's make, or with interceptors on.
        try_to_connect: Whether to begin to connect if it is IDLE.
    """
    core = core_below(channel)
    if core is None:
        return None
    try:
        return STATES[int(core.check_connectivity_state(try_to_connect))]
    except ValueError:  # "Cannot invoke RPC: Channel closed!"
        return grpc.ChannelConnectivity.SHUTDOWN


def target_below(channel: Any) -> str | None:
    """The target as core has it; None if it can't be known, or the channel is closed."""
    core = core_below(channel)
    try:
        # grpcio 1.85 crashes if a closed channel is asked for its target; this raises.
        core.check_connectivity_state(False)
        target = core.target() if callable(core.target) else core.target
    except Exception:  # noqa: BLE001 - closed, or of another make
        return None
    return target.decode(errors="replace") if isinstance(target, bytes) else str(target)


def end_calls(channel: grpc.Channel, details: str) -> None:
    """Close a channel; its calls end with UNAVAILABLE and these details.

    If the core of the channel can't be found, they end with CANCELLED, as by `close`. Waits until
    gRPC's thread has reported the ends, so any thread but that one; any number of times.

    Args:
        channel: Of gRPC's make, or with interceptors on.
        details: Why; what no UTF-8 can encode of it is replaced.
    """
    core = core_below(channel)
    try:
        if core is not None:
            readable = details.encode(errors="backslashreplace").decode()
            core.close(cygrpc.StatusCode.unavailable, readable)
    finally:
        channel.close()


def is_polled(channel: Any) -> bool:
    """Whether a thread of gRPC's still polls for changes of a channel's state.

    It does so for up to 0.2 s after the last subscriber has left, and raises if the channel is
    closed in the wrong moment of that (grpc #18995).
    """
    for inner in channels_below(channel):
        state = getattr(inner, "_connectivity_state", None)
        if state is not None:
            return bool(getattr(state, "polling", False))
    return False


def wait_unpolled(*channels: object) -> None:
    """Wait until no thread of gRPC's polls for changes of these channels' states any more.

    No callback may be subscribed meanwhile. At most `POLL_TIMEOUT_S`.
    """
    end_s = time.monotonic() + POLL_TIMEOUT_S
    while any(map(is_polled, channels)) and time.monotonic() < end_s:
        time.sleep(POLL_INTERVAL_S)
