"""Which connection is idle, and what is done about it next; without a socket, a clock or a lock.

A connection has two kinds of `Use`, the user's and that of heartbeats. `judge` says whether a limit
is passed. Whoever acts on that makes a `Mark`, and asks `step` right before each thing it does: a
connection that was used since it was marked is kept, and so is one that may have a call of which
nothing is known yet. Only its age closes a connection that is used: its calls may end by
themselves, for a while, and then are ended. Nothing here is thread-safe: whoever owns a `Seen`
calls in under a lock of its own. All times are nanoseconds on one clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from .limits import Limits

__all__ = [
    "TRY_NS",
    "Due",
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

LATE_NS: Final = 1_000_000_000
"""So late a call may be told, beyond what the server is known to have seen: threads of gRPC's wait
for a processor too."""

NOTHING: Final = -LATE_NS
"""For a time that has passed since something that was not."""

STATUS_NS: Final = 20_000_000
"""For the status of a call that was ended to get out, where more calls come meanwhile."""

AGED_NS: Final = 1_000_000_000
"""Between two looks at one that is too old, and has calls; less where the grace is short."""


class Use:
    """What was seen of one kind of call on a connection."""

    __slots__ = (
        "calls",
        "ended_ns",
        "messages_in",
        "messages_out",
        "moves_in",
        "moves_out",
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
        self.moves_in = self.moves_out = 0
        """Grow with what comes, or goes, and with each call that begins."""
        self.read_ns: int | None = None
        self.write_ns: int | None = None
        self.ended_ns: int | None = None

    @property
    def open(self) -> int:
        """How many calls and streams are open."""
        return self.calls + self.streams

    def begin(self, now_ns: int, *, streams: bool) -> None:
        """Count a call that begins, which is something read: its headers came."""
        self.moves_in += 1
        self.moves_out += 1
        self.total += 1
        self.read_ns = now_ns
        if streams:
            self.streams += 1
        else:
            self.calls += 1
            self.messages_in += 1

    def read(self, now_ns: int) -> None:
        """Count a message that came in."""
        self.moves_in += 1
        self.messages_in += 1
        self.read_ns = now_ns

    def wrote(self, now_ns: int) -> None:
        """Count a message that goes out."""
        self.moves_out += 1
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

    def moves(self, limits: Limits, reason: Reason) -> int:
        """What tells whether the connection was used in between, the way that matters."""
        uses = self.counted(limits)
        read = 0 if reason is Reason.WRITE else sum(use.moves_in for use in uses)
        return read + (0 if reason is Reason.READ else sum(use.moves_out for use in uses))

    def is_busy(self, limits: Limits) -> bool:
        """Whether anything is open that keeps it open."""
        return any(use.open for use in self.counted(limits))

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
    waits: bool = False
    """Whether it has calls that may still end by themselves: it is too old, not idle."""

    @property
    def text(self) -> str:
        """The reason for people."""
        return self.reason.value.format(f"{self.limit_ns / 1e9:g}")


def judge(seen: Seen, limits: Limits, now_ns: int) -> Due | None:
    """Say which limit a connection has passed; None if none, or if what is open holds it."""
    uses = seen.counted(limits)
    held = any(use.calls or (use.streams and not limits.close_streams) for use in uses)
    used = [use.ended_ns for use in uses]
    read_ns = _latest(seen.first_ns, *used, *(use.read_ns for use in uses))
    write_ns = _latest(seen.first_ns, *used, *(use.write_ns for use in uses))
    idle_ns = now_ns - max(read_ns, write_ns)
    if seen.over_age_ns(limits, now_ns) > 0:
        return Due(Reason.AGE, limits.age_ns, idle_ns, waits=seen.is_busy(limits))
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

    __slots__ = ("due", "ended_ns", "left_ns", "made_ns", "moves", "next_ns", "tries")

    def __init__(self, due: Due, moves: int, now_ns: int) -> None:
        self.due = due
        self.made_ns = now_ns
        self.moves = moves
        self.tries = 0
        self.next_ns = now_ns
        """When to do the next step."""
        self.left_ns: int | None = None
        """When the client was asked to leave."""
        self.ended_ns: int | None = None
        """When its calls were ended."""


class Look(NamedTuple):
    """What the kernel says of a connection at the last moment."""

    unread: int
    unsent: int
    received_ago_ns: int
    seen_ago_ns: int = 0
    """What came in before that, the server has seen."""
    coming_ago_ns: int = NOTHING
    """Since the oldest call may have come of which is not known where from; or `NOTHING`."""
    hidden_ago_ns: int = NEVER
    """Since there was one of which will never be known where it came from."""


class Step(enum.Enum):
    """What is to be done next with a connection that is marked."""

    KEEP_USED = "it is used again"
    KEEP_BUSY = "bytes keep coming in or going out"
    KEEP_DOUBTFUL = "bytes came in, and may be a call of which is not known where it came from"
    WAIT = "try again soon"
    WAIT_LONG = "the client was asked to leave: give it time"
    END_CALLS = "end what is open on it"
    GOAWAY = "ask the client to leave"
    SHUTDOWN = "close it"


def step(seen: Seen, mark: Mark, look: Look, limits: Limits, now_ns: int) -> Step:
    """Say what to do next, right before it is done."""
    if _must(mark, limits, now_ns):
        return _last(mark, look, now_ns)
    if mark.left_ns is not None:
        return _leaving(seen, mark, look, limits, now_ns)
    idle_ns = mark.due.idle_ns + now_ns - mark.made_ns
    if mark.due.reason is Reason.AGE:
        return _aged(seen, look, limits, idle_ns)
    if seen.moves(limits, mark.due.reason) != mark.moves:
        return Step.KEEP_USED
    return _idle(seen, mark, look, limits, now_ns)


def _idle(seen: Seen, mark: Mark, look: Look, limits: Limits, now_ns: int) -> Step:
    """It is not known to be used; what comes in may still be use."""
    idle_ns = mark.due.idle_ns + now_ns - mark.made_ns
    if _was_hidden(look, idle_ns):
        return Step.KEEP_DOUBTFUL
    patient = mark.tries < TRIES
    if _may_be_called(look):
        return Step.WAIT if patient else Step.KEEP_DOUBTFUL
    if _incoming(look) and not patient:
        # For a second bytes came, and no message: where it is written, windows that are updated.
        is_written = mark.due.reason is Reason.READ
        return _last(mark, look, now_ns) if is_written else Step.KEEP_BUSY
    ending = _ending(seen, look, patient=patient)
    asks = patient and limits.goaway and seen.plain
    return _asking(look) if asks and ending is Step.SHUTDOWN else ending


def _must(mark: Mark, limits: Limits, now_ns: int) -> bool:
    """Whether it is closed although it is used: it is too old, and the grace is over.

    The grace begins when its age is noticed, which may be a whole `check` late.
    """
    return mark.due.reason is Reason.AGE and now_ns - mark.made_ns >= limits.age_grace_ns


def _last(mark: Mark, look: Look, now_ns: int) -> Step:
    """End what is open, once, and then it all: calls that come meanwhile would have no end."""
    if mark.ended_ns is None:
        return Step.END_CALLS
    if look.unsent and now_ns - mark.ended_ns < TRIES * TRY_NS:
        return Step.WAIT
    return Step.SHUTDOWN


def _aged(seen: Seen, look: Look, limits: Limits, idle_ns: int) -> Step:
    """It is too old: its client is asked to leave, or it goes as soon as nothing is open."""
    if seen.plain:
        return _asking(look)
    if seen.is_busy(limits):
        return Step.WAIT_LONG
    if _was_hidden(look, idle_ns) or _may_be_called(look):
        return Step.WAIT_LONG
    return _ending(seen, look, patient=True)


def _asking(look: Look) -> Step:
    return Step.WAIT if look.unsent else Step.GOAWAY


def _was_hidden(look: Look, idle_ns: int) -> bool:
    """Whether what came in after it was used last may be use that can't be told."""
    return look.hidden_ago_ns < idle_ns + QUIET_NS and look.received_ago_ns < idle_ns - QUIET_NS


def _may_be_called(look: Look) -> bool:
    """Whether one of the calls that are not known to be anywhere may be here.

    That the connection was used since its bytes came does not say that they were no call: one may
    wait for its request, or for a thread, while others come and go.
    """
    return look.received_ago_ns < look.coming_ago_ns + LATE_NS


def _incoming(look: Look) -> bool:
    return look.unread > 0 or look.received_ago_ns < max(QUIET_NS, look.seen_ago_ns)


def _ending(seen: Seen, look: Look, *, patient: bool) -> Step:
    """First the calls, then the socket, when nothing is on its way: not a call, no status."""
    if not patient:
        return Step.SHUTDOWN
    if _incoming(look):
        return Step.WAIT
    if seen.open:
        return Step.END_CALLS
    return Step.WAIT if look.unsent else Step.SHUTDOWN


def _leaving(seen: Seen, mark: Mark, look: Look, limits: Limits, now_ns: int) -> Step:
    """The client was asked to leave: what it has open may end by itself, for a while.

    So may a call that it sent before it heard of that.
    """
    left_ns = now_ns if mark.left_ns is None else mark.left_ns
    if seen.user.open or now_ns - left_ns < limits.goaway_grace_ns:
        return Step.WAIT_LONG
    if _may_be_called(look):
        return Step.WAIT_LONG
    return Step.WAIT if _incoming(look) and mark.tries < TRIES else Step.SHUTDOWN


def _latest(first_ns: int, *others: int | None) -> int:
    return max(first_ns, *(first_ns if other is None else other for other in others))
