"""The connection that a heartbeat watches: a channel of ours, or any of grpc's.

Of a `ReconnectingChannel` of either world the traffic is seen, and it can be replaced; every other
channel can only be asked. Nothing here waits or touches the network.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.channel.core import Traffic

from .rules import Seen

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Watched", "seen"]

DEEPEST: Final = 32
"""Interceptors that a target is looked for behind."""


class Watched:
    """One channel, as a heartbeat sees it."""

    __slots__ = ("_own", "_ref", "ours", "target")

    def __init__(self, channel: Any, now_ns: Callable[[], int]) -> None:  # noqa: ANN401
        self.ours: bool = callable(getattr(channel, "heartbeat_call", None))
        """Whether it is a `ReconnectingChannel`."""
        # The timer must not keep alive a channel of ours that its user has dropped. A plain one is
        # kept: grpc needs it no longer for calls, once stubs were made of it.
        self._ref: Callable[[], Any] = weakref.ref(channel) if self.ours else lambda: channel
        self._own = Traffic(now_ns)
        self.target = _target_of(channel)
        """What it was made with; its `repr` where that can't be found."""

    @property
    def channel(self) -> Any:  # noqa: ANN401
        """The channel; None once its user has dropped it."""
        return self._ref()

    def traffic(self) -> Traffic | None:
        """Where its traffic is stamped now; None once it was dropped. Takes no lock."""
        if not self.ours:
            return self._own
        channel = self._ref()
        traffic: Traffic | None = None if channel is None else channel.traffic
        return traffic

    def is_idle(self) -> bool:
        """Whether it has no connection, and wants none."""
        channel = self._ref()
        return self.ours and channel is not None and bool(channel.is_idle())

    def is_cut_off(self) -> bool:
        """Whether gRPC itself knows of no connection: all that its calls can do is wait for one."""
        channel = self._ref()
        if not self.ours or channel is None:
            return False
        return bool(channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)

    def calls(self) -> int:
        """How many calls are in flight on it, as far as it tells."""
        return int(getattr(self._ref(), "calls", 0))

    def member(self, method: str) -> Any:  # noqa: ANN401
        """What makes a call of bytes on it."""
        channel = self._ref()
        return (channel.heartbeat_call if self.ours else channel.unary_unary)(method)


def seen(traffic: Traffic) -> Seen:
    """Its stamps."""
    return Seen(traffic.last_read_ns, traffic.last_write_ns, traffic.last_use_ns)


def _target_of(channel: object) -> str:
    inner: Any = channel
    for _ in range(DEEPEST):
        target = getattr(inner, "target", None)
        target = target() if callable(target) else target
        if target is not None:
            text = target.decode() if isinstance(target, bytes) else str(target)
            return text.removeprefix("dns:///")  # put there by grpc
        inner = getattr(inner, "_channel", None)
    return repr(channel)
