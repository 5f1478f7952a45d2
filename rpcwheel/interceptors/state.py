"""What all calls of one client share: rules, budget, clock, timer, and where failed calls wait.

Both twins have one for each channel (or for each target, if the user names it). Nothing in here
waits or does I/O.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from rpcwheel.call import DEADLINE, Attempt, Finish
from rpcwheel.deadline.budget import RetryBudget
from rpcwheel.deadline.core import DeadlinePlan, cut_short
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.observe import (
    CallExcused,
    CallNotRetried,
    CallRetrying,
    CallSlow,
    HandOffRefused,
    HookFailed,
    StreamSilent,
    emit,
)
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of
from rpcwheel.workers import POOL

from .core import MOST_METHODS, Answer, RuleBook
from .policy import checked_calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.call import Outcome
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .core import CallRules
    from .policy import CallPolicy

__all__ = ["ANSWER_KEY", "PATIENCE_S", "ClientState", "answered_by", "seconds_left"]

Invoker = TypeVar("Invoker")

ANSWER_KEY: Final = "rpcwheel-answer"
"""In the trailing metadata of an answer that is none of the server's: who made it."""

PATIENCE_S: Final = 1.0
"""How often who waits on a timer looks whether it was stopped, which tells nobody."""

EARLY_NS: Final = 10_000_000
"""A try that its caller did not cancel and that says CANCELLED, no more than this before its
deadline or after it, came to its deadline: grpc-go resets a stream then, which may be here first
(4 of 280 calls to grpc-go 1.76 on the same machine)."""

WAIT_FAILED: Final = Finish("its wait strategy raised")


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
                what to call it if the policy has no name.

        Raises:
            TypeError: `policy` or `timer` is none.
        """
        self.rules = RuleBook(checked_calls(policy))
        self.invoker_of = invoker_of
        self._timer = checked_timer(timer)
        self.now_ns = clock_of(timer)
        """The clock of the timer in use."""
        self._slow: dict[str, tuple[Callable[[Timeout], object], float]] = {}
        self._budgets: dict[tuple[float, int], RetryBudget] = {}
        self._bare: set[str] = set()

    @property
    def timer(self) -> Timer:
        """The timer in use."""
        return shared_timer() if self._timer is None else self._timer

    def plan(self, rules: CallRules, own_ns: int | None, now_ns: int | None = None) -> DeadlinePlan:
        """Begin a call whose caller gave a timeout of `own_ns`, or none.

        Args:
            rules: The method's.
            own_ns: What the caller gave.
            now_ns: By `now_ns`, for who has read the clock already.
        """
        budget = None if rules.retry is None else self.budget_of(rules)
        return rules.plan(self.now_ns() if now_ns is None else now_ns, own_ns, _left_ns(), budget)

    def open(self, rules: CallRules, own_ns: int | None) -> tuple[int, int, int]:
        """Begin a call without a plan, which is made when its first try has failed (`resumed`).

        Most calls need no more than their first try, and no plan to make it.

        Returns:
            Now, the call's deadline, and that of its first try. Where the deadline has passed there
            is no first try: the call has not begun.
        """
        now_ns = self.now_ns()
        deadline_ns = try_ns = rules.deadline_ns(now_ns, own_ns, _left_ns())
        if rules.retry is not None and now_ns < deadline_ns:
            try_ns = cut_short(rules.retry, now_ns, deadline_ns)
            budget = self.budget_of(rules)
            if budget is not None:
                budget.call(now_ns)
        return now_ns, deadline_ns, try_ns

    def resumed(self, rules: CallRules, started_ns: int, deadline_ns: int) -> DeadlinePlan:
        """The plan of a call that was begun by `open`, after its first try."""
        plan = DeadlinePlan(deadline_ns, rules.retry, self.budget_of(rules))
        plan.resume(started_ns)
        return plan

    def budget_of(self, rules: CallRules) -> RetryBudget | None:
        """The budget that a method's retries are taken from."""
        if rules.retry is None or rules.retry.budget is None:
            return None
        key = rules.retry.budget
        return self._budgets.get(key) or self._budgets.setdefault(key, RetryBudget(*key))

    def after(
        self, method: str, rules: CallRules, plan: DeadlinePlan, outcome: Outcome, attempts: int
    ) -> Attempt | Finish:
        """Say what follows after the `attempts`-th try of a call has failed, and tell it as events.

        Not for a try that its caller has cancelled.

        May run a wait object of the user's; one that raises costs the call its retries, no more.
        """
        now_ns = self.now_ns()
        if outcome.code == "CANCELLED" and now_ns >= plan.try_ns - EARLY_NS:
            outcome = replace(outcome, code="DEADLINE_EXCEEDED")
        try:
            step = plan.ended(now_ns, outcome)
        except Exception as error:  # noqa: BLE001 - a user's wait object; told as an event
            emit(HookFailed(method, "retry.wait", error))
            step = WAIT_FAILED
        if isinstance(step, Attempt):
            delay_s = max(0, step.at_ns - now_ns) / 1e9
            emit(CallRetrying(method, attempts, outcome.code, delay_s))
        elif rules.retry is not None and outcome.code in rules.retry.on:
            emit(CallNotRetried(method, attempts, outcome.code, step.reason))
        return step

    def answer(
        self,
        method: str,
        rules: CallRules,
        error: BaseException,
        *,
        attempts: int,
        started_ns: int,
        handed: bool = False,
    ) -> Answer:
        """Say what the caller gets after a failure with a status that no retry follows.

        Args:
            method: Its name, for the event.
            rules: The method's.
            error: How the last try failed.
            attempts: How many tries there were.
            started_ns: When the first one began, by `now_ns`.
            handed: Whether messages of the failed call are in the caller's hands: then nothing but
                the failure may follow them.
        """
        if handed:
            return Answer.RAISE
        elapsed_ns = self.now_ns() - started_ns
        try:
            answer = rules.answer(error, attempts=attempts, elapsed_ns=elapsed_ns)
        except Exception as raised:  # noqa: BLE001 - a user's predicate; told as an event
            emit(HookFailed(method, "failsafe.on", raised))
            return Answer.RAISE
        if answer is Answer.EXCUSE:
            emit(CallExcused(method, error))
        return answer

    @staticmethod
    def queues(method: str, rules: CallRules, error: BaseException) -> bool:
        """Tell whether failback is for this failure, before requests are gathered for it.

        May run a predicate of the user's; one that raises is reported and means no.
        """
        if rules.queued is None:
            return False
        try:
            return rules.queued(error, attempt=1, elapsed_ns=0)  # as `FailbackInvoker.park` asks
        except Exception as raised:  # noqa: BLE001 - a user's predicate; told as an event
            emit(HookFailed(method, "failback", raised))
            return False

    def watch(self, method: str, rules: CallRules) -> Timeout | None:
        """Have a call that begins now told as slow if its rules ask so; cancel that at its end.

        A timer that takes it not (stopped, full) costs that event and no call.
        """
        if rules.slow_ns == NEVER:
            return None
        known = self._slow.get(method)
        if known is None:
            if len(self._slow) >= MOST_METHODS:
                self._slow.clear()
            event = CallSlow(method, "client", to_seconds(rules.slow_ns))
            # The same float each time: the timer has a shorter way for a delay that it knows.
            known = self._slow[method] = partial(_report_slow, event), event.elapsed_s
        return self.wake(*known, "slow_after")

    def wake(self, task: Callable[[Timeout], object], delay_s: float, what: str) -> Timeout | None:
        """Have `task` run later; None (and an event that names it) if the timer takes no more."""
        try:
            return self.timer.new_timeout(task, delay_s)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            emit(HandOffRefused(type(self.timer).__name__, what, error))
            return None

    def note_bare(self, method: str) -> None:
        """Tell, once for each method, that its policies can't hold but for the deadline."""
        if method in self._bare:
            return
        if len(self._bare) >= MOST_METHODS:
            self._bare.clear()
        self._bare.add(method)
        why = (
            "it gives an iterator in place of a call: no retry, failsafe, failback, message_timeout"
        )
        emit(HookFailed(method, "interceptor inside", TypeError(why)))

    @staticmethod
    def silent(method: str, rules: CallRules) -> str:
        """Tell that a stream was silent for too long, and give the details of its status."""
        silent_s = to_seconds(rules.message_timeout_ns)
        emit(StreamSilent(method, silent_s))
        return f"no message for {silent_s:g} s (message_timeout)"


def _report_slow(event: CallSlow, _: Timeout) -> None:
    """Emit an event on a worker: sinks and log handlers of users may block the timer's thread."""
    POOL.submit(("slow", event.method), partial(emit, event))


def _left_ns() -> int | None:
    """What is left of the deadline of the call being served; None if none is."""
    deadline_ns = DEADLINE.get()
    return None if deadline_ns is None else deadline_ns - time.monotonic_ns()


def seconds_left(deadline_ns: int, now_ns: int) -> float | None:
    """What to give gRPC as `timeout=`; None for no limit, never negative."""
    return None if deadline_ns == NEVER else max(0, deadline_ns - now_ns) / 1e9


def answered_by(answer: Answer, code: str, details: str | None) -> tuple[str, str]:
    """Who answers in the server's place, and the details of the status that says so."""
    if answer is Answer.PARK:
        return "failback", f"queued by failback after {code}: {details}"
    return "failsafe", f"failsafe after {code}: {details}"
