"""The threads that run what may block, users' code above all: few, shared, and none can starve.

Each job belongs to a key (a failback queue, a method whose callbacks run). A key may always have
one job running, however many threads that makes; beyond its first, only while fewer than `SIZE`
threads are busy. So a key whose jobs hang holds up its own but never another's, and there are never
more threads than `SIZE`, or one for each key that has work.

Threads are daemons: a call that hangs does not keep the program from ending. One that has nothing
to do ends soon, as starting another costs a tenth of a millisecond.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from rpcwheel.observe import ExecutorRejected, TaskFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    Job: TypeAlias = Callable[[], object]

__all__ = ["EXECUTOR", "KeyedExecutor", "SerialExecutor", "reset_after_fork"]

SIZE: Final = 4
"""Threads that all keys share, beyond the one that each may always have."""

IDLE_S: Final = 0.05
"""Seconds after which a thread without work ends."""


class KeyedExecutor:
    """Runs jobs on daemon threads; see above for who gets one. Thread-safe."""

    def __init__(self, name: str = "rpcwheel-worker", size: int = SIZE) -> None:
        self._name = name
        self._size = size
        self.reset()

    def reset(self) -> None:
        """Begin anew, without threads and jobs: a forked child has none of its parent's."""
        self._changed = threading.Condition(threading.RLock())
        self._numbers = itertools.count(1)
        self._running: dict[Hashable, int] = {}  # jobs per key; those handed over count already
        self._waiting: dict[Hashable, deque[Job]] = {}  # in the order in which keys are served
        self._handed: deque[tuple[Hashable, Job]] = deque()  # for threads to take
        self._idle = 0  # threads that wait for one

    def submit(self, key: Hashable, job: Job) -> None:
        """Run `job` on a thread of the pool, soon.

        Jobs of one key start in order. One that raises ends only itself. If the system gives no
        more threads, that is an event, and the job waits for one that becomes free.
        """
        with self._changed:
            if key in self._running and self._busy() >= self._size:
                self._waiting.setdefault(key, deque()).append(job)
                return
            self._running[key] = self._running.get(key, 0) + 1
            self._handed.append((key, job))
            if len(self._handed) <= self._idle:
                self._changed.notify()
                return
        self._start_thread(key, job)

    def retry(self, key: Hashable) -> None:
        """Start a thread for the jobs of a key for which there was none; nearly free if not so."""
        if key in self._running or key not in self._waiting:
            return
        with self._changed:
            busy = key in self._running or key not in self._waiting
            task = None if busy else self._next(key)
            if task is None:
                return
            self._handed.append(task)
            if len(self._handed) <= self._idle:
                self._changed.notify()
                return
        self._start_thread(*task)

    def _busy(self) -> int:
        return sum(self._running.values())

    def _start_thread(self, key: Hashable, job: Job) -> None:
        name = f"{self._name}-{next(self._numbers)}"
        try:
            _Thread(self._work, name).start()
        except RuntimeError as error:  # "can't start new thread"
            with self._changed:
                if (key, job) not in self._handed:
                    return  # a thread that was about to end has taken it
                self._handed.remove((key, job))
                self._ended(key)
                self._waiting.setdefault(key, deque()).appendleft(job)
            emit(ExecutorRejected(timer=self._name, task=repr(job), error=error))

    def _work(self) -> None:
        """What a thread does: jobs, until there have been none for a while."""
        with self._changed:
            task = self._take()
        while task is not None:
            key, job = task
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - the thread must go on; told as an event
                emit(TaskFailed(timer=self._name, task=repr(job), error=error))
            del job, task  # a thread that waits must not keep a call's arguments alive
            with self._changed:
                self._ended(key)
                task = self._next(key) or self._take()

    def _ended(self, key: Hashable) -> None:
        left = self._running.pop(key, 0) - 1
        if left > 0:
            self._running[key] = left

    def _next(self, key: Hashable) -> tuple[Hashable, Job] | None:
        """The job to go on with: of the same key if it has none running, else in turn."""
        if not self._waiting:
            return None
        if key in self._running or key not in self._waiting:
            if self._busy() >= self._size:
                return None
            key = next(iter(self._waiting))
        jobs = self._waiting.pop(key)
        job = jobs.popleft()
        if jobs:
            self._waiting[key] = jobs  # at the end of the turn
        self._running[key] = self._running.get(key, 0) + 1
        return key, job

    def _take(self) -> tuple[Hashable, Job] | None:
        """A job that was handed over; waits a while for one."""
        if not self._handed:
            self._idle += 1
            self._changed.wait_for(lambda: self._handed, timeout=IDLE_S)
            self._idle -= 1
        return self._handed.popleft() if self._handed else None


class _Thread(threading.Thread):
    """One that `start` does not wait for until it runs: for that the others must let it.

    While 12 threads compute, `submit` held the timer's thread for 26 ms (median) to 0.9 s; so for
    0.1 ms. All else is as it was: `start` raises if there is no thread, and from then on it is in
    `threading.enumerate` (CPython 3.11 to 3.13). If a later one waits in another way, a start
    takes its time again, and a test tells.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._started = _Begun()


class _Begun(threading.Event):
    """By which a thread tells that it runs; whoever waits for that, does not."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


EXECUTOR: Final = KeyedExecutor()
"""The one of this process."""


class Resettable(Protocol):
    """What has locks, or work on its way."""

    def reset(self) -> None:
        """Begin anew: in a forked child the locks may be held for ever, and no work goes on."""


class SerialExecutor:
    """Jobs in a row. Thread-safe.

    The pool starts the jobs of one key in order, but may run two of them at once; here one follows
    the other. One that hangs holds up those behind it, and nothing else. It may be given a job
    under any lock, as it takes none but the pool's. In a forked child it is empty, as the pool is.
    """

    def __init__(self, most: int | None = None) -> None:
        """At most so many jobs wait: of more, the oldest are forgotten. None: no limit."""
        self._most = most
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget all jobs."""
        self._lock = threading.RLock()  # a finalizer may submit, anywhere
        self._jobs: deque[Job] = deque(maxlen=self._most)
        self._running = False

    def submit(self, job: Job, *, first: bool = False) -> None:
        """Run it after those that wait, or before. Never blocks; what it raises is `TaskFailed`."""
        with self._lock:
            (self._jobs.appendleft if first else self._jobs.append)(job)
            running, self._running = self._running, True
        if running:
            EXECUTOR.retry(self)  # there may have been no thread for it
        else:
            EXECUTOR.submit(self, self._run)

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._jobs:
                        self._running = False
                        return
                    job = self._jobs.popleft()
                job()
        except BaseException:
            EXECUTOR.submit(self, self._run)  # with the next one; the pool tells of the error
            raise


_LIVE: Final[weakref.WeakSet[Resettable]] = weakref.WeakSet()


def reset_after_fork(thing: Resettable) -> None:
    """Have it reset in each forked child, as long as somebody holds it."""
    _LIVE.add(thing)


def _in_child() -> None:
    for thing in (EXECUTOR, *_LIVE):
        thing.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
