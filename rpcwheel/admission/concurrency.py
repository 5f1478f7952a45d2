"""`Concurrency`, how many attempts of a client run at the same time. No I/O.

An adaptive limit follows the server: it grows by one for each `limit` attempts that succeed, and is
multiplied by `DECREASE` when the server has too many, as the congestion window of TCP is (AIMD;
Chiu and Jain 1989, `AIMDLimit` of Netflix's concurrency-limits). Beside that:

* The attempts that run when the limit is lowered fail together, and lower it only once, as in TCP.
* Failures may have other causes than too many calls: one of ten servers is down, one method is
  slow, a customer's quota is used up. They lower the limit only if they are more than a share of
  the attempts. (If each one did, 1 in 100 that fails for another reason would keep the limit near
  30, however many calls the server can execute.)
* As in TCP, it grows by one with each success until it is lowered for the first time; and after an
  outage, in which none succeeds, until it is what it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.limit.policy import ADAPTIVE

from .policy import NOT_RECORDED

if TYPE_CHECKING:
    from .policy import ConcurrencyPolicy

INITIAL_LIMIT: Final = 20
"""The adaptive limit before the first attempt has ended."""

DECREASE: Final = 0.9
"""By which the adaptive limit is multiplied when the server has too many calls."""

TOO_MANY: Final = {"UNAVAILABLE": 5.0, "DEADLINE_EXCEEDED": 20.0, "RESOURCE_EXHAUSTED": 20.0}
"""The adaptive limit is lowered if more than 1 in so many attempts fail with the status code. (A
server without a limit lets calls wait until their deadlines.)"""


class Concurrency:
    """The attempts of one method or target that run. The caller holds its lock.

    The caller lets others wait (`max_wait`), and asks again for the first one after a `release`.
    """

    def __init__(self, policy: ConcurrencyPolicy) -> None:
        """Make a limit of which nothing is in use."""
        self.running = 0
        """How many attempts run."""
        self.limit: float = min(INITIAL_LIMIT, policy.highest)
        """How many attempts may run: the whole number of it, while it is adaptive."""
        self._is_adaptive = policy.max_calls == ADAPTIVE
        self._highest = policy.highest
        self._lowered_ns: int | None = None  # when it was lowered last
        self._ceiling = float(policy.highest)  # below it, the limit grows with each success
        self._has_answered = False  # since it was lowered
        self._ended = 0  # after as many as the limit, they are counted anew
        self._failed = 0.0  # in shares of what is too many; 1.0 is too many
        if policy.max_calls != ADAPTIVE:
            self.limit = policy.max_calls

    def take(self) -> bool:
        """Return whether another attempt may run, and count it if so."""
        if self.running + 1 > self.limit:
            return False
        self.running += 1
        return True

    def release(self, now_ns: int, began_ns: int, code: str) -> None:
        """Count an attempt that `take` has allowed at `began_ns`, and that has ended.

        The codes `"CANCELLED"` and `""` do not change the limit.
        """
        if self._is_adaptive and code not in NOT_RECORDED:
            began_since = self._lowered_ns is None or began_ns >= self._lowered_ns
            self._ended += began_since
            if code not in TOO_MANY:
                self._has_answered = True
                if 2 * self.running >= self.limit:  # otherwise the limit was not tried
                    more = 1.0 if self.limit + 1.0 <= self._ceiling else 1.0 / self.limit
                    self.limit = min(self.limit + more, float(self._highest))
            elif began_since:
                self._failed += TOO_MANY[code] / self.limit
            if self._failed > 1.0:
                self.limit = max(1.0, self.limit * DECREASE)
                if self._has_answered:
                    self._ceiling = self.limit
                self._lowered_ns, self._has_answered = now_ns, False
            if self._failed > 1.0 or self._ended >= self.limit:
                self._ended, self._failed = 0, 0.0
        if self.running:  # it began with 0 in a forked child, where copies of its parent's may end
            self.running -= 1
