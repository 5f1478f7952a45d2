"""Decisions about watches of etcd. No I/O, no clock, no threads.

All watches of a backend share one stream. The steps for each watch:

1. Create a watch for changes from now on.
2. When etcd has confirmed it, read all records; they are those of revision R.
3. Ignore changes up to R, and apply later ones.

So no change is missed, and no watch starts at a revision of the past. etcd may have compacted that
one; or, if the store lost its data, it may lie in the future: etcd accepts such a watch and stays
silent until the new store reaches it.

A probe is sent in regular intervals. If no response comes in time, the stream is ended. Each
response has etcd's current revision. If it is lower than one before, etcd has lost its data, and
everything is read again. Everything is also read again in longer intervals, in case a change was
missed for any other reason. When a stream ends, for whatever reason, the watchers are notified that
contact was lost, and the next stream begins with step 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from rpcwheel.durations import NEVER
from rpcwheel.registry.policy import JITTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

FIRST_RETRY_NS: Final = 200_000_000
MAX_SERVICES_PER_READ: Final = 128
"""etcd's default for `--max-txn-ops`."""

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
    create_sent: bool = False
    """Whether etcd has not responded to `CreateWatch` yet."""
    created: bool = False
    is_read: bool = False
    """Whether `records` was read since the watch was created, and is complete."""
    contact_lost: bool = False
    """Whether the watcher's last notification was `NotifyContactLost`."""


class WatchCore:
    """All watches of one backend. Not thread-safe. Times are ns of any one clock."""

    def __init__(
        self,
        *,
        probe_interval_ns: int,
        timeout_ns: int,
        reread_interval_ns: int,
        max_retry_ns: int,
        uniform: Callable[[float, float], float] = JITTER.uniform,
    ) -> None:
        """Create a core without watches and without a stream.

        Args:
            probe_interval_ns: Between probes.
            timeout_ns: For a response.
            reread_interval_ns: After which everything is read again, +-10 %.
            max_retry_ns: Upper limit of the wait for the next stream after one has failed.
            uniform: Draws a random number between two.
        """
        self._probe_interval_ns = probe_interval_ns
        self._timeout_ns = timeout_ns
        self._reread_interval_ns = reread_interval_ns
        self._max_retry_ns = max_retry_ns
        self._uniform = uniform
        self._watches: dict[int, _KeyWatch] = {}
        self._creating: list[int] = []  # create requests without a response, in order
        self._revision = 0  # the highest one so far
        self._is_opening = False
        self._is_open = False
        self._ending: str | None = None  # why the stream is being ended
        self._is_reading = False
        self._failures = 0
        self._open_at_ns = 0  # the next stream, not before
        self._probe_at_ns = NEVER
        self._respond_by_ns = NEVER
        self._reread_at_ns = NEVER

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
        if self._is_open and self._ending is None:
            return [self._create(number, watch, now_ns)]
        return self.tick(now_ns)

    def remove(self, number: int) -> list[Action]:
        """Remove a watch; ignores unknown ones."""
        watch = self._watches.pop(number, None)
        if watch is None or not self._is_open or self._ending is not None:
            return []
        if not self._watches:
            return [self._end(UNUSED)]
        return [CancelWatch(number)] if watch.create_sent or watch.created else []

    def opened(self, now_ns: int) -> list[Action]:
        """Continue after `OpenStream` succeeded; whether etcd answers on it is not known yet."""
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
            self._need_read()
        elif response.revision < self._revision and not response.changes:  # changes may be late
            self._need_read()
        return [*actions, *self._read_if_needed()]

    def read(
        self, contents: Mapping[int, Mapping[str, bytes]], revision: int, now_ns: int
    ) -> list[Action]:
        """Handle the result of `Read`: records by id by number, all of one revision."""
        self._is_reading = False
        self._failures = 0
        self._probe_at_ns = now_ns + self._probe_interval_ns
        if self._respond_by_ns != NEVER:  # responses were not handled during the read
            self._respond_by_ns = now_ns + self._timeout_ns
        actions: list[Action] = []
        if revision < self._revision:
            actions += self._notify_contact_lost(self._watches, DATA_LOST)
            self._need_read()  # also those that are not part of this read
        self._revision = revision
        for number, records in contents.items():
            watch = self._watches.get(number)
            if watch is None:
                continue
            watch.records, watch.revision = dict(records), revision
            watch.is_read, watch.contact_lost = watch.created, False
            actions.append(NotifyView(number, records, revision))
        return [*actions, *self._read_if_needed()]

    def ended(self, reason: str, now_ns: int) -> list[Action]:
        """Handle the end of the stream, or a stream that could not be opened."""
        why, self._ending = self._ending or reason, None
        self._is_opening = self._is_open = self._is_reading = False
        self._probe_at_ns = self._respond_by_ns = NEVER
        self._creating.clear()
        for watch in self._watches.values():
            watch.create_sent = watch.created = watch.is_read = False
        if why == UNUSED:
            return []
        max_wait_ns = min(self._max_retry_ns, FIRST_RETRY_NS << min(self._failures, 20))
        self._failures += 1
        self._open_at_ns = now_ns + int(self._uniform(0, max_wait_ns))
        return self._notify_contact_lost(self._watches, why)

    def tick(self, now_ns: int) -> list[Action]:
        """Perform the due actions; none is due before `next_wake_ns`."""
        if now_ns < self.next_wake_ns or self.next_wake_ns == NEVER:
            return []
        if not self._is_open:
            self._is_opening = True
            return [OpenStream()]
        if now_ns >= self._respond_by_ns:
            return [self._end(f"no answer in {self._timeout_ns / 1e9:g} s", unresponsive=True)]
        self._probe_at_ns = now_ns + self._probe_interval_ns
        refused = [
            self._create(number, watch, now_ns)
            for number, watch in self._watches.items()
            if not watch.create_sent and not watch.created
        ]
        self._expect_response(now_ns)
        return [*refused, SendProbe()]

    def _create(self, number: int, watch: _KeyWatch, now_ns: int) -> CreateWatch:
        watch.create_sent = True
        self._creating.append(number)
        self._expect_response(now_ns)
        return CreateWatch(number, watch.prefix)

    def _end(self, reason: str, *, unresponsive: bool = False) -> EndStream:
        self._ending = reason
        return EndStream(unresponsive)

    def _need_read(self) -> None:
        for watch in self._watches.values():
            watch.is_read = False

    def _plan_reread(self, now_ns: int) -> None:
        self._reread_at_ns = now_ns + int(self._uniform(0.9, 1.1) * self._reread_interval_ns)

    def _expect_response(self, now_ns: int) -> None:
        self._respond_by_ns = min(self._respond_by_ns, now_ns + self._timeout_ns)

    def _created_or_canceled(self, response: WatchResponse) -> list[Action]:
        """Handle a watch that was created, refused, or ended by etcd.

        A refused one has no number: etcd responds to create requests in order.
        """
        number = self._creating.pop(0) if response.created and self._creating else response.number
        watch = self._watches.get(number)
        if watch is None:
            return []
        watch.create_sent, watch.created = False, not response.canceled
        if not response.canceled:
            return []
        watch.is_read = False  # it is created again with the next probe
        return self._notify_contact_lost([number], response.reason or "etcd has ended the watch")

    def _apply(
        self, number: int, watch: _KeyWatch, changes: tuple[WatchChange, ...]
    ) -> list[Action]:
        new = [change for change in changes if change.revision > watch.revision]
        if not new:
            return []
        for change in new:
            if change.value is None:
                watch.records.pop(change.id, None)
            else:
                watch.records[change.id] = change.value
        watch.revision = max(change.revision for change in new)
        self._revision = max(self._revision, watch.revision)
        changed = frozenset(change.id for change in new)
        return [NotifyView(number, dict(watch.records), watch.revision, changed)]

    def _read_if_needed(self) -> list[Action]:
        """Read pending services, as soon as each create request has a response."""
        missing = {
            number: watch.prefix
            for number, watch in self._watches.items()
            if watch.created and not watch.is_read
        }
        if not missing or self._creating or self._is_reading or self._ending is not None:
            return []
        self._is_reading = True
        return [Read(dict(islice(missing.items(), MAX_SERVICES_PER_READ)))]

    def _notify_contact_lost(self, numbers: Iterable[int], reason: str) -> list[Action]:
        """Notify these watchers, but none twice without a view in between."""
        new = [number for number in numbers if not self._watches[number].contact_lost]
        for number in new:
            self._watches[number].contact_lost = True
        return [NotifyContactLost(number, reason) for number in new]
