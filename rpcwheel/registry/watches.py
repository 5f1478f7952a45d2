"""The watches of one session: one watch and one directory for each service, for all subscribers.

Watches begin and end on a worker, one after the other, as the backend may be a user's. A watch
goes on by itself whatever happens to its engine. One that can't begin is tried again.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR, SerialExecutor, reset_after_fork
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import RegistryClosed
from rpcwheel.observe import RegistryFailed
from rpcwheel.timer.clock import checked_timer, clock_of

from .cache import Rules, ServiceCache, Shown
from .one_shot_timer import OneShotTimer
from .policy import RegistryPolicy, RegistryRules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rpcwheel.errors import TimerError
    from rpcwheel.instance import ServiceInstance, Snapshot
    from rpcwheel.timer.api import Timer

    from .backend import RegistryBackend, View, Watch
    from .cache import Event
    from .snapshot_file import SnapshotFile

__all__ = ["Listening", "ServiceWatch", "WatchManager"]


S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _Watched:
    """A service from its first subscriber to its last. Never used again."""

    directory: ServiceWatch
    subscribers: set[object] = field(default_factory=set)
    ended: bool = False
    watch: Watch | None = None  # of the worker, as the following
    failures: int = 0
    due_ns: int = NEVER  # when the watch is tried again


class WatchManager:
    """All that one session watches. Thread-safe; nothing here waits for the backend."""

    def __init__(
        self,
        backend: RegistryBackend,
        policy: RegistryPolicy,
        *,
        timer: Timer | None,
        snapshots: SnapshotFile | None,
        saw: Callable[[], object],
        suspected: Callable[[str], object],
        emit: Callable[..., object],
        left: Callable[[Snapshot], object],
    ) -> None:
        """Watch nothing yet.

        Args:
            backend: Is asked to watch, and stays the caller's.
            policy: As the directories take it.
            timer: The same.
            snapshots: The same.
            saw: Called when a watch has seen something, on the backend's threads.
            suspected: Called with the reason when a watch has lost contact, on those too.
            emit: Takes events as arguments; must not block.
            left: Called with the last snapshot of a service that has no subscriber any more.
        """
        self._backend = backend
        self._registry = str(backend.url)
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
        self._alarm = OneShotTimer(self._timer, self._rang, self._refused)
        self._watched: dict[str, _Watched] = {}

    def subscribe(self, service: str, make: Callable[[ServiceWatch], S]) -> S:
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
            ServiceWatch(
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
            watched.watch = self._backend.watch(directory.service, watcher)
        except BaseException as error:  # noqa: BLE001 - a backend of the user's; tried again
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
        except BaseException as error:  # noqa: BLE001 - a backend of the user's
            self._report(error, None)

    def _report(self, error: BaseException, delay_s: float | None) -> None:
        if not self._closed:
            self._emit(RegistryFailed(self._registry, "watch", error, delay_s))


class _Watcher:
    """Hands on what a watch tells. On the backend's threads."""

    def __init__(
        self,
        directory: ServiceWatch,
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


ROWS: Final = 16

"""Rows for the listeners of a service."""

MOST_NEWS: Final = 64

"""Views and doubts by turns that wait; a core that is too slow for them misses some in the middle,
never the first or the last."""

LOAD_S: Final = 0.5

"""Seconds to wait for the file: it is read before anything is heard, but its disk may hang."""


class Listening:
    """A listener that is told of a service, until this is closed."""

    def __init__(self, directory: ServiceWatch, tell: Callable[[Snapshot], object]) -> None:
        """For `Directory.add`."""
        self._directory = directory
        self._tell = tell
        self._waits = False  # a look is in its row already
        self._revision = -1  # of what it was told last
        self._closed = False

    def close(self) -> None:
        """Call it no more; one call may be running. Idempotent; any thread."""
        self._closed = True
        self._directory.remove(self)

    def due(self, row: SerialExecutor) -> None:
        """Have it told of what is shown by then, once for all that comes until then."""
        if not self._waits:
            self._waits = True
            row.submit(self._look)

    def _look(self) -> None:
        self._waits = False  # before looking: what comes after is told by another look
        snapshot = self._directory.snapshot
        if snapshot is None or self._closed or snapshot.revision == self._revision:
            return
        self._revision = snapshot.revision
        run_callback(snapshot.service, self._tell, snapshot, catch=BaseException)


class _Heard(NamedTuple):
    """What the registry has, and what those said last that are gone, where nobody has looked."""

    records: Mapping[str, bytes]
    last_words: Mapping[str, bytes]

    def after(self, void: _Heard) -> _Heard:
        """The same, in the place of one that nobody has looked at."""
        said = {**void.last_words, **void.records}
        return self._replace(
            last_words={key: said[key] for key in said.keys() - self.records.keys()}
        )


class ServiceWatch:
    """One service, as far as it is known. Thread-safe; a `Watcher` for `backend.watch`.

    Close the watch first, then the directory, then the `Snapshots`. A forked child has what was
    known, and hears nothing more, as the backend's threads are not there.
    """

    def __init__(
        self,
        service: str,
        registry: str,
        policy: RegistryPolicy | None = None,
        *,
        timer: Timer | None = None,
        snapshots: SnapshotFile | None = None,
    ) -> None:
        """Begin; nothing is known yet, but perhaps by the file.

        Args:
            service: Its name.
            registry: The registry's name in events: its URL without a password.
            policy: `lease_ttl`, `stale_timeout` and `self_preservation` are heeded here.
            timer: None for `shared_timer()`.
            snapshots: The file that is read now, and kept up to date; it stays the caller's.
        """
        self.service = service
        self._registry = registry
        self._timer = checked_timer(timer)
        self._clock = clock_of(timer)
        self._snapshots = snapshots
        self._seen = ServiceCache(
            registry, service, Rules.of(policy or RegistryPolicy()), self._clock()
        )
        self._shown: Shown | None = None
        self._closed = False
        self._hearing, self._events = SerialExecutor(), NotificationQueue()
        self._rows = tuple(SerialExecutor() for _ in range(ROWS))
        self._turn = itertools.count()
        self._listeners: dict[Listening, SerialExecutor] = {}
        self.reset()
        reset_after_fork(self)
        if snapshots is not None:
            self._hearing.submit(partial(self._load, snapshots))

    def reset(self) -> None:
        """Begin anew in a forked child."""
        self._changed = threading.Condition()
        self._alarm = OneShotTimer(self._timer, self._wake, self._refused)
        self._news: list[_Heard | str] = []  # not looked at yet; no two of a kind in a row

    @property
    def snapshot(self) -> Snapshot | None:
        """What is known, with its age of now; None: nothing yet. Takes no lock."""
        shown = self._shown
        return None if shown is None else shown.at(self._clock())

    def add(self, listener: Callable[[Snapshot], object]) -> Listening:
        """Tell it of what is known, if anything is, and of what will be.

        It is called on a worker, one call at a time, each with all that is known then: of several
        changes it may see only the last. What it raises is an event, `CallbackFailed`.
        """
        listening = Listening(self, listener)
        row = self._rows[next(self._turn) % ROWS]
        with self._changed:
            if not self._closed:
                self._listeners[listening] = row
        if self._shown is not None and not self._closed:
            listening.due(row)
        return listening

    def remove(self, listening: Listening) -> None:
        """Tell it no more; what is not there is no error. `listening.close()` does it."""
        with self._changed:
            self._listeners.pop(listening, None)

    def wait(self, timeout_s: float | None = None) -> Snapshot | None:
        """Wait until something is known, and give it; a file counts once the registry has failed.

        Args:
            timeout_s: Real seconds, at most; None: no limit.

        Returns:
            What is known; None: nothing in time, or closed.
        """
        if timeout_s is not None:
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._shown is not None or self._closed, timeout_s)
        return self.snapshot

    def saw(self, view: View) -> None:
        """Take note of what the registry has now. Never blocks; any thread."""
        self._hear(_Heard(view.records, {}))

    def suspect(self, reason: str) -> None:
        """Take note that the registry has lost contact or memory. Never blocks; any thread."""
        self._hear(reason)

    def close(self) -> None:
        """Call no listener any more, keep no timeout, wake who waits. Idempotent; never blocks.

        What is known is still shown. If the registry agrees with it now, the file is told so.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._alarm.clear()
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listening in listeners:
            listening.close()
        shown = self._shown
        if self._snapshots is not None and shown is not None and shown.since_ns is None:
            self._snapshots.keep(self.service, shown.snapshot.instances)

    # On the workers

    def _load(self, snapshots: SnapshotFile) -> None:
        """Have the file read before anything else is heard, if it can be read soon."""
        done = threading.Event()

        def load() -> None:
            try:
                found = snapshots.load(self.service)
                if found is not None:
                    age_ns = to_ns(found.age_s)
                    remember = partial(self._seen.remember, found.instances, age_ns)
                    self._hearing.submit(partial(self._think, remember), first=True)
            finally:
                done.set()

        EXECUTOR.submit((snapshots, "file"), load)
        done.wait(LOAD_S)

    def _hear(self, what: _Heard | str) -> None:
        """Have it looked at, in the place of what it makes void."""
        with self._changed:
            if self._closed:
                return
            news, waits = self._news, bool(self._news)
            if waits and isinstance(news[-1], str) == isinstance(what, str):
                void = news.pop()
                if isinstance(what, _Heard) and isinstance(void, _Heard):
                    what = what.after(void)
            news.append(what)
            if len(news) > MOST_NEWS:
                self._pass_over(news)
        if not waits:
            self._hearing.submit(self._look)

    @staticmethod
    def _pass_over(news: list[_Heard | str]) -> None:
        """Leave out a doubt and a view, the second of each; the next view has its last words."""
        (void,) = (one for one in news[1:3] if isinstance(one, _Heard))
        del news[1:3]
        place = 1 if isinstance(news[1], _Heard) else 2
        after = news[place]
        if isinstance(after, _Heard):
            news[place] = after.after(void)

    def _look(self) -> None:
        with self._changed:
            news, self._news = self._news, []
        for one in news:
            if isinstance(one, str):
                self._think(partial(self._seen.suspect, one))
            else:
                self._think(partial(self._seen.saw, one.records, last_words=one.last_words))

    def _think(self, what: Callable[[int], list[Event]]) -> None:
        """Tell the core, and show what it makes of it."""
        if self._closed:
            return
        events = what(self._clock())
        before, shown = self._shown, self._seen.shown
        self._shown = shown
        if shown is not None and (before is None or before.snapshot is not shown.snapshot):
            with self._changed:
                listeners = list(self._listeners.items())
                self._changed.notify_all()
            for listening, row in listeners:
                listening.due(row)
            if self._snapshots is not None and shown.snapshot.source != "cache":
                instances = shown.snapshot.instances
                agrees = partial(self._agrees, instances)
                self._snapshots.keep(self.service, instances, agrees)
        if events:
            self._events.emit(*events)
        self._arm(self._seen.next_wake_ns)

    def _arm(self, wake_ns: int) -> None:
        """Have the alarm ring for the core's next wake."""
        with self._changed:
            self._alarm.clear()
            if not self._closed:
                self._alarm.wake(wake_ns)

    def _wake(self) -> None:
        with self._changed:
            self._alarm.rang()
        self._hearing.submit(partial(self._think, self._seen.step))

    def _refused(self, error: TimerError) -> None:
        self._events.emit(RegistryFailed(self._registry, "watch", error, None))

    def _agrees(self, instances: tuple[ServiceInstance, ...]) -> bool | None:
        """Whether the registry still has just these; None: who knows, nobody follows it here."""
        shown = self._shown
        if self._closed or shown is None:
            return None
        return shown.since_ns is None and shown.snapshot.instances is instances
