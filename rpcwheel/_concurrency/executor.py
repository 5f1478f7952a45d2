"""The worker threads of this process, for user code and everything else that may block.

Each job has a key, such as a failback queue or a method. A key may always have one running job. It
gets further threads only while fewer than `SHARED_THREADS` jobs run in total. So a key whose jobs
hang delays only its own jobs, and the number of threads is at most `SHARED_THREADS`, or the number
of keys that have jobs.

The threads are daemons: a job that hangs does not prevent the process from exiting. A thread
without jobs ends after `IDLE_TIMEOUT_S`, as starting another one costs 0.1 ms.

If the system refuses a thread, the job waits until a thread of the executor is free, or can be
started: `retry` tries it, called by the shared timer after `RETRY_S`.

No lock is held while a job runs. A job can be submitted by a finalizer, and under any lock that a
sink of events does not take: if the system refuses a thread, sinks run on the thread that submits.

A signal handler may raise anywhere in `submit`. Therefore the locks are entered as such, and not as
conditions, whose `__exit__` is a function of Python: a handler that raised at its begin would leave
the lock held for ever.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from rpcwheel.errors import TimerError
from rpcwheel.events import ExecutorRejected, TaskFailed, emit

from .callbacks import callable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    Job: TypeAlias = Callable[[], object]

SHARED_THREADS: Final = 4
"""Threads that all keys share, in addition to the one that each key may always have."""

IDLE_TIMEOUT_S: Final = 0.05
"""Seconds after which a thread without jobs ends."""

RETRY_S: Final = 1.0
"""Seconds until the next attempt to start a thread, after one that failed."""

BEGIN_TIMEOUT_S: Final = 5.0
"""Seconds for which the exit waits for a thread that begins."""

EXECUTOR_NAME: Final = "rpcwheel-worker"
"""The `timer` of its events."""


class KeyedExecutor:
    """Runs jobs on daemon threads, by the rules in the module's docstring. Thread-safe."""

    def __init__(self, name: str = EXECUTOR_NAME, shared_threads: int = SHARED_THREADS) -> None:
        self._name = name
        self._shared_threads = shared_threads
        self.timer: Callable[[], Any] | None = None
        """Returns the timer that calls `retry`. `rpcwheel.timer.sync`, of a higher layer, sets it
        for `EXECUTOR`."""
        self.reset()

    def reset(self) -> None:
        """Forget all threads and jobs. A forked child has no thread of its parent."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._running: dict[Hashable, int] = {}  # jobs per key, those in `_handed` included
        self._waiting: dict[Hashable, deque[Job]] = {}  # in the order in which keys get threads
        self._handed: deque[tuple[Hashable, Job]] = deque()  # for idle and starting threads
        self._idle = 0  # threads that wait for a job
        self._retry_planned = False

    def submit(self, key: Hashable, job: Job) -> None:
        """Run `job` on a worker thread. Never blocks.

        Jobs of one key start in order. An exception of a job becomes a `TaskFailed` event. If no
        thread can be started, an `ExecutorRejected` event is emitted on the calling thread, under
        the locks that it holds, and the job waits until a thread is free or can be started.

        An interrupted `submit` leaves the lock free. Its job may start only with a later one of any
        key, and a job whose thread was refused before may be lost.
        """
        with self._lock:
            if key in self._running and self._busy() >= self._shared_threads:
                self._waiting.setdefault(key, deque()).append(job)
                return
            if key in self._waiting:  # their threads were refused
                self._waiting[key].append(job)
                key, job = self._pop(key)
                has_thread = self._hand_over(key, job)
            else:  # first: a job that is counted and not handed over would never end
                has_thread = self._hand_over(key, job)
                self._running[key] = self._running.get(key, 0) + 1
        if not has_thread:
            self._start_thread(key, job)

    def retry(self, key: Hashable) -> None:
        """Start a thread for `key` if its thread could not be started before."""
        if key in self._running or key not in self._waiting:
            return
        with self._lock:
            busy = key in self._running or key not in self._waiting
            task = None if busy else self._next(key)
            if task is None:
                return
            has_thread = self._hand_over(*task)
        if not has_thread:
            self._start_thread(*task)

    def _hand_over(self, key: Hashable, job: Job) -> bool:
        """Give the job to an idle thread. Returns False if a new thread must be started."""
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
            if self._take_back(key, job):
                emit(ExecutorRejected(timer=self._name, task=callable_name(job), error=error))
        except BaseException:  # of a signal handler; the thread may not have been started
            self._take_back(key, job)
            raise

    def _take_back(self, key: Hashable, job: Job) -> bool:
        """Let a job that was handed over wait. Returns False if a thread has taken it already."""
        with self._lock:
            if (key, job) not in self._handed:
                return False
            self._handed.remove((key, job))
            self._note_end(key)
            self._waiting.setdefault(key, deque()).appendleft(job)
        self._plan_retry()
        return True

    def _plan_retry(self) -> None:
        """Have the timer try again, unless it will. Without the lock: the timer has locks too.

        If the timer's own thread is refused too, the job waits for the next one that is submitted.
        """
        if self.timer is None or self._retry_planned:
            return
        self._retry_planned = True
        try:
            self.timer().new_timeout(self._retry_all, RETRY_S)
        except (TimerError, RuntimeError):
            self._retry_planned = False

    def _retry_all(self, _: object) -> None:
        with self._lock:
            self._retry_planned = False
            keys = tuple(self._waiting)
        for key in keys:
            if self._retry_planned:  # the system still refuses threads
                return
            self.retry(key)

    def _work(self) -> None:
        """Run jobs until none is submitted for `IDLE_TIMEOUT_S`."""
        with self._lock:
            task = self._take()
        while task is not None:
            key, job = task
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - reported; the thread continues
                emit(TaskFailed(timer=self._name, task=callable_name(job), error=error))
            del job, task  # an idle thread must not keep a call's arguments alive
            with self._lock:
                self._note_end(key)
                task = self._next(key) or self._take()

    def _note_end(self, key: Hashable) -> None:
        left = self._running.pop(key, 0) - 1
        if left > 0:
            self._running[key] = left

    def _next(self, key: Hashable) -> tuple[Hashable, Job] | None:
        """Return the next waiting job: of this key if none of it runs, else of the next key.

        While `SHARED_THREADS` jobs run, only of a key that has none: its thread was refused.
        """
        if not self._waiting:
            return None
        if key in self._running or key not in self._waiting:
            shares = self._busy() < self._shared_threads
            for each in self._waiting:
                if shares or each not in self._running:
                    return self._pop(each)
            return None
        return self._pop(key)

    def _pop(self, key: Hashable) -> tuple[Hashable, Job]:
        """Return the first waiting job of a key, which runs from now on."""
        jobs = self._waiting.pop(key)
        job = jobs.popleft()
        if jobs:
            self._waiting[key] = jobs  # behind the other keys
        self._running[key] = self._running.get(key, 0) + 1
        return key, job

    def _take(self) -> tuple[Hashable, Job] | None:
        """Take a job that was handed over; None after `IDLE_TIMEOUT_S` without one."""
        if not self._handed:
            self._idle += 1
            self._changed.wait_for(lambda: self._handed, timeout=IDLE_TIMEOUT_S)
            self._idle -= 1
        return self._handed.popleft() if self._handed else None


class _Thread(threading.Thread):
    """A thread whose `start` returns before the new thread runs.

    `Thread.start` waits until the thread runs. While 12 threads computed, `submit` blocked the
    timer's thread for 26 ms (median) to 0.9 s; without the wait for 0.1 ms. Otherwise `start` is
    unchanged: it raises if no thread can be started, and the thread is in `threading.enumerate`
    afterwards (CPython 3.11 to 3.14). If a later version waits in another way,
    `test_submit_does_not_wait_for_the_new_thread` fails.

    It runs in an empty context. With `-X thread_inherit_context=1` (CPython 3.14; the default of
    free-threaded builds) it would have that of the handler whose call has started it, with a
    deadline that soon has passed.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=Context().run, args=(target,), name=name, daemon=True)
        self._started = self.has_started = _Started()


class _Started(threading.Event):
    """The event for which `Thread.start` waits, without the wait."""

    waits = False
    """Whether `wait` waits nevertheless: the interpreter is about to end."""

    def wait(self, timeout: float | None = None) -> bool:
        return not self.waits or super().wait(timeout)


def _wait_for_new_threads() -> None:
    """Wait until all threads that were started run.

    One that begins after the interpreter has freed the states of threads crashes the process
    (SIGSEGV; CPython 3.11, about 1 of 100 processes that were interrupted on a busy machine).
    """
    _Started.waits = True
    for thread in threading.enumerate():
        if isinstance(thread, _Thread):
            thread.has_started.wait(BEGIN_TIMEOUT_S)  # one may never begin: it was interrupted


atexit.register(_wait_for_new_threads)


EXECUTOR: Final = KeyedExecutor()
"""The executor of this process."""


class SerialExecutor:
    """Runs jobs one at a time, in order. Thread-safe; empty in a forked child.

    (Jobs of one key of a `KeyedExecutor` start in order, but two of them may run at the same time.)
    A job that hangs delays only the jobs behind it.
    """

    def __init__(
        self, *, limit: int | None = None, run: Callable[[Job], object] | None = None
    ) -> None:
        """Create an executor without jobs.

        Args:
            limit: The number of jobs that may wait; beyond it the oldest is dropped. None: no
                limit.
            run: Called with a function that runs the waiting jobs; calls it now or later. None:
                `EXECUTOR` runs them.
        """
        self._limit = limit
        self._run = run
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget all jobs."""
        self._lock = threading.RLock()  # a finalizer may submit
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[Job] = deque(maxlen=self._limit)
        self._running = False  # or about to
        self._has_begun = False

    def submit(self, job: Job, *, first: bool = False) -> None:
        """Run `job` after the waiting jobs, or with `first` before them. Never blocks.

        If the jobs run on `EXECUTOR`, an exception becomes a `TaskFailed` event.
        """
        self.add(job, first=first)
        self.start()

    def add(self, job: Job, *, first: bool = False) -> None:
        """Add `job` for the next `start()`, which the caller must not call under its lock."""
        with self._lock:
            (self._jobs.appendleft if first else self._jobs.append)(job)

    def start(self) -> None:
        """Run the waiting jobs, unless they are being run already."""
        starts = False
        try:
            with self._lock:
                was_running = self._running
                starts = not was_running and bool(self._jobs)
                self._running = was_running or starts
            if starts:
                self._start_run()
            elif was_running and self._run is None:
                EXECUTOR.retry(self)  # its thread may not have been started
        except BaseException:  # of a signal handler; the next `start` runs the jobs
            with self._lock:
                if starts and not self._has_begun:
                    self._running = False
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait until no job waits or runs; False if one still does after `timeout_s`."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def _start_run(self) -> None:
        if self._run is None:
            EXECUTOR.submit(self, self._run_jobs)
        else:
            self._run(self._run_jobs)

    def _run_jobs(self) -> None:
        begins = False
        try:
            with self._lock:
                # Another run has begun if its `start` was interrupted.
                begins = not self._has_begun
                self._running = self._has_begun = True
            while begins:
                with self._lock:
                    if not self._jobs:
                        self._running = self._has_begun = False
                        self._changed.notify_all()
                        return
                    job = self._jobs.popleft()
                job()
        except BaseException:
            if begins:
                self._has_begun = False
                self._start_run()  # for the remaining jobs
            raise


class Resettable(Protocol):
    """An object with locks or running jobs, which do not work in a forked child."""

    def reset(self) -> None:
        """Replace locks and forget jobs: in a forked child no other thread runs."""


_TO_RESET: Final[weakref.WeakSet[Resettable]] = weakref.WeakSet()


def reset_after_fork(resettable: Resettable) -> None:
    """Call `resettable.reset()` in each forked child, as long as the object exists."""
    _TO_RESET.add(resettable)


def _in_child() -> None:
    for resettable in (EXECUTOR, *_TO_RESET):
        resettable.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
