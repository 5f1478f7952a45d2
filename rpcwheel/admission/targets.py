"""The circuit breakers, throttles and limits of the targets of a kit, for `grpc` and `grpc.aio`.

`TargetAdmission` has those of all methods of one target, `Breakers` those of all targets of a kit.
Any thread may use them; no code of users runs under their locks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.executor import SerialExecutor, reset_after_fork
from rpcwheel.backoff import RANDOM
from rpcwheel.errors import ConfigurationError, safe_repr
from rpcwheel.limit.policy import ADAPTIVE
from rpcwheel.methods import checked_pattern, matches
from rpcwheel.telemetry import components

from .breaker import Breaker
from .circuit import CircuitBreaker
from .method import ConcurrencyGate, MethodAdmission, MethodAdmissionStatus, RateGate
from .throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rpcwheel.limit.rate import RatePolicy
    from rpcwheel.timer.api import Timer

    from .breaker import Transition
    from .policy import BreakerPolicy, ConcurrencyPolicy, ThrottlePolicy

T = TypeVar("T")

MAX_METHODS: Final = 4096
"""Methods whose state is kept. A proxy may call any name that its clients send."""

ALL_METHODS: Final = "*"
"""The method of a state that all methods of a target share."""

UNKNOWN_TARGET: Final = "interceptors"
"""The target of interceptors, which do not know their channel."""


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


class TargetAdmission:
    """The states of all methods of one target. Any thread may use it."""

    def __init__(self, target: str, *, timer: Timer | None, breakers: Breakers) -> None:
        """Begin without a state. `breakers`, those of the kit, set the state of each new one.

        A timer of None is `shared_timer()`.
        """
        self.target = target
        self.lock = threading.RLock()
        self.timer = timer
        self._breakers = breakers
        self._channels: weakref.WeakSet[HealthChecks] = weakref.WeakSet()
        self._methods: dict[str, MethodAdmission] = {}
        self._all_breakers: weakref.WeakSet[CircuitBreaker] = weakref.WeakSet()
        self._shared: dict[int, tuple[object, Any]] = {}
        """States that several methods share, by the id of their policy, which is kept."""
        components.add("admission", self, ends=True)
        reset_after_fork(self)

    def reset(self) -> None:
        """Go on in a forked child, without the attempts of its parent that run or wait."""
        self.lock = threading.RLock()  # a thread of the parent may have held the old one
        for method in self._methods.values():
            method.reset_after_fork(self.lock)
        for breaker in self._all_breakers:
            breaker.reset_after_fork()
        self._breakers.reset_after_fork()

    def method(
        self, name: str, settings: AdmissionSettings, *, is_stream: bool = False
    ) -> MethodAdmission:
        """Return the state of a method; `is_stream`: it has a stream of responses."""
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
        if concurrency is not None and is_stream and concurrency.max_calls == ADAPTIVE:
            concurrency = None  # a stream that goes on for hours says nothing about the limit
        return MethodAdmission(
            self.target,
            name,
            None if breaker is None else self._of(breaker, partial(self._breaker, breaker), name),
            None if throttle is None else Throttle(throttle, RANDOM.random),
            None if rate is None else self._of(rate, lambda _: RateGate(rate), name),
            None
            if concurrency is None
            else self._of(concurrency, lambda _: ConcurrencyGate(concurrency), name),
            is_stream=is_stream,
            lock=self.lock,
            timer=self.timer,
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
            breaker.check_health = weak_callback(self.check_health)
        self._all_breakers.add(breaker)
        return breaker

    def add_channel(self, channel: HealthChecks) -> None:
        """Note an open channel to the target."""
        with self.lock:
            self._channels.add(channel)

    def remove_channel(self, channel: HealthChecks) -> None:
        """Forget a channel that is closed."""
        with self.lock:
            self._channels.discard(channel)

    def check_health(self, done: Callable[[bool], object]) -> None:
        """Check the health of the server through an open channel, as a `CheckHealth` does."""
        with self.lock:
            channels = list(self._channels)
        if not any(channel.check_health(done) for channel in channels):
            done(True)  # the next calls find out whether it works

    @property
    def breakers(self) -> list[CircuitBreaker]:
        """The circuit breakers of the target, without those of methods that were not called."""
        with self.lock:
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
            elif isinstance(state, ConcurrencyGate):
                rows.append(
                    MethodAdmissionStatus(self.target, ALL_METHODS, "", None, *state.status)
                )
        return tuple(rows)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            components.end("admission", self)


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
        """Begin without a breaker, for the policies of all methods."""
        self._scopes = {policy.per for policy in policies if policy is not None}
        self.reset_after_fork()
        self._admissions: weakref.WeakValueDictionary[object, TargetAdmission] = (
            weakref.WeakValueDictionary()
        )
        """By target, if the channels to it share their states."""
        self._by_hand: dict[str, Callable[[Breaker], Transition | None]] = {}
        # Of changes by hand, in their order: run by a thread that has made one, without the lock.
        self._reports = SerialExecutor(run=lambda run: run())

    def reset_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent of a forked child may have held."""
        self._lock = threading.RLock()

    def admission(
        self, target: str | None, timer: Timer | None, *, is_shared: bool = False
    ) -> TargetAdmission:
        """Return the states of a target, which is None if it is not known. For channels.

        If they are shared, all channels to the target get the same.
        """
        with self._lock:
            key = object() if target is None or not is_shared else target
            admission = self._admissions.get(key)
            if admission is None:
                name = UNKNOWN_TARGET if target is None else target
                admission = TargetAdmission(name, timer=timer, breakers=self)
                self._admissions[key] = admission
            return admission

    def made(self, breaker: CircuitBreaker) -> None:
        """Set the state of a new breaker, if it was set by hand. For channels."""
        with self._lock:
            by_hand = [
                change for pattern, change in self._by_hand.items() if _names(pattern, breaker)
            ]
            if by_hand:  # with the lock: another thread may set a later state
                self._change(breaker, by_hand[-1])
        self._reports.start()

    def force_open(self, methods: str = ALL_METHODS) -> None:
        """Send no calls until `reset`.

        Args:
            methods: A full method name, or a pattern such as `"/shop.Orders/*"`. If the methods of
                a target share a breaker (`per="target"`), only `"*"`.

        Raises:
            ConfigurationError: It is neither, or names no breaker.
        """
        self._set(methods, Breaker.force_open)

    def disable(self, methods: str = ALL_METHODS) -> None:
        """Send all calls, whatever their results, until `reset`; arguments as of `force_open`."""
        self._set(methods, Breaker.disable)

    def reset(self, methods: str = ALL_METHODS) -> None:
        """Close the breakers, and forget earlier results; arguments as of `force_open`."""
        self._set(methods, Breaker.reset)

    def _set(self, pattern: str, change: Callable[[Breaker], Transition | None]) -> None:
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
            if change is not Breaker.reset or self._by_hand:
                self._by_hand[pattern] = change
            for breaker in self:
                if _names(pattern, breaker):
                    self._change(breaker, change)
        self._reports.start()

    def _change(
        self, breaker: CircuitBreaker, change: Callable[[Breaker], Transition | None]
    ) -> None:
        """Change the state of a breaker. Under the lock; `_reports` are started after it."""
        self._reports.add(partial(breaker.report, breaker.change(change)))

    def __iter__(self) -> Iterator[CircuitBreaker]:
        with self._lock:
            admissions = list(self._admissions.values())
        for admission in admissions:
            yield from admission.breakers

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @safe_repr
    def __repr__(self) -> str:
        return f"<Breakers {list(self)}>"


def _names(pattern: str, breaker: CircuitBreaker) -> bool:
    return pattern == ALL_METHODS or matches(pattern, breaker.method)
