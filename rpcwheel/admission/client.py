"""Whether an attempt of a call may be sent to its target, for `grpc` and `grpc.aio`.

* `MethodAdmission` asks the circuit breaker, the throttle, the rate limit and the concurrency limit
  of one method, in this order, and passes the end of each attempt to them.
* A `Waiting` is an attempt that may be sent later.
* `TargetAdmission` has those of all methods of one target, `Breakers` those of all targets of a
  kit.

Any thread may use them. Each target has one lock; its breakers have their own. No code of users
runs under a lock. The locks are reentrant, because the end of a call that is dropped is reported by
a finalizer.
"""

from __future__ import annotations

import enum
import math
import random
import sys
import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, TimerError, safe_repr
from rpcwheel.events import ThrottleBegan, ThrottleEnded, emit
from rpcwheel.limit.rate import TokenBucket
from rpcwheel.methods import checked_pattern, matches
from rpcwheel.telemetry import components
from rpcwheel.timer import shared_timer
from rpcwheel.timer.manual import clock_of

from .breaker import BreakerState
from .circuit import CircuitBreaker
from .concurrency import Concurrency
from .throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rpcwheel.limit.rate import RatePolicy
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .circuit import CheckHealth
    from .policy import BreakerPolicy, ConcurrencyPolicy, ThrottlePolicy

T = TypeVar("T")

MAX_METHODS: Final = 4096
"""Methods whose state is kept. A proxy may call any name that its clients send."""

TIMER_GRACE_NS: Final = 1_000_000_000
"""How late a timer may be before an attempt that waits goes on without it."""

STREAM_PROVEN_NS: Final = 1_000_000_000
"""A stream that a HALF_OPEN breaker has admitted is a success if it has run for this long."""

THROTTLED_NS: Final = 5_000_000_000
"""Throttling has ended if no attempt was throttled for this long."""

PUSHBACK_JITTER: Final = 0.5
"""By how much of itself the pushback of a throttle is longer at most, at random: attempts that were
refused together are not made together."""

ALL_METHODS: Final = "*"
"""The method of a state that all methods of a target share."""

UNKNOWN_TARGET: Final = "interceptors"
"""The target of interceptors, which do not know their channel."""


class Reason(enum.Enum):
    """Why an attempt is not sent; the value is the label in metrics."""

    BREAKER = "breaker"
    FORCED = "forced"
    THROTTLE = "throttle"
    RATE = "rate"
    CONCURRENCY = "concurrency"
    DEADLINE = "deadline"

    @property
    def code(self) -> str:
        """The name of the status code."""
        return _STATUS[self][0]

    @property
    def details(self) -> str:
        """The status details."""
        return f"not sent: {_STATUS[self][1]}"


_STATUS: Final = {
    Reason.BREAKER: ("UNAVAILABLE", "the circuit breaker is open, because calls have failed"),
    Reason.FORCED: ("UNAVAILABLE", "the circuit breaker was opened by hand"),
    Reason.THROTTLE: ("UNAVAILABLE", "throttled, because the server accepts too few calls"),
    Reason.RATE: ("RESOURCE_EXHAUSTED", "more calls per second than the rate limit allows"),
    Reason.CONCURRENCY: ("RESOURCE_EXHAUSTED", "as many calls run as the concurrency limit allows"),
    Reason.DEADLINE: (
        "DEADLINE_EXCEEDED",
        "the timeout has passed while the call waited, because of the concurrency limit",
    ),
}


class HealthChecks(Protocol):
    """A channel that can check the health of its server."""

    def check_health(self, done: Callable[[bool], object], /) -> bool:
        """Begin a check, which calls `done` with its result on any thread, as a `CheckHealth` does.

        Returns:
            False if it can't begin a check, as a channel that was closed. `done` is not called.
        """


class AdmissionSettings(NamedTuple):
    """The policies of one method."""

    throttle: ThrottlePolicy | None = None
    breaker: BreakerPolicy | None = None
    concurrency: ConcurrencyPolicy | None = None
    rate: RatePolicy | None = None


class Admitted(NamedTuple):
    """An attempt that is sent now. Its end must be passed to `MethodAdmission.end`."""

    began_ns: int
    token: int = 0
    """Of the circuit breaker."""


class NotSent(NamedTuple):
    """An attempt that is not sent."""

    reason: Reason
    pushback_ns: int | None = None
    """How long to wait before the next attempt; None if that is not known."""


class Waiting:
    """An attempt that may be sent later. Ends once: with a result, or by `cancel`."""

    __slots__ = (
        "_admission",
        "_callback",
        "_due",
        "_due_ns",
        "_result",
        "_taken",
        "_timeout",
        "_token",
        "limit_ns",
        "reason",
    )

    def __init__(
        self, admission: MethodAdmission, token: int, limit_ns: int, reason: Reason
    ) -> None:
        """Wait.

        Args:
            admission: That of the method.
            token: Of the circuit breaker.
            limit_ns: How long it waits for the end of another attempt, at most.
            reason: Why it is not sent if it has waited for so long.
        """
        self._admission = admission
        self._token = token
        self.limit_ns = limit_ns
        self.reason = reason
        self._timeout: Timeout | None = None
        self._callback: Callable[[], object] | None = None
        self._result: Admitted | NotSent | None = None
        self._taken = False
        self._due: Callable[[], object] = bool
        self._due_ns = NEVER

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
            self._taken = True
            return NotSent(self.reason) if self._result is None else self._result

    def cancel(self) -> None:
        """End, and give back what the attempt has got, unless `take` was called. Idempotent."""
        with self._admission.lock:
            if self._taken:
                return
            result, self._result = self._result, NotSent(self.reason)
            self._callback = None
        if result is None:
            self._admission.forget(self, self._token)
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
        """End as an attempt that is sent now; False if it has ended."""
        return self.end(Admitted(now_ns, self._token))

    def refuse(self, reason: Reason | None = None) -> None:
        """End as an attempt that is not sent."""
        result = NotSent(self.reason if reason is None else reason)
        if self.end(result):
            self._admission.refused(self, self._token, result.reason)

    def wait_for_token(self, delay_ns: int) -> None:
        """Wait until a token of the rate limit may be used."""
        self._schedule(lambda _=None: self._admission.token_came(self), delay_ns, Reason.RATE)

    def wait_for_permit(self) -> None:
        """Wait until another attempt has ended."""
        if self.limit_ns == 0:
            self.refuse()
        else:
            self._schedule(lambda _=None: self.refuse(), self.limit_ns, self.reason)

    def check_timer(self) -> None:
        """Do what the timer should have done, if it was stopped or is late."""
        admission = self._admission
        if self.has_ended:
            return
        if admission.timer_stopped:
            self.refuse()
        elif admission.now_ns() >= self._due_ns + TIMER_GRACE_NS:
            self._due()

    def _schedule(self, task: Callable[..., object], delay_ns: int, reason: Reason) -> None:
        """Run a task after a delay; refuse the attempt if there is no timer."""
        self._due, self._due_ns = task, self._admission.now_ns() + delay_ns
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


class _RateGate:
    """A rate limit, and how long attempts wait for it."""

    __slots__ = ("bucket", "max_wait_ns")

    def __init__(self, policy: RatePolicy) -> None:
        self.bucket = TokenBucket(policy.rate, policy.burst)
        self.max_wait_ns = to_ns(policy.max_wait)


class _ConcurrencyGate:
    """A concurrency limit, and the attempts that wait for it, oldest first."""

    __slots__ = ("limit", "max_wait_ns", "waiting")

    def __init__(self, policy: ConcurrencyPolicy) -> None:
        self.limit = Concurrency(policy)
        self.max_wait_ns = to_ns(policy.max_wait)
        self.waiting: deque[Waiting] = deque()

    @property
    def status(self) -> tuple[int, int, int]:
        """How many attempts run, how many may, and how many wait."""
        return self.limit.running, int(self.limit.limit), len(self.waiting)

    def take(self) -> bool:
        """Whether an attempt may be sent now, and no other waits for that."""
        return not self.waiting and self.limit.take()

    def next_waiting(self) -> list[Waiting]:
        """Return the attempts that need not wait any more."""
        ready = []
        while self.waiting and self.limit.take():
            try:
                ready.append(self.waiting.popleft())
            except IndexError:  # a finalizer that has run meanwhile has taken it
                self.limit.release(0, 0, "CANCELLED")
        return ready


class MethodAdmission:
    """Whether attempts of one method of one target may be sent. Any thread may use it.

    `kind` and `end` are those of `MethodCounts`, so that the ends of attempts are observed in the
    same way.
    """

    __slots__ = (
        "__weakref__",
        "_concurrency",
        "_is_stream",
        "_limits",
        "_probes",
        "_proven",
        "_rate",
        "_throttle",
        "_throttled",
        "_throttled_ns",
        "_throttled_since_ns",
        "_timer",
        "breaker",
        "lock",
        "method",
        "now_ns",
        "refusals",
        "target",
    )

    kind: Final = ""
    """Calls of any kind, for `CallObserver`."""

    def __init__(
        self,
        owner: TargetAdmission,
        method: str,
        breaker: CircuitBreaker | None,
        throttle: Throttle | None,
        rate: _RateGate | None,
        concurrency: _ConcurrencyGate | None,
        *,
        is_stream: bool,
    ) -> None:
        # Without a reference to the owner, which has one to this: the last of its users frees both.
        self.target = owner.target
        self.method = method
        self.breaker = breaker
        self.lock = owner.lock
        self._timer = owner.timer
        self.refusals: Counter[Reason] = Counter()
        self._throttle = throttle
        self._rate = rate
        self._concurrency = concurrency
        self._limits = not (throttle is None and rate is None and concurrency is None)
        self._is_stream = is_stream and breaker is not None
        self._probes: dict[int, tuple[Admitted, Timeout | None]] = {}
        """Streams that a HALF_OPEN breaker has admitted, by their ids."""
        self._proven: dict[int, Admitted] = {}
        """Those of them that have counted as successes and not ended."""
        self.now_ns = owner.now_ns
        self._throttled = 0
        self._throttled_since_ns: int | None = None
        self._throttled_ns = 0

    # --- Attempts ---

    def enter(self, timeout_s: float | None = None) -> Admitted | NotSent | Waiting:
        """Decide about an attempt that begins now.

        Args:
            timeout_s: The timeout of the attempt; None without one.
        """
        now_ns, token = self.now_ns(), 0
        breaker = self.breaker
        if breaker is not None:
            entered = breaker.enter(now_ns)
            if entered is None:
                return self._refused_by_breaker(breaker, now_ns)
            token = entered
        if not self._limits:
            admitted = Admitted(now_ns, token)
            if self._is_stream:
                self._watch_stream(admitted)
            return admitted
        with self.lock:
            result = self._enter_limits(now_ns, token, timeout_s)
        if isinstance(result, NotSent):
            self._release(token, now_ns)
            if result.reason is Reason.THROTTLE:
                self._report_throttled(now_ns)
        elif not isinstance(result, Admitted):
            waiting, delay_ns = result
            if delay_ns:
                waiting.wait_for_token(delay_ns)
            else:
                waiting.wait_for_permit()
            return waiting
        elif self._is_stream:
            self._watch_stream(result)
        return result

    def _watch_stream(self, admitted: Admitted) -> None:
        """Let a stream that is a probe count as a success when it has run for some time."""
        if self.breaker is None or self.breaker.state is not BreakerState.HALF_OPEN:
            return
        timeout = self.schedule(weak_callback(self.stream_lives, admitted), STREAM_PROVEN_NS)
        with self.lock:
            self._probes[id(admitted)] = admitted, timeout

    def stream_lives(self, admitted: Admitted, _: Timeout) -> None:
        """Count a stream as a success, if it has not ended."""
        with self.lock:
            if self._probes.pop(id(admitted), None) is None:
                return
            self._proven[id(admitted)] = admitted
        if self.breaker is not None:
            self.breaker.ended(admitted.token, "OK", 0, self.now_ns())

    def _enter_limits(
        self, now_ns: int, token: int, timeout_s: float | None
    ) -> Admitted | NotSent | tuple[Waiting, int]:
        """Ask throttle, rate and concurrency, under the lock.

        Returns:
            The result, or an attempt that waits, with the time until it has a token of the rate.
        """
        throttle, rate, concurrency = self._throttle, self._rate, self._concurrency
        if throttle is not None and throttle.refuses(now_ns):
            jitter = random.uniform(1.0, 1.0 + PUSHBACK_JITTER)
            return self._not_sent(Reason.THROTTLE, int(jitter * throttle.window_ns))
        left_ns = NEVER if timeout_s is None else max(0, math.ceil(timeout_s * 1e9))
        delay_ns = 0
        if rate is not None:
            taken = rate.bucket.take(now_ns, min(rate.max_wait_ns, left_ns))
            if taken is None:
                return self._not_sent(Reason.RATE)
            delay_ns = taken
        if delay_ns == 0 and (concurrency is None or concurrency.take()):
            return Admitted(now_ns, token)
        waiting = self._new_waiting(token, left_ns - delay_ns)
        if delay_ns == 0 and concurrency is not None:
            if not waiting.limit_ns:
                if rate is not None:
                    rate.bucket.give_back()
                return self._not_sent(waiting.reason)
            concurrency.waiting.append(waiting)
        return waiting, delay_ns

    def _new_waiting(self, token: int, left_ns: int) -> Waiting:
        """Make an attempt that waits; `left_ns` is the time until its deadline."""
        limit_ns = 0 if self._concurrency is None else self._concurrency.max_wait_ns
        if left_ns < limit_ns:
            return Waiting(self, token, max(0, left_ns), Reason.DEADLINE)
        return Waiting(self, token, limit_ns, Reason.CONCURRENCY)

    def _not_sent(self, reason: Reason, pushback_ns: int | None = None) -> NotSent:
        self.refusals[reason] += 1
        return NotSent(reason, pushback_ns)

    def _refused_by_breaker(self, breaker: CircuitBreaker, now_ns: int) -> NotSent:
        pushback_ns = breaker.pushback_ns(now_ns)
        with self.lock:
            forced = breaker.state is BreakerState.FORCED_OPEN
            return self._not_sent(Reason.FORCED if forced else Reason.BREAKER, pushback_ns)

    def _release(self, token: int, now_ns: int) -> None:
        """Tell the breaker that an attempt that it has admitted is not sent."""
        if self.breaker is not None:
            self.breaker.ended(token, "CANCELLED", 0, now_ns)

    def end(self, admitted: Admitted, code: str) -> None:
        """Note the end of an attempt, with the name of its status code."""
        began_ns, token = admitted
        now_ns = self.now_ns()
        if self.breaker is not None and not (self._is_stream and self._was_proven(admitted)):
            duration_ns = 0 if self._is_stream else now_ns - began_ns
            self.breaker.ended(token, code, duration_ns, now_ns)
        if not self._limits:
            return
        throttle, concurrency = self._throttle, self._concurrency
        with self.lock:
            if throttle is not None:
                throttle.ended(now_ns, code)
            if concurrency is None:
                return
            concurrency.limit.release(now_ns, began_ns, code)
            ready = concurrency.next_waiting()
        self._admit(ready, now_ns)

    def _was_proven(self, admitted: Admitted) -> bool:
        """Whether a stream that ends has counted as a success before."""
        with self.lock:
            _, timeout = self._probes.pop(id(admitted), (None, None))
            was_proven = self._proven.pop(id(admitted), None) is not None
        if timeout is not None:
            timeout.cancel()
        return was_proven

    def _admit(self, ready: list[Waiting], now_ns: int) -> None:
        """Send attempts that have waited; a permit of one that has ended goes to the next."""
        concurrency = self._concurrency
        while ready and concurrency is not None:
            if ready.pop(0).admit(now_ns):
                continue
            with self.lock:
                concurrency.limit.release(now_ns, now_ns, "CANCELLED")
                ready += concurrency.next_waiting()

    # --- For attempts that wait ---

    def token_came(self, waiting: Waiting) -> None:
        """Go on with an attempt that has a token of the rate limit now."""
        now_ns, concurrency = self.now_ns(), self._concurrency
        if concurrency is None:
            waiting.admit(now_ns)
            return
        with self.lock:
            admitted = concurrency.take()
            if not admitted and not waiting.has_ended:
                concurrency.waiting.append(waiting)
        if admitted:
            self._admit([waiting], now_ns)
        else:
            waiting.wait_for_permit()

    def refused(self, waiting: Waiting, token: int, reason: Reason) -> None:
        """Count an attempt that has waited and is not sent."""
        with self.lock:
            self.refusals[reason] += 1
        self.forget(waiting, token)

    def forget(self, waiting: Waiting, token: int) -> None:
        """Give back what an attempt has got that does not wait any more."""
        concurrency = self._concurrency
        with self.lock:
            if concurrency is not None and waiting in concurrency.waiting:
                concurrency.waiting.remove(waiting)
            if self._rate is not None:
                self._rate.bucket.give_back()
        self._release(token, self.now_ns())

    def schedule(self, task: Callable[[Timeout], object], delay_ns: int) -> Timeout | None:
        """Run a task on the timer's thread; None if the timer is stopped or full."""
        timer = shared_timer() if self._timer is None else self._timer
        try:
            return timer.new_timeout(task, to_seconds(delay_ns))
        except (TimerError, RuntimeError):  # RuntimeError: no thread can be started
            return None

    @property
    def timer_stopped(self) -> bool:
        """Whether the timer was stopped."""
        return self._timer is not None and self._timer.stopped

    # --- Reports ---

    def _report_throttled(self, now_ns: int) -> None:
        with self.lock:
            self._throttled_ns = now_ns
            self._throttled += 1
            begins = self._throttled_since_ns is None
            if begins:
                self._throttled_since_ns, self._throttled = now_ns, 1
        if begins:
            self._emit(ThrottleBegan(self.target, self.method))
            self._check_later(THROTTLED_NS)

    def _check_later(self, delay_ns: int) -> None:
        self.schedule(weak_callback(self.check_throttled), delay_ns)  # or there is no timer

    def check_throttled(self, _: Timeout) -> None:
        """Report that no attempt is throttled any more, or look again later."""
        now_ns = self.now_ns()
        with self.lock:
            left_ns = self._throttled_ns + THROTTLED_NS - now_ns
            began_ns, throttled = self._throttled_since_ns, self._throttled
            if left_ns <= 0:
                self._throttled_since_ns = None
        if began_ns is None:
            return
        if left_ns > 0:
            self._check_later(left_ns)
            return
        lasted_s = to_seconds(self._throttled_ns - began_ns)
        self._emit(ThrottleEnded(self.target, self.method, throttled, lasted_s))

    def _emit(self, event: ThrottleBegan | ThrottleEnded) -> None:
        EXECUTOR.submit(("throttle", id(self)), partial(emit, event))

    def status(self, shared: Sequence[object] = ()) -> MethodAdmissionStatus:
        """Return the state of the method, without states that it shares with others."""
        throttle, breaker, concurrency = self._throttle, self.breaker, self._concurrency
        now_ns = self.now_ns()
        with self.lock:
            not_sent = tuple(
                NotSentStatus(reason.value, self.refusals[reason])
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

    @property
    def breakers(self) -> int | None:
        """1 if it has a circuit breaker, for metrics; None if it has none."""
        return 1 if self.breaker else None

    @property
    def problem(self) -> str:
        """What is wrong with it; "" if nothing is."""
        if self.breaker in _REFUSING:
            return f"the circuit breaker of {self.method} is {self.breaker.replace('_', ' ')}"
        return "" if not self.rejection else f"{self.method} is throttled"


_REFUSING: Final = frozenset(
    state.value for state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.FORCED_OPEN)
)


class TargetAdmission:
    """The states of all methods of one target. Any thread may use it."""

    def __init__(self, target: str, *, timer: Timer | None, breakers: Breakers) -> None:
        """Begin without a state.

        Args:
            target: The target of the channel, for events and status.
            timer: Any rpcwheel timer; None for `shared_timer()`.
            breakers: Those of the kit, which set the state of each new breaker.
        """
        self.target = target
        self.lock = threading.RLock()
        self.now_ns = clock_of(timer)
        self.channels: weakref.WeakSet[HealthChecks] = weakref.WeakSet()
        """The open channels to the target, if they are known."""
        self.timer = timer
        self._breakers = breakers
        self._methods: dict[str, MethodAdmission] = {}
        self._all_breakers: weakref.WeakSet[CircuitBreaker] = weakref.WeakSet()
        self._shared: dict[int, tuple[object, Any]] = {}
        """States that several methods share, by the id of their policy, which is kept."""
        components.add("admission", self)

    def method(
        self, name: str, settings: AdmissionSettings, *, is_stream: bool = False
    ) -> MethodAdmission:
        """Return the state of a method.

        Args:
            name: The full name of the method.
            settings: Those of its policies.
            is_stream: Whether it has a stream of responses.
        """
        method = self._methods.get(name)
        if method is not None:
            return method
        with self.lock:
            method = self._methods.get(name)
            if method is None:
                if len(self._methods) >= MAX_METHODS:
                    del self._methods[next(iter(self._methods))]
                method = self._methods[name] = self._new_method(name, settings, is_stream)
        if method.breaker is not None:
            self._breakers.made(method.breaker)
        return method

    def _new_method(
        self, name: str, settings: AdmissionSettings, is_stream: bool
    ) -> MethodAdmission:
        throttle, breaker, concurrency, rate = settings
        return MethodAdmission(
            self,
            name,
            None if breaker is None else self._of(breaker, partial(self._breaker, breaker), name),
            None if throttle is None else Throttle(throttle, random.random),
            None if rate is None else self._of(rate, lambda _: _RateGate(rate), name),
            None
            if concurrency is None
            else self._of(concurrency, lambda _: _ConcurrencyGate(concurrency), name),
            is_stream=is_stream,
        )

    def _of(self, policy: Any, make: Callable[[str], T], name: str) -> T:
        """Make the state of a policy for a method, or return the one that all methods share."""
        if policy.per == "method":
            return make(name)
        shared = self._shared.get(id(policy))
        if shared is None:
            shared = self._shared[id(policy)] = policy, make(ALL_METHODS)
        state: T = shared[1]
        return state

    def _breaker(self, policy: BreakerPolicy, name: str) -> CircuitBreaker:
        breaker = CircuitBreaker(policy, target=self.target, method=name, timer=self.timer)
        if policy.health_check:
            breaker.check_health = weak_check(self)
        self._all_breakers.add(breaker)
        return breaker

    @property
    def breakers(self) -> list[CircuitBreaker]:
        """The circuit breakers of the target, without those of methods that were not called."""
        return sorted(self._all_breakers, key=lambda breaker: breaker.method)

    def status(self) -> tuple[MethodAdmissionStatus, ...]:
        """Return the states of the methods, for metrics and the live view.

        States that all methods share have a row of their own.
        """
        with self.lock:
            methods = list(self._methods.values())
            shared = [state for _, state in self._shared.values()]
        rows = [method.status(shared) for method in methods]
        for state in shared:
            if isinstance(state, CircuitBreaker):
                rows.append(MethodAdmissionStatus(self.target, ALL_METHODS, state.state.value))
            elif isinstance(state, _ConcurrencyGate):
                rows.append(
                    MethodAdmissionStatus(self.target, ALL_METHODS, "", None, *state.status)
                )
        return tuple(rows)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            components.end("admission", self)


def weak_check(admission: TargetAdmission) -> CheckHealth:
    """Return a function that checks the health of the server of a target, while that exists."""
    reference = weakref.ref(admission)

    def check(done: Callable[[bool], object]) -> None:
        alive = reference()
        channels = () if alive is None else tuple(alive.channels)
        if not any(channel.check_health(done) for channel in channels):
            done(True)  # the next calls find out whether it works

    return check


class Breakers:
    """The circuit breakers of a kit, to look at them and to set their state by hand.

    A breaker exists from the first call of its method, as long as a channel or stub to its target.
    What is set by hand applies to breakers that are made later too.

    Example::

        kit.breakers.force_open("/shop.Orders/*")  # send no calls of these methods
        kit.breakers.reset("/shop.Orders/*")
        for breaker in kit.breakers:
            print(breaker.target, breaker.method, breaker.state)
    """

    def __init__(self, policies: Iterable[BreakerPolicy | None] = ()) -> None:
        """Begin without a breaker.

        Args:
            policies: The policies of all methods.
        """
        self._scopes = {policy.per for policy in policies if policy is not None}
        self._lock = threading.RLock()
        self._by_target: weakref.WeakValueDictionary[str, TargetAdmission] = (
            weakref.WeakValueDictionary()
        )
        self._others: weakref.WeakSet[TargetAdmission] = weakref.WeakSet()
        self._by_hand: dict[str, Callable[[CircuitBreaker], None]] = {}

    def admission(
        self, target: str | None, timer: Timer | None, *, is_shared: bool = False
    ) -> TargetAdmission:
        """Return the states of a target. For channels.

        Args:
            target: The target; None if it is not known.
            timer: Any rpcwheel timer; None for `shared_timer()`.
            is_shared: Whether all channels to the target share them.
        """
        with self._lock:
            if target is None or not is_shared:
                name = UNKNOWN_TARGET if target is None else target
                admission = TargetAdmission(name, timer=timer, breakers=self)
                self._others.add(admission)
                return admission
            existing = self._by_target.get(target)
            if existing is None:
                existing = TargetAdmission(target, timer=timer, breakers=self)
                self._by_target[target] = existing
            return existing

    def made(self, breaker: CircuitBreaker) -> None:
        """Set the state of a new breaker, if it was set by hand. For channels."""
        with self._lock:
            by_hand = [
                change for pattern, change in self._by_hand.items() if _names(pattern, breaker)
            ]
        if by_hand:
            by_hand[-1](breaker)

    def force_open(self, methods: str = ALL_METHODS) -> None:
        """Send no calls until `reset`.

        Args:
            methods: A full method name, or a pattern such as `"/shop.Orders/*"`. If the methods of
                a target share a breaker (`per="target"`), only `"*"`.

        Raises:
            ConfigurationError: It is neither, or names no breaker.
        """
        self._set(methods, CircuitBreaker.force_open)

    def disable(self, methods: str = ALL_METHODS) -> None:
        """Send all calls, whatever their results, until `reset`; arguments as of `force_open`."""
        self._set(methods, CircuitBreaker.disable)

    def reset(self, methods: str = ALL_METHODS) -> None:
        """Close the breakers, and forget earlier results; arguments as of `force_open`."""
        self._set(methods, CircuitBreaker.reset)

    def _set(self, pattern: str, change: Callable[[CircuitBreaker], None]) -> None:
        checked_pattern(pattern)
        if not self._scopes:
            raise ConfigurationError(
                "there is no circuit breaker; give the kit or some methods one, such as breaker=0.5"
            )
        if pattern != ALL_METHODS and "method" not in self._scopes:
            raise ConfigurationError(
                f'the methods of a target share a circuit breaker (per="target"); give "*", not '
                f"{pattern!r}"
            )
        with self._lock:
            for earlier in [each for each in self._by_hand if matches(pattern, each)]:
                del self._by_hand[earlier]
            if change is not CircuitBreaker.reset or self._by_hand:
                self._by_hand[pattern] = change
        for breaker in self:
            if _names(pattern, breaker):
                change(breaker)

    def __iter__(self) -> Iterator[CircuitBreaker]:
        with self._lock:
            admissions = [*self._by_target.values(), *self._others]
        for admission in admissions:
            yield from admission.breakers

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @safe_repr
    def __repr__(self) -> str:
        return f"<Breakers {list(self)}>"


def _names(pattern: str, breaker: CircuitBreaker) -> bool:
    return pattern == ALL_METHODS or matches(pattern, breaker.method)
