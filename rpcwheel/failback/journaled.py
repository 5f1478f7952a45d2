"""The store of a queue with a journal: its calls survive the process.

A failed call is appended to the journal before its caller is answered. From there calls are taken
when they are due, or shortly before, with a lease: calls of this process, and calls that another
process has left. So a call is always delivered in the same way, before and after a restart. After
an attempt its result goes to the journal, and the call leaves the memory: it was delivered, is due
later, or is a dead letter.

A call is delivered through a route: a channel of this process to its target, or the function with
its name. Calls without a route stay in the journal.

`pacing.py` says when attempts begin. As many calls of a target are taken as can begin soon: calls
that are not taken can be taken by other processes.

Times of the journal are relative and on the engine's clock. With a `ManualTimer`, that is the clock
of the timer if the journal is in SQLite.

`lease.py` has the lease of the calls that were taken, and `poller.py` decides when the store looks
at the journal for more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.callbacks import callable_name, weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import code_of
from rpcwheel.call.idempotency import idempotency_key, new_key, set_idempotency_key
from rpcwheel.call.matching import Matcher
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import FailbackClosed, FailbackError, JournalError
from rpcwheel.events import FailbackLeaseLost, TaskFailed, emit
from rpcwheel.journal.backend import (
    CallState,
    Dead,
    Delivered,
    Filter,
    NewCall,
    Postponed,
    Route,
    storable,
)
from rpcwheel.journal.journal import open_journal
from rpcwheel.rpc import Stop
from rpcwheel.telemetry import tracing

from .held_calls import AFTER_CLOSE
from .lease import Lease
from .poller import HORIZON_S, Poller
from .queued_call import EncodedCall, QueuedCall, QueuedCallState, QueueEntry, SavedCall
from .routes import Routes
from .stored import StoredRpc, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.call.failback_policy import FailbackPolicy
    from rpcwheel.call.failed_calls import FailedRpc
    from rpcwheel.journal.backend import StoredCall
    from rpcwheel.journal.journal import Journal

    from .pacer import PacedQueue
    from .routes import CallRoute
    from .stored_functions import FunctionCodec
    from .timeouts import Timeouts

POLL_INTERVAL_S: Final = 1.0
"""How often the journal is asked for calls that other processes have stored or left."""

POLLS_PER_LEASE: Final = 4
"""How often it is asked during a lease at least, as the lease is renewed then."""

UNDELIVERED: Final = (CallState.READY, CallState.BLOCKED, CallState.TAKEN)
"""The states of calls that are still to be delivered."""

MAX_ENTRIES: Final = 1000
MAX_ERROR: Final = 500
"""Characters of an error that are stored."""

UNCOVERED_DELAY_S: Final = 30.0
"""How long a call waits whose method no route of this process covers, before it is taken again."""

NOT_COVERED: Final = "no channel that has taken it has a policy that stores calls of its method"
NOT_REGISTERED: Final = (
    "only calls of functions decorated by with_failback(journal=...), and of channels whose policy "
    "has a journal, can be stored"
)
EXPIRED: Final = Stop("its max_age has passed")


class JournalStore:
    """The journal of one policy. Thread-safe.

    Its calls leave the memory between attempts. It gives them to the queue when they are due.
    """

    def __init__(self, policy: FailbackPolicy, queue: PacedQueue, timeouts: Timeouts) -> None:
        """Open the journal; it connects when the first call is appended or taken."""
        self._calls = queue.calls
        self._max_pending = policy.capacity
        self._policy = policy
        self._name = queue.name
        self._queue = weakref.ref(queue)  # it is freed at once if it is dropped without `close`
        self._calls.on_empty = weak_callback(self._on_empty)
        self._retry_codes = Matcher(policy.retry_on).codes(grpc.RpcError)
        self._timeouts = timeouts
        self._max_age_s = to_seconds(to_ns(policy.max_age))
        self.codec: FunctionCodec | None = None
        """The codec of the decorated function, if the queue is of one."""
        self.due_by_ns: int | None = None
        """Only calls that are due by this time of the journal's `now_ns` are taken; None: all."""
        self.found_none = False
        """Whether the journal had no such call when it was asked last."""
        self.uses_stored_retry_on = False
        """Whether the `retry_on` that a call was stored with counts, instead of the policy's."""
        self._flush_waiters: list[Future[None]] = []
        self._late_reported: set[int] = set()
        """The ids of the calls of the last ended lease, which were reported with it: their late
        results are not reported again."""
        self.routes = Routes()
        self._capacities: dict[str, int] = {}
        """By target: how many calls could be in the memory at the last look at the journal. Only of
        targets for which it may have more."""
        self.journal: Journal = open_journal(str(policy.journal), timeouts.timer)
        self.lease = Lease(self.journal, self._name, weak_callback(self._on_late))
        poll_s = min(POLL_INTERVAL_S, self.journal.url.lease_s / POLLS_PER_LEASE)
        look, stopped = weak_callback(self._look), weak_callback(queue.on_timer_stopped)
        self.poller = Poller(self._name, self._calls, timeouts, poll_s, look, stopped)
        self._ending = weakref.finalize(self, _abandon, self.journal, self.lease)
        self._ending.atexit = False  # the queue is closed then

    def reset(self) -> None:
        """Begin in a forked child without routes, and with a lease of its own."""
        self._flush_waiters, self._late_reported = [], set()
        self.routes.reset()
        self.poller.reset()
        self.journal.remove_worker(self.lease.worker)
        self.lease.begin()

    def add_route(self, route: CallRoute) -> None:
        """Deliver the calls of a target from now on. If it has several routes, by the first."""
        self.routes.add(route)
        self.poller.start()
        self.poller.request()

    # --- Failed calls ---

    def prepare(self, call: QueuedCall) -> str | None:
        """Encode a call of the decorated function; `failed_rpc` has encoded gRPC calls.

        Returns:
            Why the call cannot be stored, or made a second time.
        """
        if call.encoded is not None:
            return None
        codec, saved = self.codec, call.saved
        call.label = self._name
        if codec is None or saved.function is not codec.function:
            return NOT_REGISTERED
        if saved.obstacle is not None:
            return saved.obstacle
        try:
            args, kwargs = saved.args, saved.kwargs
            body = replace(codec.encode(args, kwargs), trace=tracing.carrier()).encoded()
            order_key = codec.order_key(self._policy.order_key, args, kwargs)
        except Exception as raised:  # noqa: BLE001 - it is reported with the call's own error
            return str(raised)
        call.encoded = EncodedCall("", idempotency_key() or new_key(), body, order_key)
        return None

    def failed_rpc(self, failed: FailedRpc, error: BaseException) -> QueuedCall:
        """Make the call for `FailbackQueue.enqueue` of a gRPC call that has failed."""
        body = StoredRpc(
            failed.kind,
            failed.requests,
            failed.metadata,
            failed.timeout_s,
            failed.wait_for_ready,
            tracing.carrier(),
            self._retry_codes,
        ).encoded()
        saved = SavedCall(_Named(failed.method), (), {}, Context(), None)
        encoded = EncodedCall(failed.target, failed.key, body, failed.order_key)
        now_ns = self._timeouts.now_ns()
        return QueuedCall(saved, error, now_ns, _not_attempted, encoded=encoded)

    def append(self, call: QueuedCall, delay_ns: int) -> None:
        """Append a call. Blocks until it is durable, for at most the `timeout` of the URL.

        Raises:
            FailbackError: It is not accepted; the message says why.
        """
        if self._calls.closed:
            raise FailbackClosed(AFTER_CLOSE)
        self.journal.append_now(self._new_call(call, delay_ns), self._max_pending)
        self._appended(delay_ns)

    def append_later(self, call: QueuedCall, delay_ns: int) -> Future[int]:
        """Append a call on a worker thread.

        Give the result to `end_append` when it is done, or after the `timeout` of the URL.
        """
        if self._calls.closed:
            refused: Future[int] = Future()
            refused.set_exception(FailbackClosed(AFTER_CLOSE))
            return refused
        return self.journal.append(self._new_call(call, delay_ns), self._max_pending)

    def end_append(self, appended: Future[int], delay_ns: int) -> None:
        """Raise what `append` raises if the call was not stored."""
        self.journal.wait_until_stored(appended, 0)
        self._appended(delay_ns)

    def _new_call(self, call: QueuedCall, delay_ns: int) -> NewCall:
        assert call.encoded is not None  # noqa: S101 - by `prepare`
        target, key, body, order_key = call.encoded
        return NewCall(
            self._name,
            target,
            call.label,
            key,
            body,
            to_seconds(delay_ns),
            self._max_age_s,
            call.attempts,
            error_text(call.error),
            order_key,
        )

    def _appended(self, delay_ns: int) -> None:
        self._calls.count("queued_total")
        self.poller.start()
        self.poller.request_after(delay_ns)

    # --- Taking calls ---

    def _look(self, within_s: float) -> None:
        """Keep the lease, and take the calls that are due, unless the queue was closed."""
        queue = self._queue()
        if queue is None:
            return
        self.journal.counts.count_if_due()
        queue.end_lost_attempts()
        try:
            if not self.lease.keep(is_used=bool(self._leased())):
                if self.poller.has_ended:  # closed meanwhile
                    return
                self._end_lease()
            if self._calls.closed:  # `close` waits for attempts, which must keep the lease
                return
            taken = self._take(queue, within_s)
            if self.poller.has_ended:  # closed meanwhile
                self.journal.release(self.lease.worker)
                return
            with self._calls.lock:
                held = _ids_of(self._calls)
            is_covered = [
                self._hand_over(queue, stored, is_held=stored.id in held) for stored in taken
            ]
            if not all(is_covered):  # they have had places of calls that can be delivered
                self.poller.request()
            self._check_flushed()
        except JournalError:  # is reported, and the next look tries again
            if not self.lease.ends_ns:  # a lease may have begun; its own takes do not end it
                self.lease.extend(self.journal.now_ns())
            if self._timeouts.stopped:  # no look may follow
                self._end_flushes(flushed=False)

    def _take(self, queue: PacedQueue, within_s: float) -> list[StoredCall]:
        now_ns = self.journal.now_ns()
        capacities, routes = {}, []
        for target in self.routes.open_targets():
            capacities[target] = queue.pacers.of(target).capacity(to_ns(HORIZON_S))
            room = capacities[target] - self._calls.count_of(target)
            if room > 0:
                routes.append(Route(self._name, target, room))
        if self.due_by_ns is not None:
            within_s = min(within_s, to_seconds(self.due_by_ns - now_ns))
        if self._timeouts.stopped:  # no attempt can begin later
            within_s = min(within_s, 0.0)
        self.found_none = not capacities
        if not routes:
            self._capacities = capacities
            return []
        leased = self._leased()
        taken = self.journal.take(self.lease.worker, routes, within_s)
        if leased and self.journal.now_ns() >= self.lease.ends_ns:  # some may be those it has
            self._end_lease()
            return []
        self.found_none = not taken and len(routes) == len(capacities)
        if taken:
            self.lease.extend(now_ns)
        counts = Counter(call.target for call in taken)
        for route in routes:
            if counts[route.target] < route.limit:
                del capacities[route.target]
        self._capacities = capacities
        return taken

    def _leased(self) -> list[QueuedCall]:
        """List the calls of the present lease that are in the memory."""
        with self._calls.lock:
            return [call for call in self._calls if call.worker == self.lease.worker]

    def _end_lease(self) -> None:
        """Forget the calls of the lease, which has ended. Attempts that run continue."""
        with self._calls.lock:
            for call in self._calls.in_state(QueuedCallState.WAITING):
                self._calls.remove(call)
            worker, leased = self.lease.worker, self._leased()
            self._late_reported = _ids_of(leased)
            self.lease.begin()
        self._calls.notify_if_empty()
        self.journal.store_results()  # of attempts that have ended: they are late, too
        self.journal.remove_worker(worker)
        if leased:
            emit(FailbackLeaseLost(self._name, str(self.journal.url), len(leased)))

    def _on_late(self, ids: list[int]) -> None:
        """Report results that the journal has ignored, because their lease has ended."""
        if count := len(set(ids) - self._late_reported):
            emit(FailbackLeaseLost(self._name, str(self.journal.url), count))

    def _hand_over(self, queue: PacedQueue, stored: StoredCall, *, is_held: bool) -> bool:
        """Give a call that was taken to the queue, or back.

        It is given back if it is still attempted, as its lease had ended meanwhile, and for a time
        if another process may know its method, such as one of a newer release.

        Returns:
            Whether a route covers its method.
        """
        route = None if is_held else self.routes.to(stored.target, stored.method)
        if route is None and not is_held:
            route = self.routes.to(stored.target)  # it can only end a call that has expired
            if route is not None and stored.expires_s > 0:
                delay_s = min(UNCOVERED_DELAY_S, stored.expires_s)
                uncovered = Postponed(stored.id, stored.attempts, delay_s, NOT_COVERED)
                self.journal.report(self.lease.worker, uncovered)
                return False
        call = None if route is None else self._taken_call(stored, route)
        if call is None:
            self.journal.report(self.lease.worker, _put_back(stored, 0))
        else:
            queue.adopt(call, to_ns(stored.due_s))
        return True

    def _taken_call(self, stored: StoredCall, route: CallRoute) -> QueuedCall | None:
        """Make the call for the queue.

        Returns:
            None if it cannot be made now: its channel was dropped, or user code failed.
        """
        reason = ""
        function: Callable[..., Any] = _Named(stored.method)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        retry_on: frozenset[str] | None = None
        context = Context()
        context.run(set_idempotency_key, stored.key)
        is_expired = stored.expires_s <= 0
        try:
            body = decode(stored.body)
            context.run(tracing.make_stored_current, body.trace)
            if is_expired and isinstance(body, StoredRpc):  # needs no channel any more
                args = body.requests
            else:
                function, args, kwargs = route.make(stored, body)
            if self.uses_stored_retry_on and isinstance(body, StoredRpc):
                retry_on = body.retry_on or None
        except LookupError:
            return None
        except ValueError as raised:
            reason = storable(f"it cannot be made: {raised}"[:MAX_ERROR])
        except Exception as raised:  # noqa: BLE001 - of the user; the call is kept
            emit(TaskFailed(timer=self._name, task=callable_name(route.make), error=raised))
            return None
        reason = EXPIRED.reason if is_expired else reason
        now_ns = self._timeouts.now_ns()
        return QueuedCall(
            SavedCall(function, args, kwargs, context, None),
            FailbackError(stored.error or "its first attempt failed"),
            now_ns - to_ns(stored.age_s),
            route.start,
            attempts=stored.attempts,
            # How long its earlier attempts took is not known.
            idle_ns=to_ns(max(0.0, stored.age_s)),
            waiting_since_ns=now_ns,
            next_attempt_ns=now_ns + to_ns(max(0.0, stored.due_s)),
            reason=reason,
            stored=replace(stored, body=b""),  # the requests are in the memory once
            worker=self.lease.worker,
            expires_ns=now_ns + to_ns(stored.expires_s),
            is_open=route.is_open,
            retry_on=retry_on,
        )

    # --- Attempts ---

    def may_attempt(self, call: QueuedCall) -> bool:
        """Whether the lease of a call runs. If not, the next look finds that it has ended."""
        is_valid = self.lease.is_valid_for(call)
        if not is_valid:
            self.poller.request()
        return is_valid

    def postpone(self, call: QueuedCall, delay_ns: int, *, counts: bool) -> None:
        """Return a call to the journal, due after the delay. Under the lock of the calls.

        `counts`: whether its attempt counts, and the error replaces that of an earlier one.
        """
        assert call.stored is not None  # noqa: S101 - by `_taken_call`
        text = error_text(call.error) if counts else call.stored.error
        result = Postponed(call.stored.id, call.attempts, to_seconds(delay_ns), text)
        self.journal.report(call.worker, result)
        self.poller.request_after(delay_ns)

    def give_back(self, call: QueuedCall) -> None:
        """Return a call to the journal, unless its lease has ended. Under the lock of the calls.

        It waits there for as long as was left when it was taken. Its attempts since then count.
        """
        if call.stored is not None and self.lease.is_valid_for(call):
            self.journal.report(call.worker, _put_back(call.stored, call.attempts))

    def settle(self, call: QueuedCall, outcome: str) -> None:
        """Report that a call was delivered, or is a dead letter. Under the lock of the calls.

        `outcome` is the counter of `FailbackStats`.
        """
        stored = call.stored
        if stored is None:
            return
        if outcome == "redelivered":
            self.journal.report(call.worker, Delivered(stored.id))
        else:
            text, reason = error_text(call.error), storable(call.reason[:MAX_ERROR])
            self.journal.report(call.worker, Dead(stored.id, call.attempts, text, reason))
        capacity, taken = self._capacities.get(stored.target), self._calls.count_of(stored.target)
        is_next_ready = stored.order_key is not None  # the next call of its key
        if is_next_ready or (capacity is not None and taken <= capacity * 3 // 4):
            self.poller.request()

    # --- All calls ---

    @property
    def pending(self) -> int:
        """How many calls of the queue are in the journal, as last counted."""
        return max(self.journal.counts.of(self._name), len(self._calls))

    def entries(self) -> list[QueueEntry]:
        """List the calls in the journal, at most 1,000.

        If it is not available, those that this process has taken.
        """
        try:
            with self.journal.beside() as backend:
                undelivered = Filter(queue=self._name, states=UNDELIVERED)
                in_journal = backend.calls(undelivered, MAX_ENTRIES)
                stored_calls = [replace(call, body=b"") for call in in_journal]  # may be large
        except JournalError:
            return self._calls.entries(MAX_ENTRIES)
        with self._calls.lock:
            waiting = QueuedCallState.WAITING
            running = _ids_of(call for call in self._calls if call.state is not waiting)
        return [
            QueueEntry(
                call.method,
                call.age_s,
                call.attempts,
                None if call.id in running else max(0.0, call.due_s),
                FailbackError(call.error),
            )
            for call in stored_calls
        ]

    def flushed(self) -> Future[None]:
        """Make all calls in the journal due; those of other processes too.

        The future is done when this process can deliver none any more.
        """
        future: Future[None] = Future()
        self.poller.start()
        EXECUTOR.submit((self, "flush"), partial(self._make_all_due, future))
        return future

    def _make_all_due(self, future: Future[None]) -> None:
        waiting = Filter(queue=self._name, states=(CallState.READY, CallState.BLOCKED))
        with contextlib.suppress(JournalError), self.journal.beside() as backend:
            backend.retry(waiting)  # the next look finds and reports an error too
        with self._calls.lock:
            if self.poller.has_ended:
                future.cancel()
            else:
                self._flush_waiters.append(future)
        self.poller.request()

    def _on_empty(self) -> None:
        if self._flush_waiters:
            self.poller.request()

    def _check_flushed(self) -> None:
        """End the waits of `flush` if nothing is left, or no look will follow.

        After each look for calls.
        """
        with self._calls.lock:
            self._flush_waiters = [
                waiter for waiter in self._flush_waiters if not waiter.cancelled()
            ]
            if not self._flush_waiters or len(self._calls):
                return
        # If there are some, calls have ended since this look has asked for others, and another look
        # follows.
        has_results = self.journal.unstored_results > 0
        with self.journal.beside() as backend:
            is_left = any(
                self.routes.to(target, call.method)
                for target in self.routes.open_targets()
                for call in backend.calls(
                    Filter(queue=self._name, target=target, states=UNDELIVERED)
                )
            )
        if not is_left or (self.found_none and self._timeouts.stopped and not has_results):
            self._end_flushes(flushed=not is_left)

    def _end_flushes(self, *, flushed: bool) -> None:
        """End the waits of `flush`; unless all calls were flushed, it returns False."""
        with self._calls.lock:
            waiters, self._flush_waiters = self._flush_waiters, []
        for waiter in waiters:
            if not flushed:
                waiter.cancel()
            elif waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def begin_close(self, *, at_exit: bool) -> Callable[[], object]:
        """Give all calls back, unless the process ends and the journal fails.

        After the queue was closed. Idempotent.

        Returns:
            A function that waits for that; may block.
        """
        with self._calls.lock:
            if not self.poller.end():
                return lambda: None
        self._end_flushes(flushed=False)
        self._ending.detach()
        if at_exit and self.journal.outage.is_failing:  # each request might take seconds
            return lambda: None
        return self.journal.begin_close(self.lease.worker)


@dataclass(frozen=True, slots=True)
class _Named:
    """A call of which only the name is known: it is to be stored, or cannot be read."""

    label: str

    def __call__(self) -> None:
        raise FailbackError(f"{self.label} cannot be made")


def error_text(error: BaseException) -> str:
    """Describe an error for the journal: `UNAVAILABLE: failed to connect`."""
    details: Any = getattr(error, "details", None)
    try:
        if callable(details):
            return storable(f"{code_of(error)}: {details()}"[:MAX_ERROR])
        if type(error) is FailbackError:  # made of a text that was stored
            return storable(str(error)[:MAX_ERROR])
        return storable(f"{type(error).__name__}: {error}"[:MAX_ERROR])
    except Exception:  # noqa: BLE001 - `__str__` of the user's
        return type(error).__name__


def _ids_of(calls: Iterable[QueuedCall]) -> set[int]:
    """Return the ids in the journal of the calls that were taken from it."""
    return {call.stored.id for call in calls if call.stored is not None}


def _not_attempted(_: object) -> None:
    """Start an attempt of a call that is only stored; never called."""


def _put_back(stored: StoredCall, attempts: int) -> Postponed:
    return Postponed(
        stored.id, max(attempts, stored.attempts), max(0.0, stored.due_s), stored.error
    )


def _abandon(journal: Journal, lease: Lease) -> None:
    """Give the calls of a queue back that was dropped without `close`. Runs in a finalizer."""
    EXECUTOR.submit((journal, "release"), partial(journal.close, lease.worker))
