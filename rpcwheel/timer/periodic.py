"""Repeated tasks: `PeriodicTask` and `RetryTask`.

Each is a one-shot task that submits itself again after it has run. So a run never starts before the
previous one has ended. The model is Dubbo's `AbstractTimerTask`, without its defect: there the
owner kept only the first handle, so `cancel` had no effect after the first run (Dubbo #12022). Here
the task keeps its current timeout.
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


class _Resubmitting:
    """A task that submits itself again after each run.

    Subclasses decide when the next run begins, and whether there is one.
    """

    def __init__(self, timer: Timer, run: Callable[[], object]) -> None:
        if not callable(getattr(timer, "new_timeout", None)):
            raise TypeError(f"timer must have new_timeout(), as WheelTimer has; not {timer!r}")
        if not callable(run):
            raise TypeError(f"run must be callable without arguments, not {run!r}")
        # A strong reference until `start`, and then a weak one; see `_arm`.
        self._timer: Callable[[], Timer | None] = lambda: timer
        self._work = run
        self._state = "idle"
        self._timeout: Timeout | None = None
        self._lock = threading.RLock()  # for `_state` and `_timeout`; no user code runs under it

    @property
    def state(self) -> str:
        """`"idle"`; after `start()` `"armed"` or `"running"`; finally `"cancelled"` or `"done"`."""
        return self._state

    def start(self) -> Self:
        """Submit the task for the first time. A second call does nothing.

        Raises:
            TimerStopped, TooManyTimeouts: The timer did not accept the task, which stays idle.
        """
        with self._lock:
            if self._state == "idle":
                self._arm(self._first_delay_ns())
        return self

    def cancel(self) -> bool:
        """Cancel the task; False if it had ended. Does not wait for a running run.

        May be called at any time, by any thread, and by the task itself.
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
        """Run once and submit the next run; called by the timer.

        If the user's function is a coroutine function, the coroutine that this returns submits the
        next run when it ends.
        """
        with self._lock:
            if self._state != "armed" or timeout is not self._timeout:
                return None
            self._state = "running"
        try:
            result = self._work()
            if inspect.isawaitable(result):
                return self._run_async(timeout, result)
            delay_ns = self._delay_after(timeout, result)
        except BaseException as error:  # noqa: BLE001 - `_failed` raises what is reported
            self._failed(timeout, error)
        else:
            self._resubmit(delay_ns)
        return None

    def refused(self, timeout: Timeout, error: BaseException) -> None:
        """Submit the next run, as the executor did not accept this one; called by the timer."""
        with self._lock:
            if self._state != "armed" or timeout is not self._timeout:
                return
            self._state = "running"
        delay_ns = None
        try:
            delay_ns = self._delay_after_refusal(timeout, error)
        finally:  # also if the wait object raises
            self._resubmit(delay_ns)

    async def _run_async(self, expired: Timeout, awaitable: Awaitable[object]) -> None:
        try:
            delay_ns = self._delay_after(expired, await awaitable)
        except BaseException as error:  # noqa: BLE001 - `_failed` raises what is reported
            self._failed(expired, error)
        else:
            self._resubmit(delay_ns)

    def _resubmit(self, delay_ns: int | None) -> None:
        """Submit the next run, or end if `delay_ns` is None."""
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
            raise TimerStopped(
                "the timer of this task no longer exists; keep it, or use shared_timer()"
            )
        submit = timer.new_timeout
        if again:  # a timer of another class may not have `resubmit`
            submit = getattr(timer, "resubmit", submit)
        self._timeout = submit(self, to_seconds(max(delay_ns, 0)))
        self._state = "armed"
        if not again:  # the timer must be freed although the task is pending in it
            with suppress(TypeError):  # a class without weak references
                self._timer = weakref.ref(timer)

    def _first_delay_ns(self) -> int:
        raise NotImplementedError

    def _delay_after(self, timeout: Timeout, result: object) -> int | None:
        """Note that a run returned. Returns the delay of the next run; None ends the task."""
        raise NotImplementedError

    def _failed(self, timeout: Timeout, error: BaseException) -> None:
        """Submit the next run, or end, after a run that raised.

        Raises:
            BaseException: What the timer is to report; for a `RetryTask` not each failure.
        """
        raise NotImplementedError

    def _delay_after_refusal(self, timeout: Timeout, error: BaseException) -> int | None:
        """Return the delay after a run that the executor did not accept."""
        raise NotImplementedError


class PeriodicTask(_Resubmitting):
    """Runs a function repeatedly, with a fixed interval from start to start.

    Runs never overlap. If a run takes longer than the interval, the missed runs are skipped, and
    the next one starts an interval after its end. Exceptions go to the timer's `on_error`, and the
    task continues.

    Args:
        timer: Runs the task on its thread, executor or loop. The task does not keep the timer
            alive, and ends with it.
        interval: Seconds or a `timedelta`, above zero. On average it is exact, whatever the tick
            of the timer is.
        run: Called without arguments. On an `AsyncWheelTimer` it may be a coroutine function. If
            it returns a number or a `timedelta`, that is the delay of the next run after the end
            of this one.
        initial_delay: The delay of the first run; by default the interval.
        jitter: From 0 to 1. Each delay changes at random by up to this share of the interval, so
            that the runs of many tasks spread out. It does not change `initial_delay` and delays
            that `run` returns.

    Raises:
        TypeError, ConfigurationError: An argument is invalid.
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
        self._interval_ns = positive_ns(interval, subject="interval")
        self._initial_ns = (
            None if initial_delay is None else to_ns(initial_delay, subject="initial_delay")
        )
        if isinstance(jitter, bool) or not isinstance(jitter, (int, float)):
            raise TypeError(f"jitter must be a number from 0 to 1, not {jitter!r}")
        if not 0 <= jitter <= 1:
            raise ConfigurationError(
                f"jitter is a share of the interval, from 0 to 1, not {jitter!r}"
            )
        self._spread_ns = int(jitter * self._interval_ns)
        self._due_ns: int | None = None
        """When the armed or running run is due, without jitter; None for the first run."""

    def _first_delay_ns(self) -> int:
        return (
            self._interval_ns + self._jitter_ns() if self._initial_ns is None else self._initial_ns
        )

    def _delay_after(self, timeout: Timeout, result: object) -> int:
        now_ns = timeout._timer_state.now()
        if result is not None:
            delay_ns = to_ns(result, subject="the delay that run() returned")  # type: ignore[arg-type]
            self._due_ns = now_ns + max(delay_ns, 0)
            return delay_ns
        due_ns = (
            timeout._deadline_ns if self._due_ns is None else self._due_ns
        ) + self._interval_ns
        self._due_ns = due_ns if due_ns > now_ns else now_ns + self._interval_ns
        return self._due_ns - now_ns + self._jitter_ns()

    def _failed(self, timeout: Timeout, error: BaseException) -> None:
        self._resubmit(self._delay_after(timeout, None))
        raise error

    def _delay_after_refusal(self, timeout: Timeout, error: BaseException) -> int:
        return self._delay_after(timeout, None)

    def _jitter_ns(self) -> int:
        return random.randint(-self._spread_ns, self._spread_ns) if self._spread_ns else 0


class RetryTask(_Resubmitting):
    """Runs a function until it succeeds.

    The error of the last attempt goes to the timer's `on_error`; earlier errors are in
    `last_error`.

    Args:
        timer: Runs the task on its thread, executor or loop. The task does not keep the timer
            alive, and ends with it.
        run: Called without arguments. On an `AsyncWheelTimer` it may be a coroutine function. An
            attempt fails if it raises.
        max_attempts: The number of attempts, the first included. None: no limit.
        backoff: The wait from the end of an attempt to the next one: seconds or a `timedelta`, of
            which half is random, or a tenacity `wait_*` object, such as `wait_fixed(5)` for an
            exact wait.
        stop: A tenacity `stop_*` object.
        initial_delay: The delay of the first attempt; by default 0.

    Raises:
        TypeError, ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        timer: Timer,
        run: Callable[[], object],
        *,
        max_attempts: int | None = None,
        backoff: float | timedelta | WaitBaseT = 5.0,
        stop: StopBaseT | None = None,
        initial_delay: float | timedelta = 0.0,
    ) -> None:
        super().__init__(timer, run)
        self._backoff = Backoff(wait=backoff, stop=stop, max_attempts=max_attempts)
        self._refusal_backoff = Backoff(wait=backoff)
        self._initial_ns = to_ns(initial_delay, subject="initial_delay")
        self._attempts = 0
        self._started_ns = 0
        self._last_error: BaseException | None = None

    @property
    def attempts(self) -> int:
        """The number of attempts that have ended."""
        return self._attempts

    @property
    def last_error(self) -> BaseException | None:
        """The error of the last attempt, if it failed."""
        return self._last_error

    def _first_delay_ns(self) -> int:
        return self._initial_ns

    def _delay_after(self, timeout: Timeout, result: object) -> None:
        self._attempts += 1
        self._last_error = None

    def _failed(self, timeout: Timeout, error: BaseException) -> None:
        now_ns = timeout._timer_state.now()
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
        if delay_ns is None or not isinstance(error, Exception):  # such as KeyboardInterrupt
            raise error

    def _delay_after_refusal(self, timeout: Timeout, error: BaseException) -> int | None:
        attempts = max(self._attempts, 1)  # a refusal is no attempt
        return self._refusal_backoff.next_delay_ns(attempts, elapsed_ns=0, error=error)
