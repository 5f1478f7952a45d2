"""`Concurrency`, how many attempts of a client run at the same time. No I/O.

An adaptive limit follows the server: it grows by one for each `limit` attempts that succeed, and a
refusal divides it, as the congestion window of TCP does (AIMD; Chiu and Jain 1989, `AIMDLimit` of
Netflix's concurrency-limits). Beside that:

* The attempts that run when the limit is lowered fail together, and lower it only once, as in TCP.
* RESOURCE_EXHAUSTED says that the server has too many calls. UNAVAILABLE and DEADLINE_EXCEEDED may
  have other causes: one of ten servers is down, one method is slow. They lower the limit only if
  they are more than a fifth of the attempts. (If each one did, 1 in 100 that fails for another
  reason would keep the limit near 30, however many calls the server can execute.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.limit.policy import ADAPTIVE

from .policy import NOT_RECORDED, OVERLOAD_CODES

if TYPE_CHECKING:
    from .policy import ConcurrencyPolicy

INITIAL_LIMIT: Final = 20
"""The adaptive limit before the first attempt has ended."""

DECREASE: Final = 0.9
"""By which the adaptive limit is multiplied when the server has too many calls."""

MOST_FAILED: Final = 0.2
"""The share of attempts that may fail, other than with RESOURCE_EXHAUSTED, before it is lowered."""


class Concurrency:
    """The attempts of one method or target that run. The caller holds its lock.

    The caller lets others wait (`max_wait`), and asks again for the first one after a `release`.
    """

    __slots__ = ("_ended", "_failed", "_highest", "_is_adaptive", "_lowered_ns", "limit", "running")

    def __init__(self, policy: ConcurrencyPolicy) -> None:
        """Make a limit of which nothing is in use."""
        self.running = 0
        """How many attempts run."""
        self.limit: float = min(INITIAL_LIMIT, policy.highest)
        """How many attempts may run: the whole number of it, while it is adaptive."""
        self._is_adaptive = policy.max_calls == ADAPTIVE
        self._highest = policy.highest
        self._lowered_ns: int | None = None  # when it was lowered last
        self._ended = self._failed = 0  # of as many attempts as the limit, which are counted anew
        if policy.max_calls != ADAPTIVE:
            self.limit = policy.max_calls

    def take(self) -> bool:
        """Return whether another attempt may run, and count it if so."""
        if self.running + 1 > self.limit:
            return False
        self.running += 1
        return True

    def release(self, now_ns: int, began_ns: int, code: str) -> None:
        """Count an attempt that has ended.

        Args:
            now_ns: The time now.
            began_ns: When `take` allowed it.
            code: Its status code; `"CANCELLED"` or `""` do not change the limit.
        """
        if self._is_adaptive and code not in NOT_RECORDED:
            if self._ended >= self.limit:
                self._ended = self._failed = 0
            self._ended += 1
            if code not in OVERLOAD_CODES:
                if 2 * self.running >= self.limit:  # otherwise the limit was not tried
                    self.limit = min(self.limit + 1.0 / self.limit, float(self._highest))
            elif (self._lowered_ns is None or began_ns >= self._lowered_ns) and self._is_full(code):
                self._ended = self._failed = 0
                self.limit = max(1.0, self.limit * DECREASE)
                self._lowered_ns = now_ns
        self.running -= 1

    def _is_full(self, code: str) -> bool:
        """Count a failure, and return whether it shows that the server has too many calls."""
        self._failed += 1
        return code == "RESOURCE_EXHAUSTED" or self._failed > MOST_FAILED * self.limit
