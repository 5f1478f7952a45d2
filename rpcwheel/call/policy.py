"""What a user may set for calls: deadlines, retries, and policies for all calls or some methods."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NoReturn, Self

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
from tenacity import wait_random_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback.matching import Matcher, wanted
from rpcwheel.failback.policy import FailbackPolicy
from rpcwheel.methods import MethodPattern, matches, specificity
from rpcwheel.policy import Delay, Number, Policy, Seconds, Wait, checked, or_short
from rpcwheel.rpc import CODES_SCHEMA, checked_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "CallPolicy",
    "DeadlinePolicy",
    "DefaultResponsePolicy",
    "HedgingPolicy",
    "MethodPolicy",
    "RetryPolicy",
    "RetryThrottling",
    "checked_calls",
]

RETRY_WANTED: Final = (
    'name the status codes to retry after, such as retry_on={"UNAVAILABLE"}; only calls of methods '
    "that are marked idempotent are retried"
)

PARTS: Final = ("message_timeout", "slow_call_threshold")
"""What makes sense only if it is less than the whole call may take."""


class DeadlinePolicy(Policy):
    """How long a call may take.

    A call's deadline is the earliest of three: what its caller gave as `timeout=`, `timeout` here,
    and, with `propagate_deadline`, the deadline of the call that is being served. All its attempts
    share it.
    """

    short: ClassVar[str | None] = "timeout"

    timeout: Seconds | None = None
    """The whole call at most, with all its attempts, in seconds. None: no limit of its own."""

    message_timeout: Seconds | None = None
    """A response stream without a message for so long, while someone waits for one, is cancelled
    and ends with DEADLINE_EXCEEDED. gRPC has nothing for it. None: it may be silent for ever."""

    slow_call_threshold: Seconds | None = None
    """If a call still runs after so long, the event `CallSlow` is emitted. None: never."""

    propagate_deadline: StrictBool = True
    """Whether calls made while serving one share that one's deadline."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for said in self.never_reached(self.timeout):
            raise ConfigurationError(said)
        return self

    def never_reached(self, whole: float | timedelta | None) -> Iterator[str]:
        """Say what of this can't happen because a call ends after `whole` seconds."""
        for name in PARTS:
            if beyond(getattr(self, name), whole):
                yield (
                    f"{name} ({getattr(self, name)}) would never be reached, the whole call ends "
                    f"after timeout ({whole}); give less, or leave it out"
                )

    def over(self, general: DeadlinePolicy | None) -> DeadlinePolicy:
        """This policy, with what it does not set taken from `general`.

        Never raises: limits that met by coming together and could not be reached are left out.
        """
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        if general is not None:
            base = {name: getattr(general, name) for name in general.model_fields_set}
            settings = base | settings
        for name in PARTS:
            if beyond(settings.get(name), settings.get("timeout")):
                settings[name] = None
        return DeadlinePolicy(**settings)


def beyond(part: float | timedelta | None, whole: float | timedelta | None) -> bool:
    """Whether a part of a call, if both are limited, may take as long as the whole."""
    return part is not None and whole is not None and to_ns(part) >= to_ns(whole)


class RetryThrottling(Policy):
    """gRPC's own limit of retries (gRFC A6), a bucket of tokens for all calls of a channel.

    The bucket starts full. A failure that may be retried takes a token, a success puts
    `token_ratio` back. Calls are sent again only while the bucket is more than half full.
    """

    max_tokens: Annotated[StrictInt, Field(ge=1, le=1000)]
    """How many tokens the full bucket has."""

    token_ratio: Annotated[Number, Field(ge=0.001, allow_inf_nan=False)]
    """What a success puts back. Decimal places after the third are ignored."""


def _budget(value: object) -> object:
    if value is None or isinstance(value, RetryThrottling):
        return value
    if isinstance(value, dict):
        return checked(lambda table: RetryThrottling(**table), value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return checked(_no_budget, value)
    if not 0.0 <= value <= 1.0:
        raise ConfigurationError(
            f"it must be a share from 0 to 1, or a RetryThrottling, not {value!r}"
        )
    return value


def _no_budget(value: object) -> NoReturn:
    raise TypeError(f"it must be a share from 0 to 1, a RetryThrottling, or None, not {value!r}")


Share = Annotated[float, Field(ge=0, le=1)]
Budget = Annotated[Share | RetryThrottling | None, BeforeValidator(_budget)]
"""What limits how many calls of a target are sent again."""


Codes = Annotated[Any, WithJsonSchema(CODES_SCHEMA)]


class RetryPolicy(Policy):
    """Which failed calls are retried (Dubbo's failover), and how long to wait before each retry.

    Only methods marked `idempotent` are retried: a server may have executed a call that failed,
    whatever its status says. A call is retried only before its deadline, and only as long as no
    response message was handed to the caller.

    To outlast the restart of a server, give `max_attempts=6`, and have gRPC reconnect sooner than
    it does by default (`grpc.initial_reconnect_backoff_ms`): until it has, attempts send nothing.
    """

    retry_on: Codes = Field(description=RETRY_WANTED)
    """Status codes or their names: one, or a set, tuple or list."""

    max_attempts: Annotated[StrictInt, Field(ge=1)] = 3
    """How many attempts a call gets, the first one included. 1: no retry."""

    backoff: Wait = wait_random_exponential(multiplier=0.1, max=2.0)
    """The wait before each retry: seconds, a `timedelta`, a tenacity `wait_*` object, or a table
    such as `{initial = 0.1, max = 2.0}`, which is the default: at random up to 0.1 s, then up to
    0.2, 0.4 and so on, to at most 2 s ("full jitter": calls that failed together do not come back
    together). If the server says how long to wait (`grpc-retry-pushback-ms`, gRFC A6), that is the
    wait instead, up to `max_pushback`."""

    max_pushback: Seconds | None = 300.0
    """The longest wait that a server may ask for, in seconds. If it asks for more, the call is not
    retried and fails at once (`RetryStopped`). None: no limit but the call's deadline."""

    attempt_timeout: Seconds | None = None
    """How long one attempt may take. An attempt that it ends counts as failed with a code of
    `retry_on`. None: each may use up what is left of the call's deadline. It does not apply to
    methods that are not idempotent, because these are not retried."""

    retry_budget: Budget = 0.2
    """How many of a target's calls of the last 10 s may be retries, as a share, so that retries do
    not overload a server that is down already (Finagle's figure). `min_retries` of them are always
    allowed. Or a `RetryThrottling`, gRPC's rule. None: no limit."""

    min_retries: Annotated[StrictInt, Field(ge=0)] = 10
    """How many retries in 10 s a target gets, however few its calls are. It applies to a share."""

    replay_buffer_bytes: Annotated[StrictInt, Field(ge=0)] = 1 << 20
    """How much of a request stream is kept to send it again. A stream that grows beyond is sent on
    and no longer tried again."""

    @field_validator("retry_on", mode="after")
    @classmethod
    def _check_retry_on(cls, given: object) -> frozenset[str]:
        codes = _codes(given, "`retry_on`")
        if not codes:
            raise ConfigurationError(f"`retry_on` is empty; {RETRY_WANTED}")
        return codes

    @field_validator("backoff")
    @classmethod
    def _check_backoff(cls, backoff: object) -> object:
        checked(Backoff, backoff)
        return backoff


def _codes(given: object, what: str) -> frozenset[str]:
    each = given if isinstance(given, (set, frozenset, tuple, list)) else (given,)
    return frozenset(checked(partial(checked_code, what=what), one) for one in each)


class HedgingPolicy(Policy):
    """Send a unary call again before the first attempt has failed (gRFC A6; Dubbo's forking).

    Every `delay` another attempt is sent, until one succeeds or `max_attempts` are sent. The first
    success is the caller's, and the other attempts are canceled. So one slow server costs a call
    `delay` instead of its whole delay.

    Only calls with one request and one response of methods marked `idempotent` are hedged. Other
    calls are made once. All attempts share the call's deadline. If the server says how long to wait
    (`grpc-retry-pushback-ms`), the next attempt is sent after that time; if the server wants no
    more attempts, none is sent.
    """

    short: ClassVar[str | None] = "delay"

    delay: Delay
    """Seconds between two attempts, a `timedelta`, or 0 to send all at once. The 95th percentile of
    the method's latency sends one call in 20 twice."""

    max_attempts: Annotated[StrictInt, Field(ge=1)] = 2
    """How many attempts there are at most, the first one included."""

    non_fatal_codes: Codes = frozenset({"UNAVAILABLE"})
    """Status codes or their names: one, or a set, tuple or list. After an attempt that fails with
    one of them the next attempt is sent at once. Any other failure is the caller's at once, and the
    other attempts are canceled."""

    max_pushback: Seconds | None = 300.0
    """The longest wait that a server may ask for, in seconds. If it asks for more, no more attempts
    are sent. None: no limit but the call's deadline."""

    retry_budget: Budget = 0.2
    """How many of a target's calls of the last 10 s may be sent again, as a share. `min_retries` of
    them are always allowed. Or a `RetryThrottling`, gRPC's rule. None: no limit."""

    min_retries: Annotated[StrictInt, Field(ge=0)] = 10
    """How many attempts in 10 s a target gets beside the first ones, however few its calls are."""

    @field_validator("non_fatal_codes", mode="after")
    @classmethod
    def _named(cls, codes: object) -> frozenset[str]:
        return _codes(codes, "non_fatal_codes")


class DefaultResponsePolicy(Policy):
    """Which failures are logged and answered with a default (Dubbo's failsafe)."""

    on: Codes = Field(description=wanted("on"))
    """As for failback: exception types, status codes, predicates, or a set, tuple or list."""

    default: Any = None
    """What the caller gets: this very object. For a response stream, its messages in a sequence;
    None is an empty stream."""

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
"""What a setting of a method takes the place of, if a more general policy has it."""


class MethodPolicy(Policy):
    """What holds for the calls of some methods. What is not given comes from a more general one.

    None switches off what a more general policy has switched on.
    """

    timeout: Annotated[DeadlinePolicy | None, or_short(DeadlinePolicy)] = None
    """A number of seconds, a `timedelta`, or a `DeadlinePolicy`. What a `DeadlinePolicy` does not
    set comes from the more general one, as far as the call lasts long enough for it."""

    retry: RetryPolicy | None = None
    """Retry a call that failed, within its deadline, if its method is `idempotent`. Replaces the
    more general one as a whole, as `default_response` and `failback` do; also a more general
    `hedging`."""

    hedging: Annotated[HedgingPolicy | None, or_short(HedgingPolicy)] = None
    """A number of seconds (the delay), a `timedelta`, or a `HedgingPolicy`: send a call of an
    `idempotent` method again before its first attempt has failed. Replaces a more general `retry`.
    """

    default_response: DefaultResponsePolicy | None = None
    """Answer a call that has failed for good with a default, and log it."""

    failback: FailbackPolicy | None = None
    """Answer a call that has failed for good with a default, and deliver it in the background.
    Replaces a more general `default_response` too, and `default_response` a more general
    `failback`. It also switches off a more general `retry` or `hedging`, so that the caller is
    answered after the first attempt."""

    idempotent: StrictBool = False
    """Whether a server may execute a call twice without harm. Only methods marked `idempotent` are
    retried. Failback does not look at it: it delivers at least once."""

    wait_for_ready: StrictBool | None = None
    """The `wait_for_ready` of calls whose caller does not give it. True: a call that finds no
    connection waits for one until its deadline. None: gRPC's default, it fails at once."""

    if TYPE_CHECKING:  # what may be given is more than what is kept

        def __init__(
            self,
            *,
            timeout: float | timedelta | DeadlinePolicy | None = None,
            retry: RetryPolicy | None = None,
            hedging: float | timedelta | HedgingPolicy | None = None,
            default_response: DefaultResponsePolicy | None = None,
            failback: FailbackPolicy | None = None,
            idempotent: bool = False,
            wait_for_ready: bool | None = None,
        ) -> None: ...

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        if self.default_response is not None and self.failback is not None:
            raise ConfigurationError(
                "default_response and failback both answer a call that failed: default_response "
                "forgets it, failback delivers it later; choose one"
            )
        if self.retry is not None and self.hedging is not None:
            raise ConfigurationError(
                "retry and hedging both send a call again: retry after it has failed, hedging "
                "before that; choose one"
            )
        return self

    def over(self, general: MethodPolicy) -> MethodPolicy:
        """This policy, with all that it does not set taken from `general`. Never raises."""
        given, base = self._given(), general._given()
        if given.get("timeout") is not None:
            given["timeout"] = given["timeout"].over(base.get("timeout"))
        for name, replaced in REPLACED.items():
            if given.get(name) is not None:
                for other in replaced:
                    base.pop(other, None)
        return MethodPolicy(**base | given)

    def _given(self) -> dict[str, Any]:
        """What was set, of that which may be set for a method."""
        names = self.model_fields_set & set(MethodPolicy.model_fields)
        return {name: getattr(self, name) for name in names}


class FixedDict(dict[str, MethodPolicy]):
    """A dict that stays as it was made."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a policy does not change; make another one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class CallPolicy(MethodPolicy):
    """What holds for all calls, and for those of some methods.

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

    methods: Annotated[dict[MethodPattern, MethodPolicy], AfterValidator(FixedDict)] = Field(
        default_factory=FixedDict
    )
    """By pattern: `"/shop.Orders/Get"`, `"/shop.Orders/*"`, `"*"`. Where several match, each
    setting is taken from the most specific that has it: a name in full before all patterns, then
    the one with most characters beside `*`, then the later one."""

    if TYPE_CHECKING:  # as above

        def __init__(
            self,
            *,
            timeout: float | timedelta | DeadlinePolicy | None = None,
            retry: RetryPolicy | None = None,
            hedging: float | timedelta | HedgingPolicy | None = None,
            default_response: DefaultResponsePolicy | None = None,
            failback: FailbackPolicy | None = None,
            idempotent: bool = False,
            wait_for_ready: bool | None = None,
            methods: Mapping[str, MethodPolicy] = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = list(dict.fromkeys(self._contradictions()))
        if wrong:
            raise ConfigurationError("; ".join(wrong))
        return self

    def policy_for(self, method: str) -> MethodPolicy:
        """What holds for one method, or for all that a pattern names: `"/shop.Orders/Get"`."""
        found = MethodPolicy().over(self)
        for pattern in self._by_rank():
            if matches(pattern, method):
                found = self.methods[pattern].over(found)
        return found

    def _by_rank(self) -> list[str]:
        """The patterns, the least specific first."""
        return sorted(self.methods, key=specificity)  # stable: of equals, the later one wins

    def _contradictions(self) -> Iterator[str]:
        """What can't be meant so. Only what was written in one place is held against it."""
        for said in _disagreements(self, self):
            yield said
        for pattern, own in self.methods.items():
            effective = self.policy_for(pattern)
            where = f'methods["{pattern}"]'
            for said in _disagreements(own, effective):
                yield f"{where}.{said}"


def _disagreements(own: MethodPolicy, effective: MethodPolicy) -> Iterator[str]:
    """What in `own` can't be, as the calls end after the effective timeout."""
    whole = None if effective.timeout is None else effective.timeout.timeout
    if own.timeout is not None:
        for said in own.timeout.never_reached(whole):
            yield f"timeout: {said}"
    if own.retry is None or own.retry.max_attempts == 1:
        return
    for name in ("attempt_timeout", "backoff"):
        part = getattr(own.retry, name)
        if isinstance(part, (int, float, timedelta)) and beyond(part, whole):
            yield (
                f"retry: {name} ({part}) leaves no time for another attempt, as timeout ({whole}) "
                "holds for all attempts together; give less, or leave it out"
            )


def checked_calls(policy: CallPolicy) -> CallPolicy:
    """Check the type of a policy, and return it.

    Raises:
        TypeError: It is none.
    """
    given: object = policy
    if not isinstance(given, CallPolicy):
        raise TypeError(
            f"policy must be a CallPolicy, such as CallPolicy(timeout=2.0), not {given!r}"
        )
    return given
