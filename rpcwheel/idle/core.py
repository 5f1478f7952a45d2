"""Decides which connections are idle, and the next step to close one. No I/O, no clock, no lock.

gRPC's server has MAX_CONNECTION_IDLE, MAX_CONNECTION_AGE and MAX_CONNECTION_AGE_GRACE. This module
has the same three limits, and limits for connections on which nothing is read or written.
It differs in this: heartbeats need not count as use, a stream without messages may be idle, and the
connection is closed without a GOAWAY frame.

A connection has two kinds of `Activity`: calls of users, and heartbeats. `idle_reason` says which
limit of the policy a connection exceeds. The detector then creates a `PendingClose`, calls
`next_step` right before each action, and notes the step in the `PendingClose`. A connection that
was used since the decision is kept, and so is one on which bytes arrived that may be a call which
the server has not reported yet. With `close_streams`, a stream without messages is not a use. Only
its age closes a connection that is in use: its calls have a grace period, and are then ended.

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

NOT_YET: Final = -NEVER
"""The time of an event that has not happened yet."""

CHECKS_PER_LIMIT: Final = 3
"""Connections are checked this often within the shortest limit, as in Dubbo
(`HEARTBEAT_CHECK_TICK`)."""

QUIET_NS: Final = 100_000_000
"""No bytes may have arrived for this long on a connection that is closed: they may be a call that
has not reached its handler."""

RETRY_INTERVAL_NS: Final = 100_000_000
"""Between two attempts to close a connection."""

MAX_ATTEMPTS: Final = 10
"""After so many steps an idle connection is no longer waited for: it is closed or kept."""

RETRY_TIMEOUT_NS: Final = MAX_ATTEMPTS * RETRY_INTERVAL_NS
"""How long to wait for the client to acknowledge the statuses of the ended calls."""

ACCEPT_LATENCY_NS: Final = 1_000_000_000
"""How late gRPC's threads may report a call whose bytes have arrived. Used by the detectors for
`SocketState.unaccounted_ns`."""

STATUS_GRACE_NS: Final = 20_000_000
"""How long to wait after the calls on a connection that is too old were ended, so that their
statuses are sent before the socket is shut down. Short, as new calls may arrive meanwhile."""

MAX_AGE_INTERVAL_NS: Final = 1_000_000_000
"""Between two attempts to close a connection that is too old and in use; less if the grace period
is short."""


class Limits:
    """An `IdlePolicy` in nanoseconds; `NEVER` where there is no limit."""

    def __init__(self, policy: IdlePolicy) -> None:
        self.idle_timeout_ns = _limit_ns(policy.idle_timeout)
        self.read_idle_ns = _limit_ns(policy.read_idle)
        self.write_idle_ns = _limit_ns(policy.write_idle)
        self.max_age_ns = _limit_ns(policy.max_age)
        self.max_age_grace_ns = to_ns(policy.max_age_grace)
        self.request_timeout_ns = _limit_ns(policy.request_timeout)
        """Checked by the detector, not in this module."""
        self.check_interval_ns = _limit_ns(policy.check_interval)
        if policy.check_interval is None:
            shortest_ns = min(
                self.idle_timeout_ns,
                self.read_idle_ns,
                self.write_idle_ns,
                self.max_age_ns,
                self.request_timeout_ns,
            )
            if shortest_ns != NEVER:
                self.check_interval_ns = max(1, shortest_ns // CHECKS_PER_LIMIT)
        self.close_streams = policy.close_streams
        self.count_heartbeats = policy.count_heartbeats
        self.report_only = policy.action == "report"


def _limit_ns(limit: Duration | None) -> int:
    return NEVER if limit is None else to_ns(limit)


class Activity:
    """The calls of one kind on a connection. Times are `NOT_YET` before the first call."""

    def __init__(self) -> None:
        self.unary_calls = 0
        """Calls in flight with one request and one response."""
        self.streams = 0
        """Calls in flight that stream requests or responses."""
        self.total = 0
        """Calls that have begun, ever, streams included."""
        self.messages_in = self.messages_out = 0
        self.last_read_ns = self.last_write_ns = NOT_YET

    @property
    def in_flight(self) -> int:
        """How many calls are in flight, streams included."""
        return self.unary_calls + self.streams

    @property
    def last_used_ns(self) -> int:
        """When a call last began or ended, or a message was last read or written."""
        return max(self.last_read_ns, self.last_write_ns)

    def begin(self, now_ns: int, *, streams: bool) -> None:
        """Count a call that begins. All limits start again.

        A unary call begins with its request, which is therefore counted here. Its response is
        counted by `note_write`.
        """
        self.total += 1
        self.last_read_ns = self.last_write_ns = now_ns
        if streams:
            self.streams += 1
        else:
            self.unary_calls += 1
            self.messages_in += 1

    def note_read(self, now_ns: int) -> None:
        """Count a message that was read."""
        self.messages_in += 1
        self.last_read_ns = now_ns

    def note_write(self, now_ns: int) -> None:
        """Count a message that was written."""
        self.messages_out += 1
        self.last_write_ns = now_ns

    def end(self, now_ns: int | None, *, streams: bool) -> None:
        """Count a call that ends. All limits start again.

        If `now_ns` is None, the detector has ended the call, which is no use of the connection.
        """
        if streams:
            self.streams -= 1
        else:
            self.unary_calls -= 1
        if now_ns is not None:
            self.last_read_ns = self.last_write_ns = now_ns


class ConnectionActivity:
    """The activity of one connection since `first_ns`."""

    def __init__(self, first_ns: int, age_jitter: float | None = 0.0) -> None:
        self.first_ns = first_ns
        self.age_jitter = age_jitter
        """From 0 to 1: `max_age` is 0 to 10 % longer for this connection, so that connections that
        began together do not end together. None: it has no age, because gRPC gives all clients of a
        unix socket the same name, and this object stands for all of them."""
        self.user = Activity()
        self.heartbeats = Activity()

    def counted_activities(self, limits: Limits) -> tuple[Activity, ...]:
        """The kinds of activity that keep the connection open."""
        return (self.user, self.heartbeats) if limits.count_heartbeats else (self.user,)

    def last_read_ns(self, limits: Limits) -> int:
        """When it was last read, at the earliest when it began."""
        return max(self.first_ns, *(kind.last_read_ns for kind in self.counted_activities(limits)))

    def last_write_ns(self, limits: Limits) -> int:
        """When it was last written, at the earliest when it began."""
        return max(self.first_ns, *(kind.last_write_ns for kind in self.counted_activities(limits)))

    def is_busy(self, limits: Limits) -> bool:
        """Whether a call that counts is in flight."""
        return any(kind.in_flight for kind in self.counted_activities(limits))

    def is_too_old(self, limits: Limits, now_ns: int) -> bool:
        """Whether it exceeds `max_age` and its jitter."""
        if limits.max_age_ns == NEVER or self.age_jitter is None:
            return False
        jitter_ns = int(limits.max_age_ns * self.age_jitter) // 10
        return now_ns - self.first_ns > limits.max_age_ns + jitter_ns


class IdleLimit(enum.Enum):
    """A limit of the policy. The value is the text for the client and for events."""

    IDLE = "connection idle for {} s"
    READ = "nothing read for {} s"
    WRITE = "nothing written for {} s"
    AGE = "connection open for {} s"


@dataclass(frozen=True, slots=True)
class IdleReason:
    """The limit that a connection exceeds. It need not be idle: `AGE` is a limit too."""

    limit: IdleLimit
    limit_ns: int
    idle_ns: int
    """Time since the connection was used."""
    busy: bool = False
    """Whether calls are in flight. Only with `AGE`."""

    @property
    def text(self) -> str:
        """The reason in words."""
        return self.limit.value.format(f"{self.limit_ns / 1e9:g}")


def idle_reason(activity: ConnectionActivity, limits: Limits, now_ns: int) -> IdleReason | None:
    """Return the limit that a connection exceeds; None if none, or if a call keeps it open."""
    last_read_ns, last_write_ns = activity.last_read_ns(limits), activity.last_write_ns(limits)
    idle_ns = now_ns - max(last_read_ns, last_write_ns)
    if activity.is_too_old(limits, now_ns):
        busy = activity.is_busy(limits)
        return IdleReason(IdleLimit.AGE, limits.max_age_ns, idle_ns, busy)
    for kind in activity.counted_activities(limits):
        if kind.unary_calls or (kind.streams and not limits.close_streams):
            return None
    for limit, limit_ns, silent_ns in (
        (IdleLimit.IDLE, limits.idle_timeout_ns, idle_ns),
        (IdleLimit.READ, limits.read_idle_ns, now_ns - last_read_ns),
        (IdleLimit.WRITE, limits.write_idle_ns, now_ns - last_write_ns),
    ):
        if silent_ns > limit_ns:  # `>`, as Dubbo has it, not `>=`
            return IdleReason(limit, limit_ns, idle_ns)
    return None


class PendingClose:
    """A decision to close a connection, and its progress."""

    def __init__(self, reason: IdleReason, now_ns: int) -> None:
        self.reason = reason
        self.decided_ns = now_ns
        self.attempts = 0
        """How many steps were taken, of any kind."""
        self.next_ns = now_ns
        """When to take the next step."""
        self.ended_ns: int | None = None
        """When the calls on the connection were last ended; None: not yet."""

    def note_step(self, step: Step, limits: Limits, now_ns: int) -> None:
        """Note a step that is taken now, and set the time of the next one."""
        self.attempts += 1
        self.next_ns = now_ns + RETRY_INTERVAL_NS
        if step is Step.WAIT_LONG:
            interval_ns = min(MAX_AGE_INTERVAL_NS, limits.max_age_grace_ns // 10)
            self.next_ns = now_ns + max(RETRY_INTERVAL_NS, interval_ns)
        elif step is Step.END_CALLS:
            self.ended_ns = now_ns
            if self.reason.limit is IdleLimit.AGE:
                self.next_ns = now_ns + STATUS_GRACE_NS

    def was_used(self, activity: ConnectionActivity, limits: Limits) -> bool:
        """Whether the connection was used since the decision.

        If the limit is READ, only reads count; if it is WRITE, only writes.
        """
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
    """Time since bytes last arrived."""
    unaccounted_ns: int = 0
    """Calls whose bytes arrived within this time may not be known yet."""
    has_unknown_calls: bool = False
    """Whether the server has calls of which the connection is not known."""

    def may_hide_call(self) -> bool:
        """Whether bytes have arrived that may be a call which is not known yet."""
        return self.unread > 0 or self.received_ago_ns < max(QUIET_NS, self.unaccounted_ns)


class Step(enum.Enum):
    """The next step with a connection that is to be closed. `KEEP_*` have the reason in words."""

    KEEP_USED = "it is used again"
    KEEP_BUSY = "bytes arrive that may be a call"
    WAIT = "try again after RETRY_INTERVAL_NS"
    WAIT_LONG = "wait for the end of its calls, and try again after MAX_AGE_INTERVAL_NS"
    END_CALLS = "end the calls on it"
    SHUTDOWN = "shut the socket down"


def next_step(
    activity: ConnectionActivity,
    pending: PendingClose,
    socket: SocketState,
    limits: Limits,
    now_ns: int,
) -> Step:
    """Decide the next step, right before it is taken."""
    if pending.reason.limit is IdleLimit.AGE:
        return _next_step_for_age(activity, pending, socket, limits, now_ns)
    if pending.was_used(activity, limits):
        return Step.KEEP_USED
    if pending.attempts < MAX_ATTEMPTS:
        return _close_when_quiet(activity, socket)
    if not socket.may_hide_call():
        has_calls = activity.user.in_flight or activity.heartbeats.in_flight
        # The calls were not ended if bytes arrived before every attempt until now.
        return Step.END_CALLS if has_calls and pending.ended_ns is None else Step.SHUTDOWN
    # Bytes arrived before every attempt, but no message: on a stream that is only written they are
    # HTTP/2 window updates of its client.
    may_be_window_updates = pending.reason.limit is IdleLimit.READ and not socket.has_unknown_calls
    return _force_close(pending, socket, now_ns) if may_be_window_updates else Step.KEEP_BUSY


def _next_step_for_age(
    activity: ConnectionActivity,
    pending: PendingClose,
    socket: SocketState,
    limits: Limits,
    now_ns: int,
) -> Step:
    # The grace period begins when the age is noticed, up to a `check_interval` late.
    if now_ns - pending.decided_ns >= limits.max_age_grace_ns:
        return _force_close(pending, socket, now_ns)
    if activity.is_busy(limits) or (socket.has_unknown_calls and socket.may_hide_call()):
        return Step.WAIT_LONG
    return _close_when_quiet(activity, socket)


def _close_when_quiet(activity: ConnectionActivity, socket: SocketState) -> Step:
    """Wait until no bytes arrive, end the calls, and shut down when their statuses are sent."""
    if socket.may_hide_call():
        return Step.WAIT
    if activity.user.in_flight or activity.heartbeats.in_flight:
        return Step.END_CALLS
    return Step.WAIT if socket.unsent else Step.SHUTDOWN


def _force_close(pending: PendingClose, socket: SocketState, now_ns: int) -> Step:
    """End the calls once, and then the connection, however many calls begin meanwhile."""
    if pending.ended_ns is None:
        return Step.END_CALLS
    if socket.unsent and now_ns - pending.ended_ns < RETRY_TIMEOUT_NS:
        return Step.WAIT
    return Step.SHUTDOWN
