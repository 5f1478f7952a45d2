"""What is decided about the time and the tries of one call.

One deadline over all attempts: a retry gets what the first try left over, and is not begun when
the deadline would pass before it starts. Pure: time comes in as nanoseconds, the next step goes
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.backoff import Backoff
from rpcwheel.call import Attempt, Finish
from rpcwheel.durations import NEVER, to_ns, to_seconds

if TYPE_CHECKING:
    from rpcwheel.call import Outcome

    from .budget import RetryBudget
    from .policy import RetryPolicy

__all__ = ["DeadlinePlan", "RetryRules", "cut_short", "earliest"]

NO_TIME: Final = Finish("its deadline has passed")
GOOD: Final = Finish("it succeeded")
NOT_NAMED: Final = Finish("its status is not one that `on` names")
COMMITTED: Final = Finish("it can't be made again: messages were handed on")
NOT_IDEMPOTENT: Final = Finish(
    "its method is not marked idempotent; if the server may execute a call twice, set "
    "MethodPolicy(idempotent=True) for the method"
)
FORBIDDEN: Final = Finish("the server asked not to try again")
NO_ATTEMPTS_LEFT: Final = Finish("no attempts left")
NO_TIME_LEFT: Final = Finish("its deadline would pass before the next attempt")
NO_BUDGET: Final = Finish("too many of this target's calls are retries already")


@dataclass(frozen=True, slots=True)
class RetryRules:
    """A retry policy as it applies to one method."""

    on: frozenset[str]
    attempts: int
    backoff: Backoff
    attempt_timeout_ns: int
    """`NEVER` for no limit of its own."""
    idempotent: bool
    max_pushback_ns: int
    """`NEVER` for no limit."""
    replay_bytes: int
    budget: tuple[float, int] | None
    """Share and reserve: what a target's `RetryBudget` is made with."""

    @classmethod
    def of(cls, policy: RetryPolicy, *, idempotent: bool) -> RetryRules:
        """Make them of what the user has set.

        A call of a method that is not idempotent is never retried, so its one attempt has all the
        time of the call.
        """
        on: frozenset[str] = policy.on
        limit = policy.attempt_timeout if idempotent else None
        return cls(
            on=on if limit is None else on | {"DEADLINE_EXCEEDED"},
            attempts=policy.attempts,
            backoff=Backoff(policy.wait),
            attempt_timeout_ns=NEVER if limit is None else to_ns(limit),
            idempotent=idempotent,
            max_pushback_ns=NEVER if policy.max_pushback is None else to_ns(policy.max_pushback),
            replay_bytes=policy.replay_bytes,
            budget=None if policy.budget is None else (policy.budget, policy.reserve),
        )


class DeadlinePlan:
    """One deadline, and retries under it. A `CallPlan` for one call."""

    __slots__ = ("_budget", "_deadline_ns", "_number", "_rules", "_started_ns", "try_ns")

    def __init__(
        self, deadline_ns: int, rules: RetryRules | None, budget: RetryBudget | None
    ) -> None:
        """Begin a call.

        Args:
            deadline_ns: When all must have ended; `NEVER` for no limit.
            rules: Which failures are followed by another try; None is no retry.
            budget: That of the call's target; None is no limit.
        """
        self._deadline_ns = deadline_ns
        self._rules = rules
        self._budget = budget
        self._number = 0
        self._started_ns = 0
        self.try_ns = deadline_ns
        """When the try that was asked for last must have ended."""

    @property
    def deadline_ns(self) -> int:
        """When all must have ended; `NEVER` for no limit."""
        return self._deadline_ns

    def begin(self, now_ns: int) -> Attempt | Finish:
        """Say whether and until when the first try may run."""
        if now_ns >= self._deadline_ns:
            return NO_TIME
        if self._budget is not None:
            self._budget.call(now_ns)
        self._started_ns = now_ns
        return self._attempt(now_ns)

    def resume(self, started_ns: int) -> None:
        """Go on with a call that was begun, and whose first try was made, without this plan."""
        self._number = 1
        self._started_ns = started_ns
        self.try_ns = cut_short(self._rules, started_ns, self._deadline_ns)

    def ended(self, now_ns: int, outcome: Outcome) -> Attempt | Finish:
        """Say what follows after a try that has ended.

        Raises:
            Exception: What a wait strategy of the user's raised.
        """
        rules = self._rules
        if outcome.code == "OK" or rules is None:
            return GOOD if outcome.code == "OK" else NOT_NAMED
        refusal = self._refusal(rules, outcome)
        if refusal is not None:
            return refusal
        delay_ns = outcome.pushback_ns
        if delay_ns is None:
            delay_ns = rules.backoff.next_delay_ns(
                self._number, elapsed_ns=now_ns - self._started_ns, error=outcome.error
            )
        if delay_ns is None or now_ns + delay_ns >= self._deadline_ns:
            return NO_TIME_LEFT
        if self._budget is not None and not self._budget.take(now_ns):
            return NO_BUDGET
        return self._attempt(now_ns + delay_ns)

    def _refusal(self, rules: RetryRules, outcome: Outcome) -> Finish | None:
        """Why this failure is not followed by another try, time and budget apart."""
        if outcome.code not in rules.on:
            return NOT_NAMED
        if outcome.committed:
            return COMMITTED
        if not rules.idempotent:
            return NOT_IDEMPOTENT
        if self._number >= rules.attempts:
            return NO_ATTEMPTS_LEFT
        return None if outcome.pushback_ns is None else _refused_by(outcome.pushback_ns, rules)

    def _attempt(self, at_ns: int) -> Attempt:
        self._number += 1
        self.try_ns = cut_short(self._rules, at_ns, self._deadline_ns)
        return Attempt(self._number, at_ns, self.try_ns)


def _refused_by(pushback_ns: int, rules: RetryRules) -> Finish | None:
    """Why the wait that a server asks for ends the retries; None if it does not."""
    if pushback_ns < 0:
        return FORBIDDEN
    if pushback_ns <= rules.max_pushback_ns:
        return None
    asked_s, most_s = to_seconds(pushback_ns), to_seconds(rules.max_pushback_ns)
    return Finish(
        f"the server asked to wait {asked_s:.15g} s, which is longer than max_pushback "
        f"({most_s:.15g} s)"
    )


def cut_short(rules: RetryRules | None, at_ns: int, deadline_ns: int) -> int:
    """The deadline of a try that is made at `at_ns`, in a call that has until `deadline_ns`."""
    return deadline_ns if rules is None else min(deadline_ns, at_ns + rules.attempt_timeout_ns)


def earliest(now_ns: int, *timeouts_ns: int | None) -> int:
    """The deadline of a call that begins now; `NEVER` if none of the limits is one."""
    least = NEVER
    for limit in timeouts_ns:  # a plain loop: this runs for every call
        if limit is not None and limit < least:
            least = limit
    return min(now_ns + least, NEVER)
