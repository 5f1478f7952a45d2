"""Two processes that publish under one id: what tells it, and how long each then waits.

Each finds its record replaced by the other's, and puts its own there again. That would go on with
each renewal, for ever. So each waits longer from time to time, up to two leases: no longer, as the
other one may end, and then nobody is there.
"""

from __future__ import annotations

import enum
import random
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import InstanceIdConflict, RegistryError, RegistryRefused, RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe.events import (
    InstancePublished,
    InstanceWithdrawn,
    RegistryFailed,
    RegistryRecovered,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .backend import Lost, RegistryBackend
    from .policy import RegistryRules

    Key = tuple[str, str]
    from collections.abc import Callable

    from rpcwheel.observe import Event

__all__ = [
    "TRANSITIONS",
    "BackendHealth",
    "IdConflict",
    "Reconciler",
    "RegistrationRecord",
    "State",
    "Step",
    "find_id_conflicts",
    "id_conflict",
]


MOST_LEASES: Final = 2
"""The longest wait before an instance is published again under an id that another process uses."""


class IdConflict:
    """How often one instance was taken from us. Pure."""

    __slots__ = ("_calm_ns", "_times")

    def __init__(self) -> None:
        self._times = 0
        self._calm_ns = 0

    def delay_ns(self, now_ns: int, rules: RegistryRules) -> int:
        """How long to wait before it is published again, now that it was taken once more.

        Not at all for the first time: a process that ends may have published late.
        """
        self._times = self._times + 1 if now_ns < self._calm_ns else 1
        most_ns = MOST_LEASES * rules.lease_ns
        grown_ns = rules.renew_ns << min(self._times - 1, 32)
        delay_ns = 0 if self._times == 1 else min(grown_ns, most_ns)
        self._calm_ns = now_ns + delay_ns + MOST_LEASES * most_ns  # the other one waits as long
        return delay_ns


def id_conflict(instance: ServiceInstance) -> InstanceIdConflict:
    """What is told of it."""
    service, name = instance.key
    return InstanceIdConflict(
        f"{service}/{name}: another process publishes under this id, each in the place of the "
        "other; give each its own, by its host and port, or by id="
    )


def find_id_conflicts(
    backend: RegistryBackend, entries: Iterable[RegistrationRecord], lost: Mapping[Key, Lost]
) -> Mapping[Key, Lost]:
    """What is lost, where what is missing as another process has replaced it is `taken`.

    Asks the engine once for each service of which something is missing; it may block.
    """
    missing = [entry for entry in entries if lost.get(entry.instance.key) == "missing"]
    taken: dict[Key, Lost] = {}
    for service in {entry.instance.service for entry in missing}:
        try:
            records = backend.lookup(service).records
        except RegistryError:
            continue  # it is not known, then
        for entry in missing:
            found = _decoded(records.get(entry.instance.id))
            ours = found is None or entry.may_be(found)
            if entry.instance.service == service and not ours:
                taken[entry.instance.key] = "taken"
    return {**lost, **taken}


def _decoded(data: bytes | None) -> ServiceInstance | None:
    """None: nothing is there, or nothing that can be read."""
    try:
        return None if data is None else ServiceInstance.decoded(data)
    except ValueError:
        return None


class State(enum.StrEnum):
    """Of a registration; see `Registration.state`."""

    PENDING = "PENDING"
    PUBLISHED = "PUBLISHED"
    LOST = "LOST"
    WITHDRAWING = "WITHDRAWING"
    GONE = "GONE"


TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.PENDING: frozenset({State.PUBLISHED, State.WITHDRAWING, State.GONE}),
    State.PUBLISHED: frozenset({State.PENDING, State.LOST, State.WITHDRAWING}),
    State.LOST: frozenset({State.PUBLISHED, State.WITHDRAWING}),
    State.WITHDRAWING: frozenset({State.PENDING, State.GONE}),
    State.GONE: frozenset(),
}

"""From each state the ones that may follow it."""


class RegistrationRecord:
    """One registration: what is wanted, what is known. Changed by its `Reconciler` only."""

    __slots__ = (
        "__weakref__",
        "again",
        "attempts",
        "contest",
        "doubt_ns",
        "due_ns",
        "error",
        "generation",
        "instance",
        "seen_ns",
        "sent",
        "state",
        "wanted",
    )

    def __init__(self, instance: ServiceInstance) -> None:
        self.instance = instance
        """What is wanted, or was last."""
        self.wanted = True
        self.generation = 1
        self.state = State.PENDING
        self.due_ns = NEVER
        """When its next request is to be made."""
        self.sent: dict[str, ServiceInstance] = {}
        """What the engine may hold of it, by epoch."""
        self.doubt_ns = 0
        """Until then a request that failed may take effect, after those that followed it."""
        self.again: str = ""
        """Why it was lost, until it is published again."""
        self.seen_ns: int | None = None
        """When the engine was last asked, and had it, in whatever form."""
        self.contest = IdConflict()
        self.attempts = 0
        """Refusals in a row, of it alone."""
        self.error: BaseException | None = None

    def may_be(self, instance: ServiceInstance) -> bool:
        """Whether it is, or was, of this run; and not of another one by the same name."""
        return instance.epoch == self.instance.epoch or instance.epoch in self.sent

    @property
    def is_there(self) -> bool:
        """Whether the engine has it, as far as is known; perhaps in an older form."""
        return self.wanted and self.seen_ns is not None and self.state is not State.LOST


class Step(NamedTuple):
    """A request to make."""

    request: Literal["publish", "withdraw", "renew"]
    batch: tuple[tuple[RegistrationRecord, int], ...]
    """With their generations."""
    instances: tuple[ServiceInstance, ...]
    started_ns: int


MOST: Final = 128

"""Instances in one request: as many operations as etcd takes in a transaction."""

RENEW_SPREAD: Final = 0.1

"""Renewals come so much earlier or later, so that those of many processes drift apart."""

TRIES_AT_THE_END: Final = 2

"""The first may fail as its connection died unseen."""

SOON_NS: Final = 200_000_000

"""After a failure, for what somebody waits for."""


class BackendHealth:
    """Whether an engine answers, and how long it is left alone after it did not."""

    __slots__ = (
        "_registry",
        "_rules",
        "error",
        "failed_ns",
        "failures",
        "pause_ns",
        "renewal_pause_ns",
        "since_ns",
        "up",
    )

    def __init__(self, registry: str, rules: RegistryRules) -> None:
        self._registry = registry
        self._rules = rules
        self.up = False
        self.failures = 0
        """In a row."""
        self.failed_ns = 0
        self.since_ns: int | None = None
        """When it did not answer for the first time."""
        self.error: BaseException | None = None
        """Of the last request, if it has failed."""
        self.pause_ns = 0
        """Until when nothing is asked but what a user waits for, and renewals."""
        self.renewal_pause_ns = 0
        """The same of renewals, which can't be put off for as long as a policy may say."""

    def heard(self, now_ns: int) -> list[RegistryRecovered]:
        """It has answered a request; gives what is to be told."""
        self.failures, self.error = 0, None
        self.pause_ns = self.renewal_pause_ns = 0
        return self.seen(now_ns)

    def seen(self, now_ns: int) -> list[RegistryRecovered]:
        """It shows up, but no request was tried: those keep to their pause, or all would come."""
        since_ns, self.since_ns, self.up = self.since_ns, None, True
        if since_ns is None:
            return []
        return [RegistryRecovered(self._registry, to_seconds(now_ns - since_ns))]

    def lost(self, now_ns: int) -> None:
        """It does not answer; tries that are planned go on as they are."""
        self.up = False
        if self.since_ns is None:
            self.since_ns = now_ns

    def delay_ns(self, now_ns: int, error: BaseException) -> int:
        """How long to wait if a request fails now, which is longer each time. Changes nothing."""
        elapsed_ns = 0 if self.since_ns is None else max(0, now_ns - self.since_ns)
        return self._rules.retry_ns(self.failures + 1, elapsed_ns=elapsed_ns, error=error)

    def failed(self, now_ns: int, error: BaseException, delay_ns: int) -> None:
        """A request has failed: so long, nothing is asked."""
        if not isinstance(error, RegistryRefused):
            self.lost(now_ns)
        self.failures += 1
        self.error = error
        self.failed_ns = now_ns
        self.pause_ns = now_ns + delay_ns
        self.renewal_pause_ns = now_ns + min(delay_ns, self._rules.longest_retry_ns)

    def refused_one(self, error: BaseException) -> None:
        """It answers, but does not want one instance: that concerns no other."""
        self.error = error

    def hasten(self) -> None:
        """Somebody waits: let the next try be soon."""
        self.pause_ns = min(self.pause_ns, self.failed_ns + SOON_NS)


class Reconciler:
    """All that one process publishes at one registry. Not thread-safe."""

    def __init__(
        self, registry: str, rules: RegistryRules, chance: Callable[[], float] = random.random
    ) -> None:
        self.contact = BackendHealth(registry, rules)
        self.closing = False
        self._registry = registry
        self._rules = rules
        self._chance = chance
        self._entries: dict[Key, RegistrationRecord] = {}
        self._numbers = count()
        self._due: list[tuple[int, int, RegistrationRecord]] = []
        """A heap; what is no more due then stays in it until it comes up."""
        self._flight: Step | None = None
        self._most = MOST
        self._renew_ns = NEVER
        self._renew_failed = False
        self._tries = TRIES_AT_THE_END

    # --- What is wanted ---

    def entries(self) -> tuple[RegistrationRecord, ...]:
        """What is wanted, or not gone yet."""
        return tuple(entry for entry in self._entries.values() if entry.state is not State.GONE)

    def want(self, instance: ServiceInstance, now_ns: int) -> RegistrationRecord:
        """Have it published from now on, as it is given here."""
        entry = self._entries.get(instance.key)
        if entry is None or entry.state is State.GONE:
            old, entry = entry, RegistrationRecord(instance)
            if old is not None:  # it is gone, but what was on its way may still arrive
                entry.sent, entry.doubt_ns = old.sent, old.doubt_ns
                old.due_ns, old.generation = NEVER, old.generation + 1
            self._entries[instance.key] = entry
        else:
            entry.instance = instance
            entry.generation += 1
            entry.state = State.LOST if entry.state is State.LOST else State.PENDING
        entry.wanted = True
        self._plan(entry, now_ns)
        return entry

    def drop(self, what: ServiceInstance | RegistrationRecord, now_ns: int) -> RegistrationRecord:
        """Have it published no more from now on; what is known of by nobody here, too."""
        entry = what if isinstance(what, RegistrationRecord) else self._entries.get(what.key)
        if (
            entry is not None
            and not isinstance(what, RegistrationRecord)
            and not entry.may_be(what)
        ):
            if entry.wanted:  # it takes the place of that one, or has
                return _gone_already(what)
            if entry.state is not State.GONE:
                entry.sent[what.epoch] = what
                entry.generation += 1
                self._plan(entry, now_ns)
                return entry
        if entry is None or (entry.state is State.GONE and entry is not what):
            assert not isinstance(what, RegistrationRecord)  # noqa: S101 - told apart above
            entry = self.want(what, now_ns)
            entry.sent[what.epoch] = what
        if not entry.wanted:
            return entry
        entry.wanted = False
        entry.generation += 1
        entry.attempts = 0
        if entry.sent:
            entry.state = State.WITHDRAWING
            self._plan(entry, now_ns)
            return entry
        self._gone(entry)
        return entry

    def close(self, now_ns: int) -> None:
        """Drop everything, and try that at once; only a time or two."""
        for entry in tuple(self._entries.values()):
            if entry.state is State.GONE:
                del self._entries[entry.instance.key]
            else:
                self.drop(entry, now_ns)
        for entry in self._entries.values():
            entry.due_ns = min(entry.due_ns, now_ns)
        self._due = [(now_ns, next(self._numbers), entry) for entry in self._entries.values()]
        heapify(self._due)
        self.closing = True
        self._renew_ns = NEVER
        self.contact.pause_ns = 0

    def give_up(self) -> None:
        """Ask for nothing more: the time to close is over."""
        self.closing = True
        self._tries = 0
        self._due.clear()

    # --- What is to be done ---

    def next_step(self, now_ns: int) -> Step | None:
        """The request to make now, which is then on its way; None: none, or one is already."""
        if self._flight is not None:
            return None
        due = max(self._first_due_ns(), self.contact.pause_ns) <= now_ns
        renews = max(self._renew_ns, self.contact.renewal_pause_ns) <= now_ns
        if renews and not (due and self._renew_failed):
            batch = [entry for entry in self._entries.values() if entry.is_there]
            if batch:
                return self._begin("renew", batch, now_ns)
            self._renew_ns = NEVER
        if not due:
            return None
        self._renew_failed = False
        batch = self._take_due(now_ns)
        if not batch:
            return None
        return self._begin("publish" if batch[0].wanted else "withdraw", batch, now_ns)

    def next_wake_ns(self) -> int:
        """When `next_step` is to be asked again, if nothing happens before."""
        if self._flight is not None:
            return NEVER
        return min(
            max(self._first_due_ns(), self.contact.pause_ns),
            max(self._renew_ns, self.contact.renewal_pause_ns),
        )

    def delay_ns(self, step: Step, now_ns: int, error: BaseException) -> int:
        """How long to wait as the step has failed: what `done` takes.

        It asks the user's strategy, so it is called without the lock. What it reads is changed only
        by whoever takes steps, but for the time for which nothing answers.
        """
        if self._is_of_one(step, error):
            attempts = step.batch[0][0].attempts + 1
            return self._rules.retry_ns(attempts, elapsed_ns=0, error=error)
        return self.contact.delay_ns(now_ns, error)

    def done(
        self,
        step: Step,
        now_ns: int,
        *,
        error: BaseException | None = None,
        delay_ns: int = 0,
        lost: Mapping[Key, Lost] | None = None,
    ) -> list[Event]:
        """Take the result of the step that is on its way; gives the events to tell.

        Args:
            step: That `next_step` gave.
            now_ns: When it ended.
            error: It failed so; None: it did not.
            delay_ns: What `delay_ns()` gave for that.
            lost: What a renewal said.
        """
        self._flight = None
        if error is not None:
            return self._failed(step, now_ns, error, delay_ns)
        told: list[Event] = [*self.contact.heard(now_ns)]
        if step.request == "renew":
            return told + self._renewed(step, now_ns, lost or {})
        self._most = min(self._most * 2, MOST)
        for entry, generation in step.batch:
            if step.request == "withdraw":
                told += self._withdrawn(entry, generation, now_ns)
            else:
                told += self._published(entry, generation, step, now_ns)
        return told

    def _begin(
        self,
        request: Literal["publish", "withdraw", "renew"],
        batch: Iterable[RegistrationRecord],
        now_ns: int,
    ) -> Step:
        pairs = tuple((entry, entry.generation) for entry in batch)
        for entry, _ in pairs if request == "publish" else ():
            entry.sent[entry.instance.epoch] = entry.instance
        if request == "withdraw":  # of an epoch that was replaced, too: it may have come last
            instances = tuple(one for entry, _ in pairs for one in entry.sent.values())
        else:
            instances = tuple(entry.instance for entry, _ in pairs)
        self._flight = Step(request, pairs, instances, now_ns)
        return self._flight

    # --- What has come of it ---

    def _published(
        self, entry: RegistrationRecord, generation: int, step: Step, now_ns: int
    ) -> list[InstancePublished]:
        away_ns = step.started_ns - (entry.seen_ns or 0) if entry.again else 0
        entry.seen_ns = step.started_ns
        if self._renew_ns == NEVER and not self.closing:
            self._plan_renewal(now_ns)
        if entry.generation != generation:
            return []  # the later intent is due already
        repeated = entry.state is State.PUBLISHED
        again, entry.again = entry.again, ""
        self._settle(entry, State.PUBLISHED, now_ns)
        if repeated:
            return []
        instance = entry.instance
        away_s = to_seconds(away_ns)
        return [
            InstancePublished(
                self._registry, instance.service, instance.id, again, away_s, instance.status
            )
        ]

    def _withdrawn(
        self, entry: RegistrationRecord, generation: int, now_ns: int
    ) -> list[InstanceWithdrawn]:
        if entry.generation != generation:
            return []
        repeated = entry.state is State.GONE
        self._settle(entry, State.GONE, now_ns)
        if not entry.sent or self.closing:
            self._gone(entry)
        if repeated:
            return []
        return [InstanceWithdrawn(self._registry, entry.instance.service, entry.instance.id)]

    def _settle(self, entry: RegistrationRecord, state: State, now_ns: int) -> None:
        """The engine has it as it is wanted; or has had, if something older arrives now."""
        entry.state, entry.error, entry.attempts, entry.due_ns = state, None, 0, NEVER
        if entry.doubt_ns > now_ns:
            self._plan(entry, entry.doubt_ns)
            return
        epoch = entry.instance.epoch
        entry.sent = {epoch: entry.instance} if state is State.PUBLISHED else {}

    def _renewed(self, step: Step, now_ns: int, lost: Mapping[Key, Lost]) -> list[RegistryFailed]:
        told: list[RegistryFailed] = []
        self._renew_failed = False
        self._plan_renewal(now_ns)
        for entry, generation in step.batch:
            why = lost.get(entry.instance.key)
            if why is None:
                entry.seen_ns = step.started_ns
            elif entry.generation == generation:
                entry.again = why
                if entry.state is not State.PUBLISHED:
                    continue  # its change is due already
                entry.state = State.LOST
                match why:
                    case "missing":
                        delay_ns = 0
                    case "taken":
                        delay_ns = entry.contest.delay_ns(now_ns, self._rules)
                        told.append(self._taken(entry, delay_ns))
                    case _:
                        delay_ns = int(self._chance() * self._rules.jitter_ns)
                self._plan(entry, now_ns + delay_ns)
        return told

    def _taken(self, entry: RegistrationRecord, delay_ns: int) -> RegistryFailed:
        entry.error = error = id_conflict(entry.instance)
        return RegistryFailed(self._registry, "renew", error, to_seconds(delay_ns))

    def _failed(self, step: Step, now_ns: int, error: BaseException, delay_ns: int) -> list[Event]:
        of_one = self._is_of_one(step, error)
        if of_one:
            self.contact.refused_one(error)
        else:
            self.contact.failed(now_ns, error, delay_ns)
        self._renew_failed = step.request == "renew"
        refused = isinstance(error, RegistryRefused)
        if _is_of_some(error) and len(step.batch) > 1:  # find out which of them it is
            self._most = max(1, len(step.batch) // 2)
        for entry, generation in step.batch if step.request != "renew" else ():
            if not refused:  # also for one that has taken the place of this one meanwhile
                newest = self._entries.get(entry.instance.key, entry)
                newest.doubt_ns = now_ns + self._rules.lease_ns
            if entry.generation == generation:
                entry.error = error
                entry.attempts += of_one
                self._plan(entry, now_ns + delay_ns * of_one)
        if self.closing and not self._tries:  # nobody waits for it any more
            self._due.clear()
            return []
        return [self._told(step, error, delay_ns)]

    def _told(self, step: Step, error: BaseException, delay_ns: int) -> RegistryFailed:
        delay_s: float | None = to_seconds(delay_ns)
        if self.closing:
            self._tries -= 1
            self.contact.pause_ns = 0
            if not self._tries:
                self._due.clear()
                delay_s = None
        return RegistryFailed(self._registry, step.request, error, delay_s, len(step.batch))

    def _is_of_one(self, step: Step, error: BaseException) -> bool:
        """What fails alone, and by itself, waits by itself, so that it holds up nothing else."""
        alone = len(step.batch) == 1 and step.request != "renew"
        return alone and not self.closing and _is_of_some(error)

    def _gone(self, entry: RegistrationRecord) -> None:
        """Nothing is left to do for it."""
        entry.state, entry.due_ns = State.GONE, NEVER
        key = entry.instance.key
        if self._entries.get(key) is entry:
            del self._entries[key]

    # --- The clock ---

    def _plan_renewal(self, now_ns: int) -> None:
        spread = 1 + RENEW_SPREAD * (2 * self._chance() - 1)
        self._renew_ns = now_ns + int(self._rules.renew_ns * spread)

    def _plan(self, entry: RegistrationRecord, due_ns: int) -> None:
        entry.due_ns = due_ns
        heappush(self._due, (due_ns, next(self._numbers), entry))

    def _first_due_ns(self) -> int:
        due = self._due
        while due and due[0][0] != due[0][2].due_ns:
            heappop(due)
        return due[0][0] if due else NEVER

    def _take_due(self, now_ns: int) -> list[RegistrationRecord]:
        """The first that are due, of one kind; they are planned anew when it is done."""
        batch: list[RegistrationRecord] = []
        while len(batch) < self._most and self._first_due_ns() <= now_ns:
            entry = self._due[0][2]
            if batch and entry.wanted is not batch[0].wanted:
                break
            heappop(self._due)
            entry.due_ns = NEVER
            batch.append(entry)
        return batch


def _is_of_some(error: BaseException) -> bool:
    """Whether it may be due to some of the instances; a backend of the user's raises anything."""
    return not isinstance(error, RegistryUnavailable)


def _gone_already(instance: ServiceInstance) -> RegistrationRecord:
    """For whoever wants something withdrawn that the engine does not hold."""
    entry = RegistrationRecord(instance)
    entry.wanted, entry.state = False, State.GONE
    return entry
