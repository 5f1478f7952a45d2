"""Health checks of subchannels that are unhealthy or stale, for both worlds.

* An unhealthy subchannel is checked, with a backoff between the checks, until it answers. Then it
  gets calls again.
* A stale subchannel is checked every few seconds while it is READY. If it does not answer or can't
  be reached, it is removed; also if the registry has had the time to list it again, and lists most
  others.
* A healthy subchannel is checked once if all its calls are canceled: hedging cancels the attempts
  on a frozen server.

Any status but UNAVAILABLE, DEADLINE_EXCEEDED and CANCELLED is an answer, unless the server reports
that it does not serve.
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
from rpcwheel.timer import shared_timer
from rpcwheel.transport.probe import UNANSWERED, HealthProbe

from .subchannels import FAILING, READY, SubchannelBase

if TYPE_CHECKING:
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .subchannels import SubchannelPool

PROBE: Final = HealthProbe()

STALE_INTERVAL_NS: Final = 5_000_000_000
"""How often a stale subchannel is checked."""

FALLBACK_DELAY_NS: Final = 1_000_000_000
"""The delay of the next check if the user's wait object raises."""

S = TypeVar("S", bound=SubchannelBase)


class HealthChecker(Generic[S]):
    """The health checks of one channel."""

    def __init__(self, pool: SubchannelPool[S], timer: Timer | None) -> None:
        """Make a checker; checks nothing yet.

        Args:
            pool: The subchannels; it also sends the checks.
            timer: The timer of the checks; None for `shared_timer()`. Its timeouts have only weak
                references.
        """
        self._pool = pool
        self._timer = timer
        self._timeouts: dict[S, Timeout] = {}  # under the pool's lock

    def check_later(self, subchannel: S, delay_ns: int | None = None) -> None:
        """Check a subchannel after a delay. Replaces a check that is scheduled.

        Args:
            subchannel: An unhealthy, stale or suspected subchannel.
            delay_ns: The delay; None for that of the backoff, or `STALE_INTERVAL_NS` if it is
                stale.
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
                pool.mark_healthy(subchannel)  # the next call shows whether it works
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
        """Check a subchannel if it is still alive. Runs on the timer's thread."""
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
        """Cancel all checks."""
        with self._pool.lock:
            timeouts, self._timeouts = list(self._timeouts.values()), {}
        for timeout in timeouts:
            timeout.cancel()

    def _check(self, subchannel: S, generation: int) -> None:
        """Check a subchannel now. Runs on a worker, or on the loop."""
        subchannel.checking = False
        pool = self._pool
        if not pool.wants_check(subchannel, generation):
            subchannel.suspected = False
            return
        if subchannel.stale and pool.expire_stale():
            return
        state = subchannel.state
        if subchannel.suspected and state is not READY:
            subchannel.suspected = False
        elif state is READY:
            subchannel.checking = True
            pool.probe(subchannel, partial(self._end_check, subchannel, generation))
        elif subchannel.stale and state is FAILING:
            pool.remove_stale(subchannel)
        elif subchannel.ejected:  # it gets no calls, as it is not READY
            self._note_answer(subchannel)
        else:
            if not subchannel.healthy:
                pool.connect((subchannel,))
            self.check_later(subchannel)

    def _end_check(self, subchannel: S, generation: int, answered: bool | None) -> None:
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
            self._note_answer(subchannel)
        elif suspected and subchannel.healthy:
            pool.mark_unhealthy(subchannel, "its calls were canceled, and it answered no check")
        else:
            subchannel.checks += 1
            self.check_later(subchannel)

    def _note_answer(self, subchannel: S) -> None:
        if not subchannel.healthy:
            self._pool.mark_healthy(subchannel)
        elif subchannel.stale:
            self.check_later(subchannel)


def is_answered(response: bytes | None, code: str) -> bool:
    """Whether a health check was answered by a server that serves.

    Args:
        response: The response; None if the check failed.
        code: The name of the status code if the check failed.
    """
    if response is None:
        return code not in UNANSWERED
    return PROBE.judge(response).serving is not False


def error_text(error: Any) -> str:
    """Return why an address can't be reached, from the error of a call; "" if it does not say so.

    Taken from the details `failed to connect to all addresses; last error: UNKNOWN:
    ipv4:10.0.0.7:50051: Failed to connect to remote host: connect: Connection refused (111)`
    (grpcio 1.60 to 1.85).
    """
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if not callable(code) or not callable(details) or code() is not grpc.StatusCode.UNAVAILABLE:
        return ""  # such as DEADLINE_EXCEEDED
    text = (details() or "").rpartition("last error: ")[2]
    return text.rpartition("Failed to connect to remote host: ")[2].strip()
