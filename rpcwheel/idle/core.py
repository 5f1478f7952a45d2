"""Decides which connections are idle, and the next step to close one. No I/O, no clock, no lock.

A connection has two kinds of `Activity`: calls of users, and heartbeats. `idle_reason` says which
limit of the policy a connection exceeds. The detector then creates a `PendingClose`, and calls
`next_step` right before each action. A connection that was used since the decision is kept, and so
is one on which bytes arrived that may be a call which the server has not reported yet. Only its age
closes a connection that is in use: its calls have a grace period, and are then ended.

Not thread-safe: the owner of a `ConnectionActivity` holds a lock. All times are nanoseconds of one
clock.
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
    "ACCEPT_LATENCY_NS",
    "MAX_AGE_INTERVAL_NS",
    "NOT_YET",
    "RETRY_INTERVAL_NS",
    "STATUS_GRACE_NS",
    "ConnectionActivity",
    "IdleLimit",
    "IdleReason",
    "Limits",
    "PendingClose",
    "SocketState",
    "Step",
    "idle_reason",
    "next_step",
]

NOT_YET: Final = -NEVER
"""The time of what has not happened yet."""

CHECKS_PER_LIMIT: Final = 3
"""As Dubbo's `HEARTBEAT_CHECK_TICK`."""

QUIET_NS: Final = 100_000_000
"""No bytes may have arrived for this long on a connection that is closed: they may be a call that
has not reached its handler."""

RETRY_INTERVAL_NS: Final = 100_000_000
"""Between two attempts to close a connection on which bytes are still on their way."""

MAX_ATTEMPTS: Final = 10

ACCEPT_LATENCY_NS: Final = 1_000_000_000
"""How late gRPC's threads may report a call whose bytes have arrived."""

STATUS_GRACE_NS: Final = 20_000_000
"""For the status of a call that was ended to be sent, if new calls arrive meanwhile."""

MAX_AGE_INTERVAL_NS: Final = 1_000_000_000
"""Between two attempts to close a connection that is too old and in use; less if the grace period
is short."""


class Limits:
    """An `IdlePolicy` in nanoseconds; `NEVER` where there is no limit."""

    def __init__(self, policy: IdlePolicy) -> None:
        self.idle_ns = _limit_ns(policy.idle_timeout)
        self.read_ns = _limit_ns(policy.read_idle)
        self.write_ns = _limit_ns(policy.write_idle)
        self.age_ns = _limit_ns(policy.max_age)
        self.age_grace_ns = to_ns(policy.max_age_grace)
        self.request_ns = _limit_ns(policy.request_timeout)
        self.check_ns = _limit_ns(policy.check_interval)
        if policy.check_interval is None:
            shortest_ns = min(
                self.idle_ns, self.read_ns, self.write_ns, self.age_ns, self.request_ns
            )
            if shortest_ns != NEVER:
                self.check_ns = max(1, shortest_ns // CHECKS_PER_LIMIT)
        self.close_streams = policy.close_streams
        self.count_heartbeats = policy.count_heartbeats
        self.report_only = policy.action == "report"


def _limit_ns(limit: Duration | None) -> int:
    return NEVER if limit is None else to_ns(limit)


class Activity:
    """The calls of one kind on a connection. Times are `NOT_YET` before the first call."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls in flight with one request and one response."""
        self.streams = 0
        """Calls in flight that stream requests or responses."""
        self.total = 0
        self.messages_in = self.messages_out = 0
        self.read_ns = self.write_ns = NOT_YET

    @property
    def open(self) -> int:
        """How many calls are in flight, streams included."""
        return self.calls + self.streams

    @property
    def last_ns(self) -> int:
        """When a call last began or ended, or a message was last read or written."""
        return max(self.read_ns, self.write_ns)

    def begin(self, now_ns: int, *, streams: bool) -> None:
        """Count a call that begins. All limits start again."""
        self.total += 1
        self.read_ns = self.write_ns = now_ns
        if streams:
            self.streams += 1
        else:
            self.calls += 1
            self.messages_in += 1

    def read(self, now_ns: int) -> None:
        """Count a message that was read."""
        self.messages_in += 1
        self.read_ns = now_ns

    def wrote(self, now_ns: int) -> None:
        """Count a message that was written."""
        self.messages_out += 1
        self.write_ns = now_ns

    def end(self, now_ns: int | None, *, streams: bool) -> None:
        """Count a call that ends. All limits start again, unless `now_ns` is None."""
        if streams:
            self.streams -= 1
        else:
            self.calls -= 1
        if now_ns is not None:
            self.read_ns = self.write_ns = now_ns


class ConnectionActivity:
    """What was seen of one connection since `first_ns`."""

    def __init__(self, first_ns: int, age_share: float | None = 0.0) -> None:
        self.first_ns = first_ns
        self.age_share = age_share
        """From 0 to 1: how much of a tenth of `max_age` is added to it for this connection. None:
        it has no age, as it stands for several connections."""
        self.user = Activity()
        self.heartbeats = Activity()

    def counted(self, limits: Limits) -> tuple[Activity, ...]:
        """The kinds of activity that keep the connection open."""
        return (self.user, self.heartbeats) if limits.count_heartbeats else (self.user,)

    def last_read_ns(self, limits: Limits) -> int:
        """When it was last read, at the earliest when it began."""
        return max(self.first_ns, *(one.read_ns for one in self.counted(limits)))

    def last_write_ns(self, limits: Limits) -> int:
        """When it was last written, at the earliest when it began."""
        return max(self.first_ns, *(one.write_ns for one in self.counted(limits)))

    def is_busy(self, limits: Limits) -> bool:
        """Whether a call that counts is in flight."""
        return any(one.open for one in self.counted(limits))

    def is_too_old(self, limits: Limits, now_ns: int) -> bool:
        """Whether it exceeds `max_age` and its share of the spread."""
        if limits.age_ns == NEVER or self.age_share is None:
            return False
        spread_ns = int(limits.age_ns * self.age_share) // 10
        return now_ns - self.first_ns > limits.age_ns + spread_ns


class IdleLimit(enum.Enum):
    """A limit of the policy. The value is the text for the client and for events."""

    IDLE = "connection idle for {} s"
    READ = "nothing read for {} s"
    WRITE = "nothing written for {} s"
    AGE = "connection open for {} s"


@dataclass(frozen=True, slots=True)
class IdleReason:
    """The limit that a connection exceeds."""

    limit: IdleLimit
    limit_ns: int
    idle_ns: int
    """Time since the connection was used."""
    busy: bool = False
    """Whether calls are in flight: the connection is too old, and not idle."""

    @property
    def text(self) -> str:
        """The reason in words."""
        return self.limit.value.format(f"{self.limit_ns / 1e9:g}")


def idle_reason(activity: ConnectionActivity, limits: Limits, now_ns: int) -> IdleReason | None:
    """Return the limit that a connection exceeds; None if none, or if a call keeps it open."""
    read_ns, write_ns = activity.last_read_ns(limits), activity.last_write_ns(limits)
    idle_ns = now_ns - max(read_ns, write_ns)
    if activity.is_too_old(limits, now_ns):
        busy = activity.is_busy(limits)
        return IdleReason(IdleLimit.AGE, limits.age_ns, idle_ns, busy)
    for one in activity.counted(limits):
        if one.calls or (one.streams and not limits.close_streams):
            return None
    for limit, limit_ns, silent_ns in (
        (IdleLimit.IDLE, limits.idle_ns, idle_ns),
        (IdleLimit.READ, limits.read_ns, now_ns - read_ns),
        (IdleLimit.WRITE, limits.write_ns, now_ns - write_ns),
    ):
        if silent_ns > limit_ns:  # not >=, as in Dubbo
            return IdleReason(limit, limit_ns, idle_ns)
    return None


class PendingClose:
    """A decision to close a connection, and how far that is."""

    def __init__(self, reason: IdleReason, now_ns: int) -> None:
        self.reason = reason
        self.decided_ns = now_ns
        self.attempts = 0
        self.next_ns = now_ns
        """When to take the next step."""
        self.ended_ns: int | None = None
        """When the calls on the connection were ended."""

    def was_used(self, activity: ConnectionActivity, limits: Limits) -> bool:
        """Whether the connection was used since the decision, in the direction of the limit."""
        limit = self.reason.limit
        was_read = activity.last_read_ns(limits) >= self.decided_ns
        was_written = activity.last_write_ns(limits) >= self.decided_ns
        return (was_read and limit is not IdleLimit.WRITE) or (
            was_written and limit is not IdleLimit.READ
        )


class SocketState(NamedTuple):
    """A socket right before it is closed, and whether calls may be on it that are not known."""

    unread: int
    """Bytes that gRPC has not read."""
    unsent: int
    """Bytes that the client has not acknowledged."""
    received_ago_ns: int
    accounted_ago_ns: int = 0
    """All calls whose bytes arrived before this are known."""
    has_unknown_calls: bool = False
    """Whether the server has calls of which the connection is not known."""


class Step(enum.Enum):
    """The next step with a connection that is to be closed. `KEEP_*` have the reason in words."""

    KEEP_USED = "it is used again"
    KEEP_BUSY = "bytes arrive that may be a call"
    WAIT = "try again soon"
    WAIT_LONG = "wait for the end of its calls"
    END_CALLS = "end the calls on it"
    SHUTDOWN = "shut the socket down"


def next_step(  # noqa: PLR0911 - one for each step
    activity: ConnectionActivity,
    pending: PendingClose,
    socket: SocketState,
    limits: Limits,
    now_ns: int,
) -> Step:
    """Decide the next step, right before it is taken."""
    quiet_ns = max(QUIET_NS, socket.accounted_ago_ns)
    has_received = bool(socket.unread) or socket.received_ago_ns < quiet_ns
    may_wait = pending.attempts < MAX_ATTEMPTS
    if pending.reason.limit is IdleLimit.AGE:
        # The grace period begins when the age is noticed, up to a `check_interval` late.
        if now_ns - pending.decided_ns >= limits.age_grace_ns:
            return _force(pending, socket, now_ns)
        if activity.is_busy(limits) or (socket.has_unknown_calls and has_received):
            return Step.WAIT_LONG
        may_wait = True
    elif pending.was_used(activity, limits):
        return Step.KEEP_USED
    if may_wait:
        if has_received:
            return Step.WAIT
        if activity.user.open or activity.heartbeats.open:
            return Step.END_CALLS
        return Step.WAIT if socket.unsent else Step.SHUTDOWN
    if not has_received:
        return Step.SHUTDOWN
    # Bytes arrive for a second, but no message: on a stream that is only written they are the
    # window updates of its client.
    is_written = pending.reason.limit is IdleLimit.READ and not socket.has_unknown_calls
    return _force(pending, socket, now_ns) if is_written else Step.KEEP_BUSY


def _force(pending: PendingClose, socket: SocketState, now_ns: int) -> Step:
    """End the calls once, and then the connection, however many calls begin meanwhile."""
    if pending.ended_ns is None:
        return Step.END_CALLS
    if socket.unsent and now_ns - pending.ended_ns < MAX_ATTEMPTS * RETRY_INTERVAL_NS:
        return Step.WAIT
    return Step.SHUTDOWN
