"""Decisions about watches of etcd. No I/O, no clock, no threads.

`EtcdWatches` (in `etcd_watch`) reports to a `WatchCore` what happens: a watch was added or removed,
the stream was opened, has ended or has a response, a read has its result, time has passed (`tick`).
Each of these methods returns the actions that `EtcdWatches` must perform next.

All watches of a backend share one stream. The steps for each watch, which has a number of its own:

1. Create a watch for changes from now on.
2. When etcd has confirmed it, read all records; they are those of revision R.
3. Ignore changes up to R, and apply later ones.

So no change is missed, and no watch starts at a revision of the past. That would be unsafe: etcd
may have compacted it. Or, if etcd has lost its data, the new data may not have reached it: etcd
accepts such a watch, and stays silent until then.

What can go wrong, and how it is noticed:

* The connection is dead: a probe (etcd's progress request) is sent in regular intervals, and if no
  response comes in time, the stream is ended.
* etcd has lost its data: each response has etcd's revision. If it is lower than before, everything
  is read again.
* A change was missed for any other reason: everything is read again in longer intervals.

When a stream ends, for whatever reason, the watchers are notified that contact was lost, and the
next stream begins with step 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from rpcwheel.backoff import RANDOM
from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIRST_RETRY_NS: Final = 200_000_000
"""Upper limit of the wait for the next stream after the first failure; doubles with each further
one."""

MAX_DOUBLINGS: Final = 20
"""Keeps that number small; `max_retry_ns` is reached much earlier."""

MAX_SERVICES_PER_READ: Final = 128
"""Services in one `Read`, which is one transaction: etcd's default for `--max-txn-ops`."""

UNUSED: Final = "no watch is left"
"""Why a stream without watches is ended: etcd would not answer probes on it."""

DATA_LOST: Final = "the registry has lost its data: its revision decreased"


class Action:
    """An action that the watches need."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class OpenStream(Action):
    """Open a stream; `opened` or `ended` follows."""


@dataclass(frozen=True, slots=True)
class CreateWatch(Action):
    """Ask etcd to watch all keys below the prefix from now on."""

    number: int
    """The number of the watch, also on the wire."""
    prefix: bytes


@dataclass(frozen=True, slots=True)
class CancelWatch(Action):
    """Ask etcd to end this watch."""

    number: int


@dataclass(frozen=True, slots=True)
class SendProbe(Action):
    """Ask etcd for a response."""


@dataclass(frozen=True, slots=True)
class Read(Action):
    """Read all records below the prefixes; `read` follows. Responses wait until then."""

    prefixes: Mapping[int, bytes]
    """By number of the watch."""


@dataclass(frozen=True, slots=True)
class EndStream(Action):
    """End the stream; `ended` follows."""

    unresponsive: bool = False
    """Whether no response came in time, so that the next stream needs another connection."""


@dataclass(frozen=True, slots=True)
class NotifyView(Action):
    """Give the watcher all records of its service."""

    number: int
    records: Mapping[str, bytes]
    """By id."""
    revision: int
    changed: frozenset[str] | None = None
    """Ids that may differ from the previous view of this watch; None: not known."""


@dataclass(frozen=True, slots=True)
class NotifyContactLost(Action):
    """Tell the watcher that contact was lost."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class WatchChange:
    """A change of one record."""

    id: str
    value: bytes | None
    """None if it was deleted."""
    revision: int


@dataclass(frozen=True, slots=True)
class WatchResponse:
    """A response on the stream."""

    number: int
    """The number of the watch; negative if the response is for no watch or has no number."""
    revision: int
    """The revision of etcd at the time of the response."""
    created: bool = False
    canceled: bool = False
    reason: str = ""
    changes: tuple[WatchChange, ...] = ()


@dataclass(slots=True)
class _KeyWatch:
    prefix: bytes
    records: dict[str, bytes] = field(default_factory=dict)
    revision: int = 0
    """The revision of `records`."""
    create_pending: bool = False
    """Whether `CreateWatch` was sent, and etcd has not responded to it yet."""
    created: bool = False
    """Whether etcd has created the watch, and not ended it."""
    is_read: bool = False
    """Whether `records` was read since the watch was created, and is complete."""

    @property
    def needs_create(self) -> bool:
        """Whether etcd has refused or ended the watch, or it is new."""
        return not self.create_pending and not self.created


class WatchCore:
    """All watches of one backend. Not thread-safe. Times are ns of any one clock."""

    def __init__(
        self,
        *,
        probe_interval_ns: int,
        timeout_ns: int,
        reread_interval_ns: int,
        max_retry_ns: int,
        uniform: Callable[[float, float], float] = RANDOM.uniform,
    ) -> None:
        """Create a core without watches and without a stream.

        Args:
            probe_interval_ns: The time between probes.
            timeout_ns: The longest wait for a response, before the stream is ended.
            reread_interval_ns: The time after which everything is read again, +-10 %.
            max_retry_ns: Upper limit of the wait for the next stream after one has failed.
            uniform: Returns a random number between two.
        """
        self._probe_interval_ns = probe_interval_ns
        self._timeout_ns = timeout_ns
        self._reread_interval_ns = reread_interval_ns
        self._max_retry_ns = max_retry_ns
        self._uniform = uniform
        self._watches: dict[int, _KeyWatch] = {}
        self._creating: list[int] = []
        """The watches whose create requests have no response yet, in the order of the requests."""
        self._last_revision = 0
        """The highest revision of etcd that was seen, since it last lost its data."""
        self._is_opening = False
        """Whether `OpenStream` has no result yet."""
        self._is_open = False
        """Whether there is a stream; also while it is being ended."""
        self._ending: str | None = None
        """Why the stream is being ended: `EndStream` has no result yet."""
        self._is_reading = False
        """Whether `Read` has no result yet."""
        self._failures = 0
        """Streams that have failed since the last successful read."""
        self._open_at_ns = 0
        """The next stream is not opened before this."""
        self._probe_at_ns = NEVER
        self._respond_by_ns = NEVER
        self._reread_at_ns = NEVER

    @property
    def _is_usable(self) -> bool:
        return self._is_open and self._ending is None

    @property
    def next_wake_ns(self) -> int:
        """When to call `tick`; `NEVER` if an event must come first."""
        if not self._watches or self._ending is not None or self._is_reading:
            return NEVER
        if not self._is_open:
            return NEVER if self._is_opening else self._open_at_ns
        return min(self._probe_at_ns, self._respond_by_ns)

    def add(self, number: int, prefix: bytes, now_ns: int) -> list[Action]:
        """Add a watch; `number` is above zero and was never used."""
        watch = self._watches[number] = _KeyWatch(prefix)
        if self._is_usable:
            return [self._create(number, watch, now_ns)]
        return self.tick(now_ns)

    def remove(self, number: int) -> list[Action]:
        """Remove a watch; ignores unknown ones."""
        watch = self._watches.pop(number, None)
        if watch is None or not self._is_usable:
            return []
        if not self._watches:
            return [self._end(UNUSED)]
        return [] if watch.needs_create else [CancelWatch(number)]

    def opened(self, now_ns: int) -> list[Action]:
        """Handle the success of `OpenStream`. Whether etcd answers on the stream is not known."""
        self._is_opening, self._is_open = False, True
        self._probe_at_ns = now_ns + self._probe_interval_ns
        self._plan_reread(now_ns)
        if not self._watches:
            return [self._end(UNUSED)]
        return [self._create(number, watch, now_ns) for number, watch in self._watches.items()]

    def received(self, response: WatchResponse, now_ns: int) -> list[Action]:
        """Handle a response of the stream."""
        self._respond_by_ns = NEVER
        actions: list[Action] = []
        if response.created or response.canceled:
            actions += self._created_or_canceled(response)
        watch = self._watches.get(response.number)
        if watch is not None and watch.is_read and response.changes:
            actions += self._apply(response.number, watch, response.changes)
        if now_ns >= self._reread_at_ns:
            self._plan_reread(now_ns)
            self._mark_all_unread()
        elif response.revision < self._last_revision and not response.changes:
            # Only a response without changes shows that etcd has lost its data: one with changes
            # can be delayed, and has the revision of its time.
            self._mark_all_unread()
        return [*actions, *self._read_if_needed()]

    def read(
        self, contents: Mapping[int, Mapping[str, bytes]], revision: int, now_ns: int
    ) -> list[Action]:
        """Handle the result of `Read`.

        Args:
            contents: For each number in `Read.prefixes`, the records by id.
            revision: The revision of all of them.
            now_ns: The time.
        """
        self._is_reading = False
        self._failures = 0
        self._probe_at_ns = now_ns + self._probe_interval_ns
        if self._respond_by_ns != NEVER:  # responses were not handled during the read
            self._respond_by_ns = now_ns + self._timeout_ns
        actions: list[Action] = []
        if revision < self._last_revision:
            actions += [NotifyContactLost(number, DATA_LOST) for number in self._watches]
            self._mark_all_unread()  # also the watches that are not part of this read
        self._last_revision = revision
        for number, records in contents.items():
            watch = self._watches.get(number)
            if watch is None:
                continue
            watch.records, watch.revision = dict(records), revision
            watch.is_read = watch.created  # False if etcd has ended the watch meanwhile
            actions.append(NotifyView(number, records, revision))
        return [*actions, *self._read_if_needed()]

    def ended(self, reason: str, now_ns: int) -> list[Action]:
        """Handle the end of the stream, or a stream that could not be opened."""
        why, self._ending = self._ending or reason, None
        self._is_opening = self._is_open = self._is_reading = False
        self._probe_at_ns = self._respond_by_ns = NEVER
        self._creating.clear()
        for watch in self._watches.values():
            watch.create_pending = watch.created = watch.is_read = False
        if why == UNUSED:
            return []
        doubled_ns = FIRST_RETRY_NS << min(self._failures, MAX_DOUBLINGS)
        max_wait_ns = min(self._max_retry_ns, doubled_ns)
        self._failures += 1
        self._open_at_ns = now_ns + int(self._uniform(0, max_wait_ns))
        return [NotifyContactLost(number, why) for number in self._watches]

    def tick(self, now_ns: int) -> list[Action]:
        """Open a stream, send a probe or end a silent stream, if it is due.

        Nothing is due before `next_wake_ns`.
        """
        if now_ns < self.next_wake_ns or self.next_wake_ns == NEVER:
            return []
        if not self._is_open:
            self._is_opening = True
            return [OpenStream()]
        if now_ns >= self._respond_by_ns:
            return [self._end(f"no answer in {self._timeout_ns / 1e9:g} s", unresponsive=True)]
        self._probe_at_ns = now_ns + self._probe_interval_ns
        created_again = [
            self._create(number, watch, now_ns)
            for number, watch in self._watches.items()
            if watch.needs_create
        ]
        self._expect_response(now_ns)
        return [*created_again, SendProbe()]

    def _create(self, number: int, watch: _KeyWatch, now_ns: int) -> CreateWatch:
        watch.create_pending = True
        self._creating.append(number)
        self._expect_response(now_ns)
        return CreateWatch(number, watch.prefix)

    def _end(self, reason: str, *, unresponsive: bool = False) -> EndStream:
        self._ending = reason
        return EndStream(unresponsive)

    def _mark_all_unread(self) -> None:
        for watch in self._watches.values():
            watch.is_read = False

    def _plan_reread(self, now_ns: int) -> None:
        self._reread_at_ns = now_ns + int(self._uniform(0.9, 1.1) * self._reread_interval_ns)

    def _expect_response(self, now_ns: int) -> None:
        self._respond_by_ns = min(self._respond_by_ns, now_ns + self._timeout_ns)

    def _created_or_canceled(self, response: WatchResponse) -> list[Action]:
        """Handle a watch that was created, refused, or ended by etcd.

        The response to a create request that is refused has no number. It belongs to the oldest
        request, because etcd responds to them in order.
        """
        number = self._creating.pop(0) if response.created and self._creating else response.number
        watch = self._watches.get(number)
        if watch is None:
            return []
        watch.create_pending, watch.created = False, not response.canceled
        if not response.canceled:
            return []
        watch.is_read = False  # it is created again with the next probe
        return [NotifyContactLost(number, response.reason or "etcd has ended the watch")]

    def _apply(
        self, number: int, watch: _KeyWatch, changes: tuple[WatchChange, ...]
    ) -> list[Action]:
        """Apply the changes that are later than the records."""
        new = [change for change in changes if change.revision > watch.revision]
        if not new:
            return []
        for change in new:
            if change.value is None:
                watch.records.pop(change.id, None)
            else:
                watch.records[change.id] = change.value
        watch.revision = max(change.revision for change in new)
        self._last_revision = max(self._last_revision, watch.revision)
        changed = frozenset(change.id for change in new)
        return [NotifyView(number, dict(watch.records), watch.revision, changed)]

    def _read_if_needed(self) -> list[Action]:
        """Read watches that are unread, when all create requests have responses.

        So the services that are watched at the same time share a read.
        """
        unread = {
            number: watch.prefix
            for number, watch in self._watches.items()
            if watch.created and not watch.is_read
        }
        must_wait = self._creating or self._is_reading or self._ending is not None
        if not unread or must_wait:
            return []
        self._is_reading = True
        return [Read(dict(islice(unread.items(), MAX_SERVICES_PER_READ)))]
