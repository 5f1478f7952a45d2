"""The words: the states and what may follow what, a policy's figures, steps, what is told."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel.durations import NEVER, to_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .policy import HeartbeatPolicy

__all__ = [
    "TRANSITIONS",
    "Changed",
    "Died",
    "HeartbeatRules",
    "HeartbeatState",
    "Missed",
    "Reconnect",
    "Revived",
    "Seen",
    "Send",
]

CHECK_DIVISOR: Final = 3
"""Dubbo's `HEARTBEAT_CHECK_TICK`: the tick is this part of the interval."""

GRID_DIVISOR: Final = 32
"""Of a thousand heartbeats spread over the interval, about thirty come together."""

GRACE_DIVISOR: Final = 8
LEAST_GRACE_NS: Final = 250_000_000
"""A part of the tick, but more than a busy machine or loop makes us late."""

TIMES: Final = 3
"""The timeout by default, in intervals."""


class HeartbeatState(enum.StrEnum):
    """What is known of a connection."""

    OFF = "off"
    """Heartbeats are switched off (`interval=None`)."""
    UNUSED = "unused"
    """Nothing was heard on it yet, or not since the server closed it idle: it is left alone."""
    ALIVE = "alive"
    """It was heard, and not missed since."""
    PROBING = "probing"
    """A heartbeat is on its way, and none was missed before."""
    SUSPECT = "suspect"
    """A heartbeat was missed; the next ones follow each tick, a third of the interval."""
    DEAD = "dead"
    """Nothing was read for longer than the timeout; until something is."""
    WITHDRAWN = "withdrawn"
    """The target is gone on purpose: no more heartbeats, no replacements."""
    CLOSED = "closed"
    """Detached, or the channel was closed."""


_S: Final = HeartbeatState

_ENDS: Final = frozenset({_S.WITHDRAWN, _S.CLOSED})

TRANSITIONS: Final[Mapping[HeartbeatState, frozenset[HeartbeatState]]] = {
    _S.OFF: _ENDS,
    _S.UNUSED: _ENDS | {_S.ALIVE, _S.PROBING},
    _S.ALIVE: _ENDS | {_S.PROBING, _S.UNUSED},
    _S.PROBING: _ENDS | {_S.ALIVE, _S.SUSPECT},
    _S.SUSPECT: _ENDS | {_S.ALIVE, _S.DEAD, _S.UNUSED},
    _S.DEAD: _ENDS | {_S.ALIVE},
    _S.WITHDRAWN: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}
"""From each state the ones that may follow it."""


@dataclass(frozen=True, slots=True)
class HeartbeatRules:
    """A policy as integers, with what is derived from it."""

    interval_ns: int
    """`NEVER`: switched off."""
    timeout_ns: int
    tick_ns: int
    """A heartbeat that is not answered for so long is missed, and the next one follows."""
    spread_ns: int
    """The first heartbeat after a use is late by a share of this: they spread, and two of them can
    still be waited for before the connection counts as dead."""
    grid_ns: int
    """Heartbeats are due at multiples of this, so that a few of many share a wake-up: to wake up
    is most of what one costs (measured: 1.2 ms of CPU alone, 0.7 among 16, 0.55 among 32)."""
    grace_ns: int
    """Who looks later than planned by more than this has stood still. Deaths spread over it too."""
    reconnect: bool

    @classmethod
    def from_policy(cls, policy: HeartbeatPolicy) -> HeartbeatRules:
        """Make them of what the user has set."""
        if policy.interval is None:
            return cls(NEVER, NEVER, NEVER, 0, 1, NEVER, policy.reconnect)
        interval_ns = to_ns(policy.interval)
        timeout_ns = TIMES * interval_ns if policy.timeout is None else to_ns(policy.timeout)
        tick_ns = max(1, interval_ns // CHECK_DIVISOR)
        grid_ns = max(1, interval_ns // GRID_DIVISOR)
        left_ns = timeout_ns - interval_ns - 2 * tick_ns - grid_ns
        return cls(
            interval_ns,
            timeout_ns,
            tick_ns=tick_ns,
            spread_ns=max(0, min(interval_ns, left_ns)),
            grid_ns=grid_ns,
            grace_ns=max(LEAST_GRACE_NS, tick_ns // GRACE_DIVISOR),
            reconnect=policy.reconnect,
        )


class Seen(NamedTuple):
    """What was seen of a connection: when last, or None."""

    read_ns: int | None = None
    write_ns: int | None = None
    use_ns: int | None = None


# What comes next


class Send(NamedTuple):
    """Send a heartbeat now."""

    number: int
    """To be given back with its answer."""
    limit_ns: int
    """How long an answer still counts."""
    patient: bool
    """Whether it waits for a connection that is still being made."""


class Reconnect(NamedTuple):
    """Have the connection replaced, and say `replaced` or `refused`."""

    reason: str


# What is to be told


class Changed(NamedTuple):
    """The state is another one."""

    old: HeartbeatState
    new: HeartbeatState


class Missed(NamedTuple):
    """A heartbeat was not answered."""

    misses: int
    silent_ns: int
    answer: str


class Died(NamedTuple):
    """The connection is dead."""

    silent_ns: int
    misses: int


class Revived(NamedTuple):
    """A connection that was suspect or dead is answered on."""

    after_ns: int
    rtt_ns: int | None
