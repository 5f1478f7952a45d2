"""What is decided about one call, for all kinds and both worlds: its rules, its plan, its answer.

Pure. The four adapters ask in this order::

    rules = book.of(method)                      # once for each method, then from a table
    plan = rules.plan(now_ns, own_ns, left_ns, budget)
    step = plan.begin(now_ns)                    # Attempt: make a try, or Finish
    step = plan.ended(now_ns, outcome)           # after each try that failed
    answer = rules.answer(error, ...)            # when it has failed for good: Answer

`Answer.RAISE` hands the failure to the caller, `EXCUSE` answers with `failsafe.default`, `PARK`
hands the call to failback.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpcwheel.deadline.core import DeadlinePlan, RetryRules, earliest
from rpcwheel.deadline.policy import DeadlinePolicy
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.failback.matching import Matcher

if TYPE_CHECKING:
    from datetime import timedelta

    from rpcwheel.deadline.budget import RetryBudget
    from rpcwheel.failback.policy import FailbackPolicy

    from .policy import CallPolicy, FailsafePolicy, MethodPolicy

__all__ = ["Answer", "CallRules", "RuleBook"]


class Answer(enum.Enum):
    """What the caller of a call gets that has failed for good."""

    RAISE = enum.auto()
    EXCUSE = enum.auto()
    PARK = enum.auto()


@dataclass(frozen=True, slots=True)
class CallRules:
    """All that holds for the calls of one method. Times are nanoseconds, `NEVER` where not set."""

    timeout_ns: int = NEVER
    message_timeout_ns: int = NEVER
    slow_ns: int = NEVER
    propagate: bool = True
    retry: RetryRules | None = None
    failsafe: FailsafePolicy | None = None
    failback: FailbackPolicy | None = None
    excused: Matcher | None = None
    """What `failsafe.on` means."""

    @classmethod
    def of(cls, policy: MethodPolicy) -> CallRules:
        """Make them of what the user has set."""
        retry, failsafe = policy.retry, policy.failsafe
        deadline = policy.timeout or DeadlinePolicy()
        retried = retry is not None and retry.attempts > 1
        return cls(
            timeout_ns=_ns(deadline.timeout),
            message_timeout_ns=_ns(deadline.message_timeout),
            slow_ns=_ns(deadline.slow_after),
            propagate=deadline.propagate,
            retry=RetryRules.of(retry, idempotent=policy.idempotent) if retry and retried else None,
            failsafe=failsafe,
            failback=policy.failback,
            excused=None if failsafe is None else Matcher(failsafe.on),
        )

    @property
    def recovers(self) -> bool:
        """Whether a failed call may end in another way than with its failure."""
        return self.retry is not None or self.failback is not None or self.failsafe is not None

    @property
    def has_message_timeout(self) -> bool:
        """Whether a response stream may be silent for so long only."""
        return self.message_timeout_ns != NEVER

    def plan(
        self, now_ns: int, own_ns: int | None, left_ns: int | None, budget: RetryBudget | None
    ) -> DeadlinePlan:
        """Begin a call.

        Args:
            now_ns: Now.
            own_ns: The timeout that the caller gave, None if none.
            left_ns: What is left of the deadline of the call being served, None if there is none.
            budget: That of the target; None if it has none.
        """
        left_ns = left_ns if self.propagate else None
        deadline_ns = earliest(now_ns, self.timeout_ns, own_ns, left_ns)
        return DeadlinePlan(deadline_ns, self.retry, budget if self.retry else None)

    def answer(self, error: BaseException, *, attempts: int, elapsed_ns: int) -> Answer:
        """Say what the caller gets after a failure that no retry follows.

        Raises:
            Exception: What a predicate in `failsafe.on` raised.
        """
        if self.failback is not None:
            return Answer.PARK
        if self.excused is not None and self.excused(
            error, attempt=attempts, elapsed_ns=elapsed_ns
        ):
            return Answer.EXCUSE
        return Answer.RAISE


class RuleBook:
    """The rules of every method, made when it is first called. Any thread may use it."""

    __slots__ = ("_policy", "_rules")

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy
        self._rules: dict[str, CallRules] = {}

    def of(self, method: str) -> CallRules:
        """The rules of a method, given in full: `"/shop.Orders/Get"`."""
        rules = self._rules.get(method)
        if rules is None:
            rules = self._rules[method] = CallRules.of(self._policy.of(method))
        return rules


def _ns(value: float | timedelta | None) -> int:
    return NEVER if value is None else to_ns(value)
