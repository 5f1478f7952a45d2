"""The channel that a heartbeat watches.

A `ReconnectingChannel` of either world has activity stamps and can be reconnected. Any other
channel only gets heartbeats. Interceptors on top of a channel are skipped: heartbeats are neither
retried nor queued.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.connectivity import channel_target, core_state, is_bare, nested_channels
from rpcwheel.transport.state import ActivityStamps

if TYPE_CHECKING:
    from collections.abc import Callable


class WatchedChannel:
    """A `ReconnectingChannel`, or any other gRPC channel. Not thread-safe, but for `get`."""

    def __init__(self, channel: Any, now_ns: Callable[[], int]) -> None:
        """Begin to watch a channel; `now_ns` is the clock of the stamps of other channels."""
        self.can_reconnect = callable(getattr(channel, "heartbeat_call", None))
        # A `ReconnectingChannel` must not be kept alive. Any other channel is kept: its user may
        # drop it while stubs of it still make calls.
        keep: Callable[[], Any] = weakref.ref(channel) if self.can_reconnect else lambda: channel
        self.get = keep
        """Return the channel; None if its user has dropped it."""
        target = channel_target(channel)
        self.target = repr(channel) if target is None else target
        active = channel.transports.active.channel if self.can_reconnect else channel
        self.runs_user_code = not is_bare(active)
        """Whether a call on the channel runs interceptors."""
        self.activity = channel.activity if self.can_reconnect else ActivityStamps(now_ns)
        """The stamps of the connection that was active at the last `follow`."""

    def follow(self) -> bool:
        """Turn to the active connection; returns whether it is another one than before."""
        channel = self.get()
        if not self.can_reconnect or channel is None or channel.activity is self.activity:
            return False
        self.activity = channel.activity
        return True

    @property
    def calls(self) -> int:
        """Calls of the user in flight; 0 if not known."""
        calls: object = getattr(self.get(), "calls", 0)
        return calls if isinstance(calls, int) else 0  # of a channel that the user wrote

    @property
    def spans(self) -> dict[object, Any]:
        """The spans of the calls in flight on the active connection."""
        channel = self.get() if self.can_reconnect else None
        return {} if channel is None else channel.transports.active.spans.copy()

    def connectivity(self) -> grpc.ChannelConnectivity | None:
        """Return the connectivity of the active connection; None if not known."""
        channel = self.get()
        get_state = getattr(channel, "get_state", None)  # a `ReconnectingChannel`, or grpc.aio
        try:
            state: object = get_state() if callable(get_state) else core_state(channel)
        except Exception:  # noqa: BLE001 - a channel that the user wrote
            return None
        return state if isinstance(state, grpc.ChannelConnectivity) else None

    def is_over(self) -> bool:
        """Whether the channel was dropped, or is a plain channel that was closed.

        Plain channels don't report that they are closed.
        """
        if self.can_reconnect:
            return self.get() is None
        return self.connectivity() is grpc.ChannelConnectivity.SHUTDOWN

    def multicallable(self, method: str) -> Any:
        """Return a multicallable whose calls are not stamped as use of the channel."""
        channel = self.get()
        make = channel.heartbeat_call if self.can_reconnect else channel.unary_unary
        return make(method)

    def reconnect(self, reason: str, drain_timeout: Any) -> bool:
        """Replace the connection; returns whether that was done. Runs the user's `connect`.

        Calls in flight may continue for `drain_timeout` seconds, or without limit if they can only
        wait for a connection: if gRPC can't connect, or connects for the first time.
        """
        channel = self.get()
        if channel is None:
            return False
        state = self.connectivity()
        is_first = self.activity.last_read_ns is None
        only_wait = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or (
            state is grpc.ChannelConnectivity.CONNECTING and is_first
        )
        return bool(channel.reconnect(reason, drain_timeout=None if only_wait else drain_timeout))


def channel_below_interceptors(channel: Any) -> Any:
    """The `ReconnectingChannel` below a channel's interceptors, or the lowest channel."""
    lowest = channel
    for inner in nested_channels(channel):
        if not callable(getattr(inner, "unary_unary", None)):
            break
        lowest = inner
        if callable(getattr(inner, "heartbeat_call", None)):
            break
    return lowest
