"""One-shot lookups of services in a registry.

Concurrent lookups of one service share one request. The last answer is kept, and the snapshot files
of earlier runs, for when the registry can't be reached. Answers are judged by the rules of
`cache.py`, as views of a watch are.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import RegistryClosed, RegistryUnavailable
from rpcwheel.events import InstancesChanged, RegistryFailed
from rpcwheel.instance import Snapshot

from .cache import ServiceCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .backend import RegistryBackend
    from .policy import RegistryRules
    from .snapshot_files import SnapshotFiles

    Lookup = tuple[str | None, Future[Any]]
    """A service (None: the names of all services), and its answer."""


class UnreadableRecords(RegistryUnavailable):
    """The registry has answered, but none of its records can be decoded."""


class _Answer(NamedTuple):
    cache: ServiceCache
    snapshot: Snapshot
    at_ns: int


class LookupQueue:
    """The lookups of one session.

    Has no lock: the session holds its own while it calls `add` and `take`. Its worker calls
    `carry_out` without the lock.
    """

    def __init__(
        self,
        backend: RegistryBackend,
        rules: RegistryRules,
        snapshots: SnapshotFiles | None,
        now_ns: Callable[[], int],
        emit: Callable[..., object],
    ) -> None:
        self._backend = backend
        self._registry = str(backend.url)
        self._rules = rules
        self._emit = emit
        self._snapshots = snapshots
        self._now_ns = now_ns
        self._waiting: dict[str | None, Future[Any]] = {}
        self._answers: dict[str, _Answer] = {}
        self._unreadable: dict[str, ServiceCache] = {}
        """The caches of services none of whose records could be read. They are kept between lookups
        so that each of these records is reported once."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, service: str | None) -> Future[Any]:
        """Return the future of the answer, which several callers may share."""
        return self._waiting.setdefault(service, Future())

    def take(self) -> Lookup | None:
        """Take the oldest lookup, to be carried out."""
        service = next(iter(self._waiting), None)
        return (service, self._waiting.pop(service)) if self._waiting else None

    def carry_out(self, lookup: Lookup) -> BaseException | None:
        """Ask the backend, and set the answer. Returns the error, if there was one."""
        service, answer = lookup
        try:
            result = list(self._backend.services()) if service is None else self._look_up(service)
        except BaseException as error:  # noqa: BLE001 - for the caller
            if not isinstance(error, RegistryClosed):  # closed by its user: no failure
                self._emit(RegistryFailed(self._registry, "lookup", error, None))
            answer.set_exception(error)
            del lookup, answer  # else a cycle: the error, its traceback, and this frame
            return error
        answer.set_result(result)
        return None

    def refuse(self, error: BaseException) -> None:
        """End all waiting lookups with an error."""
        while lookup := self.take():
            lookup[1].set_exception(error)

    def last(self, service: str) -> Snapshot | None:
        """Return the last answer, of this run or an earlier one; None: none. May read a file."""
        answer = self._answers.get(service)
        if answer is not None:
            age_s = to_seconds(max(0, self._now_ns() - answer.at_ns))
            return replace(answer.snapshot, source="cache", age_s=age_s)
        return None if self._snapshots is None else self._snapshots.load(service)

    def remember(self, snapshot: Snapshot) -> None:
        """Take what a watch knew of a service, unless the last answer is later. Any thread."""
        now_ns, age_ns = self._now_ns(), to_ns(snapshot.age_s)
        answer = self._answers.get(snapshot.service)
        if answer is not None and answer.at_ns > now_ns - age_ns:
            return
        if snapshot.instances or answer is not None:
            cache = self._new_cache(snapshot.service, now_ns)
            cache.remember(snapshot.instances, age_ns, now_ns)
            self._answers[snapshot.service] = _Answer(cache, snapshot, now_ns - age_ns)

    def _new_cache(self, service: str, now_ns: int) -> ServiceCache:
        return ServiceCache(self._registry, service, self._rules, now_ns)

    def _look_up(self, service: str) -> Snapshot:
        answer = self._answers.get(service)
        try:
            view = self._backend.lookup(service)
        except BaseException as error:
            if answer is not None:
                self._report(answer.cache.contact_lost(str(error), self._now_ns()))
            raise
        now_ns = self._now_ns()
        is_old = answer is not None and now_ns - answer.at_ns > self._rules.stale_timeout_ns
        if answer is None or (view.records and is_old):  # nothing is kept of an answer that is old
            cache = self._unreadable.pop(service, None) or self._new_cache(service, now_ns)
        else:
            cache = answer.cache
        self._report(cache.update(view.records, now_ns))
        if cache.shown is None:
            self._unreadable[service] = cache
            raise UnreadableRecords(
                f"none of the records of {service} at {self._registry} can be read; the events "
                "RecordSkipped have the reasons"
            )
        shown = cache.shown.at(now_ns)
        before = Snapshot(service) if answer is None else answer.snapshot
        changed = (shown.instances, shown.stale) != (before.instances, before.stale)
        snapshot = replace(shown, revision=before.revision + changed)
        # Otherwise every name ever asked for would be kept.
        if answer is not None or shown.instances:
            self._answers[service] = _Answer(cache, snapshot, now_ns)
            if self._snapshots is not None:
                self._snapshots.keep(service, snapshot.instances)
        return snapshot

    def _report(self, events: Iterable[object]) -> None:
        """Emit all events but `InstancesChanged`, which is for subscribed services."""
        self._emit(*(event for event in events if not isinstance(event, InstancesChanged)))
