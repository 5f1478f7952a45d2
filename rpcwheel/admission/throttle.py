"""`Throttle`, which refuses attempts while a server fails or refuses most of them. No I/O.

It is the adaptive throttling of the Google SRE book, "Handling Overload". A client counts the
attempts of a method in a sliding window, and how many of them the server has accepted. It refuses
the share `(requests - multiplier * accepts) / (requests + 1)` of further attempts. What it refuses
counts as a request, so the share rises while the server fails, until nearly no attempt is sent; and
each attempt that succeeds lets `multiplier` others be sent.

* With very few attempts in the window it refuses none. (The window of the book is two minutes; in
  one of a second or less, a call may be alone, and its failures would refuse its own retries.)
* Requests count twice (`NONE_ACCEPTED`) while the server has accepted none in the window: it gets
  one attempt in about two windows. So the window can be short: a client notices sooner that the
  server fails, and sends all calls again sooner after its return.
* An attempt counts when it has ended, a refused one at once. Attempts that run count neither way:
  otherwise a burst of calls that has no answer yet would be throttled.
* An attempt that its caller has canceled does not count. A lost server counts as one failure
  (`LostTogether`).
* Refusals are spread evenly; the book draws random numbers, with which no attempt may be sent for
  several seconds. In simulations with 56 calls/s and the default policy, a server that is down for
  30 s gets 4.6% of the calls, and all calls less than 4 s after its return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.durations import to_ns

from .policy import NOT_RECORDED
from .window import LostTogether, TimeWindow

if TYPE_CHECKING:
    from collections.abc import Callable

    from .policy import ThrottlePolicy


NONE_ACCEPTED: Final = 2
"""How often a request counts while no attempt in the window has been accepted."""

ACCEPTED_NS: Final = 10_000_000_000
"""An attempt that fails after a longer time has worked before, as a stream whose server is stopped:
it does not show how long others take to fail."""


class Throttle:
    """The throttle of one method of one target. The caller holds its lock."""

    def __init__(self, policy: ThrottlePolicy, random: Callable[[], float]) -> None:
        """Make a throttle that refuses nothing yet. `random` returns a number from 0 to 1."""
        self._multiplier = policy.multiplier
        self._minimum_calls = policy.minimum_calls
        self._max_rejection = policy.max_rejection
        self._failures: frozenset[str] = policy.failures
        self._owed = random()  # how many refusals, a fraction: clients do not begin together
        self.window_ns = to_ns(policy.window)
        """How long an attempt counts."""
        self._window = TimeWindow(self.window_ns)
        self._lost = LostTogether()
        self.failed_after_ns = 0
        """How long the last failure took; 0 if it had worked before."""

    @property
    def has_failures(self) -> bool:
        """Whether there are failures in the window, since it was last moved."""
        return self._window.failures > 0

    def refuses(self, now_ns: int) -> bool:
        """Return whether an attempt is not sent, and count it if so."""
        if not self._window.failures:
            return False
        rejection = self.rejection(now_ns)
        if not rejection:
            return False
        self._owed += rejection
        if self._owed < 1.0:
            return False
        self._owed -= 1.0
        self._window.record(now_ns, True, False)
        return True

    def ended(self, now_ns: int, code: str, began_ns: int) -> None:
        """Count an attempt that was sent and has ended with this status code."""
        if code in NOT_RECORDED:
            return
        is_failure = code in self._failures
        if is_failure:
            took_ns = now_ns - began_ns
            self.failed_after_ns = took_ns if took_ns < ACCEPTED_NS else 0
            if self._lost.note_failure(code, began_ns, now_ns):
                return
        elif not self._lost.has_worked:
            self._lost.note_success(began_ns)
        self._window.record(now_ns, is_failure, False)

    def rejection(self, now_ns: int) -> float:
        """Return the share of attempts that are refused at this time, from 0 to 1."""
        window = self._window
        window.move(now_ns)
        requests = window.calls
        if requests < self._minimum_calls:
            return 0.0
        accepts = requests - window.failures
        if not accepts:
            requests *= NONE_ACCEPTED
        excess = requests - self._multiplier * accepts
        return min(excess / (requests + 1), self._max_rejection) if excess > 0.0 else 0.0
