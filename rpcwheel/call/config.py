"""The configuration of methods, and the state that all calls of one client share.

The clients of both worlds use it in this order::

    config = state.config_of(method)                # policies of the method, and `call_options`
    now, deadline, attempt = state.open(config, ...)  # the first attempt is made with these
    plan = state.resumed(config, now, deadline)     # only if it failed
    step = state.after(..., plan, ...)              # NextAttempt or Stop
    outcome = state.outcome(..., error, ...)        # after the last attempt

Nothing in here waits or does I/O. Any thread may use it.
"""

from __future__ import annotations

import copy
import enum
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.events import (
    CallbackFailed,
    CallSlow,
    DefaultResponseUsed,
    ExecutorRejected,
    RetryScheduled,
    RetryStopped,
    StreamStalled,
    emit,
)
from rpcwheel.failback.matching import Matcher
from rpcwheel.rpc import DEADLINE, NextAttempt, Stop
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from .hedging import HedgingConfig, HedgingPlan
from .policy import DeadlinePolicy, MethodPolicy, RetryThrottling, checked_calls
from .retry import (
    Budget,
    BudgetKey,
    RetryBudget,
    RetryConfig,
    RetryPlan,
    RetryThrottle,
    cut_short,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import timedelta

    from rpcwheel.durations import Duration
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.rpc import AttemptResult
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .policy import CallPolicy, DefaultResponsePolicy

__all__ = [
    "ANSWER_KEY",
    "CALL_OPTIONS",
    "GATHER_S",
    "LOOK_INTERVAL_S",
    "MOST_METHODS",
    "ClientState",
    "FailbackQueue",
    "MethodConfig",
    "MethodConfigs",
    "Outcome",
    "answered_by",
    "call_options",
    "copy_of",
    "kept_metadata",
    "kept_request",
    "messages_of",
    "resend_timeout",
    "seconds_left",
]

ANSWER_KEY: Final = "rpcwheel-answer"
"""In the trailing metadata of a response that no server gave: what made it."""

LOOK_INTERVAL_S: Final = 1.0
"""How often a thread that waits on a timer checks whether the timer was stopped."""

EARLY_NS: Final = 10_000_000
"""An attempt that its caller did not cancel, and that ends with CANCELLED no earlier than this
before its deadline, has reached its deadline: grpc-go resets a stream then, and the reset may
arrive first (4 of 280 calls to grpc-go 1.76 on the same machine)."""

WAIT_FAILED: Final = Stop("its wait strategy raised")

KEPT_BYTES: Final = 1 << 20
"""How much of a request stream is kept for failback, where no retry policy says it."""

MOST_METHODS: Final = 4096
"""Methods whose configuration is kept. A proxy may call any name that its clients send."""

GATHER_S: Final = 1.0
"""How long to wait for the rest of a request stream that failback is to queue."""

RESEND_TIMEOUT_S: Final = 60.0
"""The deadline of one delivery, where neither the caller nor the policy gave one."""


class FailbackQueue(Protocol):
    """Delivers failed calls later; a `FailbackInvoker` of the same world."""

    def park(self, error: Any, function: Callable[..., object], /, *requests: Any) -> bool:
        """Queue a call that failed; False if its failure is not one that the policy names."""


class Outcome(enum.Enum):
    """What the caller gets of a call whose last attempt has failed."""

    FAIL = enum.auto()
    DEFAULT_RESPONSE = enum.auto()
    ENQUEUE = enum.auto()


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """All that holds for the calls of one method. Times are nanoseconds, `NEVER` where not set."""

    timeout_ns: int = NEVER
    message_timeout_ns: int = NEVER
    slow_ns: int = NEVER
    propagate_deadline: bool = True
    wait_for_ready: bool | None = None
    """For calls whose caller does not give it; None for gRPC's default."""
    retry: RetryConfig | None = None
    hedging: HedgingConfig | None = None
    """For calls with one request and one response."""
    default_response: DefaultResponsePolicy | None = None
    failback: FailbackPolicy | None = None
    queue: str = "*"
    """The name of the queue of a failback policy without a name: the pattern where it stands."""
    excused: Matcher | None = None
    """What `default_response.on` means."""
    queued: Matcher | None = None
    """What `failback.retry_on` means; None if no failure is queued."""

    @classmethod
    def from_policy(cls, policy: MethodPolicy, queue: str = "*") -> MethodConfig:
        """Make it of what the user has set."""
        retry, hedging, default = policy.retry, policy.hedging, policy.default_response
        deadline = policy.timeout or DeadlinePolicy()
        failback = policy.failback
        queues = failback is not None and failback.limit != 1
        retried = retry is not None and retry.max_attempts > 1
        hedged = hedging is not None and hedging.max_attempts > 1 and policy.idempotent
        return cls(
            timeout_ns=_ns(deadline.timeout),
            message_timeout_ns=_ns(deadline.message_timeout),
            slow_ns=_ns(deadline.slow_call_threshold),
            propagate_deadline=deadline.propagate_deadline,
            wait_for_ready=policy.wait_for_ready,
            retry=(
                RetryConfig.from_policy(retry, idempotent=policy.idempotent)
                if retry and retried
                else None
            ),
            hedging=HedgingConfig.from_policy(hedging) if hedging and hedged else None,
            default_response=default,
            failback=failback,
            queue=queue,
            excused=None if default is None else Matcher(default.on),
            queued=Matcher(failback.retry_on) if failback and queues else None,
        )

    @property
    def budget(self) -> BudgetKey | None:
        """What the target's budget for further attempts is made with; None for no limit."""
        limited = self.retry or self.hedging
        return None if limited is None else limited.budget

    @property
    def resends(self) -> bool:
        """Whether a request may be sent again, hedging apart, so that it must be kept."""
        retried = self.retry is not None and self.retry.idempotent
        return self.failback is not None or retried

    @property
    def recovers(self) -> bool:
        """Whether a failed call may end in another way than with its failure, hedging apart."""
        return not (self.retry is None and self.failback is None and self.default_response is None)

    @property
    def keep_bytes(self) -> int | None:
        """How much is kept of a request stream; None where it is never sent again."""
        if not self.resends:
            return None
        return KEPT_BYTES if self.retry is None else self.retry.replay_buffer_bytes

    @property
    def has_message_timeout(self) -> bool:
        """Whether the time between two messages of a response stream is limited."""
        return self.message_timeout_ns != NEVER

    def deadline_ns(self, now_ns: int, own_ns: int | None, left_ns: int | None) -> int:
        """When a call ends that begins now.

        Args:
            now_ns: Now.
            own_ns: The timeout that the caller gave, None if none.
            left_ns: What is left of the deadline of the call being served, None if there is none.
        """
        least_ns = self.timeout_ns
        if own_ns is not None and own_ns < least_ns:
            least_ns = own_ns
        if left_ns is not None and left_ns < least_ns and self.propagate_deadline:
            least_ns = left_ns
        return min(now_ns + least_ns, NEVER)

    def outcome(self, error: BaseException, *, attempts: int, elapsed_ns: int) -> Outcome:
        """Decide what the caller gets after the last attempt has failed.

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
    """The configuration of each method, made when it is first called. Any thread may use it."""

    __slots__ = ("_configs", "_policy")

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy
        self._configs: dict[str, MethodConfig] = {}

    def config_for(self, method: str) -> MethodConfig:
        """The configuration of a method, given in full: `"/shop.Orders/Get"`."""
        config = self._configs.get(method)
        if config is None:
            if len(self._configs) >= MOST_METHODS:
                self._configs.clear()
            config = self._configs[method] = self._make(self._policy.policy_for(method))
        return config

    def overridden(self, method: str, options: MethodPolicy) -> MethodConfig:
        """The same, with what `options` sets. Made anew each time."""
        return self._make(options.over(self._policy.policy_for(method)))

    def _make(self, policy: MethodPolicy) -> MethodConfig:
        return MethodConfig.from_policy(policy, self._place_of(policy.failback))

    def _place_of(self, failback: FailbackPolicy | None) -> str:
        """The first pattern that has this policy; `"*"` for the general one."""
        if failback is self._policy.failback:
            return "*"
        methods = self._policy.methods.items()
        return next((pattern for pattern, one in methods if one.failback is failback), "*")


class CallOptions:
    """What `call_options` sets for the calls that are begun inside it."""

    __slots__ = ("_configs", "policy")

    def __init__(self, policy: MethodPolicy) -> None:
        self.policy = policy
        self._configs: dict[tuple[int, str], tuple[MethodConfigs, MethodConfig]] = {}

    def config(self, configs: MethodConfigs, method: str) -> MethodConfig:
        """The configuration of a method with these options."""
        key = id(configs), method  # the object is kept too, or its id could be another's
        known = self._configs.get(key)
        if known is None:
            if len(self._configs) >= MOST_METHODS:
                self._configs.clear()
            known = self._configs[key] = configs, configs.overridden(method, self.policy)
        return known[1]


CALL_OPTIONS: Final[ContextVar[CallOptions | None]] = ContextVar("rpcwheel_options", default=None)
"""What the `call_options` around the caller set; None outside of them."""


@contextmanager
def call_options(**options: Any) -> Iterator[None]:
    """Set other policies for the calls that are begun in a `with` block, in both worlds.

    The options are a context variable: tasks that are made inside see them, threads do not unless
    they run in a copy of the context. They hold for calls through channels and interceptors of
    rpcwheel. What the caller gives to the call itself (`timeout=`) still counts. Inside another
    block, an option that is not given here is taken from there.

    Example::

        with rpcwheel.call_options(timeout=5.0, retry=None):
            report = orders.Report(request)

    Args:
        **options: The settings of `MethodPolicy`, such as `timeout`, `retry`, `hedging`,
            `default_response`, `failback` and `idempotent`. None switches a policy off. Each
            `FailbackPolicy` has a queue of its own, so make it once, outside of the block.

    Raises:
        TypeError, ConfigurationError: An option is unknown, of a wrong type or out of range.
    """
    policy = MethodPolicy(**options)
    outer = CALL_OPTIONS.get()
    token = CALL_OPTIONS.set(CallOptions(policy if outer is None else policy.over(outer.policy)))
    try:
        yield
    finally:
        CALL_OPTIONS.reset(token)


def messages_of(default: Any) -> Sequence[Any]:
    """The messages of a response stream that is answered with a default.

    None is an empty stream, a list or tuple the messages, anything else is one message.
    """
    if default is None:
        return ()
    return default if isinstance(default, (list, tuple)) else (default,)


def _budget(key: BudgetKey) -> Budget:
    if isinstance(key, RetryThrottling):
        return RetryThrottle(key.max_tokens, key.token_ratio)
    return RetryBudget(*key)


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
            queue_of: Gives the queue of a failback policy, made when first asked for; its second
                argument is the queue's name if the policy has none.

        Raises:
            TypeError: `policy` is no `CallPolicy`, or `timer` no timer.
        """
        self.configs = MethodConfigs(checked_calls(policy))
        self.queue_of = queue_of
        self._timer = checked_timer(timer)
        self.now_ns = clock_of(timer)
        """The clock of the timer in use."""
        self._slow: dict[tuple[str, int], tuple[Callable[[Timeout], object], float]] = {}
        self._budgets: dict[BudgetKey, Budget] = {}
        self._bare: set[str] = set()

    @property
    def timer(self) -> Timer:
        """The timer in use."""
        return shared_timer() if self._timer is None else self._timer

    def config_of(self, method: str) -> MethodConfig:
        """The configuration of a method for a call that begins now, in this context."""
        options = CALL_OPTIONS.get()
        return (
            self.configs.config_for(method)
            if options is None
            else options.config(self.configs, method)
        )

    def open(self, config: MethodConfig, own_ns: int | None) -> tuple[int, int, int]:
        """Begin a call whose caller gave a timeout of `own_ns`, or none.

        There is no plan yet: most calls need no more than their first attempt.

        Returns:
            Now, the call's deadline, and that of its first attempt. If the deadline has passed,
            there is no first attempt: the call has not begun.
        """
        now_ns = self.now_ns()
        deadline_ns = attempt_ns = config.deadline_ns(now_ns, own_ns, _left_ns())
        if (config.retry is not None or config.hedging is not None) and now_ns < deadline_ns:
            attempt_ns = cut_short(config.retry, now_ns, deadline_ns)
            budget = self.budget_of(config)
            if budget is not None:
                budget.call(now_ns)
        return now_ns, deadline_ns, attempt_ns

    def resumed(self, config: MethodConfig, started_ns: int, deadline_ns: int) -> RetryPlan:
        """The plan of a call that was begun by `open`, after its first attempt."""
        return RetryPlan(started_ns, deadline_ns, config.retry, self.budget_of(config))

    def hedged(self, config: MethodConfig, started_ns: int, deadline_ns: int) -> HedgingPlan | None:
        """The plan of a call that was begun by `open`, if it is hedged."""
        if config.hedging is None:
            return None
        return HedgingPlan(started_ns, deadline_ns, config.hedging, self.budget_of(config))

    def budget_of(self, config: MethodConfig) -> Budget | None:
        """The budget that a method's further attempts are taken from."""
        key = config.budget
        if key is None:
            return None
        return self._budgets.get(key) or self._budgets.setdefault(key, _budget(key))

    def after(
        self,
        method: str,
        config: MethodConfig,
        plan: RetryPlan,
        result: AttemptResult,
        attempts: int,
    ) -> NextAttempt | Stop:
        """Decide what follows after the `attempts`-th attempt has failed, and emit its event.

        Not for an attempt that its caller has canceled. May run a wait object of the user's; if
        that raises, the call is not retried.
        """
        now_ns = self.now_ns()
        if result.code == "CANCELLED" and now_ns >= plan.attempt_ns - EARLY_NS:
            result = replace(result, code="DEADLINE_EXCEEDED")
        try:
            step = plan.ended(now_ns, result)
        except Exception as error:  # noqa: BLE001 - a user's wait object
            emit(CallbackFailed(method, "retry.backoff", error))
            step = WAIT_FAILED
        if isinstance(step, NextAttempt):
            delay_s = max(0, step.at_ns - now_ns) / 1e9
            emit(RetryScheduled(method, attempts, result.code, delay_s))
        elif config.retry is not None and result.code in config.retry.retry_on:
            emit(RetryStopped(method, attempts, result.code, step.reason))
        return step

    def outcome(
        self,
        method: str,
        config: MethodConfig,
        error: BaseException,
        *,
        attempts: int,
        started_ns: int,
        received: bool = False,
    ) -> Outcome:
        """Decide what the caller gets after a failure with a status that no attempt follows.

        Args:
            method: Its name, for the event.
            config: The method's.
            error: How the last attempt failed.
            attempts: How many attempts there were.
            started_ns: When the first one began, by `now_ns`.
            received: Whether the caller has messages of the failed call: then only the failure may
                follow them.
        """
        if received:
            return Outcome.FAIL
        elapsed_ns = self.now_ns() - started_ns
        try:
            outcome = config.outcome(error, attempts=attempts, elapsed_ns=elapsed_ns)
        except Exception as raised:  # noqa: BLE001 - a user's predicate
            emit(CallbackFailed(method, "default_response.on", raised))
            return Outcome.FAIL
        if outcome is Outcome.DEFAULT_RESPONSE:
            emit(DefaultResponseUsed(method, error))
        return outcome

    @staticmethod
    def queues(method: str, config: MethodConfig, error: BaseException) -> bool:
        """Whether failback queues this failure; asked before requests are gathered for it.

        May run a predicate of the user's; if that raises, the answer is no.
        """
        if config.queued is None:
            return False
        try:
            return config.queued(error, attempt=1, elapsed_ns=0)  # as `FailbackInvoker.park` asks
        except Exception as raised:  # noqa: BLE001 - a user's predicate
            emit(CallbackFailed(method, "failback", raised))
            return False

    def watch(self, method: str, config: MethodConfig) -> Timeout | None:
        """Emit `CallSlow` if a call that begins now runs for too long; cancel that at its end.

        If the timer takes no more timeouts (stopped, full), the call goes on without that.
        """
        slow_ns = config.slow_ns
        if slow_ns == NEVER:
            return None
        key = method, slow_ns
        known = self._slow.get(key)
        if known is None:
            if len(self._slow) >= MOST_METHODS:
                self._slow.clear()
            event = CallSlow(method, "client", to_seconds(slow_ns))
            # The same float each time: the timer has a shorter way for a delay that it knows.
            known = self._slow[key] = partial(_report_slow, event), event.elapsed_s
        return self.wake(*known, "slow_call_threshold")

    def wake(self, task: Callable[[Timeout], object], delay_s: float, what: str) -> Timeout | None:
        """Run `task` later; None (and an event that names it) if the timer takes no more."""
        try:
            timer = self._timer
            return (shared_timer() if timer is None else timer).new_timeout(task, delay_s)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            emit(ExecutorRejected(type(self.timer).__name__, what, error))
            return None

    def note_bare(self, method: str) -> None:
        """Emit, once for each method, that no policy but the deadline can hold for it."""
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
        """Emit that a stream sent nothing for too long, and give the details of its status."""
        silent_s = to_seconds(config.message_timeout_ns)
        emit(StreamStalled(method, silent_s))
        return f"no message for {silent_s:g} s (message_timeout)"


def _report_slow(event: CallSlow, _: Timeout) -> None:
    """Emit an event on a worker: sinks and log handlers of users may block the timer's thread."""
    EXECUTOR.submit(("slow", event.method), partial(emit, event))


def _left_ns() -> int | None:
    """What is left of the deadline of the call being served; None if there is none."""
    deadline_ns = DEADLINE.get()
    return None if deadline_ns is None else deadline_ns - time.monotonic_ns()


def seconds_left(deadline_ns: int, now_ns: int) -> float | None:
    """What to give gRPC as `timeout=`; None for no limit, never negative."""
    return None if deadline_ns == NEVER else max(0, deadline_ns - now_ns) / 1e9


def answered_by(outcome: Outcome, code: str, details: str | None) -> tuple[str, str]:
    """What answers in the server's place, and the details of the status that says so."""
    if outcome is Outcome.ENQUEUE:
        return "failback", f"queued by failback after {code}: {details}"
    return "default-response", f"default response after {code}: {details}"


def resend_timeout(own: Duration | None, config: MethodConfig) -> float:
    """Seconds that one delivery may take: what the caller gave, else what the policy says.

    What the caller gave may have been no limit, or none that leaves any time.
    """
    for limit_ns in (NEVER if own is None else to_ns(own), config.timeout_ns):
        if 0 < limit_ns < NEVER:
            return to_seconds(limit_ns)
    return RESEND_TIMEOUT_S


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
    except Exception:  # noqa: BLE001 - a request that can't be copied must not be changed
        return request
