"""Which connection is idle, and what is done about it next; without a socket, a clock or a lock.

A connection has two kinds of `Use`, the user's and that of heartbeats. `judge` says whether a limit
is passed. Whoever acts on that makes a `Mark`, and asks `step` right before each thing it does: a
connection that was used since it was marked is kept. Nothing here is thread-safe: whoever owns a
`Seen` calls in under a lock of its own. All times are nanoseconds on one clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel.durations import NEVER, to_ns

if TYPE_CHECKING:
    from rpcwheel.durations import Duration

    from .policy import IdlePolicy

__all__ = [
    "TRY_NS",
    "Due",
    "Limits",
    "Look",
    "Mark",
    "Reason",
    "Seen",
    "Step",
    "Use",
    "judge",
    "step",
]

QUIET_NS: Final = 100_000_000
"""So long nothing must have come in on a connection that is closed: what just came may be a call
that has not reached a handler yet."""

TRY_NS: Final = 100_000_000
"""Between two tries to close a connection that something is still on its way to or from."""

TRIES: Final = 10

CHECKS: Final = 3
"""Looks per limit; Dubbo's `HEARTBEAT_CHECK_TICK`."""


class Limits(NamedTuple):
    """A policy, in nanoseconds; `NEVER` where there is no limit."""

    idle_ns: int
    read_ns: int
    write_ns: int
    age_ns: int
    age_grace_ns: int
    check_ns: int
    close_streams: bool
    count_heartbeats: bool
    goaway: bool
    report: bool
    goaway_grace_ns: int

    @classmethod
    def of(cls, policy: IdlePolicy) -> Limits:
        """Work out what a policy says."""
        idle, read, write, age = (
            _ns(limit)
            for limit in (policy.idle_timeout, policy.read_idle, policy.write_idle, policy.max_age)
        )
        shortest = min(idle, read, write, age)
        check = NEVER if shortest == NEVER else max(1, shortest // CHECKS)
        return cls(
            idle_ns=idle,
            read_ns=read,
            write_ns=write,
            age_ns=age,
            age_grace_ns=to_ns(policy.max_age_grace),
            check_ns=check if policy.check is None else to_ns(policy.check),
            close_streams=policy.close_streams,
            count_heartbeats=policy.count_heartbeats,
            goaway=policy.close == "goaway",
            report=policy.close == "report",
            goaway_grace_ns=to_ns(policy.goaway_grace),
        )


class Use:
    """What was seen of one kind of call on a connection."""

    __slots__ = (
        "calls",
        "ended_ns",
        "messages_in",
        "messages_out",
        "moves",
        "read_ns",
        "streams",
        "total",
        "write_ns",
    )

    def __init__(self) -> None:
        self.calls = 0
        """Open ones with one request and one answer."""
        self.streams = 0
        """Open ones with a stream either way."""
        self.total = 0
        self.messages_in = self.messages_out = 0
        self.moves = 0
        """Grows with all that begins, comes or goes; two that are equal mean that nothing did."""
        self.read_ns: int | None = None
        self.write_ns: int | None = None
        self.ended_ns: int | None = None

    @property
    def open(self) -> int:
        """How many calls and streams are open."""
        return self.calls + self.streams

    def begin(self, now_ns: int, *, streams: bool) -> None:
        """Count a call that begins, which is something read: its headers came."""
        self.moves += 1
        self.total += 1
        self.read_ns = now_ns
        if streams:
            self.streams += 1
        else:
            self.calls += 1
            self.messages_in += 1

    def read(self, now_ns: int) -> None:
        """Count a message that came in."""
        self.moves += 1
        self.messages_in += 1
        self.read_ns = now_ns

    def wrote(self, now_ns: int) -> None:
        """Count a message that goes out."""
        self.moves += 1
        self.messages_out += 1
        self.write_ns = now_ns

    def end(self, now_ns: int, *, streams: bool) -> None:
        """Count a call that has ended; from then on the connection may become idle."""
        self.ended_ns = now_ns
        if streams:
            self.streams -= 1
        else:
            self.calls -= 1


class Seen:
    """What was seen of one connection since `first_ns`."""

    __slots__ = ("beats", "first_ns", "plain", "share", "user")

    def __init__(self, first_ns: int, share: float = 0.0) -> None:
        self.first_ns = first_ns
        self.share = share
        """From 0 to 1: which part of the tenth that it may grow older than others is its own."""
        self.plain = False
        """Whether it is known to be no TLS."""
        self.user = Use()
        self.beats = Use()

    @property
    def open(self) -> int:
        """How many calls and streams of any kind are open."""
        return self.user.open + self.beats.open

    def moves(self, limits: Limits) -> int:
        """What tells whether the connection was used in between."""
        return self.user.moves + (self.beats.moves if limits.count_heartbeats else 0)

    def counted(self, limits: Limits) -> tuple[Use, ...]:
        """The kinds of use that keep it open."""
        return (self.user, self.beats) if limits.count_heartbeats else (self.user,)

    def over_age_ns(self, limits: Limits, now_ns: int) -> int:
        """By how much it is too old, given its own share of what all are spread over."""
        if limits.age_ns == NEVER:
            return -NEVER
        return now_ns - self.first_ns - limits.age_ns - int(limits.age_ns * self.share) // 10


class Reason(enum.Enum):
    """Which limit was passed; the value is what the client is told."""

    IDLE = "connection idle for {} s"
    READ = "nothing read for {} s"
    WRITE = "nothing written for {} s"
    AGE = "connection open for {} s"


@dataclass(frozen=True, slots=True)
class Due:
    """A limit is passed."""

    reason: Reason
    limit_ns: int
    idle_ns: int
    """Since the connection was used in any way."""
    asks: bool = False
    """Whether the client may only be asked to leave: it has calls whose time is not over."""

    @property
    def text(self) -> str:
        """The reason for people."""
        return self.reason.value.format(f"{self.limit_ns / 1e9:g}")


def judge(seen: Seen, limits: Limits, now_ns: int) -> Due | None:
    """Say which limit a connection has passed; None if none, or if what is open holds it."""
    uses = seen.counted(limits)
    busy = any(use.open for use in uses)
    held = any(use.calls or (use.streams and not limits.close_streams) for use in uses)
    used = [use.ended_ns for use in uses]
    read_ns = _latest(seen.first_ns, *used, *(use.read_ns for use in uses))
    write_ns = _latest(seen.first_ns, *used, *(use.write_ns for use in uses))
    idle_ns = now_ns - max(read_ns, write_ns)
    over_ns = seen.over_age_ns(limits, now_ns)
    if over_ns > 0:
        if not busy or over_ns > limits.age_grace_ns:
            return Due(Reason.AGE, limits.age_ns, idle_ns)
        if limits.goaway and seen.plain:
            return Due(Reason.AGE, limits.age_ns, idle_ns, asks=True)
    if held:
        return None
    for reason, limit_ns, silent_ns in (
        (Reason.IDLE, limits.idle_ns, idle_ns),
        (Reason.READ, limits.read_ns, now_ns - read_ns),
        (Reason.WRITE, limits.write_ns, now_ns - write_ns),
    ):
        if silent_ns > limit_ns:  # strictly, as Dubbo
            return Due(reason, limit_ns, idle_ns)
    return None


class Mark:
    """A connection that is being closed, and how far that is."""

    __slots__ = ("due", "left_ns", "made_ns", "moves", "next_ns", "tries")

    def __init__(self, due: Due, moves: int, now_ns: int) -> None:
        self.due = due
        self.made_ns = now_ns
        self.moves = moves
        self.tries = 0
        self.next_ns = now_ns
        """When to do the next step."""
        self.left_ns: int | None = None
        """When the client was asked to leave."""


class Look(NamedTuple):
    """What the kernel says of a connection at the last moment."""

    unread: int
    unsent: int
    received_ago_ns: int
    doubtful: bool = False
    """Whether there may be calls that nobody told of."""


class Step(enum.Enum):
    """What is to be done next with a connection that is marked."""

    KEEP_USED = "it is used again"
    KEEP_BUSY = "bytes keep coming in or going out"
    KEEP_DOUBTFUL = "bytes came in, and there may be calls whose peer can't be told"
    WAIT = "try again soon"
    WAIT_LONG = "the client was asked to leave: give it time"
    END_CALLS = "end what is open on it"
    GOAWAY = "ask the client to leave"
    SHUTDOWN = "close it"


def step(seen: Seen, mark: Mark, look: Look, limits: Limits, now_ns: int) -> Step:
    """Say what to do next, right before it is done."""
    if mark.left_ns is not None:
        return _leaving(seen, mark, limits, now_ns)
    patient = mark.tries < TRIES
    if _must(seen, mark, limits, now_ns):
        return Step.END_CALLS if patient and seen.open else _ending(seen, look, patient=patient)
    if mark.due.asks:
        return _asking(look) if patient else Step.KEEP_BUSY
    kept = _kept(seen, mark, look, limits, now_ns)
    if kept is not None and (kept is not Step.KEEP_BUSY or not patient):
        return kept
    ending = _ending(seen, look, patient=patient)
    asks = patient and limits.goaway and seen.plain
    return _asking(look) if asks and ending is Step.SHUTDOWN else ending


def _must(seen: Seen, mark: Mark, limits: Limits, now_ns: int) -> bool:
    """Whether it is closed although it is used: it is too old, and the grace is over."""
    return mark.due.reason is Reason.AGE and seen.over_age_ns(limits, now_ns) > limits.age_grace_ns


def _asking(look: Look) -> Step:
    return Step.WAIT if look.unsent else Step.GOAWAY


def _kept(seen: Seen, mark: Mark, look: Look, limits: Limits, now_ns: int) -> Step | None:
    """Why it is not to be closed, if it is not."""
    if seen.moves(limits) != mark.moves:
        return Step.KEEP_USED
    idle_ns = mark.due.idle_ns + now_ns - mark.made_ns
    if look.doubtful and look.received_ago_ns < idle_ns - QUIET_NS:
        return Step.KEEP_DOUBTFUL
    return Step.KEEP_BUSY if _incoming(look) else None


def _incoming(look: Look) -> bool:
    return look.unread > 0 or look.received_ago_ns < QUIET_NS


def _ending(seen: Seen, look: Look, *, patient: bool) -> Step:
    """First the calls, then the socket, when nothing is on its way: not a call, no status."""
    if not patient:
        return Step.SHUTDOWN
    if _incoming(look):
        return Step.WAIT
    if seen.open:
        return Step.END_CALLS
    return Step.WAIT if look.unsent else Step.SHUTDOWN


def _leaving(seen: Seen, mark: Mark, limits: Limits, now_ns: int) -> Step:
    """The client was asked to leave: what it has open may end by itself, for a while."""
    must = _must(seen, mark, limits, now_ns)
    if seen.user.open:
        if not must:
            return Step.WAIT_LONG
        return Step.END_CALLS if mark.tries < TRIES else Step.SHUTDOWN
    if mark.left_ns is None or now_ns - mark.left_ns >= limits.goaway_grace_ns:
        return Step.SHUTDOWN
    return Step.WAIT_LONG


def _ns(limit: Duration | None) -> int:
    return NEVER if limit is None else to_ns(limit)


def _latest(first_ns: int, *others: int | None) -> int:
    return max(first_ns, *(first_ns if other is None else other for other in others))
