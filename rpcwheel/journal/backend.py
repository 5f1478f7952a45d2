"""The contract of journals: where failback keeps calls that must survive the process.

Failback repeats failed calls in the background. A call is one to a gRPC server, or of a function of
the program. A `JournalBackend` connects one engine, such as a SQLite file. It is blocking, and
serves `grpc` and `grpc.aio`. It makes no decisions: `rpcwheel.failback.journaled` decides what is
attempted when.

A stored call is in one of four states:

    READY      it may be taken when it is due
    BLOCKED    it must wait for an earlier call with the same order key, which is not DEAD
    TAKEN      a worker has it, until the worker's lease ends
    DEAD       a dead letter: there is no further attempt unless `retry` selects it

A worker is a failback queue in one process, with an id that the caller chooses. It has one lease
for all calls that it has taken, which it must renew. Leases are measured by the engine's clock,
because processes on several machines have different clocks. If a lease has ended, the next `take`
of another worker makes the calls ready again. What the old worker reports afterwards changes
nothing. A `take` of the worker itself does not end its lease, because the clock may have been set
forward. So a worker that may have lost track of calls must take a new id. Two workers have the same
call only if one of them was paused, or cut off from the engine, for longer than its lease, or if
the engine's clock was set forward by more than that.

Times in arguments and results are relative to now, in seconds. A call that is stored later has a
higher id.

Values are stored unchanged, with one exception: in texts, U+0000 and surrogates are replaced by
U+FFFD (by `storable`), because not every engine can store them.

Backends of other packages are found by the scheme of the URL, through an entry point of the group
`rpcwheel.journal`. `rpcwheel.testing.check_journal` tests whether they keep the contract.
"""

from __future__ import annotations

import enum
import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from rpcwheel.backoff import RANDOM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .url import JournalUrl

__all__ = [
    "CallState",
    "Dead",
    "Delivered",
    "Depth",
    "Filter",
    "JournalBackend",
    "NewCall",
    "Postponed",
    "Result",
    "Route",
    "StoredCall",
    "storable",
    "storable_call",
]

FIRST_PAGE: Final = 10
LARGEST_PAGE: Final = 1000
PAGE_BYTES: Final = 4 << 20
"""Calls are read in pages, and stored in transactions, of about this size."""

LOST_S: Final = 60.0
"""How long calls of lost answers are looked for: a stopped server executes requests later."""


class CallState(enum.IntEnum):
    """The state of a stored call; see the module."""

    READY = 0
    BLOCKED = 1
    TAKEN = 2
    DEAD = 3


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call to be stored."""

    queue: str
    """The name of its failback queue."""
    target: str
    """The target of its channel; "" for a function of the program."""
    method: str
    """The method path, such as `/shop.Orders/Push`, or the name of a function."""
    key: str
    """Its idempotency key."""
    body: bytes = field(repr=False)
    """All that is needed to make it, in the format of `rpcwheel.failback.stored`."""
    delay_s: float
    """The time until its next attempt."""
    max_age_s: float
    """The time until it becomes a dead letter."""
    attempts: int = 1
    """Attempts made until now, the first included."""
    error: str = ""
    """How the last attempt failed, in words."""
    order_key: str | None = None
    """Calls of one queue and target with the same order key are taken one at a time, in the order
    of their ids. None: no order."""


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call as it is stored; `NewCall` describes the fields of the same names."""

    id: int
    queue: str
    target: str
    method: str
    key: str
    body: bytes = field(repr=False)
    due_s: float
    """The time until its next attempt; negative if it is overdue."""
    age_s: float
    """The time since it was stored."""
    expires_s: float
    """The time until it becomes a dead letter. If it is negative, the worker must report it as
    `Dead`: the backend does not do that by itself."""
    attempts: int
    error: str
    order_key: str | None
    state: CallState
    reason: str = ""
    """Why there is no further attempt; "" unless it is a dead letter."""


@dataclass(frozen=True, slots=True)
class Route:
    """Calls that a worker can deliver."""

    queue: str
    target: str
    limit: int
    """The largest number of calls to take."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """An attempt has succeeded: delete the call."""

    id: int


@dataclass(frozen=True, slots=True)
class Postponed:
    """An attempt has failed, or was not made: make the call ready again, due after `delay_s`."""

    id: int
    attempts: int
    delay_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Dead:
    """There is no further attempt: keep the call as a dead letter."""

    id: int
    attempts: int
    error: str
    reason: str


Result: TypeAlias = Delivered | Postponed | Dead
"""What a worker reports about a call that it has taken."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects stored calls. All given conditions must hold; without any, every call is selected."""

    ids: tuple[int, ...] | None = None
    states: tuple[CallState, ...] | None = None
    queue: str | None = None
    """The exact name: queues are often called `*`."""
    target: str | None = None
    """The exact target."""
    method: str | None = None
    """A pattern with the wildcards `*` and `?`."""
    error: str | None = None
    """A part of the last error, or of the reason of a dead letter; case matters."""
    min_age_s: float | None = None
    """The shortest time since it was stored."""


@dataclass(frozen=True, slots=True)
class Depth:
    """The number of stored calls of one queue and target."""

    queue: str
    target: str
    waiting: int
    """READY and BLOCKED."""
    taken: int
    """By processes that attempt them or are about to."""
    dead: int
    oldest_s: float
    """The age of the oldest call that is not dead; 0 without one."""


class JournalBackend(ABC):
    """The connection of one process to one journal.

    Each method may raise:

    * `JournalUnavailable`: The engine cannot be reached, does not answer in time, or cannot execute
      requests for a while, such as during a fail-over. A later attempt may succeed.
    * `JournalFull`: The engine has no space.
    * `JournalRefused`: The engine rejects the request, and will until somebody changes something,
      such as a password.

    If a method raises, nothing was changed, with two exceptions. `retry` and `delete` may change
    many calls in several transactions, and those before the failure count. And if the connection
    was lost before the answer, the request may have been executed:

    * `append` then raises `JournalOutcomeUnknown`.
    * `report` may be repeated. Results that the first request has stored are ignored then, so their
      ids are returned.
    * `take`: the next `take` of this backend for this worker makes the calls ready again that the
      lost one has taken.

    Methods are called on any thread. `append`, `take`, `renew`, `report` and `release` are called
    one at a time; all others may be called concurrently with them and each other.

    In a forked child the backend must work, with a connection of its own.
    """

    url: JournalUrl

    creates: bool = True
    """Whether the first request creates the journal if it does not exist. If not, the request
    raises `JournalRefused`. An engine that has nothing to create ignores this."""

    is_file: ClassVar[bool] = False
    """Whether the journal is a local file, and `append` ends within `url.timeout_s`. Then a caller
    that blocks may append its call itself."""

    clock: Callable[[], float] | None = None
    """Returns the time in seconds since 1970; tests may replace it. None: the engine has a clock of
    its own."""

    @abstractmethod
    def __init__(self, url: JournalUrl) -> None:
        """Check the URL. Does not connect yet: the first request does.

        Raises:
            ConfigurationError: The URL is not valid for this engine; the message says what is.
            ExtraMissing: A package is not installed; the message says which.
        """

    @abstractmethod
    def append(self, calls: Sequence[NewCall]) -> list[int]:
        """Store calls, all or none, and return their ids when they are durable.

        Each becomes READY, or BLOCKED if another call with its order key is stored and not DEAD.
        """

    @abstractmethod
    def take(
        self, worker: str, lease_s: float, routes: Sequence[Route], within_s: float
    ) -> list[StoredCall]:
        """Give ready calls to a worker, and renew its lease if there are any.

        First, if the lease of another worker has ended, its calls become ready again, even if there
        are no routes. If there are no calls to take, nothing else is written.

        Args:
            worker: The id of the worker.
            lease_s: The length of the lease, from now.
            routes: Where the calls may go, and how many of each are taken at most.
            within_s: Only calls that are due within this time are taken. Negative: only calls that
                have been overdue for that long.

        Returns:
            Of each route the calls that are due first, in this order.
        """

    @abstractmethod
    def renew(self, worker: str, lease_s: float) -> bool:
        """Renew the lease of a worker, so that it ends `lease_s` from now.

        Returns:
            False if the worker has no lease: it had ended, and the worker has no calls any more; or
            the worker has not taken any yet.
        """

    @abstractmethod
    def report(self, worker: str, results: Sequence[Result]) -> list[int]:
        """Store results of calls that a worker has taken, all or none.

        Returns:
            The ids of calls that the worker does not have any more. Their results were ignored.
        """

    @abstractmethod
    def release(self, worker: str) -> None:
        """Make all calls of a worker ready, with unchanged attempts, and end its lease."""

    @abstractmethod
    def routes(self) -> list[tuple[str, str]]:
        """List the queues and targets that have ready calls, in any order."""

    @abstractmethod
    def depths(self) -> list[Depth]:
        """Count the calls of each queue and target, in the order of their names.

        An engine may need a second for ten million calls. `Counts` also calls it between appends,
        for at most 1 % of the time.
        """

    @abstractmethod
    def select(self, chosen: Filter, *, after: int = 0, limit: int = 100) -> list[StoredCall]:
        """List the calls that a filter selects and whose id is above `after`, in order of ids."""

    def calls(self, chosen: Filter, limit: int | None = None) -> Iterator[StoredCall]:
        """Read the calls that a filter selects, in order of ids, at most `limit`.

        It reads them in pages, whose size depends on that of the calls.
        """
        after, size, left = 0, FIRST_PAGE, limit
        while left is None or left > 0:
            size = size if left is None else min(size, left)
            page = self.select(chosen, after=after, limit=size)
            yield from page
            if len(page) < size:
                return
            after = page[-1].id
            left = None if left is None else left - len(page)
            mean = sum(len(call.body) for call in page) // len(page) + 1
            size = max(1, min(LARGEST_PAGE, PAGE_BYTES // mean))

    @abstractmethod
    def retry(self, chosen: Filter) -> int:
        """Make waiting calls due now, and dead letters ready as if they were stored now.

        A dead letter begins with 0 attempts, and has its whole maximum age again. Calls that are
        taken are not changed. An engine whose transactions block appends changes many calls in
        several transactions.

        Returns:
            The number of calls changed.
        """

    @abstractmethod
    def delete(self, chosen: Filter) -> int:
        """Delete calls, in any state, and return their number.

        Many calls are deleted in several transactions, as `retry` changes them.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection after the running requests. Idempotent.

        Taken calls are not released. Every later request raises `JournalUnavailable`.
        """


def storable(text: str) -> str:
    """Replace U+0000 and surrogates by U+FFFD: not every engine can store them in a text."""
    if text.isascii():
        return text.replace("\0", "\ufffd") if "\0" in text else text
    return _UNSTORABLE.sub("\ufffd", text)


_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")


def storable_call(call: NewCall) -> NewCall:
    """Apply `storable` to all texts of a call; returns the same call if that changes nothing."""
    order_key = call.order_key
    texts = (call.queue, call.target, call.method, call.key, call.error, order_key or "")
    joined = "".join(texts)  # one check: one for each text would cost as much as storing the call
    if (joined.isascii() and "\0" not in joined) or storable(joined) == joined:
        return call
    return replace(
        call,
        queue=storable(call.queue),
        target=storable(call.target),
        method=storable(call.method),
        key=storable(call.key),
        error=storable(call.error),
        order_key=None if order_key is None else storable(order_key),
    )


class NewRow(NamedTuple):
    """The values of a new call as engines store them, with times relative to now."""

    queue: str
    target: str
    method: str
    call_key: str
    body: bytes
    delay_ms: int
    max_age_ms: int
    attempts: int
    error: str
    order_key: str | None

    @classmethod
    def of(cls, call: NewCall) -> NewRow:
        """Return the values of a call, with `storable` texts."""
        call = storable_call(call)
        return cls(
            call.queue,
            call.target,
            call.method,
            call.key,
            call.body,
            round(call.delay_s * 1e3),
            round(call.max_age_s * 1e3),
            call.attempts,
            call.error,
            call.order_key,
        )


def stored_call(row: Sequence[Any], now_ms: int) -> StoredCall:
    """Make a call of the values of its fields, with times in ms of the engine's clock."""
    *names, body, due, created, expires, attempts, error, order_key, state, reason = row
    age_ms = max(0, now_ms - created)  # the clock may have been set back
    times_s = (due - now_ms) / 1e3, age_ms / 1e3, (expires - now_ms) / 1e3
    outcome = attempts, error, order_key, CallState(state), reason
    values: list[Any] = [*names, bytes(body), *times_s, *outcome]
    return StoredCall(*values)


class LostTakes:
    """The requests of one backend that may have taken calls, though their answers were lost.

    Their worker does not know these calls, and renews its lease: they would wait until its process
    ends. So each request has a number, which is stored with the calls that it takes, and the next
    one makes the calls ready again whose number belongs to a lost answer.
    """

    def __init__(self) -> None:
        self._lost: list[tuple[float, str, int]] = []

    @staticmethod
    def new_number() -> int:
        """Make the number of a request."""
        return RANDOM.getrandbits(62)

    def add(self, worker: str, number: int) -> None:
        """Note that the answer of a request was lost."""
        self._lost.append((time.monotonic(), worker, number))

    def of(self, worker: str) -> list[int]:
        """The numbers of a worker's requests."""
        if not self._lost:
            return []
        since_s = time.monotonic() - LOST_S
        self._lost = [request for request in self._lost if request[0] > since_s]
        return [number for _, name, number in self._lost if name == worker]
