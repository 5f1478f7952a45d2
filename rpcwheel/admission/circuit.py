"""Circuit breakers with their locks, timeouts and events, for calls and for functions.

A breaker that opens submits one timeout to the wheel. When it fires, the server's health is checked
if that is possible, and the breaker becomes HALF_OPEN, or submits the timeout again. A breaker that
is CLOSED or HALF_OPEN has no timeout.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.backoff import RANDOM
from rpcwheel.durations import to_seconds
from rpcwheel.errors import safe_repr
from rpcwheel.events import BreakerClosed, BreakerOpened, emit
from rpcwheel.timer.manual import clock_of, start_timeout

from .breaker import Breaker, BreakerState

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .breaker import Transition
    from .policy import BreakerPolicy

    CheckHealth: TypeAlias = Callable[[Callable[[bool], object]], None]
    """Begins a health check of the server, and calls the function with the result on any thread:
    False if the server did not answer, or does not serve."""

FUNCTION: Final = "function"
"""The target of a breaker of `with_breaker`."""


class CircuitBreaker:
    """The circuit breaker of one method of one target, or of a function. Any thread may use it.

    The breakers of a kit are in `kit.breakers`, that of a function is its attribute `breaker`.
    """

    def __init__(
        self, policy: BreakerPolicy, *, target: str, method: str, timer: Timer | None
    ) -> None:
        """Make a CLOSED breaker; `method` is `"*"` for all methods of the target.

        A timer of None is `shared_timer()`.
        """
        self.target = target
        self.method = method
        self.check_health: CheckHealth | None = None
        """Checks the health of the server before the breaker becomes HALF_OPEN; None: not."""
        self._breaker = Breaker(policy, RANDOM.random)
        self._new_lock()
        self._timer = timer
        self._now_ns = clock_of(timer)
        self._timeout: Timeout | None = None
        self._opened_ns = 0

    def _new_lock(self) -> None:
        # Reentrant, because the end of a call that is dropped is reported by a finalizer.
        self._lock = threading.RLock()

    def reset_after_fork(self) -> None:
        """Go on in a forked child, without the attempts of its parent that run."""
        self._new_lock()  # a thread of the parent may have held the old one
        self._breaker.forget_running()

    @property
    def state(self) -> BreakerState:
        """CLOSED, OPEN, HALF_OPEN, or, set by hand, FORCED_OPEN or DISABLED."""
        return self._breaker.state

    # --- For calls ---

    def enter(self, now_ns: int) -> int | None:
        """Begin a call, and return the token for `ended`; None if it must not be sent."""
        breaker = self._breaker
        token = breaker.generation  # before the state: if that changes, the token is an old one
        if breaker.state is BreakerState.CLOSED:  # most calls; the lock takes 0.2 us
            return token
        with self._lock:
            entered = breaker.enter()
            transition = None if entered is not None else breaker.give_up(now_ns)
        if transition is not None:
            self.report(transition)
        return entered

    def enter_again(self, token: int, now_ns: int) -> int | None:
        """Ask again for a call that has waited since `enter`; returns what `enter` does."""
        return token if token == self._breaker.generation else self.enter(now_ns)

    def ended(
        self, token: int, code: str, duration_ns: int, now_ns: int, *, is_stream: bool = False
    ) -> None:
        """End a call that `enter` has begun, with the name of its status code."""
        with self._lock:
            transition = self._breaker.ended(token, code, duration_ns, now_ns, is_stream=is_stream)
        if transition is not None:
            self.report(transition)

    @property
    def watches_streams(self) -> bool:
        """Whether a stream that begins now matters before its end."""
        breaker = self._breaker
        return breaker.state is BreakerState.HALF_OPEN or not breaker.lost.has_worked

    def stream_lives(self, token: int, began_ns: int, now_ns: int, *, is_probe: bool) -> None:
        """Note a stream that has run for some time and goes on: a success, if it is a probe."""
        if is_probe:
            self.ended(token, "OK", 0, now_ns)
        else:
            with self._lock:
                self._breaker.lost.note_success(began_ns)

    def left_ns(self, now_ns: int) -> int | None:
        """Return the time until the next call may be sent; None if that is not known."""
        at_ns = self._breaker.half_open_at_ns
        return None if at_ns is None else max(0, at_ns - now_ns)

    # --- By hand ---

    def force_open(self) -> None:
        """Send no calls until `reset`."""
        self.report(self.change(Breaker.force_open))

    def disable(self) -> None:
        """Send all calls, whatever their results, until `reset`."""
        self.report(self.change(Breaker.disable))

    def reset(self) -> None:
        """Become CLOSED, and forget the results of earlier calls."""
        self.report(self.change(Breaker.reset))

    # --- Changes of the state ---

    def change(self, by_hand: Callable[[Breaker], Transition | None]) -> Transition | None:
        """Change the state by hand; `report` must follow. For `Breakers`."""
        with self._lock:
            return by_hand(self._breaker)

    def report(self, transition: Transition | None) -> None:
        """Report a change of the state, if there is one, and begin to wait if it is OPEN.

        Not under a lock: if no thread can be started, event sinks run on this thread. A timer may
        start its thread, in which a finalizer may end a call.
        """
        if transition is None:
            return
        now_ns = self._now_ns()
        match transition.after:
            case BreakerState.OPEN | BreakerState.FORCED_OPEN:
                if transition.before not in _SENDS_NOTHING:
                    self._opened_ns = now_ns
                open_for_ns = transition.open_for_ns
                open_for_s = math.inf if open_for_ns is None else to_seconds(open_for_ns)
                opened = BreakerOpened(self.target, self.method, transition.reason, open_for_s)
                EXECUTOR.submit(("breaker", id(self)), partial(emit, opened))
            case BreakerState.CLOSED | BreakerState.DISABLED if transition.before in _SENDS_NOTHING:
                lasted_s = to_seconds(now_ns - self._opened_ns)
                closed = BreakerClosed(self.target, self.method, lasted_s)
                EXECUTOR.submit(("breaker", id(self)), partial(emit, closed))
        if transition.open_for_ns is not None:
            self._wait(transition.open_for_ns)
        else:
            self._cancel_timeout()

    def _wait(self, delay_ns: int) -> None:
        """Check the health of the server, and become HALF_OPEN, after a delay."""
        breaker = self._breaker
        generation = breaker.generation
        due = weak_callback(self._due, generation)
        timeout = start_timeout(self._timer, due, to_seconds(delay_ns))
        if timeout is None:
            self._checked(generation, serves=True)  # the next calls find out whether it works
            return
        with self._lock:
            if breaker.state is BreakerState.OPEN and breaker.generation == generation:
                timeout, self._timeout = self._timeout, timeout
        if timeout is not None:
            timeout.cancel()

    def _cancel_timeout(self) -> None:
        with self._lock:
            if self._breaker.state is BreakerState.OPEN:  # since then: it needs its timeout
                return
            timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()

    def _due(self, generation: int, _: Timeout) -> None:
        """End the time of OPEN. On the timer's thread."""
        check = self.check_health
        if check is None:
            self._checked(generation, serves=True)
        else:
            done = weak_callback(self._checked, generation)
            EXECUTOR.submit(("breaker", id(self)), partial(check, done))

    def _checked(self, generation: int, serves: bool) -> None:
        """End the time of OPEN, or prolong it, unless the state has changed since then."""
        with self._lock:
            if serves:
                self._breaker.half_open(generation)  # no event and no timeout of this state
                return
            delay_ns = self._breaker.stay_open(generation, self._now_ns())
        if delay_ns is not None:
            self._wait(delay_ns)

    @safe_repr
    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.target} {self.method} {self.state.name}>"


_SENDS_NOTHING: Final = frozenset(
    {BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.FORCED_OPEN}
)
