"""What is decided about a failed call: try again or give up, take it in or not.

Pure: time comes in as nanoseconds, decisions go out as values, nothing is locked, awaited or
logged. Two halves, because one of them runs the user's code:

* `after_failure` asks the policy's predicates and strategies; it changes nothing, and the ledger
  calls it without its lock.
* All other methods keep the book: who waits, who runs, how many of what. They run no code of the
  user's, and the ledger calls them under its lock.

A parked call goes from WAITING to RUNNING (`claim`) and back (`wait_again`), may be ENDING
(`give_up`), and ends as GONE (`remove`, `take_left`), once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from rpcwheel._grpc.calls import is_channel_closed
from rpcwheel.backoff import Backoff

from .entry import State
from .matching import Matcher

if TYPE_CHECKING:
    from .entry import Entry
    from .policy import FailbackPolicy

__all__ = ["Admission", "Again", "FailbackCore", "FailbackStats", "First", "GiveUp", "Last"]

NO_RETRIES_LEFT: Final = "no retries left"
NOT_MATCHED: Final = "its error is not one that `retry_on` names"
CHANNEL_CLOSED: Final = "its channel was closed; close the kit, or the queue, before the channel"
CANCELLED: Final = (
    "its try was cancelled, as by a channel that was closed; "
    "close the kit, or the queue, before the channel"
)

LEAST_DRAIN_NS: Final = 50_000_000
"""The shortest wait that the end of a drain makes of a longer one, and the shortest wait between
retries that a call has only because of the drain."""


@dataclass(frozen=True, slots=True)
class Again:
    """Try once more, not before `delay_ns` has passed."""

    delay_ns: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not try again."""

    reason: str


class Admission(enum.Enum):
    """What becomes of a call that should be parked."""

    PARKED = enum.auto()
    DROPPED = enum.auto()
    FULL = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True, slots=True)
class FailbackStats:
    """What has become of every call so far; a consistent snapshot.

    `calls == delivered_inline + raised + parked + dropped + rejected`, and
    `parked == delivered_later + abandoned + undelivered + pending`.
    """

    calls: int = 0
    """Calls whose first try has ended."""
    delivered_inline: int = 0
    """Succeeded at the first try."""
    raised: int = 0
    """Failed with an error that is not tried again, or were cancelled; callers got that error."""
    parked: int = 0
    """Failed and were queued."""
    dropped: int = 0
    """Failed, found the queue full, and were dropped (`overflow="drop"`)."""
    rejected: int = 0
    """Failed and were refused: callers got `FailbackFull` or `FailbackClosed`."""
    retried: int = 0
    """Tries of queued calls, not counting the first."""
    delivered_later: int = 0
    """Succeeded after having been queued."""
    abandoned: int = 0
    """Given up after the last retry, or after an error that `retry_on` does not name."""
    undelivered: int = 0
    """Given up at `close`, at the end of the program, or because their timer was stopped or their
    loop was closed."""
    pending: int = 0
    """Queued or in retry now."""


class First(enum.Enum):
    """How a first try ended, other than by being parked; the value is what counts it."""

    DELIVERED = "delivered_inline"
    RAISED = "raised"
    REJECTED = "rejected"


class Last(enum.Enum):
    """How a parked call ended; the value is what counts it."""

    DELIVERED = "delivered_later"
    ABANDONED = "abandoned"
    UNDELIVERED = "undelivered"


_ADMISSION_COUNTS: Final = {
    Admission.PARKED: "parked",
    Admission.DROPPED: "dropped",
    Admission.FULL: "rejected",
    Admission.CLOSED: "rejected",
}


class FailbackCore:
    """The decisions and the book of one failback queue."""

    def __init__(self, policy: FailbackPolicy) -> None:
        self._matches = Matcher(policy.retry_on)
        self._backoff = Backoff(policy.backoff, policy.stop, policy.limit)
        self._unlimited = Backoff(policy.backoff)
        self._max_pending = policy.max_pending
        self._drops = policy.overflow == "drop"
        self._entries: dict[Entry, None] = {}  # in the order in which they were parked
        self._closed = False
        self._counts = dict.fromkeys((field.name for field in fields(FailbackStats)), 0)

    def after_failure(
        self,
        error: BaseException,
        *,
        attempts: int,
        elapsed_ns: int,
        idle_ns: int = 0,
        closes_in_ns: int | None = None,
    ) -> Again | GiveUp:
        """Decide what follows when the `attempts`-th try of a call has failed.

        Args:
            error: How it failed.
            attempts: Tries so far, the first one included.
            elapsed_ns: Since the first try began.
            idle_ns: How much of that was waiting.
            closes_in_ns: During `close`, what is left of the drain. Queued calls then have no limit
                of retries, and no wait is longer than half of what is left, so that a server which
                comes back in time gets its calls.

        Raises:
            Exception: What a predicate or strategy of the user's raised.
        """
        if not self._matches(error, attempt=attempts, elapsed_ns=elapsed_ns):
            return GiveUp(_why_not(error))
        delay_ns = self._backoff.next_delay_ns(
            attempts, elapsed_ns=elapsed_ns, error=error, idle_ns=idle_ns
        )
        drains = closes_in_ns is not None and attempts > 1  # the first try is not queued any more
        if delay_ns is None and drains:
            delay_ns = self._unlimited.next_delay_ns(
                attempts, elapsed_ns=elapsed_ns, error=error, idle_ns=idle_ns
            )
            delay_ns = max(delay_ns or 0, LEAST_DRAIN_NS)
        if delay_ns is None:
            return GiveUp(NO_RETRIES_LEFT)
        if closes_in_ns is not None:
            delay_ns = min(delay_ns, max(closes_in_ns // 2, LEAST_DRAIN_NS))
        return Again(delay_ns)

    @property
    def pending(self) -> int:
        """How many calls are waiting or running."""
        return len(self._entries)

    @property
    def closed(self) -> bool:
        """Whether calls that fail are refused."""
        return self._closed

    def stats(self) -> FailbackStats:
        """Count everything up to now."""
        return FailbackStats(**self._counts | {"pending": len(self._entries)})

    def count(self, first: First) -> None:
        """Count a first try that did not lead to parking."""
        self._counts["calls"] += 1
        self._counts[first.value] += 1

    def admit(self, entry: Entry) -> Admission:
        """Take a call in, if there is a place for it and the queue is open."""
        if self._closed:
            admission = Admission.CLOSED
        elif len(self._entries) < self._max_pending:
            admission = Admission.PARKED
            self._entries[entry] = None
        else:
            admission = Admission.DROPPED if self._drops else Admission.FULL
        self._counts["calls"] += 1
        self._counts[_ADMISSION_COUNTS[admission]] += 1
        return admission

    def refuse(self, entry: Entry) -> None:
        """Undo `admit`: there is no timer to wake this call, its caller gets an error."""
        if entry.state is State.WAITING:
            entry.state = State.GONE
            del self._entries[entry]
            self._counts["parked"] -= 1
            self._counts["rejected"] += 1

    def claim(self, entry: Entry, now_ns: int) -> bool:
        """Begin the next try; False if another has begun it already, or the call is gone."""
        if entry.state is not State.WAITING:
            return False
        entry.state = State.RUNNING
        entry.attempts += 1
        entry.idle_ns += now_ns - entry.waiting_since_ns
        self._counts["retried"] += 1
        return True

    def wait_again(self, entry: Entry, error: BaseException, now_ns: int) -> bool:
        """Let the call wait for another try, the last one having failed. False if it is gone."""
        if entry.state is not State.RUNNING:
            return False
        entry.state = State.WAITING
        entry.error = error
        entry.waiting_since_ns = now_ns
        return True

    def give_up(self, entry: Entry, error: BaseException) -> bool:
        """Try the call no more; it stays pending until `remove`. False if that was so already."""
        if entry.state in (State.ENDING, State.GONE):
            return False
        entry.state = State.ENDING
        entry.error = error
        return True

    def remove(self, entry: Entry, last: Last) -> bool:
        """End the call's story; False if it was over already."""
        if entry.state is State.GONE:
            return False
        entry.state = State.GONE
        del self._entries[entry]
        self._counts[last.value] += 1
        return True

    def waiting(self) -> list[Entry]:
        """The calls that wait for their next try, oldest first."""
        return [entry for entry in list(self._entries) if entry.state is State.WAITING]

    def close(self) -> bool:
        """Refuse calls that fail from now on; False if that was so already."""
        first, self._closed = not self._closed, True
        return first

    def take_left(self) -> list[tuple[Entry, State]]:
        """End the stories of all calls that are left, and tell how each stood; oldest first.

        Those that are with the dead-letter hook are not among them.
        """
        left = [(entry, entry.state) for entry in list(self._entries)]
        for entry, state in left:
            self.remove(entry, Last.ABANDONED if state is State.ENDING else Last.UNDELIVERED)
        return [(entry, state) for entry, state in left if state is not State.ENDING]

    def disown(self) -> None:
        """Forget all calls without a trace: in a forked child they are the parent's."""
        for entry in list(self._entries):
            entry.state = State.GONE
        self._entries.clear()
        self._counts = dict.fromkeys(self._counts, 0)


def _why_not(error: BaseException) -> str:
    """Why a call is not tried again after an error that `retry_on` does not name."""
    if is_channel_closed(error):
        return CHANNEL_CLOSED
    # asyncio's and that of futures, by name: a core has no loop and no threads.
    return CANCELLED if type(error).__name__ == "CancelledError" else NOT_MATCHED
