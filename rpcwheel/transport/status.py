"""`ChannelStatus` and `SubchannelStatus`: the channels in the status of a process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SubchannelStatus:
    """A server of a balanced channel."""

    id: str
    address: str
    state: str
    healthy: bool
    unhealthy_reason: str
    ejected: bool
    """Whether it is unhealthy because its calls failed."""
    stale: bool
    """Whether its instance has left the registry and it is kept because it still answers."""
    calls: int
    """In flight."""
    weight: int
    zone: str
    problem: str

    @property
    def health(self) -> str:
        """The state, or `"unhealthy"`."""
        return self.state if self.healthy else "unhealthy"


@dataclass(frozen=True, slots=True)
class ChannelStatus:
    """A channel to one target, or a balanced channel, which has subchannels."""

    target: str
    """The name of the service if it is balanced."""
    balanced: bool
    state: str
    calls: int
    """In flight."""
    connection: int | None
    """The number of the active connection, from 1; None if it is balanced."""
    stale: bool
    """Whether a subchannel is stale."""
    subchannels: tuple[SubchannelStatus, ...]
    problem: str


def channel_problem(state: str, *, has_servers: bool) -> str:
    """Return the `problem` of a channel in this state."""
    if state != "TRANSIENT_FAILURE":
        return ""
    return "its servers cannot be reached" if has_servers else "no server is known"
