"""Makes the requests that the reconciler decides on: one at a time, on worker threads.

A call of a user only changes the desired state, under the lock, and starts a worker
(`rpcwheel._concurrency.executor`). Code of the backend or the user never runs under the lock, on
the timer's thread or on a caller's thread. One timeout is set for the next request that is due.

`close` withdraws everything on the worker. If a request hangs there, closing goes on without it
(`abandon`): what could not be withdrawn ends with the lease, because it is not renewed any more.

One-shot lookups (`lookups.py`) take turns with the other requests.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel._concurrency.notifications import FLUSH_TIMEOUT_S, NotificationQueue
from rpcwheel.durations import to_seconds
from rpcwheel.errors import (
    NotPublished,
    RegistryClosed,
    RegistryError,
    RegistryUnavailable,
    time_text,
)
from rpcwheel.events import RegistryFailed
from rpcwheel.events.log import status_text
from rpcwheel.instance import ServiceInstance
from rpcwheel.telemetry import components

from .backend import check_writable
from .lookups import LookupQueue, UnreadableRecords
from .one_shot_timer import OneShotTimer
from .policy import RegistryRules
from .reconciler import Reconciler, RegistrationRecord, RegistrationState
from .watches import ServiceWatch, WatchManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rpcwheel.events import Event
    from rpcwheel.timer.api import Timer

    from .backend import Lost, RegistryBackend
    from .lookups import Lookup
    from .policy import RegistryPolicy
    from .reconciler import Request
    from .snapshot_files import SnapshotFiles

    Waiter = tuple[RegistrationRecord, RegistrationState, Future[bool]]
    """A caller that waits until a registration is in a state, and the future of the result."""

BUG_RETRY_NS: Final = 1_000_000_000
"""The wait before the worker runs again after an exception of rpcwheel's own code."""


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """An instance that is published in a registry."""

    service: str
    id: str
    address: str
    state: str
    lease_age_s: float | None
    """Seconds since the registry last confirmed it; None: never."""
    error: str
    problem: str


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """A service that is followed in a registry."""

    service: str
    instances: int
    source: str
    """`"live"`, `"stale"`, `"cache"`, or "" if nothing is known yet."""
    stale_s: float
    """The time for which the registry has not confirmed the instances."""
    problem: str

    @property
    def source_or_none(self) -> str:
        """The source, or `"none"`."""
        return self.source or "none"

    @property
    def unconfirmed_s(self) -> float:
        """`stale_s`, or 0 while the registry confirms the instances."""
        return 0.0 if self.source == "live" else self.stale_s


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    """A registry."""

    url: str
    """The URL without the password."""
    up: bool
    lease_ttl_s: float
    error: str
    """The error of the last request, if it failed."""
    registrations: tuple[RegistrationStatus, ...]
    subscriptions: tuple[SubscriptionStatus, ...]
    problem: str


class RegistrySession:
    """One backend, and all that is registered and watched there. Thread-safe."""

    def __init__(
        self,
        backend: RegistryBackend,
        policy: RegistryPolicy,
        *,
        timer: Timer | None = None,
        snapshots: SnapshotFiles | None = None,
    ) -> None:
        self.name = str(backend.url)
        self.url = backend.url
        self.rules = RegistryRules.from_policy(policy)
        self._backend = backend
        self._snapshots = snapshots
        self._reconciler = Reconciler(self.name, self.rules)
        self.health = self._reconciler.health
        self._timer = OneShotTimer(timer, self._schedule, self.name, "renew")
        self._notifications = NotificationQueue()
        self.emit = self._notifications.emit
        self.lookups = LookupQueue(backend, self.rules, snapshots, self._timer.now_ns, self.emit)
        self.watches = WatchManager(
            backend,
            self.rules,
            timer=timer,
            snapshots=snapshots,
            on_answer=self._backend_answered,
            on_loss=self._contact_lost,
            emit=self.emit,
            on_unused=self.lookups.remember,
        )
        self.closed = False
        self.now_ns = self._timer.now_ns
        """The clock of all times of this session."""
        self._init_state()
        reset_after_fork(self)
        components.add("registry", self)

    def _init_state(self) -> None:
        self._lock = threading.RLock()
        self._waiters: list[Waiter] = []
        self._working = False  # a worker makes requests
        self._was_lookup = False  # the last request was a lookup
        self._finished = False  # `_finish` has begun; no request follows
        self._ended: Future[bool] = Future()

    def reset(self) -> None:
        """Close the session in a forked child: the lease and the sockets are the parent's."""
        self._init_state()
        self.closed = self._finished = True
        self._reconciler.give_up()
        self._ended.set_result(True)

    # Registrations

    def check_open(self) -> None:
        """Raise `RegistryClosed` if the session was closed."""
        if self.closed:
            raise RegistryClosed(f"{self.name} was closed, or opened before a fork; open another")

    def check_writable(self) -> None:
        """Raise `ConfigurationError` if nothing can be published in this registry."""
        check_writable(self._backend, self.name)

    def refresh(self, service: str) -> None:
        """Have the backend read a watched service again. Never blocks; any thread."""
        if not self.closed:
            self._backend.refresh(service)

    def records(self) -> tuple[RegistrationRecord, ...]:
        """Return the registrations, also unregistered ones until the registry has removed them."""
        with self._lock:
            return self._reconciler.records()

    def status(self) -> RegistryStatus | None:
        """Describe the registry, and all that is registered and followed there; None if closed."""
        if self.closed:
            return None
        now_ns, lease_s = self.now_ns(), to_seconds(self.rules.lease_ns)
        registrations = [_registration(record, now_ns, lease_s) for record in self.records()]
        watches = [_subscription(watch) for watch in self.watches.watches()]
        error = status_text(self.health.error)
        down = self.health.since_ns is not None
        return RegistryStatus(
            self.name,
            self.health.up,
            lease_s,
            error,
            tuple(sorted(registrations, key=lambda row: (row.service, row.id))),
            tuple(sorted(watches, key=lambda row: row.service)),
            (error or "it does not answer") if down else "",
        )

    def set_desired(self, instance: ServiceInstance, *, flush_now: bool) -> RegistrationRecord:
        """Publish an instance, or change it.

        `flush_now`: shorten the pause after a failure, because a caller waits.
        """
        self.check_writable()
        with self._changing(flush_now=flush_now) as now_ns:
            self.check_open()
            self._timer.start()
            return self._reconciler.set_desired(instance, now_ns)

    def change(self, record: RegistrationRecord, changes: dict[str, object]) -> None:
        """Publish the instance of a registration with other values."""
        with self._changing() as now_ns:
            self.check_open()
            if not record.wanted:
                service, name = record.instance.key
                raise NotPublished(f"{service}/{name} was unregistered; register it again")
            before = record.instance
            # By default, the epoch of a copy is that of this process; after a fork it is another.
            changed = before.replace(**{"epoch": before.epoch} | changes)
            self._reconciler.set_desired(changed, now_ns)

    def remove(
        self, target: ServiceInstance | RegistrationRecord, *, flush_now: bool
    ) -> RegistrationRecord:
        """Withdraw an instance; `flush_now` as in `set_desired`."""
        self.check_writable()
        with self._changing(flush_now=flush_now) as now_ns:
            if isinstance(target, RegistrationRecord) and not target.wanted:
                return target
            self.check_open()
            self._timer.start()
            return self._reconciler.remove(target, now_ns)

    def when(self, record: RegistrationRecord, state: RegistrationState) -> Future[bool]:
        """Return a future: True when `record` is in `state`, False if that can't happen any more.

        The state is PUBLISHED or GONE. A caller that stops waiting cancels the future. Callbacks
        run on a worker, or at once.
        """
        future: Future[bool] = Future()
        with self._changing():
            self._waiters.append((record, state, future))
        return future

    # Lookups

    def look_up(self, service: str | None) -> Future[Any]:
        """Ask for the `Snapshot` of a service, or with None for the names of all services.

        Not to be canceled: the future may be shared.
        """
        with self._changing():
            self.check_open()
            return self.lookups.add(service)

    # The end

    def close(self) -> Future[bool]:
        """Withdraw everything, and end.

        Returns:
            A future: True when that is done. A caller that stops waiting for it calls `abandon`.
        """
        self.watches.close()  # before a worker may see `closed`, and close the snapshot files
        with self._changing() as now_ns:
            if self.closed:
                return self._ended
            self.closed = True
            self._timer.clear()
            self._reconciler.close(now_ns)
            self.lookups.refuse(RegistryClosed(f"{self.name} was closed"))
            has_records = bool(self._reconciler.records())
        if not has_records:
            self.abandon()  # only a lookup can be under way, whose answer nobody needs
        return self._ended

    def abandon(self) -> None:
        """End without the result of the request that is under way, which may hang."""
        EXECUTOR.submit((self, "end"), self._finish)

    def _finish(self) -> None:
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self._reconciler.give_up()
        self._call_close(self._backend.close)
        if self._snapshots is not None:
            self._call_close(self._snapshots.close)
        self._schedule()  # sets the results of the waiters
        self._notifications.wait(FLUSH_TIMEOUT_S)
        _set_results([(self._ended, True)])

    def _call_close(self, close: Callable[[], object]) -> None:
        try:
            close()
        except BaseException as error:  # noqa: BLE001 - a backend of the user's; the end must come
            self.emit(RegistryFailed(self.name, "close", error, None))

    # When a worker runs

    @contextmanager
    def _changing(self, *, flush_now: bool = False) -> Iterator[int]:
        """Hold the lock, and call `_schedule` after that."""
        with self._lock:
            yield self._timer.now_ns()
            if flush_now:
                self.health.shorten_pause()
        self._schedule()

    def _schedule(self) -> None:
        """Start a worker if a request is due, else set the timeout; set the results of waiters.

        While a worker runs, only the results are set.
        """
        with self._lock:
            settled = self._take_settled()
            wake_ns = 0 if self.closed or self.lookups else self._reconciler.next_wake_ns()
            starts = False
            if not self._working and not self._finished:
                starts = self._working = wake_ns <= self._timer.now_ns()
                if not starts:
                    self._timer.wake(wake_ns)
        if starts:
            EXECUTOR.submit(self, self._work)
        _set_results(settled)

    def _take_settled(self) -> list[tuple[Future[bool], bool]]:
        """Take the waiters whose wait is over, and their results."""
        kept: list[Waiter] = []
        settled: list[tuple[Future[bool], bool]] = []
        for waiter in self._waiters:
            record, state, future = waiter
            final_state = RegistrationState.PUBLISHED if record.wanted else RegistrationState.GONE
            if record.state is state:
                settled.append((future, True))
            elif state is not final_state or self._finished:
                settled.append((future, False))
            elif not future.done():
                kept.append(waiter)
        self._waiters = kept
        return settled

    # On the worker

    def _work(self) -> None:
        """Make requests, one after the other, as long as there are any."""
        try:
            while self._make_next_request():
                self._schedule()
            self._schedule()
        except BaseException:  # reported by the executor; renewals continue
            with self._lock:
                self._working = False
                self._timer.wake(self._timer.now_ns() + BUG_RETRY_NS)
            raise

    def _make_next_request(self) -> bool:
        """Make the next request; False if there was none, and the worker's run is over."""
        with self._lock:
            request, lookup = self._take_next()
            idle = lookup is None and request is None
            ends = idle and self.closed
            self._working = not idle or ends
        if lookup is not None:
            self._note_lookup(self.lookups.carry_out(lookup))
            del lookup  # else a cycle: its error, the traceback, and this frame
        elif request is not None:
            self._send(request)
        elif ends:
            self._finish()
        return not idle

    def _take_next(self) -> tuple[Request | None, Lookup | None]:
        """Take the next request: by turns, so that neither lookups nor renewals starve."""
        now_ns = self._timer.now_ns()
        request = self._reconciler.next_request(now_ns) if self._was_lookup else None
        lookup = self.lookups.take() if request is None else None
        if request is None and lookup is None:
            request = self._reconciler.next_request(now_ns)
        self._was_lookup = lookup is not None
        return request, lookup

    def _send(self, request: Request) -> None:
        error: BaseException | None = None
        lost: Mapping[tuple[str, str], Lost] = {}
        try:
            match request.kind:
                case "publish":
                    self._backend.publish(request.instances)
                case "withdraw":
                    self._backend.withdraw(request.instances)
                case "renew":
                    lost = dict(self._backend.renew(request.instances))
                    if lost:
                        records = (record for record, _ in request.batch)
                        lost = _with_conflicts(self._backend, records, lost)
        except BaseException as failure:  # noqa: BLE001 - a backend of the user's; tried again
            error = failure
        now_ns = self._timer.now_ns()
        delay_ns = 0  # computed without the lock, because it may call the user's backoff
        if error is not None:
            delay_ns = self._reconciler.delay_ns(request, now_ns, error)
        with self._lock:
            now_ns = self._timer.now_ns()
            events = self._reconciler.done(
                request, now_ns, error=error, delay_ns=delay_ns, lost=lost
            )
        self.emit(*events)
        if error is not None:
            error.__traceback__ = None  # it may be kept for long

    def _note_lookup(self, error: BaseException | None) -> None:
        """Update the registry's health by the result of a lookup."""
        events: Iterable[Event] = ()
        with self._lock:
            now_ns = self._timer.now_ns()
            if error is None or isinstance(error, UnreadableRecords):
                events = self.health.request_succeeded(now_ns)
            elif isinstance(error, RegistryUnavailable):
                self.health.contact_lost(now_ns)
        self.emit(*events)

    # On the backend's threads

    def _backend_answered(self) -> None:
        """Note that a watch got a view from the registry."""
        if self.health.up:
            return
        with self._lock:
            events = self.health.answered(self._timer.now_ns())
        self.emit(*events)

    def _contact_lost(self, reason: str) -> None:
        """Note that a watch has lost contact, or the registry its data."""
        with self._lock:
            if self.closed or self.health.since_ns is not None:
                return
            self.health.contact_lost(self._timer.now_ns())
        self.emit(RegistryFailed(self.name, "watch", RegistryUnavailable(reason), 0.0))


def _set_results(settled: Iterable[tuple[Future[bool], bool]]) -> None:
    for future, value in settled:
        if future.set_running_or_notify_cancel():
            future.set_result(value)


def _with_conflicts(
    backend: RegistryBackend,
    records: Iterable[RegistrationRecord],
    lost: Mapping[tuple[str, str], Lost],
) -> Mapping[tuple[str, str], Lost]:
    """Return why instances were lost, with "taken" and "changed" for those that are still there.

    Reads each service of which something is missing; it may block.
    """
    missing = [record for record in records if lost.get(record.instance.key) == "missing"]
    conflicts: dict[tuple[str, str], Lost] = {}
    for service in {record.instance.service for record in missing}:
        try:
            records_by_id = backend.lookup(service).records
        except RegistryUnavailable:
            break  # unknown, and each further lookup could take as long
        except RegistryError:
            continue  # unknown
        for record in missing:
            other = _decode(records_by_id.get(record.instance.id))
            if record.instance.service != service or other is None:
                continue
            if other.epoch == record.instance.epoch:
                conflicts[record.instance.key] = "changed"
            elif not record.may_be(other):
                conflicts[record.instance.key] = "taken"
    return {**lost, **conflicts}


def _decode(data: bytes | None) -> ServiceInstance | None:
    """Return the instance of a record; None: there is no record, or it can't be read."""
    try:
        return None if data is None else ServiceInstance.decoded(data)
    except ValueError:
        return None


def _registration(record: RegistrationRecord, now_ns: int, lease_s: float) -> RegistrationStatus:
    state, error, seen_ns = str(record.state), status_text(record.error), record.seen_ns
    age_s = None if seen_ns is None else max(0, now_ns - seen_ns) / 1e9
    problem = error
    if not problem and state == "LOST":
        problem = "the registry has lost it"
    elif not problem and state == "PUBLISHED" and age_s is not None and age_s > lease_s:
        problem = "its lease has run out"
    instance = record.instance
    return RegistrationStatus(
        instance.service, instance.id, instance.address, state, age_s, error, problem
    )


def _subscription(watch: ServiceWatch) -> SubscriptionStatus:
    snapshot = watch.snapshot
    if snapshot is None:
        return SubscriptionStatus(watch.service, 0, "", 0.0, "nothing is known of it")
    problem = ""
    if snapshot.source != "live":
        problem = f"not confirmed by the registry for {time_text(snapshot.age_s)}"
    return SubscriptionStatus(
        watch.service, len(snapshot.instances), snapshot.source, snapshot.age_s, problem
    )
