"""The configuration of methods: their policies, and those of `call_options`, in nanoseconds.

Nothing in this module waits or does I/O. Any thread may use it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.admission.targets import AdmissionSettings
from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallSlow, emit

from .budget import BudgetKey, budget_key
from .matching import Matcher
from .policy import CallPolicy, DeadlinePolicy, DefaultResponsePolicy, MethodPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta
    from typing import Unpack

    from rpcwheel.rpc import AttemptResult
    from rpcwheel.timer import Timeout

    from .failback_policy import FailbackPolicy
    from .policy import HedgingPolicy, MethodSettings, RetryPolicy

DEFAULT_BUFFER_BYTES: Final = 1 << 20
"""The size of the buffer of a request stream for failback, without a retry policy."""

MAX_METHODS: Final = 4096
"""Methods whose configuration is cached. A proxy may call any name that its clients send."""


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """The retry settings of one method."""

    retry_on: frozenset[str]
    max_attempts: int
    backoff: Backoff
    attempt_timeout_ns: int
    """`NEVER` for no limit."""
    idempotent: bool
    max_pushback_ns: int
    """`NEVER` for no limit."""
    replay_buffer_bytes: int

    def retries_after(self, result: AttemptResult) -> bool:
        """Whether such a failure is retried: one of `retry_on`, or a refusal before the handler.

        If the method is not idempotent, the refusal must be proven.
        """
        if result.code in self.retry_on:
            return True
        return result.refused and (self.idempotent or result.is_proven)

    @classmethod
    def from_policy(cls, policy: RetryPolicy, *, idempotent: bool) -> RetryConfig:
        """Make the settings from the user's policy.

        A method that is not idempotent is not retried after a timeout, so its attempts have none of
        their own.
        If attempts have a timeout, an attempt that exceeds it is retried.
        """
        retry_on: frozenset[str] = policy.retry_on
        limit = policy.attempt_timeout if idempotent else None
        return cls(
            retry_on=retry_on if limit is None else retry_on | {"DEADLINE_EXCEEDED"},
            max_attempts=policy.max_attempts,
            backoff=Backoff(policy.backoff),
            attempt_timeout_ns=_ns(limit),
            idempotent=idempotent,
            max_pushback_ns=_ns(policy.max_pushback),
            replay_buffer_bytes=policy.replay_buffer_bytes,
        )


@dataclass(frozen=True, slots=True)
class HedgingConfig:
    """A hedging policy as it applies to one idempotent method."""

    delay_ns: int
    max_attempts: int
    non_fatal: frozenset[str]
    max_pushback_ns: int = NEVER

    @classmethod
    def from_policy(cls, policy: HedgingPolicy) -> HedgingConfig:
        """Make the settings from the user's policy."""
        return cls(
            delay_ns=to_ns(policy.delay),
            max_attempts=policy.max_attempts,
            non_fatal=policy.non_fatal_codes,
            max_pushback_ns=_ns(policy.max_pushback),
        )


def attempt_deadline_ns(config: RetryConfig | None, at_ns: int, deadline_ns: int) -> int:
    """Return the deadline of an attempt that is made at `at_ns`, within that of the call."""
    return deadline_ns if config is None else min(deadline_ns, at_ns + config.attempt_timeout_ns)


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """The settings of one method. Times are nanoseconds, `NEVER` if not set."""

    timeout_ns: int = NEVER
    message_timeout_ns: int = NEVER
    slow_ns: int = NEVER
    propagate_deadline: bool = True
    wait_for_ready: bool | None = None
    """The value if the caller sets none; None for gRPC's default."""
    criticality: str | None = None
    """The label of the criticality; None for that of the call being served."""
    retry: RetryConfig | None = None
    hedging: HedgingConfig | None = None
    """Applies to calls with one request and one response."""
    budget: BudgetKey | None = None
    """The key of the budget for further attempts; None for no limit."""
    default_response: DefaultResponsePolicy | None = None
    failback: FailbackPolicy | None = None
    durable: bool = False
    """Whether failed calls are stored in a journal; then each call has an idempotency key."""
    queue: str = "*"
    """The name of the failback queue if its policy has none: the pattern that has the policy."""
    default_matcher: Matcher | None = None
    """Matches the failures of `default_response.on`."""
    failback_matcher: Matcher | None = None
    """Matches the failures of `failback.retry_on`; None if no failure is queued."""
    admission: AdmissionSettings | None = None
    """The policies that decide whether an attempt is sent; None if there are none."""

    @classmethod
    def from_policy(cls, policy: MethodPolicy, queue: str = "*") -> MethodConfig:
        """Make the settings from the policy of the method."""
        retry, hedging, default = policy.retry, policy.hedging, policy.default_response
        deadline = policy.timeout or DeadlinePolicy()
        failback = policy.failback
        may_queue = failback is not None and failback.limit != 1
        may_retry = retry is not None and retry.max_attempts > 1
        may_hedge = hedging is not None and hedging.max_attempts > 1 and policy.idempotent
        limited = retry if may_retry else hedging if may_hedge else None
        return cls(
            timeout_ns=_ns(deadline.timeout),
            message_timeout_ns=_ns(deadline.message_timeout),
            slow_ns=_ns(deadline.slow_call_threshold),
            propagate_deadline=deadline.propagate_deadline,
            wait_for_ready=policy.wait_for_ready,
            criticality=None if policy.criticality is None else policy.criticality.label,
            retry=(
                RetryConfig.from_policy(retry, idempotent=policy.idempotent)
                if retry and may_retry
                else None
            ),
            hedging=HedgingConfig.from_policy(hedging) if hedging and may_hedge else None,
            budget=None if limited is None else budget_key(limited),
            default_response=default,
            failback=failback,
            durable=failback is not None and failback.journal is not None and may_queue,
            queue=queue,
            default_matcher=None if default is None else Matcher(default.on),
            failback_matcher=Matcher(failback.retry_on) if failback and may_queue else None,
            admission=admission_settings(policy),
        )

    @property
    def keeps_requests(self) -> bool:
        """Whether requests are kept because a retry or failback may send them again."""
        return self.failback is not None or self.retry is not None

    @property
    def sends_nonces(self) -> bool:
        """Whether a retry needs the proof that a server has refused an attempt."""
        return self.retry is not None and not self.retry.idempotent

    @property
    def handles_failures(self) -> bool:
        """Whether a retry, a default response or failback may follow a failure."""
        return not (self.retry is None and self.failback is None and self.default_response is None)

    @property
    def buffer_bytes(self) -> int | None:
        """The size of the buffer of a request stream; None if requests are not kept."""
        if not self.keeps_requests:
            return None
        return DEFAULT_BUFFER_BYTES if self.retry is None else self.retry.replay_buffer_bytes

    @property
    def has_message_timeout(self) -> bool:
        """Whether the time between two messages of a response stream is limited."""
        return self.message_timeout_ns != NEVER

    def deadline_ns(self, now_ns: int, own_ns: int | None, left_ns: int | None) -> int:
        """Return the deadline of a call that begins now.

        Args:
            now_ns: The time now.
            own_ns: The timeout that the caller gave; None without one.
            left_ns: The time until the deadline of the call being served; None without one.
        """
        least_ns = self.timeout_ns
        if own_ns is not None and own_ns < least_ns:
            least_ns = own_ns
        if left_ns is not None and left_ns < least_ns and self.propagate_deadline:
            least_ns = left_ns
        return min(now_ns + least_ns, NEVER)


class MethodConfigs:
    """The configuration of each method, made at its first call. Any thread may use it."""

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy
        self._configs: dict[str, MethodConfig] = {}

    def config_for(self, method: str) -> MethodConfig:
        """Return the configuration of a method; `method` is its full name, `"/shop.Orders/Get"`."""
        config = self._configs.get(method)
        if config is None:
            if len(self._configs) >= MAX_METHODS:
                self._configs.clear()
            config = self._configs[method] = self._make(self._policy.policy_for(method))
        return config

    def overridden(self, method: str, options: MethodPolicy) -> MethodConfig:
        """Make the configuration of a method with other settings in place of its own."""
        return self._make(options.over(self._policy.policy_for(method)))

    def _make(self, policy: MethodPolicy) -> MethodConfig:
        return MethodConfig.from_policy(policy, self._pattern_of(policy.failback))

    def _pattern_of(self, failback: FailbackPolicy | None) -> str:
        """Return the first pattern that has this policy; `"*"` for the policy of all methods."""
        if failback is self._policy.failback:
            return "*"
        methods = self._policy.methods.items()
        return next((pattern for pattern, policy in methods if policy.failback is failback), "*")


class CallOptions:
    """The settings of a `call_options` block."""

    def __init__(self, policy: MethodPolicy) -> None:
        self.policy = policy
        self._configs: dict[tuple[int, str], tuple[MethodConfigs, MethodConfig]] = {}

    def config(self, configs: MethodConfigs, method: str) -> MethodConfig:
        """Return the configuration of a method with these options."""
        key = id(configs), method  # the value keeps `configs` alive, so its id is not reused
        cached = self._configs.get(key)
        if cached is None:
            if len(self._configs) >= MAX_METHODS:
                self._configs.clear()
            cached = self._configs[key] = configs, configs.overridden(method, self.policy)
        return cached[1]


CALL_OPTIONS: Final[ContextVar[CallOptions | None]] = ContextVar("rpcwheel_options", default=None)
"""The innermost `call_options` block around the caller; None outside of such blocks."""


@contextmanager
def call_options(**options: Unpack[MethodSettings]) -> Iterator[None]:
    """Set other policies for the calls that begin in a `with` block, sync and aio.

    Applies to calls through channels and interceptors of rpcwheel. An argument of the call itself
    (`timeout=`) still counts. Inside another block, options that are not given are those of the
    outer block. The options are stored in a context variable: a task that is created in the block
    has them, a thread only if it runs in a copy of the context.

    Example::

        with rpcwheel.call_options(timeout=5.0, retry=None):
            report = orders.Report(request)

    Args:
        **options: The settings of `MethodPolicy`, such as `timeout`, `retry`, `hedging`,
            `default_response`, `failback`, `idempotent` and `criticality`. None switches a policy
            off. Each `FailbackPolicy` object has its own queue, so create it once, outside of the
            block.

    Raises:
        TypeError, ConfigurationError: An option is unknown, of a wrong type or out of range, or
            has no effect on single calls.
    """
    if "limit" in options:
        raise ConfigurationError(
            "limit is a setting of servers, and has no effect on calls; give it to the kit of the "
            "server"
        )
    if shared := [name for name in AdmissionSettings._fields if name in options]:
        raise ConfigurationError(
            f"{', '.join(shared)}: the calls of a channel share its state, so it has no effect on "
            "single calls; give it to the kit or the CallPolicy of the channel"
        )
    policy = MethodPolicy(**options)
    if policy.failback is not None and policy.failback.journal is not None:
        raise ConfigurationError(
            "a policy with a journal has no effect in call_options(), because nothing would "
            "deliver its calls after a restart; give it to the client"
        )
    outer = CALL_OPTIONS.get()
    token = CALL_OPTIONS.set(CallOptions(policy if outer is None else policy.over(outer.policy)))
    try:
        yield
    finally:
        CALL_OPTIONS.reset(token)


def _ns(value: float | timedelta | None) -> int:
    return NEVER if value is None else to_ns(value)


def admission_settings(policy: MethodPolicy) -> AdmissionSettings | None:
    """Return the policies that decide whether an attempt is sent; None if there are none."""
    settings = AdmissionSettings(*(getattr(policy, name) for name in AdmissionSettings._fields))
    return None if settings == AdmissionSettings() else settings


def slow_call_task(
    method: str, side: str, slow_ns: int
) -> tuple[Callable[[Timeout], object], float]:
    """Return the task and the delay of the timeouts that emit `CallSlow`, for all calls."""
    event = CallSlow(method, side, to_seconds(slow_ns))
    # The same float object each time: the timer is faster for a delay that it knows.
    return partial(_report_slow, event), event.elapsed_s


def _report_slow(event: CallSlow, _: Timeout) -> None:
    # On a worker, because sinks and log handlers of users may block.
    EXECUTOR.submit(("slow", event.method), partial(emit, event))
