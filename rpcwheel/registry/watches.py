"""The watches of one session: one watch and one directory for each service, for all subscribers.

Watches begin and end on a worker, one after the other, as the provider may be a user's. A watch
goes on by itself whatever happens to its engine. One that can't begin is tried again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rpcwheel._concurrency.executor import SerialExecutor, reset_after_fork
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import RegistryClosed
from rpcwheel.observe import RegistryFailed

from .alarm import Alarm
from .directory import Directory
from .rules import RegistryRules

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.errors import TimerError
    from rpcwheel.instance import Snapshot
    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .provider import Provider, View, Watch
    from .snapshots import Snapshots

__all__ = ["WatchManager"]

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _Watched:
    """A service from its first subscriber to its last. Never used again."""

    directory: Directory
    subscribers: set[object] = field(default_factory=set)
    ended: bool = False
    watch: Watch | None = None  # of the worker, as the following
    failures: int = 0
    due_ns: int = NEVER  # when the watch is tried again


class WatchManager:
    """All that one session watches. Thread-safe; nothing here waits for the provider."""

    def __init__(
        self,
        provider: Provider,
        policy: RegistryPolicy,
        *,
        timer: Timer | None,
        snapshots: Snapshots | None,
        saw: Callable[[], object],
        suspected: Callable[[str], object],
        emit: Callable[..., object],
        left: Callable[[Snapshot], object],
    ) -> None:
        """Watch nothing yet.

        Args:
            provider: Is asked to watch, and stays the caller's.
            policy: As the directories take it.
            timer: The same.
            snapshots: The same.
            saw: Called when a watch has seen something, on the provider's threads.
            suspected: Called with the reason when a watch has lost contact, on those too.
            emit: Takes events as arguments; must not block.
            left: Called with the last snapshot of a service that has no subscriber any more.
        """
        self._provider = provider
        self._registry = str(provider.url)
        self._policy = policy
        self._rules = RegistryRules.of(policy)
        self._timer = timer
        self._snapshots = snapshots
        self._saw = saw
        self._suspected = suspected
        self._emit = emit
        self._left = left
        self._closed = False
        self._jobs = SerialExecutor()
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin anew in a forked child, where no watch runs."""
        self._lock = threading.RLock()
        self._alarm = Alarm(self._timer, self._rang, self._refused)
        self._watched: dict[str, _Watched] = {}

    def subscribe(self, service: str, make: Callable[[Directory], S]) -> S:
        """Watch a service for what `make` makes of its directory, until `unsubscribe` of that.

        Raises:
            RegistryClosed: After `close`.
        """
        with self._lock:
            if self._closed:
                raise RegistryClosed(f"{self._registry} was closed")
            watched = self._watched.get(service)
            if watched is None:
                watched = self._watched[service] = self._new(service)
            subscriber = make(watched.directory)
            watched.subscribers.add(subscriber)
        self._jobs.start()
        return subscriber

    def unsubscribe(self, service: str, subscriber: object) -> None:
        """Watch a service no more, if this was its last subscriber."""
        with self._lock:
            watched = self._watched.get(service)
            if watched is None:
                return
            watched.subscribers.discard(subscriber)
            if watched.subscribers:
                return
            del self._watched[service]
            self._end(watched)
        known = watched.directory.snapshot
        watched.directory.close()
        if known is not None:
            self._left(known)
        self._jobs.start()

    def known(self, service: str) -> Snapshot | None:
        """What is known of a service that has subscribers."""
        with self._lock:
            watched = self._watched.get(service)
        return None if watched is None else watched.directory.snapshot

    def close(self) -> None:
        """Watch nothing; waits for nothing."""
        with self._lock:
            self._closed = True
            self._alarm.clear()
            ended = list(self._watched.values())
            self._watched.clear()
            for watched in ended:
                self._end(watched)
        for watched in ended:
            watched.directory.close()
        self._jobs.start()

    def _new(self, service: str) -> _Watched:
        watched = _Watched(
            Directory(
                service, self._registry, self._policy, timer=self._timer, snapshots=self._snapshots
            )
        )
        self._jobs.add(partial(self._begin_watch, watched))
        return watched

    def _end(self, watched: _Watched) -> None:
        watched.ended = True
        self._jobs.add(partial(self._end_watch, watched))

    def _refused(self, error: TimerError) -> None:
        self._emit(RegistryFailed(self._registry, "watch", error, 0.0))

    def _rang(self) -> None:
        """On the timer's thread."""
        with self._lock:
            self._alarm.rang()
            now_ns = self._alarm.now_ns()
            for watched in self._watched.values():
                if watched.due_ns <= now_ns:
                    watched.due_ns = NEVER
                    self._jobs.add(partial(self._begin_watch, watched))
            self._alarm.wake(min((one.due_ns for one in self._watched.values()), default=NEVER))
        self._jobs.start()

    # On a worker, one after the other

    def _begin_watch(self, watched: _Watched) -> None:
        if watched.ended:
            return
        directory = watched.directory
        try:
            watcher = _Watcher(directory, self._saw, self._suspected)
            watched.watch = self._provider.watch(directory.service, watcher)
        except BaseException as error:  # noqa: BLE001 - a provider of the user's; tried again
            watched.failures += 1
            delay_ns = self._rules.retry_ns(watched.failures, elapsed_ns=0, error=error)
            with self._lock:
                retried = not watched.ended
                if retried:
                    watched.due_ns = self._alarm.now_ns() + delay_ns
                    self._alarm.wake(watched.due_ns)
            self._report(error, to_seconds(delay_ns) if retried else None)

    def _end_watch(self, watched: _Watched) -> None:
        try:
            if watched.watch is not None:
                watched.watch.close()
        except BaseException as error:  # noqa: BLE001 - a provider of the user's
            self._report(error, None)

    def _report(self, error: BaseException, delay_s: float | None) -> None:
        if not self._closed:
            self._emit(RegistryFailed(self._registry, "watch", error, delay_s))


class _Watcher:
    """Hands on what a watch tells. On the provider's threads."""

    def __init__(
        self,
        directory: Directory,
        saw: Callable[[], object],
        suspected: Callable[[str], object],
    ) -> None:
        self._directory = directory
        self._saw = saw
        self._suspected = suspected

    def saw(self, view: View) -> None:
        self._directory.saw(view)
        self._saw()

    def suspect(self, reason: str) -> None:
        self._directory.suspect(reason)
        self._suspected(reason)
