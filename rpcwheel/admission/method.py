"""Whether an attempt of one method may be sent to its target, for `grpc` and `grpc.aio`.

* `MethodAdmission` asks the circuit breaker, the throttle, the rate limit and the concurrency limit
  of the method, in this order, and passes the end of each attempt to them.
* A `Waiting` is an attempt that may be sent later.

Any thread may use them. The methods of a target share one lock; its breakers have their own. No
code of users runs under a lock. The locks are reentrant, because the end of a call that is dropped
is reported by a finalizer.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.events import ThrottleBegan, ThrottleEnded
from rpcwheel.events.events import labeled_method
from rpcwheel.limit.rate import TokenBucket
from rpcwheel.limit.refusals import Refusals
from rpcwheel.timer.manual import clock_of, start_timeout

from .breaker import BreakerState
from .concurrency import Concurrency

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from rpcwheel.limit.rate import RatePolicy
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .circuit import CircuitBreaker
    from .policy import ConcurrencyPolicy
    from .throttle import Throttle

TIMER_GRACE_NS: Final = 1_000_000_000
"""How late a timer may be before an attempt that waits goes on without it."""

STREAM_PROVEN_NS: Final = 1_000_000_000
"""A stream, which may go on for hours, is a success when it has run for this long; for a throttle,
later if streams take longer to fail. It is watched if a breaker or a throttle has failures."""


class Reason(enum.Enum):
    """Why an attempt is not sent: the label in metrics, the name of the status code, and a text."""

    BREAKER = "breaker", "UNAVAILABLE", "the circuit breaker is open, because calls have failed"
    FORCED = "forced", "UNAVAILABLE", "the circuit breaker was opened by hand"
    THROTTLE = "throttle", "UNAVAILABLE", "throttled, because the server accepts too few calls"
    RATE = "rate", "RESOURCE_EXHAUSTED", "more calls per second than the rate limit allows"
    CONCURRENCY = (
        "concurrency",
        "RESOURCE_EXHAUSTED",
        "as many calls run as the concurrency limit allows",
    )
    DEADLINE = (
        "deadline",
        "DEADLINE_EXCEEDED",
        "the timeout has passed while the call waited, because of the concurrency limit",
    )
    CLOSED = "closed", "", ""
    """The channel was closed. Not counted in metrics, as a call that is canceled is not. It has no
    status here: its caller gets that of a closed channel."""

    def __init__(self, label: str, code: str, text: str) -> None:
        self.label = label
        self.code = code
        self.details = f"not sent: {text}"


class Loop(Protocol):
    """The event loop of an attempt of `grpc.aio`; one of `grpc` has none."""

    def is_closed(self) -> bool:
        """Whether no attempt on it can end any more."""


@dataclass(eq=False, slots=True)
class Admitted:
    """An attempt that is sent now. Its end must be passed to `MethodAdmission.end`."""

    began_ns: int
    token: int = 0
    """Of the circuit breaker."""
    loop: Loop | None = None
    is_probe: bool = False
    """Whether it is a stream that began while the breaker was HALF_OPEN."""
    timeout: Timeout | None = None
    """After it, a stream that has not ended is a success."""
    has_succeeded: bool = False
    """Whether a stream has counted as a success before its end."""
    has_ended: bool = False
    """Whether a stream has ended; not set for other attempts."""


class NotSent(NamedTuple):
    """An attempt that is not sent."""

    reason: Reason
    pushback_ns: int | None = None
    """How long to wait before another call; None if that is not known."""


class Waiting:
    """An attempt that may be sent later. Ends once: with a result, or by `cancel`."""

    def __init__(
        self,
        admission: MethodAdmission,
        token: int,
        loop: Loop | None,
        limit_ns: int,
        reason: Reason,
        reservation: int,
    ) -> None:
        self._admission = admission
        self.token = token
        """Of the circuit breaker."""
        self.loop = loop
        self.limit_ns = limit_ns
        """How long it waits for the end of another attempt, at most."""
        self.reason = reason
        """Why it is not sent if it has waited for so long."""
        self.reservation = reservation
        """Of the token of the rate limit, for `TokenBucket.give_back`."""
        self._timeout: Timeout | None = None
        self._callback: Callable[[], object] | None = None
        self._result: Admitted | NotSent | None = None
        self._due: Callable[[], object] = bool
        self._due_ns = NEVER
        self._without_timer = reason

    @property
    def has_ended(self) -> bool:
        """Whether there is a result, or it was canceled."""
        return self._result is not None

    def then(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when there is a result: now, or on any thread, without a lock.

        The callback must not block.
        """
        with self._admission.lock:
            if self._result is None:
                self._callback = callback
                return
        callback()

    def take(self) -> Admitted | NotSent:
        """Return the result, once `then` has reported it. The caller makes the attempt."""
        with self._admission.lock:
            not_sent = NotSent(self.reason)
            result, self._result = self._result or not_sent, not_sent  # `cancel` comes too late
        if isinstance(result, Admitted):
            self._admission.watch_stream(result)
        return result

    def cancel(self) -> None:
        """End, and give back what the attempt has got, unless `take` was called. Idempotent."""
        with self._admission.lock:
            result, self._result = self._result, NotSent(self.reason)
            self._callback = None
        if result is None:
            self._admission.forget(self)
        elif isinstance(result, Admitted):
            self._admission.end(result, "CANCELLED")
        self._cancel_timeout()

    def end(self, result: Admitted | NotSent) -> bool:
        """End with a result; False if it has ended."""
        with self._admission.lock:
            if self._result is not None:
                return False
            self._result = result
            callback, self._callback = self._callback, None
        self._cancel_timeout()
        if callback is not None:
            callback()
        return True

    def admit(self, now_ns: int) -> bool:
        """End as an attempt that is sent now; False if it has ended, or the breaker refuses it."""
        admission, token = self._admission, self.token
        breaker = admission.breaker
        if breaker is not None:
            entered = breaker.enter_again(token, now_ns)
            if entered is None:
                self.refuse(*_breaker_refusal(breaker, now_ns))
                return False
            token = entered
        if self.end(Admitted(now_ns, token, self.loop)):
            return True
        if token != self.token:
            admission.release(token, now_ns)
        return False

    def refuse(self, reason: Reason, pushback_ns: int | None = None) -> None:
        """End as an attempt that is not sent."""
        if self.end(NotSent(reason, pushback_ns)):
            self._admission.forget(self, reason)

    def end_waiting(self) -> None:
        """End as an attempt that is not sent, because its channel is closed. Idempotent."""
        if self.end(NotSent(Reason.CLOSED)):
            self._admission.forget(self)

    def wait_for_token(self, delay_ns: int) -> None:
        """Wait until a token of the rate limit may be used."""
        self._schedule(lambda _=None: self._admission.token_came(self), delay_ns, Reason.RATE)

    def wait_for_permit(self) -> None:
        """Wait until another attempt has ended."""
        if self.limit_ns == 0:
            self.refuse(self.reason)
        else:
            self._schedule(lambda _=None: self.refuse(self.reason), self.limit_ns, self.reason)
            self._admission.admit_waiting()

    def check_timer(self) -> None:
        """Do what the timer should have done, if it was stopped or is late."""
        admission = self._admission
        if self.has_ended:
            return
        if admission.timer_stopped:
            self.refuse(self._without_timer)
        elif admission.now_ns() >= self._due_ns + TIMER_GRACE_NS:
            self._due()

    def _schedule(self, task: Callable[..., object], delay_ns: int, reason: Reason) -> None:
        """Run a task after a delay; refuse the attempt if there is no timer."""
        self._due, self._due_ns = task, self._admission.now_ns() + delay_ns
        self._without_timer = reason
        timeout = self._admission.schedule(task, delay_ns)
        if timeout is None:
            self.refuse(reason)
            return
        with self._admission.lock:
            if self._result is None:
                self._timeout = timeout
                return
        timeout.cancel()

    def _cancel_timeout(self) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()


class RateGate:
    """A rate limit, and how long attempts wait for it."""

    def __init__(self, policy: RatePolicy) -> None:
        self.bucket = TokenBucket(policy.rate, policy.burst)
        self.max_wait_ns = to_ns(policy.max_wait)


class ConcurrencyGate:
    """A concurrency limit, and the attempts that wait for it, oldest first.

    A call of `grpc.aio` that begins while its event loop ends never ends, because gRPC keeps it. So
    if the limit is reached, the places of closed loops become free.
    """

    def __init__(self, policy: ConcurrencyPolicy) -> None:
        self.limit = Concurrency(policy)
        self._loops: defaultdict[Loop, int] = defaultdict(int)
        """How many attempts of a loop run. A finalizer may end one at each call of a function."""
        self.max_wait_ns = to_ns(policy.max_wait)
        self.waiting: OrderedDict[Waiting, None] = OrderedDict()

    @property
    def status(self) -> tuple[int, int, int]:
        """How many attempts run, how many may, and how many wait."""
        return self.limit.running, int(self.limit.limit), len(self.waiting)

    def reset_after_fork(self) -> None:
        """Forget the attempts that run or wait."""
        self.limit.running = 0
        self._loops.clear()
        self.waiting.clear()

    def take(self, loop: Loop | None) -> bool:
        """Whether an attempt may be sent now, and no other waits for that."""
        if self.waiting or not self._take():
            return False
        self._note_loop(loop)
        return True

    def next_waiting(self) -> list[Waiting]:
        """Return the attempts that need not wait any more."""
        ready = []
        while self.waiting and self._take():
            try:
                waiting = self.waiting.popitem(last=False)[0]
            except KeyError:  # a finalizer that has run meanwhile has taken it
                self.limit.release(0, 0, "CANCELLED")
                continue
            self._note_loop(waiting.loop)
            ready.append(waiting)
        return ready

    def release(self, loop: Loop | None, now_ns: int, began_ns: int, code: str) -> None:
        """Count an attempt that has ended, as `Concurrency.release` does."""
        if loop is not None:
            if loop not in self._loops:  # its place was freed before
                return
            self._loops[loop] -= 1
            if not self._loops[loop]:
                del self._loops[loop]
        self.limit.release(now_ns, began_ns, code)

    def _take(self) -> bool:
        if self.limit.take():
            return True
        for loop in [*self._loops]:  # a finalizer may end the last attempt of a loop meanwhile
            if loop.is_closed():
                freed = self._loops.pop(loop, 0)
                self.limit.running -= freed
        return self.limit.take()

    def _note_loop(self, loop: Loop | None) -> None:
        if loop is not None:
            self._loops[loop] += 1


class MethodAdmission:
    """Whether attempts of one method of one target may be sent. Any thread may use it.

    `kind` and `end` are those of `MethodCounts`, so that the ends of attempts are observed in the
    same way.
    """

    kind: Final = ""
    """Calls of any kind, for `CallObserver`."""

    ignores_invalid_requests: Final = True
    """A request that could not be sent says nothing about the server."""

    def __init__(
        self,
        target: str,
        method: str,
        breaker: CircuitBreaker | None,
        throttle: Throttle | None,
        rate: RateGate | None,
        concurrency: ConcurrencyGate | None,
        *,
        is_stream: bool,
        lock: threading.RLock,
        timer: Timer | None,
    ) -> None:
        """Begin without attempts, with the lock of the target.

        A breaker, throttle or limit that the method does not have is None. `is_stream`: it has a
        stream of responses.
        """
        self.target = target
        self.method = method
        self.breaker = breaker
        self.lock = lock
        self._timer = timer
        self.refusals: Counter[Reason] = Counter()
        self._throttle = throttle
        self._rate = rate
        self._concurrency = concurrency
        self._limits = not (throttle is None and rate is None and concurrency is None)
        self._is_stream = is_stream
        self.now_ns = clock_of(timer)
        began, ended = (
            partial(ThrottleBegan, target, method),
            partial(ThrottleEnded, target, method),
        )
        self._throttled = None if throttle is None else Refusals(timer, began, ended)

    def reset_after_fork(self, lock: threading.RLock) -> None:
        """Go on in a forked child, with the new lock of the target, and counts of 0."""
        self.lock = lock
        self.refusals.clear()
        if self._throttled is not None:
            self._throttled.reset_after_fork()
        if self._concurrency is not None:
            self._concurrency.reset_after_fork()

    # --- Attempts ---

    def enter(
        self, timeout_s: float | None = None, loop: Loop | None = None
    ) -> Admitted | NotSent | Waiting:
        """Decide about an attempt that begins now; `timeout_s` is None if it has no timeout.

        Returns:
            A `Waiting` only if it has to wait.
        """
        now_ns, token = self.now_ns(), 0
        breaker = self.breaker
        if breaker is not None:
            entered = breaker.enter(now_ns)
            if entered is None:
                with self.lock:
                    return self._not_sent(*_breaker_refusal(breaker, now_ns))
            token = entered
        if self._limits:
            with self.lock:
                result = self._enter_limits(now_ns, token, timeout_s, loop)
        else:
            result = Admitted(now_ns, token)
        if isinstance(result, Admitted):
            self.watch_stream(result)
            return result
        if isinstance(result, NotSent):
            self.release(token, now_ns)
            if self._throttled is not None and result.reason is Reason.THROTTLE:
                self._throttled.note()
            return result
        waiting, delay_ns = result
        if delay_ns:
            waiting.wait_for_token(delay_ns)
        else:
            waiting.wait_for_permit()
        return waiting.take() if waiting.has_ended else waiting

    def watch_stream(self, admitted: Admitted) -> None:
        """Let a stream count as a success when it has run for some time, if that matters now."""
        if not self._is_stream:
            return
        breaker, throttle = self.breaker, self._throttle
        is_watched = breaker is not None and breaker.watches_streams
        is_probe = breaker is not None and breaker.state is BreakerState.HALF_OPEN
        delay_ns = STREAM_PROVEN_NS
        if throttle is not None and throttle.has_failures:
            is_watched = True
            if not is_probe:
                delay_ns = max(delay_ns, 2 * throttle.failed_after_ns)
        if not is_watched:
            return
        admitted.is_probe = is_probe
        admitted.timeout = self.schedule(weak_callback(self.stream_lives, admitted), delay_ns)

    def stream_lives(self, admitted: Admitted, _: Timeout) -> None:
        """Count a stream as a success, if it has not ended."""
        with self.lock:
            if admitted.has_ended:
                return
            admitted.has_succeeded = True
            if self._throttle is not None:
                self._throttle.ended(self.now_ns(), "OK", admitted.began_ns)
        if self.breaker is not None:
            token, began_ns = admitted.token, admitted.began_ns
            self.breaker.stream_lives(token, began_ns, self.now_ns(), is_probe=admitted.is_probe)

    def _enter_limits(
        self, now_ns: int, token: int, timeout_s: float | None, loop: Loop | None
    ) -> Admitted | NotSent | tuple[Waiting, int]:
        """Ask throttle, rate and concurrency, under the lock.

        Returns:
            The result, or an attempt that waits, with the time until it has a token of the rate.
        """
        throttle, rate, concurrency = self._throttle, self._rate, self._concurrency
        if throttle is not None and throttle.refuses(now_ns):
            return self._not_sent(Reason.THROTTLE, throttle.window_ns)
        left_ns = NEVER if timeout_s is None else max(0, math.ceil(timeout_s * 1e9))
        delay_ns = 0
        if rate is not None:
            taken = rate.bucket.take(now_ns, min(rate.max_wait_ns, left_ns))
            if taken is None:
                return self._not_sent(Reason.RATE)
            delay_ns = taken
        if delay_ns == 0 and (concurrency is None or concurrency.take(loop)):
            return Admitted(now_ns, token, loop)
        waiting = self._new_waiting(token, loop, left_ns - delay_ns)
        if delay_ns == 0 and concurrency is not None:
            if not waiting.limit_ns:  # when overloaded, most calls; `refuse` takes twice as long
                if rate is not None:
                    rate.bucket.give_back(waiting.reservation)
                return self._not_sent(waiting.reason)
            concurrency.waiting[waiting] = None
        return waiting, delay_ns

    def _new_waiting(self, token: int, loop: Loop | None, left_ns: int) -> Waiting:
        """Make an attempt that waits; `left_ns` is the time until its deadline."""
        limit_ns = 0 if self._concurrency is None else self._concurrency.max_wait_ns
        reason = Reason.CONCURRENCY
        if left_ns < limit_ns:
            limit_ns, reason = max(0, left_ns), Reason.DEADLINE
        reservation = 0 if self._rate is None else self._rate.bucket.full_ns
        return Waiting(self, token, loop, limit_ns, reason, reservation)

    def _not_sent(self, reason: Reason, pushback_ns: int | None = None) -> NotSent:
        self.refusals[reason] += 1
        return NotSent(reason, pushback_ns)

    def release(self, token: int, now_ns: int) -> None:
        """Tell the breaker that an attempt that it has admitted is not sent."""
        if self.breaker is not None:
            self.breaker.ended(token, "CANCELLED", 0, now_ns)

    def end(self, admitted: Admitted, code: str) -> None:
        """Note the end of an attempt, with the name of its status code."""
        began_ns, now_ns = admitted.began_ns, self.now_ns()
        if self._is_stream:
            with self.lock:
                admitted.has_ended = True
            if admitted.timeout is not None:
                admitted.timeout.cancel()
        if self.breaker is not None and not (admitted.has_succeeded and admitted.is_probe):
            self.breaker.ended(
                admitted.token, code, now_ns - began_ns, now_ns, is_stream=self._is_stream
            )
        if not self._limits:
            return
        throttle, concurrency = self._throttle, self._concurrency
        with self.lock:
            if throttle is not None and not admitted.has_succeeded:
                throttle.ended(now_ns, code, began_ns)
            if concurrency is None:
                return
            concurrency.release(admitted.loop, now_ns, began_ns, code)
            ready = concurrency.next_waiting()
        self._admit(ready, now_ns)

    def _admit(self, ready: list[Waiting], now_ns: int) -> None:
        """Send attempts that have waited; a permit of one that has ended goes to the next."""
        concurrency = self._concurrency
        while ready and concurrency is not None:
            waiting = ready.pop(0)
            if waiting.admit(now_ns):
                continue
            with self.lock:
                concurrency.release(waiting.loop, now_ns, now_ns, "CANCELLED")
                ready += concurrency.next_waiting()

    def admit_waiting(self) -> None:
        """Send attempts that have waited, if there are places."""
        if self._concurrency is not None:
            with self.lock:
                ready = self._concurrency.next_waiting()
            self._admit(ready, self.now_ns())

    # --- For attempts that wait ---

    def token_came(self, waiting: Waiting) -> None:
        """Go on with an attempt that has a token of the rate limit now."""
        now_ns, concurrency = self.now_ns(), self._concurrency
        if concurrency is None:
            waiting.admit(now_ns)
            return
        with self.lock:
            admitted = concurrency.take(waiting.loop)
            if not admitted and not waiting.has_ended:
                concurrency.waiting[waiting] = None
        if admitted:
            self._admit([waiting], now_ns)
        else:
            waiting.wait_for_permit()

    def forget(self, waiting: Waiting, reason: Reason | None = None) -> None:
        """Give back what an attempt has got that does not wait any more; count why it is not sent.

        If there is no reason, it was canceled, or its channel was closed.
        """
        concurrency = self._concurrency
        with self.lock:
            if reason is not None:
                self.refusals[reason] += 1
            if concurrency is not None:
                concurrency.waiting.pop(waiting, None)
            if self._rate is not None:
                self._rate.bucket.give_back(waiting.reservation)
        self.release(waiting.token, self.now_ns())

    def schedule(self, task: Callable[[Timeout], object], delay_ns: int) -> Timeout | None:
        """Run a task on the timer's thread; None if the timer is stopped or full."""
        return start_timeout(self._timer, task, to_seconds(delay_ns))

    @property
    def timer_stopped(self) -> bool:
        """Whether the timer was stopped."""
        return self._timer is not None and self._timer.stopped

    def status(self, shared: Sequence[object] = ()) -> MethodAdmissionStatus:
        """Return the state of the method, without states that it shares with others."""
        throttle, breaker, concurrency = self._throttle, self.breaker, self._concurrency
        now_ns = self.now_ns()
        with self.lock:
            not_sent = tuple(
                NotSentStatus(reason.label, self.refusals[reason])
                for reason in Reason
                if self.refusals[reason]
            )
            running = limit = waiting = None
            if concurrency is not None and concurrency not in shared:
                running, limit, waiting = concurrency.status
            return MethodAdmissionStatus(
                self.target,
                self.method,
                "" if breaker is None or breaker in shared else breaker.state.value,
                None if throttle is None else throttle.rejection(now_ns),
                running,
                limit,
                waiting,
                not_sent,
            )


def _breaker_refusal(breaker: CircuitBreaker, now_ns: int) -> NotSent:
    """Return how a circuit breaker refuses an attempt."""
    forced = breaker.state is BreakerState.FORCED_OPEN
    return NotSent(Reason.FORCED if forced else Reason.BREAKER, breaker.left_ns(now_ns))


@dataclass(frozen=True, slots=True)
class NotSentStatus:
    """The attempts of one method that were not sent for one reason."""

    reason: str
    calls: int


@dataclass(frozen=True, slots=True)
class MethodAdmissionStatus:
    """The state of one method of one target, or of one function."""

    target: str
    method: str
    breaker: str
    """The state of its circuit breaker; "" if it has none."""
    rejection: float | None = None
    """The share of attempts that the throttle refuses now; None if there is none."""
    running: int | None = None
    """How many attempts run; None without a concurrency limit."""
    limit: int | None = None
    """How many may run; None without a concurrency limit."""
    waiting: int | None = None
    """How many wait; None without a concurrency limit."""
    not_sent: tuple[NotSentStatus, ...] = ()
    """Without reasons for which all were sent."""
    problem: str = field(init=False)
    """What is wrong with it; "" if nothing is. A field, because JSON has no properties.

    A breaker without calls remains HALF_OPEN, although its server may be well.
    """

    def __post_init__(self) -> None:
        problem = "throttled" if self.rejection else ""
        if self.breaker in _REFUSING:
            problem = f"the circuit breaker is {self.breaker.replace('_', ' ')}"
        object.__setattr__(self, "problem", problem)

    @property
    def labeled_method(self) -> str:
        """The method, for the label in metrics."""
        return labeled_method(self.target, self.method)

    @property
    def breakers(self) -> int | None:
        """1 if it has a circuit breaker, for metrics; None if it has none."""
        return 1 if self.breaker else None


_REFUSING: Final = frozenset((BreakerState.OPEN.value, BreakerState.FORCED_OPEN.value))
