"""The configuration of methods, and the state that all calls of one client share.

The clients of both worlds use it in this order::

    config = state.configs.of(method)          # once for each method, then from a table
    now, deadline, attempt = state.open(...)   # the first attempt is made with no more than that
    plan = state.resumed(...)                  # only if it failed
    step = state.after(..., plan, ...)         # NextAttempt or Stop
    outcome = state.outcome(error, ...)        # after the last attempt: AttemptResult

Nothing in here waits or does I/O. Any thread may use it.
"""

from __future__ import annotations

import copy
import enum
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.failback.matching import Matcher
from rpcwheel.observe import (
    CallbackFailed,
    CallSlow,
    DefaultResponseUsed,
    ExecutorRejected,
    RetryScheduled,
    RetryStopped,
    StreamStalled,
    emit,
)
from rpcwheel.rpc import DEADLINE, NextAttempt, Stop
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from .policy import DeadlinePolicy, checked_calls
from .retry import RetryBudget, RetryConfig, RetryPlan, cut_short, earliest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from rpcwheel.durations import Duration
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.rpc import AttemptResult
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .policy import CallPolicy, DefaultResponsePolicy, MethodPolicy

__all__ = [
    "ANSWER_KEY",
    "GATHER_S",
    "MOST_METHODS",
    "PATIENCE_S",
    "ClientState",
    "MethodConfig",
    "MethodConfigs",
    "Outcome",
    "answered_by",
    "copy_of",
    "kept_metadata",
    "kept_request",
    "messages_of",
    "resend_timeout",
    "seconds_left",
]

ANSWER_KEY: Final = "rpcwheel-answer"
"""In the trailing metadata of an answer that is none of the server's: who made it."""

PATIENCE_S: Final = 1.0
"""How often who waits on a timer looks whether it was stopped, which tells nobody."""

EARLY_NS: Final = 10_000_000
"""A try that its caller did not cancel and that says CANCELLED, no more than this before its
deadline or after it, came to its deadline: grpc-go resets a stream then, which may be here first
(4 of 280 calls to grpc-go 1.76 on the same machine)."""

WAIT_FAILED: Final = Stop("its wait strategy raised")

KEPT_BYTES: Final = 1 << 20
"""How much of a request stream is kept for failback, where no retry policy says it."""

MOST_METHODS: Final = 4096
"""Rules kept. A proxy may call any name, and its clients may make them up."""

GATHER_S: Final = 1.0
"""How long to wait for the rest of a request stream that is to be kept for later."""

RESEND_S: Final = 60.0
"""The deadline of one delivery, where neither the caller nor the policy gave one."""


class FailbackQueue(Protocol):
    """Delivers failed calls later; a `FailbackInvoker` of the same world."""

    def park(self, error: Any, function: Callable[..., object], /, *requests: Any) -> bool:
        """Queue a call that failed; False if its failure is not one that the policy names."""


class Outcome(enum.Enum):
    """What the caller of a call gets that has failed for good."""

    FAIL = enum.auto()
    DEFAULT_RESPONSE = enum.auto()
    ENQUEUE = enum.auto()


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """All that holds for the calls of one method. Times are nanoseconds, `NEVER` where not set."""

    timeout_ns: int = NEVER
    message_timeout_ns: int = NEVER
    slow_ns: int = NEVER
    propagate: bool = True
    retry: RetryConfig | None = None
    default_response: DefaultResponsePolicy | None = None
    failback: FailbackPolicy | None = None
    queue: str = "*"
    """What the queue of a failback policy without a name is called: the pattern where it stands."""
    excused: Matcher | None = None
    """What `default_response.on` means."""
    queued: Matcher | None = None
    """What `failback.on` means; None if no failure is queued."""

    @classmethod
    def of(cls, policy: MethodPolicy, queue: str = "*") -> MethodConfig:
        """Make them of what the user has set."""
        retry, default_response = policy.retry, policy.default_response
        deadline = policy.timeout or DeadlinePolicy()
        failback = policy.failback
        queues = failback is not None and failback.limit != 0
        retried = retry is not None and retry.attempts > 1
        return cls(
            timeout_ns=_ns(deadline.timeout),
            message_timeout_ns=_ns(deadline.message_timeout),
            slow_ns=_ns(deadline.slow_call_threshold),
            propagate=deadline.propagate,
            retry=RetryConfig.of(retry, idempotent=policy.idempotent)
            if retry and retried
            else None,
            default_response=default_response,
            failback=failback,
            queue=queue,
            excused=None if default_response is None else Matcher(default_response.on),
            queued=Matcher(failback.on) if failback and queues else None,
        )

    @property
    def resends(self) -> bool:
        """Whether a request may be sent again, so that it must be kept."""
        return self.failback is not None or (self.retry is not None and self.retry.idempotent)

    @property
    def recovers(self) -> bool:
        """Whether a failed call may end in another way than with its failure."""
        return (
            self.retry is not None or self.failback is not None or self.default_response is not None
        )

    @property
    def keep_bytes(self) -> int | None:
        """How much is kept of a request stream; None where it is never sent again."""
        if not self.resends:
            return None
        return KEPT_BYTES if self.retry is None else self.retry.replay_buffer_bytes

    @property
    def has_message_timeout(self) -> bool:
        """Whether a response stream may be silent for so long only."""
        return self.message_timeout_ns != NEVER

    def plan(
        self, now_ns: int, own_ns: int | None, left_ns: int | None, budget: RetryBudget | None
    ) -> RetryPlan:
        """Begin a call.

        Args:
            now_ns: Now.
            own_ns: The timeout that the caller gave, None if none.
            left_ns: What is left of the deadline of the call being served, None if there is none.
            budget: That of the target; None if it has none.
        """
        deadline_ns = self.deadline_ns(now_ns, own_ns, left_ns)
        return RetryPlan(deadline_ns, self.retry, budget if self.retry else None)

    def deadline_ns(self, now_ns: int, own_ns: int | None, left_ns: int | None) -> int:
        """When a call ends that begins now; arguments as `plan`."""
        return earliest(now_ns, self.timeout_ns, own_ns, left_ns if self.propagate else None)

    def answer(self, error: BaseException, *, attempts: int, elapsed_ns: int) -> Outcome:
        """Say what the caller gets after a failure that no retry follows.

        Raises:
            Exception: What a predicate in `default_response.on` raised.
        """
        if self.failback is not None:
            return Outcome.ENQUEUE
        if self.excused is not None and self.excused(
            error, attempt=attempts, elapsed_ns=elapsed_ns
        ):
            return Outcome.DEFAULT_RESPONSE
        return Outcome.FAIL


class MethodConfigs:
    """The rules of every method, made when it is first called. Any thread may use it."""

    __slots__ = ("_config", "_policy")

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy
        self._config: dict[str, MethodConfig] = {}

    def of(self, method: str) -> MethodConfig:
        """The rules of a method, given in full: `"/shop.Orders/Get"`."""
        config = self._config.get(method)
        if config is None:
            if len(self._config) >= MOST_METHODS:
                self._config.clear()
            policy = self._policy.of(method)
            config = self._config[method] = MethodConfig.of(policy, self._place_of(policy.failback))
        return config

    def _place_of(self, failback: FailbackPolicy | None) -> str:
        """The pattern under which it stands first; `"*"` for the general one."""
        if failback is self._policy.failback:
            return "*"
        methods = self._policy.methods.items()
        return next((pattern for pattern, one in methods if one.failback is failback), "*")


def messages_of(default: Any) -> Sequence[Any]:
    """The messages of a response stream that is answered with a default.

    None is an empty stream, a list or tuple the messages, anything else is one message.
    """
    if default is None:
        return ()
    return default if isinstance(default, (list, tuple)) else (default,)


def _ns(value: float | timedelta | None) -> int:
    return NEVER if value is None else to_ns(value)


class ClientState:
    """The state that the calls of one client share. Any thread may use it."""

    def __init__(
        self,
        policy: CallPolicy,
        *,
        timer: Timer | None,
        queue_of: Callable[[FailbackPolicy, str], FailbackQueue],
    ) -> None:
        """Begin without a call made.

        Args:
            policy: What holds for which method.
            timer: Any rpcwheel timer; None takes `shared_timer()` when one is needed.
            queue_of: Gives the queue of a failback policy, made when first asked for; also told
                what to call it if the policy has no name.

        Raises:
            TypeError: `policy` or `timer` is none.
        """
        self.configs = MethodConfigs(checked_calls(policy))
        self.queue_of = queue_of
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

    def plan(
        self, config: MethodConfig, own_ns: int | None, now_ns: int | None = None
    ) -> RetryPlan:
        """Begin a call whose caller gave a timeout of `own_ns`, or none.

        Args:
            config: The method's.
            own_ns: What the caller gave.
            now_ns: By `now_ns`, for who has read the clock already.
        """
        budget = None if config.retry is None else self.budget_of(config)
        return config.plan(self.now_ns() if now_ns is None else now_ns, own_ns, _left_ns(), budget)

    def open(self, config: MethodConfig, own_ns: int | None) -> tuple[int, int, int]:
        """Begin a call without a plan, which is made when its first try has failed (`resumed`).

        Most calls need no more than their first try, and no plan to make it.

        Returns:
            Now, the call's deadline, and that of its first try. Where the deadline has passed there
            is no first try: the call has not begun.
        """
        now_ns = self.now_ns()
        deadline_ns = attempt_ns = config.deadline_ns(now_ns, own_ns, _left_ns())
        if config.retry is not None and now_ns < deadline_ns:
            attempt_ns = cut_short(config.retry, now_ns, deadline_ns)
            budget = self.budget_of(config)
            if budget is not None:
                budget.call(now_ns)
        return now_ns, deadline_ns, attempt_ns

    def resumed(self, config: MethodConfig, started_ns: int, deadline_ns: int) -> RetryPlan:
        """The plan of a call that was begun by `open`, after its first try."""
        plan = RetryPlan(deadline_ns, config.retry, self.budget_of(config))
        plan.resume(started_ns)
        return plan

    def budget_of(self, config: MethodConfig) -> RetryBudget | None:
        """The budget that a method's retries are taken from."""
        if config.retry is None or config.retry.budget is None:
            return None
        key = config.retry.budget
        return self._budgets.get(key) or self._budgets.setdefault(key, RetryBudget(*key))

    def after(
        self,
        method: str,
        config: MethodConfig,
        plan: RetryPlan,
        outcome: AttemptResult,
        attempts: int,
    ) -> NextAttempt | Stop:
        """Say what follows after the `attempts`-th try of a call has failed, and tell it as events.

        Not for a try that its caller has cancelled.

        May run a wait object of the user's; one that raises costs the call its retries, no more.
        """
        now_ns = self.now_ns()
        if outcome.code == "CANCELLED" and now_ns >= plan.attempt_ns - EARLY_NS:
            outcome = replace(outcome, code="DEADLINE_EXCEEDED")
        try:
            step = plan.ended(now_ns, outcome)
        except Exception as error:  # noqa: BLE001 - a user's wait object; told as an event
            emit(CallbackFailed(method, "retry.wait", error))
            step = WAIT_FAILED
        if isinstance(step, NextAttempt):
            delay_s = max(0, step.at_ns - now_ns) / 1e9
            emit(RetryScheduled(method, attempts, outcome.code, delay_s))
        elif config.retry is not None and outcome.code in config.retry.on:
            emit(RetryStopped(method, attempts, outcome.code, step.reason))
        return step

    def answer(
        self,
        method: str,
        config: MethodConfig,
        error: BaseException,
        *,
        attempts: int,
        started_ns: int,
        handed: bool = False,
    ) -> Outcome:
        """Say what the caller gets after a failure with a status that no retry follows.

        Args:
            method: Its name, for the event.
            config: The method's.
            error: How the last try failed.
            attempts: How many tries there were.
            started_ns: When the first one began, by `now_ns`.
            handed: Whether messages of the failed call are in the caller's hands: then nothing but
                the failure may follow them.
        """
        if handed:
            return Outcome.FAIL
        elapsed_ns = self.now_ns() - started_ns
        try:
            answer = config.answer(error, attempts=attempts, elapsed_ns=elapsed_ns)
        except Exception as raised:  # noqa: BLE001 - a user's predicate; told as an event
            emit(CallbackFailed(method, "default_response.on", raised))
            return Outcome.FAIL
        if answer is Outcome.DEFAULT_RESPONSE:
            emit(DefaultResponseUsed(method, error))
        return answer

    @staticmethod
    def queues(method: str, config: MethodConfig, error: BaseException) -> bool:
        """Tell whether failback is for this failure, before requests are gathered for it.

        May run a predicate of the user's; one that raises is reported and means no.
        """
        if config.queued is None:
            return False
        try:
            return config.queued(error, attempt=1, elapsed_ns=0)  # as `FailbackInvoker.park` asks
        except Exception as raised:  # noqa: BLE001 - a user's predicate; told as an event
            emit(CallbackFailed(method, "failback", raised))
            return False

    def watch(self, method: str, config: MethodConfig) -> Timeout | None:
        """Have a call that begins now told as slow if its config asks so; cancel that at its end.

        A timer that takes it not (stopped, full) costs that event and no call.
        """
        if config.slow_ns == NEVER:
            return None
        known = self._slow.get(method)
        if known is None:
            if len(self._slow) >= MOST_METHODS:
                self._slow.clear()
            event = CallSlow(method, "client", to_seconds(config.slow_ns))
            # The same float each time: the timer has a shorter way for a delay that it knows.
            known = self._slow[method] = partial(_report_slow, event), event.elapsed_s
        return self.wake(*known, "slow_call_threshold")

    def wake(self, task: Callable[[Timeout], object], delay_s: float, what: str) -> Timeout | None:
        """Have `task` run later; None (and an event that names it) if the timer takes no more."""
        try:
            return self.timer.new_timeout(task, delay_s)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            emit(ExecutorRejected(type(self.timer).__name__, what, error))
            return None

    def note_bare(self, method: str) -> None:
        """Tell, once for each method, that its policies can't hold but for the deadline."""
        if method in self._bare:
            return
        if len(self._bare) >= MOST_METHODS:
            self._bare.clear()
        self._bare.add(method)
        why = (
            "it gives an iterator in place of a call: no retry, default response, failback or "
            "message_timeout"
        )
        emit(CallbackFailed(method, "interceptor inside", TypeError(why)))

    @staticmethod
    def silent(method: str, config: MethodConfig) -> str:
        """Tell that a stream was silent for too long, and give the details of its status."""
        silent_s = to_seconds(config.message_timeout_ns)
        emit(StreamStalled(method, silent_s))
        return f"no message for {silent_s:g} s (message_timeout)"


def _report_slow(event: CallSlow, _: Timeout) -> None:
    """Emit an event on a worker: sinks and log handlers of users may block the timer's thread."""
    EXECUTOR.submit(("slow", event.method), partial(emit, event))


def _left_ns() -> int | None:
    """What is left of the deadline of the call being served; None if none is."""
    deadline_ns = DEADLINE.get()
    return None if deadline_ns is None else deadline_ns - time.monotonic_ns()


def seconds_left(deadline_ns: int, now_ns: int) -> float | None:
    """What to give gRPC as `timeout=`; None for no limit, never negative."""
    return None if deadline_ns == NEVER else max(0, deadline_ns - now_ns) / 1e9


def answered_by(answer: Outcome, code: str, details: str | None) -> tuple[str, str]:
    """Who answers in the server's place, and the details of the status that says so."""
    if answer is Outcome.ENQUEUE:
        return "failback", f"queued by failback after {code}: {details}"
    return "default-response", f"default response after {code}: {details}"


def resend_timeout(own: Duration | None, config: MethodConfig) -> float:
    """Seconds that one delivery may take: what the caller gave, else what the config says.

    What the caller gave may have been no limit, or none that leaves any time.
    """
    for limit_ns in (NEVER if own is None else to_ns(own), config.timeout_ns):
        if 0 < limit_ns < NEVER:
            return to_seconds(limit_ns)
    return RESEND_S


def kept_metadata(
    given: Iterable[tuple[str, str | bytes]] | None, policy: FailbackPolicy
) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata that is sent again: what the policy keeps."""
    return tuple((key, value) for key, value in given or () if policy.keeps(key))


def kept_request(request: Any) -> Any:
    """A request as it is now. Failback itself keeps those of protobuf as bytes."""
    return request if hasattr(request, "SerializeToString") else copy_of(request)


def copy_of(request: Any) -> Any:
    """A request as it is now, whatever its caller does with it from now on."""
    try:
        return copy.deepcopy(request)
    except Exception:  # noqa: BLE001 - what can't be copied is the caller's to leave unchanged
        return request
