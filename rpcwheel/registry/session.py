"""Carries out what `core.py` says: one backend, its requests one at a time, on worker threads.

Both faces stand on this. What a user calls only changes what is wanted, under the lock, and has a
worker (`rpcwheel._concurrency.executor`) look at it; nothing of the backend's or the user's runs
under the lock, on the timer's thread or on a caller's. One timeout waits for the next thing to
come.

`close` withdraws on the worker. If a request hangs there, closing goes on without it (`abandon`):
what could not be withdrawn is gone with the lease, as nobody renews it.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel._concurrency.notifications import FLUSH_TIMEOUT_S, NotificationQueue
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import (
    ConfigurationError,
    NotPublished,
    RegistryClosed,
    RegistryUnavailable,
)
from rpcwheel.instance import Snapshot
from rpcwheel.observe import InstancesChanged, RegistryFailed

from .cache import Rules, ServiceCache
from .one_shot_timer import OneShotTimer
from .policy import RegistryRules
from .reconciler import Reconciler, RegistrationRecord, State, find_id_conflicts
from .watches import WatchManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rpcwheel.errors import TimerError
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.observe import Event
    from rpcwheel.timer.api import Timer

    from .backend import Lost, RegistryBackend
    from .policy import RegistryPolicy
    from .reconciler import Step
    from .snapshot_file import SnapshotFile

    Waiter = tuple[RegistrationRecord, State, Future[bool]]

__all__ = ["Ask", "LookupQueue", "Session", "UnreadableRecords"]


AGAIN_NS: Final = 1_000_000_000

"""After what should not have come about."""


class Session:
    """One backend, and all that is wanted of it. Thread-safe."""

    def __init__(
        self,
        backend: RegistryBackend,
        policy: RegistryPolicy,
        *,
        timer: Timer | None = None,
        snapshots: SnapshotFile | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name = str(backend.url)
        self.rules = RegistryRules.of(policy)
        self._backend = backend
        self._snapshots = snapshots
        self._core = Reconciler(self.name, self.rules, chance)
        self._alarm = OneShotTimer(timer, self._rang, self._refused)
        self._notifications = NotificationQueue()
        self.emit = self._notifications.emit
        self._asking = LookupQueue(backend, policy, snapshots, self._alarm.now_ns, self.emit)
        self.watches = WatchManager(
            backend,
            policy,
            timer=timer,
            snapshots=snapshots,
            saw=self._saw,
            suspected=self._suspected,
            emit=self.emit,
            left=self._asking.remember,
        )
        self._closed = False
        self._begin()
        reset_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._waiters: list[Waiter] = []
        self._working = False  # a worker makes requests
        self._asked = False  # the last one was a user's
        self._finished = False
        self._over: Future[bool] = Future()

    def reset(self) -> None:
        """Be closed, in a forked child: the lease and the sockets are the parent's."""
        self._begin()
        self._alarm.rang()
        self._closed = self._finished = True
        self._core.give_up()
        self._over.set_result(True)

    # --- What is wanted ---

    @property
    def up(self) -> bool:
        """Whether the engine answers, as far as is known."""
        return self._core.contact.up

    @property
    def error(self) -> BaseException | None:
        """Of the last request, if it has failed."""
        return self._core.contact.error

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise `RegistryClosed` if it was closed."""
        if self._closed:
            raise RegistryClosed(f"{self.name} was closed, or opened before a fork; open another")

    def check_writable(self) -> None:
        """Raise `ConfigurationError` if nothing can be published in this registry."""
        if self._backend.read_only:
            raise ConfigurationError(
                f"{self.name} is for reading only: its instances are published by other means, "
                "such as pods by Kubernetes; to publish, give another registry"
            )

    def refresh(self, service: str) -> None:
        """Have the backend look again at a service that is watched. Never blocks; any thread."""
        if not self._closed:
            self._backend.refresh(service)

    def entries(self) -> tuple[RegistrationRecord, ...]:
        """What is registered, or not withdrawn yet."""
        with self._lock:
            return self._core.entries()

    def want(self, instance: ServiceInstance, *, hasty: bool) -> RegistrationRecord:
        """Have it published; `hasty`: somebody waits for it."""
        self.check_writable()
        with self._changing(hasty=hasty) as now_ns:
            self.check_open()
            return self._core.want(instance, now_ns)

    def change(self, entry: RegistrationRecord, changes: dict[str, object]) -> None:
        """Have it published with other values."""
        with self._changing() as now_ns:
            self.check_open()
            if not entry.wanted:
                service, name = entry.instance.key
                raise NotPublished(f"{service}/{name} was unregistered; register it again")
            self._core.want(entry.instance.changed(**changes), now_ns)

    def drop(
        self, what: ServiceInstance | RegistrationRecord, *, hasty: bool
    ) -> RegistrationRecord:
        """Have it published no more."""
        self.check_writable()
        with self._changing(hasty=hasty) as now_ns:
            if isinstance(what, RegistrationRecord) and not what.wanted:
                return what
            self.check_open()
            return self._core.drop(what, now_ns)

    def when(self, entry: RegistrationRecord, state: State) -> Future[bool]:
        """Tell when it is published, or gone; False: that is not wanted any more, or all is over.

        Whoever waits no longer cancels it. Its callbacks run on a worker, or at once.
        """
        future: Future[bool] = Future()
        with self._changing():
            self._waiters.append((entry, state, future))
        return future

    # --- What is asked ---

    def look_up(self, service: str) -> Future[Snapshot]:
        """Ask the engine for the instances of a service; not to be cancelled, it may be shared."""
        with self._changing():
            self.check_open()
            return self._asking.ask(service)

    def services(self) -> Future[tuple[str, ...]]:
        """Ask the engine for the names of all services; not to be cancelled."""
        with self._changing():
            self.check_open()
            return self._asking.ask(None)

    def last(self, service: str, error: BaseException) -> Snapshot:
        """What was said last, as the engine could not be asked now; may read a file.

        Raises:
            BaseException: The error that is given; nothing is known.
        """
        snapshot = self._asking.last(service)
        if snapshot is not None:
            return snapshot
        raise error

    # --- The end ---

    def close(self) -> Future[bool]:
        """Withdraw everything, and end. Whoever does not wait any longer calls `abandon`."""
        with self._changing() as now_ns:
            if self._closed:
                return self._over
            self._closed = True
            self._alarm.clear()
            self._core.close(now_ns)
            self._asking.refuse(RegistryClosed(f"{self.name} was closed"))
        self.watches.close()
        return self._over

    def abandon(self) -> None:
        """The time to close is over: end all that can be ended beside a request that hangs."""
        EXECUTOR.submit((self, "end"), self._finish)

    def _finish(self) -> None:
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self._core.give_up()
        self._attempt(self._backend.close)
        if self._snapshots is not None:
            self._attempt(self._snapshots.close)
        self._attend()
        self._notifications.wait(FLUSH_TIMEOUT_S)
        _answer([(self._over, True)])

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a backend of the user's; the end must come
            self.emit(RegistryFailed(self.name, "close", error, None))

    # --- The clock ---

    @contextmanager
    def _changing(self, *, hasty: bool = False) -> Iterator[int]:
        """Hold the lock; then have done what is due, and answer those who waited for it."""
        with self._lock:
            yield self._alarm.now_ns()
            if hasty:
                self._core.contact.hasten()
        self._attend()

    def _attend(self) -> None:
        """Have a worker do what is due, or the timer wake us for it."""
        with self._lock:
            settled = self._take_settled()
            wake_ns = 0 if self._closed or self._asking else self._core.next_wake_ns()
            starts = False
            if not self._working and not self._finished:
                starts = self._working = wake_ns <= self._alarm.now_ns()
                if not starts:
                    self._alarm.wake(wake_ns)
        if starts:
            EXECUTOR.submit(self, self._work)
        _answer(settled)

    def _take_settled(self) -> list[tuple[Future[bool], bool]]:
        """Who waits no more, and what to tell them."""
        kept: list[Waiter] = []
        settled: list[tuple[Future[bool], bool]] = []
        for waiter in self._waiters:
            entry, state, future = waiter
            if entry.state is state:
                settled.append((future, True))
            elif entry.wanted is not (state is State.PUBLISHED) or self._finished:
                settled.append((future, False))
            elif not future.done():
                kept.append(waiter)
        self._waiters = kept
        return settled

    def _rang(self) -> None:
        """On the timer's thread."""
        with self._lock:
            self._alarm.rang()
        self._attend()

    def _refused(self, error: TimerError) -> None:
        self.emit(RegistryFailed(self.name, "renew", error, 0.0))

    # --- The worker ---

    def _work(self) -> None:
        """Make requests, one after the other, as long as there are any."""
        try:
            self._work_on()
        except BaseException:  # the pool tells it; renewals must go on
            with self._lock:
                self._working = False
                self._alarm.wake(self._alarm.now_ns() + AGAIN_NS)
            raise

    def _work_on(self) -> None:
        while True:
            with self._lock:
                step, ask = self._take()
                idle = ask is None and step is None
                ends = idle and self._closed
                self._working = not idle or ends
            if ask is not None:
                self._heard(self._asking.carry_out(ask))
            elif step is not None:
                self._make(step)
            elif ends:
                self._finish()
            self._attend()
            if idle:
                return

    def _take(self) -> tuple[Step | None, Ask | None]:
        """What is next: by turns, so that neither questions nor renewals wait for the others."""
        now_ns = self._alarm.now_ns()
        step = self._core.next_step(now_ns) if self._asked else None
        ask = self._asking.take() if step is None else None
        if step is None and ask is None:
            step = self._core.next_step(now_ns)
        self._asked = ask is not None
        return step, ask

    def _make(self, step: Step) -> None:
        error: BaseException | None = None
        lost: Mapping[tuple[str, str], Lost] = {}
        try:
            match step.request:
                case "publish":
                    self._backend.publish(step.instances)
                case "withdraw":
                    self._backend.withdraw(step.instances)
                case "renew":
                    lost = dict(self._backend.renew(step.instances))
                    if lost:
                        lost = find_id_conflicts(
                            self._backend, (entry for entry, _ in step.batch), lost
                        )
        except BaseException as failure:  # noqa: BLE001 - a backend of the user's; tried again
            error = failure
        now_ns = self._alarm.now_ns()
        delay_ns = 0 if error is None else self._core.delay_ns(step, now_ns, error)
        with self._lock:
            now_ns = self._alarm.now_ns()
            told = self._core.done(step, now_ns, error=error, delay_ns=delay_ns, lost=lost)
        self.emit(*told)
        if error is not None:
            error.__traceback__ = None  # it may be kept for long

    def _heard(self, error: BaseException | None) -> None:
        """A user's question was answered, or not."""
        told: Iterable[Event] = ()
        with self._lock:
            now_ns = self._alarm.now_ns()
            if error is None or isinstance(error, UnreadableRecords):
                told = self._core.contact.heard(now_ns)
            elif isinstance(error, RegistryUnavailable):
                self._core.contact.lost(now_ns)
        self.emit(*told)

    # --- What a watch tells of the engine ---

    def _saw(self) -> None:
        """It is there. On the backend's threads."""
        if self._core.contact.up:
            return
        with self._lock:
            told = self._core.contact.seen(self._alarm.now_ns())
        self.emit(*told)

    def _suspected(self, reason: str) -> None:
        """Contact, or its memory, was lost. On the backend's threads."""
        with self._lock:
            if self._closed or self._core.contact.since_ns is not None:
                return
            self._core.contact.lost(self._alarm.now_ns())
        self.emit(RegistryFailed(self.name, "watch", RegistryUnavailable(reason), 0.0))


def _answer(settled: Iterable[tuple[Future[bool], bool]]) -> None:
    for future, value in settled:
        if future.set_running_or_notify_cancel():
            future.set_result(value)


class UnreadableRecords(RegistryUnavailable):
    """The engine answers, with nothing that can be read: that is not an empty list."""


class Ask(NamedTuple):
    """One question."""

    service: str | None
    """None: for the names of all services."""
    answer: Future[Any]


class _Known(NamedTuple):
    """What was heard of a service, when last."""

    seen: ServiceCache
    snapshot: Snapshot
    at_ns: int


class LookupQueue:
    """The questions of one session. Those who ask hold its lock; `carry_out` comes without."""

    def __init__(
        self,
        backend: RegistryBackend,
        policy: RegistryPolicy,
        snapshots: SnapshotFile | None,
        now_ns: Callable[[], int],
        emit: Callable[..., object],
    ) -> None:
        self._backend = backend
        self._registry = str(backend.url)
        self._rules = Rules.of(policy)
        self._emit = emit
        self._snapshots = snapshots
        self._now_ns = now_ns
        self._waiting: dict[str | None, Ask] = {}
        self._known: dict[str, _Known] = {}
        self._mute: dict[str, ServiceCache] = {}
        """Services none of whose records could be read, which is told of each once."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def ask(self, service: str | None) -> Future[Any]:
        """Wait for the answer of the engine; the future may be another's too."""
        ask = self._waiting.get(service)
        if ask is None:
            ask = self._waiting[service] = Ask(service, Future())
        return ask.answer

    def take(self) -> Ask | None:
        """The oldest question, which is then to be carried out."""
        if not self._waiting:
            return None
        return self._waiting.pop(next(iter(self._waiting)))

    def carry_out(self, ask: Ask) -> BaseException | None:
        """Ask the engine, and answer; gives the error, if it is one."""
        try:
            answer = self._services() if ask.service is None else self._look_up(ask.service)
        except BaseException as error:  # noqa: BLE001 - it goes to whoever asks
            if not isinstance(error, RegistryClosed):  # by its user: no failure
                self._emit(RegistryFailed(self._registry, "lookup", error, None))
            ask.answer.set_exception(error)
            return error
        ask.answer.set_result(answer)
        return None

    def refuse(self, error: BaseException) -> None:
        """Answer all that wait in this way."""
        while ask := self.take():
            ask.answer.set_exception(error)

    def last(self, service: str) -> Snapshot | None:
        """What was heard last, now or by an earlier run; None: nothing. May read a file."""
        known = self._known.get(service)
        if known is not None:
            age_s = to_seconds(max(0, self._now_ns() - known.at_ns))
            return replace(known.snapshot, source="cache", age_s=age_s)
        return None if self._snapshots is None else self._snapshots.load(service)

    def remember(self, snapshot: Snapshot) -> None:
        """Take over what was known of a service by other means. Any thread."""
        now_ns, age_ns = self._now_ns(), to_ns(snapshot.age_s)
        if snapshot.instances:
            seen = self._new_seen(snapshot.service, now_ns)
            seen.remember(snapshot.instances, age_ns, now_ns)
            self._known[snapshot.service] = _Known(seen, snapshot, now_ns - age_ns)

    def _services(self) -> tuple[str, ...]:
        return tuple(self._backend.services())

    def _new_seen(self, service: str, now_ns: int) -> ServiceCache:
        return ServiceCache(self._registry, service, self._rules, now_ns)

    def _look_up(self, service: str) -> Snapshot:
        try:
            view = self._backend.lookup(service)
        except BaseException as error:
            known = self._known.get(service)
            if known is not None:
                self._say(known.seen.suspect(str(error), self._now_ns()))
            raise
        now_ns = self._now_ns()
        known = self._known.get(service)
        if known is None or (view.records and now_ns - known.at_ns > self._rules.hold_ns):
            # What was so long ago says nothing of now.
            seen = self._mute.pop(service, None) or self._new_seen(service, now_ns)
        else:
            seen = known.seen
        self._say(seen.saw(view.records, now_ns))
        return self._noted(service, seen, now_ns)

    def _noted(self, service: str, seen: ServiceCache, now_ns: int) -> Snapshot:
        if seen.shown is None:
            self._mute[service] = seen
            raise UnreadableRecords(
                f"none of the records of {service} at {self._registry} can be read; RecordSkipped "
                "tells why"
            )
        known = self._known.get(service)
        shown = seen.shown.at(now_ns)
        before = Snapshot(service) if known is None else known.snapshot
        changed = (shown.instances, shown.stale) != (before.instances, before.stale)
        snapshot = replace(shown, revision=before.revision + changed)
        if known is not None or shown.instances:  # names that are made up would be kept for ever
            self._known[service] = _Known(seen, snapshot, now_ns)
            if self._snapshots is not None:
                self._snapshots.keep(service, snapshot.instances)
        return snapshot

    def _say(self, events: Iterable[object]) -> None:
        """Emit all but changes: nobody follows a service that is looked up."""
        self._emit(*(one for one in events if not isinstance(one, InstancesChanged)))
