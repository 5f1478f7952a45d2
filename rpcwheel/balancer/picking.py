"""Which subchannels are candidates for the next call, and which ones connect. No I/O.

The states of all subchannels are read together (`Picking.read`); the picker chooses among the READY
subchannels of the best `SubchannelLevel`. At the first call all subchannels of the best level
connect. Those of the next level connect if all of the better levels have failed, or none of them
has become READY for `FAILOVER_NS`.
"""

from __future__ import annotations

from enum import IntEnum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias

import grpc

from rpcwheel.durations import NEVER

from .subchannel import CONNECTING, FAILING, IDLE, READY, S

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from .pickers import Pick, Picker
    from .subchannel import SubchannelBase

RECHECK_NS: Final = 100_000_000
RECHECK_CONNECTING_NS: Final = 2_000_000
"""How often calls read the states again while not all subchannels are READY; the second value
applies while a subchannel is connecting."""

FAILOVER_NS: Final = 1_000_000_000
"""How long the subchannels of a level may take to become READY before the next level connects."""

SLOW_START_STEPS: Final = 20
"""The number of steps in which a weight grows."""


class SubchannelLevel(IntEnum):
    """How preferable a subchannel is for calls; the first is the best."""

    PREFERRED_ZONE = auto()
    """Healthy, in the preferred zone. Without a preferred zone every zone counts as preferred."""
    OTHER_ZONE = auto()
    """Healthy, in another zone."""
    NO_WEIGHT = auto()
    """Healthy, with weight 0."""
    DRAINING = auto()
    """Healthy, and its instance is DRAINING."""
    UNHEALTHY = auto()
    """Marked unhealthy by the user, by a heartbeat or by outlier ejection."""


PREFERRED_ZONE, OTHER_ZONE, NO_WEIGHT, DRAINING, UNHEALTHY = SubchannelLevel
# `SubchannelLevel.DRAINING` takes 0.1 µs in Python 3.11, and `level_of` is called for each one.


_Levels: TypeAlias = dict[SubchannelLevel, list[tuple[S, grpc.ChannelConnectivity]]]
"""The subchannels of each level, with their states."""


def level_of(subchannel: SubchannelBase, zone: str) -> SubchannelLevel:
    """Return the level on a channel with this preferred zone; "" for no preference."""
    instance = subchannel.instance
    if subchannel.health.unhealthy_ns is not None:  # like `healthy`, without a call
        return UNHEALTHY
    if instance.status == "DRAINING":
        return DRAINING
    if not instance.weight:
        return NO_WEIGHT
    return OTHER_ZONE if zone and instance.zone != zone else PREFERRED_ZONE


class Picking(Generic[S]):
    """The choice for the next call, from the states that were read last.

    The caller holds the lock of the pool in `read`. A pick reads `pick` and `is_settled`, which are
    replaced as a whole, without a lock.
    """

    def __init__(self, picker: Picker, zone: str, slow_start_ns: int) -> None:
        """Begin without subchannels.

        The weight of an instance that has just started grows for `slow_start_ns`; 0: it does not
        grow.
        """
        self._picker = picker
        self._zone = zone
        self._slow_start_ns = slow_start_ns
        self.subchannels: tuple[S, ...] = ()
        """All subchannels among which it chooses."""
        self.is_used = False
        """Whether calls were picked for, so that its subchannels connect."""
        self.pick: Pick[S] | None = None
        """The function of the picker; None if there is no candidate."""
        self.is_settled = False
        """Whether states and weights need not be read again before a pick fails."""
        self._recheck_ns = 0
        self._reweigh_ns = NEVER
        self.is_unreachable = False
        """Whether a server could not be reached, or there is none, at the last read."""
        self._unready_ns: int | None = None  # since when they connect and none is READY
        self.chosen: tuple[list[S], list[int]] = ([], [])
        """The candidates and weights that `pick` was prepared with."""

    @property
    def connects_when_picked(self) -> bool:
        """Whether the picker sees all states, so that a subchannel connects when it is picked."""
        return self._picker.sees_all_states

    def is_due(self, now_ns: int, timer_ns: int) -> bool:
        """Whether it is time to read states and weights again; arguments as of `read`."""
        return now_ns >= self._recheck_ns or timer_ns >= self._reweigh_ns

    def read_soon(self) -> None:
        """Have the next call read the states: a connection broke, or subchannels are to connect."""
        self.is_settled, self._recheck_ns = False, 0

    def read(self, now_ns: int, timer_ns: int, *, connects: bool = True) -> list[S]:
        """Read all states, and prepare the picker if the candidates or their weights have changed.

        Args:
            now_ns: The time now, on the monotonic clock.
            timer_ns: The time now, on the timer's clock.
            connects: Whether the caller connects what is returned; `FAILOVER_NS` begins then.

        Returns:
            The IDLE subchannels to connect.
        """
        levels: _Levels[S] = {}
        for subchannel in self.subchannels:
            level, state = level_of(subchannel, self._zone), subchannel.state
            levels.setdefault(level, []).append((subchannel, state))
        states = {state for members in levels.values() for _, state in members}
        ready_level = min(
            (level for level, members in levels.items() if any(s is READY for _, s in members)),
            default=None,
        )
        if ready_level is not None:
            self._unready_ns = None
        elif self._unready_ns is None and connects:
            self._unready_ns = now_ns
        self.is_unreachable = not levels or FAILING in states
        idle = self._idle(levels, now_ns)
        self._choose(levels, ready_level, timer_ns)
        self._reweigh_ns = self._next_weights_ns(self.subchannels, timer_ns)
        best_is_ready = ready_level == min(levels, default=PREFERRED_ZONE)
        all_ready = states <= {READY} or (self._picker.sees_all_states and best_is_ready)
        self.is_settled = all_ready and self._reweigh_ns == NEVER
        is_connecting = idle or CONNECTING in states
        self._recheck_ns = now_ns + (RECHECK_CONNECTING_NS if is_connecting else RECHECK_NS)
        return idle

    def _idle(self, levels: _Levels[S], now_ns: int) -> list[S]:
        """Return the subchannels to connect: by level, until one is READY or may become so."""
        if self._picker.sees_all_states:
            return []
        idle = []
        since_ns = now_ns if self._unready_ns is None else self._unready_ns
        waits = now_ns - since_ns < FAILOVER_NS
        for level in sorted(levels):
            states = [state for _, state in levels[level]]
            idle += [subchannel for subchannel, state in levels[level] if state is IDLE]
            if READY in states or (waits and (IDLE in states or CONNECTING in states)):
                break
        return idle

    def _choose(
        self, levels: _Levels[S], ready_level: SubchannelLevel | None, timer_ns: int
    ) -> None:
        if self._picker.sees_all_states:
            candidates = _usable(levels)
        elif ready_level is None:
            candidates = []
        else:
            candidates = [subchannel for subchannel, state in levels[ready_level] if state is READY]
        weights = [self._weight(subchannel, timer_ns) for subchannel in candidates]
        if (candidates, weights) == self.chosen and self.pick is not None:
            return
        self.chosen = candidates, weights
        try:
            self.pick = self._prepare(candidates, weights) if candidates else None
        except Exception as error:  # noqa: BLE001 - of a user's picker; raised by calls
            self.pick = partial(_raise, error.with_traceback(None))

    def _prepare(self, candidates: list[S], weights: list[int]) -> Pick[S]:
        pick = self._picker.prepare(candidates, weights)
        if not callable(pick):
            raise TypeError(
                f"{type(self._picker).__name__}.prepare() must return a function pick(method, "
                f"request, metadata), not {pick!r}"
            )
        return pick

    def _weight(self, subchannel: S, timer_ns: int) -> int:
        """Return its weight now, at least 1 (Dubbo `AbstractLoadBalance`)."""
        weight, slow_start_ns = subchannel.instance.weight, self._slow_start_of(subchannel)
        if slow_start_ns:
            uptime_ns = timer_ns - subchannel.started_ns
            if uptime_ns < slow_start_ns:
                weight = weight * max(0, uptime_ns) // slow_start_ns
        return max(1, weight)

    def _next_weights_ns(self, subchannels: Sequence[S], timer_ns: int) -> int:
        """Return when weights have grown by a step, on the timer's clock; `NEVER` if none grows."""
        growing = (
            slow_start_ns
            for subchannel in subchannels
            if (slow_start_ns := self._slow_start_of(subchannel))
            and timer_ns - subchannel.started_ns < slow_start_ns
        )
        shortest_ns = min(growing, default=NEVER)
        if shortest_ns == NEVER:
            return NEVER
        return timer_ns + max(1, shortest_ns // SLOW_START_STEPS)

    def _slow_start_of(self, subchannel: S) -> int:
        warmup_ns = subchannel.conventions.warmup_ns  # the server's own
        return self._slow_start_ns if warmup_ns is None else warmup_ns

    def others(self, picked: S, tried: Container[object]) -> list[S]:
        """Return the untried subchannels of the level of `picked` or better, beginning after it."""
        subchannels = self.subchannels
        at = subchannels.index(picked) if picked in subchannels else 0
        level = level_of(picked, self._zone)
        return [
            subchannel
            for subchannel in (*subchannels[at:], *subchannels[:at])
            if subchannel not in tried and level_of(subchannel, self._zone) <= level
        ]


def _usable(levels: _Levels[S]) -> list[S]:
    """Return the candidates of a picker that sees all states.

    They are those of the best level that has not failed as a whole, and of the better ones.
    """
    best = min(
        (
            level
            for level, members in levels.items()
            if any(state is not FAILING for _, state in members)
        ),
        default=max(levels, default=PREFERRED_ZONE),
    )
    return [
        subchannel
        for level, members in levels.items()
        if level <= best
        for subchannel, _ in members
    ]


def _raise(error: Exception, *_: object) -> Any:
    raise error.with_traceback(None)  # else the frames of each call that gets it are added
