"""What is done about a queue's calls, as far as both twins do the same: timer, events, errors.

The book says what is true, the twins bring threads and loops, this is between them. A ledger does
not know its invoker, so that a forgotten invoker is noticed though its calls go on: the timer's
references and the workers' keep the ledger.
"""

from __future__ import annotations

import contextlib
import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import (
    FailbackClosed,
    FailbackFull,
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
    emit,
)
from rpcwheel.exiting import BACKGROUND
from rpcwheel.rpc import DEADLINE
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from .book import Book
from .core import Admission, First, GiveUp, Last
from .entry import Entry, FailedCall, State
from .policy import checked_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .entry import Call
    from .policy import FailbackPolicy

__all__ = ["Ledger"]

TIMER_STOPPED: Final = "its timer was stopped"

_TRYING: Final[ContextVar[Ledger | None]] = ContextVar("rpcwheel_failback_trying", default=None)
"""The queue whose retry the current code is part of."""


class Ledger:
    """One queue, without the I/O of either world. Thread-safe; entries of any loop may be in it."""

    def __init__(self, policy: FailbackPolicy, timer: Timer | None) -> None:
        self.policy = checked_policy(policy)
        self.name = policy.name or "failback"
        self.book = Book(policy)
        self._timer = checked_timer(timer)
        self._told_stopped = False
        self.now_ns = clock_of(timer)
        """The clock that all times of this queue are measured by."""

    # --- First tries ---

    def park(
        self,
        rest: Callable[[], Call],
        error: BaseException,
        started_ns: int,
        launch: Callable[[Entry], None],
    ) -> bool:
        """Take in a call whose first try has failed, and arm its first retry.

        Args:
            rest: Gives the call at rest; asked for only if the call is to be tried again.
            error: How the first try failed.
            started_ns: When it began, by `now_ns`.
            launch: Starts a try of an entry, from any thread, without running it there.

        Returns:
            True if the caller gets the policy's default, False if it gets `error`.

        Raises:
            FailbackFull: From `error`: the queue, or the timer, takes no more.
            FailbackClosed: From `error`: the queue is closed, or its timer stopped.
            Exception: What a predicate or strategy of the user's raised.
        """
        now_ns = self.now_ns()
        try:
            decision = self.book.after_failure(error, now_ns, started_ns=started_ns)
        except Exception:
            self.book.count(First.RAISED)
            raise
        if isinstance(decision, GiveUp):
            self.book.count(First.RAISED)
            return False
        call = rest()
        if call.flaw is not None:
            error.add_note(f"{self.name}: not tried again, {call.flaw}")
            self.book.count(First.RAISED)
            return False
        self._admit(Entry(call, error, started_ns, now_ns, launch), error, decision.delay_ns)
        return True

    def _admit(self, entry: Entry, error: BaseException, delay_ns: int) -> None:
        admission, pending = self.book.admit(entry)
        match admission:
            case Admission.PARKED:
                self._parked(entry, error, delay_ns, pending)
            case Admission.DROPPED:
                emit(FailbackDropped(self.name, entry.label, error, pending))
            case Admission.FULL:
                raise FailbackFull(
                    f"{self.name}: {entry.label} failed and was not queued, because max_pending "
                    f"({pending}) calls are queued already; raise max_pending, or drop such calls "
                    'with overflow="drop"'
                ) from error
            case Admission.CLOSED:
                raise FailbackClosed(
                    f"{self.name}: {entry.label} failed and was not queued, because it came after "
                    "close(), or at the end of the program"
                ) from error

    def _parked(self, entry: Entry, error: BaseException, delay_ns: int, pending: int) -> None:
        try:
            self._arm(entry, delay_ns)
        except (TimerError, RuntimeError) as refusal:  # RuntimeError: no thread can be started
            self.book.refuse(entry)
            if isinstance(refusal, TimerStopped):
                self.lose_waiting()
                raise FailbackClosed(
                    f"{self.name}: {entry.label} failed and was not queued, because the queue's "
                    "timer was stopped; make a new queue (or Kit), and give it a running timer, or "
                    "none to use shared_timer()"
                ) from error
            kind = FailbackFull if isinstance(refusal, TooManyTimeouts) else FailbackClosed
            raise kind(
                f"{self.name}: {entry.label} failed and was not queued, because the timer refused "
                f"it: {refusal}"
            ) from error
        emit(FailbackQueued(self.name, entry.label, error, to_seconds(delay_ns), pending))
        _let_go(error)

    # --- Retries ---

    def _arm(self, entry: Entry, delay_ns: int) -> None:
        timer = shared_timer() if self._timer is None else self._timer
        if self._is_timer_stopped():  # one whose loop is closed would take it
            raise TimerStopped(TIMER_STOPPED)
        attempts = entry.attempts
        timeout = timer.new_timeout(_WakeUp(self, entry), to_seconds(delay_ns))
        self.book.arm(entry, attempts, timeout)
        if self._is_timer_stopped():  # meanwhile, before the book had the timeout
            self.lose_waiting()

    def _is_timer_stopped(self) -> bool:
        return self._timer is not None and getattr(self._timer, "stopped", False)

    def timer_stopped(self) -> None:
        """Have a worker report the calls that wait in the timer: it was stopped. Does not block."""
        if not self._told_stopped:
            self._told_stopped = True
            EXECUTOR.submit((self, TIMER_STOPPED), self.lose_waiting)

    def lose_waiting(self, refused: Entry | None = None) -> None:
        """Report the calls that wait in a timer that was stopped; `end_close` returns them."""
        entries = self.book.lose_waiting(refused)
        if entries:
            self._undelivered(entries, TIMER_STOPPED)

    def start(self, entry: Entry) -> None:
        """Begin the entry's next try, if it waits for one. Any thread; runs nothing here.

        If no background call may begin any more, `end_at_exit` reports the entry.
        """
        background = BACKGROUND.begin_call()  # that it is dropped ends it
        if background is not None and self.book.claim(entry, self.now_ns()):
            entry.background = background
            entry.launch(entry)

    def run_inside(self, entry: Entry, step: Callable[[], object]) -> None:
        """Run a step of a try in a copy of the caller's context."""
        context = entry.call.fresh_context()
        context.run(self.mark)
        context.run(step)

    def mark(self) -> None:
        """Mark the current context as a try of this queue, where waiting for it would not end.

        The deadline of the caller is none of its own: it has been answered long ago.
        """
        _TRYING.set(self)
        DEADLINE.set(None)

    def delivered(self, entry: Entry) -> None:
        """Note that a retry has succeeded; also one that `close` has reported as undelivered."""
        with _ending(entry):
            waited_s = (self.now_ns() - entry.started_ns) / 1e9
            emit(FailbackDelivered(self.name, entry.label, entry.attempts, waited_s))
            self.book.remove(entry, Last.DELIVERED)

    def failed(self, entry: Entry, error: BaseException) -> FailedCall | None:
        """Decide what follows after a retry has failed.

        Returns:
            The call, if it is given up and there is a dead-letter hook: pass it to `dead_letter`,
            then `bury` the entry.
        """
        now_ns = self.now_ns()
        with _ending(entry):
            end = self._again(entry, error, now_ns)
        if end is None or not self.book.give_up(entry, error):
            return None
        failed = entry.given_up(now_ns, end.reason)
        waited_s = failed.waited_s
        emit(FailbackGaveUp(self.name, entry.label, entry.attempts, waited_s, error, end.reason))
        _let_go(error)
        if self.policy.dead_letter is not None:
            return failed
        self.book.keep(failed)
        self.bury(entry)
        return None

    def _again(self, entry: Entry, error: BaseException, now_ns: int) -> GiveUp | None:
        """Let the entry wait for another try, or say why not. None also if it is gone."""
        try:
            decision = self.book.after_failure(
                error,
                now_ns,
                started_ns=entry.started_ns,
                attempts=entry.attempts,
                idle_ns=entry.idle_ns,
            )
        except Exception as broken:  # noqa: BLE001 - the user's; the call must not be lost with it
            return GiveUp(f"its policy's `retry_on`, `backoff` or `stop` raised {broken!r}")
        if isinstance(decision, GiveUp):
            return decision
        if not self.book.wait_again(entry, error, now_ns):
            return None
        try:
            self._arm(entry, decision.delay_ns)
        except TimerStopped:
            self.lose_waiting(entry)
            return None
        except (TimerError, RuntimeError) as refusal:  # RuntimeError: no thread can be started
            return GiveUp(f"the timer refused it: {refusal}")
        waited_s, delay_s = (now_ns - entry.started_ns) / 1e9, to_seconds(decision.delay_ns)
        emit(
            FailbackAttemptFailed(self.name, entry.label, entry.attempts, waited_s, error, delay_s)
        )
        _let_go(error)
        return None

    def dead_letter(self, failed: FailedCall) -> object:
        """Call the user's hook; what it returns may be awaitable."""
        hook = self.policy.dead_letter
        return None if hook is None else hook(failed)

    def bury(self, entry: Entry, error: BaseException | None = None) -> None:
        """Note that the entry's dead-letter hook has run, and how it failed if it did."""
        if error is not None:
            emit(DeadLetterFailed(self.name, entry.label, error))
        self.book.remove(entry, Last.ABANDONED)

    def lost(self, entry: Entry, reason: str) -> None:
        """Give the entry up because there is no place any more to try it at."""
        with _ending(entry):
            given_up = self.book.give_up(entry, entry.error)
        if given_up:
            (failed,) = self._undelivered([entry], reason)
            self.book.keep(failed)
            self.book.remove(entry, Last.UNDELIVERED)

    # --- All of them ---

    def begin_flush(self, timeout: Duration | None) -> float:
        """Begin the next try of all that wait, and say how many seconds to wait for the end."""
        self._refuse_inside("flush()")
        seconds = math.inf if timeout is None else to_seconds(to_ns(timeout, what="timeout"))
        self._hurry()
        return seconds

    def begin_close(self, drain_timeout: Duration) -> float | None:
        """Refuse failing calls from now on; begin the next try of all that wait, if there is time.

        Returns:
            How many seconds to go on; None if another `close` came first, which will report.
        """
        self._refuse_inside("close()")
        drain_ns = max(0, to_ns(drain_timeout, what="drain_timeout"))
        first = False
        try:
            first = self.book.close(self.now_ns() + drain_ns)
            if first and drain_ns:
                self._hurry()
        except BaseException:  # Ctrl-C: nothing may be lost in silence
            if first:
                self.end_close()
            raise
        return to_seconds(drain_ns) if first else None

    def end_close(self, reason: str = "closed") -> list[FailedCall]:
        """Give up what is left, and report it; oldest first."""
        failed, left = self.book.take_left()
        now_ns = self.now_ns()
        failed += [
            entry.given_up(now_ns, TIMER_STOPPED) for entry, stood in left if stood is State.GONE
        ]
        for state, suffix in (
            (State.WAITING, ""),
            (State.RUNNING, " in the middle of a try, which may still arrive"),
        ):
            entries = [entry for entry, stood in left if stood is state]
            failed += self._undelivered(entries, reason + suffix) if entries else []
        return failed

    def end_at_exit(self) -> None:
        """Refuse failing calls from now on, and report what the end of the program leaves."""
        self.book.close(self.now_ns())
        self.end_close("the program ended")

    def _undelivered(self, entries: list[Entry], reason: str) -> list[FailedCall]:
        now_ns = self.now_ns()
        failed = [entry.given_up(now_ns, reason) for entry in entries]
        functions = tuple(dict.fromkeys(one.function for one in failed))
        oldest_s = max(one.waited_s for one in failed)
        emit(FailbackLost(self.name, functions, len(failed), oldest_s, reason))
        return failed

    def _hurry(self) -> None:
        for entry in self.book.waiting():
            self.start(entry)

    def _refuse_inside(self, what: str) -> None:
        if _TRYING.get() is self:
            raise RuntimeError(
                f"{self.name}: {what} by a function that is being retried would wait for itself"
            )


class _WakeUp:
    """The timer's task for one entry: on the timer's thread it only hands over."""

    __slots__ = ("_entry", "_ledger")

    def __init__(self, ledger: Ledger, entry: Entry) -> None:
        self._ledger = ledger
        self._entry = entry

    def run(self, _: Timeout) -> None:
        self._ledger.start(self._entry)

    def timer_stopped(self, _: Timeout) -> None:
        self._ledger.timer_stopped()

    def __repr__(self) -> str:
        return f"retry of {self._entry.label}"


@contextlib.contextmanager
def _ending(entry: Entry) -> Iterator[None]:
    """Note that a try has ended, when what follows from it is in the book."""
    background, entry.background = entry.background, None  # the next try has one of its own
    try:
        yield
    finally:
        BACKGROUND.end_call(background)


def _let_go(error: BaseException) -> None:
    """Free the frames that an error has passed: it may wait for long, they hold whole requests."""
    error.__traceback__ = None
