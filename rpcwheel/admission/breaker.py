"""`Breaker`, the circuit breaker of a client. No I/O.

The states and their rules are those of resilience4j:

* `CLOSED`: attempts are sent, and their outcomes recorded in a sliding window. If the share of
  failures, or of slow attempts, reaches its limit, the breaker opens.
* `OPEN`: no attempt is sent for a time, which grows until the breaker closes.
* `HALF_OPEN`: a few attempts are sent to find out whether the server is back, and decide what
  follows: `CLOSED` or `OPEN`.
* `FORCED_OPEN` and `DISABLED`, which is closed and records nothing, are set by hand, and left by
  `reset` only.

What differs: the first attempts of `HALF_OPEN` are sent one after the other, and one more at a time
after each success, because a server that comes back is slow at first. It opens as soon as its
attempts cannot reach any other result. Only attempts that began in the current state count, so a
timeout that ends later than the outage does not open a breaker that has closed. A lost
server, whose calls fail at the same time, counts as one failure (`LostTogether`).

The caller holds the lock of the breaker, and runs its timer: `OPEN` has one, for
`Transition.open_for_ns`, after which the caller calls `half_open`, or `stay_open` if a health check
has failed. The other states have none.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.durations import NEVER, to_ns

from .policy import DEFAULT_WINDOW_CALLS, MAX_OPEN_FACTOR, NOT_RECORDED
from .window import CountWindow, LostTogether, TimeWindow

if TYPE_CHECKING:
    from collections.abc import Callable

    from .policy import BreakerPolicy

OPEN_JITTER: Final = 0.1
"""The share of the time in `OPEN` that is random, so that clients do not probe together."""

MAX_HALF_OPEN_FACTOR: Final = 10
"""How many times `half_open_timeout` a breaker is HALF_OPEN at most if its calls take long."""

LATE_NS: Final = 3_000_000_000
"""How long after the end of its time `OPEN` is left without the timer: health checks take 1 s."""


class BreakerState(enum.Enum):
    """The state of a circuit breaker; the value is its label in metrics and the live view."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    FORCED_OPEN = "forced_open"
    DISABLED = "disabled"


CLOSED: Final = BreakerState.CLOSED
OPEN: Final = BreakerState.OPEN
HALF_OPEN: Final = BreakerState.HALF_OPEN
FORCED_OPEN: Final = BreakerState.FORCED_OPEN
DISABLED: Final = BreakerState.DISABLED


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of the state of a breaker."""

    before: BreakerState
    after: BreakerState
    reason: str
    """Such as `"12 of 20 calls failed: UNAVAILABLE"`, with the last one's status."""
    open_for_ns: int | None = None
    """How long it is `OPEN`; None in other states."""


class Breaker:
    """The circuit breaker of one method or target. The caller holds its lock."""

    def __init__(self, policy: BreakerPolicy, random: Callable[[], float]) -> None:
        """Make a breaker that is `CLOSED`. `random` returns a random number from 0 to 1."""
        self.state = CLOSED
        """The current state. Only the methods change it."""
        self.half_open_at_ns: int | None = None
        """When the time in `OPEN` is over; None in other states."""
        self.window: CountWindow | TimeWindow
        """What was recorded in the current state, and in `OPEN` before it."""
        if policy.window is None:
            self.window = CountWindow(policy.window_calls or DEFAULT_WINDOW_CALLS)
        else:
            self.window = TimeWindow(to_ns(policy.window))
        self._closed_window = self.window
        self.lost = LostTogether()
        """Finds the attempts that were lost with the same server."""
        self._last_failure = ""  # its status
        self._policy = policy
        self._random = random
        self._failures: frozenset[str] = policy.failures
        self._slow_ns = NEVER if policy.slow_call is None else to_ns(policy.slow_call)
        self._least_failures = _least(policy.failure_rate, policy.minimum_calls)
        self._least_slow = _least(policy.slow_call_rate, policy.minimum_calls)
        self.generation = 0
        """The number of changes of the state, which is the token of attempts."""
        self._open_ns = to_ns(policy.open_duration)  # the next time in OPEN
        # Of HALF_OPEN:
        self._running = self._successes = 0
        self._half_open_until_ns = NEVER
        timeout = policy.half_open_timeout
        self._half_open_timeout_ns = NEVER if timeout is None else to_ns(timeout)

    def enter(self) -> int | None:
        """Ask whether an attempt may be sent.

        Returns:
            A token for `ended`, which the caller must call then; None if it is not sent. Then the
            caller also calls `give_up`.
        """
        state = self.state
        if state is CLOSED or state is DISABLED:
            return self.generation
        if (
            state is HALF_OPEN
            and self._running <= self._successes
            and self._running + self.window.calls < self._policy.half_open_calls
        ):
            self._running += 1
            return self.generation
        return None

    def give_up(self, now_ns: int) -> Transition | None:
        """Leave a state that has lasted for too long. Asked when an attempt is refused.

        `HALF_OPEN` becomes `OPEN` if attempts are refused for `half_open_timeout`, or for twice the
        time that an attempt took which succeeded, and none ends. The time is that which is known
        when the first one is refused.
        `OPEN` becomes `HALF_OPEN` if nothing has ended it long after its time was over: the timer
        was stopped, the process is a forked child, or a health check has no result.
        """
        if self.state is HALF_OPEN:
            if self._half_open_until_ns == NEVER:  # the first one since an attempt has ended
                self._half_open_until_ns = now_ns + self._half_open_timeout_ns
            elif now_ns >= self._half_open_until_ns:
                return self._open(now_ns, "its calls have not ended in time")
        elif self.half_open_at_ns is not None and now_ns >= self.half_open_at_ns + LATE_NS:
            return self.half_open(self.generation)
        return None

    def ended(
        self, token: int, code: str, duration_ns: int, now_ns: int, *, is_stream: bool = False
    ) -> Transition | None:
        """Record the outcome of an attempt, for which `enter` has returned the token.

        The codes `"CANCELLED"` and `""` are neither a success nor a failure. A stream of responses
        is never slow.
        """
        if 2 * duration_ns > self._half_open_timeout_ns and code == "OK" and not is_stream:
            self._adapt_half_open_timeout(2 * duration_ns)
        if token != self.generation:
            return None
        failed = code != "OK" and code in self._failures
        slow = duration_ns > self._slow_ns and not is_stream
        if failed:
            self._last_failure = code
        if self.state is HALF_OPEN:
            return self._end_half_open(code, failed, slow, now_ns)
        if self.state is not CLOSED or code in NOT_RECORDED:
            return None
        began_ns = now_ns - duration_ns
        if failed:
            if self.lost.note_failure(code, began_ns, now_ns):
                return None
        elif not self.lost.has_worked:
            self.lost.note_success(began_ns)
        window = self.window
        window.record(now_ns, failed, slow)
        if window.failures < self._least_failures and window.slow < self._least_slow:
            return None
        return self._ended_closed(now_ns)

    def half_open(self, generation: int) -> Transition | None:
        """Send attempts again: the time in `OPEN` of this generation is over."""
        if self.state is not OPEN or generation != self.generation:
            return None
        self.window = CountWindow(self._policy.half_open_calls)
        self._running = self._successes = 0
        self._half_open_until_ns = NEVER
        return self._become(HALF_OPEN, "the open duration is over")

    def stay_open(self, generation: int, now_ns: int) -> int | None:
        """Remain `OPEN` for a longer time: a health check has failed.

        Returns:
            How long, in nanoseconds; None if it is not `OPEN` in this generation any more.
        """
        if self.state is not OPEN or generation != self.generation:
            return None
        return self._stay_open(now_ns)

    def force_open(self) -> Transition | None:
        """Send no attempts until `reset`."""
        return None if self.state is FORCED_OPEN else self._become(FORCED_OPEN, "by hand")

    def disable(self) -> Transition | None:
        """Send all attempts until `reset`, and record nothing."""
        return None if self.state is DISABLED else self._become(DISABLED, "by hand")

    def reset(self) -> Transition | None:
        """Close, and forget all outcomes, also those of attempts that run."""
        transition = self._close("by hand")
        return None if transition.before is CLOSED else transition

    def forget_running(self) -> None:
        """Forget the attempts that run: in a forked child they do not end, or only as copies."""
        if self.state is HALF_OPEN:
            self._running = 0
            self.generation += 1  # the end of a copy does not count

    def _ended_closed(self, now_ns: int) -> Transition | None:
        calls = self.window.calls
        if calls < self._policy.minimum_calls:
            return None
        failures = self.window.failures / calls >= self._policy.failure_rate
        slow = self.window.slow / calls >= self._policy.slow_call_rate
        return self._open(now_ns, self._reason()) if failures or slow else None

    def _end_half_open(self, code: str, failed: bool, slow: bool, now_ns: int) -> Transition | None:
        self._running -= 1
        self._half_open_until_ns = NEVER
        if code in NOT_RECORDED:
            return None
        self.window.record(now_ns, failed, slow)
        self._successes += not (failed or slow)
        policy, window = self._policy, self.window
        calls = policy.half_open_calls
        if (
            window.failures >= _least(policy.failure_rate, calls)
            or window.slow >= _least(policy.slow_call_rate, calls)
            or (window.failures and window.calls == 1)
        ):
            return self._open(now_ns, self._reason())
        return self._close(self._reason()) if window.calls == calls else None

    def _adapt_half_open_timeout(self, needed_ns: int) -> None:
        timeout = self._policy.half_open_timeout
        if timeout is not None:
            least_ns = to_ns(timeout)
            most_ns = MAX_HALF_OPEN_FACTOR * least_ns
            self._half_open_timeout_ns = min(max(needed_ns, least_ns), most_ns)

    def _reason(self) -> str:
        calls, failures, slow = self.window.calls, self.window.failures, self.window.slow
        failed = f"{failures} of {calls} calls failed"
        if failures and len(self._failures) > 1:
            failed += f": {self._last_failure}"
        return f"{failed}, {slow} were slow" if slow else failed

    def _open(self, now_ns: int, reason: str) -> Transition:
        return self._become(OPEN, reason, self._stay_open(now_ns))

    def _stay_open(self, now_ns: int) -> int:
        open_ns = self._open_ns
        policy = self._policy
        if policy.max_open_duration is None:
            longest_ns = MAX_OPEN_FACTOR * to_ns(policy.open_duration)
        else:
            longest_ns = to_ns(policy.max_open_duration)
        self._open_ns = int(min(open_ns * policy.open_growth, longest_ns))  # may be infinite
        open_for_ns = open_ns - int(open_ns * OPEN_JITTER * self._random())
        self.half_open_at_ns = now_ns + open_for_ns
        return open_for_ns

    def _close(self, reason: str) -> Transition:
        self.window = self._closed_window
        self.window.clear()
        self._open_ns = to_ns(self._policy.open_duration)
        self._adapt_half_open_timeout(0)
        self.lost.has_worked = True
        return self._become(CLOSED, reason)

    def _become(
        self, state: BreakerState, reason: str, open_for_ns: int | None = None
    ) -> Transition:
        before, self.state = self.state, state
        self.generation += 1
        if state is not OPEN:
            self.half_open_at_ns = None
        return Transition(before, state, reason, open_for_ns)


def _least(rate: float, calls: int) -> int:
    """Return the smallest number of calls whose share of all `calls` is at least `rate`."""
    least = int(rate * calls)
    return least if least / calls >= rate else least + 1
