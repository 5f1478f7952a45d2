"""What all calls of one client share: rules, budget, clock, timer, and where failed calls wait.

Both twins have one for each channel (or for each target, if the user names it). Nothing in here
waits or does I/O.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from rpcwheel.call import DEADLINE
from rpcwheel.deadline.budget import RetryBudget
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.observe import CallSlow, StreamSilent, emit
from rpcwheel.timer import ManualTimer, shared_timer

from .core import RuleBook

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.deadline.core import DeadlinePlan
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .core import CallRules
    from .policy import CallPolicy

__all__ = ["ClientState", "seconds_left"]

Invoker = TypeVar("Invoker")


class ClientState(Generic[Invoker]):
    """The state that the calls of one client share. Any thread may use it."""

    def __init__(
        self,
        policy: CallPolicy,
        *,
        timer: Timer | None,
        invoker_of: Callable[[FailbackPolicy, str], Invoker],
    ) -> None:
        """Begin without a call made.

        Args:
            policy: What holds for which method.
            timer: Any rpcwheel timer; None takes `shared_timer()` when one is needed.
            invoker_of: Gives the queue of a failback policy, made when first asked for; also told
                the method, for the queue's name.
        """
        self.rules = RuleBook(policy)
        self.invoker_of = invoker_of
        self._timer = timer
        self._manual = timer if isinstance(timer, ManualTimer) else None
        self._budgets: dict[tuple[float, int], RetryBudget] = {}

    @property
    def timer(self) -> Timer:
        """The timer in use."""
        return shared_timer() if self._timer is None else self._timer

    def now_ns(self) -> int:
        """The time on the clock of the timer in use."""
        if self._manual is not None:
            return round(self._manual.now * 1e9)
        return time.monotonic_ns()

    def plan(self, rules: CallRules, own_ns: int | None) -> DeadlinePlan:
        """Begin a call whose caller gave a timeout of `own_ns`, or none."""
        deadline_ns = DEADLINE.get()
        left_ns = None if deadline_ns is None else deadline_ns - time.monotonic_ns()
        return rules.plan(self.now_ns(), own_ns, left_ns, self.budget_of(rules))

    def budget_of(self, rules: CallRules) -> RetryBudget | None:
        """The budget that a method's retries are taken from."""
        if rules.retry is None or rules.retry.budget is None:
            return None
        key = rules.retry.budget
        return self._budgets.get(key) or self._budgets.setdefault(key, RetryBudget(*key))

    def watch(self, method: str, rules: CallRules, side: str = "client") -> Timeout | None:
        """Have a call that begins now told as slow if its rules ask so; cancel that at its end."""
        if rules.slow_ns == NEVER:
            return None
        event = CallSlow(method, side, to_seconds(rules.slow_ns))
        return self.timer.new_timeout(lambda _: emit(event), event.elapsed_s)

    @staticmethod
    def silent(method: str, rules: CallRules) -> str:
        """Tell that a stream was silent for too long, and give the details of its status."""
        silent_s = to_seconds(rules.message_timeout_ns)
        emit(StreamSilent(method, silent_s))
        return f"no message for {silent_s:g} s (message_timeout)"


def seconds_left(deadline_ns: int, now_ns: int) -> float | None:
    """What to give gRPC as `timeout=`; None for no limit, never negative."""
    return None if deadline_ns == NEVER else max(0, deadline_ns - now_ns) / 1e9
