"""What is known of a heartbeat, for people, metrics and whoever routes calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel.durations import to_seconds

if TYPE_CHECKING:
    from rpcwheel.transport.state import ActivityStamps

    from .core import HeartbeatCore
    from .rules import HeartbeatState

__all__ = ["HeartbeatView"]


class HeartbeatView:
    """The properties of a heartbeat. Read from any thread, without a lock."""

    _core: HeartbeatCore
    _activity: ActivityStamps

    target: str
    """What the channel was made with, such as `"127.0.0.1:50051"`."""

    @property
    def state(self) -> HeartbeatState:
        """As of the last look, which is at most an interval ago, a tick while it is suspect."""
        return self._core.state

    @property
    def last_read(self) -> float | None:
        """When anything was last read, in seconds on the timer's clock; None: never."""
        return _seconds(self._activity.last_read_ns)

    @property
    def last_write(self) -> float | None:
        """When anything was last written; as `last_read`."""
        return _seconds(self._activity.last_write_ns)

    @property
    def last_use(self) -> float | None:
        """When a call of the user's last began, read or wrote; heartbeats don't count.

        None: never, or it can't be seen (a channel that is no `ReconnectingChannel`).
        """
        return _seconds(self._activity.last_use_ns)

    @property
    def rtt(self) -> float | None:
        """Seconds that the last answered heartbeat took; None before the first."""
        return _seconds(self._core.rtt_ns)

    @property
    def misses(self) -> int:
        """Heartbeats in a row that were not answered."""
        return self._core.misses

    @property
    def sent(self) -> int:
        """Heartbeats sent in all."""
        return self._core.sent

    @property
    def answered(self) -> int:
        """Heartbeats answered in all."""
        return self._core.answered

    @property
    def replaced(self) -> int:
        """How often the connection was replaced because it was dead."""
        return self._core.replaced

    @property
    def serving(self) -> bool | None:
        """What the server last said of itself (`grpc.health.v1`); None if it says nothing."""
        return self._core.serving

    def __repr__(self) -> str:
        return f"<Heartbeat of {self.target}: {self.state}>"


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else to_seconds(ns)
