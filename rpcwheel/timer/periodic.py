"""Jobs that come again: each a one-shot task that submits itself once more when it has run.

So a slow run can't pile up, as it does where a scheduler fires at fixed times whatever happens.
Dubbo's `AbstractTimerTask` is the model, with its worst leak mended: there the owner kept the
first handle only, and cancel did nothing after the first re-submission (dubbo 12022). Here the
task owns its current timeout.
"""

from __future__ import annotations

import inspect
import random
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from rpcwheel.backoff import Backoff
from rpcwheel.durations import positive_ns, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, TimerStopped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

    from rpcwheel.timer._base import Timeout
    from rpcwheel.timer.api import Timer

__all__ = ["PeriodicTask", "RetryTask"]


class _Resubmitting:
    """The states of a task that submits itself again: idle, armed, running, done, cancelled."""

    def __init__(self, timer: Timer, run: Callable[[], object]) -> None:
        if not callable(getattr(timer, "new_timeout", None)):
            raise TypeError(f"timer must have new_timeout(), as WheelTimer has; not {timer!r}")
        if not callable(run):
            raise TypeError(f"run must be callable without arguments, not {run!r}")
        self._timer: Callable[[], Timer | None] = lambda: timer  # weakly, once it waits there
        self._work = run
        self._state = "idle"
        self._timeout: Timeout | None = None
        self._lock = threading.RLock()  # guards the two above; no user code runs under it

    @property
    def state(self) -> str:
        """`"idle"`, after `start()` `"armed"` or `"running"`, at last `"cancelled"` or `"done"`."""
        return self._state

    def start(self) -> Self:
        """Submit it for the first time; does nothing if it was started before.

        Raises:
            TimerStopped, TooManyTimeouts: The timer doesn't take it; it stays idle.
        """
        with self._lock:
            if self._state == "idle":
                self._arm(self._first_delay_ns())
        return self

    def cancel(self) -> bool:
        """End it for good; False if it had ended. Never waits: a run that has begun goes on.

        Works before the start, between runs, while it runs, from inside, and from any thread.
        """
        with self._lock:
            if self._state in {"cancelled", "done"}:
                return False
            self._state = "cancelled"
            timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()
        return True

    def run(self, timeout: Timeout) -> object:
        """Do one run and submit the next; what the timer calls. A coroutine is awaited first."""
        with self._lock:
            if self._state != "armed" or timeout is not self._timeout:
                return None
            self._state = "running"
        try:
            result = self._work()
            if inspect.isawaitable(result):
                return self._run_async(timeout, result)
            delay_ns = self._after(timeout, result)
        except BaseException as error:  # noqa: BLE001 - `_failed` raises it again
            self._failed(timeout, error)
        else:
            self._resubmit(delay_ns)
        return None

    def refused(self, timeout: Timeout, error: BaseException) -> None:
        """The executor didn't take the run: wait for the next one."""
        with self._lock:
            if self._state == "armed" and timeout is self._timeout:
                self._state = "running"
        self._resubmit(self._after(timeout, None))

    async def _run_async(self, expired: Timeout, awaitable: Awaitable[object]) -> None:
        try:
            delay_ns = self._after(expired, await awaitable)
        except BaseException as error:  # noqa: BLE001 - `_failed` raises it again
            self._failed(expired, error)
        else:
            self._resubmit(delay_ns)

    def _resubmit(self, delay_ns: int | None) -> None:
        """Arm again after a run, or end if there is no delay."""
        with self._lock:
            if self._state != "running":
                return
            self._timeout = None
            self._state = "done"
            if delay_ns is not None:
                try:
                    self._arm(delay_ns, again=True)
                except TimerStopped:
                    self._state = "cancelled"

    def _arm(self, delay_ns: int, *, again: bool = False) -> None:
        timer = self._timer()
        if timer is None:
            raise TimerStopped("the timer of this task was dropped; keep it, or use shared_timer()")
        submit = timer.new_timeout
        if again:  # a timer that is not ours may have no such thing
            submit = getattr(timer, "readmit", submit)
        self._timeout = submit(self, to_seconds(max(delay_ns, 0)))
        self._state = "armed"
        if not again:  # a timer that is dropped must be freed, though the task waits in it
            with suppress(TypeError):  # not ours, and without weak references
                self._timer = weakref.ref(timer)

    def _first_delay_ns(self) -> int:
        raise NotImplementedError

    def _after(self, timeout: Timeout, result: object) -> int | None:
        """The delay of the next submission after a run that returned; None ends it."""
        raise NotImplementedError

    def _failed(self, timeout: Timeout, error: BaseException) -> None:
        """Submit again, or not, after a run that raised; raises what the timer is to report."""
        raise NotImplementedError


class PeriodicTask(_Resubmitting):
    """Run a function again and again, a fixed time from start to start; never twice at once.

    A run that takes longer than the interval is followed by a whole interval, and the missed ones
    are skipped. What it raises goes to the timer's `on_error`, and the task goes on.

    Args:
        timer: Where it waits. Its thread (or executor, or loop) runs it. A task that waits does
            not keep its timer: drop the timer, and it stops.
        interval: Seconds or a `timedelta`, above zero. It holds whatever the timer's tick is.
        run: Called without arguments; on an `AsyncWheelTimer` it may be a coroutine function. If
            it returns a number or a `timedelta`, that is the delay of the next run, from the end
            of this one.
        initial_delay: Before the first run; the interval by default.
        jitter: From 0 to 1: each delay (but an `initial_delay` that is given, and what `run`
            returns) is made longer or shorter by up to this share of the interval, at random, so
            that a thousand tasks spread out.

    Raises:
        TypeError, ConfigurationError: An argument makes no sense.
    """

    def __init__(
        self,
        timer: Timer,
        interval: float | timedelta,
        run: Callable[[], object],
        *,
        initial_delay: float | timedelta | None = None,
        jitter: float = 0.0,
    ) -> None:
        super().__init__(timer, run)
        self._interval_ns = positive_ns(interval, what="interval")
        self._initial_ns = (
            None if initial_delay is None else to_ns(initial_delay, what="initial_delay")
        )
        if isinstance(jitter, bool) or not isinstance(jitter, (int, float)):
            raise TypeError(f"jitter must be a number from 0 to 1, not {jitter!r}")
        if not 0 <= jitter <= 1:
            raise ConfigurationError(
                f"jitter is a share of the interval, from 0 to 1; not {jitter!r}"
            )
        self._spread_ns = int(jitter * self._interval_ns)
        self._due_ns: int | None = (
            None  # when this run was due, but for jitter and the cost of arming
        )

    def _first_delay_ns(self) -> int:
        return (
            self._interval_ns + self._jitter_ns() if self._initial_ns is None else self._initial_ns
        )

    def _after(self, timeout: Timeout, result: object) -> int:
        now_ns = timeout._hub.now()
        if result is not None:
            delay_ns = to_ns(result, what="the delay that run() returned")  # type: ignore[arg-type]
            self._due_ns = now_ns + max(delay_ns, 0)
            return delay_ns
        due_ns = (
            timeout._deadline_ns if self._due_ns is None else self._due_ns
        ) + self._interval_ns
        self._due_ns = due_ns if due_ns > now_ns else now_ns + self._interval_ns
        return self._due_ns - now_ns + self._jitter_ns()

    def _failed(self, timeout: Timeout, error: BaseException) -> None:
        self._resubmit(self._after(timeout, None))
        raise error

    def _jitter_ns(self) -> int:
        return random.randint(-self._spread_ns, self._spread_ns) if self._spread_ns else 0


class RetryTask(_Resubmitting):
    """Run a function until it succeeds: one-shot tasks, each submitted when the last has failed.

    Args:
        timer: Where it waits. Its thread (or executor, or loop) runs it. A task that waits does
            not keep its timer: drop the timer, and it stops.
        run: Called without arguments; on an `AsyncWheelTimer` it may be a coroutine function.
            Raising is failing.
        attempts: How often it may run in all; None: until it succeeds, is cancelled, or `stop`
            says so.
        wait: Seconds or a `timedelta` from one run's end to the next, or a tenacity `wait_*`
            object.
        stop: A tenacity `stop_*` object.
        initial_delay: Before the first run, in seconds; none by default.

    The last error goes to the timer's `on_error`, those before it are kept in `last_error`.

    Raises:
        TypeError, ConfigurationError: An argument makes no sense.
    """

    def __init__(
        self,
        timer: Timer,
        run: Callable[[], object],
        *,
        attempts: int | None = None,
        wait: float | timedelta | WaitBaseT = 5.0,
        stop: StopBaseT | None = None,
        initial_delay: float | timedelta = 0.0,
    ) -> None:
        super().__init__(timer, run)
        self._backoff = Backoff(wait=wait, stop=stop, max_attempts=attempts)
        self._wait_alone = Backoff(wait=wait)
        self._initial_ns = to_ns(initial_delay, what="initial_delay")
        self._attempts = 0
        self._started_ns = 0
        self._last_error: BaseException | None = None

    @property
    def attempts(self) -> int:
        """How often it has run to an end."""
        return self._attempts

    @property
    def last_error(self) -> BaseException | None:
        """What the last run raised, if it failed."""
        return self._last_error

    def _first_delay_ns(self) -> int:
        return self._initial_ns

    def _after(self, timeout: Timeout, result: object) -> None:
        self._attempts += 1
        self._last_error = None

    def _failed(self, timeout: Timeout, error: BaseException) -> None:
        now_ns = timeout._hub.now()
        if self._attempts == 0:
            self._started_ns = timeout._deadline_ns
        self._attempts += 1
        self._last_error = error
        delay_ns = None
        try:
            delay_ns = self._backoff.next_delay_ns(
                self._attempts, elapsed_ns=now_ns - self._started_ns, error=error
            )
        finally:
            self._resubmit(delay_ns)
        if delay_ns is None:
            raise error

    def refused(self, timeout: Timeout, error: BaseException) -> None:
        """The executor didn't take the run: that is no attempt, but it waits as after one."""
        with self._lock:
            if self._state != "armed" or timeout is not self._timeout:
                return
            self._state = "running"
        self._resubmit(
            self._wait_alone.next_delay_ns(max(self._attempts, 1), elapsed_ns=0, error=error)
        )
