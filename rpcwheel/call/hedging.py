"""The plan of the attempts of a hedged call (gRFC A6). Pure: times are arguments, in ns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpcwheel.durations import NEVER, to_ns
from rpcwheel.rpc import NextAttempt

from .retry import budget_key

if TYPE_CHECKING:
    from rpcwheel.rpc import AttemptResult

    from .policy import HedgingPolicy
    from .retry import Budget, BudgetKey


@dataclass(frozen=True, slots=True)
class HedgingConfig:
    """A hedging policy as it applies to one idempotent method."""

    delay_ns: int
    max_attempts: int
    non_fatal: frozenset[str]
    budget: BudgetKey | None
    """The key of the budget for further attempts; None for no limit."""
    max_pushback_ns: int = NEVER

    @classmethod
    def from_policy(cls, policy: HedgingPolicy) -> HedgingConfig:
        """Make the settings from the user's policy."""
        return cls(
            delay_ns=to_ns(policy.delay),
            max_attempts=policy.max_attempts,
            non_fatal=policy.non_fatal_codes,
            budget=budget_key(policy),
            max_pushback_ns=NEVER if policy.max_pushback is None else to_ns(policy.max_pushback),
        )


class HedgingPlan:
    """The attempts of one call whose first attempt was made. Not thread-safe."""

    __slots__ = ("_budget", "_config", "_deadline_ns", "_number", "_running", "next_ns")

    def __init__(
        self, started_ns: int, deadline_ns: int, config: HedgingConfig, budget: Budget | None
    ) -> None:
        """Make the plan of a call whose first attempt was made.

        Args:
            started_ns: When the first attempt was made.
            deadline_ns: When all attempts must have ended; `NEVER` for no limit.
            config: The settings of the method.
            budget: The budget of the target, in which the call was counted; None for no limit.
        """
        self._config = config
        self._budget = budget
        self._deadline_ns = deadline_ns
        self._number = 1
        self._running = 1
        self.next_ns = NEVER
        """When the next attempt is due; `NEVER` if there is none."""
        self._plan_next(started_ns + config.delay_ns)

    @property
    def is_over(self) -> bool:
        """Whether no attempt runs, and none follows."""
        return not self._running and self.next_ns == NEVER

    def due(self, now_ns: int) -> NextAttempt | None:
        """Return the next attempt if it is due, and count it as running; None if none is due."""
        if now_ns < self.next_ns:
            return None
        if self._budget is not None and not self._budget.take(now_ns):
            self.next_ns = NEVER
            return None
        self._number += 1
        self._running += 1
        self._plan_next(now_ns + self._config.delay_ns)
        return NextAttempt(self._number, now_ns, self._deadline_ns)

    def ended(self, now_ns: int, result: AttemptResult) -> bool:
        """Record the failure of an attempt; True if the call ends with it."""
        self._running -= 1
        if self._budget is not None:
            forbidden = result.pushback_ns is not None and result.pushback_ns < 0
            non_fatal = result.code in self._config.non_fatal
            self._budget.failed(by_server=forbidden or non_fatal)
        if result.code not in self._config.non_fatal:
            return True
        pushback_ns = result.pushback_ns
        if pushback_ns is None:
            self._plan_next(now_ns)
        elif 0 <= pushback_ns <= self._config.max_pushback_ns:
            self._plan_next(now_ns + pushback_ns)
        else:
            self.stop()
        return self.is_over

    def canceled(self, attempts: int) -> None:
        """Record that running attempts were canceled because the call has ended."""
        if self._budget is not None:
            for _ in range(attempts):
                self._budget.failed(by_server=False)

    def stop(self) -> None:
        """Make no more attempts."""
        self.next_ns = NEVER
        self._number = self._config.max_attempts

    def _plan_next(self, at_ns: int) -> None:
        more = self._number < self._config.max_attempts and at_ns < self._deadline_ns
        self.next_ns = at_ns if more else NEVER
