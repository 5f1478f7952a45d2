"""The budgets for further attempts (retries and hedges) to a target.

A budget counts the calls of a target and their failed attempts, and decides whether another attempt
is allowed. `RetryBudget` has the rule of Finagle and Envoy, `RetryThrottle` that of gRPC.

Nothing in this module waits or reads a clock: times are arguments, in nanoseconds. Budgets may be
used by any thread and have no lock.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from .policy import RetryThrottling

if TYPE_CHECKING:
    from .policy import HedgingPolicy, RetryPolicy

BudgetKey: TypeAlias = tuple[float, int] | RetryThrottling
"""The settings of a budget: the arguments of `RetryBudget`, or those of `RetryThrottle`. Policies
with equal settings share one budget, so they are its key."""

Budget: TypeAlias = "RetryBudget | RetryThrottle"
"""Limits further attempts (retries and hedges) to one target."""

RECENT_SECONDS: Final = 10
"""Seconds that count as recent, including the current one."""

SLOT_NS: Final = 1_000_000_000
"""The length of a slot: one second."""

SECOND, CALLS, RETRIES = range(3)
"""The items of a slot: which second it is for, and its numbers of calls and retries."""


def budget_key(policy: RetryPolicy | HedgingPolicy) -> BudgetKey | None:
    """Return the key of the budget of a policy; None for no limit."""
    share_or_throttling = policy.retry_budget
    if isinstance(share_or_throttling, (int, float)):
        return share_or_throttling, policy.min_retries
    return share_or_throttling


def new_budget(key: BudgetKey) -> Budget:
    """Make a budget without counts."""
    if isinstance(key, RetryThrottling):
        return RetryThrottle(key.max_tokens, key.token_ratio)
    return RetryBudget(*key)


class RetryBudget:
    """The calls and retries of one target in the last ten seconds.

    Retries may be at most a share of the recent calls, as in Finagle and Envoy; a minimum number is
    always allowed. There is one slot for each recent second, and each retry computes the sums.

    Without a lock, a count may be lost on Python without the GIL if two threads write at the same
    time; the error disappears with the slot. A retry is counted before it is allowed: threads that
    ask at the same time may get one retry too few, never one too many.
    """

    def __init__(self, share: float, min_retries: int) -> None:
        """Make a budget without counts.

        Args:
            share: Retries for each call: 0.2 allows one retry for every five calls.
            min_retries: The number of retries that is always allowed.
        """
        self._share = share
        self._min_retries = min_retries
        self._slots: list[list[int]] = [[0, 0, 0] for _ in range(RECENT_SECONDS)]

    def call(self, now_ns: int) -> None:
        """Count a call; retries are not calls."""
        self._slot(now_ns // SLOT_NS)[CALLS] += 1

    def failed(self, *, by_server: bool) -> None:
        """Do nothing: failures are not counted."""

    def take(self, now_ns: int) -> bool:
        """Return whether a retry is allowed, and count it if so."""
        second = now_ns // SLOT_NS
        slot = self._slot(second)
        slot[RETRIES] += 1
        recent = [each for each in self._slots if each[SECOND] > second - RECENT_SECONDS]
        retries = sum(each[RETRIES] for each in recent)
        calls = sum(each[CALLS] for each in recent)
        if retries <= max(self._min_retries, self._share * calls):
            return True
        slot[RETRIES] -= 1
        return False

    def give_back(self, now_ns: int) -> None:
        """Do not count a retry that was allowed, because it was not sent."""
        oldest = now_ns // SLOT_NS - RECENT_SECONDS
        counted = (slot for slot in self._slots if slot[RETRIES] > 0 and slot[SECOND] > oldest)
        newest = max(counted, key=itemgetter(SECOND), default=None)
        if newest is not None:
            newest[RETRIES] -= 1

    def _slot(self, second: int) -> list[int]:
        """Return the slot of a second, in place of the slot of ten seconds before.

        A thread that read the clock more than ten seconds ago gets the newer slot in that place.
        """
        place = second % RECENT_SECONDS
        slot = self._slots[place]
        if slot[SECOND] < second:
            new = [second, 0, 0]  # first: the garbage collector may run, and then other threads
            if self._slots[place][SECOND] < second:
                self._slots[place] = new
            slot = self._slots[place]
        return slot


class RetryThrottle:
    """The token bucket of one target (gRFC A6).

    A failure of the server removes one token, a success adds `token_ratio`. Another attempt is
    allowed while the bucket is more than half full.

    An attempt counts as a success when it begins, which is corrected if it fails; so a successful
    call costs nothing at its end, and running calls count as successes. A full bucket has room for
    one such success. If several calls run while it is full and fail, each further one of them
    removes `token_ratio` too much.
    """

    def __init__(self, max_tokens: int, token_ratio: float) -> None:
        """Make a full bucket, to which each success adds `token_ratio` tokens."""
        self._max = max_tokens * 1000  # in thousandths, the precision of gRFC A6
        self._ratio = int(token_ratio * 1000 + 1e-6)  # 1.001 * 1000 is 1000.9999999999999
        self._tokens = self._max

    def call(self, now_ns: int) -> None:
        """Count an attempt that begins as a success."""
        # May exceed the maximum by one success, so that a failure removes what was added here.
        self._tokens = min(self._tokens, self._max) + self._ratio

    def failed(self, *, by_server: bool) -> None:
        """Remove the tokens that `call` has added, and one token if `by_server`."""
        self._tokens = max(0, self._tokens - self._ratio - (1000 if by_server else 0))

    def take(self, now_ns: int) -> bool:
        """Return whether the bucket is more than half full, and count an attempt if so."""
        if min(self._tokens, self._max) * 2 <= self._max:
            return False
        self.call(now_ns)
        return True

    def give_back(self, now_ns: int) -> None:
        """Do nothing: an attempt that was not sent counts as a failure, see `failed`."""
