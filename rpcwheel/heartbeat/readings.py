"""What users can read of a heartbeat, and its entry in the status of the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcwheel.durations import to_seconds
from rpcwheel.errors import public_name, safe_repr

if TYPE_CHECKING:
    from collections.abc import Callable

    from .channel import WatchedChannel
    from .core import HeartbeatCore
    from .rules import HeartbeatState


@dataclass(frozen=True, slots=True)
class HeartbeatStatus:
    """The heartbeat of a channel."""

    target: str
    state: str
    rtt_s: float | None
    misses: int
    sent: int
    answered: int
    replaced: int
    serving: bool | None
    """The status that the server reported (`grpc.health.v1`); None: none yet."""
    silence_s: float | None
    """Seconds since anything was read; None: never was anything."""
    problem: str


@public_name("Heartbeat")
class HeartbeatReadings:
    """The state, the times and the counts of one heartbeat. Any thread, without a lock."""

    target: str
    """The target of the channel, such as `"127.0.0.1:50051"`; its `repr` if that is not known."""
    _channel: WatchedChannel
    _core: HeartbeatCore
    _now_ns: Callable[[], int]

    @property
    def connection(self) -> Any:
        """The watched channel, below its interceptors; None if its user has dropped it."""
        return self._channel.get()

    @property
    def state(self) -> HeartbeatState:
        """The state at the last look: at most an interval ago; while suspect, at most a tick."""
        return self._core.state

    @property
    def last_read(self) -> float | None:
        """When anything was last read, in seconds on the timer's clock; None: never."""
        return _seconds(self._channel.activity.last_read_ns)

    @property
    def last_write(self) -> float | None:
        """When anything was last written, in seconds on the timer's clock; None: never."""
        return _seconds(self._channel.activity.last_write_ns)

    @property
    def last_use(self) -> float | None:
        """When a call (not a heartbeat) last began, read or wrote, on the timer's clock.

        None: never, or not known, because the channel is not a `ReconnectingChannel`.
        """
        return _seconds(self._channel.activity.last_use_ns)

    @property
    def silence(self) -> float | None:
        """Seconds since anything was last read; None: nothing was ever read."""
        read_ns = self._channel.activity.last_read_ns
        return None if read_ns is None else _seconds(max(0, self._now_ns() - read_ns))

    @property
    def rtt(self) -> float | None:
        """Seconds that the last answered heartbeat took; None before the first answer."""
        return _seconds(self._core.rtt_ns)

    @property
    def misses(self) -> int:
        """Heartbeats in a row that were missed."""
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
        """The status that the server last reported (`grpc.health.v1`); None: none yet."""
        return self._core.serving

    def status(self) -> HeartbeatStatus | None:
        """Describe the heartbeat now; None if it has ended."""
        state = str(self.state)
        if state == "closed":
            return None
        problem = state if state in {"suspect", "dead"} else ""
        if not problem and self.serving is False:
            problem = "not serving"
        return HeartbeatStatus(
            self.target,
            state,
            self.rtt,
            self.misses,
            self.sent,
            self.answered,
            self.replaced,
            self.serving,
            self.silence,
            problem,
        )

    @safe_repr
    def __repr__(self) -> str:
        return f"<Heartbeat of {self.target}: {self.state}>"


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else to_seconds(ns)
