"""`JournalWorker`: delivers the calls of a journal without the program that has stored them.

It looks for queues and targets in the journal, again and again, and has a `FailbackQueue` for each
queue. A gRPC call is made through a channel to its target; only its bytes are needed, not its
generated classes. A function must be imported: its own invoker delivers its calls.

Functions that are coroutine functions run on an event loop of the worker, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._concurrency.callbacks import callable_name, run_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel._grpc.calls import checked_metadata
from rpcwheel.call.failback_policy import FailbackPolicy
from rpcwheel.durations import to_ns
from rpcwheel.errors import JournalError, short_repr
from rpcwheel.events import CallbackFailed, TaskFailed, emit
from rpcwheel.journal.journal import open_journal
from rpcwheel.journal.opening import open_journal_backend
from rpcwheel.telemetry import components

from . import aio
from .invoker import checked_queues
from .pacer import Pacers
from .stored_calls import StoredCalls
from .sync import CANCEL_TIMEOUT_S, FailbackInvoker, close_all
from .timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from rpcwheel.durations import Duration
    from rpcwheel.journal.journal import Journal

    from .held_calls import FailbackStats
    from .invoker import InvokerBase
    from .journaled import JournalStore
    from .queue import FailbackQueue
    from .routes import CallRoute

    Metadatum: TypeAlias = tuple[str, str | bytes]
    Metadata: TypeAlias = Callable[[], Iterable[Metadatum]] | Sequence[Metadatum]

__all__ = ["JournalWorker"]

LOOK_INTERVAL_S: Final = 2.0
"""How often the worker looks for queues and targets that are new in the journal."""

ONCE_INTERVAL_S: Final = 0.05
"""The interval of these looks with `once`."""

UNUSED_S: Final = 300.0
"""How long the channel to a target is kept for which the journal has no calls."""

ONCE_FAILURE_S: Final = 5.0
"""With `once`, the worker ends after the journal has failed for so long."""

START_SLACK_NS: Final = 10_000_000
"""With `once`, calls are due at the start until this time later: engines round times."""

THREAD_NAME: Final = "rpcwheel-journal-worker"

STOP_TIMEOUT_S: Final = 5.0
"""How long `close` waits for a look at the journal."""


@dataclass(frozen=True, slots=True)
class _WorkerSettings:
    """What a worker delivers, and how."""

    policy: FailbackPolicy
    """That of gRPC calls."""
    uses_stored_retry_on: bool
    connect: Callable[[str], grpc.Channel]
    metadata: Metadata
    queues: frozenset[str] | None
    targets: frozenset[str] | None
    once: bool

    def select(self, queue: str, target: str) -> bool:
        """Whether calls of a queue to a target are delivered; the target of a function is ""."""
        if self.queues is not None and queue not in self.queues:
            return False
        return self.targets is None or not target or target in self.targets


@dataclass(slots=True)
class _Place:
    """A queue and a target in the journal."""

    used_s: float
    """When it had calls last."""
    route: CallRoute | None = None
    tried_s: float = -math.inf
    """When the worker last tried to deliver its calls."""
    skipped: str = ""
    """Why its calls are not delivered."""


class JournalWorker:
    """Delivers the calls of a journal. Thread-safe; a context manager.

    Any number of workers, and the programs that store the calls, may use a journal at the same
    time. A call is attempted by one of them at a time.

    Example::

        with JournalWorker("sqlite:///var/lib/shop/failback.db") as worker:
            worker.wait()                       # until another thread closes it

        with JournalWorker(url, once=True) as worker:
            worker.wait()                       # until each call that is due was attempted
    """

    def __init__(
        self,
        url: str,
        *,
        connect: Callable[[str], grpc.Channel] = grpc.insecure_channel,
        queues: Iterable[str] | None = None,
        targets: Iterable[str] | None = None,
        functions: Iterable[Any] = (),
        retry_on: object = None,
        backoff: Any = 5.0,
        max_attempts: int | None = None,
        rate: float | None = None,
        max_in_flight: int | None = None,
        metadata: Metadata = (),
        once: bool = False,
    ) -> None:
        """Check the settings; `start` begins.

        Args:
            url: The URL of the journal. It must exist when the worker starts.
            connect: Makes the channel of `grpc` to a target, which the worker closes.
            queues: Deliver only the calls of these queues; None: of all.
            targets: Deliver only gRPC calls to these targets; None: to all.
            functions: Functions decorated by `with_failback(journal=...)` with the same journal.
                Their own settings apply to their calls. Closing the worker closes their queues.
            retry_on: After which failures a gRPC call is attempted again; as in `FailbackPolicy`.
                After other failures it becomes a dead letter, unless the server was only busy, was
                being stopped or could not be reached. None: the status codes that the program's
                policy named when it stored the call.
            backoff: The wait before the next attempt of a gRPC call; as in `FailbackPolicy`.
            max_attempts: The maximum number of attempts of a gRPC call. None: only its maximum age
                limits them.
            rate: The largest number of attempts a second for each target, and for each function.
                None: no limit.
            max_in_flight: The largest number of attempts at a time for each target, and for each
                function. None: it follows the latency, as in `FailbackPolicy`.
            metadata: Metadata for each attempt of a gRPC call, such as credentials, which journals
                do not have. Or a function that returns it, and is called for each attempt.
            once: Attempt each call that is due now, and end; or end when the journal has failed
                for 5 seconds, see `failed`.

        Raises:
            ConfigurationError: A setting is not valid.
            ExtraMissing: A package that the journal needs is not installed.
            TypeError: A setting is of a wrong type.
        """
        policy = FailbackPolicy(
            journal=url,
            retry_on="UNAVAILABLE" if retry_on is None else retry_on,
            backoff=backoff,
            max_attempts=max_attempts,
            rate=rate,
            max_in_flight=max_in_flight,
        )
        self._functions = [getattr(function, "failback", function) for function in functions]
        for invoker in self._functions:
            _queue_of(invoker)
        if not callable(metadata):
            metadata = checked_metadata(metadata)
        self._settings = _WorkerSettings(
            policy,
            retry_on is None,
            connect,
            metadata,
            _names("queues", queues),
            _names("targets", targets),
            once,
        )
        self._pacers = Pacers(rate, max_in_flight, Timeouts(None))
        """The pacers of gRPC calls: queues share the pacer of a target."""
        self._failed = False
        self._due_by_ns: int | None = None
        self._fails_since_s = math.inf
        """Since when the looks have failed."""
        self._name = secrets.token_hex(8)
        self._starting = threading.Lock()
        # Of the following. Reentrant, because a signal handler may ask for the counts.
        self._lock = threading.RLock()
        self._closed = False
        self._invokers: dict[str, InvokerBase] = {}
        """By the name of the queue: those of gRPC calls, and those of functions."""
        self._channels: dict[str, grpc.Channel] = {}
        self._places: dict[tuple[str, str], _Place] = {}
        self._loop: _LoopThread | None = None
        self._journal: Journal | None = None
        self._stop = threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._checked_backend = open_journal_backend(url, create=False)
        """The backend by which `start` checks that the journal exists."""

    # --- The user's side ---

    def start(self) -> None:
        """Begin to deliver. Idempotent. Blocks until the journal has answered.

        Raises:
            JournalError: The journal does not exist, does not answer or refuses.
            RuntimeError: The worker was closed.
        """
        with self._starting:
            if self._closed:
                raise RuntimeError("the worker was closed; make a new one")
            if self._thread is not None:
                return
            self._checked_backend.routes()
            self._checked_backend.close()
            self._journal = open_journal(self._checked_backend.url.text)
            if self._settings.once:
                self._due_by_ns = self._journal.now_ns() + START_SLACK_NS
            interval_s = ONCE_INTERVAL_S if self._settings.once else LOOK_INTERVAL_S
            thread = threading.Thread(
                target=_run,
                args=(weakref.ref(self), self._stop, interval_s),
                name=THREAD_NAME,
                daemon=True,
            )
            try:
                self._start_functions()
                self._look(self._journal)
                thread.start()
            except BaseException:  # such as Ctrl-C, or no thread can be started
                self._stop.set()
                self._end(0.0)
                raise
            self._thread = thread

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker is closed or, with `once`, each due call was attempted.

        Args:
            timeout: Seconds; None: without limit.

        Returns:
            Whether it has ended in this time.
        """
        return self._done.wait(timeout)

    @property
    def failed(self) -> bool:
        """Whether it ended because the journal failed; only with `once`."""
        return self._failed

    @property
    def url(self) -> str:
        """The URL of the journal, without password and options."""
        return str(self._checked_backend.url)

    @property
    def skipped(self) -> dict[tuple[str, str], str]:
        """Why the calls of a queue and target are not delivered; the target of a function is ""."""
        with self._lock:
            places = dict(self._places)
        return {name: place.skipped for name, place in places.items() if place.skipped}

    def count(self) -> int:
        """Count the calls that are left for this worker, also those that are not due. Blocks.

        If the journal fails, or the worker does not run, this is the last count.
        """
        journal = self._journal
        if journal is None:
            return 0
        if not self._closed:
            journal.counts.count()
        select = self._settings.select
        selected = (depth for depth in journal.counts.depths if select(depth.queue, depth.target))
        return sum(depth.waiting + depth.taken for depth in selected)

    def stats(self) -> dict[str, FailbackStats]:
        """Get the counts of calls and attempts of this worker, by the name of the queue."""
        with self._lock:
            return {name: invoker.stats() for name, invoker in self._invokers.items()}

    def close(self, grace: Duration = 5.0) -> None:
        """Begin no more attempts, and let others have the calls. Idempotent.

        A signal handler must not call it: if the handler has interrupted another method of the
        worker, `close` waits for that method forever.

        Args:
            grace: Seconds for attempts that run. Then they are canceled, and `close` waits for two
                seconds at most until coroutine functions have ended. If one does not end, or is a
                plain function, it continues, and others may attempt its call too.

        Raises:
            RuntimeError: Called inside an attempt of this worker, which would wait for itself.
            TypeError, ConfigurationError: `grace` is no time.
        """
        to_ns(grace, subject="grace")
        with self._lock:
            invokers = list(self._invokers.values())
        checked_queues("close()", invokers)
        self._stop.set()
        with self._starting:
            thread = self._thread
            try:
                if thread is not None and thread is not threading.current_thread():
                    thread.join(STOP_TIMEOUT_S)
            except BaseException:  # such as Ctrl-C
                self._end(0.0)
                raise
            self._end(grace)

    def _end(self, grace: Duration) -> None:
        """End the queues, the loop and the use of the journal. Idempotent."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            invokers = list(self._invokers.values())
        if was_closed:
            return
        self._checked_backend.close()
        try:
            _close_queues(invokers, grace, self._channels, self._loop, self._journal)
        finally:  # also after Ctrl-C
            self._done.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is None or self._closed:
            return
        self._stop.set()
        invokers = list(self._invokers.values())
        left = partial(_close_queues, invokers, 0.0, self._channels, self._loop, self._journal)
        EXECUTOR.submit(left, left)
        warnings.warn(  # last, as it may raise
            "a JournalWorker was dropped without close(), which ends its running attempts",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )

    # --- Functions ---

    def _start_functions(self) -> None:
        policy = self._settings.policy
        for invoker in self._functions:
            queue, store = _queue_of(invoker)
            if not self._settings.select(queue.name, ""):
                continue
            if not store.journal.url.is_same_location(self._checked_backend.url):
                reason = f"the journal of the function is {store.journal.url.location}"
                with self._lock:
                    self._places[queue.name, ""] = _Place(math.inf, skipped=reason)
                continue
            store.due_by_ns = self._due_by_ns
            queue.pacers.limit(policy.rate, policy.max_in_flight)
            with self._lock:
                self._invokers[queue.name] = invoker
            if isinstance(invoker, aio.FailbackInvoker):
                if self._loop is None:
                    self._loop = _LoopThread()
                self._loop.call(invoker.start)
            else:
                invoker.start()

    # --- gRPC calls ---

    def look(self) -> None:
        """Look for queues and targets that are new. Called by the worker's thread."""
        if self._journal is None:
            return
        has_looked = self._look(self._journal)
        if not self._settings.once:
            return
        failing_s = max(self._journal.outage.seconds, time.monotonic() - self._fails_since_s)
        self._failed = failing_s > ONCE_FAILURE_S
        if self._failed or (has_looked and self._is_idle()):
            self._stop.set()
            self._done.set()

    def _look(self, journal: Journal) -> bool:
        """Look for queues and targets. False if the journal has failed."""
        try:
            with journal.beside() as backend:  # first: a look that fails must not end an outage
                names = backend.routes()
            journal.take(self._name, (), 0.0)  # makes the calls of workers ready that have died
        except JournalError as error:
            if self._fails_since_s == math.inf:  # other requests may end the outage meanwhile
                self._fails_since_s = time.monotonic()
                journal.outage.failed(error, writes=False)
            return False
        self._fails_since_s = math.inf
        now_s = time.monotonic()
        for name in names:
            self._update_place(*name, now_s)
        for name, place in list(self._places.items()):
            if now_s - place.used_s > UNUSED_S:
                self._drop_unused(*name, place)
        return True

    def _update_place(self, queue: str, target: str, now_s: float) -> None:
        """Note that a queue and target has calls. Deliver them if it is new or was skipped."""
        place = self._places.get((queue, target))
        if place is None:
            place = _Place(now_s)
            delivers = self._settings.select(queue, target)
        else:
            place.used_s = max(place.used_s, now_s)
            delivers = bool(target and place.skipped)  # there may be a channel now
            if self._settings.once:  # the user's `connect` may be slow, or write to a log
                delivers = delivers and now_s - place.tried_s >= LOOK_INTERVAL_S
        if delivers:
            place.tried_s = now_s
            place.skipped = self._deliver(queue, target, place)
        with self._lock:
            self._places[queue, target] = place

    def _deliver(self, queue: str, target: str, place: _Place) -> str:
        """Deliver the calls of a queue to a target from now on, or return why not."""
        if not target:
            is_imported = queue in self._invokers
            return "" if is_imported else "they are calls of a function that was not imported"
        channel = self._channels.get(target)
        try:
            channel = channel or _checked_channel(self._settings.connect(target))
        except Exception as error:  # noqa: BLE001 - user code, and targets of any program
            return f"there is no channel to it: {error}"
        except BaseException as error:
            if threading.current_thread() is not self._thread:  # in `start`, such as Ctrl-C
                raise
            return f"there is no channel to it: {error!r}"
        invoker: InvokerBase | None = None
        with self._lock:
            if not self._closed:
                self._channels[target] = channel
                if queue not in self._invokers:
                    self._invokers[queue] = self._new_invoker(queue)
                invoker = self._invokers[queue]
        if invoker is None:
            run_callback(target, channel.close)
            return ""
        if not isinstance(invoker, FailbackInvoker):
            return "the queue is one of a coroutine function"
        metadata = partial(_metadata_now, self._settings.metadata, self.url)
        stored_calls = StoredCalls(channel, components.call_counts(), metadata)
        place.route = invoker.add_route(target, stored_calls)
        return ""

    def _new_invoker(self, queue: str) -> FailbackInvoker:
        invoker = FailbackInvoker(self._settings.policy.model_copy(update={"name": queue}))
        new_queue, store = _queue_of(invoker)
        new_queue.pacers = self._pacers
        store.due_by_ns = self._due_by_ns
        store.uses_stored_retry_on = self._settings.uses_stored_retry_on
        return invoker

    def _drop_unused(self, name: str, target: str, place: _Place) -> None:
        """Forget a queue and target, and close the channel if no other queue has the target."""
        route = place.route
        if route is not None:
            queue, store = _queue_of(self._invokers[name])
            store.routes.remove(route)  # first, so that no call is taken meanwhile
            if queue.calls.count_of(target):
                store.add_route(route)
                return
        with self._lock:
            del self._places[name, target]
            others = (other for (_, of), other in self._places.items() if of == target)
            is_used = any(other.route is not None for other in others)
            channel = None if is_used else self._channels.pop(target, None)
        if channel is not None:
            run_callback(target, channel.close, catch=BaseException)

    # --- The end, with `once` ---

    def _is_idle(self) -> bool:
        """Whether each call that was due at the start was attempted. Blocks."""
        with self._lock:
            queues = [_queue_of(invoker) for invoker in self._invokers.values()]
        return all(_has_nothing_due(queue, store) for queue, store in queues)


def _queue_of(invoker: Any) -> tuple[FailbackQueue, JournalStore]:
    """Return the queue of an invoker, and its store; TypeError without a journal."""
    queue: FailbackQueue | None = getattr(invoker, "_queue", None)
    store = None if queue is None else queue.store
    if queue is None or store is None:
        raise TypeError(f"{invoker!r} is no function decorated by with_failback(journal=...)")
    return queue, store


def _names(setting: str, names: Iterable[str] | None) -> frozenset[str] | None:
    """Return names that the user gave, but refuse a string, which would select its letters."""
    if isinstance(names, str):
        raise TypeError(f"{setting} must be a list of names, such as [{names!r}], not {names!r}")
    return None if names is None else frozenset(names)


def _checked_channel(channel: object) -> grpc.Channel:
    """Check what the user's `connect` has returned: one of `grpc.aio` would make dead letters."""
    if not isinstance(channel, grpc.Channel):
        raise TypeError(
            "connect must return a channel of grpc, such as grpc.insecure_channel(target), "
            f"not {short_repr(channel)}"
        )
    return channel


def _metadata_now(metadata: Metadata, journal: str) -> Iterable[Metadatum]:
    """Return the metadata for an attempt.

    Raises:
        LookupError: The user's function has failed, or gRPC cannot send what it has returned.
    """
    if not callable(metadata):
        return metadata
    try:
        return checked_metadata(metadata())
    except Exception as error:
        emit(CallbackFailed(journal, callable_name(metadata), error))
        raise LookupError("there is no metadata for the call") from error


def _close_queues(
    invokers: list[InvokerBase],
    grace: Duration,
    channels: dict[str, grpc.Channel],
    loop: _LoopThread | None,
    journal: Journal | None,
) -> None:
    """Close queues; cancel the attempts that run after the grace, and end the rest. Blocks."""

    def cancel() -> None:
        if loop is not None:  # first: Ctrl-C may interrupt the user's channels
            loop.stop()
        for target, channel in channels.items():
            run_callback(target, channel.close)

    try:
        close_all(invokers, grace, cancel)
    finally:  # also after Ctrl-C
        if loop is not None:
            loop.join()
        if journal is not None:
            journal.close()


def _has_nothing_due(queue: FailbackQueue, store: JournalStore) -> bool:
    """Whether a queue has no call, and finds none in the journal. Blocks."""
    before = queue.stats()
    if before.pending:
        return False
    store.poller.look()
    return store.found_none and queue.stats() == before


def _run(worker_ref: weakref.ref[JournalWorker], stop: threading.Event, interval_s: float) -> None:
    """Look for new queues and targets until the worker is closed or dropped."""
    while not stop.wait(interval_s):
        worker = worker_ref()
        if worker is None:
            return
        try:
            worker.look()
        except BaseException as error:  # noqa: BLE001 - the worker must go on
            emit(TaskFailed(timer=THREAD_NAME, task=callable_name(worker.look), error=error))
        del worker


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rpcwheel-journal-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, and wait until it has returned."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def stop(self) -> None:
        """Cancel all tasks, and end the loop when they have ended. Does not wait."""
        call_on_loop(self._loop, self._loop.stop)

    def join(self) -> None:
        """Wait for the end of the thread, unless a task does not end."""
        self._thread.join(CANCEL_TIMEOUT_S)
