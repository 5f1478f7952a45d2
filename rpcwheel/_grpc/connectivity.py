"""What grpcio hides of a channel: its state, its target, and how to close it with a status.

A channel of `grpc` or `grpc.aio` wraps a channel of gRPC's core; channels with interceptors wrap
another channel. The functions search the core's channel below all of them. `close_unavailable`,
`has_polling_thread` and `wait_for_polling_end` are for `grpc` only.

Uses `_channel`, `_connectivity_state` and the channel of cygrpc, which are private in grpcio.
Verified on 1.66 and 1.85; `tests/unit/_grpc/test_connectivity.py` fails if they change.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc._cython import cygrpc

from .calls import ChannelMethods

if TYPE_CHECKING:
    from collections.abc import Iterator

STATES: Final = (
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.CONNECTING,
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
"""In the order of `grpc_connectivity_state` in gRPC's core."""

CORE_READY: Final = STATES.index(grpc.ChannelConnectivity.READY)
"""The number of READY in gRPC's core."""

MAX_DEPTH: Final = 32
"""The largest number of nested channels (`grpc.intercept_channel`); ends the search in a cycle."""

POLL_STEPS: Final = 200
POLL_INTERVAL_S: Final = 0.005
"""gRPC's polling thread is checked for its end at most `POLL_STEPS` times, every `POLL_INTERVAL_S`.
It ends within 0.2 s, or 0.4 s if it was just asked to connect. Steps are counted, in place of a
deadline, because a process that is suspended meanwhile then loses only one step."""


def nested_channels(channel: Any) -> Iterator[Any]:
    """Iterate over a channel and the channels that it wraps, down to the channel of gRPC's core.

    grpcio keeps the wrapped channel as `_channel`.
    """
    for _ in range(MAX_DEPTH):
        if channel is None:
            return
        yield channel
        channel = getattr(channel, "_channel", None)


def core_channel(channel: Any) -> Any:
    """Return the channel of gRPC's core below a channel; None if it is not found.

    `check_connectivity_state(False)` of it returns the number of its state, fast enough to be used
    for each RPC. If the channel is closed, it raises ValueError.
    """
    for inner in nested_channels(channel):
        if hasattr(inner, "check_connectivity_state"):
            return inner
    return None


def is_bare(channel: Any) -> bool:
    """Whether a channel is one of `grpc` or `grpc.aio`, without interceptors or wrappers."""
    return hasattr(getattr(channel, "_channel", None), "check_connectivity_state")


def core_state(
    channel: Any,
    *,
    try_to_connect: bool = False,
) -> grpc.ChannelConnectivity | None:
    """Return the state of a channel of `grpc`; None if unknown, SHUTDOWN if closed.

    `try_to_connect`: connect if the channel is IDLE.
    """
    core = core_channel(channel)
    if core is None:
        return _own_state(channel, try_to_connect)
    try:
        return STATES[int(core.check_connectivity_state(try_to_connect))]
    except ValueError:  # "Cannot invoke RPC: Channel closed!"
        return grpc.ChannelConnectivity.SHUTDOWN


def _own_state(channel: Any, try_to_connect: bool) -> grpc.ChannelConnectivity | None:
    """Return the state that a `ReconnectingChannel` or `BalancedChannel` has; None if unknown.

    A channel of the user's is not asked: pickers read states under the lock of their pool.
    """
    for inner in nested_channels(channel):
        if isinstance(inner, ChannelMethods) and hasattr(inner, "get_state"):
            state: grpc.ChannelConnectivity | None = inner.get_state(try_to_connect)
            return state
    return None


def core_target(channel: Any) -> str | None:
    """Return the target in gRPC's core, such as "dns:///shop:443"; None if unknown or closed."""
    core = core_channel(channel)
    if core is None:
        return None
    try:
        # For a closed channel this raises, while `target` crashes the process (grpcio 1.85).
        core.check_connectivity_state(False)
        target = core.target() if callable(core.target) else core.target
    except Exception:  # noqa: BLE001 - closed, or of another class
        return None
    return target.decode(errors="replace") if isinstance(target, bytes) else str(target)


def channel_target(channel: Any) -> str | None:
    """Return the target of a channel as its user gave it; None if it is not known.

    It is the attribute `target` of the outermost channel that has one as a string, such as a
    channel of this package; or else that of gRPC's core.
    """
    for inner in nested_channels(channel):
        target = getattr(inner, "target", None)
        if isinstance(target, str):
            return target
    target = core_target(channel)
    return None if target is None else target.removeprefix("dns:///")  # which gRPC adds


def has_address(channel: Any) -> bool:
    """Whether the target of a channel is an address, and not only the name of a service."""
    return not any(getattr(inner, "target_is_service", False) for inner in nested_channels(channel))


def close_unavailable(channel: grpc.Channel, details: str) -> None:
    """Close a channel and end its calls with UNAVAILABLE. Idempotent.

    If the channel of gRPC's core is not found, the calls end with CANCELLED, as by `close`. Waits
    until the channel's thread has run the done-callbacks of the calls, so it must not be called on
    that thread. Characters of the details that can't be encoded are escaped.
    """
    core = core_channel(channel)
    try:
        if core is not None:
            readable = details.encode(errors="backslashreplace").decode()
            core.close(cygrpc.StatusCode.unavailable, readable)
    finally:  # also drops the callbacks, and gRPC's reference to the channel for forks
        channel.close()


def has_polling_thread(channel: Any) -> bool:
    """Whether a thread of gRPC polls for changes of the state of a channel.

    It does so for up to 0.2 s after the last callback was unsubscribed. If the channel is closed
    while the thread polls, the thread may raise (grpc #18995).
    """
    for inner in nested_channels(channel):
        state = getattr(inner, "_connectivity_state", None)
        if state is not None:
            return bool(getattr(state, "polling", False))
    return False


def wait_for_polling_end(*channels: object) -> None:
    """Wait until no thread of gRPC polls for changes of these channels, about 1 s at most.

    No callback may be subscribed meanwhile: it would start another thread.
    """
    for _ in range(POLL_STEPS):
        if not any(map(has_polling_thread, channels)):
            return
        time.sleep(POLL_INTERVAL_S)
