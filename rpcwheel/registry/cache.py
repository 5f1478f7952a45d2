"""Local view of one service. Decides which records count, and when a missing instance is removed.

Pure: records and times come in (ns of one clock), events go out; nothing is locked, awaited or
read. The cost of an update is proportional to what changed, beside one copy of a tuple of pointers.

The view of the registry is used as it is, with these exceptions:

* New and changed records count at once.
* Instances that disappear while the registry is *suspect* are kept and marked as stale. A registry
  is suspect: if contact or its data was lost, until `stale_timeout` after it answers again; if more
  than half of a service of three or more disappeared within one lease without DRAINING; and if none
  of its records can be read. (Eureka's self-preservation; Dubbo's empty protection is off by
  default, and knows only the empty list.)
* If more than half disappeared one after the other, those that were removed first are back as
  stale instances: the leases of servers that are cut off do not end at the same time.
* An instance that was missing for twice `stale_timeout` of contact in all, and is missing again
  when contact is back, is removed. Otherwise a registry that is lost each minute would keep dead
  instances forever.
* An instance that was DRAINING before it disappeared is removed at once.
* A record that can't be read is skipped. An instance whose record can't be read any more stays as
  it was read last, because its key is still there. If none of the first records can be read,
  nothing is known.
* The instances of an earlier run (from the snapshot file) are used once the registry fails, or
  after `FILE_DELAY_NS` without an answer. The first live view replaces them. Those that it lacks
  are kept only if the registry is suspect or the file younger than `stale_timeout`.

So a failure never makes the list empty; a service that never had instances has truly none.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.events.events import InstancesChanged, InstancesRetained, RecordSkipped
from rpcwheel.instance import ServiceInstance, Snapshot, differences

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from rpcwheel.instance import Source

    from .policy import RegistryRules

    Event: TypeAlias = InstancesChanged | InstancesRetained | RecordSkipped

FILE_DELAY_NS: Final = 1_000_000_000
"""How long the instances of an earlier run wait for a live answer, which takes milliseconds. An
address of yesterday may be another server's today."""

SMALL_SERVICE: Final = 3
"""A service with fewer instances may lose more than half of them at once: one crash of two is no
sign of a failed registry."""

UNREADABLE: Final = "none of the registry's records can be read"
EMPTY: Final = "the registry's first answer is empty"
NO_RECORDS: Final[Mapping[str, bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TimedSnapshot:
    """A snapshot, and since when the registry has not confirmed it; None: it agrees."""

    snapshot: Snapshot
    since_ns: int | None = None

    def at(self, now_ns: int) -> Snapshot:
        """Return the snapshot with its present age."""
        if self.since_ns is None:
            return self.snapshot
        return replace(self.snapshot, age_s=to_seconds(max(0, now_ns - self.since_ns)))


def changed_ids(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> frozenset[str]:
    """Return the ids whose records differ, also those that only one of the two has."""
    return frozenset(key for key, _ in before.items() ^ after.items())


class _Stale(NamedTuple):
    """The time at which an instance was lost, and the time of contact until then."""

    since_ns: int
    contact_ns: int


class ServiceCache:
    """Local view of one service. See the module for the rules; one thread at a time."""

    def __init__(self, registry: str, service: str, rules: RegistryRules, now_ns: int) -> None:
        """Begin without any knowledge. `registry` is its name in events."""
        self._registry = registry
        self._service = service
        self._rules = rules
        self._begun_ns = now_ns
        self._records: Mapping[str, bytes] = NO_RECORDS  # the last view of the registry
        self._present: set[str] = set()  # ids in that view which are readable, or were before
        self._instances: dict[str, ServiceInstance] = {}  # with stale ones; of a file until live
        self._ids: list[str] = []  # of the same, in order
        self._ordered: list[ServiceInstance] = []  # the same in the same order
        self._stale: dict[str, _Stale] = {}
        self._vanished: dict[str, tuple[int, ServiceInstance]] = {}
        """What disappeared within the last lease without DRAINING, and when."""
        self._expired: frozenset[str] = frozenset()
        self._live = False  # the registry has answered
        self._written_ns: int | None = None  # age of what `remember` was given
        self._uses_file = False  # the instances from the file are shown
        self._suspect_ns: int | None = None  # contact, or the data, was lost then, and is not back
        self._contact_ns: int | None = None  # since then it has answered
        self._contact_before_ns = 0  # in all, before that
        self._until_ns = -NEVER  # what disappears before is kept until then
        self._reason = ""
        self.shown: TimedSnapshot | None = None
        """What users see; None: nothing is known."""
        self._modified = True  # the instances differ from those shown

    @property
    def next_wake_ns(self) -> int:
        """When `step` has something to do; `NEVER`: not before the next call of another method."""
        if not self._live and self._written_ns is not None and not self._uses_file:
            return self._begun_ns + FILE_DELAY_NS
        return self._until_ns if self._stale else NEVER

    # Inputs. Each method returns the events to emit.

    def remember(
        self, instances: Iterable[ServiceInstance], age_ns: int, now_ns: int
    ) -> list[Event]:
        """Take the instances of an earlier run; ignored once the registry has answered."""
        if not self._live and self._written_ns is None:
            for instance in instances:
                self._set(instance)
            if self._instances:
                self._written_ns = now_ns - age_ns
        return self.step(now_ns)

    def update(
        self,
        records: Mapping[str, bytes],
        now_ns: int,
        *,
        changed: Collection[str] | None = None,
        last_records: Mapping[str, bytes] = NO_RECORDS,
    ) -> list[Event]:
        """Take a view of the registry: it has these records and no others.

        Args:
            records: Kept, so not to be modified afterwards.
            now_ns: The time.
            changed: Ids whose records may differ from the last view; None: found by comparing.
            last_records: Records that came and went since the last view, as they were last.
        """
        events = self.step(now_ns)
        if not self._live:
            changed = {*records, *self._records, *self._instances}
        elif changed is None:
            changed = changed_ids(self._records, records)
        before, self._records = self._records, records
        self._mark_draining(last_records)
        gone = [key for key in changed if key not in records]
        decoded, skipped = self._decode(before, changed)
        events += skipped
        has_data = self._live or self._instances
        if records and not (decoded or has_data) and self._rules.self_preservation:
            return events  # nothing can be read, and nothing is known: that is no answer
        self._present.difference_update(gone)
        self._present.update(decoded)
        stale_before = set(self._stale)
        for key in decoded:
            self._stale.pop(key, None)
        self._expired -= decoded.keys()
        self._forget_long_missing()
        trusted = self._judge(records, skipped, now_ns)
        lost = self._lost(gone, now_ns, trusted=trusted)
        if now_ns < self._until_ns and not trusted:
            mark = _Stale(now_ns, self._contact_until(now_ns))
            self._stale |= dict.fromkeys(lost, mark)
        for key in gone:
            if key not in self._stale:
                self._remove(key)
        for instance in decoded.values():
            self._set(instance)
        self._live = True
        return [*events, *self._show(grown=bool(self._stale.keys() - stale_before))]

    def contact_lost(self, reason: str, now_ns: int) -> list[Event]:
        """Note that the registry has lost contact, or its data."""
        events = self.step(now_ns)
        if self._suspect_ns is None:
            self._suspect_ns = now_ns
            self._contact_before_ns = self._contact_until(now_ns)
            self._contact_ns = None
        self._until_ns = NEVER
        self._reason = reason
        return [*events, *self.step(now_ns)]

    def step(self, now_ns: int) -> list[Event]:
        """Perform the actions that are due."""
        waited = self._suspect_ns is not None or now_ns >= self._begun_ns + FILE_DELAY_NS
        if not self._live and self._written_ns is not None and waited:
            self._uses_file = True
        if self._stale and now_ns >= self._until_ns:
            if now_ns - self._until_ns > FILE_DELAY_NS:  # the process was suspended: what the
                self._until_ns = now_ns + FILE_DELAY_NS  # registry sent meanwhile is yet to come
                return self._show()
            for key in self._stale:
                self._remove(key)
            self._expired = frozenset(self._stale)
            self._stale = {}
        return self._show()

    def _decode(
        self, before: Mapping[str, bytes], changed: Iterable[str]
    ) -> tuple[dict[str, ServiceInstance], list[RecordSkipped]]:
        """Return the instances of changed records, and what can't be read.

        A record that is the same as `before` is neither decoded nor reported again.
        """
        skipped: list[RecordSkipped] = []
        decoded: dict[str, ServiceInstance] = {}
        for key in sorted(self._records.keys() & changed):
            data = self._records[key]
            instance = None if before.get(key) == data else self._read(key, data, skipped)
            instance = instance or self._instances.get(key)
            if instance is not None:
                decoded[key] = instance
        return decoded, skipped

    def _read(self, key: str, data: bytes, skipped: list[RecordSkipped]) -> ServiceInstance | None:
        """Decode a record; None, and an event in `skipped`: it can't be read."""
        try:
            instance = ServiceInstance.decoded(data)
            if (instance.service, instance.id) != (self._service, key):
                raise ValueError(f"it is of {instance.service!r}, {instance.id!r}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - any content; the other records count; reported
            skipped.append(RecordSkipped(self._registry, self._service, key, error))
            return None
        return instance

    # The instances, in the order of their ids

    def _set(self, instance: ServiceInstance) -> None:
        key = instance.id
        previous = self._instances.get(key)
        if previous is instance:
            return
        self._modified = True
        at = bisect_left(self._ids, key)
        if previous is None:
            self._ids.insert(at, key)
            self._ordered.insert(at, instance)
        else:
            self._ordered[at] = instance
        self._instances[key] = instance

    def _remove(self, key: str) -> None:
        if self._instances.pop(key, None) is not None:
            at = bisect_left(self._ids, key)
            del self._ids[at], self._ordered[at]
            self._modified = True

    # How a view is judged

    def _mark_draining(self, last_records: Mapping[str, bytes]) -> None:
        """Note which instances were DRAINING before they disappeared between two views."""
        for key, data in last_records.items():
            if key in self._records or not (key in self._instances or key in self._vanished):
                continue
            last = self._read(key, data, [])
            if last is not None and last.status == "DRAINING":
                self._vanished.pop(key, None)
                if key in self._instances:
                    self._set(last)
                if self._stale.pop(key, None) is not None:
                    self._remove(key)

    def _contact_until(self, now_ns: int) -> int:
        """Return how long the registry has answered in all.

        Each time counts as one `stale_timeout` at most: a longer one removes stale instances,
        unless this process stood still.
        """
        if self._contact_ns is None:
            return self._contact_before_ns
        contact_ns = min(now_ns - self._contact_ns, self._rules.stale_timeout_ns)
        return self._contact_before_ns + contact_ns

    def _forget_long_missing(self) -> None:
        """If contact is back, remove instances missing for twice `stale_timeout` of contact."""
        if self._suspect_ns is None:
            return
        limit_ns = self._contact_before_ns - 2 * self._rules.stale_timeout_ns
        for key in [key for key, stale in self._stale.items() if stale.contact_ns <= limit_ns]:
            del self._stale[key]
            self._remove(key)

    def _judge(
        self, records: Mapping[str, bytes], skipped: Collection[RecordSkipped], now_ns: int
    ) -> bool:
        """Update whether the registry is suspect. True: it is not, and what it lacks is gone."""
        keep_ns, first = self._rules.stale_timeout_ns, not self._live
        fresh = self._written_ns is None or now_ns - self._written_ns <= keep_ns
        if self._contact_ns is None:
            self._contact_ns = now_ns
        if not self._rules.self_preservation:
            self._suspect_ns = None
            return True
        if self._suspect_ns is not None:
            self._suspect_ns, self._until_ns = None, now_ns + keep_ns
        elif first and self._instances and not self._present and (fresh or self._uses_file):
            self._doubt(EMPTY, now_ns)
        elif records and skipped and not self._present:
            self._doubt(UNREADABLE, now_ns)
        return first and not fresh and now_ns >= self._until_ns

    def _doubt(self, reason: str, now_ns: int) -> None:
        if now_ns >= self._until_ns:
            self._reason = reason
        self._until_ns = max(self._until_ns, now_ns + self._rules.stale_timeout_ns)

    def _lost(self, gone: Iterable[str], now_ns: int, *, trusted: bool) -> list[str]:
        """Return those that disappeared without DRAINING; too many within a lease are suspect."""
        since_ns = now_ns - self._rules.lease_ns
        if self._vanished:
            self._vanished = {
                key: (at_ns, instance)
                for key, (at_ns, instance) in self._vanished.items()
                if at_ns > since_ns and key not in self._present
            }
        lost = [
            key
            for key in gone
            if key not in self._stale
            and (instance := self._instances.get(key)) is not None
            and instance.status != "DRAINING"
        ]
        if trusted:
            return lost
        self._vanished |= {key: (now_ns, self._instances[key]) for key in lost}
        total = len(self._present) + len(self._vanished)
        if lost and total >= SMALL_SERVICE and 2 * len(self._vanished) > total:
            seconds = to_seconds(self._rules.lease_ns)
            self._doubt(f"more than half of them disappeared within {seconds:.3g} s", now_ns)
            mark = _Stale(now_ns, self._contact_until(now_ns))
            for key, (_, instance) in self._vanished.items():
                if key not in self._instances:
                    self._set(instance)
                    self._stale[key] = mark
        return lost

    # What users see

    def _show(self, *, grown: bool = False) -> list[Event]:
        """Build the snapshot; events if it differs from the last one."""
        if not self._live and not self._uses_file:
            return []
        old = self.shown.snapshot if self.shown else Snapshot(self._service, source="cache")
        stale = frozenset(self._stale) if self._stale else frozenset()
        source: Source = "stale" if stale else "live" if self._live else "cache"
        instances = tuple(self._ordered) if self._modified else old.instances
        self._modified = False
        same = self.shown is not None and (old.source, old.stale) == (source, stale)
        if same and (instances is old.instances or instances == old.instances):
            self.shown = TimedSnapshot(old, self._since_ns())
            return []
        new = Snapshot(
            self._service, instances, old.revision + 1, source, stale, expired=self._expired
        )
        self.shown = TimedSnapshot(new, self._since_ns())
        events: list[Event] = []
        if grown:
            retained = len(stale)
            events.append(InstancesRetained(self._registry, self._service, retained, self._reason))
        if not grown or instances != old.instances:
            events.append(self._change(old, new))
        return events

    def _since_ns(self) -> int | None:
        if not self._live:
            return self._written_ns
        times = [stale.since_ns for stale in self._stale.values()]
        if self._suspect_ns is not None:
            times.append(self._suspect_ns)
        return min(times, default=None)

    def _change(self, old: Snapshot, new: Snapshot) -> InstancesChanged:
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
