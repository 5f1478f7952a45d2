"""The worker threads of this process, for everything that may block, user code above all.

Each job has a key (a failback queue, a method whose callbacks run). A key may always have one job
running. It gets further threads only while fewer than `SHARED_THREADS` jobs run in all. So a key
whose jobs hang delays only its own jobs, and there are never more threads than `SHARED_THREADS`,
or one for each key that has jobs.

Threads are daemons: a job that hangs does not keep the program from ending. A thread without jobs
ends soon, as starting another one costs a tenth of a millisecond.

Locks: each executor has one of its own, which is never held while a job runs. So a job can be
submitted under any lock, and from a finalizer.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from rpcwheel.events import ExecutorRejected, TaskFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    Job: TypeAlias = Callable[[], object]

__all__ = ["EXECUTOR", "KeyedExecutor", "SerialExecutor", "reset_after_fork"]

SHARED_THREADS: Final = 4
"""Threads that all keys share, in addition to the one that each key may always have."""

IDLE_TIMEOUT_S: Final = 0.05
"""Seconds after which a thread without jobs ends."""


class KeyedExecutor:
    """Runs jobs on daemon threads, as the module's docstring says. Thread-safe."""

    def __init__(self, name: str = "rpcwheel-worker", shared_threads: int = SHARED_THREADS) -> None:
        self._name = name
        self._shared_threads = shared_threads
        self.reset()

    def reset(self) -> None:
        """Forget all threads and jobs; a forked child has none of its parent's threads."""
        self._changed = threading.Condition(threading.RLock())
        self._numbers = itertools.count(1)
        self._running: dict[Hashable, int] = {}  # jobs per key, those in `_handed` included
        self._waiting: dict[Hashable, deque[Job]] = {}  # in the order in which keys get threads
        self._handed: deque[tuple[Hashable, Job]] = deque()  # for idle and starting threads
        self._idle = 0  # threads that wait for a job

    def submit(self, key: Hashable, job: Job) -> None:
        """Run `job` soon, on a worker thread. Never blocks.

        Jobs of one key start in order. What a job raises becomes a `TaskFailed` event. If the
        system gives no more threads, an `ExecutorRejected` event is emitted on the calling thread,
        and the job waits for a thread that becomes free.
        """
        with self._changed:
            if key in self._running and self._busy() >= self._shared_threads:
                self._waiting.setdefault(key, deque()).append(job)
                return
            self._running[key] = self._running.get(key, 0) + 1
            has_thread = self._hand_over(key, job)
        if not has_thread:
            self._start_thread(key, job)

    def retry(self, key: Hashable) -> None:
        """Start a thread for a key that was refused one; cheap if it was not."""
        if key in self._running or key not in self._waiting:
            return
        with self._changed:
            busy = key in self._running or key not in self._waiting
            task = None if busy else self._next(key)
            if task is None:
                return
            has_thread = self._hand_over(*task)
        if not has_thread:
            self._start_thread(*task)

    def _hand_over(self, key: Hashable, job: Job) -> bool:
        """Give the job to an idle thread; False if a new thread must be started for it."""
        self._handed.append((key, job))
        if len(self._handed) > self._idle:
            return False
        self._changed.notify()
        return True

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
            emit(ExecutorRejected(timer=self._name, task=_name_of(job), error=error))

    def _work(self) -> None:
        """Run jobs until none has come for `IDLE_TIMEOUT_S`."""
        with self._changed:
            task = self._take()
        while task is not None:
            key, job = task
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - reported; the thread must go on
                emit(TaskFailed(timer=self._name, task=_name_of(job), error=error))
            del job, task  # an idle thread must not keep a call's arguments alive
            with self._changed:
                self._ended(key)
                task = self._next(key) or self._take()

    def _ended(self, key: Hashable) -> None:
        left = self._running.pop(key, 0) - 1
        if left > 0:
            self._running[key] = left

    def _next(self, key: Hashable) -> tuple[Hashable, Job] | None:
        """The waiting job to run next: of this key if it has none running, else of the next key."""
        if not self._waiting:
            return None
        if key in self._running or key not in self._waiting:
            if self._busy() >= self._shared_threads:
                return None
            key = next(iter(self._waiting))
        jobs = self._waiting.pop(key)
        job = jobs.popleft()
        if jobs:
            self._waiting[key] = jobs  # behind the other keys
        self._running[key] = self._running.get(key, 0) + 1
        return key, job

    def _take(self) -> tuple[Hashable, Job] | None:
        """Take a job that was handed over; None if none comes in time."""
        if not self._handed:
            self._idle += 1
            self._changed.wait_for(lambda: self._handed, timeout=IDLE_TIMEOUT_S)
            self._idle -= 1
        return self._handed.popleft() if self._handed else None


def _name_of(job: Job) -> str:
    """For events; the `repr` of user code may raise."""
    try:
        return repr(job)
    except Exception:  # noqa: BLE001 - the thread must go on
        return f"<{type(job).__name__}>"


class _Thread(threading.Thread):
    """A thread whose `start` returns before the new thread runs.

    `Thread.start` waits for that: while 12 threads computed, `submit` held the timer's thread for
    26 ms (median) to 0.9 s; without the wait for 0.1 ms. Nothing else changes: `start` raises if
    there is no thread, and from then on the thread is in `threading.enumerate` (CPython 3.11 to
    3.13). Should a later version wait in another way, `start` is slow again, and
    `test_submit_does_not_wait_for_the_new_thread` fails.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._started = _Started()


class _Started(threading.Event):
    """The event by which `Thread.start` learns that the thread runs, without the wait for it."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


EXECUTOR: Final = KeyedExecutor()
"""The executor of this process."""


class SerialExecutor:
    """Runs jobs one after the other. Thread-safe; empty in a forked child.

    The jobs of one key of a `KeyedExecutor` start in order, but two of them may run at once; here
    never. A job that hangs delays those behind it, and nothing else.
    """

    def __init__(
        self, *, limit: int | None = None, run: Callable[[Job], object] | None = None
    ) -> None:
        """Create an executor without jobs.

        Args:
            limit: How many jobs may wait. Of more, the oldest are dropped. None: no limit.
            run: Runs a job that runs the waiting ones, soon or at once. None: on `EXECUTOR`.
        """
        self._limit = limit
        self._run = run
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget all jobs."""
        self._changed = threading.Condition(threading.RLock())  # finalizers submit anywhere
        self._jobs: deque[Job] = deque(maxlen=self._limit)
        self._running = False

    def submit(self, job: Job, *, first: bool = False) -> None:
        """Run `job` after the waiting ones, or before them. Never blocks.

        What it raises becomes a `TaskFailed` event, if the jobs run on `EXECUTOR`.
        """
        self.add(job, first=first)
        self.start()

    def add(self, job: Job, *, first: bool = False) -> None:
        """Let `job` wait for the next `start()`, for callers whose lock must not be held there."""
        with self._changed:
            (self._jobs.appendleft if first else self._jobs.append)(job)

    def start(self) -> None:
        """Run the waiting jobs, if nothing runs them already."""
        with self._changed:
            was_running = self._running
            self._running = was_running or bool(self._jobs)
            starts = self._running and not was_running
        if starts:
            self._start_run()
        elif was_running and self._run is None:
            EXECUTOR.retry(self)  # it may have been refused a thread

    def wait(self, timeout_s: float) -> bool:
        """Wait until no job waits or runs, at most so long; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def _start_run(self) -> None:
        if self._run is None:
            EXECUTOR.submit(self, self._run_jobs)
        else:
            self._run(self._run_jobs)

    def _run_jobs(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._jobs:
                        self._running = False
                        self._changed.notify_all()
                        return
                    job = self._jobs.popleft()
                job()
        except BaseException:
            self._start_run()  # for the jobs behind it
            raise


class Resettable(Protocol):
    """Has locks, or jobs under way."""

    def reset(self) -> None:
        """Start anew in a forked child: there no lock is ever released, and no thread runs."""


_TO_RESET: Final[weakref.WeakSet[Resettable]] = weakref.WeakSet()


def reset_after_fork(thing: Resettable) -> None:
    """Call `thing.reset()` in each forked child, as long as the object lives."""
    _TO_RESET.add(thing)


def _in_child() -> None:
    for thing in (EXECUTOR, *_TO_RESET):
        thing.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
