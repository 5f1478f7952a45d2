"""The health of subchannels: what follows from the ends of calls, and health checks. For both APIs.

* An unhealthy subchannel is checked, with a backoff between the checks, until it answers. Then it
  gets calls again.
* A stale subchannel is checked every few seconds while it is READY. If it does not answer or can't
  be reached, it is removed; also if the registry has had the time to list it again, and lists most
  others.
* A healthy subchannel is checked once if all its calls are canceled: hedging cancels the attempts
  on a frozen server.
* If no server can be reached, probes find out why, for the status of calls.

Any status but UNAVAILABLE, DEADLINE_EXCEEDED and CANCELLED is an answer, unless the server reports
that it does not serve.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic

import grpc

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._grpc.calls import value_of
from rpcwheel.backoff import MAX_BACKOFF_ATTEMPTS, Backoff
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.events import CallbackFailed, SubchannelHealthy, SubchannelUnhealthy, emit
from rpcwheel.timer.manual import start_timeout
from rpcwheel.transport.probe import is_answered

from .ejection import FAILURES, SERVER_ERRORS, UNDECIDED, OutlierEjection
from .pending import MAX_EXPLAINED
from .policy import DEFAULT_HEALTH_CHECK_BACKOFF
from .subchannel import FAILING, READY, RecentErrors, S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .subchannels import SubchannelPool

STALE_INTERVAL_NS: Final = 5_000_000_000
"""How often a stale subchannel is checked."""

FALLBACK_DELAY_NS: Final = 1_000_000_000
"""The delay of the next check if the user's wait object raises."""

MIN_CHECK_DELAY_NS: Final = 10_000_000
"""The minimum delay between health checks of a subchannel."""

EXPLAIN_TIMEOUT_S: Final = 0.03
EXPLAIN_AGAIN_S: Final = 1.0
"""Probes find out why servers can't be reached: their timeout, and for how long calls wait for the
result, and use it."""


class HealthChecker(Generic[S]):
    """The health of the subchannels of one channel. Thread-safe."""

    def __init__(self, pool: SubchannelPool[S], timer: Timer | None) -> None:
        """Make a checker; checks nothing yet.

        The timer is `shared_timer()` if it is None; its timeouts have only weak references.
        """
        policy = pool.policy
        backoff = policy.health_check_backoff
        self._pool = pool
        self._connections = pool.connections
        self._timer = timer
        self._ejection = OutlierEjection(policy.outlier_ejection)
        self._backoff = Backoff(DEFAULT_HEALTH_CHECK_BACKOFF if backoff is None else backoff)
        self._timeout_s = to_seconds(to_ns(policy.health_check_timeout))
        self._timeouts: dict[S, Timeout] = {}  # under the pool's lock
        self._explaining = 0  # probes under way that find out why servers can't be reached
        self._explaining_since_s = 0.0

    # --- The ends of calls ---

    def failed(self, subchannel: S, code: str) -> None:
        """Record a call that did not succeed, with the name of its status code. Any thread."""
        pool, health = self._pool, subchannel.health
        if code in UNDECIDED:
            if code == "CANCELLED" and not subchannel.stale:
                with pool.lock:
                    is_suspect = self._ejection.count_canceled(health)
                if is_suspect:
                    self.check_later(subchannel, 0)
            return
        is_success = code not in FAILURES
        if is_success:
            subchannel.succeeded()
        if code in SERVER_ERRORS:
            recent = health.recent = health.recent or RecentErrors(successes=health.successes)
            recent.count_error(pool.now_ns(), health.successes, is_in_successes=is_success)
        if is_success:
            return
        self.check_stale(subchannel)
        if not subchannel.is_ready():
            pool.router.picking_with(subchannel).read_soon()  # its connection broke
            pool.unreachable()
            return
        with pool.lock:
            if subchannel.removed:
                return
            failures = self._ejection.count_failure(health, pool.now_ns())
        if failures:
            self.mark_unhealthy(subchannel, f"{failures} calls failed: {code}", ejects=True)

    # --- Health ---

    def mark_unhealthy(self, subchannel: S, reason: str, *, ejects: bool = False) -> None:
        """Give a subchannel no calls while a healthy one is READY; check its health.

        Ignored if it is unhealthy already, or removed. With `ejects` it is ejected, unless too many
        others are, or fail as often.
        """
        pool, health = self._pool, subchannel.health
        with pool.lock:
            if subchannel.removed or not subchannel.healthy or pool.closed:
                return
            now_ns = pool.now_ns()
            check_ns = None
            if ejects:
                all_health = [other.health for other in pool.subchannels]
                candidates, _ = pool.router.picking_with(subchannel).chosen
                used = [other.health for other in candidates if other.is_ready()]
                check_ns = self._ejection.eject(health, all_health, used, now_ns)
                if check_ns is None:
                    return
            health.set_unhealthy(reason, now_ns)
            pool.choose_anew()
        emit(SubchannelUnhealthy(pool.name, subchannel.id, reason))
        self.check_later(subchannel, check_ns)
        pool.changed()

    def mark_healthy(self, subchannel: S) -> None:
        """Give a subchannel calls again. Ignored if it is healthy."""
        pool = self._pool
        with pool.lock:
            if subchannel.removed or subchannel.healthy or pool.closed:
                return
            after_ns = subchannel.health.set_healthy(pool.now_ns())
            pool.choose_anew()
        self.forget(subchannel)
        if subchannel.stale:
            self.check_later(subchannel)
        emit(SubchannelHealthy(pool.name, subchannel.id, to_seconds(after_ns)))
        pool.changed()

    # --- Checks ---

    def wants_check(self, subchannel: S) -> bool:
        """Whether a health check is still needed."""
        if subchannel.removed or self._pool.closed:
            return False
        return subchannel.stale or subchannel.health.suspected or not subchannel.healthy

    def check_stale(self, subchannel: S) -> None:
        """Check a subchannel now if it is stale and no check of it is under way."""
        if subchannel.stale and not subchannel.health.checking:
            subchannel.health.checking = True
            self.check_later(subchannel, 0)

    def check_later(self, subchannel: S, delay_ns: int | None = None) -> None:
        """Check an unhealthy, stale or suspected subchannel after a delay.

        Replaces a check that is scheduled. Without a delay, that is the one of the backoff, or
        `STALE_INTERVAL_NS` if the subchannel is stale.
        """
        pool = self._pool
        if pool.closed:
            return
        generation = subchannel.health.generation
        if delay_ns is None:
            delay_ns = STALE_INTERVAL_NS if subchannel.stale else self.check_delay_ns(subchannel)
        if delay_ns == 0:
            self._connections.run_soon(partial(self._check, subchannel, generation))
            return
        if delay_ns == NEVER:
            return
        due = weak_callback(self._due, weakref.ref(subchannel), generation)
        name = f"health check of {pool.name}"
        timeout = start_timeout(self._timer, due, to_seconds(delay_ns), name)
        if timeout is None:
            if not subchannel.healthy:
                self.mark_healthy(subchannel)  # the next call shows whether it works
            return
        with pool.lock:
            if subchannel.health.generation == generation and self.wants_check(subchannel):
                self._timeouts[subchannel], timeout = timeout, self._timeouts.get(subchannel)
        if timeout is not None:
            timeout.cancel()

    def check_delay_ns(self, subchannel: S) -> int:
        """Return how long to wait before the next health check of an unhealthy subchannel."""
        attempt = min(subchannel.health.checks + 1, MAX_BACKOFF_ATTEMPTS)
        try:
            delay_ns = self._backoff.next_delay_ns(attempt, elapsed_ns=0, error=None)
        except Exception as error:  # noqa: BLE001 - the user's wait object; reported as an event
            emit(CallbackFailed(self._pool.name, "health_check_backoff", error))
            return FALLBACK_DELAY_NS
        return NEVER if delay_ns is None else max(delay_ns, MIN_CHECK_DELAY_NS)

    def _due(self, subchannel: weakref.ref[S], generation: int, _: Timeout) -> None:
        """Check a subchannel if it is still alive. Runs on the timer's thread."""
        alive = subchannel()
        if alive is not None:
            self._connections.run_soon(partial(self._check, alive, generation))

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
        pool, health = self._pool, subchannel.health
        if health.generation != generation:
            return
        health.checking = False
        if not self.wants_check(subchannel):
            health.suspected = False
            return
        if subchannel.stale and pool.expire_stale():
            return
        state = subchannel.state
        if health.suspected and state is not READY:
            health.suspected = False
        elif state is READY:
            health.checking = True
            done = partial(self._probed, subchannel, generation)
            self._connections.probe(subchannel, self._timeout_s, done)
        elif subchannel.stale and state is FAILING:
            pool.remove_stale(subchannel)
        elif health.ejected:  # it gets no calls, as it is not READY
            self._note_answer(subchannel)
        else:
            if not subchannel.healthy:
                self._connections.connect((subchannel,))
            self.check_later(subchannel)

    def _probed(
        self,
        subchannel: S,
        generation: int,
        response: bytes | None,
        error: BaseException | None,
    ) -> None:
        if response is None and error is None:  # the process ends: workers may not start any more
            self._end_check(subchannel, generation, None)
            return
        answered = is_answered(response, error)
        self._connections.run_soon(partial(self._end_check, subchannel, generation, answered))

    def _end_check(self, subchannel: S, generation: int, answered: bool | None) -> None:
        pool, health = self._pool, subchannel.health
        if health.generation != generation:
            return
        health.checking = False
        wanted = self.wants_check(subchannel)
        suspected, health.suspected = health.suspected, False
        if not wanted:
            return
        if answered is None:  # the process ends: no checks are sent any more
            self.mark_healthy(subchannel)
        elif not answered and subchannel.stale:
            pool.remove_stale(subchannel)
        elif answered:
            self._note_answer(subchannel)
        elif suspected and subchannel.healthy:
            self.mark_unhealthy(subchannel, "its calls were canceled, and it answered no check")
        else:
            health.checks += 1
            self.check_later(subchannel)

    def _note_answer(self, subchannel: S) -> None:
        if not subchannel.healthy:
            self.mark_healthy(subchannel)
        elif subchannel.stale:
            self.check_later(subchannel)

    def reset(self) -> None:
        """Forget the checks of the parent in a forked child, where they do not go on.

        What was unhealthy is healthy: the next call shows whether it works.
        """
        self._explaining, self._timeouts = 0, {}
        now_ns = self._pool.now_ns()
        for subchannel in self._pool.subchannels:
            subchannel.health.set_healthy(now_ns)

    # --- Why servers can't be reached ---

    def is_probing_failures(self, subchannels: Sequence[S], now_s: float) -> bool:
        """Whether probes find out now why servers can't be reached; starts them if it is time.

        The state of gRPC has no reason. The user's request must not be sent for that. Of the
        subchannels of a call, the first ones are probed, each once in `EXPLAIN_AGAIN_S`. False if
        the probes take longer than that: code of the user may block the thread that ends them.
        """
        pool = self._pool
        with pool.lock:
            if self._explaining:
                return now_s - self._explaining_since_s < EXPLAIN_AGAIN_S
            failing = [
                subchannel
                for subchannel in subchannels[:MAX_EXPLAINED]
                if now_s - subchannel.explained_s >= EXPLAIN_AGAIN_S
                and subchannel.connection is not None
                and subchannel.state is FAILING
            ]
            self._explaining, self._explaining_since_s = len(failing), now_s
            for subchannel in failing:
                subchannel.explained_s = now_s
        left = len(failing)
        try:
            for subchannel in failing:
                left -= 1
                done = partial(self._explained, subchannel)
                self._connections.probe(subchannel, EXPLAIN_TIMEOUT_S, done)
        except BaseException:  # such as `SystemExit` of the user's `connect`: the others do not run
            with pool.lock:
                self._explaining -= left
            raise
        return self._explaining > 0

    def _explained(self, subchannel: S, _: bytes | None, error: BaseException | None) -> None:
        subchannel.error_text = connect_failure(error) or subchannel.error_text
        with self._pool.lock:
            self._explaining -= 1
            is_last = not self._explaining
        if is_last:
            self._pool.changed()


def connect_failure(error: Any) -> str:
    """Return why an address can't be reached, from the error of a call; "" if it does not say so.

    Taken from the details `failed to connect to all addresses; last error: UNKNOWN:
    ipv4:10.0.0.7:50051: Failed to connect to remote host: connect: Connection refused (111)`
    (grpcio 1.60 to 1.85).
    """
    if value_of(error, "code") is not grpc.StatusCode.UNAVAILABLE:
        return ""  # such as DEADLINE_EXCEEDED
    text = (value_of(error, "details") or "").rpartition("last error: ")[2]
    return text.rpartition("Failed to connect to remote host: ")[2].strip()
