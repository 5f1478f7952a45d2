"""The state of the connection below a channel, and the end of all calls on it.

Uses `_channel`, `_connectivity_state` and the channel of cygrpc, which are private in grpcio.
Verified on 1.66 and 1.85; `tests/unit/_grpc/test_connectivity.py` fails if they change.
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
"""In the order of `grpc_connectivity_state` in gRPC's core."""

READY_STATE: Final = STATES.index(grpc.ChannelConnectivity.READY)

MAX_DEPTH: Final = 32
"""How many channels, each with interceptors on the one below, are searched."""

POLL_TIMEOUT_S: Final = 0.5
POLL_INTERVAL_S: Final = 0.005
"""How long, and how often, to check whether gRPC's polling thread has ended. It ends within 0.2 s,
or 0.4 s if it was just asked to connect."""


def channels_below(channel: Any) -> Iterator[Any]:
    """Iterate over the channel and all channels below it, down to the channel of gRPC's core.

    grpcio keeps the next lower channel as `_channel`.
    """
    for _ in range(MAX_DEPTH):
        if channel is None:
            return
        yield channel
        channel = getattr(channel, "_channel", None)


def state_reader(channel: Any) -> Callable[[bool], int]:
    """Return a function that reads the state of the connection below a channel, for each call.

    The function takes whether to connect, and returns the number of the state: `READY_STATE` if
    the connection is READY, or if its state is not known. It raises ValueError if the channel is
    closed.
    """
    core = core_below(channel)
    if core is None:
        return lambda _: READY_STATE
    reader: Callable[[bool], int] = core.check_connectivity_state
    return reader


def core_below(channel: Any) -> Any:
    """Return the channel of gRPC's core below a channel; None if it is not found."""
    for inner in channels_below(channel):
        if hasattr(inner, "check_connectivity_state"):
            return inner
    return None


def is_bare(channel: Any) -> bool:
    """Whether it is gRPC's own channel, without interceptors or wrappers."""
    return hasattr(getattr(channel, "_channel", None), "check_connectivity_state")


def state_below(
    channel: Any,
    *,
    try_to_connect: bool = False,
) -> grpc.ChannelConnectivity | None:
    """Return the state of the connection below a channel; None if unknown, SHUTDOWN if closed.

    Args:
        channel: gRPC's own channel, with or without interceptors.
        try_to_connect: Whether to connect if the connection is IDLE.
    """
    core = core_below(channel)
    if core is None:
        return None
    try:
        return STATES[int(core.check_connectivity_state(try_to_connect))]
    except ValueError:  # "Cannot invoke RPC: Channel closed!"
        return grpc.ChannelConnectivity.SHUTDOWN


def target_below(channel: Any) -> str | None:
    """Return the target of a channel; None if it is not known, or the channel is closed."""
    core = core_below(channel)
    try:
        # grpcio 1.85 crashes if a closed channel is asked for its target; this raises.
        core.check_connectivity_state(False)
        target = core.target() if callable(core.target) else core.target
    except Exception:  # noqa: BLE001 - closed, or of another class
        return None
    return target.decode(errors="replace") if isinstance(target, bytes) else str(target)


def end_calls(channel: grpc.Channel, details: str) -> None:
    """Close a channel and end its calls with UNAVAILABLE. Idempotent.

    If the channel of gRPC's core is not found, the calls end with CANCELLED, as by `close`. Waits
    until gRPC's thread has reported the ends, so it must not be called on that thread.

    Args:
        channel: gRPC's own channel, with or without interceptors.
        details: The status details. Characters that can't be encoded are escaped.
    """
    core = core_below(channel)
    try:
        if core is not None:
            readable = details.encode(errors="backslashreplace").decode()
            core.close(cygrpc.StatusCode.unavailable, readable)
    finally:
        channel.close()


def is_polled(channel: Any) -> bool:
    """Whether a thread of gRPC polls for changes of the state of a channel.

    It does so for up to 0.2 s after the last callback was unsubscribed. If the channel is closed
    then, the thread may raise (grpc #18995).
    """
    for inner in channels_below(channel):
        state = getattr(inner, "_connectivity_state", None)
        if state is not None:
            return bool(getattr(state, "polling", False))
    return False


def wait_unpolled(*channels: object) -> None:
    """Wait until no thread of gRPC polls for changes of these channels, at most `POLL_TIMEOUT_S`.

    No callback may be subscribed meanwhile.
    """
    end_s = time.monotonic() + POLL_TIMEOUT_S
    while any(map(is_polled, channels)) and time.monotonic() < end_s:
        time.sleep(POLL_INTERVAL_S)
