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
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.deadline.core import DeadlinePlan, RetryRules, earliest
from rpcwheel.deadline.policy import DeadlinePolicy
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.failback.matching import Matcher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from rpcwheel.deadline.budget import RetryBudget
    from rpcwheel.failback.policy import FailbackPolicy

    from .policy import CallPolicy, FailsafePolicy, MethodPolicy

__all__ = ["Answer", "CallRules", "RuleBook", "messages_of"]


KEPT_BYTES: Final = 1 << 20
"""How much of a request stream is kept for failback, where no retry policy says it."""

MOST_METHODS: Final = 4096
"""Rules kept. A proxy may call any name, and its clients may make them up."""


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
    queue: str = "*"
    """What the queue of a failback policy without a name is called: the pattern where it stands."""
    excused: Matcher | None = None
    """What `failsafe.on` means."""
    queued: Matcher | None = None
    """What `failback.on` means; None if no failure is queued."""

    @classmethod
    def of(cls, policy: MethodPolicy, queue: str = "*") -> CallRules:
        """Make them of what the user has set."""
        retry, failsafe = policy.retry, policy.failsafe
        deadline = policy.timeout or DeadlinePolicy()
        failback = policy.failback
        queues = failback is not None and failback.limit != 0
        retried = retry is not None and retry.attempts > 1
        return cls(
            timeout_ns=_ns(deadline.timeout),
            message_timeout_ns=_ns(deadline.message_timeout),
            slow_ns=_ns(deadline.slow_after),
            propagate=deadline.propagate,
            retry=RetryRules.of(retry, idempotent=policy.idempotent) if retry and retried else None,
            failsafe=failsafe,
            failback=failback,
            queue=queue,
            excused=None if failsafe is None else Matcher(failsafe.on),
            queued=Matcher(failback.on) if failback and queues else None,
        )

    @property
    def resends(self) -> bool:
        """Whether a request may be sent again, so that it must be kept."""
        return self.failback is not None or (self.retry is not None and self.retry.idempotent)

    @property
    def recovers(self) -> bool:
        """Whether a failed call may end in another way than with its failure."""
        return self.retry is not None or self.failback is not None or self.failsafe is not None

    @property
    def keep_bytes(self) -> int | None:
        """How much is kept of a request stream; None where it is never sent again."""
        if not self.resends:
            return None
        return KEPT_BYTES if self.retry is None else self.retry.replay_bytes

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
        deadline_ns = self.deadline_ns(now_ns, own_ns, left_ns)
        return DeadlinePlan(deadline_ns, self.retry, budget if self.retry else None)

    def deadline_ns(self, now_ns: int, own_ns: int | None, left_ns: int | None) -> int:
        """When a call ends that begins now; arguments as `plan`."""
        return earliest(now_ns, self.timeout_ns, own_ns, left_ns if self.propagate else None)

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
            if len(self._rules) >= MOST_METHODS:
                self._rules.clear()
            policy = self._policy.of(method)
            rules = self._rules[method] = CallRules.of(policy, self._place_of(policy.failback))
        return rules

    def _place_of(self, failback: FailbackPolicy | None) -> str:
        """The pattern under which it stands first; `"*"` for the general one."""
        if failback is self._policy.failback:
            return "*"
        methods = self._policy.methods.items()
        return next((pattern for pattern, one in methods if one.failback is failback), "*")


def messages_of(default: Any) -> Sequence[Any]:  # noqa: ANN401 - the user's
    """The messages of a response stream that is answered with a default.

    None is an empty stream, a list or tuple the messages, anything else is one message.
    """
    if default is None:
        return ()
    return default if isinstance(default, (list, tuple)) else (default,)


def _ns(value: float | timedelta | None) -> int:
    return NEVER if value is None else to_ns(value)
