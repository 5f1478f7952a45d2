"""Watches for backends that read their engine again at each hint, and periodically.

A hint says that a service may have changed: a ZooKeeper watch has fired, a Redis message has
arrived. Any thread may give one. Every hint leads to a read of the service. The services are read
without a hint too, periodically, as a hint can be lost, and with a growing delay while reads fail.

All reads and all calls of watchers are made by one job at a time on `EXECUTOR`.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.backoff import RANDOM
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import RegistryError, RegistryUnavailable
from rpcwheel.registry.one_shot_timer import OneShotTimer

from .watch_notifier import WatchNotifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.registry.backend import View, Watcher
    from rpcwheel.registry.url import RegistryUrl
    from rpcwheel.timer.api import Timer

FIRST_RETRY_S: Final = 0.2


class PollingWatcher:
    """All watches of one backend. Thread-safe; no method blocks.

    In a forked child it starts without watches.
    """

    def __init__(
        self,
        url: RegistryUrl,
        read: Callable[[str, View | None], View],
        *,
        timer: Timer | None,
        period_s: float,
        retry_s: float,
        full_every: int = 1,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Start no timer and no job.

        Args:
            url: The registry's, for events.
            read: Reads a service from the engine. Gets the view that it returned last, or None if
                everything must be read again. It may return that very view. `View.changed` must be
                relative to that view. May raise RegistryError.
            timer: None for `shared_timer()`, used from the first watch on.
            period_s: Seconds between periodic reads, 10 % more or less.
            retry_s: The longest delay after a failed read; the first is random, up to 0.2 s.
            full_every: Every how many periods `read` gets None. 1: in each.
            check: Called in each period that is not a full one; calls `request_read` for what has
                changed. None: all services are read in each period. May raise RegistryError.
        """
        self._read = read
        self._timer = OneShotTimer(timer, self._timer_expired, str(url))
        self._period_s = period_s
        self._retry_s = retry_s
        self._full_every = full_every
        self._check = check
        self._closed = False
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start without watches, in a forked child."""
        self._lock = threading.Lock()
        self._watches: dict[str, list[WatchNotifier]] = {}
        self._views: dict[str, View] = {}
        self._pending: dict[str, bool] = {}  # services to read, in order; True: in full
        self._failed: set[str] = set()  # services to read at `_retry_ns`
        self._lost_reason: str | None = None  # to report to all watchers, before anything else
        self._check_due = False
        self._running = False
        self._failures = 0
        self._periods = 0
        self._period_ns = self._retry_ns = NEVER

    def watch(self, service: str, watcher: Watcher) -> WatchNotifier:
        """Start a watch. The watcher soon gets a first view."""
        watch = WatchNotifier(watcher, partial(self._remove, service))
        with self._lock:
            if self._closed:
                return watch
            if not self._watches:
                self._schedule_period()
            self._watches.setdefault(service, []).append(watch)
            self._add_pending((service,))
        return watch

    def request_read(self, service: str | None = None, *, full: bool = False) -> None:
        """Read this service soon, if it is watched; None: all that are watched.

        `full`: without the view that was read last.
        """
        with self._lock:
            self._add_pending(self._watches if service is None else (service,), full=full)

    def report_contact_lost(self, reason: str) -> None:
        """Call `on_contact_lost` of all watchers, once until their next view, and read again."""
        with self._lock:
            self._lost_reason = reason
            self._add_pending(self._watches, full=True)

    def close(self) -> None:
        """Close all watches. Idempotent."""
        with self._lock:
            self._closed = True
            watches = self._watches_of(self._watches)
        for watch in watches:
            watch.close()

    @property
    def services(self) -> frozenset[str]:
        """The services that are watched."""
        with self._lock:
            return frozenset(self._watches)

    def due_in_full(self) -> list[str]:
        """Return the services that are read next without a view, in this order."""
        with self._lock:
            return [name for name, full in self._pending.items() if full or name not in self._views]

    # With the lock

    def _watches_of(self, services: Iterable[str]) -> list[WatchNotifier]:
        return [watch for name in services for watch in self._watches.get(name, ())]

    def _add_pending(self, services: Iterable[str], *, full: bool = False) -> None:
        for name in services:
            if name in self._watches:
                self._pending[name] = full or self._pending.get(name, False)
        self._start_job()

    def _start_job(self) -> None:
        if not self._running and not self._closed:
            self._running = True
            EXECUTOR.submit(self, self._run)

    def _schedule_period(self) -> None:
        delay_s = RANDOM.uniform(0.9, 1.1) * self._period_s
        self._period_ns = self._timer.now_ns() + to_ns(delay_s)
        self._timer.wake(self._period_ns)

    # On the timer's thread

    def _timer_expired(self) -> None:
        with self._lock:
            now_ns = self._timer.now_ns()
            if now_ns >= self._retry_ns:
                self._retry_ns = NEVER
                self._add_pending(self._failed, full=True)
                self._failed.clear()
            if now_ns >= self._period_ns:
                self._periods += 1
                full = self._periods % self._full_every == 0
                if full or self._check is None:
                    self._add_pending(self._watches, full=full)
                else:
                    self._check_due = True
                    self._start_job()
                self._schedule_period()
            self._timer.wake(min(self._period_ns, self._retry_ns))

    # On a thread of EXECUTOR

    def _run(self) -> None:
        try:
            while (step := self._next_step()) is not None:
                step()
        except BaseException:
            with self._lock:  # a bug, which EXECUTOR reports; the next hint starts another job
                self._running = False
            raise

    def _next_step(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._closed:
                if self._lost_reason is not None:
                    reason, self._lost_reason = self._lost_reason, None
                    return partial(_notify, self._watches_of(self._watches), reason)
                if self._check_due and self._check is not None:
                    self._check_due = False
                    return partial(self._run_check, self._check)
                for service, full in self._pending.items():
                    del self._pending[service]
                    previous = self._views.pop(service, None)  # back after a read that succeeds
                    return partial(self._read_service, service, None if full else previous)
            self._running = False
            return None

    def _run_check(self, check: Callable[[], object]) -> None:
        try:
            check()
        except RegistryError:
            if not self._failed:
                self.request_read()  # it fails too, and reports it

    def _read_service(self, service: str, previous: View | None) -> None:
        try:
            view = self._read(service, previous)
        except RegistryError as error:
            self._read_failed(service, error)
            return
        with self._lock:
            self._failures = 0
            if self._lost_reason is not None:  # the view may be older than the loss: read again
                return
            watches = self._watches_of((service,))
            if watches:
                self._views[service] = view
        _notify(watches, view)

    def _read_failed(self, service: str, error: RegistryError) -> None:
        with self._lock:
            if isinstance(error, RegistryUnavailable):  # reads of other services would fail too
                self._pending.clear()
                self._views.clear()  # all are read in full, whatever asks for it first
                self._failed.update(self._watches)
            elif service in self._watches:
                self._failed.add(service)
            watches = self._watches_of(self._failed)
            longest_s = min(self._retry_s, FIRST_RETRY_S * 2 ** min(self._failures, 20))
            self._failures += 1
            if self._failed and self._retry_ns == NEVER:
                self._retry_ns = self._timer.now_ns() + to_ns(RANDOM.uniform(0, longest_s))
                self._timer.wake(self._retry_ns)
        _notify(watches, str(error))

    def _remove(self, service: str, watch: WatchNotifier) -> None:
        with self._lock:
            others = [each for each in self._watches.pop(service, ()) if each is not watch]
            if others:
                self._watches[service] = others
            else:
                self._views.pop(service, None)
                self._pending.pop(service, None)
                self._failed.discard(service)
            if not self._watches:
                self._timer.clear()
                self._period_ns = self._retry_ns = NEVER


def _notify(watches: Iterable[WatchNotifier], news: View | str) -> None:
    for watch in watches:
        watch.add(news)
        watch.start()
