"""Which connection serves the next call: one is active, those before it drain, none is shared.

A `Link` is one channel of grpc's with a connection of its own; `Links` are those of one channel of
ours, the newest of which takes new calls. Nothing here does I/O or reads a clock, and nothing is
thread-safe: whoever owns the links calls in under a lock, or on one loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.backoff import Backoff

    Convert = Callable[[Any], Any]

__all__ = ["Link", "Links", "Traffic"]

C = TypeVar("C")

MOST_BACKOFF: Final = 64
"""Replacements in a row after which the backoff grows no more: wait objects may overflow."""


ANSWERS: Final = frozenset(
    {
        "ABORTED",
        "ALREADY_EXISTS",
        "DATA_LOSS",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "UNIMPLEMENTED",
    }
)
"""Status codes that only a server gives, so that the connection lives.

The others gRPC makes on this side too: UNKNOWN of an iterator of requests that raises,
RESOURCE_EXHAUSTED of a message that is too large to send, INTERNAL of one that has no bytes,
UNAUTHENTICATED of call credentials that fail.
"""


class Traffic:
    """When something was last read, written and used, on the timer's clock; None: never yet.

    Stamped by any thread without a lock: each stamp is one assignment.
    """

    __slots__ = ("last_read_ns", "last_use_ns", "last_write_ns", "now_ns")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns
        self.last_read_ns: int | None = None
        """A message or an answer of the server's, to a heartbeat too: the peer lives."""
        self.last_write_ns: int | None = None
        """A message to the server, a heartbeat's too."""
        self.last_use_ns: int | None = None
        """A message either way, or the begin of a call, of the user's calls only."""

    def saw_read(self) -> None:
        """A message of a user's call came in."""
        self.last_read_ns = self.last_use_ns = self.now_ns()

    def saw_status(self, code: object) -> None:
        """A user's call has failed with this code: a read if only a server gives it.

        Args:
            code: A `grpc.StatusCode`, or whatever an interceptor has made of one.
        """
        if getattr(code, "name", None) in ANSWERS:
            self.saw_read()

    def saw_write(self) -> None:
        """A message of a user's call goes out, or a call begins."""
        self.last_write_ns = self.last_use_ns = self.now_ns()

    def writing(self, serializer: Convert | None) -> Convert:
        """The serializer, which notes that a message goes out once it could be made."""
        now_ns = self.now_ns

        def write(message: Any) -> Any:
            data = message if serializer is None else serializer(message)
            self.last_write_ns = self.last_use_ns = now_ns()  # `saw_write`; each call pays for it
            return data

        return write

    def reading(self, deserializer: Convert | None) -> Convert:
        """The deserializer, which notes that a message came in, whatever can be made of it."""
        now_ns = self.now_ns

        def read(data: Any) -> Any:
            self.last_read_ns = self.last_use_ns = now_ns()  # `saw_read`
            return data if deserializer is None else deserializer(data)

        return read


class Link(Generic[C]):
    """One connection's worth: grpc's channel, what was seen of it, and the calls on it."""

    __slots__ = (
        "__weakref__",
        "began_ns",
        "calls",
        "channel",
        "drain_until_ns",
        "ended",
        "members",
        "number",
        "reason",
        "retired",
        "traffic",
        "wanted",
    )

    def __init__(self, number: int, channel: C, now_ns: Callable[[], int]) -> None:
        self.number = number
        """1 for the first of a channel."""
        self.channel = channel
        self.began_ns = now_ns()
        self.traffic = Traffic(now_ns)
        self.calls = 0
        """Calls of the user's that run on it."""
        self.drain_until_ns = NEVER
        """When the calls that are still on it are ended; `NEVER` while it is active."""
        self.ended = False
        """Whether it is to be closed or closed already: nothing may be begun or made on it."""
        self.reason = ""
        """Why another took its place, or the channel was retired."""
        self.retired = False
        """Whether nothing took its place: the channel was retired."""
        self.members: dict[Any, Any] = {}
        """grpc's multi-callables, by what each was made of."""
        self.wanted = False
        """Whether it was asked for a connection, and was not seen to have one since."""

    @property
    def details(self) -> str:
        """The status details of calls that are ended on it."""
        what = "channel retired" if self.retired else "connection replaced"
        return f"{what}: {self.reason}"


class Links(Generic[C]):
    """The links of one channel."""

    def __init__(self, first: C, now_ns: Callable[[], int], backoff: Backoff) -> None:
        self._now_ns = now_ns
        self._backoff = backoff
        self._silent = 0  # links in a row that were given up and had never been heard
        self._not_before_ns = -NEVER
        self.active: Link[C] = Link(1, first, now_ns)
        self.draining: list[Link[C]] = []
        self.closed = False
        self.retired = False
        """Whether it takes no more calls, and is to be closed when those that run have ended."""
        self.calls = 0
        """How many calls run, on all links; on those too that are to be closed."""

    def enter(self) -> Link[C]:
        """The link for a call that begins now."""
        link = self.active
        link.calls += 1
        self.calls += 1
        return link

    def leave(self, link: Link[C]) -> bool:
        """Take note that a call on `link` has ended; True if the link is to be closed now."""
        link.calls -= 1
        self.calls -= 1
        if link is self.active and not self.retired:
            return False
        if link.calls or link.ended:
            return False
        self.draining.remove(link)
        link.ended = True
        return True

    def wait_ns(self) -> int:
        """How long the backoff forbids another replacement; 0 if it may be now."""
        if self.active.traffic.last_read_ns is not None:
            return 0  # this one worked: what is wrong with it is new
        return max(0, self._not_before_ns - self._now_ns())

    def rest_ns(self) -> int:
        """How long the backoff wants to rest after a replacement that were made now.

        Raises:
            Exception: Whatever a wait object of the user's raises; so ask before anything is done.
        """
        silent = self._silent_ones() + 1
        rest_ns = self._backoff.next_delay_ns(min(silent, MOST_BACKOFF), elapsed_ns=0, error=None)
        return NEVER if rest_ns is None else rest_ns

    def _silent_ones(self) -> int:
        """Links in a row that were never heard from, once the active one is given up too."""
        return 0 if self.active.traffic.last_read_ns is not None else self._silent + 1

    def replace(
        self, channel: C, drain_ns: int, reason: str = "", rest_ns: int | None = None
    ) -> tuple[Link[C], bool]:
        """Put a new link in the place of the active one.

        Args:
            channel: The new one's.
            drain_ns: How long calls may go on on the old one; `NEVER` for as long as they take.
            reason: Why.
            rest_ns: What `rest_ns()` said; None to ask it now.

        Returns:
            The old link, and whether it is to be closed now: no calls, or no time for them. If it
            is `wanted`, the new one is to be asked for a connection in its stead.
        """
        rest_ns = self.rest_ns() if rest_ns is None else rest_ns
        old, now_ns = self.active, self._now_ns()
        self._silent = self._silent_ones()
        self._not_before_ns = NEVER if rest_ns == NEVER else now_ns + rest_ns
        self.active = Link(old.number + 1, channel, self._now_ns)
        self.active.wanted = old.wanted = old.wanted and old.traffic.last_read_ns is None
        old.reason = reason
        if not old.calls or drain_ns <= 0:
            old.ended = True
            return old, True
        old.drain_until_ns = NEVER if drain_ns == NEVER else now_ns + drain_ns
        self.draining.append(old)
        return old, False

    def expire(self, link: Link[C]) -> bool:
        """Take note that the time of `link` to drain is over; True if it is to be closed now."""
        if link not in self.draining:
            return False
        self.draining.remove(link)
        link.ended = True
        return True

    def overdue(self) -> list[Link[C]]:
        """Take out the links whose time to drain is over; they are to be closed now."""
        now_ns = self._now_ns()
        return [
            link
            for link in tuple(self.draining)
            if link.drain_until_ns <= now_ns and self.expire(link)
        ]

    def opened(self) -> list[Link[C]]:
        """Those that are not to be closed: the active one, and those that drain."""
        return list(self.draining) if self.retired else [self.active, *self.draining]

    @property
    def refuses(self) -> bool:
        """Whether no call may begin and nothing be replaced any more."""
        return self.closed or self.retired

    @property
    def is_spent(self) -> bool:
        """Whether it was retired and all links are to be closed: then so is the whole channel."""
        return self.retired and not self.draining

    def retire(self, drain_ns: int, reason: str = "") -> tuple[list[Link[C]], list[Link[C]]]:
        """Take no more calls; the active link drains too from now on.

        Args:
            drain_ns: How long calls may go on at most, on all links; `NEVER` for as long as they
                take. Asked again, it can only become shorter.
            reason: Why; the first one counts.

        Returns:
            The links that are to be closed now, and those whose time to drain has become shorter.
        """
        over: list[Link[C]] = []
        shorter: list[Link[C]] = []
        if self.closed:
            return over, shorter
        if not self.retired:
            self.retired = self.active.retired = True
            self.active.reason = reason
            self.draining.append(self.active)
        until_ns = NEVER if drain_ns == NEVER else self._now_ns() + drain_ns
        for link in tuple(self.draining):
            if not link.calls or drain_ns <= 0:
                self.expire(link)
                over.append(link)
            elif until_ns < link.drain_until_ns:
                link.drain_until_ns = until_ns
                shorter.append(link)
        return over, shorter

    def close(self) -> list[Link[C]]:
        """Take no more calls; gives the links that are to be closed now. A second time, none."""
        if self.closed:
            return []
        self.closed = True
        links, self.draining = self.opened(), []
        for link in links:
            link.ended = True
        return links
