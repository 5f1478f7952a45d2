"""The queue of failed calls that are attempted again in the background.

`FailbackQueue` holds the calls of one `FailbackPolicy`. It keeps the state of each call, sets the
timeouts, counts, and emits the events. Other classes do the rest:

    * `RetryRules` decides whether and when a call is attempted again.
    * `Pacers` decides when an attempt that is due begins.
    * `HeldCalls` has the calls that are in the memory, with their lock and counts.
    * `JournalStore` has the calls in a journal, if the policy has one.
    * `Attempt` is one attempt, to which the invokers in `sync.py` and `aio.py` report the result.
      They give each call a `start` function, which starts an attempt on a worker thread or an event
      loop.

The states of a call in the memory:

    WAITING    the timer has a timeout for the next attempt
    RUNNING    an attempt has begun
    ENDING     there is no further attempt; the `dead_letter` hook may be running
    DONE       the call is not in the memory any more

Without a journal a queued call stays in the memory, and is counted once when it ends: as
`redelivered`, `gave_up` or `lost`. A journal gives it to the queue shortly before it is due
(`adopt`) and gets it back after each attempt; it is never lost.

Rules:
    * States and counts change under the lock of the calls. If several threads want to change the
      state of a call, one of them succeeds.
    * No event is emitted and no user code runs under the lock.
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
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.exiting import BACKGROUND
from rpcwheel._grpc.calls import code_of
from rpcwheel.call.failback_policy import FailbackPolicy
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import (
    FailbackClosed,
    FailbackError,
    FailbackFull,
    JournalOutcomeUnknown,
    TimerError,
    TimerStopped,
    TooManyTimeouts,
    short_repr,
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

from .held_calls import FailbackStats, HeldCalls
from .journaled import JournalStore
from .pacer import Pacers
from .pacing import Outcome
from .queued_call import QueuedCallState
from .rules import (
    CANCELLED,
    CHANNEL_CLOSED,
    NO_ATTEMPTS_LEFT,
    RetryRules,
    counts_as_attempt,
    was_ended_here,
)
from .timeouts import TIMER_STOPPED, Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from contextvars import Context

    from rpcwheel._concurrency.exiting import BackgroundCall
    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .pacer import Pacer
    from .queued_call import QueuedCall, QueueEntry

LOOP_CLOSED: Final = "its event loop is closed"
NOT_CLOSED: Final = "the program ended before close()"
CLOSED_LATE: Final = "closed after the main thread had ended"
DURING_ATTEMPT: Final = ", during an attempt, which may still succeed"

_QUEUE: Final[ContextVar[FailbackQueue | None]] = ContextVar(
    "rpcwheel_failback_queue", default=None
)
"""The queue whose attempt the current code is part of."""

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
    """Calls that are queued; with a journal, those of this queue in all processes, as last
    counted."""
    max_pending: int
    oldest_age_s: float | None
    """None: the queue is empty."""
    stats: FailbackStats
    entries: tuple[QueuedCallStatus, ...]
    """The oldest `MAX_STATUS_ENTRIES` calls."""
    problem: str


class FailbackQueue:
    """The failed calls of one policy, and when each is attempted again. Thread-safe.

    A queue may hold calls of any event loops and threads. With a journal, `pending`, `entries` and
    `flush` are about all calls of the queue in the journal. What `FailbackStats` counts is what
    this process has done; its `pending` are the calls that this process has taken.
    """

    def __init__(self, policy: FailbackPolicy, timer: Timer | None) -> None:
        """Make an empty queue; the arguments and errors are those of `InvokerBase`.

        A journal is connected when its first call is appended or taken.
        """
        checked_policy: object = policy
        if not isinstance(checked_policy, FailbackPolicy):
            raise TypeError(
                "policy must be a FailbackPolicy, such as FailbackPolicy(retry_on='UNAVAILABLE'), "
                f"not {short_repr(checked_policy)}"
            )
        self.policy = policy
        self.name = policy.name or "failback"
        self._timeouts = Timeouts(timer)
        self.now_ns = self._timeouts.now_ns
        """The clock of all times of this queue."""
        self.calls = HeldCalls(self.now_ns, policy.capacity)
        self.pacers = Pacers(policy.rate, policy.max_in_flight, self._timeouts)
        self._rules = RetryRules(policy)
        self._timer_stop_seen = False
        self.on_loops = False
        """Whether attempts run on event loops, which may be closed under them."""
        self._to_return: list[tuple[QueuedCall, int, str]] = []
        """Ended calls that `close` returns, each with the time and the reason of its end."""
        self.store = None if policy.journal is None else JournalStore(policy, self, self._timeouts)
        """Where calls wait; None: in the memory."""
        self.durable = self.store is not None
        components.add("failback", self)
        if not BACKGROUND.add(self):
            self.end_at_exit()

    def reset_after_fork(self) -> None:
        """Begin with an empty queue in a forked child."""
        self.calls.reset()
        self.pacers.reset()
        self._to_return = []
        if self.store is not None:
            self.store.reset()
        BACKGROUND.add(self)  # it is reset first, because its fork hook was registered first

    # --- Reading ---

    @property
    def pending(self) -> int:
        """How many calls are queued, those with a running attempt included."""
        return len(self.calls) if self.store is None else self.store.pending

    def entries(self) -> list[QueueEntry]:
        """List the calls, oldest first. With a journal it blocks."""
        return self.calls.entries() if self.store is None else self.store.entries()

    def stats(self) -> FailbackStats:
        """Get the counts so far."""
        return self.calls.stats()

    def status(self) -> QueueStatus | None:
        """Describe the queue now; None if it was closed and holds no calls. Never blocks."""
        if self.calls.closed and not len(self.calls):
            return None
        entries, pending = self.calls.entries(MAX_STATUS_ENTRIES), self.pending
        return QueueStatus(
            self.name,
            pending,
            self.policy.capacity,
            entries[0].age_s if entries else None,
            self.stats(),
            tuple(map(_entry_status, entries)),
            "it is full" if pending >= self.policy.capacity else waiting_calls(pending),
        )

    # --- First attempts ---

    def enqueue(self, call: QueuedCall) -> Literal["queued", "dropped"] | None:
        """Queue a call whose first attempt has failed. With a journal it blocks.

        Returns:
            "queued", or "dropped" if the queue is full and the policy drops calls then: the caller
            gets the policy's default. None: the caller gets the call's error.

        Raises:
            FailbackFull: From the call's error: the queue, or the timer, is full.
            FailbackClosed: From the call's error: the queue is closed, or its timer was stopped.
            JournalError: From the call's error: the journal has not stored it.
            Exception: A predicate, wait or stop object of the user's raised it.
        """
        delay_ns = self.first_delay_ns(call)
        if delay_ns is None:
            return None
        append = partial(self.calls.append, call)
        if self.store is not None:
            append = partial(self.store.append, call, delay_ns)
        return self.end_enqueue(call, delay_ns, append)

    def first_delay_ns(self, call: QueuedCall) -> int | None:
        """Decide how long a call waits for its second attempt; None if it is not queued.

        Raises what a predicate, wait or stop object of the user's raises.
        """
        now_ns = self.now_ns()
        try:
            delay_ns = self._rules.next_delay_ns(call, call.error, now_ns, self.calls.closes_at_ns)
        except Exception:
            self.calls.count("failed")
            raise
        obstacle = None
        if not isinstance(delay_ns, Stop):
            obstacle = call.saved.obstacle if self.store is None else self.store.prepare(call)
        if obstacle is not None:
            call.error.add_note(f"{self.name}: not queued, {obstacle}")
        if isinstance(delay_ns, Stop) or obstacle is not None:
            self.calls.count("failed")
            return None
        call.waiting_since_ns, call.next_attempt_ns = now_ns, now_ns + delay_ns
        return delay_ns

    def end_enqueue(
        self, call: QueuedCall, delay_ns: int, append: Callable[[], None]
    ) -> Literal["queued", "dropped"]:
        """Append a call to the store; arguments are the result of `first_delay_ns`, and `append`.

        Returns and raises what `enqueue` does.
        """
        try:
            append()
        except FailbackError as error:
            error.__traceback__ = None  # its frames have `append`, whose future has the error
            if isinstance(error, FailbackFull) and self.policy.overflow == "drop":
                self.calls.count("dropped")
                emit(FailbackDropped(self.name, call.label, call.error, self.pending))
                return "dropped"
            self.calls.count("rejected")
            raise self._refusal(type(error), call, str(error)) from call.error
        pending = self.pending
        if not self.durable:
            self._set_first_timeout(call, delay_ns)
        emit(FailbackQueued(self.name, call.label, call.error, to_seconds(delay_ns), pending))
        _drop_frames(call.error, with_context=False)
        return "queued"

    def _set_first_timeout(self, call: QueuedCall, delay_ns: int) -> None:
        try:
            self._set_timeout(call, delay_ns, limited=True)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            with self.calls.lock:
                if call.state is not QueuedCallState.WAITING:
                    return  # `flush` or `close` has started its attempt meanwhile
                self.calls.remove(call)
                self.calls.counts["queued_total"] -= 1
                self.calls.counts["rejected"] += 1
            self.calls.notify_if_empty()
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

    # --- The timer ---

    def _set_timeout(self, call: QueuedCall, delay_ns: int, *, limited: bool = False) -> None:
        deliveries = call.deliveries
        expired = partial(self.start_attempt, call)
        stopped = self.on_timer_stopped
        timeout = self._timeouts.set(delay_ns, expired, stopped, call.label, limited=limited)
        with self.calls.lock:
            wanted = call.state is QueuedCallState.WAITING and call.deliveries == deliveries
            if wanted:
                call.timeout = timeout
        if not wanted:  # `flush` or `close` has started the attempt meanwhile
            timeout.cancel()
        if self._timeouts.stopped:  # it was stopped before `call.timeout` was set
            self._lose_waiting()

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
        now_ns, lost = self.now_ns(), []
        with self.calls.lock:
            for call in self.calls.in_state(QueuedCallState.WAITING):
                has_waited = call.timeout is not None or call.is_ready or call is refused
                if has_waited and not self._give_back(call):
                    self._remove(call, "lost")
                    self._to_return.append((call, now_ns, TIMER_STOPPED))
                    lost.append(call)
        self.calls.notify_if_empty()
        _report_lost(self.name, lost, TIMER_STOPPED, now_ns)

    # --- Further attempts ---

    def adopt(self, call: QueuedCall, delay_ns: int) -> None:
        """Attempt a call that was taken from a journal when it is due, or give it up now."""
        background = BACKGROUND.begin_call() if call.reason else None
        with self.calls.lock:
            if self.calls.closed:
                call.leave()
                self._give_back(call)
                return
            self.calls.add(call)
            if call.reason:
                call.state = QueuedCallState.RUNNING
                call.attempt = Attempt(self, call, background)
        if call.reason:
            call.start(call.attempt)
        elif delay_ns <= 0:
            self.start_attempt(call)
        else:
            try:
                self._set_timeout(call, delay_ns)
            except (TimerError, RuntimeError):  # the timer was stopped, or has no thread
                with self.calls.lock:
                    if call.state is QueuedCallState.WAITING:
                        self._give_back(call)

    def start_attempt(self, call: QueuedCall) -> None:
        """Start the next attempt of a call as soon as the pacing of its target allows.

        Any thread; does not block.
        """
        with self.calls.lock:
            if call.state is not QueuedCallState.WAITING or call.is_ready:
                return
            call.is_ready = True
        self.pacers.of(call.pacing_key).add(self, call)

    def start_now(self, call: QueuedCall, pacer: Pacer, began_ns: int) -> bool:
        """Start an attempt of a call if it waits for one. Any thread; does not block.

        If the process may begin no background call any more, `end_at_exit` reports the call.
        """
        if self.store is not None and not self.store.may_attempt(call):
            return False
        background = BACKGROUND.begin_call()  # it ends when it is garbage
        if background is None:
            return False
        with self.calls.lock:
            if not call.is_at_pacer:
                return False
            call.state = QueuedCallState.RUNNING
            call.is_ready = False
            call.attempts += 1
            call.deliveries += 1
            call.idle_ns += began_ns - call.waiting_since_ns
            call.attempt = attempt = Attempt(self, call, background, pacer, began_ns)
            timeout, call.timeout = call.timeout, None
            self.calls.counts["attempts"] += 1
        if timeout is not None:
            timeout.cancel()
        call.start(attempt)
        return True

    def wait_again(
        self, call: QueuedCall, error: BaseException, now_ns: int, *, counts: bool
    ) -> Stop | None:
        """Let a call wait for its next attempt, or say why not. None also if it has ended."""
        if not counts:
            with self.calls.lock:
                call.uncount_attempt()
        try:
            delay_ns = self._rules.next_delay_ns(call, error, now_ns, self.calls.closes_at_ns)
        except Exception as raised:  # noqa: BLE001 - user code; the call must not be lost with it
            return Stop(f"its policy's `retry_on`, `backoff` or `stop` raised {raised!r}")
        if isinstance(delay_ns, Stop):
            return delay_ns
        with self.calls.lock:
            if call.state is not QueuedCallState.RUNNING:
                return None
            call.state, call.error = QueuedCallState.WAITING, error
            call.waiting_since_ns, call.next_attempt_ns = now_ns, now_ns + delay_ns
            if self.store is not None:
                self.store.postpone(call, delay_ns, counts=counts)
                self.calls.remove(call)
        if self.store is None:
            try:
                self._set_timeout(call, delay_ns)
            except TimerStopped:
                self._lose_waiting(call)
                return None
            except (TimerError, RuntimeError) as refusal:  # RuntimeError: no thread can be started
                return Stop(f"the timer refused it: {refusal}")
        waited_s, delay_s = (now_ns - call.started_ns) / 1e9, to_seconds(delay_ns)
        emit(FailbackAttemptFailed(self.name, call.label, call.attempts, waited_s, error, delay_s))
        _drop_frames(error)
        self.calls.notify_if_empty()
        return None

    def lose(self, call: QueuedCall, reason: str) -> None:
        """End a call because its attempts can run nowhere any more."""
        now_ns, lost = self.now_ns(), []
        with self.calls.lock:
            if call.state in (QueuedCallState.ENDING, QueuedCallState.DONE):
                return
            if not self._give_back(call):
                self._remove(call, "lost")
                lost.append(call)
                if self.calls.closed:
                    self._to_return.append((call, now_ns, reason))
        _report_lost(self.name, lost, reason, now_ns)
        self.calls.notify_if_empty()

    def end_lost_attempts(self) -> None:
        """End attempts whose event loop was closed, on a worker. Any thread; does not block."""
        if not self.on_loops:
            return
        for call in self.calls.in_state(QueuedCallState.RUNNING):
            attempt: Attempt | None = call.attempt
            background = None if attempt is None else attempt.background
            is_lost = None if background is None else background.is_lost
            if attempt is not None and is_lost is not None and is_lost():
                attempt.loop_closed()

    def give_up(self, call: QueuedCall, reason: str, error: BaseException) -> bool:
        """Make no further attempt; the call is pending until `end`. False if it has ended."""
        with self.calls.lock:
            if call.state in (QueuedCallState.ENDING, QueuedCallState.DONE):
                return False
            call.state, call.error, call.reason = QueuedCallState.ENDING, error, reason
            if self.calls.closed and self.policy.dead_letter is None:
                self._to_return.append((call, self.now_ns(), reason))
            return True

    def end(self, call: QueuedCall, outcome: str) -> None:
        """Take a call out of the queue, and count it. Idempotent."""
        with self.calls.lock:
            self._remove(call, outcome)
        self.calls.notify_if_empty()

    def _remove(self, call: QueuedCall, outcome: str) -> None:
        if self.calls.remove(call):
            self.calls.counts[outcome] += 1
            if self.store is not None:
                self.store.settle(call, outcome)

    def _give_back(self, call: QueuedCall) -> bool:
        """Leave a call to other processes, under the lock. False without a journal: it is lost."""
        if self.store is None:
            return False
        self.store.give_back(call)
        self.calls.remove(call)
        return True

    # --- All calls ---

    def begin_flush(self, timeout: Duration | None) -> float:
        """Start an attempt of each waiting call; return how many seconds to wait for the end."""
        refuse_inside(self, "flush()")
        seconds = math.inf if timeout is None else to_seconds(to_ns(timeout, subject="timeout"))
        self._start_waiting()
        return seconds

    def when_flushed(self) -> Future[None]:
        """Get a future that is done when `flush` has nothing to wait for. Cancel it after use."""
        if self.store is None or self.calls.closed:
            return self.calls.when_empty()
        return self.store.flushed()

    def begin_close(self, drain_timeout: Duration) -> float | None:
        """Queue no more calls; unless `drain_timeout` is 0, start an attempt of each waiting call.

        With a journal no attempt is started: waiting calls are given back to it.

        Returns:
            How many seconds to wait before `end_close`; None if the queue was closed before.
        """
        refuse_inside(self, "close()")
        drain_ns = max(0, to_ns(drain_timeout, subject="drain_timeout"))
        drain_s = to_seconds(drain_ns)  # first: Ctrl-C in a later call would leave the queue closed
        if not self.calls.close(self.now_ns() + drain_ns):
            return None
        try:
            if self.durable:
                with self.calls.lock:
                    for call in self.calls.in_state(QueuedCallState.WAITING):
                        self._give_back(call)
                self.calls.notify_if_empty()
                self.end_lost_attempts()
            elif drain_ns:
                self._start_waiting()
        except BaseException:  # such as Ctrl-C: the calls must be reported
            self.end_close()
            raise
        return drain_s

    def end_close(
        self, *, at_exit: bool = False, waits: list[Callable[[], object]] | None = None
    ) -> list[FailedCall]:
        """End and report all calls that are left. A journal gets them back, which may block.

        Args:
            at_exit: Whether the process exits, and the queue was not closed before.
            waits: Gets a function that waits for the journal; None: this waits.

        Returns:
            Those that are lost, and the calls that ended since `begin_close` and that no hook got.
        """
        reason = NOT_CLOSED if at_exit else "closed"
        if not at_exit and BACKGROUND.main_thread_has_ended:
            reason = CLOSED_LATE
        now_ns = self.now_ns()
        with self.calls.lock:
            ended, self._to_return = self._to_return, []
            lost = [] if self.durable else list(self.calls)
            waiting = [call for call in lost if call.state is QueuedCallState.WAITING]
            running = [call for call in lost if call.state is QueuedCallState.RUNNING]
            for call in self.calls:
                if call.state is QueuedCallState.ENDING:
                    self._remove(call, "gave_up")
                elif self.durable:
                    self.calls.remove(call)
                else:
                    self._remove(call, "lost")
        self.calls.notify_if_empty()
        wait = (lambda: None) if self.store is None else self.store.begin_close(at_exit=at_exit)
        failed = [
            *(call.failed_call(ended_ns, why) for call, ended_ns, why in ended),
            *_report_lost(self.name, waiting, reason, now_ns),
            *_report_lost(self.name, running, reason + DURING_ATTEMPT, now_ns),
        ]
        if waits is None:
            wait()
        else:
            waits.append(wait)
        return failed

    def end_at_exit(self) -> None:
        """Queue no more calls, and end those that are left when the process exits."""
        self.calls.close(self.now_ns())
        self.end_close(at_exit=True)

    def _start_waiting(self) -> None:
        for call in self.calls.in_state(QueuedCallState.WAITING):
            self.start_attempt(call)
        self.end_lost_attempts()


class Attempt:
    """One attempt of a call. Its result may come after the call has ended, as by `close`."""

    __slots__ = ("_began_ns", "_outcome", "_pacer", "_span", "background", "call", "queue", "task")

    def __init__(
        self,
        queue: FailbackQueue,
        call: QueuedCall,
        background: BackgroundCall | None = None,
        pacer: Pacer | None = None,
        began_ns: int = 0,
    ) -> None:
        """Begin an attempt. Without a pacer, the call is given up instead."""
        self.queue = queue
        self.call = call
        self.background = background
        self._pacer = pacer
        self._began_ns = began_ns
        self._outcome = Outcome.UNKNOWN
        """What its pacer gets."""
        self._span: Any = None
        self.task: Any = None
        """Its task or that of the dead-letter hook: an event loop itself keeps a weak reference."""

    def context(self) -> Context:
        """A context for the attempt: the caller's, without the deadline of the caller's own call.

        If the attempt has begun, its span is the current one.
        """
        context = self.call.saved.copy_context()
        context.run(tracing.make_current, self._span)
        context.run(_QUEUE.set, self.queue)
        context.run(DEADLINE.set, None)
        return context

    def begin(self) -> bool:
        """Begin the span of the attempt, and make it the current one. Runs in its context.

        Returns:
            False if the call has ended while the attempt waited for a worker or its loop, or if
            the process was paused so long that another one may have the call.
        """
        queue, call = self.queue, self.call
        if queue.store is not None and not queue.store.may_attempt(call):
            with queue.calls.lock:
                queue.calls.remove(call)
            queue.calls.notify_if_empty()
        if call.state is QueuedCallState.DONE:
            with self._ended():
                return False
        self._span = tracing.begin_delivery(queue.name, call.label, call.attempts)
        return True

    def succeeded(self) -> None:
        """Deliver the call, perhaps after `close` has reported it as lost."""
        queue, call = self.queue, self.call
        waited_s = (queue.now_ns() - call.started_ns) / 1e9
        self._outcome = Outcome.DELIVERED
        with self._ended() as span:
            tracing.set_outcome(span, "delivered")
            emit(FailbackDelivered(queue.name, call.label, call.attempts, waited_s))
            queue.end(call, "redelivered")

    def failed(self, error: BaseException) -> Callable[[], object] | None:
        """Let the call wait for its next attempt, or give it up.

        Returns:
            The `dead_letter` hook with its argument, or None. Call it in `with dead_letter()`.
        """
        queue, call, hook = self.queue, self.call, self.queue.policy.dead_letter
        now_ns = queue.now_ns()
        with self._ended() as span:
            tracing.set_outcome(span, "failed", error)  # now: the frames of the error are freed
            is_closing = queue.calls.closed
            shows_server_state = not was_ended_here(call, error, is_closing=is_closing)
            counts = counts_as_attempt(call, error, is_closing=is_closing)
            stop = queue.wait_again(call, error, now_ns, counts=counts)
            if shows_server_state and stop in (None, NO_ATTEMPTS_LEFT):
                self._outcome = Outcome.of_failure(code_of(error))
            if stop is None or not queue.give_up(call, stop.reason, error):
                return None
            tracing.set_outcome(span, "gave_up", reason=stop.reason)
            failed = call.failed_call(now_ns, stop.reason)
            waited_s, reason = failed.waited_s, stop.reason
            if stop is CHANNEL_CLOSED or stop is CANCELLED:  # the reason says all; no traceback
                _drop_frames(error)
            emit(FailbackGaveUp(queue.name, call.label, call.attempts, waited_s, error, reason))
            _drop_frames(error)
            if hook is None:
                queue.end(call, "gave_up")
        return None if hook is None else partial(hook, failed)

    @contextlib.contextmanager
    def dead_letter(self) -> Iterator[None]:
        """Report an error of the `dead_letter` hook, which runs inside, and end the call.

        An error that is not an `Exception` is raised again.
        """
        try:
            yield
        except BaseException as error:
            emit(DeadLetterFailed(self.queue.name, self.call.label, error))
            if not isinstance(error, Exception):
                raise
        finally:
            self.queue.end(self.call, "gave_up")

    def lost(self, reason: str) -> None:
        """End the attempt because it can run nowhere any more."""
        with self._ended() as span:
            tracing.set_outcome(span, "lost", reason=reason)
            self.queue.lose(self.call, reason)

    def loop_closed(self) -> None:
        """End the attempt on a worker, as its loop is closed. Any thread; does not block."""
        EXECUTOR.submit(self.queue, partial(self.lost, LOOP_CLOSED))

    @contextlib.contextmanager
    def _ended(self) -> Iterator[Any]:
        """End the attempt when the consequences of its result are complete. Idempotent.

        Yields its span.
        """
        background, self.background = self.background, None
        pacer, self._pacer = self._pacer, None
        span, self._span = self._span, None
        if self.call.attempt is self:
            self.call.attempt = None
        try:
            yield span
        finally:
            tracing.end(span)
            BACKGROUND.end_call(background)
            if pacer is not None:
                pacer.ended(self._began_ns, self._outcome)


def _drop_frames(error: BaseException, *, with_context: bool = True) -> None:
    """Free the frames of an error: it may be kept for long, and frames hold whole requests.

    Those of its causes and of the errors of a group are freed too, and `with_context` those of the
    errors during whose handling it was raised. The caller of a first attempt may handle such an
    error itself.
    """
    errors, seen = [error], set[int]()
    while errors:
        each = errors.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        linked = each.__cause__, each.__context__ if with_context else None
        errors += [cause for cause in linked if cause is not None]
        if isinstance(each, BaseExceptionGroup):
            errors += each.exceptions


def _report_lost(queue: str, calls: list[QueuedCall], reason: str, now_ns: int) -> list[FailedCall]:
    failed = [call.failed_call(now_ns, reason) for call in calls]
    if failed:
        functions = tuple(dict.fromkeys(call.function for call in failed))
        oldest_s = max(call.waited_s for call in failed)
        emit(FailbackLost(queue, functions, len(failed), oldest_s, reason))
    return failed


def refuse_inside(queue: FailbackQueue, action: str) -> None:
    """Raise RuntimeError if an action is called inside an attempt of a queue."""
    if _QUEUE.get() is queue:
        raise RuntimeError(
            f"{queue.name}: {action} inside an attempt of this queue would wait for itself"
        )


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
