"""The configuration of methods, and the state that all calls of one client share.

The clients of both worlds use it in this order::

    config = state.current_config(method)              # policies of the method, and call_options
    now, deadline, attempt = state.begin(config, ...)  # then make the first attempt
    attempts = Attempts(method, config, ...)           # only if it failed, or if it is hedged
    state.enqueue(...)                                 # if failback is to deliver the call

Nothing in this module waits or does I/O. Any thread may use it.
"""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.admission.targets import AdmissionSettings, Breakers
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, TimerError
from rpcwheel.events import (
    CallbackFailed,
    CallSlow,
    ExecutorRejected,
    StreamStalled,
    emit,
)
from rpcwheel.rpc import DEADLINE
from rpcwheel.telemetry import components
from rpcwheel.timer import shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of

from .idempotency import checked_order_key, key_of, new_key
from .matching import Matcher
from .policy import (
    CallPolicy,
    DeadlinePolicy,
    DefaultResponsePolicy,
    MethodPolicy,
    RetryThrottling,
    checked_calls,
)
from .retry import (
    Budget,
    BudgetKey,
    HedgingConfig,
    RetryBudget,
    RetryConfig,
    RetryThrottle,
    attempt_deadline_ns,
    budget_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import timedelta
    from typing import Never, Unpack

    from rpcwheel._grpc.calls import Details
    from rpcwheel.admission.method import MethodAdmission
    from rpcwheel.admission.targets import TargetAdmission
    from rpcwheel.durations import Duration
    from rpcwheel.rpc import Kind
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .failback_policy import FailbackPolicy
    from .keeper import ChannelKeeper, KeptDelivery
    from .policy import MethodSettings

ANSWER_KEY: Final = "rpcwheel-answer"
"""The key in the trailing metadata of a response that is not from a server; see
`response_source`."""

TIMER_CHECK_INTERVAL_S: Final = 1.0
"""How often a thread that waits for a timer checks whether the timer was stopped."""

DEFAULT_BUFFER_BYTES: Final = 1 << 20
"""The size of the buffer of a request stream for failback, without a retry policy."""

MAX_METHODS: Final = 4096
"""Methods whose configuration is cached. A proxy may call any name that its clients send."""

MAX_OPTION_BUDGETS: Final = 256
"""Retry budgets of `call_options` that a client keeps. A program may compute ever new values."""

READ_TIMEOUT_S: Final = 1.0
"""How long to read the rest of a request stream before failback queues the call."""

DELIVERY_TIMEOUT_S: Final = 60.0
"""The timeout of one delivery if neither the caller nor the policy sets one."""


@dataclass(frozen=True, slots=True)
class FailedRpc:
    """A gRPC call whose first attempt has failed, to be stored in a journal."""

    method: str
    kind: Kind
    requests: tuple[bytes, ...] = field(repr=False)
    metadata: tuple[tuple[str, str | bytes], ...] = field(repr=False)
    """Without the idempotency key, and without credentials."""
    timeout_s: float
    """The timeout of each delivery."""
    wait_for_ready: bool | None
    target: str
    key: str
    """The idempotency key, which its first attempt had too."""
    order_key: str | None


class FailbackQueue(Protocol):
    """Delivers failed calls in the background; a `FailbackInvoker` of the same world."""

    def enqueue(self, error: Any, function: Callable[..., object], /, *requests: Any) -> str | None:
        """Queue a failed call; None if the policy does not apply to its failure."""

    def enqueue_rpc(self, error: Any, failed: FailedRpc) -> Any:
        """Store a failed call in the journal; returns the same, with `grpc.aio` an awaitable."""

    def add_route(self, target: str, make: Any, is_open: Callable[[], bool]) -> Any:
        """Deliver the calls in the journal that are stored for a target."""


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
        queues = failback is not None and failback.limit != 1
        retried = retry is not None and retry.max_attempts > 1
        hedged = hedging is not None and hedging.max_attempts > 1 and policy.idempotent
        return cls(
            timeout_ns=_ns(deadline.timeout),
            message_timeout_ns=_ns(deadline.message_timeout),
            slow_ns=_ns(deadline.slow_call_threshold),
            propagate_deadline=deadline.propagate_deadline,
            wait_for_ready=policy.wait_for_ready,
            criticality=None if policy.criticality is None else policy.criticality.label,
            retry=(
                RetryConfig.from_policy(retry, idempotent=policy.idempotent)
                if retry and retried
                else None
            ),
            hedging=HedgingConfig.from_policy(hedging) if hedging and hedged else None,
            default_response=default,
            failback=failback,
            durable=failback is not None and failback.journal is not None and queues,
            queue=queue,
            default_matcher=None if default is None else Matcher(default.on),
            failback_matcher=Matcher(failback.retry_on) if failback and queues else None,
            admission=admission_settings(policy),
        )

    @property
    def budget(self) -> BudgetKey | None:
        """The key of the budget for further attempts; None for no limit."""
        limited = self.retry or self.hedging
        return None if limited is None else limited.budget

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

    __slots__ = ("_configs", "_policy")

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

    __slots__ = ("_configs", "policy")

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
        TypeError, ConfigurationError: An option is unknown, of a wrong type or out of range.
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
    outer = CALL_OPTIONS.get()
    token = CALL_OPTIONS.set(CallOptions(policy if outer is None else policy.over(outer.policy)))
    try:
        yield
    finally:
        CALL_OPTIONS.reset(token)


def messages_of(default: Any) -> Sequence[Any]:
    """Return the messages of a response stream from a default response.

    None is an empty stream. A list or tuple has the messages. Any other value is one message.
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


def admission_settings(policy: MethodPolicy) -> AdmissionSettings | None:
    """Return the policies that decide whether an attempt is sent; None if there are none."""
    settings = AdmissionSettings(*(getattr(policy, name) for name in AdmissionSettings._fields))
    return None if settings == AdmissionSettings() else settings


class ChannelKey:
    """A key for the channel of a client. Queued calls hold it in place of the channel."""


class ClientState:
    """The state that the calls of one client share. Any thread may use it."""

    def __init__(
        self,
        policy: CallPolicy,
        *,
        timer: Timer | None,
        queue_of: Callable[[FailbackPolicy, str], FailbackQueue],
        breakers: Breakers | None = None,
    ) -> None:
        """Make the state of a client.

        Args:
            policy: The policies of all methods.
            timer: Any rpcwheel timer; None for `shared_timer()`, which is made when it is needed.
            queue_of: Returns the queue of a failback policy. The second argument is the name of the
                queue if the policy has none.
            breakers: Those of the kit; None for new ones.

        Raises:
            TypeError: `policy` is not a `CallPolicy`, or `timer` is not a timer.
        """
        self.policy = policy
        self.configs = MethodConfigs(checked_calls(policy))
        self.queue_of = queue_of
        # Starts the traces too: the timer that the first retry makes would start them too late.
        self.counts = components.call_counts()
        """Where calls and attempts are counted; None if metrics are off."""
        self.queues_calls = False
        """Whether failback may queue calls, without `call_options`."""
        for pattern, settings in (("*", policy), *policy.methods.items()):
            if settings.failback is not None:
                self.queues_calls = True
                components.expect_queue(settings.failback.name or pattern)
        self.journaled = tuple(
            (settings.failback, pattern)
            for pattern, settings in (("*", policy), *policy.methods.items())
            if settings.failback is not None and settings.failback.journal is not None
        )
        """The failback policies with a journal, each with its pattern."""
        self._breakers = breakers
        self.loop: Any = None
        """The event loop of the calls, if they are of grpc.aio and have an `admission`."""
        self.admission: TargetAdmission | None = None
        """Decides whether attempts are sent; None if no method has policies for that."""
        self.target: str | None = None
        """The target of the channel, for calls that are stored."""
        self.key = ChannelKey()
        """The key under which failback paces the calls that it queues in memory."""
        self.routes: object = None
        """Delivers stored calls through the channel, as long as this object exists."""
        self.keeper: ChannelKeeper | None = None
        """Counts the queued calls of the channel, if the kit has made it."""
        self.refuse: Callable[[], Never] | None = None
        """Raises the error of a call on a closed channel; None while the channel is open."""
        self._serializers: dict[str, Callable[[Any], bytes]] = {}
        """By method, if there is a journal."""
        self._raw_methods: set[str] = set()
        """Methods with a multicallable without a serializer."""
        self._timer = checked_timer(timer)
        self.now_ns = clock_of(timer)
        """The clock of the timer in use."""
        self._slow: dict[tuple[str, int], tuple[Callable[[Timeout], object], float]] = {}
        limited = [
            each
            for settings in (policy, *policy.methods.values())
            for each in (settings.retry, settings.hedging)
            if each is not None
        ]
        self._budgets: dict[BudgetKey, Budget] = {
            key: _budget(key) for key in map(budget_key, limited) if key is not None
        }
        self._option_budgets: dict[BudgetKey, Budget] = {}
        self._reported: set[str] = set()

    def begin_admission(self, target: str | None, *, is_shared: bool = False) -> None:
        """Make `admission`, if a method has policies for that.

        Args:
            target: The target of the channel; None if it is not known.
            is_shared: Whether channels of the kit to the same target share it.
        """
        layers = self.policy, *self.policy.methods.values()
        if any(admission_settings(settings) is not None for settings in layers):
            breakers = Breakers() if self._breakers is None else self._breakers
            self.admission = breakers.admission(target, self._timer, is_shared=is_shared)

    def admission_of(self, method: str, kind: Kind) -> MethodAdmission | None:
        """Return what decides whether attempts of a method are sent; None if all are."""
        if self.admission is None:
            return None
        settings = self.configs.config_for(method).admission
        if settings is None:
            return None
        return self.admission.method(method, settings, is_stream=kind.streams_responses)

    @cached_property
    def without_policies(self) -> ClientState:
        """The state of calls to which no policies apply, with the same timer."""
        return ClientState(CallPolicy(), timer=self._timer, queue_of=self.queue_of)

    @property
    def timer(self) -> Timer:
        """The timer in use."""
        return shared_timer() if self._timer is None else self._timer

    def current_config(self, method: str) -> MethodConfig:
        """Return the configuration of a method in this context, with its `call_options`."""
        options = CALL_OPTIONS.get()
        return (
            self.configs.config_for(method)
            if options is None
            else options.config(self.configs, method)
        )

    def begin(self, config: MethodConfig, own_ns: int | None) -> tuple[int, int, int]:
        """Begin a call. Creates no plan: most calls need only their first attempt.

        Args:
            config: The configuration of its method.
            own_ns: The timeout that the caller gave; None without one.

        Returns:
            The time now, the deadline of the call, and the deadline of its first attempt. If the
            deadline has passed, the first attempt must not be made.

        Raises:
            ValueError, grpc.aio.UsageError: The channel was closed.
        """
        if self.refuse is not None:
            self.refuse()
        now_ns = self.now_ns()
        deadline_ns = attempt_ns = config.deadline_ns(now_ns, own_ns, _left_ns())
        if (config.retry is not None or config.hedging is not None) and now_ns < deadline_ns:
            attempt_ns = attempt_deadline_ns(config.retry, now_ns, deadline_ns)
            budget = self.budget_of(config)
            if budget is not None:
                budget.call(now_ns)
        return now_ns, deadline_ns, attempt_ns

    def budget_of(self, config: MethodConfig) -> Budget | None:
        """Return the budget for further attempts of a method; None for no limit."""
        key = config.budget
        if key is None:
            return None
        budget = self._budgets.get(key) or self._option_budgets.get(key)
        if budget is None:
            if len(self._option_budgets) >= MAX_OPTION_BUDGETS:
                self._option_budgets.clear()
            budget = self._option_budgets.setdefault(key, _budget(key))
        return budget

    def enqueue(
        self,
        policy: FailbackPolicy,
        config: MethodConfig,
        error: BaseException,
        delivery: KeptDelivery,
        *requests: object,
    ) -> str | None:
        """Queue a failed call; see `FailbackQueue.enqueue`.

        The connections of the kit's channel are kept while the call is queued.
        """
        if self.keeper is not None and not delivery.keep(self.keeper):
            error.add_note(f"{delivery.label}: not queued by failback, as its channel was closed")
            return None
        outcome = None
        try:
            queue = self.queue_of(policy, config.queue)
            outcome = queue.enqueue(error, delivery, *requests)
        finally:
            if outcome != "queued":
                delivery.release_channel()
        return outcome

    def note_serializer(self, method: str, serialize: Callable[[Any], bytes] | None) -> None:
        """Remember the serializer of a multicallable, for calls that are stored."""
        if serialize is not None:
            self._serializers[method] = serialize
        elif len(self._raw_methods) < MAX_METHODS:
            self._raw_methods.add(method)

    def failed_rpc(
        self,
        policy: FailbackPolicy,
        kind: Kind,
        details: Details,
        requests: Iterable[Any],
    ) -> FailedRpc:
        """Serialize a failed call, to be stored.

        Args:
            policy: With a journal.
            kind: The kind of call.
            details: Of the call, with the timeout of its deliveries.
            requests: All its requests.

        Raises:
            ConfigurationError: The policy is that of `call_options`.
            Exception: A request cannot be serialized, or the user's `order_key` has raised.
        """
        if not any(policy is own for own, _ in self.journaled):
            raise ConfigurationError(
                "a policy with a journal has no effect in call_options(), because nothing would "
                "deliver its calls after a restart; give it to the client"
            )
        messages, method = list(requests), details.method
        serialize = self._serializers.get(method)
        serialized = tuple(
            message
            if serialize is None or (isinstance(message, bytes) and method in self._raw_methods)
            else serialize(message)
            for message in messages
        )
        order_key: Any = policy.order_key
        if callable(order_key):
            order_key = order_key(messages[0]) if messages else None
        elif order_key is not None:
            order_key = dict(details.metadata or ()).get(order_key)
        return FailedRpc(
            method,
            kind,
            serialized,
            queued_metadata(details.metadata, policy),
            DELIVERY_TIMEOUT_S if details.timeout is None else details.timeout,
            details.wait_for_ready,
            policy.target or self.target or "",
            key_of(details.metadata) or new_key(),
            checked_order_key(order_key),
        )

    def watch_slow_call(self, method: str, config: MethodConfig) -> Timeout | None:
        """Set a timeout that emits `CallSlow`; the caller cancels it at the end of the call.

        None if the method has no threshold, or the timer takes no timeout.
        """
        slow_ns = config.slow_ns
        if slow_ns == NEVER:
            return None
        key = method, slow_ns
        cached = self._slow.get(key)
        if cached is None:
            if len(self._slow) >= MAX_METHODS:
                self._slow.clear()
            event = CallSlow(method, "client", to_seconds(slow_ns))
            # The same float object each time: the timer is faster for a delay that it knows.
            cached = self._slow[key] = partial(_report_slow, event), event.elapsed_s
        return self.schedule(*cached, "slow_call_threshold")

    def schedule(
        self, task: Callable[[Timeout], object], delay_s: float, task_name: str
    ) -> Timeout | None:
        """Run a task on the timer's thread after a delay.

        If the timer takes no timeout (it is stopped or full), returns None and emits
        `ExecutorRejected`, in which `task_name` names the task.
        """
        try:
            timer = self._timer
            return (shared_timer() if timer is None else timer).new_timeout(task, delay_s)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            emit(ExecutorRejected(type(self.timer).__name__, task_name, error))
            return None

    def report_plain_iterator(self, method: str) -> None:
        """Emit, once for each method, that only the deadline applies to its calls."""
        if method in self._reported:
            return
        if len(self._reported) >= MAX_METHODS:
            self._reported.clear()
        self._reported.add(method)
        why = (
            "it returns an iterator in place of a call, so there is no retry, default response, "
            "failback or message_timeout"
        )
        emit(CallbackFailed(method, "inner interceptor", TypeError(why)))

    @staticmethod
    def report_stall(method: str, config: MethodConfig) -> str:
        """Emit that a stream has exceeded its message_timeout, and return the status details."""
        silent_s = to_seconds(config.message_timeout_ns)
        emit(StreamStalled(method, silent_s))
        return f"no message for {silent_s:g} s (message_timeout)"


def _report_slow(event: CallSlow, _: Timeout) -> None:
    """Emit an event on a worker: sinks and log handlers of users may block the timer's thread."""
    EXECUTOR.submit(("slow", event.method), partial(emit, event))


def _left_ns() -> int | None:
    """Return the time until the deadline of the call being served; None without a deadline."""
    deadline_ns = DEADLINE.get()
    return None if deadline_ns is None else deadline_ns - time.monotonic_ns()


def seconds_left(deadline_ns: int, now_ns: int) -> float | None:
    """Return the `timeout=` for gRPC until a deadline; None for no limit, never negative."""
    return None if deadline_ns == NEVER else max(0, deadline_ns - now_ns) / 1e9


def response_source(outcome: str | None, code: str, details: str | None) -> tuple[str, str]:
    """Return the value for `ANSWER_KEY` and the status details of a response of a policy.

    Args:
        outcome: What failback did with the call: "queued" or "dropped"; None if the response is
            that of a `DefaultResponsePolicy`.
        code: The name of the status code of the failed call.
        details: Its status details.
    """
    if outcome is None:
        return "default-response", f"default response after {code}: {details}"
    source = "failback" if outcome == "queued" else f"failback-{outcome}"
    return source, f"{outcome} by failback after {code}: {details}"


def delivery_timeout(own: Duration | None, config: MethodConfig) -> float:
    """Return the timeout of one delivery in seconds: the caller's, or else the policy's.

    A timeout of the caller that is infinite or has passed does not count.
    """
    for limit_ns in (NEVER if own is None else to_ns(own), config.timeout_ns):
        if 0 < limit_ns < NEVER:
            return to_seconds(limit_ns)
    return DELIVERY_TIMEOUT_S


def queued_metadata(
    metadata: Iterable[tuple[str, str | bytes]] | None, policy: FailbackPolicy
) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata that deliveries are sent with."""
    return tuple((key, value) for key, value in metadata or () if policy.keeps(key))


def queued_request(request: Any) -> Any:
    """Return a request for a failback queue, which stores protobuf messages as bytes itself."""
    return request if hasattr(request, "SerializeToString") else copy_of(request)


def copy_of(request: Any) -> Any:
    """Copy a request, because its caller may change it. One that can't be copied is returned."""
    try:
        return copy.deepcopy(request)
    except Exception:  # noqa: BLE001 - of a class of the user's
        return request
