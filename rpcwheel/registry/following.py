"""The services that are followed: one watch and one directory for each, however many subscribe.

Begins and ends watches on a worker, as `watching.py` says: the provider may be anybody's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.durations import to_seconds
from rpcwheel.errors import RegistryClosed
from rpcwheel.observe import RegistryFailed

from .alarm import Alarm
from .directory import Directory
from .rules import RegistryRules
from .watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.errors import TimerError
    from rpcwheel.instance import Snapshot
    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .provider import Provider, View, Watch
    from .snapshots import Snapshots
    from .watching import Task

__all__ = ["Following"]

S = TypeVar("S")


class Following:
    """All that one session follows. Thread-safe; nothing here waits for the provider."""

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
        """Follow nothing yet.

        Args:
            provider: Is asked to watch, and stays the caller's.
            policy: As the directories take it.
            timer: The same.
            snapshots: The same.
            saw: Called when a watch has seen something, on the provider's threads.
            suspected: Called with the reason when one has lost contact, on those too.
            emit: Takes events as arguments; must not block.
            left: Called with what was known last of a service that nobody follows any more.
        """
        self._provider = provider
        self._registry = str(provider.url)
        self._policy = policy
        self._timer = timer
        self._snapshots = snapshots
        self._saw = saw
        self._suspected = suspected
        self._emit = emit
        self._left = left
        self._closed = False
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin anew in a forked child, where no watch runs."""
        self._lock = threading.RLock()
        self._watching = Watching(RegistryRules.of(self._policy))
        self._alarm = Alarm(self._timer, self._rang, self._refused)
        self._followed: dict[str, tuple[Directory, set[object]]] = {}
        self._working = False

    def follow(self, service: str, make: Callable[[Directory], S]) -> S:
        """Watch a service for what `make` makes of its directory; until `unfollow` of that.

        Raises:
            RegistryClosed: After `close`.
        """
        with self._lock:
            if self._closed:
                raise RegistryClosed(f"{self._registry} was closed")
            if service in self._followed:
                directory, followers = self._followed[service]
            else:
                directory, followers = self._begin(service), set()
            follower = make(directory)
            followers.add(follower)
            self._followed[service] = directory, followers
        self._attend()
        return follower

    def unfollow(self, service: str, follower: object) -> None:
        """Watch it no more, if this was the last one."""
        with self._lock:
            directory, followers = self._followed.get(service, (None, set[object]()))
            followers.discard(follower)
            if directory is None or followers:
                return
            del self._followed[service]
            self._watching.want(service, None, self._alarm.now_ns())
        known = directory.snapshot
        directory.close()
        if known is not None:
            self._left(known)
        self._attend()

    def known(self, service: str) -> Snapshot | None:
        """What is known of a service that is followed."""
        with self._lock:
            directory, _ = self._followed.get(service, (None, None))
        return None if directory is None else directory.snapshot

    def close(self) -> None:
        """Follow nothing; waits for nothing."""
        with self._lock:
            self._closed = True
            self._alarm.clear()
            self._watching.close(self._alarm.now_ns())
            directories = [directory for directory, _ in self._followed.values()]
            self._followed.clear()
        for directory in directories:
            directory.close()
        self._attend()

    def _begin(self, service: str) -> Directory:
        directory = Directory(
            service, self._registry, self._policy, timer=self._timer, snapshots=self._snapshots
        )
        watcher = _Watcher(directory, self._saw, self._suspected)
        self._watching.want(service, watcher, self._alarm.now_ns())
        return directory

    def _refused(self, error: TimerError) -> None:
        self._emit(RegistryFailed(self._registry, "watch", error, 0.0))

    def _rang(self) -> None:
        """On the timer's thread."""
        with self._lock:
            self._alarm.rang()
        self._attend()

    def _attend(self) -> None:
        """Have a worker do what is due."""
        with self._lock:
            if self._working:
                return
            wake_ns = self._watching.next_wake_ns()
            self._working = wake_ns <= self._alarm.now_ns()
            if not self._working:
                self._alarm.wake(wake_ns)
                return
        EXECUTOR.submit(self, self._work)

    def _work(self) -> None:
        """Begin and end watches, one after the other, as long as there is something to do."""
        while True:
            with self._lock:
                task = self._watching.next_task(self._alarm.now_ns())
                self._working = task is not None
            if task is None:
                self._attend()
                return
            self._see_to(task)

    def _see_to(self, task: Task) -> None:
        watch: Watch | None = None
        error: BaseException | None = None
        try:
            if task.watch is not None:
                task.watch.close()
            else:
                watch = self._provider.watch(task.service, task.watcher)
        except BaseException as failure:  # noqa: BLE001 - a provider of the user's; tried again
            error = failure
        delay_ns = 0 if error is None else self._watching.delay_ns(task, error)
        with self._lock:
            now_ns = self._alarm.now_ns()
            waits_ns = self._watching.done(
                task, now_ns, watch=watch, error=error, delay_ns=delay_ns
            )
            delay_s = None if waits_ns is None else to_seconds(waits_ns)
        if error is not None and not self._closed:
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
