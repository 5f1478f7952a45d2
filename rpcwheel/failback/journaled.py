"""The retry queue of a policy with a journal: its calls survive the process.

A failed call is appended to the journal before its caller is answered. From there calls are taken
shortly before they are due, with a lease: those that this process has stored and those that others
have left. So a call is always delivered in the same way, before and after a restart. After an
attempt its result goes to the journal, and the call leaves the memory: it was delivered, is due
later, or is a dead letter.

A call is delivered through a route: a channel of this process to its target, or the function with
its name. Calls without a route stay in the journal.

`pacing.py` says when attempts begin. As many calls of a target are taken as can begin soon: calls
that are not taken can be taken by other processes.

Times of the journal are relative and on the engine's clock. The lease is kept on the monotonic
clock: no attempt begins after its end. With a `ManualTimer`, both clocks are that of the timer if
the journal is in SQLite, and `advance` looks for calls itself.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections import Counter
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

import grpc

from rpcwheel._concurrency.callbacks import callable_name, weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import code_of
from rpcwheel.call.idempotency import idempotency_key, new_key, set_idempotency_key
from rpcwheel.durations import MAX_NS, to_ns, to_seconds
from rpcwheel.errors import FailbackClosed, FailbackError, JournalError, JournalFull, TimerError
from rpcwheel.events import FailbackDropped, FailbackLeaseLost, TaskFailed, emit
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
from rpcwheel.timer import ManualTimer, shared_timer

from .queue import (
    AFTER_CLOSE,
    CANCELLED,
    CHANNEL_CLOSED,
    RetryQueue,
    why_not_retried,
)
from .queued_call import QueuedCall, QueuedCallState, QueueEntry, SavedCall
from .stored import StoredRpc, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.call.config import FailedRpc
    from rpcwheel.call.failback_policy import FailbackPolicy, FailedCall
    from rpcwheel.durations import Duration
    from rpcwheel.journal.backend import StoredCall
    from rpcwheel.journal.journal import Journal
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .pacer import Pacer
    from .stored import StoredFunction
    from .stored_functions import FunctionCodec

POLL_INTERVAL_S: Final = 1.0
"""How often the journal is asked for calls that other processes have stored or left."""

POLLS_PER_LEASE: Final = 4
"""How often it is asked during a lease at least, as the lease is renewed then."""

HORIZON_S: Final = 2.0
HORIZON_NS: Final = to_ns(HORIZON_S)
"""Calls are taken if they are due within this time, and can begin within it."""

CLOSED_CHANNEL_DELAY_NS: Final = 1_000_000_000
"""The wait after an attempt that this process has ended, by closing the channel."""

MAX_ENTRIES: Final = 1000
MAX_ERROR: Final = 500
"""Characters of an error that are stored."""

NOT_REGISTERED: Final = (
    "only calls of functions decorated by with_failback(journal=...), and of channels whose policy "
    "has a journal, can be stored"
)
EXPIRED: Final = Stop("its max_age has passed")


class MakeCall(Protocol):
    """Makes the function for the attempts of a stored call, and its arguments."""

    def __call__(
        self, call: StoredCall, body: StoredRpc | StoredFunction, /
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Raises ValueError if the call can never be made; the message says why."""


@dataclass(slots=True, eq=False)
class CallRoute:
    """A way to deliver the calls of one target."""

    target: str
    make: MakeCall
    start: Callable[[RetryQueue, QueuedCall], None]
    """Starts an attempt; as `QueuedCall.start`."""
    give_up: Callable[[RetryQueue, QueuedCall, BaseException], None]
    """Reports a call as failed to the queue, where the `dead_letter` hook can run. Any thread."""
    is_open: Callable[[], bool] = lambda: True
    """Whether calls can still be made."""


@dataclass(slots=True)
class _Target:
    """The routes to one target, the oldest first, and the calls that this process has taken."""

    routes: list[CallRoute] = field(default_factory=list)
    taken: int = 0
    capacity: int = 0
    """How many calls it could have at the last look."""
    more: bool = False
    """Whether calls may have been left in the journal at the last look, because of that."""


class JournaledQueue(RetryQueue):
    """The failed calls of one policy, in a journal. Thread-safe.

    `pending`, `entries` and `flush` are about all calls of this queue in the journal. What
    `FailbackStats` counts is what this process has done; its `pending` are the calls that this
    process has taken.
    """

    durable: ClassVar[bool] = True

    def __init__(self, policy: FailbackPolicy, timer: Timer | None) -> None:
        """Open the journal; it connects when the first call is appended or taken.

        Raises:
            ConfigurationError: The URL is not valid.
            ExtraMissing: A package that the journal needs is not installed.
        """
        self.journal: Journal = open_journal(str(policy.journal), timer)
        self._is_manual = isinstance(timer, ManualTimer)
        self._targets: dict[str, _Target] = {}
        self._worker: dict[str, str] = {}  # its "name"; the finalizer has the dict too
        self._has_ended = False
        self._exits = False
        self.codec: FunctionCodec | None = None
        """The codec of the decorated function, if the queue is of one."""
        self.due_by_ns: int | None = None
        """Only calls that are due by this time of the monotonic clock are taken; None: all."""
        self.found_none = False
        """Whether the journal had no such call when it was asked last."""
        self.uses_stored_retry_on = False
        """Whether the `retry_on` that a call was stored with counts, instead of the policy's."""
        self._max_age_s = to_seconds(to_ns(policy.max_age))
        lease_s = self.journal.url.lease_s
        self._lease_ns = to_ns(lease_s)
        self._poll_s = min(POLL_INTERVAL_S, lease_s / POLLS_PER_LEASE)
        try:
            super().__init__(policy, timer)
        except BaseException:
            self.journal.close()
            raise
        self._retry_codes = self._matches.codes(grpc.RpcError)
        self._ending = weakref.finalize(self, _abandon, self.journal, self._worker)
        self._ending.atexit = False  # `end_at_exit` runs then

    def _begin(self) -> None:
        super()._begin()
        self._targets.clear()
        self._loading = threading.Lock()
        self._load_requested = False
        self._ticking = False
        self._flush_waiters: list[Future[None]] = []
        self._lost: set[int] = set()
        self.journal.remove_worker(self._worker.get("name", ""))
        self._new_worker()

    def _new_worker(self) -> None:
        """Begin with a new lease: results for the calls of the old one must not be accepted."""
        self._worker["name"] = secrets.token_hex(8)
        self._lease_ends_ns = 0
        self.journal.add_worker(self.worker, self.name, weak_callback(self._on_late))

    @property
    def worker(self) -> str:
        """The name under which calls are taken."""
        return self._worker["name"]

    # --- Routes ---

    def add_route(self, route: CallRoute) -> None:
        """Deliver the calls of a target from now on. If it has several routes, by the first."""
        with self._lock:
            self._targets.setdefault(route.target, _Target()).routes.append(route)
        self._start_ticking()
        self.request_load()

    def remove_route(self, route: CallRoute) -> None:
        """Begin no more attempts by a route. Idempotent."""
        with self._lock:
            target = self._targets.get(route.target)
            if target is not None and route in target.routes:
                target.routes.remove(route)

    def has_route(self, target: str) -> bool:
        """Whether the calls of a target are delivered by this process."""
        return self._route_to(target) is not None

    def holds(self, target: str) -> bool:
        """Whether calls of a target are in the memory."""
        with self._lock:
            held_target = self._targets.get(target)
            return held_target is not None and held_target.taken > 0

    def _route_to(self, target: str) -> CallRoute | None:
        with self._lock:
            held_target = self._targets.get(target)
            if held_target is None:
                return None
            held_target.routes = [route for route in held_target.routes if route.is_open()]
            return held_target.routes[0] if held_target.routes else None

    # --- Failed calls ---

    def begin_store(
        self, call: QueuedCall, target: str, key: str, body: bytes, order_key: str | None
    ) -> NewCall | None:
        """Decide whether a failed call is stored; the result goes to `store` or `append`.

        Raises:
            FailbackClosed: The queue is closed.
            Exception: A predicate, wait or stop object of the user's raised it.
        """
        delay_ns = self._first_delay_ns(call)
        if delay_ns is None:
            return None
        if self._closes_at_ns is not None:
            with self._lock:
                self.count("rejected")
            raise self._refusal(FailbackClosed, call, AFTER_CLOSE) from call.error
        return NewCall(
            self.name,
            target,
            call.label,
            key,
            body,
            min(to_seconds(delay_ns), self._max_age_s),  # an infinite delay ends with max_age
            self._max_age_s,
            call.attempts,
            error_text(call.error),
            order_key,
        )

    def begin_store_function(
        self, saved: SavedCall, error: BaseException, started_ns: int
    ) -> tuple[QueuedCall, NewCall] | None:
        """Begin to store a call of the decorated function; see `begin_store`."""
        codec, body, obstacle, order_key = self.codec, b"", saved.obstacle, None
        if codec is None or saved.function is not codec.function:
            obstacle = NOT_REGISTERED
        elif obstacle is None:
            try:
                args, kwargs = saved.args, saved.kwargs
                body = replace(codec.encode(args, kwargs), trace=tracing.carrier()).encoded()
                order_key = codec.order_key(self.policy.order_key, args, kwargs)
            except Exception as raised:  # noqa: BLE001 - it is reported with the call's own error
                obstacle = str(raised)
        call = self.named_call(self.name, error, started_ns, obstacle)
        new = self.begin_store(call, "", idempotency_key() or new_key(), body, order_key)
        return None if new is None else (call, new)

    def begin_store_rpc(
        self, failed: FailedRpc, error: BaseException
    ) -> tuple[QueuedCall, NewCall] | None:
        """Begin to store a gRPC call; see `begin_store`."""
        call = self.named_call(failed.method, error, self.now_ns(), None)
        body = StoredRpc(
            failed.kind,
            failed.requests,
            failed.metadata,
            failed.timeout_s,
            failed.wait_for_ready,
            tracing.carrier(),
            self._retry_codes,
        ).encoded()
        new = self.begin_store(call, failed.target, failed.key, body, failed.order_key)
        return None if new is None else (call, new)

    def named_call(
        self, name: str, error: BaseException, started_ns: int, obstacle: str | None
    ) -> QueuedCall:
        """Make the call for `begin_store`."""
        saved = SavedCall(_Named(name), (), {}, Context(), obstacle)
        return QueuedCall(saved, error, started_ns, self.start_attempt)

    def store(self, call: QueuedCall, new: NewCall) -> Literal["queued", "dropped"]:
        """Store a call that `begin_store` has returned. Blocks until it is durable.

        Raises:
            JournalFull, JournalUnavailable, JournalRefused: From the call's error.
        """
        try:
            self.journal.append_now(new, self.max_pending)
        except JournalError as error:
            return self._not_stored(call, error)
        return self._stored(call, new)

    def append(self, new: NewCall) -> Future[int]:
        """Store a call on a worker thread. Give the result to `end_append`."""
        return self.journal.append(new, self.max_pending)

    def end_append(
        self, call: QueuedCall, new: NewCall, appended: Future[int]
    ) -> Literal["queued", "dropped"]:
        """Return what `store` returns, or raise what it raises."""
        try:
            appended.result(0)
        except JournalError as error:
            return self._not_stored(call, error)
        return self._stored(call, new)

    def _stored(self, call: QueuedCall, new: NewCall) -> Literal["queued"]:
        self.count("queued_total")
        self._report_queued(call, to_ns(new.delay_s), self.pending)
        self._start_ticking()
        if new.delay_s < self._poll_s:
            self.request_load()
            if self._is_manual:
                self._request_load_after(new.delay_s)
        return "queued"

    def _not_stored(self, call: QueuedCall, error: JournalError) -> Literal["dropped"]:
        if isinstance(error, JournalFull) and self.policy.overflow == "drop":
            self.count("dropped")
            emit(FailbackDropped(self.name, call.label, call.error, self.pending))
            return "dropped"
        self.count("rejected")
        raise self._refusal(type(error), call, str(error)) from call.error

    # --- Taking calls ---

    def request_load(self) -> None:
        """Take the calls that are due, on a worker thread. Never blocks."""
        with self._lock:
            if self._load_requested or self._closes_at_ns is not None:
                return
            self._load_requested = True
        # A `ManualTimer` may be advanced before a timeout is set, which would then be too late.
        within_s = 0.0 if self._is_manual else HORIZON_S
        EXECUTOR.submit((self, "journal"), partial(self._load, within_s))

    def _request_load_after(self, delay_s: float) -> None:
        with contextlib.suppress(TimerError, RuntimeError):
            timer = shared_timer() if self._timer is None else self._timer
            timer.new_timeout(_QueueTask(self, JournaledQueue.request_load), delay_s)

    def _start_ticking(self) -> None:
        with self._lock:
            if self._ticking or self._closes_at_ns is not None:
                return
            self._ticking = True
        self._set_tick()

    def _set_tick(self) -> None:
        timer = shared_timer() if self._timer is None else self._timer
        try:
            timer.new_timeout(_QueueTask(self, JournaledQueue.tick), self._poll_s)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self._ticking = False
            emit(TaskFailed(timer=self.name, task=callable_name(self._set_tick), error=error))

    def tick(self) -> None:
        """Look for calls, and set the next timeout. On the timer's thread."""
        if self._closes_at_ns is None:
            if self._is_manual:  # while its clock stands still, so that it cannot pass the lease
                self._load()
            else:
                self.request_load()
            self._set_tick()

    def _load(self, within_s: float = HORIZON_S) -> None:
        with self._loading:
            self._load_requested = False
            if self._closes_at_ns is not None:
                return
            self.journal.count_if_due()
            self.end_lost_attempts()
            try:
                self._keep_lease()
                taken = self._take(within_s)
                if self._has_ended:  # closed meanwhile
                    self.journal.release(self.worker)
                    return
                for call in taken:
                    self._adopt(call)
                self._check_flushed()
            except JournalError:  # reported by the journal; the next tick tries again
                return

    def _keep_lease(self) -> None:
        """Renew the lease after a third of it. If it has ended, forget its calls."""
        now_ns, held = self.journal.now_ns(), self._held()
        if now_ns < self._lease_ends_ns - self._lease_ns * 2 // 3:
            return
        if now_ns >= self._lease_ends_ns > 0:
            self._end_lease()
        elif held:
            renewed = self.journal.renew(self.worker)
            # Attempts that were due after its end were refused, and no timeout starts them again.
            if renewed and self.journal.now_ns() < self._lease_ends_ns:
                self._lease_ends_ns = now_ns + self._lease_ns
            else:
                self._end_lease()

    def _has_lease(self, call: QueuedCall) -> bool:
        """Whether no other process may have a call."""
        return call.worker == self.worker and self.journal.now_ns() < self._lease_ends_ns

    def _end_lease(self) -> None:
        """Forget the calls of the lease, which has ended. Attempts that run continue."""
        with self._lock:
            for call in self._in_state(QueuedCallState.WAITING):
                self._forget(call)
            worker, held = self.worker, self._held()
            self._lost = {call.stored.id for call in held if call.stored is not None}
            self._new_worker()
        self.journal.store_results()  # of attempts that have ended: they are late, too
        self.journal.remove_worker(worker)
        if held:
            emit(FailbackLeaseLost(self.name, str(self.journal.url), len(held)))

    def _held(self) -> list[QueuedCall]:
        """List the calls of the present lease that are in the memory."""
        with self._lock:
            return [call for call in self._calls if call.worker == self.worker]

    def _take(self, within_s: float) -> list[StoredCall]:
        now_ns = self.journal.now_ns()
        targets = {
            name: target
            for name, target in list(self._targets.items())
            if self._route_to(name) is not None
        }
        routes = []
        for name, target in targets.items():
            target.capacity = self.pacers.of_target(name).capacity(HORIZON_NS)
            if target.capacity > target.taken:
                routes.append(Route(self.name, name, target.capacity - target.taken))
        if self.due_by_ns is not None:
            within_s = min(within_s, to_seconds(self.due_by_ns - now_ns))
        self.found_none = not targets
        if not routes:
            return []
        held = self._held()
        taken = self.journal.take(self.worker, routes, within_s)
        if held and self.journal.now_ns() >= self._lease_ends_ns:  # some may be those that it has
            self._end_lease()
            return []
        self.found_none = not taken and len(routes) == len(targets)
        if taken:
            self._lease_ends_ns = now_ns + self._lease_ns
        counts = Counter(call.target for call in taken)
        with self._lock:
            for route in routes:
                targets[route.target].more = counts[route.target] >= route.limit
        return taken

    def look(self) -> None:
        """Take the calls that are due now. Blocks; if the journal fails, that is reported."""
        self._load()

    def _adopt(self, stored: StoredCall) -> None:
        """Set the timeout for the next attempt of a call that was taken, or give it up."""
        route = self._route_to(stored.target)
        call = None if route is None else self._taken_call(stored, route)
        if route is None or call is None:
            self.journal.report(self.worker, _put_back(stored, 0))
            return
        with self._lock:
            if self._closes_at_ns is not None:
                call.leave()
                return  # `end_close` releases it
            if self._attempts_already(stored.id):
                call.leave()
                self.journal.report(self.worker, _put_back(stored, 0))
                return
            self._calls[call] = None
            self._targets.setdefault(stored.target, _Target()).taken += 1
            if call.reason:
                call.state = QueuedCallState.RUNNING
        if call.reason:
            route.give_up(self, call, call.error)
        elif stored.due_s <= 0:
            self.start_attempt(call)
        else:
            try:
                self._set_timeout(call, to_ns(stored.due_s))
            except (TimerError, RuntimeError):  # the timer is full or stopped, or has no thread
                with self._lock:
                    self._forget(call)
                self.journal.report(call.worker, _put_back(stored, stored.attempts))

    def _taken_call(self, stored: StoredCall, route: CallRoute) -> QueuedCall | None:
        """Make the call for the queue; with a `reason` if it is to be given up.

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
        try:
            body = decode(stored.body)
            context.run(tracing.make_stored_current, body.trace)
            function, args, kwargs = route.make(stored, body)
            if self.uses_stored_retry_on and isinstance(body, StoredRpc):
                retry_on = body.retry_on or None
        except LookupError:
            return None
        except ValueError as raised:
            reason = storable(f"it cannot be made: {raised}"[:MAX_ERROR])
        except Exception as raised:  # noqa: BLE001 - of the user; the call is kept
            emit(TaskFailed(timer=self.name, task=callable_name(route.make), error=raised))
            return None
        now_ns = self.now_ns()
        return QueuedCall(
            SavedCall(function, args, kwargs, context, None),
            FailbackError(stored.error or "its first attempt failed"),
            now_ns - to_ns(stored.age_s),
            partial(route.start, self),
            attempts=stored.attempts,
            idle_ns=to_ns(max(0.0, stored.age_s)),
            waiting_since_ns=now_ns,
            next_attempt_ns=now_ns + to_ns(max(0.0, stored.due_s)),
            reason=EXPIRED.reason if stored.expires_s <= 0 else reason,
            stored=stored,
            worker=self.worker,
            has_route=route.is_open,
            retry_on=retry_on,
        )

    def _attempts_already(self, number: int) -> bool:
        """Whether this process attempts a call, whose lease had ended; under the lock."""
        held = (call.stored for call in self._calls)
        return any(stored is not None and stored.id == number for stored in held)

    # --- Attempts ---

    def pacer_of(self, call: QueuedCall) -> Pacer:
        """Return what begins the attempts of a call: the same for all calls to its target."""
        target = "" if call.stored is None else call.stored.target
        return self.pacers.of_target(target)

    def start_now(self, call: QueuedCall, began_ns: int) -> bool:
        """Start the next attempt of a call, unless its lease has ended. Any thread."""
        if self._has_lease(call):
            return super().start_now(call, began_ns)
        self.request_load()  # which finds that the lease has ended
        return False

    def begin_attempt(self, call: QueuedCall) -> bool:
        """Begin an attempt, unless the process was paused since `start_attempt`."""
        if not self._has_lease(call):
            with self.attempt_ended(call), self._lock:
                self._forget(call)
            self._notify_if_empty()
            self.request_load()
        return super().begin_attempt(call)

    def _next_delay_ns(self, call: QueuedCall, error: BaseException, now_ns: int) -> int | Stop:
        stored = call.stored
        if stored is None:
            return super()._next_delay_ns(call, error, now_ns)
        if call.reason:
            return Stop(call.reason)
        if self.has_ended_attempt(call, error):
            return CLOSED_CHANNEL_DELAY_NS
        delay_ns = super()._next_delay_ns(call, error, now_ns)
        if isinstance(delay_ns, Stop):
            return delay_ns
        left_ns = call.started_ns + to_ns(stored.age_s + stored.expires_s) - now_ns
        return min(delay_ns, max(0, left_ns), MAX_NS)

    def has_ended_attempt(self, call: QueuedCall, error: BaseException) -> bool:
        """Whether an attempt failed because this process has ended it: it does not count."""
        is_over = self._closes_at_ns is not None or not call.has_route()
        why = why_not_retried(error)
        if why is CANCELLED and self.codec is not None:  # perhaps by the function itself
            return is_over
        return why in (CHANNEL_CLOSED, CANCELLED) or (is_over and code_of(error) == "CANCELLED")

    def _wait(
        self, call: QueuedCall, error: BaseException, now_ns: int, delay_ns: int
    ) -> Stop | None:
        """Give a call back to the journal, due after `delay_ns`."""
        with self._lock:
            if call.state is not QueuedCallState.RUNNING or call.stored is None:
                return None
            call.error = error
            self._forget(call)
            delay_s = to_seconds(delay_ns)
            result = Postponed(call.stored.id, call.attempts, delay_s, error_text(error))
            if self.has_ended_attempt(call, error):
                result = replace(result, attempts=call.attempts - 1, error=call.stored.error)
            self.journal.report(call.worker, result)
        self._report_failed(call, error, now_ns, delay_ns)
        self._notify_if_empty()
        if delay_s < self._poll_s:
            self._request_load_after(delay_s)
        return None

    def lost(self, call: QueuedCall, reason: str) -> None:
        """Give a call back whose attempt can run nowhere any more."""
        with self.attempt_ended(call) as attempt:
            tracing.set_outcome(attempt.span, "lost", reason=reason)
            self._give_back([call])
        self._notify_if_empty()

    def _give_back(self, calls: list[QueuedCall]) -> None:
        with self._lock:
            for call in calls:
                if call.stored is not None and call.state is not QueuedCallState.DONE:
                    self._forget(call)
                    result = _put_back(call.stored, call.attempts)
                    self.journal.report(call.worker, result)

    def _forget(self, call: QueuedCall) -> None:
        """Take a call out of the memory without a result, under the lock."""
        if call.state is QueuedCallState.DONE:
            return
        call.leave()
        del self._calls[call]
        timeout, call.timeout = call.timeout, None
        if timeout is not None:
            timeout.cancel()
        if call.stored is not None:
            self._targets[call.stored.target].taken -= 1
        if self._flush_waiters and not self._calls:
            self.request_load()

    def _remove(self, call: QueuedCall, outcome: str) -> None:
        """Count a call that has ended, and report its result to the journal, under the lock."""
        stored = call.stored
        if stored is None or call.state is QueuedCallState.DONE:
            return
        self._forget(call)
        self._counts[outcome] += 1
        target = self._targets[stored.target]
        if outcome == "redelivered":
            self.journal.report(call.worker, Delivered(stored.id))
        else:
            text, reason = error_text(call.error), storable(call.reason[:MAX_ERROR])
            self.journal.report(call.worker, Dead(stored.id, call.attempts, text, reason))
        is_next_ready = stored.order_key is not None  # the next call of its key
        if is_next_ready or (target.more and target.taken <= target.capacity * 3 // 4):
            self.request_load()

    def _on_late(self, ids: list[int]) -> None:
        """Report results that the journal has ignored, because their lease has ended."""
        if count := len(set(ids) - self._lost):
            emit(FailbackLeaseLost(self.name, str(self.journal.url), count))

    def _lose_waiting(self, refused: QueuedCall | None = None) -> None:
        """Give the calls back that wait for a timer that was stopped."""
        with self._lock:
            self._give_back(self._in_state(QueuedCallState.WAITING))
        self._notify_if_empty()

    # --- All calls ---

    @property
    def pending(self) -> int:
        """How many calls of this queue are in the journal, as last counted."""
        return max(self.journal.stored(self.name), len(self._calls))

    def ensure_counted(self, *, block: bool) -> None:
        """Count the calls if they were never counted: now, or on a worker thread."""
        self.journal.ensure_counted(block=block)

    def entries(self, limit: int | None = None) -> list[QueueEntry]:
        """List the calls of this queue in the journal, oldest first, at most 1,000. Blocks.

        If the journal is not available, those that this process has taken.
        """
        most = MAX_ENTRIES if limit is None else min(limit, MAX_ENTRIES)
        try:
            stored_calls = self.journal.backend.select(self._filter(), limit=most)
        except JournalError:
            return self.held_entries(most)
        with self._lock:
            running = {
                call.stored.id
                for call in self._calls
                if call.stored is not None and call.state is not QueuedCallState.WAITING
            }
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

    def _filter(self, target: str | None = None) -> Filter:
        states = CallState.READY, CallState.BLOCKED, CallState.TAKEN
        return Filter(queue=self.name, target=target, states=states)

    def when_flushed(self) -> Future[None]:
        """Make all calls due now; get a future for when this process can deliver none any more."""
        if self.closed:
            return self.when_empty()
        future: Future[None] = Future()
        self._start_ticking()
        EXECUTOR.submit((self, "flush"), partial(self._hasten, future))
        return future

    def _hasten(self, future: Future[None]) -> None:
        waiting = Filter(queue=self.name, states=(CallState.READY, CallState.BLOCKED))
        with contextlib.suppress(JournalError):  # `request_load` finds and reports it too
            self.journal.backend.retry(waiting)
        with self._lock:
            if self._has_ended:
                future.cancel()
            else:
                self._flush_waiters.append(future)
        self.request_load()

    def _check_flushed(self) -> None:
        """End the waits of `flush` if nothing is left. After each look for calls."""
        with self._lock:
            self._flush_waiters = [
                waiter for waiter in self._flush_waiters if not waiter.cancelled()
            ]
            if not self._flush_waiters or self._calls:
                return
        for target in list(self._targets):
            left = self.journal.backend.select(self._filter(target), limit=1)
            if left and self.has_route(target):
                return
        with self._lock:
            waiters, self._flush_waiters = self._flush_waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    # --- The end ---

    def begin_close(self, drain_timeout: Duration) -> float | None:
        """Store no more calls and begin no attempts.

        Returns:
            How many seconds to wait for running attempts; None if the queue was closed before.
        """
        self._refuse_inside("close()")
        drain_ns = max(0, to_ns(drain_timeout, subject="drain_timeout"))
        if not self._close(drain_ns):
            return None
        with self._lock:
            for call in self._in_state(QueuedCallState.WAITING):
                self._forget(call)
        self._notify_if_empty()
        self.end_lost_attempts()
        return to_seconds(drain_ns)

    def end_close(self, reason: str = "closed") -> list[FailedCall]:
        """Give all calls back to the journal. Blocks for seconds if it is not available.

        Returns:
            The calls that were given up since `begin_close` and that no hook got.
        """
        with self._lock:
            if self._has_ended:
                return []
            self._has_ended = True
            ended, self._to_return = self._to_return, []
            for call in list(self._calls):
                if call.outcome is None:
                    self._forget(call)
                else:
                    self._remove(call, call.outcome)
            flushes, self._flush_waiters = self._flush_waiters, []
        self._notify_if_empty()
        for future in flushes:
            future.cancel()
        self._ending.detach()
        if not (self._exits and self.journal.is_failing):  # each request might take seconds
            self.journal.release(self.worker)
            self.journal.close()
        return [call.failed_call(ended_ns, why) for call, ended_ns, why in ended]

    def end_at_exit(self) -> None:
        """Give all calls back to the journal when the process exits."""
        self._exits = True
        self._close(0)
        self.end_close()

    def reset_after_fork(self) -> None:
        """Begin without calls and routes in a forked child: its channels are the parent's."""
        for call in self._calls:
            call.timeout = None
        super().reset_after_fork()


class _QueueTask:
    """A timer's task that calls a method of a queue, if the queue still exists."""

    __slots__ = ("_method", "_queue")

    def __init__(self, queue: JournaledQueue, method: Callable[[JournaledQueue], None]) -> None:
        self._queue = weakref.ref(queue)
        self._method = method

    def run(self, _: Timeout) -> None:
        queue = self._queue()
        if queue is not None:
            self._method(queue)

    def timer_stopped(self, _: Timeout) -> None:
        queue = self._queue()
        if queue is not None:
            queue.on_timer_stopped()


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


def _put_back(stored: StoredCall, attempts: int) -> Postponed:
    return Postponed(
        stored.id, max(attempts, stored.attempts), max(0.0, stored.due_s), stored.error
    )


def _abandon(journal: Journal, worker: dict[str, str]) -> None:
    """Give the calls of a queue back that was dropped without `close`. Runs in a finalizer."""

    def release() -> None:
        journal.release(worker["name"])
        journal.close()

    EXECUTOR.submit((journal, "release"), release)
