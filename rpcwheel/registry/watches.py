"""The watches of one session: one `ServiceWatch` for each service, for all its subscribers.

Views and losses of contact are applied to the cache on the backend's threads. That takes 0.1 ms for
a change among 2,000 instances, and 30 to 50 us for each record that is new. User code runs on the
shared workers, in separate queues:

* events (`_events`), because a sink that hangs must not delay updates;
* listeners, in `LISTENER_QUEUES` queues: one that hangs delays no other as long as there are fewer
  listeners than queues, and a thousand of them don't start a thousand threads.

Users see one immutable object that is replaced as a whole, so that reading it takes no lock.

The backend's watches are begun and closed on a worker, one after the other, because the backend may
be a user's and may block. A watch that can't begin is tried again. Once begun, it is the backend's
task to keep it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR, SerialExecutor, reset_after_fork
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import RegistryClosed
from rpcwheel.events import RegistryFailed, emit
from rpcwheel.timer.manual import clock_of

from .cache import ServiceCache, TimedSnapshot
from .one_shot_timer import OneShotTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.instance import ServiceInstance, Snapshot
    from rpcwheel.timer.api import Timer

    from .backend import RegistryBackend, View, Watch
    from .cache import CacheEvent
    from .policy import RegistryRules
    from .snapshot_files import SnapshotFiles

LISTENER_QUEUES: Final = 16
"""The largest number of executors that call the listeners of a service."""

FILE_TIMEOUT_S: Final = 0.5
"""The longest wait for the snapshot file, which is read first. Its disk may hang."""


class Listener:
    """A user's function that is called with snapshots until this is closed."""

    def __init__(self, watch: ServiceWatch, function: Callable[[Snapshot], object]) -> None:
        """Create a listener, which `ServiceWatch.add_listener` adds to its watch."""
        self._watch = watch
        self._function = function
        self._pending = False
        self._revision = -1  # of the last snapshot that it got
        self._closed = False

    def close(self) -> None:
        """Call it no more; one call may be running. Idempotent; any thread."""
        self._closed = True
        self._watch.remove_listener(self)

    def notify(self, queue: SerialExecutor) -> None:
        """Call it soon with the latest snapshot; several notifications may give one call."""
        if not self._pending:
            self._pending = True
            queue.submit(self._call)

    def _call(self) -> None:
        self._pending = False  # first: a change from now on needs another call
        snapshot = self._watch.snapshot
        if snapshot is None or self._closed or snapshot.revision == self._revision:
            return
        self._revision = snapshot.revision
        run_callback(snapshot.service, self._function, snapshot, catch=BaseException)


class ServiceWatch:
    """The known instances of one service. Thread-safe; the `Watcher` that the backend notifies.

    Close the backend's watch first, then this, then the snapshot files. A forked child has what was
    known and gets no updates, because the backend's threads are not there.
    """

    def __init__(
        self,
        service: str,
        registry: str,
        rules: RegistryRules,
        *,
        timer: Timer | None,
        snapshots: SnapshotFiles | None,
        on_answer: Callable[[], object],
        on_loss: Callable[[str], object],
    ) -> None:
        """Start without instances; nothing is known yet, except perhaps by the file.

        Args:
            service: Its name.
            registry: The registry's name in events: its URL without a password.
            rules: The settings.
            timer: None for `shared_timer()`.
            snapshots: The files, of which its own is read soon and kept up to date; they stay the
                caller's.
            on_answer: Called on the backend's threads at each view; must not block.
            on_loss: The same, with the reason, when contact is lost.
        """
        self.service = service
        self._now_ns = clock_of(timer)
        self._timer = OneShotTimer(timer, self._wake, registry)
        self._snapshots = snapshots
        self._on_answer = on_answer
        self._on_loss = on_loss
        self._cache = ServiceCache(registry, service, rules, self._now_ns())
        self._shown: TimedSnapshot | None = None
        self._events = NotificationQueue()
        # Of listeners, in turn; the last one got the newest. Made when needed: 2 kB each.
        self._queues: deque[SerialExecutor] = deque()
        self._listeners: dict[Listener, SerialExecutor] = {}
        # Of the `WatchManager`.
        self.users: set[object] = set()
        self.backend_watch: Watch | None = None
        """The watch of the backend, which notifies this."""
        self.failures = 0
        self.due_ns = NEVER
        """When the backend's watch is tried again."""
        self.reset()
        self._closed = False  # after `reset`, which closes the watch of a forked child
        reset_after_fork(self)
        self._file_was_read = threading.Event()
        self._file_until_s = time.monotonic() + FILE_TIMEOUT_S
        if snapshots is None:
            self._file_was_read.set()
        else:
            EXECUTOR.submit((snapshots, "file"), partial(self._load, snapshots))

    def reset(self) -> None:
        """Close this in a forked child, where no thread updates it."""
        self._closed = True
        self._lock = threading.RLock()  # entered itself: see the module `executor`
        self._changed = threading.Condition(self._lock)

    @property
    def closed(self) -> bool:
        """Whether it was closed; True too in a forked child."""
        return self._closed

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot with its present age; None if there is none yet. Takes no lock."""
        shown = self._shown
        return None if shown is None else shown.at(self._now_ns())

    def add_listener(self, function: Callable[[Snapshot], object]) -> Listener:
        """Call a function with the snapshot, if there is one, and at each change.

        It is called on a worker, one call at a time, each with all that is known then: of several
        changes it may see only the last. What it raises is an event, `CallbackFailed`.
        """
        listener = Listener(self, function)
        with self._lock:
            if len(self._queues) < LISTENER_QUEUES:
                self._queues.append(SerialExecutor())
            else:
                self._queues.rotate(-1)
            queue = self._queues[-1]
            if not self._closed:
                self._listeners[listener] = queue
        if self._shown is not None and not self._closed:
            listener.notify(queue)
        return listener

    def remove_listener(self, listener: Listener) -> None:
        """Call it no more. Idempotent."""
        with self._lock:
            self._listeners.pop(listener, None)

    def wait(self, timeout_s: float | None = None) -> Snapshot | None:
        """Wait until something is known; a file counts once the registry has failed.

        Args:
            timeout_s: Real seconds, at most; None: no limit.

        Returns:
            What is known; None: nothing in time, or closed.
        """
        if timeout_s is not None:
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        with self._lock:
            self._changed.wait_for(lambda: self._shown is not None or self._closed, timeout_s)
        return self.snapshot

    def on_view(self, view: View) -> None:
        """Take a view of the registry. Never blocks; any thread."""
        self._apply(partial(self._cache.update, view.records, changed=view.changed))
        self._on_answer()

    def on_contact_lost(self, reason: str) -> None:
        """Note that the registry has lost contact or its data. Never blocks; any thread."""
        self._apply(partial(self._cache.contact_lost, reason))
        self._on_loss(reason)

    def close(self) -> None:
        """Stop listeners and timeouts, and end the calls of `wait`. Idempotent; never blocks.

        What is known can still be read. If the registry agrees with it now, the file is updated.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._timer.clear()
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listener in listeners:
            listener.close()
        shown = self._shown
        if self._snapshots is not None and shown is not None and shown.since_ns is None:
            self._snapshots.keep(self.service, shown.snapshot.instances)

    def wait_for_file(self) -> None:
        """Wait until the file was read, which the first view must not overtake.

        Only for a short time, because its disk may hang.
        """
        self._file_was_read.wait(max(0.0, self._file_until_s - time.monotonic()))

    def _load(self, snapshots: SnapshotFiles) -> None:
        """Read the file, and show what it has. On a worker."""
        try:
            snapshot = snapshots.load(self.service)
            if snapshot is not None:
                age_ns = to_ns(snapshot.age_s)
                self._apply(partial(self._cache.remember, snapshot.instances, age_ns))
        finally:
            self._file_was_read.set()

    def _wake(self) -> None:
        """On the timer's thread."""
        EXECUTOR.submit(self, partial(self._apply, self._cache.step))

    def _apply(self, update: Callable[[int], list[CacheEvent]]) -> None:
        """Update the cache, and show the result. Any thread."""
        listeners: list[tuple[Listener, SerialExecutor]] = []
        with self._lock:
            if self._closed:
                return
            for event in update(self._now_ns()):
                self._events.add(partial(emit, event))
            before, self._shown = self._shown, self._cache.shown
            shown = self._shown
            if shown is not None and (before is None or before.snapshot is not shown.snapshot):
                listeners += self._listeners.items()
                self._changed.notify_all()
                if self._snapshots is not None and shown.snapshot.source != "cache":
                    instances = shown.snapshot.instances
                    self._snapshots.keep(self.service, instances, partial(self._agrees, instances))
            self._timer.wake(self._cache.next_wake_ns)  # perhaps too early: `step` finds out
        for listener, queue in listeners:
            listener.notify(queue)
        self._events.start()

    def _agrees(self, instances: tuple[ServiceInstance, ...]) -> bool | None:
        """Whether the registry still has just these; None: unknown, because this is closed."""
        shown = self._shown
        if self._closed or shown is None:
            return None
        return shown.since_ns is None and shown.snapshot.instances is instances


class WatchManager:
    """All watches of one session. Thread-safe; nothing here waits for the backend."""

    def __init__(
        self,
        backend: RegistryBackend,
        rules: RegistryRules,
        *,
        timer: Timer | None,
        snapshots: SnapshotFiles | None,
        on_answer: Callable[[], object],
        on_loss: Callable[[str], object],
        emit: Callable[..., object],
        on_unused: Callable[[Snapshot], object],
    ) -> None:
        """Watch nothing yet. The backend stays the caller's; most arguments are `ServiceWatch`'s.

        `emit` takes events as arguments, and must not block. `on_unused` is called with the last
        snapshot of a service that has no user any more.
        """
        self._backend = backend
        self._registry = str(backend.url)
        self._rules = rules
        self._emit = emit
        self._on_unused = on_unused
        self._new_watch = partial(
            ServiceWatch, registry=self._registry, rules=rules, timer=timer,
            snapshots=snapshots, on_answer=on_answer, on_loss=on_loss,
        )  # fmt: skip
        self._closed = False
        self._timer = OneShotTimer(timer, self._timer_expired, self._registry)
        self._jobs = SerialExecutor()
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget everything, in a forked child, where no watch runs."""
        self._lock = threading.RLock()
        self._watches: dict[str, ServiceWatch] = {}

    def acquire(self, service: str, user: object) -> ServiceWatch:
        """Watch a service until all users have released it.

        Raises:
            RegistryClosed: After `close`.
            RuntimeError: The system can't start the timer's thread.
        """
        with self._lock:
            if self._closed:
                raise RegistryClosed(f"{self._registry} was closed")
            self._timer.start()
            watch = self._watches.get(service)
            if watch is None:
                watch = self._watches[service] = self._new_watch(service)
                self._jobs.add(partial(self._begin, watch))
            watch.users.add(user)
        self._jobs.start()
        return watch

    def release(self, watch: ServiceWatch, user: object) -> None:
        """End the watch of a service if this was its last user. Idempotent."""
        with self._lock:
            watch.users.discard(user)
            if watch.users or self._watches.get(watch.service) is not watch:
                return
            del self._watches[watch.service]
            snapshot = watch.snapshot
            self._close_watch(watch)  # before another one of the service writes the snapshot file
        if snapshot is not None:
            self._on_unused(snapshot)
        self._jobs.start()

    def snapshot_of(self, service: str) -> Snapshot | None:
        """Return the snapshot of a service; None if it is not watched, or there is none yet."""
        with self._lock:
            watch = self._watches.get(service)
        return None if watch is None else watch.snapshot

    def watches(self) -> list[ServiceWatch]:
        """Return the watches of all services that are subscribed to."""
        with self._lock:
            return list(self._watches.values())

    def close(self) -> None:
        """End all watches; waits for nothing."""
        with self._lock:
            self._closed = True
            self._timer.clear()
            for watch in self._watches.values():
                self._close_watch(watch)  # under the lock: a second caller waits for it
            self._watches.clear()
        self._jobs.start()

    def _close_watch(self, watch: ServiceWatch) -> None:
        watch.close()
        self._jobs.add(partial(self._end, watch))

    def _timer_expired(self) -> None:
        """On the timer's thread."""
        with self._lock:
            now_ns = self._timer.now_ns()
            watches = self._watches.values()
            for watch in watches:
                if watch.due_ns <= now_ns:
                    watch.due_ns = NEVER
                    self._jobs.add(partial(self._begin, watch))
            self._timer.wake(min((watch.due_ns for watch in watches), default=NEVER))
        self._jobs.start()

    # On a worker, one after the other

    def _begin(self, watch: ServiceWatch) -> None:
        watch.wait_for_file()
        if watch.closed:
            return
        try:
            watch.backend_watch = self._backend.watch(watch.service, watch)
        except BaseException as error:  # noqa: BLE001 - a backend of the user's; tried again
            watch.failures += 1
            delay_ns = self._rules.retry_ns(watch.failures, elapsed_ns=0, error=error)
            with self._lock:
                retried = not watch.closed
                if retried:
                    watch.due_ns = self._timer.now_ns() + delay_ns
                    self._timer.wake(watch.due_ns)
            self._report(error, to_seconds(delay_ns) if retried else None)

    def _end(self, watch: ServiceWatch) -> None:
        backend_watch, watch.backend_watch = watch.backend_watch, None
        try:
            if backend_watch is not None:
                backend_watch.close()
        except BaseException as error:  # noqa: BLE001 - a backend of the user's
            self._report(error, None)

    def _report(self, error: BaseException, delay_s: float | None) -> None:
        if not self._closed:
            self._emit(RegistryFailed(self._registry, "watch", error, delay_s))
