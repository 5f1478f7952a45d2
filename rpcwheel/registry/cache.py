"""Local view of one service. Decides which records count, and when a missing instance is removed.

Pure: views of the registry and times (ns of one clock) come in, events go out; nothing is locked,
awaited or read. The cost of an update is proportional to what changed, beside sorting all ids. Each
`step` sorts them too: 0.1 ms for 2,000, 1 to 2 ms for 20,000.

Terms for an instance that the registry no longer lists:

* *gone*: the last view lacks its record.
* *lost*: gone without DRAINING, so its server has not announced the end.
* *stale*: lost, and still shown to users, because the registry is suspect.
* *expired*: removed, after it was stale and the registry answered for `stale_timeout`.

New and changed records count at once. Instances that were DRAINING are removed when they are gone.
Lost ones are removed too, unless the registry is suspect. It is suspect:

* if contact with it, or its data, was lost: until `stale_timeout` after it answers again;
* if more than half of a service of three or more instances were lost within one lease, at once or
  one after the other: for `stale_timeout`. Those that were lost and removed first are shown again,
  as stale, because the leases of servers that are cut off do not end at the same time;
* if no record can be read: for `stale_timeout`;
* if the first view is empty, and instances of an earlier run are shown already or their file is
  younger than `stale_timeout`: for `stale_timeout`.

(Eureka calls this self-preservation. Dubbo's empty protection is off by default, and knows only the
empty list.)

By these rules alone, a registry that is lost each minute would keep dead instances forever. So
*contact*, the time in which the registry answers, is summed up over all interruptions. If an
instance was stale for twice `stale_timeout` of contact, and the first view after the next
interruption lacks it too, it is removed.

A record that can't be read is skipped. If the instance was read before, it stays as it was, because
its key is still there. If there is no instance yet and no record can be read, the view is ignored.

The instances of an earlier run (from the snapshot files) are shown if the registry fails, or after
`FILE_DELAY_NS` without an answer. The first view replaces them. To those that it lacks the rules
above apply; but if the registry is not suspect and the file older than `stale_timeout`, all of them
are removed.

So a failure never makes the list empty; a service that never had instances has truly none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import time_text
from rpcwheel.events.events import InstancesChanged, InstancesRetained, RecordSkipped
from rpcwheel.instance import ServiceInstance, Snapshot, differences

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from rpcwheel.instance import Source

    from .policy import RegistryRules

    CacheEvent: TypeAlias = InstancesChanged | InstancesRetained | RecordSkipped

FILE_DELAY_NS: Final = 1_000_000_000
"""How long the instances of an earlier run wait for a live answer, which takes milliseconds. An
address of yesterday may be another server's today."""

RESUME_DELAY_NS: Final = FILE_DELAY_NS
"""If a removal is late by more than this, the process was suspended. It is then put off by this
time, because what the registry sent meanwhile is yet to come."""

SMALL_SERVICE: Final = 3
"""A service with fewer instances may lose more than half of them at once: one crash of two is no
sign of a failed registry."""

UNREADABLE: Final = "none of the registry's records can be read"
EMPTY: Final = "the registry's first answer is empty"


@dataclass(frozen=True, slots=True)
class TimedSnapshot:
    """A snapshot, and how long the registry has not confirmed it."""

    snapshot: Snapshot
    since_ns: int | None = None
    """When the registry last confirmed the whole snapshot; None: it confirms it now."""

    def at(self, now_ns: int) -> Snapshot:
        """Return the snapshot with its present age."""
        if self.since_ns is None:
            return self.snapshot
        return replace(self.snapshot, age_s=to_seconds(max(0, now_ns - self.since_ns)))


def changed_ids(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> frozenset[str]:
    """Return the ids whose records differ, or are in only one of the two views."""
    return frozenset(key for key, _ in before.items() ^ after.items())


class _Stale(NamedTuple):
    """When an instance became stale."""

    since_ns: int
    contact_ns: int
    """The sum of contact with the registry until then."""


class ServiceCache:
    """Local view of one service. The module's docstring has the rules. Not thread-safe."""

    def __init__(self, registry: str, service: str, rules: RegistryRules, now_ns: int) -> None:
        """Begin without any knowledge. `registry` is its name in events."""
        self._registry = registry
        self._service = service
        self._rules = rules
        self._begun_ns = now_ns
        self._live = False
        """Whether the registry has answered."""

        self._records: Mapping[str, bytes] = {}
        """The last view of the registry."""
        self._present: set[str] = set()
        """Ids in the last view with an instance: the record can be read, or could be before."""

        # What is shown: instances in the last view and stale ones. Before the first view: those of
        # an earlier run.
        self._instances: dict[str, ServiceInstance] = {}
        self.shown: TimedSnapshot | None = None
        """What users see; None: nothing is known."""

        # The instances of an earlier run
        self._file_written_ns: int | None = None
        """When their file was written; None: there are none."""
        self._shows_file = False

        # Lost instances
        self._stale: dict[str, _Stale] = {}
        self._expired: frozenset[str] = frozenset()
        """Those that were removed last because they were stale too long, and are not back."""
        self._recently_lost: dict[str, tuple[int, ServiceInstance]] = {}
        """Those that were lost within the last lease, and when."""
        self._keep_until_ns = -NEVER
        """The registry is suspect until then: lost instances become stale, and stale ones stay."""
        self._reason = ""
        """Why the registry is suspect."""

        # Contact with the registry
        self._contact_lost_ns: int | None = None
        """When contact, or the registry's data, was lost; None: it has answered since."""
        self._contact_since_ns: int | None = None
        """The registry answers since then; None: it does not."""
        self._contact_before_ns = 0
        """The sum of earlier times of contact."""

    @property
    def next_wake_ns(self) -> int:
        """When `step` has something to do; `NEVER`: not before the next call of another method."""
        file_waits = not self._live and self._file_written_ns is not None and not self._shows_file
        if file_waits:
            return self._begun_ns + FILE_DELAY_NS
        return self._keep_until_ns if self._stale else NEVER

    # Inputs. Each method returns the events to emit.

    def remember(
        self, instances: Iterable[ServiceInstance], age_ns: int, now_ns: int
    ) -> list[CacheEvent]:
        """Handle the instances of an earlier run, which were stored `age_ns` ago.

        Ignored once the registry has answered.
        """
        if not self._live and self._file_written_ns is None:
            self._instances |= {instance.id: instance for instance in instances}
            if self._instances:
                self._file_written_ns = now_ns - age_ns
        return self.step(now_ns)

    def update(
        self,
        records: Mapping[str, bytes],
        now_ns: int,
        *,
        changed: Collection[str] | None = None,
    ) -> list[CacheEvent]:
        """Handle a view of the registry: it has these records and no others.

        Args:
            records: Records by id. Kept, so not to be modified afterwards.
            now_ns: The time.
            changed: Ids whose records may differ from the last view; None: they are found by
                comparing.
        """
        events = self.step(now_ns)
        if not self._live:
            changed = {*records, *self._records, *self._instances}
        elif changed is None:
            changed = changed_ids(self._records, records)
        before, self._records = self._records, records
        gone = [key for key in changed if key not in records]
        decoded, skipped = self._decode(before, changed)
        events += skipped
        knows_nothing = not (self._live or self._instances)
        can_read_nothing = bool(records) and not decoded
        if knows_nothing and can_read_nothing and self._rules.self_preservation:
            return events  # that is no answer
        # What the view has
        self._present.difference_update(gone)
        self._present.update(decoded)
        stale_before = set(self._stale)
        for key in decoded:
            self._stale.pop(key, None)
        self._expired = self._expired.difference(decoded)
        # What it lacks
        self._remove_long_stale()
        trusted = self._check_view(records, skipped, now_ns)
        lost = self._lost_of(gone)
        self._forget_old_losses(now_ns)
        if not trusted:
            self._note_losses(lost, now_ns)
        if now_ns < self._keep_until_ns and not trusted:
            mark = _Stale(now_ns, self._contact_until(now_ns))
            self._stale |= dict.fromkeys(lost, mark)
        for key in gone:
            if key not in self._stale:
                self._instances.pop(key, None)
        self._instances |= decoded
        self._live = True
        return [*events, *self._show(newly_stale=bool(self._stale.keys() - stale_before))]

    def contact_lost(self, reason: str, now_ns: int) -> list[CacheEvent]:
        """Handle the loss of contact with the registry, or of the registry's data."""
        events = self.step(now_ns)
        if self._contact_lost_ns is None:
            self._contact_lost_ns = now_ns
            self._contact_before_ns = self._contact_until(now_ns)
            self._contact_since_ns = None
        self._keep_until_ns = NEVER
        self._reason = reason
        return [*events, *self.step(now_ns)]

    def step(self, now_ns: int) -> list[CacheEvent]:
        """Show the instances of an earlier run, or remove stale ones, if the time has come."""
        file_is_due = self._contact_lost_ns is not None or now_ns >= self._begun_ns + FILE_DELAY_NS
        if not self._live and self._file_written_ns is not None and file_is_due:
            self._shows_file = True
        if self._stale and now_ns >= self._keep_until_ns:
            if now_ns - self._keep_until_ns > RESUME_DELAY_NS:
                self._keep_until_ns = now_ns + RESUME_DELAY_NS
                return self._show()
            for key in self._stale:
                del self._instances[key]
            self._expired = frozenset(self._stale)
            self._stale = {}
        return self._show()

    def _decode(
        self, before: Mapping[str, bytes], changed: Iterable[str]
    ) -> tuple[dict[str, ServiceInstance], list[RecordSkipped]]:
        """Return the instances of changed records by id, and events for what can't be read.

        A record that is the same as `before` is neither decoded nor reported again. If a record
        can't be read, the instance that was read before counts, because its key is still there.
        """
        skipped: list[RecordSkipped] = []
        decoded: dict[str, ServiceInstance] = {}
        for key in sorted(self._records.keys() & changed):
            data = self._records[key]
            is_same = before.get(key) == data
            instance = None if is_same else self._read(key, data, skipped)
            instance = instance or self._instances.get(key)
            if instance is not None:
                decoded[key] = instance
        return decoded, skipped

    def _read(self, key: str, data: bytes, skipped: list[RecordSkipped]) -> ServiceInstance | None:
        """Decode a record. If it can't be read, append an event to `skipped` and return None."""
        try:
            instance = ServiceInstance.decoded(data)
            if (instance.service, instance.id) != (self._service, key):
                raise ValueError(f"it is of {instance.service!r}, {instance.id!r}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - any content; the other records count; reported
            skipped.append(RecordSkipped(self._registry, self._service, key, error))
            return None
        return instance

    # Which of the instances that are gone are removed, and which become stale

    def _contact_until(self, now_ns: int) -> int:
        """Return the sum of all contact with the registry until now.

        Each uninterrupted contact counts as one `stale_timeout` at most. A longer one removes all
        stale instances anyway, unless this process was suspended; then it must not count.
        """
        if self._contact_since_ns is None:
            return self._contact_before_ns
        contact_ns = min(now_ns - self._contact_since_ns, self._rules.stale_timeout_ns)
        return self._contact_before_ns + contact_ns

    def _remove_long_stale(self) -> None:
        """If contact is back, remove instances stale for twice `stale_timeout` of contact."""
        if self._contact_lost_ns is None:
            return
        limit_ns = self._contact_before_ns - 2 * self._rules.stale_timeout_ns
        for key in [key for key, stale in self._stale.items() if stale.contact_ns <= limit_ns]:
            del self._stale[key], self._instances[key]

    def _check_view(
        self, records: Mapping[str, bytes], skipped: Collection[RecordSkipped], now_ns: int
    ) -> bool:
        """Note contact, and whether this view makes the registry suspect.

        Returns:
            Whether the view is trusted: what it lacks is removed, even if that is most of the
            service. So is the first view of a registry that is not suspect, if the file is old, and
            each view without self-preservation. `_note_losses` checks the others.
        """
        keep_ns = self._rules.stale_timeout_ns
        first = not self._live
        fresh = self._file_written_ns is None or now_ns - self._file_written_ns <= keep_ns
        if self._contact_since_ns is None:
            self._contact_since_ns = now_ns
        if not self._rules.self_preservation:
            self._contact_lost_ns = None
            return True
        lacks_all_of_file = first and self._instances and not self._present
        if self._contact_lost_ns is not None:
            self._contact_lost_ns, self._keep_until_ns = None, now_ns + keep_ns
        elif lacks_all_of_file and (fresh or self._shows_file):
            self._suspect(EMPTY, now_ns)
        elif records and skipped and not self._present:
            self._suspect(UNREADABLE, now_ns)
        return first and not fresh and now_ns >= self._keep_until_ns

    def _suspect(self, reason: str, now_ns: int) -> None:
        """Suspect the registry for `stale_timeout` from now; an earlier reason stays."""
        if now_ns >= self._keep_until_ns:
            self._reason = reason
        self._keep_until_ns = max(self._keep_until_ns, now_ns + self._rules.stale_timeout_ns)

    def _lost_of(self, gone: Iterable[str]) -> list[str]:
        """Return those that are gone without DRAINING, and are not stale yet."""
        return [
            key
            for key in gone
            if key not in self._stale
            and (instance := self._instances.get(key)) is not None
            and instance.status != "DRAINING"
        ]

    def _forget_old_losses(self, now_ns: int) -> None:
        since_ns = now_ns - self._rules.lease_ns
        if self._recently_lost:
            self._recently_lost = {
                key: (at_ns, instance)
                for key, (at_ns, instance) in self._recently_lost.items()
                if at_ns > since_ns and key not in self._present
            }

    def _note_losses(self, lost: Collection[str], now_ns: int) -> None:
        """Suspect the registry if more than half of the service was lost within one lease.

        Those that were lost earlier in this lease, and removed, are shown again as stale.
        """
        self._recently_lost |= {key: (now_ns, self._instances[key]) for key in lost}
        total = len(self._present) + len(self._recently_lost)
        if lost and total >= SMALL_SERVICE and 2 * len(self._recently_lost) > total:
            seconds = to_seconds(self._rules.lease_ns)
            self._suspect(f"more than half of them disappeared within {time_text(seconds)}", now_ns)
            mark = _Stale(now_ns, self._contact_until(now_ns))
            for key, (_, instance) in self._recently_lost.items():
                if key not in self._instances:
                    self._instances[key] = instance
                    self._stale[key] = mark

    # What users see

    def _show(self, *, newly_stale: bool = False) -> list[CacheEvent]:
        """Update `shown`, and return events if the snapshot differs from the last one.

        `newly_stale`: whether instances became stale since then.
        """
        if not self._live and not self._shows_file:
            return []
        old = self.shown.snapshot if self.shown else Snapshot(self._service, source="cache")
        stale = frozenset(self._stale) if self._stale else frozenset()
        source: Source = "stale" if stale else "live" if self._live else "cache"
        instances = tuple(self._instances[key] for key in sorted(self._instances))
        if instances == old.instances:
            instances = old.instances  # `ServiceWatch` compares identities
        same_source = self.shown is not None and (old.source, old.stale) == (source, stale)
        if same_source and instances is old.instances:
            self.shown = TimedSnapshot(old, self._unconfirmed_since_ns())
            return []
        new = Snapshot(
            self._service, instances, old.revision + 1, source, stale, expired=self._expired
        )
        self.shown = TimedSnapshot(new, self._unconfirmed_since_ns())
        events: list[CacheEvent] = []
        if newly_stale:
            retained = len(stale)
            events.append(InstancesRetained(self._registry, self._service, retained, self._reason))
        if not newly_stale or instances != old.instances:
            events.append(self._change_event(old, new))
        return events

    def _unconfirmed_since_ns(self) -> int | None:
        """Return `TimedSnapshot.since_ns`."""
        if not self._live:
            return self._file_written_ns
        times = [stale.since_ns for stale in self._stale.values()]
        if self._contact_lost_ns is not None:
            times.append(self._contact_lost_ns)
        return min(times, default=None)

    def _change_event(self, old: Snapshot, new: Snapshot) -> InstancesChanged:
        removed, added = differences(old.instances, new.instances)
        before = {instance.id for instance in removed}
        now = {instance.id for instance in added}
        return InstancesChanged(
            self._registry,
            self._service,
            len(new.instances),
            len(now - before),
            len(before - now),
            new.source,
        )
