"""What is known of one service: which records are instances, and when one that vanishes is gone.

Pure: records and times come in (ns of one clock), events go out; nothing is locked, awaited or
read. The rules, beside the plain one that the registry is right:

* New and changed records count at once.
* Instances that disappear while the registry is *suspect* are kept and marked as stale. A registry
  is suspect: if contact or its data was lost, until `stale_timeout` after it answers again; if more
  than half of a service of three or more disappeared within one lease without DRAINING; and if none
  of its records can be read. (Eureka's self-preservation; Dubbo's empty protection is off by
  default, and knows only the empty list.)
* An instance that was missing for twice `stale_timeout` of contact in all, and is missing again
  when contact is back, is removed. Otherwise a registry that is lost each minute would keep dead
  instances for ever.
* What said DRAINING before it vanished is gone at once: it went by itself.
* A record that can't be read is skipped; an instance whose record can't be read any more stays as
  it was read last, as its key is still there. If none of the first ones can be, nothing is known.
* What a file remembers of an earlier run is shown when the registry fails, or after `PATIENCE_NS`
  without an answer. The first live view takes its place, and what is missing there was remembered
  too long ago to be held, unless the registry is suspect or the file younger than `stale_timeout`.

So a failure never makes the list empty; a service that never had instances has truly none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.instance import ServiceInstance, Snapshot
from rpcwheel.observe.events import InstancesChanged, InstancesRetained, RecordSkipped

from .policy import RegistryRules

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from rpcwheel.instance import Source

    from .policy import RegistryPolicy

    Event: TypeAlias = InstancesChanged | InstancesRetained | RecordSkipped

__all__ = ["RecordDecoder", "Rules", "ServiceCache", "Shown"]

PATIENCE_NS: Final = 1_000_000_000
"""What a file remembers is shown after so long without an answer. Not at once: a live answer takes
milliseconds, and an address of yesterday may be another's today."""

FEW: Final = 3
"""A service of fewer may lose more than half in one go: one crash of two is no sign of anything."""

UNREADABLE: Final = "none of the registry's records can be read"
EMPTY: Final = "the registry's first answer is empty"


@dataclass(frozen=True, slots=True)
class Rules:
    """A `RegistryPolicy`, as far as it speaks of what is seen."""

    lease_ns: int
    hold_ns: int
    protect: bool = True

    @classmethod
    def of(cls, policy: RegistryPolicy) -> Rules:
        """In nanoseconds, with the defaults that depend on others."""
        rules = RegistryRules.of(policy)
        return cls(rules.lease_ns, rules.hold_ns, policy.self_preservation)


@dataclass(frozen=True, slots=True)
class Shown:
    """A snapshot, and since when the registry does not agree; None: it does."""

    snapshot: Snapshot
    since_ns: int | None = None

    def at(self, now_ns: int) -> Snapshot:
        """The snapshot with its age of now."""
        if self.since_ns is None:
            return self.snapshot
        return replace(self.snapshot, age_s=to_seconds(max(0, now_ns - self.since_ns)))


class _Held(NamedTuple):
    """When the registry had lost it, and for how long the registry had answered by then."""

    at_ns: int
    contact_ns: int


class RecordDecoder:
    """Reads the records of one service, each content once."""

    def __init__(self, registry: str, service: str) -> None:
        """`registry` is its name in events."""
        self._registry = registry
        self._service = service
        self._read: dict[str, tuple[bytes, ServiceInstance | None]] = {}

    def read(
        self, records: Mapping[str, bytes]
    ) -> tuple[dict[str, ServiceInstance], list[RecordSkipped]]:
        """Read all records that are there now.

        Returns:
            The instances by id, in the order of the ids, the same object for the same content; and
            what can't be read and is new.
        """
        before, self._read = self._read, {}
        skipped: list[RecordSkipped] = []
        found: dict[str, ServiceInstance] = {}
        for key in sorted(records):
            data = records[key]
            known = before.get(key)
            if known is None or known[0] != data:
                known = data, self.decoded(key, data, skipped)
            self._read[key] = known
            if known[1] is not None:
                found[key] = known[1]
        return found, skipped

    def decoded(
        self, key: str, data: bytes, skipped: list[RecordSkipped]
    ) -> ServiceInstance | None:
        """Read one; what can't be read is None, and told in `skipped`."""
        try:
            instance = ServiceInstance.decoded(data)
            if (instance.service, instance.id) != (self._service, key):
                raise ValueError(f"it is of {instance.service!r}, {instance.id!r}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - whatever stands there, the others count; told
            skipped.append(RecordSkipped(self._registry, self._service, key, error))
            return None
        return instance


class ServiceCache:
    """What is known of one service. See the module for the rules; one thread at a time."""

    def __init__(self, registry: str, service: str, rules: Rules, now_ns: int) -> None:
        """Begin, knowing nothing. `registry` is its name in events."""
        self._registry = registry
        self._service = service
        self._rules = rules
        self._records = RecordDecoder(registry, service)
        self._begun_ns = now_ns
        self._instances: dict[str, ServiceInstance] = {}  # with those held; of a file until live
        self._held: dict[str, _Held] = {}
        self._vanished: dict[str, int] = {}  # within the last lease, without a word
        self._live = False  # the registry has answered
        self._written_ns: int | None = None  # what `remember` was given
        self._told = False  # what is remembered is shown
        self._suspect_ns: int | None = None  # contact, or memory, was lost then, and is not back
        self._contact_ns: int | None = None  # since then it has answered
        self._contact_before_ns = 0  # in all, before that
        self._until_ns = -NEVER  # what vanishes before is held until then
        self._reason = ""
        self._shown: Shown | None = None

    @property
    def shown(self) -> Shown | None:
        """What there is to show; None: nothing is known."""
        return self._shown

    @property
    def next_wake_ns(self) -> int:
        """When `step` has something to do; `NEVER`: nothing, until something is heard."""
        if not self._live and self._written_ns is not None and not self._told:
            return self._begun_ns + PATIENCE_NS
        return self._until_ns if self._held else NEVER

    # What happens. Each says what came of it.

    def remember(
        self, instances: Iterable[ServiceInstance], age_ns: int, now_ns: int
    ) -> list[Event]:
        """A file of an earlier run has these; nothing, once the registry has answered."""
        if not self._live and self._written_ns is None:
            self._instances = {instance.id: instance for instance in instances}
            if self._instances:
                self._written_ns = now_ns - age_ns
        return self.step(now_ns)

    def saw(
        self,
        records: Mapping[str, bytes],
        now_ns: int,
        last_words: Mapping[str, bytes] = MappingProxyType({}),
    ) -> list[Event]:
        """The registry has these, and no others.

        Args:
            records: Those.
            now_ns: The time.
            last_words: What it had since it was heard last, and has no more.
        """
        told = self.step(now_ns)
        found, skipped = self._records.read(records)
        self._hear_out(last_words, records)
        for key in records:
            if key not in found and key in self._instances:
                found[key] = self._instances[key]
        if self._is_mute(records, found):
            return [*told, *skipped]
        before = set(self._held)
        self._held = {key: held for key, held in self._held.items() if key not in found}
        self._forget()
        trusted = self._weigh(records, skipped, found, now_ns)
        lost = self._lost(found, now_ns, trusted=trusted)
        if now_ns < self._until_ns and not trusted:
            held = _Held(now_ns, self._contact_until(now_ns))
            self._held |= dict.fromkeys(lost, held)
        self._instances = {key: self._instances[key] for key in self._held} | found
        self._live = True
        return [*told, *skipped, *self._show(grown=bool(set(self._held) - before))]

    def _hear_out(self, last_words: Mapping[str, bytes], records: Collection[str]) -> None:
        """Take note of who said DRAINING before it vanished, in what nobody has looked at."""
        for key, data in last_words.items():
            if key in self._instances and key not in records:
                said = self._records.decoded(key, data, [])
                if said is not None and said.status == "DRAINING":
                    self._instances[key] = said
                    self._held.pop(key, None)

    def _is_mute(self, records: Collection[str], found: Collection[str]) -> bool:
        """Whether it says nothing: of records that can't be read, and nothing else is known."""
        known = self._live or self._instances
        return bool(records) and not (found or known) and self._rules.protect

    def suspect(self, reason: str, now_ns: int) -> list[Event]:
        """The registry has lost contact, or its memory."""
        told = self.step(now_ns)
        if self._suspect_ns is None:
            self._suspect_ns = now_ns
            self._contact_before_ns = self._contact_until(now_ns)
            self._contact_ns = None
        self._until_ns = NEVER
        self._reason = reason
        return [*told, *self.step(now_ns)]

    def step(self, now_ns: int) -> list[Event]:
        """Do what is due."""
        waited = self._suspect_ns is not None or now_ns >= self._begun_ns + PATIENCE_NS
        if not self._live and self._written_ns is not None and waited:
            self._told = True
        if self._held and now_ns >= self._until_ns:
            if now_ns - self._until_ns > PATIENCE_NS:  # we stood still, and what the registry has
                self._until_ns = now_ns + PATIENCE_NS  # said meanwhile is still on its way
                return self._show()
            for key in self._held:
                del self._instances[key]
            self._held = {}
        return self._show()

    # How it is weighed

    def _contact_until(self, now_ns: int) -> int:
        """For how long it has answered in all.

        Each time counts as one `stale_timeout` at most: a longer one ends what was held, unless we
        stood still.
        """
        if self._contact_ns is None:
            return self._contact_before_ns
        return self._contact_before_ns + min(now_ns - self._contact_ns, self._rules.hold_ns)

    def _forget(self) -> None:
        """Contact is back: drop what was missing for twice `stale_timeout` of contact before."""
        if self._suspect_ns is None:
            return
        limit_ns = self._contact_before_ns - 2 * self._rules.hold_ns
        for key in [key for key, held in self._held.items() if held.contact_ns <= limit_ns]:
            del self._held[key], self._instances[key]

    def _weigh(
        self,
        records: Mapping[str, bytes],
        skipped: Collection[RecordSkipped],
        found: Collection[str],
        now_ns: int,
    ) -> bool:
        """See whether the registry is suspect; True: it is not, and all that vanishes is gone."""
        hold_ns, first = self._rules.hold_ns, not self._live
        fresh = self._written_ns is None or now_ns - self._written_ns <= hold_ns
        if self._contact_ns is None:
            self._contact_ns = now_ns
        if not self._rules.protect:
            self._suspect_ns = None
            return True
        if self._suspect_ns is not None:
            self._suspect_ns, self._until_ns = None, now_ns + hold_ns
        elif first and self._instances and not found and (fresh or self._told):
            self._doubt(EMPTY, now_ns)
        elif records and skipped and not found:
            self._doubt(UNREADABLE, now_ns)
        return first and not fresh and now_ns >= self._until_ns

    def _doubt(self, reason: str, now_ns: int) -> None:
        if now_ns >= self._until_ns:
            self._reason = reason
        self._until_ns = max(self._until_ns, now_ns + self._rules.hold_ns)

    def _lost(self, found: Collection[str], now_ns: int, *, trusted: bool) -> list[str]:
        """Which have vanished now, without a word; more than half of them within a lease is odd."""
        since_ns = now_ns - self._rules.lease_ns
        self._vanished = {
            key: at for key, at in self._vanished.items() if at > since_ns and key not in found
        }
        lost = [
            key
            for key, instance in self._instances.items()
            if key not in found and key not in self._held and instance.status != "DRAINING"
        ]
        if trusted:
            return lost
        self._vanished |= dict.fromkeys(lost, now_ns)
        there = len(found) + len(self._vanished)
        if lost and there >= FEW and 2 * len(self._vanished) > there:
            seconds = to_seconds(self._rules.lease_ns)
            self._doubt(f"more than half of them vanished within {seconds:.3g} s", now_ns)
        return lost

    # What is shown

    def _show(self, *, grown: bool = False) -> list[Event]:
        """Show what is known now; events if that is something else than before."""
        if not self._live and not self._told:
            return []
        old = self._shown.snapshot if self._shown else Snapshot(self._service, source="cache")
        source: Source = "stale" if self._held else "live" if self._live else "cache"
        new = Snapshot(
            self._service,
            tuple(self._instances[key] for key in sorted(self._instances)),
            old.revision,
            source,
            frozenset(self._held),
        )
        changed = self._shown is None or new != old
        new = replace(new, revision=old.revision + 1) if changed else old
        self._shown = Shown(new, self._since_ns())
        events: list[Event] = []
        if grown:
            events.append(
                InstancesRetained(self._registry, self._service, len(self._held), self._reason)
            )
        if changed and not (grown and new.instances == old.instances):
            events.append(self._change(old, new))
        return events

    def _since_ns(self) -> int | None:
        if not self._live:
            return self._written_ns
        times = [held.at_ns for held in self._held.values()]
        if self._suspect_ns is not None:
            times.append(self._suspect_ns)
        return min(times, default=None)

    def _change(self, old: Snapshot, new: Snapshot) -> InstancesChanged:
        before = {instance.id for instance in old.instances}
        now = {instance.id for instance in new.instances}
        return InstancesChanged(
            self._registry,
            self._service,
            len(new.instances),
            len(now - before),
            len(before - now),
            new.source,
        )
