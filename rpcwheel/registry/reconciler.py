"""Decides what to publish, withdraw and renew, and when. Pure.

There is no list of things to retry. Each registration has a desired state (published or gone), with
a generation that counts its changes, and a known state. Where these differ, a request is due. Its
result counts only for the generation it was made for. So a late success can't bring back what was
unregistered, and a late withdrawal can't remove what was registered again. (Dubbo's retry tasks can
do both: a task that has passed its check for cancellation registers an instance that is gone.
Nacos' redo keeps states as here.)

One request is under way at a time: `next_request` returns it, `done` takes its result. A request
that failed may still take effect later, from the buffers of a registry that was frozen. So what
followed it is repeated once, a lease later: `RegistrationRecord.doubt_ns`.

Two processes that publish under one id each find their record replaced and replace it in turn, with
each renewal. So each waits longer from time to time, up to two leases: no longer, because the other
process may end.

Times and random numbers are arguments; nothing here blocks or locks. The session has the lock.
O(log n) for a request of one instance, O(n) for a renewal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rpcwheel.backoff import RANDOM
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import InstanceIdConflict, RegistryRefused, RegistryUnavailable
from rpcwheel.events.events import (
    InstancePublished,
    InstanceWithdrawn,
    RegistryFailed,
    RegistryRecovered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rpcwheel.events import Event
    from rpcwheel.instance import ServiceInstance

    from .backend import Lost
    from .policy import RegistryRules

    Key = tuple[str, str]

MAX_BATCH: Final = 128
"""Instances in one request: as many operations as etcd takes in a transaction."""

RENEW_SPREAD: Final = 0.1
"""Renewals are so much earlier or later, at random, so that those of many processes drift apart."""

CLOSING_ATTEMPTS: Final = 2
"""At the end. The first may fail because its connection died unnoticed."""

FLUSH_PAUSE_NS: Final = 200_000_000
"""The longest wait after a failure for what a caller waits for."""

CONFLICT_LEASES: Final = 2
"""The longest wait before an instance is published again under an id that another process uses."""


class RegistrationState(enum.StrEnum):
    """The state of a registration; see `Registration.state`."""

    PENDING = "PENDING"
    PUBLISHED = "PUBLISHED"
    LOST = "LOST"
    WITHDRAWING = "WITHDRAWING"
    GONE = "GONE"


class IdConflict:
    """How often another process replaced one instance."""

    def __init__(self) -> None:
        self._times = 0
        self._until_ns = 0

    def delay_ns(self, now_ns: int, rules: RegistryRules) -> int:
        """Count one replacement. Returns the wait before the instance is published again.

        The first time 0: a process that ends may have published late.
        """
        self._times = self._times + 1 if now_ns < self._until_ns else 1
        longest_ns = CONFLICT_LEASES * rules.lease_ns
        grown_ns = rules.renew_interval_ns << min(self._times - 1, 32)
        delay_ns = 0 if self._times == 1 else min(grown_ns, longest_ns)
        self._until_ns = now_ns + delay_ns + CONFLICT_LEASES * longest_ns  # the other waits too
        return delay_ns


@dataclass(eq=False)
class RegistrationRecord:
    """One registration: its desired and its known state. Changed by the `Reconciler` only."""

    instance: ServiceInstance
    """The instance that is to be published, or was published last."""
    wanted: bool = True
    generation: int = 1
    state: RegistrationState = RegistrationState.PENDING
    due_ns: int = NEVER
    """When its next request is due."""
    sent: dict[str, ServiceInstance] = field(default_factory=dict)
    """The instances that the registry may have, by epoch."""
    doubt_ns: int = 0
    """Until this time a failed request may take effect, also after later requests."""
    lost_reason: str = ""
    """Why it was lost, until it is published again."""
    seen_ns: int | None = None
    """The time of the last request to which the registry answered that it has the key."""
    conflict: IdConflict = field(default_factory=IdConflict)
    was_changed: bool = False
    """Whether others had changed it at the last renewal."""
    attempts: int = 0
    """Failed requests in a row, of it alone."""
    error: BaseException | None = None

    def may_be(self, instance: ServiceInstance) -> bool:
        """Whether an instance of the same key is, or was, of this run."""
        return instance.epoch == self.instance.epoch or instance.epoch in self.sent

    @property
    def is_held(self) -> bool:
        """Whether the registry has it, as far as is known; perhaps in an older form."""
        return self.wanted and self.seen_ns is not None and self.state is not RegistrationState.LOST


class Request(NamedTuple):
    """A request to make."""

    kind: Literal["publish", "withdraw", "renew"]
    batch: tuple[tuple[RegistrationRecord, int], ...]
    """The records, each with its generation when the request was made."""
    instances: tuple[ServiceInstance, ...]
    started_ns: int


class BackendHealth:
    """Whether a registry answers, and how long it is left alone after a failure."""

    def __init__(self, registry: str, rules: RegistryRules) -> None:
        self._registry = registry
        self._rules = rules
        self.up = False
        self.failures = 0
        """Failed requests in a row."""
        self.failed_ns = 0
        self.since_ns: int | None = None
        """The time since which the registry does not answer; None if it answers."""
        self.error: BaseException | None = None
        """The error of the last request, if it failed."""
        self.pause_ns = 0
        """Until then, no requests but renewals."""
        self.renewal_pause_ns = 0
        """Until then, no renewals. They can't wait for as long as a policy may say."""

    def request_succeeded(self, now_ns: int) -> list[RegistryRecovered]:
        """Note an answer to a request. Returns the events to emit."""
        self.failures, self.error = 0, None
        self.pause_ns = self.renewal_pause_ns = 0
        return self.answered(now_ns)

    def answered(self, now_ns: int) -> list[RegistryRecovered]:
        """Note that the registry answers. Pauses continue, so that requests stay spread out.

        Returns the events to emit.
        """
        since_ns, self.since_ns, self.up = self.since_ns, None, True
        if since_ns is None:
            return []
        return [RegistryRecovered(self._registry, to_seconds(now_ns - since_ns))]

    def contact_lost(self, now_ns: int) -> None:
        """Note that it does not answer. Requests that are planned stay planned."""
        self.up = False
        if self.since_ns is None:
            self.since_ns = now_ns

    def delay_ns(self, now_ns: int, error: BaseException) -> int:
        """Return the wait if a request fails now. Changes nothing."""
        elapsed_ns = 0 if self.since_ns is None else max(0, now_ns - self.since_ns)
        return self._rules.retry_ns(self.failures + 1, elapsed_ns=elapsed_ns, error=error)

    def request_failed(self, now_ns: int, error: BaseException, delay_ns: int) -> None:
        """Note a failed request, and pause."""
        if not isinstance(error, RegistryRefused):
            self.contact_lost(now_ns)
        self.failures += 1
        self.error = error
        self.failed_ns = now_ns
        self.pause_ns = now_ns + delay_ns
        self.renewal_pause_ns = now_ns + min(delay_ns, self._rules.longest_retry_ns)

    def shorten_pause(self) -> None:
        """Make the next attempt soon: a caller waits."""
        self.pause_ns = min(self.pause_ns, self.failed_ns + FLUSH_PAUSE_NS)


class Reconciler:
    """All that one process publishes in one registry. Not thread-safe."""

    def __init__(
        self,
        registry: str,
        rules: RegistryRules,
        random_fraction: Callable[[], float] = RANDOM.random,
    ) -> None:
        self.health = BackendHealth(registry, rules)
        self.closing = False
        self._registry = registry
        self._rules = rules
        self._random = random_fraction
        self._records: dict[Key, RegistrationRecord] = {}
        self._numbers = count()
        self._due: list[tuple[int, int, RegistrationRecord]] = []
        """A heap. An item whose record is due at another time is ignored when it comes up."""
        self._under_way: Request | None = None
        self._max_batch = MAX_BATCH
        self._renew_at_ns = NEVER
        self._renew_failed = False
        self._closing_attempts = CLOSING_ATTEMPTS

    # The desired state

    def records(self) -> tuple[RegistrationRecord, ...]:
        """Return the records that are desired, or not removed yet."""
        return tuple(
            record
            for record in self._records.values()
            if record.state is not RegistrationState.GONE
        )

    def set_desired(self, instance: ServiceInstance, now_ns: int) -> RegistrationRecord:
        """Have an instance published from now on."""
        record = self._records.get(instance.key)
        if record is None or record.state is RegistrationState.GONE:
            old, record = record, RegistrationRecord(instance)
            if old is not None:  # gone, but a request that failed may still take effect
                record.sent, record.doubt_ns = old.sent, old.doubt_ns
                old.due_ns, old.generation = NEVER, old.generation + 1
            self._records[instance.key] = record
        else:
            record.instance = instance
            record.generation += 1
            if record.state is not RegistrationState.LOST:
                record.state = RegistrationState.PENDING
        record.wanted = True
        self._plan(record, now_ns)
        return record

    def remove(
        self, target: ServiceInstance | RegistrationRecord, now_ns: int
    ) -> RegistrationRecord:
        """Have an instance withdrawn, also one that this process did not publish.

        If another instance with its key is wanted, nothing is done: publishing that one replaces
        it. If one is being withdrawn, this one is withdrawn with it. If there is none, a record is
        made only to withdraw it.
        """
        if isinstance(target, RegistrationRecord):
            record = target
        else:
            current = self._records.get(target.key)
            if current is not None and not current.may_be(target):
                if current.wanted:  # that one replaces it, or has done so
                    return RegistrationRecord(target, wanted=False, state=RegistrationState.GONE)
                if current.state is not RegistrationState.GONE:
                    current.sent[target.epoch] = target
                    current.generation += 1
                    self._plan(current, now_ns)
                    return current
            if current is None or current.state is RegistrationState.GONE:
                current = self.set_desired(target, now_ns)
                current.sent[target.epoch] = target
            record = current
        if not record.wanted:
            return record
        record.wanted = False
        record.generation += 1
        record.attempts = 0
        if record.sent:
            record.state = RegistrationState.WITHDRAWING
            self._plan(record, now_ns)
        else:
            self._forget(record)
        return record

    def close(self, now_ns: int) -> None:
        """Withdraw everything at once, with few attempts."""
        for record in tuple(self._records.values()):
            if record.state is RegistrationState.GONE:
                del self._records[record.instance.key]
            else:
                self.remove(record, now_ns)
        self._due.clear()
        for record in self._records.values():
            self._plan(record, now_ns)
        self.closing = True
        self._renew_at_ns = NEVER
        self.health.pause_ns = 0

    def give_up(self) -> None:
        """Make no more requests: the time to close is over."""
        self.closing = True
        self._closing_attempts = 0
        self._due.clear()

    # Requests

    def next_request(self, now_ns: int) -> Request | None:
        """Return the request to make now; None: there is none, or one is under way."""
        if self._under_way is not None:
            return None
        due = max(self._first_due_ns(), self.health.pause_ns) <= now_ns
        renews = max(self._renew_at_ns, self.health.renewal_pause_ns) <= now_ns
        if renews and not (due and self._renew_failed):
            batch = [record for record in self._records.values() if record.is_held]
            if batch:
                return self._begin("renew", batch, now_ns)
            self._renew_at_ns = NEVER
        if not due:
            return None
        self._renew_failed = False
        batch = self._take_due(now_ns)
        if not batch:
            return None
        return self._begin("publish" if batch[0].wanted else "withdraw", batch, now_ns)

    def next_wake_ns(self) -> int:
        """The time of the next call of `next_request`, without other input."""
        if self._under_way is not None:
            return NEVER
        return min(
            max(self._first_due_ns(), self.health.pause_ns),
            max(self._renew_at_ns, self.health.renewal_pause_ns),
        )

    def delay_ns(self, request: Request, now_ns: int, error: BaseException) -> int:
        """Return the wait after a failed request, for `done`.

        Calls the user's strategy, so without the lock. Of what it reads, other threads change only
        since when the registry does not answer.
        """
        if self._concerns_one(request, error):
            attempts = request.batch[0][0].attempts + 1
            return self._rules.retry_ns(attempts, elapsed_ns=0, error=error)
        return self.health.delay_ns(now_ns, error)

    def done(
        self,
        request: Request,
        now_ns: int,
        *,
        error: BaseException | None = None,
        delay_ns: int = 0,
        lost: Mapping[Key, Lost] | None = None,
    ) -> list[Event]:
        """Take the result of the request under way. Returns the events to emit.

        `error`: why it failed, and `delay_ns` what `delay_ns()` returned for that; or `lost`: the
        result of a renewal.
        """
        self._under_way = None
        if error is not None:
            return self._failed(request, now_ns, error, delay_ns)
        events: list[Event] = [*self.health.request_succeeded(now_ns)]
        if request.kind == "renew":
            return events + self._renewed(request, now_ns, lost or {})
        self._max_batch = min(self._max_batch * 2, MAX_BATCH)
        for record, generation in request.batch:
            if request.kind == "withdraw":
                events += self._withdrawn(record, generation, now_ns)
            else:
                events += self._published(record, generation, request, now_ns)
        return events

    def _begin(
        self,
        kind: Literal["publish", "withdraw", "renew"],
        batch: Iterable[RegistrationRecord],
        now_ns: int,
    ) -> Request:
        pairs = tuple((record, record.generation) for record in batch)
        if kind == "publish":
            for record, _ in pairs:
                record.sent[record.instance.epoch] = record.instance
        if kind == "withdraw":  # also replaced epochs: a late request may have published them
            instances = tuple(instance for record, _ in pairs for instance in record.sent.values())
        else:
            instances = tuple(record.instance for record, _ in pairs)
        self._under_way = Request(kind, pairs, instances, now_ns)
        return self._under_way

    # Results

    def _published(
        self, record: RegistrationRecord, generation: int, request: Request, now_ns: int
    ) -> list[InstancePublished]:
        away_ns = request.started_ns - (record.seen_ns or 0) if record.lost_reason else 0
        record.seen_ns = request.started_ns
        if self._renew_at_ns == NEVER and not self.closing:
            self._plan_renewal(now_ns)
        if record.generation != generation:
            return []  # a later change is due already
        repeated = record.state is RegistrationState.PUBLISHED
        reason, record.lost_reason = record.lost_reason, ""
        self._settle(record, RegistrationState.PUBLISHED, now_ns)
        if repeated:
            return []
        service, name = record.instance.key
        away_s, status = to_seconds(away_ns), record.instance.status
        return [InstancePublished(self._registry, service, name, reason, away_s, status)]

    def _withdrawn(
        self, record: RegistrationRecord, generation: int, now_ns: int
    ) -> list[InstanceWithdrawn]:
        if record.generation != generation:
            return []
        repeated = record.state is RegistrationState.GONE
        self._settle(record, RegistrationState.GONE, now_ns)
        if not record.sent or self.closing:
            self._forget(record)
        if repeated:
            return []
        return [InstanceWithdrawn(self._registry, *record.instance.key)]

    def _settle(self, record: RegistrationRecord, state: RegistrationState, now_ns: int) -> None:
        """Note the desired state as reached, unless an older request may take effect later."""
        record.state, record.error, record.attempts, record.due_ns = state, None, 0, NEVER
        if record.doubt_ns > now_ns:
            self._plan(record, record.doubt_ns)
            return
        epoch = record.instance.epoch
        record.sent = {epoch: record.instance} if state is RegistrationState.PUBLISHED else {}

    def _renewed(
        self, request: Request, now_ns: int, lost: Mapping[Key, Lost]
    ) -> list[RegistryFailed]:
        events: list[RegistryFailed] = []
        self._renew_failed = False
        self._plan_renewal(now_ns)
        for record, generation in request.batch:
            reason = lost.get(record.instance.key)
            if reason is None:
                record.seen_ns = request.started_ns
                record.was_changed = False
            elif record.generation == generation:
                if reason == "changed":  # if again, another registry of this process does that
                    reason = "taken" if record.was_changed else "missing"
                    record.was_changed = True
                record.lost_reason = reason
                if record.state is not RegistrationState.PUBLISHED:
                    continue  # its change is due already
                record.state = RegistrationState.LOST
                match reason:
                    case "missing":
                        delay_ns = 0
                    case "taken":
                        delay_ns = record.conflict.delay_ns(now_ns, self._rules)
                        events.append(self._conflict(record, delay_ns))
                    case _:  # all processes notice this at once
                        delay_ns = int(self._random() * self._rules.jitter_ns)
                self._plan(record, now_ns + delay_ns)
        return events

    def _conflict(self, record: RegistrationRecord, delay_ns: int) -> RegistryFailed:
        service, name = record.instance.key
        record.error = error = InstanceIdConflict(
            f"{service}/{name}: another process publishes under this id, or another registry of "
            "this one, and each replaces the other's record; give each its own id, by its host and "
            "port, or by id="
        )
        return RegistryFailed(self._registry, "renew", error, to_seconds(delay_ns))

    def _failed(
        self, request: Request, now_ns: int, error: BaseException, delay_ns: int
    ) -> list[Event]:
        concerns_one = self._concerns_one(request, error)
        if concerns_one:
            self.health.error = error  # it answers, and the others are not concerned
        else:
            self.health.request_failed(now_ns, error, delay_ns)
        self._renew_failed = request.kind == "renew"
        refused = isinstance(error, RegistryRefused)
        if _may_concern_some(error) and len(request.batch) > 1:  # find out which
            self._max_batch = max(1, len(request.batch) // 2)
        for record, generation in request.batch if request.kind != "renew" else ():
            if not refused:  # also of a record that has replaced this one meanwhile
                newest = self._records.get(record.instance.key, record)
                newest.doubt_ns = now_ns + self._rules.lease_ns
            if record.generation == generation:
                record.error = error
                record.attempts += concerns_one
                # Otherwise the pause of the registry applies.
                self._plan(record, now_ns + delay_ns * concerns_one)
        if self.closing and not self._closing_attempts:  # no caller waits for it
            self._due.clear()
            return []
        return [self._failure(request, error, delay_ns)]

    def _failure(self, request: Request, error: BaseException, delay_ns: int) -> RegistryFailed:
        delay_s: float | None = to_seconds(delay_ns)
        if self.closing:
            self._closing_attempts -= 1
            self.health.pause_ns = 0
            if not self._closing_attempts:
                self._due.clear()
                delay_s = None
        return RegistryFailed(self._registry, request.kind, error, delay_s, len(request.batch))

    def _concerns_one(self, request: Request, error: BaseException) -> bool:
        """Whether an instance fails alone and by itself. It waits alone, and delays no other."""
        alone = len(request.batch) == 1 and request.kind != "renew"
        return alone and not self.closing and _may_concern_some(error)

    def _forget(self, record: RegistrationRecord) -> None:
        """Drop a record for which nothing is left to do."""
        record.state, record.due_ns = RegistrationState.GONE, NEVER
        key = record.instance.key
        if self._records.get(key) is record:
            del self._records[key]

    # When

    def _plan_renewal(self, now_ns: int) -> None:
        spread = 1 + RENEW_SPREAD * (2 * self._random() - 1)
        self._renew_at_ns = now_ns + int(self._rules.renew_interval_ns * spread)

    def _plan(self, record: RegistrationRecord, due_ns: int) -> None:
        record.due_ns = due_ns
        heappush(self._due, (due_ns, next(self._numbers), record))

    def _first_due_ns(self) -> int:
        due = self._due
        while due and due[0][0] != due[0][2].due_ns:
            heappop(due)
        return due[0][0] if due else NEVER

    def _take_due(self, now_ns: int) -> list[RegistrationRecord]:
        """Take the first due records with one kind of request; `done` schedules them again."""
        batch: list[RegistrationRecord] = []
        while len(batch) < self._max_batch and self._first_due_ns() <= now_ns:
            record = self._due[0][2]
            if batch and record.wanted is not batch[0].wanted:
                break
            heappop(self._due)
            record.due_ns = NEVER
            batch.append(record)
        return batch


def _may_concern_some(error: BaseException) -> bool:
    """Whether some of the instances may be the cause; a user's backend raises anything."""
    return not isinstance(error, RegistryUnavailable)
