"""Health checks of subchannels that are unhealthy or stale, for both worlds.

An unhealthy subchannel is checked, with a backoff between the checks, until it answers; then it
gets calls again. A stale one is checked every few seconds while it is READY, until it no longer
answers or can't be reached; then it is removed. Any status but UNAVAILABLE, DEADLINE_EXCEEDED and
CANCELLED is an answer, unless the server reports that it does not serve. A healthy one is checked
once if its calls are all canceled, which hedging does to those that a frozen server got.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import grpc

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.probe import UNANSWERED, HealthProbe
from rpcwheel.timer import shared_timer

from .subchannels import FAILING, READY, SubchannelBase

if TYPE_CHECKING:
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .subchannels import SubchannelPool

__all__ = ["PROBE", "HealthChecker", "error_text", "is_answered"]

PROBE: Final = HealthProbe()

STALE_INTERVAL_NS: Final = 5_000_000_000
"""How often a stale subchannel is checked."""

FALLBACK_DELAY_NS: Final = 1_000_000_000
"""Until the next check, if the user's wait object raises."""

S = TypeVar("S", bound=SubchannelBase)


class HealthChecker(Generic[S]):
    """The health checks of one channel."""

    def __init__(self, pool: SubchannelPool[S], timer: Timer | None) -> None:
        """Begin without checks.

        Args:
            pool: Its subchannels; sends the checks.
            timer: Where they wait, and know the checker weakly; None for `shared_timer()`.
        """
        self._pool = pool
        self._timer = timer
        self._timeouts: dict[S, Timeout] = {}  # under the pool's lock

    def check_later(self, subchannel: S, delay_ns: int | None = None) -> None:
        """Check it after a delay, in place of an earlier check.

        Args:
            subchannel: An unhealthy or stale one.
            delay_ns: None: that of the backoff; of a stale one, `STALE_INTERVAL_NS`.
        """
        pool = self._pool
        if pool.closed:
            return
        generation = subchannel.generation
        if delay_ns is None:
            delay_ns = STALE_INTERVAL_NS if subchannel.stale else self._backoff_ns(subchannel)
        if delay_ns == 0:
            pool.run_soon(partial(self._check, subchannel, generation))
            return
        if delay_ns == NEVER:
            return
        due = weak_callback(self._due, weakref.ref(subchannel), generation)
        timeout: Timeout | None = None
        try:
            timer = shared_timer() if self._timer is None else self._timer
            timeout = timer.new_timeout(due, to_seconds(delay_ns))
        except (TimerError, RuntimeError) as error:  # stopped, full, or no thread can be started
            emit(CallbackFailed(pool.name, "the timer of health checks", error))
            if not subchannel.healthy:
                pool.mark_healthy(subchannel)  # its next call shows whether it works
            return
        with pool.lock:
            if pool.wants_check(subchannel, generation):
                self._timeouts[subchannel], timeout = timeout, self._timeouts.get(subchannel)
        if timeout is not None:
            timeout.cancel()

    def _backoff_ns(self, subchannel: S) -> int:
        try:
            return self._pool.check_delay_ns(subchannel)
        except Exception as error:  # noqa: BLE001 - the user's wait object; reported as an event
            emit(CallbackFailed(self._pool.name, "health_check_backoff", error))
            return FALLBACK_DELAY_NS

    def _due(self, subchannel: weakref.ref[S], generation: int, _: Timeout) -> None:
        """On the timer's thread."""
        alive = subchannel()
        if alive is not None:
            self._pool.run_soon(partial(self._check, alive, generation))

    def forget(self, subchannel: S) -> None:
        """Cancel the check of a subchannel that is healthy again, or removed."""
        with self._pool.lock:
            timeout = self._timeouts.pop(subchannel, None)
        if timeout is not None:
            timeout.cancel()

    def close(self) -> None:
        """Cancel all."""
        with self._pool.lock:
            timeouts, self._timeouts = list(self._timeouts.values()), {}
        for timeout in timeouts:
            timeout.cancel()

    def _check(self, subchannel: S, generation: int) -> None:
        """On a worker, or on the loop."""
        subchannel.checking = False
        pool = self._pool
        if not pool.wants_check(subchannel, generation):
            subchannel.suspected = False
            return
        state = subchannel.state
        if subchannel.suspected and state is not READY:
            subchannel.suspected = False
        elif state is READY:
            subchannel.checking = True
            pool.probe(subchannel, partial(self._checked, subchannel, generation))
        elif subchannel.stale and state is FAILING:
            pool.remove_stale(subchannel)
        elif subchannel.ejected:  # from now on its state keeps calls away
            self._answered(subchannel)
        else:
            if not subchannel.healthy:
                pool.connect((subchannel,))
            self.check_later(subchannel)

    def _checked(self, subchannel: S, generation: int, answered: bool | None) -> None:
        subchannel.checking = False
        pool = self._pool
        wanted = pool.wants_check(subchannel, generation)
        suspected, subchannel.suspected = subchannel.suspected, False
        if not wanted:
            return
        if answered is None:  # the process ends: no checks are sent any more
            pool.mark_healthy(subchannel)
        elif not answered and subchannel.stale:
            pool.remove_stale(subchannel)
        elif answered:
            self._answered(subchannel)
        elif suspected and subchannel.healthy:
            pool.mark_unhealthy(subchannel, "its calls were canceled, and it answered no check")
        else:
            subchannel.checks += 1
            self.check_later(subchannel)

    def _answered(self, subchannel: S) -> None:
        if not subchannel.healthy:
            self._pool.mark_healthy(subchannel)
        elif subchannel.stale:
            self.check_later(subchannel)


def is_answered(response: bytes | None, code: str) -> bool:
    """Whether a health check was answered by a server that serves.

    Args:
        response: What came, None if the check failed.
        code: The name of its status code if it failed.
    """
    if response is None:
        return code not in UNANSWERED
    return PROBE.judge(response).serving is not False


def error_text(error: Any) -> str:
    """Why an address could not be reached, from the error of a call; "" if it does not say that.

    From `failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50051: Failed to
    connect to remote host: connect: Connection refused (111)` (grpcio 1.60 to 1.85).
    """
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if not callable(code) or not callable(details) or code() is not grpc.StatusCode.UNAVAILABLE:
        return ""  # the call was too short, for one
    text = (details() or "").rpartition("last error: ")[2]
    return text.rpartition("Failed to connect to remote host: ")[2].strip()
