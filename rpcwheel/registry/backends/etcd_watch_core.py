"""What to do about the watches of etcd, by what has happened. No I/O, no clock, no threads.

All watches share one stream. For each, the order is: create a watch of what happens from now on;
when etcd has confirmed it, look at all there is (revision R); then drop the changes up to R, and
apply those after. So nothing falls between, and no watch asks for a revision of the past: which
may have been compacted, or may lie in the future of a store that was wiped, where etcd accepts the
watch and stays silent.

A stream is believed as long as it answers: a probe is sent each step, and one that has no answer
in time ends the stream. The answer has etcd's revision; one that goes backwards means that its
memory is gone, and everything is looked at anew. So it is now and then without any reason. However
a stream has ended, the watchers are made suspicious, and the next one begins from the start.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "Action",
    "Break",
    "Cancel",
    "Change",
    "Create",
    "Heard",
    "Look",
    "Open",
    "Probe",
    "Saw",
    "Suspect",
    "WatchCore",
]

FIRST_RETRY_NS: Final = 200_000_000
MOST_AT_ONCE: Final = 128
"""Services in one look; etcd's `--max-txn-ops`."""

UNUSED: Final = "no watch is left"
"""A stream without watches would answer no probes."""

WIPED: Final = "the registry has lost its memory: its revision went backwards"


@dataclass(frozen=True, slots=True)
class Open:
    """Open a stream."""


@dataclass(frozen=True, slots=True)
class Create:
    """Have etcd watch all keys below the prefix, from now on."""

    number: int
    prefix: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Have etcd watch this no more."""

    number: int


@dataclass(frozen=True, slots=True)
class Look:
    """Read what there is, and tell `looked`; meanwhile the stream is not listened to."""

    prefixes: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask for a sign of life."""


@dataclass(frozen=True, slots=True)
class Break:
    """End the stream; `ended` follows."""

    silent: bool = False
    """It has not answered in time."""


@dataclass(frozen=True, slots=True)
class Saw:
    """Tell the watcher."""

    number: int
    records: Mapping[bytes, bytes]
    """By key."""
    revision: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """Make the watcher suspicious."""

    number: int
    reason: str


Action: TypeAlias = Open | Create | Cancel | Look | Probe | Break | Saw | Suspect


@dataclass(frozen=True, slots=True)
class Change:
    """One of a key."""

    key: bytes
    value: bytes | None
    """None: it was deleted."""
    revision: int


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer of the stream."""

    number: int
    """Of the watch; below zero: of none, or not told."""
    revision: int
    """Of etcd, when it answered."""
    created: bool = False
    canceled: bool = False
    reason: str = ""
    changes: tuple[Change, ...] = ()


@dataclass(slots=True)
class _Watch:
    prefix: bytes
    records: dict[bytes, bytes] = field(default_factory=dict)
    revision: int = 0
    """Up to which `records` is true."""
    asked: bool = False
    """A `Create` is on its way."""
    created: bool = False
    known: bool = False
    """Whether it was looked at since it was created."""
    doubtful: bool = False
    """Whether the watcher was made suspicious, and has not seen anything since."""


class WatchCore:
    """All watches of one backend. Not thread-safe. Times are ns on any one clock."""

    def __init__(
        self,
        *,
        step_ns: int,
        timeout_ns: int,
        relook_ns: int,
        retry_ns: int,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Begin with no watch and no stream.

        Args:
            step_ns: Between probes.
            timeout_ns: For an answer to one.
            relook_ns: Between looks for no reason, 10 % more or less.
            retry_ns: The longest wait for another stream after one has failed.
            uniform: Draws a number between two.
        """
        self._step_ns = step_ns
        self._timeout_ns = timeout_ns
        self._relook_ns = relook_ns
        self._retry_ns = retry_ns
        self._uniform = uniform
        self._watches: dict[int, _Watch] = {}
        self._created: list[int] = []  # asked for and not answered, in order
        self._revision = 0  # the highest that was seen
        self._opening = False
        self._open = False
        self._breaking: str | None = None  # why
        self._looking = False
        self._failures = 0
        self._open_ns = 0  # not before
        self._probe_ns = NEVER
        self._answer_ns = NEVER  # by when one must come
        self._relook_at_ns = NEVER

    @property
    def next_wake_ns(self) -> int:
        """When `tick` has something to do; `NEVER` if only what happens matters."""
        if not self._watches or self._breaking is not None or self._looking:
            return NEVER
        if not self._open:
            return NEVER if self._opening else self._open_ns
        return min(self._probe_ns, self._answer_ns)

    def add(self, number: int, prefix: bytes, now_ns: int) -> list[Action]:
        """Take a watch; `number` is above zero and was never used."""
        watch = self._watches[number] = _Watch(prefix)
        if self._open and self._breaking is None:
            return [self._create(number, watch, now_ns)]
        return self.tick(now_ns)

    def remove(self, number: int) -> list[Action]:
        """Forget a watch; unknown ones are no error."""
        watch = self._watches.pop(number, None)
        if watch is None or not self._open or self._breaking is not None:
            return []
        if not self._watches:
            return [self._break(UNUSED)]
        return [Cancel(number)] if watch.asked or watch.created else []

    def opened(self, now_ns: int) -> list[Action]:
        """A stream is there, of which nothing is known yet."""
        self._opening, self._open = False, True
        self._probe_ns = now_ns + self._step_ns
        self._plan_relook(now_ns)
        if not self._watches:
            return [self._break(UNUSED)]
        return [self._create(number, watch, now_ns) for number, watch in self._watches.items()]

    def heard(self, told: Heard, now_ns: int) -> list[Action]:
        """The stream has answered something."""
        self._answer_ns = NEVER
        actions: list[Action] = []
        if told.created or told.canceled:
            actions += self._answered(told)
        watch = self._watches.get(told.number)
        if watch is not None and watch.known and told.changes:
            actions += self._applied(told.number, watch, told.changes)
        if now_ns >= self._relook_at_ns:
            self._plan_relook(now_ns)
            self._forget()
        elif told.revision < self._revision and not told.changes:  # those may have waited
            self._forget()
        return [*actions, *self._looks()]

    def looked(
        self, found: Mapping[int, Mapping[bytes, bytes]], revision: int, now_ns: int
    ) -> list[Action]:
        """What `Look` was for: the records by number and key, all as of one revision."""
        self._looking = False
        self._failures = 0
        self._probe_ns = now_ns + self._step_ns
        if self._answer_ns != NEVER:  # nobody has listened since
            self._answer_ns = now_ns + self._timeout_ns
        actions: list[Action] = []
        if revision < self._revision:
            actions += self._doubts(self._watches, WIPED)
            self._forget()  # those not looked at now, too
        self._revision = revision
        for number, records in found.items():
            watch = self._watches.get(number)
            if watch is None:
                continue
            watch.records, watch.revision = dict(records), revision
            watch.known, watch.doubtful = watch.created, False
            actions.append(Saw(number, dict(records), revision))
        return [*actions, *self._looks()]

    def ended(self, reason: str, now_ns: int) -> list[Action]:
        """The stream is gone, or could not be opened."""
        why, self._breaking = self._breaking or reason, None
        self._opening = self._open = self._looking = False
        self._probe_ns = self._answer_ns = NEVER
        self._created.clear()
        for watch in self._watches.values():
            watch.asked = watch.created = watch.known = False
        if why == UNUSED:
            return []
        most_ns = min(self._retry_ns, FIRST_RETRY_NS << min(self._failures, 20))
        self._failures += 1
        self._open_ns = now_ns + int(self._uniform(0, most_ns))
        return self._doubts(self._watches, why)

    def tick(self, now_ns: int) -> list[Action]:
        """Time has passed."""
        if now_ns < self.next_wake_ns or self.next_wake_ns == NEVER:
            return []
        if not self._open:
            self._opening = True
            return [Open()]
        if now_ns >= self._answer_ns:
            return [self._break(f"no answer in {self._timeout_ns / 1e9:g} s", silent=True)]
        self._probe_ns = now_ns + self._step_ns
        refused = [
            self._create(number, watch, now_ns)
            for number, watch in self._watches.items()
            if not watch.asked and not watch.created
        ]
        self._expect(now_ns)
        return [*refused, Probe()]

    def _create(self, number: int, watch: _Watch, now_ns: int) -> Create:
        watch.asked = True
        self._created.append(number)
        self._expect(now_ns)
        return Create(number, watch.prefix)

    def _break(self, why: str, *, silent: bool = False) -> Break:
        self._breaking = why
        return Break(silent)

    def _forget(self) -> None:
        for watch in self._watches.values():
            watch.known = False

    def _plan_relook(self, now_ns: int) -> None:
        self._relook_at_ns = now_ns + int(self._uniform(0.9, 1.1) * self._relook_ns)

    def _expect(self, now_ns: int) -> None:
        """An answer must come from now on, in time."""
        self._answer_ns = min(self._answer_ns, now_ns + self._timeout_ns)

    def _answered(self, told: Heard) -> list[Action]:
        """A watch was created, refused, or ended by etcd. They are answered in order."""
        number = self._created.pop(0) if told.created and self._created else told.number
        watch = self._watches.get(number)
        if watch is None:
            return []
        watch.asked, watch.created = False, not told.canceled
        if not told.canceled:
            return []
        watch.known = False  # it is created again with the next probe
        return self._doubts([number], told.reason or "etcd has ended the watch")

    def _applied(self, number: int, watch: _Watch, changes: tuple[Change, ...]) -> list[Action]:
        news = [change for change in changes if change.revision > watch.revision]
        if not news:
            return []
        for change in news:
            if change.value is None:
                watch.records.pop(change.key, None)
            else:
                watch.records[change.key] = change.value
        watch.revision = max(change.revision for change in news)
        self._revision = max(self._revision, watch.revision)
        return [Saw(number, dict(watch.records), watch.revision)]

    def _looks(self) -> list[Action]:
        """Look, as soon as nothing is to be created any more."""
        unknown = {
            number: watch.prefix
            for number, watch in self._watches.items()
            if watch.created and not watch.known
        }
        if not unknown or self._created or self._looking or self._breaking is not None:
            return []
        self._looking = True
        return [Look(dict(islice(unknown.items(), MOST_AT_ONCE)))]

    def _doubts(self, numbers: Iterable[int], reason: str) -> list[Action]:
        """Once, until they have seen something."""
        told = [number for number in numbers if not self._watches[number].doubtful]
        for number in told:
            self._watches[number].doubtful = True
        return [Suspect(number, reason) for number in told]
