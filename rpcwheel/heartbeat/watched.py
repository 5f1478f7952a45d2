"""The connection that a heartbeat watches: a channel of ours, or any of grpc's.

Of a `ReconnectingChannel` of either world the activity is seen, and it can be replaced; every other
channel can only be asked. Interceptors on top of a channel are passed by: what is watched is the
connection, and a heartbeat is neither retried nor parked. Nothing here waits or touches the
network.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.connectivity import channels_below, is_bare, state_below, target_below
from rpcwheel.transport.state import ActivityStamps

from .rules import Seen

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Watched", "below", "seen"]


class Watched:
    """One channel, as a heartbeat sees it."""

    __slots__ = ("_own", "_ref", "ours", "pure", "target")

    def __init__(self, channel: Any, now_ns: Callable[[], int]) -> None:
        channel = below(channel)
        self.ours: bool = callable(getattr(channel, "heartbeat_call", None))
        """Whether it is a `ReconnectingChannel`."""
        # The timer must not keep alive a channel of ours that its user has dropped. A plain one is
        # kept: grpc needs it no longer for calls, once stubs were made of it.
        self._ref: Callable[[], Any] = weakref.ref(channel) if self.ours else lambda: channel
        self._own = ActivityStamps(now_ns)
        self.target = _target_of(channel)
        """What it was made with; its `repr` where that can't be found."""
        self.pure = _is_pure(channel)
        """Whether no code of the user's takes part in its calls."""

    @property
    def channel(self) -> Any:
        """The channel; None once its user has dropped it."""
        return self._ref()

    def activity(self) -> ActivityStamps | None:
        """Where its activity is stamped now; None once it was dropped. Takes no lock."""
        if not self.ours:
            return self._own
        channel = self._ref()
        activity: ActivityStamps | None = None if channel is None else channel.activity
        return activity

    def _state(self) -> grpc.ChannelConnectivity | None:
        """None where it can't be known."""
        channel = self._ref()
        ask = getattr(channel, "get_state", None)  # ours, and those of grpc.aio
        try:
            state: object = ask() if callable(ask) else state_below(channel)
        except Exception:  # noqa: BLE001 - of another make
            return None
        return state if isinstance(state, grpc.ChannelConnectivity) else None

    def is_idle(self) -> bool:
        """Whether it has no connection, and wants none."""
        return self._state() is grpc.ChannelConnectivity.IDLE

    def is_ready(self) -> bool:
        """Whether there is a connection, as far as gRPC knows."""
        return self._state() is grpc.ChannelConnectivity.READY

    def is_closed(self) -> bool:
        """Whether the channel was closed."""
        return self._state() is grpc.ChannelConnectivity.SHUTDOWN

    def never_sent(self) -> bool:
        """Whether all that the calls on a channel of ours can do is wait for a connection.

        So it is while gRPC can't connect, and while it connects for the first time.
        """
        channel = self._ref()
        if not self.ours or channel is None:
            return False
        state = self._state()
        if state is grpc.ChannelConnectivity.CONNECTING:
            return channel.activity.last_read_ns is None
        return state is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def calls(self) -> int:
        """How many calls are in flight on it, as far as it tells."""
        return int(getattr(self._ref(), "calls", 0))

    def member(self, method: str) -> Any:
        """What makes a call of bytes on it."""
        channel = self._ref()
        return (channel.heartbeat_call if self.ours else channel.unary_unary)(method)


def seen(activity: ActivityStamps) -> Seen:
    """Its stamps."""
    return Seen(activity.last_read_ns, activity.last_write_ns, activity.last_use_ns)


def below(channel: Any) -> Any:
    """The `ReconnectingChannel` below a channel's interceptors, else the lowest channel."""
    lowest = channel
    for inner in channels_below(channel):
        if not callable(getattr(inner, "unary_unary", None)):
            break
        lowest = inner
        if callable(getattr(inner, "heartbeat_call", None)):
            break
    return lowest


def _is_pure(channel: Any) -> bool:
    connections = getattr(channel, "connections", None)  # of a `ReconnectingChannel`
    return is_bare(channel if connections is None else connections.active.channel)


def _target_of(channel: Any) -> str:
    target = getattr(channel, "target", None)
    target = target_below(channel) if target is None else target
    return repr(channel) if target is None else str(target).removeprefix("dns:///")  # gRPC's prefix
