"""The part of a timer that is the same for all: limits, running tasks, errors, counts, stop.

`TimerCore` has no thread and no event loop. A subclass defines how it is woken up (`_wake`) and
what it does with the result of a task (`_finish`).
"""

from __future__ import annotations

import sys
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from rpcwheel._concurrency.callbacks import callable_name
from rpcwheel.durations import MAX_NS, NEVER
from rpcwheel.errors import (
    ConfigurationError,
    TimerStopped,
    TooManyTimeouts,
    check_callback,
    safe_repr,
    time_text,
)
from rpcwheel.events.events import ExecutorRejected, TaskFailed, TaskSlow, TooManyTimers
from rpcwheel.events.hub import emit
from rpcwheel.telemetry import components
from rpcwheel.timer._front import SLOW_NS
from rpcwheel.timer.api import (
    LATE_S,
    LATE_SHARE,
    LATENESS_BOUNDS_S,
    Lateness,
    TimerStats,
    TimerStatus,
)
from rpcwheel.timer.queue import TimerBase, TimerQueue, TimerState, default_queue

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rpcwheel.timer._base import Timeout
    from rpcwheel.timer.api import TaskLike

OnError = Callable[["Timeout", BaseException], object]

DEFAULT_NAME: Final = "rpcwheel-timer"
"""The name of a timer that is given none, as that of `shared_timer()`."""

BATCH = 256  # tasks run before a timer checks for a stop and for other work of its loop
LIVE_LIMIT = 64  # the number of timers from which Netty's HashedWheelTimer warns
WINDOW_NS: Final = 30 * 10**9  # a status counts this window and the one before: the last minute

_warned: list[int] = []


class _Window(NamedTuple):
    """The counts of a timer at the beginning of a window."""

    began_ns: int
    fired: int
    late: int


class TimerCore(TimerBase):
    """The base class of `WheelTimer`, `AsyncWheelTimer` and `ManualTimer`."""

    _on_users_thread = True  # whether a KeyboardInterrupt of a task is raised to the user's code
    _how_to_stop = ""  # for the ResourceWarning; "": no warning

    def __init__(
        self,
        queue: TimerQueue | None,
        *,
        max_pending: int | None = None,
        executor: Executor | None = None,
        name: str = DEFAULT_NAME,
        on_error: OnError | None = None,
        manual: bool = False,
    ) -> None:
        queue = _checked_queue(queue)
        _check(max_pending, executor, on_error)
        if max_pending is not None:
            max_pending = min(max_pending, MAX_NS)  # it is added to a count, in 64 bits
        queue.attach()
        self.name = name
        super().__init__(TimerState(queue, weakref.ref(self), manual), executor)
        self._on_error = on_error
        self._max_pending = max_pending
        if max_pending is not None:
            queue.limit(max_pending)
        queue.advance(self._timer_state.now())

    def _reset_counts(self) -> None:
        super()._reset_counts()
        self._rejected = self._failed = self._refused = self._wakeups = 0
        self._slowest_task: str | None = None
        self._windows = (_Window(self._timer_state.now(), 0, 0),) * 2  # the last one, the current

    @property
    def pending(self) -> int:
        """The number of pending timeouts, without the one that runs."""
        return len(self._timer_state.queue)

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called."""
        return self._stopped

    @property
    def queue_type(self) -> str:
        """The name of the class of its queue."""
        return type(self._timer_state.queue).__name__

    @property
    def overdue(self) -> float:
        """By how many seconds its next wake-up is overdue; 0.0 while it runs tasks."""
        state = self._timer_state
        armed_ns = state.armed_ns
        return max(0, state.now() - armed_ns) / 1e9 if armed_ns else 0.0

    def stats(self) -> TimerStats:
        """Return the counts so far, and how late tasks were started."""
        queue = self._timer_state.queue
        gone, started = queue._removed, queue._added
        lateness = Lateness(
            self._fired, self._late_ns / 1e9, self._max_late_ns / 1e9, self._late_counts()
        )
        return TimerStats(
            pending=started - gone,
            started=started,
            fired=self._fired,
            cancelled=gone - self._fired,
            rejected=self._rejected,
            failed=self._failed,
            refused=self._refused,
            wakeups=self._wakeups,
            lateness=lateness,
            slowest_task=self._slowest_task,
            slowest_task_s=self._slowest_ns / 1e9,
        )

    def status(self) -> TimerStatus | None:
        """Describe the timer now; None if it was stopped."""
        if self.stopped:
            return None
        stats, late_s = self.stats(), self.overdue
        late, fired = self._recent_counts()
        problem = ""
        if late_s > LATE_S:
            problem = f"it should have woken up {time_text(late_s)} ago"
        elif late > LATE_SHARE * fired:
            problem = f"{late} of {fired} tasks started over {LATE_S:g} s late in the last minute"
        return TimerStatus(self.name, self.queue_type, stats, late_s, problem)

    def stop(self) -> list[Timeout]:
        """Stop the timer, and return the pending timeouts."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __del__(self) -> None:
        """Release the pending tasks, which the garbage collector does not see in compiled form."""
        if getattr(self, "_stopped", True):
            return
        description, pending = repr(self), self.pending
        self._stopped = True
        self._end()
        if pending and self._how_to_stop:  # last: a warning may raise
            warnings.warn(
                f"{description} was not stopped; {self._how_to_stop}",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    @safe_repr
    def __repr__(self) -> str:
        state = "stopped" if self.stopped else f"{self.pending} pending"
        return f"<{type(self).__name__} {self.name!r} {self.queue_type} {state}>"

    def _wake(self, deadline_ns: int) -> None:
        """Wake up earlier than planned, for a new deadline."""
        raise NotImplementedError

    def _refuse(self) -> None:
        """Count and raise that the queue did not accept a timeout."""
        self._rejected += 1
        if self._stopped or self._timer_state.queue._capacity < 0:
            raise TimerStopped(f"{self.name} was stopped; make a new timer, or use shared_timer()")
        raise TooManyTimeouts(
            f"{self.name} has {self._max_pending} pending timeouts (max_pending); "
            "cancel some, or raise the limit"
        )

    def _finish(self, timeout: Timeout, result: object) -> None:
        """Handle the result of a task. A coroutine cannot run without an event loop."""
        close = getattr(result, "close", None)
        if hasattr(result, "__await__") and close is not None:
            close()
            raise TypeError(
                f"{callable_name(timeout._task)} is a coroutine function; use an AsyncWheelTimer"
            )

    def _submit(self, timeout: Timeout, executor: Executor) -> None:
        timeout._keep_task(timeout._task)  # an executor that is shut down keeps it forever
        try:
            executor.submit(self._run_on_executor, timeout)
        except BaseException as error:  # noqa: BLE001 - any executor; the thread continues
            self._refused += 1
            emit(ExecutorRejected(self.name, callable_name(timeout._task), error))
            self._notify(timeout, "refused", error, catch=BaseException)
            timeout._release_task()

    def _run_on_executor(self, timeout: Timeout) -> None:
        task = timeout._task
        try:
            result = task(timeout) if callable(task) else task.run(timeout)  # type: ignore[attr-defined]
            if result is not None:
                self._finish(timeout, result)
        except BaseException as error:
            if self._report(timeout, error):
                raise
        timeout._release_task()

    def _report(self, timeout: Timeout, error: BaseException) -> bool:
        self._failed += 1
        if self._on_error is None:
            emit(TaskFailed(self.name, callable_name(timeout._task), error))
        else:
            try:
                self._on_error(timeout, error)
            except BaseException as second:  # noqa: BLE001 - the user's callback
                emit(TaskFailed(self.name, callable_name(self._on_error), second))
        return self._on_users_thread and not isinstance(error, Exception)

    def _begin_window(self, now_ns: int) -> None:
        previous, current = self._windows[1], self._window(now_ns)
        if now_ns - previous.began_ns >= 2 * WINDOW_NS:  # no task ran in the window before this one
            previous = current
        self._windows = previous, current
        self._window_end_ns = now_ns + WINDOW_NS

    def _window(self, now_ns: int) -> _Window:
        late = sum(self._late_counts()[bisect_left(LATENESS_BOUNDS_S, LATE_S) + 1 :])
        return _Window(now_ns, self._fired, late)

    def _recent_counts(self) -> tuple[int, int]:
        """Return how many tasks were late in the last minute, and how many were started."""
        previous, current = self._windows
        now = self._window(self._timer_state.now())
        age_ns = now.began_ns - current.began_ns
        if age_ns < WINDOW_NS:
            since = previous
        elif age_ns < 2 * WINDOW_NS:
            since = current
        else:
            since = now
        return now.late - since.late, now.fired - since.fired

    def _note_duration(self, task: object, took_ns: int) -> None:
        now_ns = self._timer_state.now()
        if now_ns >= self._window_end_ns:  # the tasks after a slow one belong to the present
            self._begin_window(now_ns)
        name = callable_name(task)
        if took_ns > self._slowest_ns:
            self._slowest_ns = took_ns
            self._slowest_task = name
        if took_ns >= SLOW_NS:
            emit(TaskSlow(self.name, name, took_ns / 1e9))

    def resubmit(self, task: TaskLike, delay: float) -> Timeout:
        """Schedule a task that was accepted before; `max_pending` does not apply. Any thread.

        Otherwise a periodic task or a queued call would be lost if `max_pending` was reached for a
        moment. In the meantime, `new_timeout` on other threads is not limited either.

        Raises:
            TimerStopped: The timer was stopped.
        """
        queue = self._timer_state.queue
        if self._max_pending is None:
            return self.new_timeout(task, delay)
        while True:
            if queue._capacity >= 0:  # no thread switch from here to the end of the block
                queue._capacity = queue._limit = NEVER
            try:
                return self.new_timeout(task, delay)
            except TooManyTimeouts:  # another thread has set the limit again
                self._rejected -= 1
            finally:
                if queue._capacity >= 0:  # no thread switch; negative: closed meanwhile
                    queue._capacity = self._max_pending
                    queue._limit = -1

    def _end(self) -> list[Timeout]:
        """Close the queue and return its timeouts. No task runs meanwhile."""
        queue = self._timer_state.queue
        queue.limit(-1)
        undelivered = queue.drain()
        if not sys.is_finalizing():
            components.end_timer(self)
            for timeout in undelivered:
                self._notify(timeout, "timer_stopped")
        return undelivered

    def _notify(
        self,
        timeout: Timeout,
        method: str,
        *args: object,
        catch: type[BaseException] = Exception,
    ) -> None:
        """Call a method of the task, if its class has it. Exceptions of `catch` are reported."""
        function = getattr(type(timeout._task), method, None)
        if function is not None:
            try:
                function(timeout._task, timeout, *args)
            except catch as error:
                self._report(timeout, error)

    def _forbid_inside_task(self, *, inside: bool) -> None:
        if inside:
            raise RuntimeError(
                f"{self.name}: a task cannot stop the timer that runs it; use another thread"
            )

    def _register(self) -> None:
        """Count this timer. Emits `TooManyTimers` once."""
        components.add("timer", self, ends=True)
        if not _warned and (count := len(components.of_kind("timer"))) > LIVE_LIMIT:
            _warned.append(count)
            emit(TooManyTimers(count, LIVE_LIMIT))


def _checked_queue(queue: TimerQueue | None) -> TimerQueue:
    if queue is None:
        return default_queue()
    if not isinstance(queue, TimerQueue):
        raise TypeError(
            "queue must be a HashedWheel, HierarchicalWheel, SparseWheel or DeadlineHeap, "
            f"not {queue!r}"
        )
    return queue


def _check(max_pending: int | None, executor: Executor | None, on_error: OnError | None) -> None:
    if max_pending is not None:
        if isinstance(max_pending, bool) or not isinstance(max_pending, int):
            raise TypeError(
                f"max_pending must be a whole number, or None for no limit; not {max_pending!r}"
            )
        if max_pending < 1:
            raise ConfigurationError(
                f"max_pending must be 1 or more, or None for no limit; not {max_pending!r}"
            )
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(
            f"executor must have submit(), as concurrent.futures executors have; not {executor!r}"
        )
    if on_error is not None:
        check_callback(on_error, "on_error", "on_error(timeout, error)")
