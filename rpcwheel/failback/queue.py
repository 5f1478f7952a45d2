"""The retry queue: failed calls that are attempted again in the background.

`RetryQueue` holds the calls of one `FailbackPolicy`. It decides whether and when a call is
attempted again, keeps the state of each call, sets the timeouts, counts, and emits the events. It
makes no attempt itself: the invokers in `sync.py` and `aio.py` give each call a `start` function,
which starts an attempt on a worker thread or an event loop, and report its result.

The states of a call:

    WAITING    the timer has a timeout for the next attempt
    RUNNING    an attempt has begun
    ENDING     there is no further attempt; the `dead_letter` hook may be running
    DONE       the call is not in the queue any more

Each queued call is counted once when it ends: as `redelivered`, `gave_up` or `lost`.

Rules:
    * States and counts change under the lock. If several threads want to change the state of a
      call, one of them succeeds.
    * No event is emitted and no user code runs under the lock. The lock is reentrant, because a
      finalizer can run at any allocation and may make a call that fails.
    * A queue has no reference to its invoker: the timer and the workers refer to the queue, and an
      invoker that is dropped without `close()` must be noticed.

At the end of the process, queued calls are reported: when it exits, or when its main thread ends if
a server of `grpc` runs in it (see `rpcwheel._concurrency.exiting`). A forked child begins with
empty queues, as the calls belong to the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.exiting import BACKGROUND
from rpcwheel._grpc.calls import code_of, is_channel_closed_error
from rpcwheel.backoff import Backoff, wait_of_call
from rpcwheel.call.failback_policy import FailbackPolicy
from rpcwheel.call.keeper import KeptDelivery
from rpcwheel.call.matching import Matcher
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import (
    FailbackClosed,
    FailbackError,
    FailbackFull,
    JournalOutcomeUnknown,
    TimerError,
    TimerStopped,
    TooManyTimeouts,
)
from rpcwheel.events import (
    DeadLetterFailed,
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackDropped,
    FailbackGaveUp,
    FailbackLost,
    FailbackQueued,
    FailbackRejected,
    emit,
)
from rpcwheel.events.log import error_kind, status_text, waiting_calls
from rpcwheel.rpc import DEADLINE, Stop
from rpcwheel.telemetry import components, tracing
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from .pacer import Pacers
from .pacing import BUSY_CODES, Outcome
from .queued_call import QueuedCall, QueuedCallState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextvars import Context

    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .pacer import Pacer
    from .queued_call import QueueEntry

NO_ATTEMPTS_LEFT: Final = Stop("no attempts left")
NOT_NAMED: Final = Stop("its error is not one that `retry_on` names")
CHANNEL_CLOSED: Final = Stop(
    "its channel was closed; close the kit, or the queue, before the channel"
)
CANCELLED: Final = Stop(
    "its attempt was cancelled, as by a channel that was closed; "
    "close the kit, or the queue, before the channel"
)
AFTER_CLOSE: Final = "it came after close(), or at the end of the program"
TIMER_STOPPED: Final = "its timer was stopped"
LOOP_CLOSED: Final = "its event loop is closed"
DURING_ATTEMPT: Final = " during an attempt, which may still succeed"

MIN_DRAIN_DELAY_NS: Final = 50_000_000
"""During `close`, waits are not made shorter than this, and this is the shortest wait before an
attempt that the policy alone would not allow any more."""

_QUEUE: Final[ContextVar[RetryQueue | None]] = ContextVar("rpcwheel_failback_queue", default=None)
"""The queue whose attempt the current code is part of."""


@dataclass(frozen=True, slots=True)
class FailbackStats:
    """Counts of calls and attempts; a consistent snapshot.

    `calls == succeeded + failed + queued_total + dropped + rejected`, and
    `queued_total == redelivered + gave_up + lost + pending`. With a journal the second does not
    hold: other processes may deliver the calls of this one, and this one those of others.
    """

    calls: int = 0
    """Calls whose first attempt has ended."""
    succeeded: int = 0
    """Calls whose first attempt succeeded."""
    failed: int = 0
    """Calls whose first attempt failed with an error that `retry_on` does not name, or was
    cancelled; callers got that error."""
    queued_total: int = 0
    """Calls whose first attempt failed and that were queued."""
    dropped: int = 0
    """Calls that failed while the queue was full and were dropped (`overflow="drop"`)."""
    rejected: int = 0
    """Calls that failed and were not queued; callers got `FailbackFull` or `FailbackClosed`."""
    attempts: int = 0
    """Attempts of queued calls; the first attempts are not among them."""
    redelivered: int = 0
    """Queued calls that succeeded."""
    gave_up: int = 0
    """Queued calls that had no attempts left, or failed with an error that `retry_on` does not
    name."""
    lost: int = 0
    """Queued calls that ended without being delivered: at `close`, at the end of the process, or
    because their timer was stopped or their event loop was closed."""
    pending: int = 0
    """Calls that are queued now, those with a running attempt included."""


MAX_STATUS_ENTRIES: Final = 50
"""Entries in the status of a queue."""


@dataclass(frozen=True, slots=True)
class QueuedCallStatus:
    """A call in a failback queue."""

    function: str
    age_s: float
    attempts: int
    next_attempt_s: float | None
    """None: an attempt runs, or there is no further attempt."""
    error_kind: str
    """The status code, or the class of the error."""
    error: str
    """Begins with the kind."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A failback queue."""

    name: str
    pending: int
    """Calls that are queued; with a journal, in all of it, as last counted."""
    max_pending: int
    oldest_age_s: float | None
    """None: the queue is empty."""
    stats: FailbackStats
    entries: tuple[QueuedCallStatus, ...]
    """The oldest `MAX_STATUS_ENTRIES` calls."""
    problem: str


class RetryQueue:
    """The failed calls of one policy, and when each is attempted again. Thread-safe.

    A queue may hold calls of any event loops and threads.
    """

    durable: ClassVar[bool] = False
    """Whether its calls are in a journal; see `JournaledQueue`."""

    def __init__(self, policy: FailbackPolicy, timer: Timer | None) -> None:
        """Make an empty queue.

        Args:
            policy: Which errors are retried, and how.
            timer: Any rpcwheel timer; None takes `shared_timer()` when the first call is queued.

        Raises:
            TypeError: `policy` is not a FailbackPolicy, or `timer` is not a timer.
        """
        checked_policy: object = policy
        if not isinstance(checked_policy, FailbackPolicy):
            raise TypeError(
                "policy must be a FailbackPolicy, such as FailbackPolicy(retry_on='UNAVAILABLE'), "
                f"not {checked_policy!r}"
            )
        self.policy = policy
        self.name = policy.name or "failback"
        self._timer = checked_timer(timer)
        self.now_ns = clock_of(timer)
        """The clock of all times of this queue."""
        self.max_pending = policy.capacity
        self._matches = Matcher(policy.retry_on)
        self._backoff = Backoff(policy.backoff, policy.stop, policy.limit)
        self._unlimited_backoff = Backoff(policy.backoff)
        self.limit_attempts(None, None)
        self._closes_at_ns: int | None = None
        """When the drain of `close` ends or has ended; None while the queue is open."""
        self._timer_stop_seen = False
        self.on_loops = False
        """Whether attempts run on event loops, which may be closed under them."""
        self._begin()
        components.add("failback", self)
        if not BACKGROUND.add(self):
            self.end_at_exit()

    def limit_attempts(self, rate: float | None, max_in_flight: int | None) -> None:
        """Limit the attempts from now on, before the first one; None: as the policy does."""
        policy = self.policy
        self.pacers = Pacers(
            policy.rate if rate is None else rate,
            policy.max_in_flight if max_in_flight is None else max_in_flight,
            self._timer,
        )

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._calls: dict[QueuedCall, None] = {}  # in the order in which they were queued
        self._counts = dict.fromkeys((field.name for field in fields(FailbackStats)), 0)
        self._waiters: list[Future[None]] = []
        self._to_return: list[tuple[QueuedCall, int, str]] = []
        """Ended calls that `close` returns, each with the time and the reason of its end."""

    def reset_after_fork(self) -> None:
        """Begin with an empty queue in a forked child."""
        for call in self._calls:
            call.state = QueuedCallState.DONE
        self.limit_attempts(None, None)
        self._begin()
        BACKGROUND.add(self)  # it is reset first, because its fork hook was registered first

    # --- Reading ---

    @property
    def pending(self) -> int:
        """How many calls are queued, those with a running attempt included."""
        return len(self._calls)

    def ensure_counted(self, *, block: bool) -> None:
        """Count the calls, if `pending` needs that and it was never done."""

    def stats(self) -> FailbackStats:
        """Get the counts so far."""
        with self._lock:
            return FailbackStats(**self._counts | {"pending": len(self._calls)})

    def status(self) -> QueueStatus | None:
        """Describe the queue now; None if it was closed and has no calls. Never blocks."""
        if self.closed and not self.pending:
            return None
        entries, pending = self.held_entries(MAX_STATUS_ENTRIES), self.pending
        return QueueStatus(
            self.name,
            pending,
            self.max_pending,
            entries[0].age_s if entries else None,
            self.stats(),
            tuple(map(_entry_status, entries)),
            "it is full" if pending >= self.max_pending else waiting_calls(pending),
        )

    @property
    def closed(self) -> bool:
        """Whether it queues no more calls."""
        return self._closes_at_ns is not None

    def entries(self, limit: int | None = None) -> list[QueueEntry]:
        """List the queued calls, oldest first, at most `limit` of them."""
        return self.held_entries(limit)

    def held_entries(self, limit: int | None = None) -> list[QueueEntry]:
        """List the queued calls that are in the memory. Never blocks."""
        with self._lock:
            now_ns = self.now_ns()
            return [call.entry(now_ns) for call in islice(self._calls, limit)]

    def when_empty(self) -> Future[None]:
        """Get a future that is done as soon as no call is pending. Cancel it after use."""
        future: Future[None] = Future()
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters if not waiter.cancelled()]
            self._waiters.append(future)
        self._notify_if_empty()
        return future

    def when_flushed(self) -> Future[None]:
        """Get a future that is done when `flush` has nothing to wait for. Cancel it after use."""
        return self.when_empty()

    def _notify_if_empty(self) -> None:
        with self._lock:
            if self._calls:
                return
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    # --- First attempts ---

    def count(self, counter: str) -> None:
        """Count a call whose first attempt did not lead to `enqueue`."""
        with self._lock:
            self._counts["calls"] += 1
            self._counts[counter] += 1

    def enqueue(self, call: QueuedCall) -> Literal["queued", "dropped"] | None:
        """Queue a call whose first attempt has failed, and set the timeout for the next attempt.

        Returns:
            "queued", or "dropped" if the queue is full and the policy drops calls then: the caller
            gets the policy's default. None: the caller gets the call's error.

        Raises:
            FailbackFull: From the call's error: the queue, or the timer, is full.
            FailbackClosed: From the call's error: the queue is closed, or its timer was stopped.
            Exception: A predicate, wait or stop object of the user's raised it.
        """
        delay_ns = self._first_delay_ns(call)
        if delay_ns is None:
            return None
        pending = self._admit(call)
        if pending is None:
            return "dropped"
        self._set_first_timeout(call, delay_ns)
        self._report_queued(call, delay_ns, pending)
        return "queued"

    def _first_delay_ns(self, call: QueuedCall) -> int | None:
        """Decide how long a call waits for its second attempt; None if it is not queued.

        Raises:
            Exception: A predicate, wait or stop object of the user's raised it.
        """
        now_ns = self.now_ns()
        try:
            delay_ns = self._next_delay_ns(call, call.error, now_ns)
        except Exception:
            self.count("failed")
            raise
        obstacle = call.saved.obstacle
        if obstacle is not None and not isinstance(delay_ns, Stop):
            call.error.add_note(f"{self.name}: not queued, {obstacle}")
            delay_ns = Stop(obstacle)
        if isinstance(delay_ns, Stop):
            self.count("failed")
            return None
        call.waiting_since_ns, call.next_attempt_ns = now_ns, now_ns + delay_ns
        return delay_ns

    def _report_queued(self, call: QueuedCall, delay_ns: int, pending: int) -> None:
        delay_s = to_seconds(delay_ns)
        emit(FailbackQueued(self.name, call.label, call.error, delay_s, pending))
        _drop_frames(call.error)

    def _admit(self, call: QueuedCall) -> int | None:
        """Put a call in the queue; return how many are pending then, None if it was dropped."""
        drops = self.policy.overflow == "drop"
        with self._lock:
            pending = len(self._calls)
            closed, full = self._closes_at_ns is not None, pending >= self.max_pending
            if not closed and not full:
                self._calls[call] = None
                self.count("queued_total")
                return pending + 1
            self.count("dropped" if drops and not closed else "rejected")
        if closed:
            raise self._refusal(FailbackClosed, call, AFTER_CLOSE) from call.error
        if not drops:
            why = (
                f"max_pending ({pending}) calls are queued already; raise max_pending, or drop "
                'such calls with overflow="drop"'
            )
            raise self._refusal(FailbackFull, call, why) from call.error
        emit(FailbackDropped(self.name, call.label, call.error, pending))
        return None

    def _set_first_timeout(self, call: QueuedCall, delay_ns: int) -> None:
        try:
            self._set_timeout(call, delay_ns)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            with self._lock:
                if call.state is QueuedCallState.WAITING:
                    call.state = QueuedCallState.DONE
                    del self._calls[call]
                    self._counts["queued_total"] -= 1
                    self._counts["rejected"] += 1
            self._notify_if_empty()
            why = f"the timer refused it: {error}"
            if isinstance(error, TimerStopped):
                self._lose_waiting()
                why = (
                    "the queue's timer was stopped; make a new queue (or Kit), and give it a "
                    "running timer, or none to use shared_timer()"
                )
            kind = FailbackFull if isinstance(error, TooManyTimeouts) else FailbackClosed
            raise self._refusal(kind, call, why) from call.error

    def _refusal(self, kind: type[FailbackError], call: QueuedCall, why: str) -> FailbackError:
        """Report that a call is not queued, and make the error of its caller."""
        emit(FailbackRejected(self.name, call.label, call.error, why))
        outcome = "was not queued, because"
        if issubclass(kind, JournalOutcomeUnknown):
            outcome = "may have been queued or not:"
        return kind(f"{self.name}: {call.label} failed and {outcome} {why}")

    def _next_delay_ns(self, call: QueuedCall, error: BaseException, now_ns: int) -> int | Stop:
        """Decide how long to wait before the next attempt, or that there is none.

        During `close`, the number of attempts of queued calls is not limited, and no wait is longer
        than half of the time that is left: a server that comes back in time gets its calls.

        This changes nothing. It runs user code, so it must be called without the lock.

        Raises:
            Exception: A predicate, wait or stop object of the user's raised it.
        """
        attempts, elapsed_ns, idle_ns = call.attempts, now_ns - call.started_ns, call.idle_ns
        closes_at_ns = self._closes_at_ns
        if not self._is_retried(call, error, elapsed_ns):
            return why_not_retried(error)

        def delay_by(backoff: Backoff) -> int | None:
            return wait_of_call(
                backoff.next_delay_ns(attempts, elapsed_ns=elapsed_ns, error=error, idle_ns=idle_ns)
            )

        delay_ns = delay_by(self._backoff)
        if delay_ns is None and closes_at_ns is not None and attempts > 1:
            delay_ns = max(delay_by(self._unlimited_backoff) or 0, MIN_DRAIN_DELAY_NS)
        if delay_ns is None:
            return NO_ATTEMPTS_LEFT
        if closes_at_ns is not None:
            delay_ns = min(delay_ns, max((closes_at_ns - now_ns) // 2, MIN_DRAIN_DELAY_NS))
        return delay_ns

    def _is_retried(self, call: QueuedCall, error: BaseException, elapsed_ns: int) -> bool:
        """Whether a call is attempted again after an error, if it has attempts left.

        After the first attempt, `retry_on` decides. The caller of a queued call has been told that
        it will be delivered, so it is not given up because its server is busy or unavailable.
        """
        is_queued = call.stored is not None or call.attempts > 1
        if is_queued and code_of(error) in BUSY_CODES:
            return True
        if call.retry_on is not None:
            return code_of(error) in call.retry_on
        return self._matches(error, attempt=call.attempts, elapsed_ns=elapsed_ns)

    # --- The timer ---

    def _set_timeout(self, call: QueuedCall, delay_ns: int) -> None:
        timer = shared_timer() if self._timer is None else self._timer
        if self._is_timer_stopped():  # a timer whose loop is closed would accept the timeout
            raise TimerStopped(TIMER_STOPPED)
        attempts = call.attempts
        timeout = timer.new_timeout(_AttemptTask(self, call), to_seconds(delay_ns))
        with self._lock:
            wanted = call.state is QueuedCallState.WAITING and call.attempts == attempts
            if wanted:
                call.timeout = timeout
        if not wanted:  # `flush` or `close` has started the attempt meanwhile
            timeout.cancel()
        if self._is_timer_stopped():  # it was stopped before `call.timeout` was set
            self._lose_waiting()

    def _is_timer_stopped(self) -> bool:
        return self._timer is not None and getattr(self._timer, "stopped", False)

    def on_timer_stopped(self) -> None:
        """Report the calls that the stopped timer had, on a worker. Does not block."""
        if not self._timer_stop_seen:
            self._timer_stop_seen = True
            EXECUTOR.submit((self, TIMER_STOPPED), self._lose_waiting)

    def _lose_waiting(self, refused: QueuedCall | None = None) -> None:
        """End and report the calls that wait for a timer that was stopped; `close` returns them.

        Args:
            refused: A call that waits without a timeout, because the timer refused it.
        """
        now_ns = self.now_ns()
        with self._lock:
            lost = [
                call
                for call in self._in_state(QueuedCallState.WAITING)
                if call.timeout is not None or call.is_ready or call is refused
            ]
            for call in lost:
                self._remove(call, "lost")
                self._to_return.append((call, now_ns, TIMER_STOPPED))
        self._notify_if_empty()
        self._report_lost(lost, TIMER_STOPPED, now_ns)

    # --- Further attempts ---

    def start_attempt(self, call: QueuedCall) -> None:
        """Start the next attempt of a call as soon as the pacing of its target allows.

        Any thread; does not block.
        """
        with self._lock:
            if call.state is not QueuedCallState.WAITING or call.is_ready:
                return
            call.is_ready = True
        self.pacer_of(call).add(self, call)

    def pacer_of(self, call: QueuedCall) -> Pacer:
        """Return what begins the attempts of a call: the same for a channel, or for a function.

        Functions have their names as keys: a program may make a new function for each call.
        """
        function = call.saved.function
        if isinstance(function, KeptDelivery) and function.channel is not None:
            return self.pacers.of_channel(function.channel)
        return self.pacers.of_target(call.label)

    def is_waiting(self, call: QueuedCall) -> bool:
        """Whether a call still waits for an attempt."""
        return call.state is QueuedCallState.WAITING and call.is_ready

    def start_now(self, call: QueuedCall, began_ns: int) -> bool:
        """Start an attempt of a call if it waits for one. Any thread; does not block.

        If the process may begin no background call any more, `end_at_exit` reports the call.
        """
        background = BACKGROUND.begin_call()  # it ends when it is garbage
        if background is None:
            return False
        with self._lock:
            if not self.is_waiting(call):
                return False
            call.state = QueuedCallState.RUNNING
            call.is_ready = False
            call.began_ns = began_ns
            call.attempts += 1
            call.idle_ns += began_ns - call.waiting_since_ns
            call.background = background
            timeout, call.timeout = call.timeout, None
            self._counts["attempts"] += 1
        if timeout is not None:
            timeout.cancel()
        call.start(call)
        return True

    def context_for(self, call: QueuedCall) -> Context:
        """A context for an attempt: the caller's, without the deadline of the caller's own call.

        If the attempt has begun, its span is the current one.
        """
        context = call.saved.copy_context()
        context.run(tracing.make_current, call.span)
        context.run(_QUEUE.set, self)
        context.run(DEADLINE.set, None)
        return context

    def begin_attempt(self, call: QueuedCall) -> bool:
        """Begin the span of an attempt, and make it the current one. Runs in its context.

        Returns:
            False if the call has ended while the attempt waited for a worker or its loop.
        """
        if call.state is QueuedCallState.DONE:
            with self.attempt_ended(call):
                return False
        call.span = tracing.begin_delivery(self.name, call.label, call.attempts)
        return True

    def succeeded(self, call: QueuedCall) -> None:
        """An attempt has succeeded, perhaps after `close` has reported the call as lost."""
        waited_s = (self.now_ns() - call.started_ns) / 1e9
        with self.attempt_ended(call) as attempt:
            attempt.outcome = Outcome.DELIVERED
            tracing.set_outcome(attempt.span, "delivered")
            emit(FailbackDelivered(self.name, call.label, call.attempts, waited_s))
            self._end(call, "redelivered")

    def failed(self, call: QueuedCall, error: BaseException) -> Callable[[], object] | None:
        """An attempt has failed: wait for the next one, or give up.

        Returns:
            The `dead_letter` hook with its argument, or None. Call it in `with dead_letter(call)`.
        """
        now_ns = self.now_ns()
        hook = self.policy.dead_letter
        with self.attempt_ended(call) as attempt:
            span = attempt.span
            tracing.set_outcome(span, "failed", error)  # now: the frames of the error are freed
            outcome = Outcome.BUSY if code_of(error) in BUSY_CODES else Outcome.FAILED
            stop = self._wait_again(call, error, now_ns)
            if stop in (None, NO_ATTEMPTS_LEFT) and not self.has_ended_attempt(call, error):
                attempt.outcome = outcome
            if stop is None or not self._decide_end(call, "gave_up", stop.reason, error):
                return None
            tracing.set_outcome(span, "gave_up", reason=stop.reason)
            failed = call.failed_call(now_ns, stop.reason)
            waited_s, reason = failed.waited_s, stop.reason
            if stop is CHANNEL_CLOSED or stop is CANCELLED:  # the reason says all; no traceback
                _drop_frames(error)
            emit(FailbackGaveUp(self.name, call.label, call.attempts, waited_s, error, reason))
            _drop_frames(error)
            if hook is None:
                self._end(call, "gave_up")
        return None if hook is None else partial(hook, failed)

    def has_ended_attempt(self, call: QueuedCall, error: BaseException) -> bool:
        """Whether an attempt failed because this process has ended it."""
        return why_not_retried(error) is not NOT_NAMED

    def _wait_again(self, call: QueuedCall, error: BaseException, now_ns: int) -> Stop | None:
        """Let a call wait for its next attempt, or say why not. None also if it has ended."""
        try:
            delay_ns = self._next_delay_ns(call, error, now_ns)
        except Exception as raised:  # noqa: BLE001 - user code; the call must not be lost with it
            return Stop(f"its policy's `retry_on`, `backoff` or `stop` raised {raised!r}")
        if isinstance(delay_ns, Stop):
            return delay_ns
        return self._wait(call, error, now_ns, delay_ns)

    def _wait(
        self, call: QueuedCall, error: BaseException, now_ns: int, delay_ns: int
    ) -> Stop | None:
        """Let a call wait for its next attempt. Returns why it cannot."""
        with self._lock:
            if call.state is not QueuedCallState.RUNNING:
                return None
            call.state = QueuedCallState.WAITING
            call.error = error
            call.waiting_since_ns, call.next_attempt_ns = now_ns, now_ns + delay_ns
        try:
            self._set_timeout(call, delay_ns)
        except TimerStopped:
            self._lose_waiting(call)
            return None
        except (TimerError, RuntimeError) as refusal:  # RuntimeError: no thread can be started
            return Stop(f"the timer refused it: {refusal}")
        self._report_failed(call, error, now_ns, delay_ns)
        return None

    def _report_failed(
        self, call: QueuedCall, error: BaseException, now_ns: int, delay_ns: int
    ) -> None:
        waited_s, delay_s = (now_ns - call.started_ns) / 1e9, to_seconds(delay_ns)
        emit(FailbackAttemptFailed(self.name, call.label, call.attempts, waited_s, error, delay_s))
        _drop_frames(error)

    @contextlib.contextmanager
    def dead_letter(self, call: QueuedCall) -> Iterator[None]:
        """Report an error of the `dead_letter` hook, which runs inside, and end the call.

        An error that is not an `Exception` is raised again.
        """
        try:
            yield
        except BaseException as error:
            emit(DeadLetterFailed(self.name, call.label, error))
            if not isinstance(error, Exception):
                raise
        finally:
            self._end(call, "gave_up")

    @contextlib.contextmanager
    def attempt_ended(self, call: QueuedCall) -> Iterator[EndedAttempt]:
        """End an attempt when the consequences of its result are complete."""
        background, call.background = call.background, None  # the next attempt sets its own
        span, call.span = call.span, None
        began_ns, call.began_ns = call.began_ns, None
        pacer = self.pacer_of(call)
        attempt = EndedAttempt(span)
        try:
            yield attempt
        finally:
            tracing.end(span)
            BACKGROUND.end_call(background)
            if began_ns is not None:
                pacer.ended(began_ns, attempt.outcome)

    def lost(self, call: QueuedCall, reason: str) -> None:
        """End a call because its attempts can run nowhere any more."""
        with self.attempt_ended(call) as attempt:
            tracing.set_outcome(attempt.span, "lost", reason=reason)
            if self._decide_end(call, "lost", reason, call.error):
                self._report_lost([call], reason, self.now_ns())
                self._end(call, "lost")

    def end_lost_attempts(self) -> None:
        """End attempts whose event loop was closed, on a worker. Any thread; does not block."""
        if not self.on_loops:
            return
        with self._lock:
            running = self._in_state(QueuedCallState.RUNNING)
        for call in running:
            background = call.background
            if background is not None and background.is_lost is not None and background.is_lost():
                self.end_call_of_closed_loop(call)

    def end_call_of_closed_loop(self, call: QueuedCall) -> None:
        """End a call whose event loop is closed, on a worker. Any thread; does not block."""
        EXECUTOR.submit(self, partial(self.lost, call, LOOP_CLOSED))

    def _decide_end(
        self, call: QueuedCall, outcome: str, reason: str, error: BaseException
    ) -> bool:
        """Make no further attempt; the call is pending until `_end`. False if it has ended."""
        has_hook = outcome == "gave_up" and self.policy.dead_letter is not None
        with self._lock:
            if call.state in (QueuedCallState.ENDING, QueuedCallState.DONE):
                return False
            call.state, call.outcome, call.error = QueuedCallState.ENDING, outcome, error
            call.reason = reason
            if self._closes_at_ns is not None and not has_hook:
                self._to_return.append((call, self.now_ns(), reason))
            return True

    def _end(self, call: QueuedCall, outcome: str) -> None:
        with self._lock:
            self._remove(call, outcome)
        self._notify_if_empty()

    def _remove(self, call: QueuedCall, outcome: str) -> None:
        """Take a call out of the queue and count it, under the lock; idempotent."""
        if call.state is not QueuedCallState.DONE:
            call.leave()
            del self._calls[call]
            self._counts[outcome] += 1

    def _in_state(self, state: QueuedCallState) -> list[QueuedCall]:
        return [call for call in self._calls if call.state is state]

    # --- All calls ---

    def begin_flush(self, timeout: Duration | None) -> float:
        """Start an attempt of each waiting call; return how many seconds to wait for the end."""
        self._refuse_inside("flush()")
        seconds = math.inf if timeout is None else to_seconds(to_ns(timeout, subject="timeout"))
        self._start_waiting()
        self.end_lost_attempts()
        return seconds

    def begin_close(self, drain_timeout: Duration) -> float | None:
        """Queue no more calls; unless `drain_timeout` is 0, start an attempt of each waiting call.

        Returns:
            How many seconds to wait before `end_close`; None if the queue was closed before.
        """
        self._refuse_inside("close()")
        drain_ns = max(0, to_ns(drain_timeout, subject="drain_timeout"))
        if not self._close(drain_ns):
            return None
        try:
            if drain_ns:
                self._start_waiting()
                self.end_lost_attempts()
        except BaseException:  # such as Ctrl-C: the calls must be reported
            self.end_close()
            raise
        return to_seconds(drain_ns)

    def _close(self, drain_ns: int) -> bool:
        with self._lock:
            if self._closes_at_ns is not None:
                return False
            self._closes_at_ns = self.now_ns() + drain_ns
            return True

    def end_close(self, reason: str = "closed") -> list[FailedCall]:
        """End and report all calls that are left.

        Returns:
            Those, and the calls that ended since `begin_close` and that no hook got.
        """
        now_ns = self.now_ns()
        with self._lock:
            ended, self._to_return = self._to_return, []
            waiting, running = (
                self._in_state(QueuedCallState.WAITING),
                self._in_state(QueuedCallState.RUNNING),
            )
            for call in list(self._calls):
                self._remove(call, call.outcome or "lost")
        for call in waiting:
            if call.timeout is not None:
                call.timeout.cancel()
        self._notify_if_empty()
        return [
            *(call.failed_call(ended_ns, why) for call, ended_ns, why in ended),
            *self._report_lost(waiting, reason, now_ns),
            *self._report_lost(running, reason + DURING_ATTEMPT, now_ns),
        ]

    def end_at_exit(self) -> None:
        """Queue no more calls, and report those that are left when the process exits."""
        self._close(0)
        self.end_close("the program ended")

    def _report_lost(self, calls: list[QueuedCall], reason: str, now_ns: int) -> list[FailedCall]:
        failed = [call.failed_call(now_ns, reason) for call in calls]
        if failed:
            functions = tuple(dict.fromkeys(call.function for call in failed))
            oldest_s = max(call.waited_s for call in failed)
            emit(FailbackLost(self.name, functions, len(failed), oldest_s, reason))
        return failed

    def _start_waiting(self) -> None:
        with self._lock:
            waiting = self._in_state(QueuedCallState.WAITING)
        for call in waiting:
            self.start_attempt(call)

    def _refuse_inside(self, action: str) -> None:
        if _QUEUE.get() is self:
            raise RuntimeError(
                f"{self.name}: {action} inside an attempt of this queue would wait for itself"
            )


@dataclass(slots=True)
class EndedAttempt:
    """An attempt that ends."""

    span: Any
    outcome: Outcome = Outcome.UNKNOWN
    """The outcome, which the pacing of the target uses."""


class _AttemptTask:
    """The timer's task for the next attempt of a call."""

    __slots__ = ("_call", "_queue")

    def __init__(self, queue: RetryQueue, call: QueuedCall) -> None:
        self._queue = queue
        self._call = call

    def run(self, _: Timeout) -> None:
        self._queue.start_attempt(self._call)

    def timer_stopped(self, _: Timeout) -> None:
        self._queue.on_timer_stopped()

    def __repr__(self) -> str:
        return f"retry of {self._call.label}"


def why_not_retried(error: BaseException) -> Stop:
    """Say why an error that `retry_on` does not name ends a call."""
    if is_channel_closed_error(error):
        return CHANNEL_CLOSED
    # By name, because `asyncio` and `concurrent.futures` have a class each.
    return CANCELLED if type(error).__name__ == "CancelledError" else NOT_NAMED


def _drop_frames(error: BaseException) -> None:
    """Free the frames of an error: it may be kept for long, and frames hold whole requests."""
    error.__traceback__ = None


def _at_exit() -> None:
    for queue in components.of_kind("failback"):
        queue.end_at_exit()


def _in_child() -> None:
    for queue in components.of_kind("failback"):
        queue.reset_after_fork()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _entry_status(entry: QueueEntry) -> QueuedCallStatus:
    return QueuedCallStatus(
        entry.function,
        entry.age_s,
        entry.attempts,
        None if entry.next_attempt_s == math.inf else entry.next_attempt_s,
        error_kind(entry.error),
        status_text(entry.error),
    )
