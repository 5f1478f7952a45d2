"""One process's use of a journal: group commit, and results that are not lost with the engine.

Calls are appended by a worker, all that have come since the last transaction in one (group commit),
so many callers share one fsync. A caller waits for at most the `timeout` of the URL. If its call is
not being stored by then, it is not stored at all. If a request runs for longer than that, no caller
waits: each gets its error at once, until the engine answers. If the engine is a file, and no
transaction runs, the caller appends its call itself.

Results of attempts are stored by a worker, all that have come since the last transaction in one. If
the engine refuses them, they are kept and stored later. Should the process end before, their calls
are attempted again by another one, with the same idempotency key.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from rpcwheel._concurrency.executor import SerialExecutor, reset_after_fork
from rpcwheel._concurrency.shared import SharedObjects
from rpcwheel.errors import (
    JournalError,
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.events.log import waiting_calls
from rpcwheel.telemetry import components
from rpcwheel.timer import ManualTimer
from rpcwheel.timer.manual import lease_clock_of

from .backend import PAGE_BYTES, Depth, Postponed
from .counts import Counts
from .opening import open_journal_backend
from .outage import Outage
from .url import parse_journal_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rpcwheel.timer.api import Timer

    from .backend import JournalBackend, NewCall, Result, Route, StoredCall

    _Append: TypeAlias = tuple[NewCall, int, Future[int]]
    """A call to be stored, the limit of its queue, and the result."""

MAX_BATCH: Final = 1000
"""Calls, or results, in one transaction. `PAGE_BYTES` of calls are enough for one, too."""

INTERRUPTED: Final = (
    "a signal handler or finalizer has interrupted a request on this thread, which must end first"
)


@dataclass(frozen=True, slots=True)
class DepthStatus(Depth):
    """The calls of one queue and target in a journal, and what is wrong with them."""

    problem: str


@dataclass(frozen=True, slots=True)
class JournalStatus:
    """A journal of failback."""

    url: str
    """Without the password."""
    up: bool
    """Whether the last request succeeded."""
    unstored_results: int
    """Results of attempts that the journal has not accepted yet."""
    depths: tuple[DepthStatus, ...]
    """The last counts, of all processes that use the journal."""
    problem: str


class Journal:
    """The journal at one URL, for all queues of this process. Thread-safe.

    `open_journal` makes it; each user closes it once.
    """

    def __init__(self, url: str, timer: ManualTimer | None = None) -> None:
        """Check the URL; the arguments and errors are those of `open_journal`."""
        self.url = parse_journal_url(url)
        self.backend: JournalBackend = open_journal_backend(self.url, timer=timer)
        self.now_ns = lease_clock_of(None if self.backend.clock is None else timer)
        """The clock for leases; that of a `ManualTimer` if the journal has its time too."""
        self.outage = Outage(str(self.url), self.now_ns, lambda: self.unstored_results)
        self.counts = Counts(self.backend, self.outage, self.now_ns, self.beside)
        self._workers: dict[str, tuple[str, Callable[[list[int]], object]]] = {}
        self.reset()
        reset_after_fork(self)
        components.add("journal", self)

    def reset(self) -> None:
        """Forget what the parent was to store, in a forked child."""
        self.outage.reset()
        self.counts.reset()
        self._lock = _RequestLock()  # of the thread that runs a transaction
        self._holders: set[str] = set()
        """Workers that may have calls."""
        self._worker = SerialExecutor()
        self._appends: deque[_Append] = deque()
        self._results: deque[tuple[str, Result]] = deque()
        self._storing = 0  # how many results the request that runs stores
        self._repeated: set[int] = set()  # results that the engine may have stored already
        self._beside: set[int] = set()  # the threads within `beside`

    # --- Calls ---

    def append(self, call: NewCall, limit: int) -> Future[int]:
        """Store a call on a worker thread, unless its queue has `limit` calls.

        Returns:
            For `wait_until_stored`: its id when it is durable, or an error.
        """
        future: Future[int] = Future()
        if self._lock.held_s() > self.url.timeout_s:
            future.set_exception(self._no_answer())
            return future
        self._appends.append((call, limit, future))
        self._worker.submit(self._write)
        return future

    def wait_until_stored(self, future: Future[int], wait_s: float) -> int:
        """Return the result of `append`. If it does not come in time, do not store the call.

        Raises:
            JournalFull, JournalUnavailable, JournalRefused: It was not stored.
            JournalOutcomeUnknown: It may have been stored, or be stored later.
        """
        error: JournalUnavailable | None = None
        try:
            with suppress(TimeoutError):
                return future.result(wait_s)
            error = self._no_answer(is_begun=not future.cancel())
            if future.done() and not future.cancelled():  # now
                return future.result()
            # A later read shows that the engine answers again, and may end the outage.
            self.outage.failed(error, writes=False)
            raise error
        finally:
            del future, error  # else a cycle: the error, its traceback, and this frame

    def append_now(self, call: NewCall, limit: int) -> int:
        """Store a call, and return its id when it is durable. Blocks for `url.timeout_s` at most.

        It blocks for longer if a file system hangs, or the interpreter is ending.

        Raises:
            JournalFull, JournalUnavailable, JournalRefused: It was not stored.
            JournalOutcomeUnknown: It may have been stored, or be stored later.
        """
        if self._is_interrupted():
            raise JournalUnavailable(f"{self.url}: {INTERRUPTED}")
        can_wait, lock = _can_start_threads(), self._lock  # of the parent, if it forks meanwhile
        is_alone = self.backend.is_file and not self._appends
        if (not can_wait or is_alone) and lock.acquire(blocking=not can_wait):
            try:
                return self._append_here(call, limit).result()
            finally:
                lock.release()
        return self.wait_until_stored(self.append(call, limit), self.url.timeout_s)

    def _append_here(self, call: NewCall, limit: int) -> Future[int]:
        """Store a call. The caller has the lock.

        In a method of its own: an error that the future raises must not find it in a frame, or both
        keep each other, and the call.
        """
        future: Future[int] = Future()
        self.counts.refresh(call.queue, limit)
        self._append_batch([(call, limit, future)])
        return future

    def _no_answer(self, *, is_begun: bool = False) -> JournalUnavailable:
        text = f"{self.url} has not answered for {self.url.timeout_s:g} s"
        if is_begun:
            return JournalOutcomeUnknown(f"{text}; it is not known whether the call will be stored")
        return JournalUnavailable(text)

    def _write(self) -> None:
        """Store a batch of calls, and all results. Each `append` submits it once.

        The lock is released after one batch: other requests, such as those that renew leases, must
        not wait until no more calls come.
        """
        if not self._appends and not self._results:  # an earlier one has stored them
            return
        with self._lock:
            self._write_batch()
            self._write_results()

    def _write_batch(self) -> None:
        """Store the calls that have waited longest. The caller has the lock."""
        batch: list[_Append] = []
        size = 0
        if self._appends:
            call, limit, _ = self._appends[0]
            self.counts.refresh(call.queue, limit)
        while self._appends and len(batch) < MAX_BATCH and size < PAGE_BYTES:
            append = self._appends.popleft()
            if append[2].set_running_or_notify_cancel():
                batch.append(append)
                size += len(append[0].body)
        self._append_batch(batch)

    def _append_batch(self, batch: list[_Append]) -> None:
        """Store calls, or refuse them if their queue is full. The caller has the lock."""
        adding: Counter[str] = Counter()
        fitting: list[_Append] = []
        for call, limit, future in batch:
            if self.counts.of(call.queue) + adding[call.queue] >= limit:
                full = f"{self.url} has max_pending ({limit}) calls of {call.queue!r}"
                future.set_exception(JournalFull(full))
            else:
                adding[call.queue] += 1
                fitting.append((call, limit, future))
        if not fitting:
            return
        self._lock.restart()
        try:
            ids = self.backend.append([call for call, _, _ in fitting])
        except Exception as error:  # noqa: BLE001 - each caller gets it
            if len(fitting) > 1 and not isinstance(error, JournalUnavailable):
                for append in fitting:  # one of them may be too large, or have a refused value
                    self._append_batch([append])
                return
            refusal = self._append_failed(error)
            for _, _, future in fitting:
                future.set_exception(refusal)
            return
        self.outage.succeeded()
        for (call, _, future), number in zip(fitting, ids, strict=True):
            self.counts.added(call.queue)
            future.set_result(number)

    def _append_failed(self, error: Exception) -> JournalError:
        """Note that calls could not be stored, and return the error of their callers."""
        if isinstance(error, JournalError):
            self.outage.failed(error)
            error.__traceback__ = None  # its frames have the futures, which get the error
            return error
        # a value that the engine cannot store
        return JournalRefused(f"{self.url}: {type(error).__name__}: {error}")

    # --- Workers ---

    def add_worker(self, worker: str, queue: str, on_late: Callable[[list[int]], object]) -> None:
        """Add a worker of a queue.

        `on_late` is called with the ids of calls whose results came after its lease had ended.
        """
        self._workers[worker] = queue, on_late

    def remove_worker(self, worker: str) -> None:
        """Ignore from now on that results of a worker come late."""
        self._workers.pop(worker, None)
        self._holders.discard(worker)

    def take(self, worker: str, routes: Sequence[Route], within_s: float) -> list[StoredCall]:
        """Take calls; see `JournalBackend.take`. Blocks; may be called on any thread."""
        with self._lock:
            failure = self._write_results()
            if failure is not None:  # one of them may be of a call that would be taken now
                raise failure
            self._lock.restart()
            try:
                taken = self.backend.take(worker, self.url.lease_s, routes, within_s)
            except JournalError as error:
                self._holders.add(worker)  # the connection may have been lost after the commit
                self.outage.failed(error, writes=False)
                raise
            if taken:
                self._holders.add(worker)
            self.outage.succeeded(writes=bool(taken))
            return taken

    def renew(self, worker: str) -> bool:
        """Renew the lease of a worker; see `JournalBackend.renew`. Blocks."""
        with self._lock:
            try:
                renewed = self.backend.renew(worker, self.url.lease_s)
            except JournalError as error:
                self.outage.failed(error)
                raise
            self.outage.succeeded()
            return renewed

    def report(self, worker: str, result: Result) -> None:
        """Store a result on a worker thread, now or when the engine accepts it. Never blocks."""
        self._results.append((worker, result))
        self._worker.submit(self._write)

    def store_results(self) -> None:
        """Store the results so far; they are kept if the engine is not available. Blocks."""
        with self._lock:
            self._write_results()

    def release(self, worker: str) -> None:
        """Store the worker's results, and make its other calls ready. Never raises.

        Blocks for `url.timeout_s` at most. If the engine is not available, the lease expires.
        """
        self._waiting_for(self._begin(partial(self._release, worker)))()

    def _release(self, worker: str) -> None:
        failure = self._write_results()
        if failure is None and worker in self._holders:
            try:
                self.backend.release(worker)
            except JournalError as error:
                self.outage.failed(error)
        self.remove_worker(worker)

    def _begin(self, job: Callable[[], object]) -> Future[None]:
        """Submit a job that has the lock, after the jobs before it, for `_waiting_for`."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                with self._lock:
                    job()
            finally:
                done.set_result(None)

        if self._lock.is_owned() or _can_start_threads():
            self._worker.submit(run)
        else:
            run()
        return done

    def _waiting_for(self, done: Future[None]) -> Callable[[], None]:
        """Return a function that waits for the end of a job, until `url.timeout_s` from now."""
        end_s = time.monotonic() + self.url.timeout_s - self._lock.held_s()

        def wait() -> None:
            if self._lock.is_owned():  # in a signal handler or finalizer: it runs after its request
                return
            with suppress(TimeoutError):
                done.result(max(0.0, end_s - time.monotonic()))

        return wait

    @property
    def unstored_results(self) -> int:
        """How many results the engine has not accepted yet."""
        return len(self._results) + self._storing

    def _write_results(self) -> JournalError | None:
        """Store all results; if that fails, keep them, and return why. The caller has the lock."""
        while self._results:
            self._storing = min(MAX_BATCH, len(self._results))
            batch = [self._results.popleft() for _ in range(self._storing)]
            while batch:
                worker = batch[0][0]
                own = [result for name, result in batch if name == worker]
                self._lock.restart()
                try:
                    late = self.backend.report(worker, own)
                except BaseException as error:
                    self._results.extendleft(reversed(batch))
                    self._storing = 0
                    self._repeated.update(result.id for _, result in batch)
                    if not isinstance(error, JournalError):
                        raise
                    self.outage.failed(error)
                    return error
                self.outage.succeeded()
                batch = [item for item in batch if item[0] != worker]
                self._storing = len(batch)
                self._note_stored(
                    worker, own, [number for number in late if number not in self._repeated]
                )
                self._repeated.difference_update(result.id for result in own)
        return None

    def _note_stored(self, worker: str, results: list[Result], late: list[int]) -> None:
        queue, on_late = self._workers.get(worker, ("", None))
        ignored = set(late)
        has_ended = (not isinstance(each, Postponed) and each.id not in ignored for each in results)
        self.counts.ended(queue, sum(has_ended))
        if late and on_late is not None:
            on_late(late)

    # --- Reading ---

    @contextmanager
    def beside(self) -> Iterator[JournalBackend]:
        """Get the backend for requests that need no turn: all but those of calls and workers.

        Raises:
            JournalUnavailable: A signal handler or finalizer has interrupted a request.
        """
        if self._is_interrupted():  # it may have a lock of the backend
            raise JournalUnavailable(f"{self.url}: {INTERRUPTED}")
        thread = threading.get_ident()
        self._beside.add(thread)
        try:
            yield self.backend
        finally:
            self._beside.discard(thread)

    def _is_interrupted(self) -> bool:
        """Whether this thread is in a request, which a signal handler or finalizer interrupts."""
        return self._lock.is_owned() or threading.get_ident() in self._beside

    def status(self) -> JournalStatus:
        """Describe the journal, by the last counts. Does not block."""
        results = self.unstored_results
        problem = "it stores nothing" if self.outage.is_failing else ""
        if results and problem:
            problem += f"; {results} results wait"
        return JournalStatus(
            str(self.url),
            not self.outage.is_failing,
            results,
            tuple(
                DepthStatus(
                    **asdict(depth),
                    problem=_depth_problem(depth.dead, depth.waiting + depth.taken),
                )
                for depth in self.counts.depths
            ),
            problem,
        )

    # --- The end ---

    def close(self, worker: str = "") -> None:
        """End one use of the journal; the last one stores the results and closes the connection.

        Blocks for `url.timeout_s` at most. Results that the engine does not accept now are lost:
        their calls are attempted again.

        Args:
            worker: It is released first, in the same time.
        """
        self.begin_close(worker)()

    def begin_close(self, worker: str = "") -> Callable[[], None]:
        """Begin to `close`, and return a function that waits for its end."""
        # Before the use ends: the last one closes the connection.
        done = self._begin(partial(self._release, worker)) if worker else None
        if _JOURNALS.release(self):
            components.remove("journal", self)
            done = self._begin(self._close)
        return self._waiting_for(done) if done else lambda: None

    def _close(self) -> None:
        self._write_results()
        self.outage.is_over = True
        self.backend.close()


def _can_start_threads() -> bool:
    """Whether the interpreter is not ending: since CPython 3.12, `atexit` hooks have no threads."""
    return sys.version_info < (3, 12) or threading.main_thread().is_alive()


class _RequestLock:
    """A lock that knows whether the present thread has it, also in a signal handler.

    Fair: a thread must first take the turnstile, and keeps it until it has the lock. So a thread
    that releases the lock and asks again comes after one that waits. The turnstile is reentrant,
    because a signal handler may take and release the lock while its thread waits.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turnstile = threading.RLock()
        self._since_s: float | None = None

    def restart(self) -> None:
        """Begin another request. The caller has the lock."""
        self._since_s = time.monotonic()

    def held_s(self) -> float:
        """How long the request of the thread that has it runs; 0 if none has it."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def is_owned(self) -> bool:
        """Whether this thread has it. `threading.Condition` relies on the private method too."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001

    def acquire(self, *, blocking: bool) -> bool:
        """Take it; False if another thread has it and `blocking` is false."""
        if self.is_owned():
            return self._take(blocking=blocking)
        if not self._turnstile.acquire(blocking=blocking):
            return False
        try:
            return self._take(blocking=blocking)
        finally:
            self._turnstile.release()

    def _take(self, *, blocking: bool) -> bool:
        if not self._lock.acquire(blocking=blocking):
            return False
        self._since_s = time.monotonic()
        return True

    def release(self) -> None:
        self._since_s = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire(blocking=True)

    def __exit__(self, *_: object) -> None:
        self.release()


_JOURNALS: Final[SharedObjects[Journal]] = SharedObjects(also_in_child=True)
"""The open journals of this process, by URL and `ManualTimer`."""


def open_journal(url: str, timer: Timer | None = None) -> Journal:
    """Open a journal, or share the one that is open for the same URL. Close it once.

    A `ManualTimer` has journals of its own: those in SQLite have its time.

    Raises:
        ConfigurationError: The URL is not valid.
        ExtraMissing: A package is not installed.
    """
    key = url, timer if isinstance(timer, ManualTimer) else None
    return _JOURNALS.acquire(key, partial(Journal, *key))


def _depth_problem(dead: int, pending: int) -> str:
    letters = f"{dead:,} dead letter{'' if dead == 1 else 's'}" if dead else ""
    return ", ".join(filter(None, (letters, waiting_calls(pending))))
