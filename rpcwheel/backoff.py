"""The wait before the next attempt, and when to stop.

A wait is a number of seconds, of which half is random, or any of tenacity's `wait_*` objects,
combined ones too (`wait_exponential_jitter(max=60) + wait_random(0, 1)`); `wait_fixed(5)` is exact.
A stop is any of tenacity's `stop_*` objects. This module does not sleep and reads no clock: the
elapsed time is an argument.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Final

import tenacity
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, is_coroutine_function, safe_repr

if TYPE_CHECKING:
    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration

__all__ = ["Backoff", "failed_state"]

_RETRYING: Final = tenacity.Retrying()
"""`retry_state.retry_object` for tenacity's objects."""

DEFAULT_JITTER: Final = 0.5
"""The share of a wait that is random: "equal jitter"."""

ALLOWED_WAITS: Final = (
    "seconds (int or float), a timedelta, or a tenacity wait object such as "
    "wait_exponential(max=60)"
)
"""The values that `Backoff` accepts as a wait, for error messages."""

MAX_BACKOFF_ATTEMPTS: Final = 64
"""The number of attempts after which a backoff without an end no longer grows: wait objects may
overflow."""

_GOLDEN_RATIO: Final = (5**0.5 - 1) / 2
RANDOM: Final = random.SystemRandom()
"""Spreads waits and requests in time. Not the program's own generator: background threads would
draw from it, which changes the random numbers of a program that has seeded it, and lets Hypothesis
fail. A number takes 1 us, and one of the program's 0.04 us."""


NO_WAITS: Final[list[None]] = []
"""Not empty within `rpcwheel.testing.no_waits`, which adds an item and removes it."""


def wait_of_call(delay_ns: int | None) -> int | None:
    """Return how long a call waits for its next attempt: `delay_ns`, or 0 within `no_waits`.

    None and an infinite wait remain: there is no attempt after them.
    """
    return 0 if NO_WAITS and delay_ns is not None and delay_ns != NEVER else delay_ns


class _EvenFractions:
    """Fractions from 0 to 1, not included, that are spread evenly, from a random start.

    They are multiples of the golden ratio, modulo 1. Of 1,000 waits that differ by up to 2.5 s, at
    most 6 are in the same 10 ms, where 4 is the mean; with random numbers it is 10 to 16. After a
    fork, the child has a start of its own.
    """

    __slots__ = ("_index", "_pid", "_start")

    def __init__(self) -> None:
        self._index = count()
        self._pid, self._start = os.getpid(), RANDOM.random()

    def next(self) -> float:
        """Return the next fraction. May be called on any thread."""
        if self._pid != os.getpid():
            self._pid, self._start = os.getpid(), RANDOM.random()
        return (self._start + next(self._index) * _GOLDEN_RATIO) % 1.0

    def __reduce__(self) -> tuple[type[_EvenFractions], tuple[()]]:
        return _EvenFractions, ()  # a copy has a start of its own


@dataclass(frozen=True)
class JitteredWait(wait_base):
    """An exponential wait that is partly random, so that calls that failed together are spread.

    Its upper limit is `initial` seconds after the first failure, `multiplier` times as long after
    each further one, and at most `max` seconds. The share `jitter` of the limit is random: with 0.5
    the wait is from half of the limit to the limit.
    """

    initial: float
    max: float
    multiplier: float = 2.0
    jitter: float = DEFAULT_JITTER
    _fractions: _EvenFractions = field(
        default_factory=_EvenFractions, init=False, repr=False, compare=False
    )

    def delay_ns(self, attempt: int) -> int:
        """Return the wait after attempt number `attempt`; `NEVER` if it is infinite."""
        try:
            limit = min(self.initial * self.multiplier ** (attempt - 1), self.max)
        except OverflowError:
            limit = self.max
        limit_ns = to_ns(limit)
        if limit_ns == NEVER:
            return NEVER
        return limit_ns - int(limit_ns * self.jitter * self._fractions.next())

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        return to_seconds(self.delay_ns(retry_state.attempt_number))


class Backoff:
    """The wait after each failed attempt, and the number of attempts.

    One object may be used for any number of calls and threads if its tenacity objects may (those of
    tenacity itself may).
    """

    __slots__ = ("_max_attempts", "_stop", "_wait")

    def __init__(
        self,
        wait: Duration | WaitBaseT = 5.0,
        stop: StopBaseT | None = None,
        max_attempts: int | None = None,
    ) -> None:
        """Check the arguments.

        Args:
            wait: Seconds or a `timedelta`, of which half is random; or a tenacity wait object, such
                as `wait_fixed(5)` for an exact wait. The default is the period of Dubbo's
                `FailbackClusterInvoker`.
            stop: A tenacity stop object, or None. `stop_before_delay` sees the coming wait.
            max_attempts: How many attempts there are, the first included; None sets no limit. The
                first limit that is reached applies.

        Raises:
            TypeError: `wait`, `stop` or `max_attempts` has another type.
            ConfigurationError: NaN or negative seconds; fewer than one attempt.
        """
        self._wait = check_wait(wait)
        self._stop = _check_stop(stop)
        self._max_attempts = _check_max_attempts(max_attempts)

    def next_delay_ns(
        self,
        attempt: int,
        *,
        elapsed_ns: int,
        error: BaseException | None,
        idle_ns: int = 0,
        least_ns: int = 0,
    ) -> int | None:
        """Return the wait after attempt number `attempt` has failed, or None to stop.

        Args:
            attempt: The number of attempts so far: 1 after the first failure.
                With `max_attempts=3` the attempts 1 and 2 are followed by another.
            elapsed_ns: Since the start of the first attempt.
            error: The error of the last attempt, for strategies that use it.
            idle_ns: The part of `elapsed_ns` spent waiting.
            least_ns: The shortest wait, such as a pushback.

        Returns:
            Nanoseconds, never negative; `durations.NEVER` if the wait is infinite.

        Raises:
            TypeError, ConfigurationError: The wait object did not return a time.
            Exception: The exception of a strategy of the user.
        """
        if self._max_attempts is not None and attempt >= self._max_attempts:
            return None
        if self._stop is None and isinstance(self._wait, JitteredWait):
            # Without a tenacity state, which would cost more than this.
            return max(least_ns, self._wait.delay_ns(attempt))
        state = failed_state(attempt, elapsed_ns=elapsed_ns, error=error, idle_ns=idle_ns)
        wait_ns = to_ns(self._wait(state), subject="the result of the wait object")
        delay_ns = max(0, least_ns, wait_ns)
        state.upcoming_sleep = to_seconds(delay_ns)
        if self._stop is not None and self._stop(state):
            return None
        return delay_ns

    @safe_repr
    def __repr__(self) -> str:
        return (
            f"Backoff(wait={self._wait!r}, stop={self._stop!r}, "
            f"max_attempts={self._max_attempts!r})"
        )


def failed_state(
    attempt: int, *, elapsed_ns: int, error: BaseException | None, idle_ns: int = 0
) -> tenacity.RetryCallState:
    """Build the argument of tenacity's objects after attempt number `attempt` has failed.

    Its clock starts at zero, so `outcome_timestamp` and `seconds_since_start` are the elapsed
    seconds. Without an error (a task that asks for another run) the outcome is a result of None.
    """
    state = tenacity.RetryCallState(_RETRYING, fn=None, args=(), kwargs={})
    state.start_time = 0.0
    state.attempt_number = attempt
    state.outcome = tenacity.Future(attempt)
    if error is None:
        state.outcome.set_result(None)
    else:
        state.outcome.set_exception(error)
    state.outcome_timestamp = to_seconds(elapsed_ns)
    state.idle_for = to_seconds(idle_ns)
    return state


def check_wait(
    wait: Duration | WaitBaseT, *, subject: str = "wait", allowed: str = ALLOWED_WAITS
) -> WaitBaseT:
    """Return the wait as a wait object.

    Args:
        wait: As the argument of `Backoff`.
        subject: The subject of the error messages.
        allowed: What the caller accepts, for the error message of another type.

    Raises:
        TypeError: `wait` has another type.
        ConfigurationError: NaN or negative seconds.
    """
    no_waits = (type, stop_base, retry_base)
    if callable(wait) and not (isinstance(wait, no_waits) or is_coroutine_function(wait)):
        return wait
    if not isinstance(wait, (int, float, timedelta)) or isinstance(wait, bool):
        raise TypeError(f"{subject} must be {allowed}, not {wait!r}")
    wait_ns = to_ns(wait, subject=subject)
    if wait_ns < 0:
        raise ConfigurationError(f"{subject} must not be negative, not {wait!r}; 0 is at once")
    seconds = to_seconds(wait_ns)
    return JitteredWait(seconds, seconds, multiplier=1.0)


def _check_stop(stop: StopBaseT | None) -> StopBaseT | None:
    candidate: object = stop
    no_stops = (type, wait_base, retry_base)
    if stop is None or (
        callable(candidate)
        and not (isinstance(candidate, no_stops) or is_coroutine_function(candidate))
    ):
        return stop
    raise TypeError(
        "stop must be None or a tenacity stop object such as stop_after_delay(600), "
        f"not {stop!r}; for a number of attempts use max_attempts"
    )


def _check_max_attempts(attempts: int | None) -> int | None:
    if attempts is None:
        return None
    if isinstance(attempts, bool) or not isinstance(attempts, int):
        raise TypeError(f"max_attempts must be a whole number or None, not {attempts!r}")
    if attempts < 1:
        raise ConfigurationError(
            f"max_attempts must be 1 or more, or None for no limit, not {attempts}"
        )
    return attempts
