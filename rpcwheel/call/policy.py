"""The settings of calls.

`MethodPolicy` has the settings of some methods, `CallPolicy` those of all methods and, by pattern,
those of some. `CallPolicy.policy_for` returns the effective settings of one method.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NoReturn, Self, TypedDict

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from rpcwheel.admission.policy import (
    BreakerPolicy,
    ConcurrencyPolicy,
    OwnBreaker,
    OwnConcurrency,
    OwnThrottle,
    ThrottlePolicy,
)
from rpcwheel.backoff import DEFAULT_JITTER, JitteredWait
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import ConfigurationError
from rpcwheel.limit.policy import ADAPTIVE, Limit, LimitPolicy, OwnCriticality
from rpcwheel.limit.rate import Rate, RatePolicy
from rpcwheel.methods import MethodPattern, PatternIndex
from rpcwheel.policy import Delay, Number, Policy, Seconds, Wait, checked, or_short
from rpcwheel.rpc import CODES_SCHEMA, checked_codes

from .failback_policy import FailbackPolicy
from .matching import Matcher, accepted_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Unpack

    from rpcwheel.rpc import Criticality

RETRY_ON_ADVICE: Final = (
    'name the status codes to retry after, such as retry_on={"UNAVAILABLE"}; only calls of methods '
    "that are marked idempotent are retried"
)

PARTIAL_LIMITS: Final = ("message_timeout", "slow_call_threshold")
"""Limits that have an effect only if they are shorter than the timeout of the whole call."""


class DeadlinePolicy(Policy):
    """Limits on the duration of a call.

    The deadline of a call is the earliest of the `timeout=` that its caller gives, `timeout` here,
    and, with `propagate_deadline`, the deadline of the call that is being served. All attempts of
    the call share it.
    """

    short: ClassVar[str | None] = "timeout"

    timeout: Seconds | None = None
    """Seconds for the whole call, including all attempts. It also ends streams. None: no limit."""

    message_timeout: Seconds | None = None
    """Maximum seconds to wait for the next message of a response stream. After that, the stream is
    canceled and ends with DEADLINE_EXCEEDED. gRPC has no such limit. None: no limit."""

    slow_call_threshold: Seconds | None = None
    """If a call is still running after this many seconds, the event `CallSlow` is emitted. None:
    never."""

    propagate_deadline: StrictBool = True
    """Whether calls made inside a handler inherit the deadline of the call that the handler
    serves."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        for problem in self.ineffective_limits(self.timeout):
            raise ConfigurationError(problem)
        return self

    @property
    def has_limits(self) -> bool:
        """Whether it has limits within a call."""
        return any(getattr(self, name) is not None for name in PARTIAL_LIMITS)

    def ineffective_limits(self, timeout: float | timedelta | None) -> Iterator[str]:
        """Describe each limit that has no effect, because calls end after `timeout` seconds."""
        for name in PARTIAL_LIMITS:
            if reaches(getattr(self, name), timeout):
                yield (
                    f"{name} ({getattr(self, name)}) would never be reached, because the whole "
                    f"call ends after timeout ({timeout}); give less, or leave it out"
                )

    def over(self, general: DeadlinePolicy | None) -> DeadlinePolicy:
        """Return this policy, with the settings that it does not set taken from `general`.

        Never raises: a limit that has no effect within the resulting timeout is left out.
        """
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        if general is not None:
            base = {name: getattr(general, name) for name in general.model_fields_set}
            settings = base | settings
        for name in PARTIAL_LIMITS:
            if reaches(settings.get(name), settings.get("timeout")):
                settings[name] = None
        return DeadlinePolicy(**settings)


def reaches(limit: float | timedelta | None, timeout: float | timedelta | None) -> bool:
    """Whether a limit within a call is at least as long as the timeout of the whole call."""
    return limit is not None and timeout is not None and to_ns(limit) >= to_ns(timeout)


class RetryThrottling(Policy):
    """gRPC's limit for retries (gRFC A6): a token bucket for each channel.

    The bucket starts full. A failure that may be retried removes one token, a success adds
    `token_ratio`. Calls are sent again only while the bucket is more than half full.
    """

    max_tokens: Annotated[StrictInt, Field(ge=1, le=1000)]
    """Size of the token bucket, from 1 to 1000."""

    token_ratio: Annotated[Number, Field(ge=0.001, allow_inf_nan=False)]
    """Tokens that a success adds. Decimal places after the third are ignored."""


def _budget(value: object) -> object:
    if value is None or isinstance(value, RetryThrottling):
        return value
    if isinstance(value, dict):
        return checked(lambda table: RetryThrottling(**table), value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return checked(_refuse_budget, value)
    if not 0.0 <= value <= 1.0:
        raise ConfigurationError(
            f"it must be a share from 0 to 1, or a RetryThrottling, not {value!r}"
        )
    return value


def _refuse_budget(value: object) -> NoReturn:
    raise TypeError(f"it must be a share from 0 to 1, a RetryThrottling, or None, not {value!r}")


Share = Annotated[float, Field(ge=0, le=1)]
BudgetSetting = Annotated[Share | RetryThrottling | None, BeforeValidator(_budget)]
"""The limit of how many calls of a channel are sent again."""


Codes = Annotated[Any, WithJsonSchema(CODES_SCHEMA)]
CodesOrNone = Annotated[
    Any, WithJsonSchema({"anyOf": [*CODES_SCHEMA["anyOf"], {"type": "array", "maxItems": 0}]})
]


class RetryPolicy(Policy):
    """Settings for retries (Dubbo's failover): of which failed calls, and the wait before each.

    Only methods marked `idempotent` are retried: a server may have executed a call that failed,
    whatever its status is. The exception is a call that a server of rpcwheel has provably refused
    before its handler, because it has too many: it is retried whatever the method and `retry_on`
    are. A call is retried only before its deadline, and only while no response message was handed
    to the caller.

    To continue over the restart of a server, set `max_attempts=6`, and let gRPC reconnect sooner
    than by default (`grpc.initial_reconnect_backoff_ms`): until it has reconnected, attempts fail
    without being sent.
    """

    retry_on: Codes = Field(description=RETRY_ON_ADVICE)
    """Status codes, as names or `grpc.StatusCode`: one, or a set, tuple or list of them."""

    max_attempts: Annotated[StrictInt, Field(ge=1)] = 3
    """Maximum number of attempts of a call, including the first. 1: no retries."""

    backoff: Wait = JitteredWait(initial=0.1, max=2.0)
    """The wait before each retry: seconds, a `timedelta`, a tenacity `wait_*` object, or a table
    such as `{initial = 0.1, max = 2.0}`, which is the default: up to 0.1 s, then 0.2 s, 0.4 s and
    so on, and never more than 2 s. Half of each wait is random, so that calls that failed together
    are not retried together; a `wait_fixed(5)` of tenacity is exact. If the server sends
    `grpc-retry-pushback-ms` (gRFC A6), that time is used instead, up to `max_pushback`."""

    max_pushback: Seconds | None = 300.0
    """Maximum seconds that a server may ask for with `grpc-retry-pushback-ms`. If it asks for more,
    the call fails without another retry (`RetryStopped`). None: no limit."""

    attempt_timeout: Seconds | None = None
    """Maximum seconds for one attempt. An attempt that takes longer has failed, and is retried like
    a failure with a code in `retry_on`. It has no effect on methods that are not idempotent. None:
    an attempt may take until the call's deadline."""

    retry_budget: BudgetSetting = 0.2
    """Maximum number of retries on a channel in 10 s, as a share of the calls in this time, from 0
    to 1. Retries do not count as calls. So retries do not overload a server that is failing (the
    figure is Finagle's). `min_retries` are always allowed. Or a `RetryThrottling`, gRPC's rule.
    None: no limit."""

    min_retries: Annotated[StrictInt, Field(ge=0)] = 10
    """Number of retries on a channel in 10 s that are allowed even if they exceed the share in
    `retry_budget`."""

    replay_buffer_bytes: Annotated[StrictInt, Field(ge=0)] = 1 << 20
    """Maximum bytes of a request stream that are kept for a retry, for each call. A call whose
    stream is longer is not retried."""

    @field_validator("retry_on", mode="after")
    @classmethod
    def _check_retry_on(cls, value: object) -> frozenset[str]:
        codes = _codes(value)
        if not codes:
            raise ConfigurationError(f"it is empty; {RETRY_ON_ADVICE}")
        return codes


def _codes(value: object) -> frozenset[str]:
    return checked(checked_codes, value)


class HedgingPolicy(Policy):
    """Send a unary call again before its first attempt has failed (gRFC A6; Dubbo's forking).

    Every `delay` seconds another attempt is sent, until one succeeds or `max_attempts` are sent.
    The caller gets the first success, and the other attempts are canceled. So a server that is slow
    delays a call by `delay` only.

    Only methods marked `idempotent`, with one request and one response, are hedged. All attempts
    share the call's deadline. If the server says how long to wait (`grpc-retry-pushback-ms`), the
    next attempt is sent after that time; if the server wants no more attempts, none is sent.
    """

    short: ClassVar[str | None] = "delay"

    delay: Delay
    """Seconds between two attempts, or a `timedelta`. 0: all attempts are sent in parallel. With
    the 95th percentile of the method's latency, about one call in 20 is sent twice."""

    max_attempts: Annotated[StrictInt, Field(ge=1)] = 2
    """Maximum number of attempts of a call, including the first."""

    non_fatal_codes: CodesOrNone = frozenset({"UNAVAILABLE"})
    """Status codes, as names or `grpc.StatusCode`: one, or a set, tuple or list of them. If an
    attempt fails with one of them, the next attempt is sent immediately. If it fails with another
    code, the call fails and the other attempts are canceled."""

    max_pushback: Seconds | None = 300.0
    """Maximum seconds that a server may ask for with `grpc-retry-pushback-ms`. If it asks for more,
    no more attempts are sent. None: no limit."""

    retry_budget: BudgetSetting = 0.2
    """Maximum number of additional attempts on a channel in 10 s, as a share of the calls in this
    time, from 0 to 1. `min_retries` are always allowed. Or a `RetryThrottling`, gRPC's rule. None:
    no limit."""

    min_retries: Annotated[StrictInt, Field(ge=0)] = 10
    """Number of additional attempts on a channel in 10 s that are allowed even if they exceed the
    share in `retry_budget`."""

    @field_validator("non_fatal_codes", mode="after")
    @classmethod
    def _check_non_fatal_codes(cls, codes: object) -> frozenset[str]:
        return _codes(codes)


class DefaultResponsePolicy(Policy):
    """A default response for failed calls, which are logged (Dubbo's failsafe)."""

    on: Codes = Field(description=accepted_values("on"))
    """The failures that are replaced by the default response: status codes; in code also exception
    types, functions that take the exception and return a bool, and tenacity's `retry_if_*`
    objects; one of these, or a set, tuple or list."""

    default: Any = None
    """The response that the caller gets: this object, not a copy. For a response stream, None means
    an empty stream, a list or tuple contains the messages, and any other object is the only
    message."""

    @field_validator("on")
    @classmethod
    def _check_on(cls, on: object) -> object:
        checked(partial(Matcher, setting="on"), on)
        return on


REPLACED: Final = {
    "retry": ("hedging",),
    "hedging": ("retry",),
    "default_response": ("failback",),
    "failback": ("default_response", "retry", "hedging"),  # failback answers at once
}
"""Settings of a more general policy that a setting of a method replaces."""


if TYPE_CHECKING:

    class MethodSettings(TypedDict, total=False):
        """The arguments of `MethodPolicy(...)`; their types are wider than those of the fields."""

        timeout: float | timedelta | DeadlinePolicy | None
        retry: RetryPolicy | None
        hedging: float | timedelta | HedgingPolicy | None
        default_response: DefaultResponsePolicy | None
        failback: FailbackPolicy | None
        idempotent: bool
        wait_for_ready: bool | None
        criticality: Criticality | str | None
        limit: str | int | LimitPolicy | None
        throttle: float | ThrottlePolicy | None
        breaker: float | BreakerPolicy | None
        concurrency: str | int | ConcurrencyPolicy | None
        rate: float | RatePolicy | None

    class CallSettings(MethodSettings, total=False):
        """The arguments of `CallPolicy(...)`."""

        methods: Mapping[str, MethodPolicy]


class MethodPolicy(Policy):
    """The settings of some methods. Those that are not set are inherited.

    They come from a more general policy. None turns off an inherited setting.
    """

    timeout: Annotated[DeadlinePolicy | None, or_short(DeadlinePolicy)] = None
    """The maximum duration of each call: seconds, a `timedelta`, or a `DeadlinePolicy`, whose
    settings are inherited one by one. The `timeout=` of a single call can shorten it, not extend
    it. An inherited limit that is not shorter than the timeout is left out."""

    retry: RetryPolicy | None = None
    """Retry failed calls of `idempotent` methods within their deadline. Replaces an inherited
    `retry` as a whole, and an inherited `hedging`."""

    hedging: Annotated[HedgingPolicy | None, or_short(HedgingPolicy)] = None
    """A `HedgingPolicy`, or its `delay` as seconds or a `timedelta`: if a call of an `idempotent`
    method is slow, send it again without waiting for its failure. Replaces an inherited
    `retry`."""

    default_response: DefaultResponsePolicy | None = None
    """If a call has failed after all its attempts, log the failure and return a default response.
    Replaces an inherited `failback`."""

    failback: FailbackPolicy | None = None
    """If a call has failed, return a default response, and retry the call in the background.
    Replaces an inherited `default_response`, `retry` and `hedging`, so that the caller gets the
    default response after the first attempt. To retry first, set `retry` too."""

    idempotent: StrictBool = False
    """Whether a server may execute a call twice without harm. Only calls of `idempotent` methods
    are retried and hedged; others are retried if a server has provably refused them. Failback
    ignores this setting: it may execute a call of any method more than once."""

    wait_for_ready: StrictBool | None = None
    """The default of gRPC's argument `wait_for_ready`. True: a call waits for a connection until
    its deadline. None: gRPC's default, a call fails immediately if the channel cannot connect."""

    criticality: OwnCriticality | None = None
    """How much a call matters if its server has to refuse some: a `Criticality`, or its name such
    as "sheddable". It is sent as the metadata `rpcwheel-criticality`, unless the caller's own
    metadata has that. None: that of the call being served, if it has one."""

    limit: Limit = None
    """On a server: `"adaptive"`, a number, or a `LimitPolicy`: how many calls it works on at the
    same time; others wait, and are refused if it is overloaded. For some methods: a number or a
    rate for each of them, in addition to the limit of the server; None: they are never limited."""

    throttle: OwnThrottle = None
    """A `ThrottlePolicy`, or its `multiplier`: while the server accepts too few calls, send only a
    part of them, and let the others fail at once."""

    breaker: OwnBreaker = None
    """A `BreakerPolicy`, or its `failure_rate`: send no calls for some time after too many have
    failed."""

    concurrency: OwnConcurrency = None
    """A `ConcurrencyPolicy`, or its `max_calls`: how many calls run at the same time."""

    rate: Rate = None
    """A `RatePolicy`, or its `rate`: how many calls are sent in each second."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[MethodSettings]) -> None: ...

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        if self.default_response is not None and self.failback is not None:
            raise ConfigurationError(
                "default_response and failback both answer a call that failed: default_response "
                "forgets the call, failback delivers it later; choose one"
            )
        if self.retry is not None and self.hedging is not None:
            raise ConfigurationError(
                "retry and hedging both send a call again: retry after it has failed, hedging "
                "before that; choose one"
            )
        return self

    def over(self, general: MethodPolicy) -> MethodPolicy:
        """Return this policy, with the settings that it does not set taken from `general`."""
        own, base = self._given(), general._given()
        if own.get("timeout") is not None:
            own["timeout"] = own["timeout"].over(base.get("timeout"))
        for name, replaced in REPLACED.items():
            if own.get(name) is not None:
                for other in replaced:
                    base.pop(other, None)
        return MethodPolicy(**base | own)

    def _given(self) -> dict[str, Any]:
        """The settings of a method that were given."""
        names = self.model_fields_set & set(MethodPolicy.model_fields)
        return {name: getattr(self, name) for name in names}


class FrozenDict(dict[str, MethodPolicy]):
    """A dict that cannot be changed. Its keys are patterns."""

    _index: PatternIndex | None = None

    def matching(self, method: str) -> list[str]:
        """Return the patterns that match a method, or a pattern; the most specific one last."""
        if self._index is None:
            self._index = PatternIndex(self)
        return self._index.matching(method)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a policy cannot be changed; make another one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]  # it cannot be changed
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class CallPolicy(MethodPolicy):
    """The settings of all calls, and others for the calls of some methods.

    Example::

        CallPolicy(
            timeout=2.0,
            retry=RetryPolicy(retry_on={"UNAVAILABLE"}),  # of the methods marked idempotent
            methods={
                "/shop.Orders/Get*": MethodPolicy(idempotent=True),
                "/shop.Audit/*": MethodPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE")),
            },
        )
    """

    methods: Annotated[dict[MethodPattern, MethodPolicy], AfterValidator(FrozenDict)] = Field(
        default_factory=FrozenDict
    )
    """Settings of some methods, by pattern: `"/shop.Orders/Get"`, `"/shop.Orders/*"`, `"*"`. If
    several patterns match a method, each setting is taken from the most specific one that sets it:
    the full method name first, then the pattern with the most characters other than `*`; of two
    with the same number, the later one."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[CallSettings]) -> None: ...

    @model_validator(mode="after")
    def _check_methods(self) -> Self:
        for pattern, own in self.methods.items():
            others = [
                name
                for name in sorted(own.model_fields_set - MethodPolicy.model_fields.keys())
                if getattr(own, name)
                != type(own).model_fields[name].get_default(call_default_factory=True)
            ]
            if others:
                raise ConfigurationError(
                    f'methods["{pattern}"]: a method cannot have {", ".join(others)}; give '
                    f"a MethodPolicy, not a {type(own).__name__}"
                )
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        for pattern, own in self.methods.items():
            limit = own.limit
            if limit is None:
                continue
            settings = limit.model_fields_set - {"max_concurrent", "rate"}
            if settings and limit != self.limit:
                raise ConfigurationError(
                    f'methods["{pattern}"].limit: only the limit of a whole server can have '
                    f"{', '.join(sorted(settings))}; give a number of calls, or a rate"
                )
            has_only_rate = (
                limit.rate is not None and "max_concurrent" not in limit.model_fields_set
            )
            if limit.max_concurrent == ADAPTIVE and not has_only_rate:
                raise ConfigurationError(
                    f'methods["{pattern}"].limit: only the limit of a whole server can be '
                    "adaptive; give a number of calls"
                )
        return self

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        if problems := dict.fromkeys(self._ineffective_settings()):
            raise ConfigurationError("; ".join(problems))
        return self

    def policy_for(self, method: str) -> MethodPolicy:
        """Return the effective settings of a method, or of a pattern: `"/shop.Orders/Get"`."""
        policy = MethodPolicy().over(self)
        for own in self._layers(method):
            policy = own.over(policy)
        return policy

    def _layers(self, method: str) -> list[MethodPolicy]:
        """Return the settings of the patterns that match a method, the most specific last."""
        methods = self.methods
        if not isinstance(methods, FrozenDict):  # of a copy whose `methods` were not checked
            methods = FrozenDict(methods)
        return [methods[pattern] for pattern in methods.matching(method)]

    def _ineffective_settings(self) -> Iterator[str]:
        """Describe settings without an effect, if they are given together with their cause."""
        yield from _ineffective(self, lambda: self)
        for pattern, own in self.methods.items():
            for problem in _ineffective(own, partial(self.policy_for, pattern)):
                yield f'methods["{pattern}"].{problem}'


def _ineffective(own: MethodPolicy, effective: Callable[[], MethodPolicy]) -> Iterator[str]:
    """Describe settings in `own` that have no effect, because calls end after a timeout."""
    has_limits = own.timeout is not None and own.timeout.has_limits
    is_retried = own.retry is not None and own.retry.max_attempts > 1
    if not has_limits and not is_retried:
        return
    deadline = effective().timeout
    timeout = None if deadline is None else deadline.timeout
    if own.timeout is not None:
        for problem in own.timeout.ineffective_limits(timeout):
            yield f"timeout: {problem}"
    if not is_retried:
        return
    for name, shortest in (("attempt_timeout", 1.0), ("backoff", 1.0 - DEFAULT_JITTER)):
        limit = getattr(own.retry, name)
        if not isinstance(limit, (int, float, timedelta)):
            continue
        if reaches(to_seconds(to_ns(limit)) * shortest, timeout):
            yield (
                f"retry: {name} ({limit}) leaves no time for another attempt, because timeout "
                f"({timeout}) is for all attempts together; give less, or leave it out"
            )


def checked_calls(policy: CallPolicy) -> CallPolicy:
    """Check the type of a policy, and return it.

    Raises:
        TypeError: It is not a `CallPolicy`.
    """
    checked_policy: object = policy
    if not isinstance(checked_policy, CallPolicy):
        raise TypeError(
            f"policy must be a CallPolicy, such as CallPolicy(timeout=2.0), not {checked_policy!r}"
        )
    return checked_policy
