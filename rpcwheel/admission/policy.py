"""The settings of `Throttle`, `Breaker` and `Concurrency`: which attempts of a client are sent."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.limit.policy import ADAPTIVE, Maximum, or_maximum
from rpcwheel.policy import Delay, Number, OrShort, Policy, Seconds, checked, shown
from rpcwheel.rpc import CODES_SCHEMA, checked_codes

NOT_RECORDED: Final = frozenset({"CANCELLED", ""})
"""The status codes of attempts that say nothing about the server: the client has canceled the
attempt, or it ended without a status."""

OVERLOAD_CODES: Final = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"})
"""The status codes of a server that is down or has too many calls."""

DEFAULT_WINDOW_CALLS: Final = 50
MAX_WINDOW_CALLS: Final = 1_000_000

MAX_OPEN_FACTOR: Final = 2
"""The default of `BreakerPolicy.max_open_duration`, in `open_duration`s."""

MIN_MULTIPLIER: Final = 1.1

Per = Literal["method", "target"]


def _failures(value: object) -> frozenset[str]:
    codes = checked(checked_codes, value)
    if not codes:
        raise ConfigurationError('it is empty; name status codes, such as "UNAVAILABLE"')
    if "CANCELLED" in codes:
        raise ConfigurationError(
            "it names CANCELLED, with which calls end that their callers cancel: such calls are "
            "never counted; leave it out"
        )
    return codes


Failures = Annotated[Any, BeforeValidator(_failures), WithJsonSchema(CODES_SCHEMA)]
"""Status codes that count as failures of the server."""

ShareAboveZero = Annotated[Number, Field(gt=0.0, le=1.0)]


class ThrottlePolicy(Policy):
    """A client refuses calls itself while a server fails or refuses most of them.

    The adaptive throttling of the Google SRE book, "Handling Overload", for each method of a
    target: attempts beyond `multiplier` times those that the server has accepted in the last
    `window` are probably refused. A refused attempt fails at once with UNAVAILABLE, and its call
    is not retried.
    """

    short: ClassVar[str | None] = "multiplier"

    multiplier: Annotated[Number, Field(ge=MIN_MULTIPLIER, allow_inf_nan=False)] = 2.0
    """How many attempts are sent for each one that the server accepts, at least 1.1. With 2, a
    server that refuses half of the attempts gets all of them. A lower number spares the server
    more, and a server that has returned gets all attempts later."""

    window: Seconds = 0.7
    """How many seconds an attempt counts. A server that is down gets one attempt in about two of
    them, and one that has returned gets all attempts after about four."""

    minimum_calls: Annotated[StrictInt, Field(ge=1)] = 3
    """With fewer attempts in the window, refused ones included, none is refused, so that the first
    failures of a call do not throttle its own retries."""

    max_rejection: ShareAboveZero = 0.99
    """The highest share of attempts that are refused. The others are sent to a server that is down,
    so that its return is noticed."""

    failures: Failures = OVERLOAD_CODES
    """Status codes of attempts that the server has not accepted, as names or `grpc.StatusCode`:
    one, or a set, tuple or list of them."""


class BreakerPolicy(Policy):
    """A circuit breaker: a client sends no calls for a time after too many of them have failed.

    As in resilience4j, for each method of a target. While it is CLOSED, all attempts are sent. If
    the share of failures, or of slow attempts, in the last `window_calls` or the last `window`
    seconds reaches its limit, it is OPEN, and attempts fail at once with UNAVAILABLE. After
    `open_duration` it is HALF_OPEN: one attempt is sent, after its success two, then three at a
    time and so on. When `half_open_calls` of them have ended, it is CLOSED if their shares are
    below the limits. It is OPEN again if they cannot be, or if the first one fails.

    Attempts that their callers cancel count neither as successes nor as failures. A lost server,
    whose attempts fail with UNAVAILABLE at the same time, counts as one failure.
    """

    short: ClassVar[str | None] = "failure_rate"

    failure_rate: ShareAboveZero = 0.5
    """The share of failures from which the breaker opens."""

    slow_call_rate: ShareAboveZero = 1.0
    """The share of slow attempts from which the breaker opens."""

    slow_call: Seconds | None = None
    """An attempt is slow if it takes more than this many seconds, whether it fails or not. None: no
    attempt is slow."""

    window_calls: Annotated[StrictInt, Field(ge=1, le=MAX_WINDOW_CALLS)] | None = None
    """How many of the last attempts the shares are computed of. None: 50, if `window` is None
    too."""

    window: Seconds | None = None
    """The shares are computed of the attempts of this many seconds, instead of `window_calls`.
    None: of the last `window_calls`."""

    minimum_calls: Annotated[StrictInt, Field(ge=1)] = 20
    """With fewer attempts in the window, the breaker does not open."""

    half_open_calls: Annotated[StrictInt, Field(ge=1)] = 5
    """How many attempts decide whether a breaker that is HALF_OPEN closes."""

    half_open_timeout: Seconds | None = 60.0
    """Maximum seconds that a breaker is HALF_OPEN while attempts are refused because others have
    not ended, and none ends. After that it is OPEN. If calls have taken long and
    succeeded, up to ten times as many. None: no limit."""

    open_duration: Seconds = 1.0
    """How many seconds the breaker is OPEN, of which up to a tenth is random."""

    open_growth: Annotated[Number, Field(ge=1.0, allow_inf_nan=False)] = 2.0
    """By which `open_duration` is multiplied each time that the breaker opens again without having
    been CLOSED. 1: it remains the same."""

    max_open_duration: Seconds | None = None
    """Maximum seconds that the breaker is OPEN. None: twice `open_duration`."""

    failures: Failures = frozenset(
        {"UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "DATA_LOSS"}
    )
    """Status codes that count as failures, as names or `grpc.StatusCode`: one, or a set, tuple or
    list of them. Attempts with other codes, such as NOT_FOUND, count as successes: so do those that
    a server with too many calls refuses (RESOURCE_EXHAUSTED), while it works on others."""

    health_check: StrictBool = True
    """Whether a server with health checks is asked before the breaker is HALF_OPEN. If it is not
    serving, the breaker remains OPEN, and no call is needed to find out."""

    per: Per = "method"
    """Which calls share a breaker: `"method"`, those of each method of a target; `"target"`, those
    of all methods of a target that have this policy."""

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.window is not None:
            if self.window_calls is not None:
                raise ConfigurationError(
                    f"window ({self.window}) and window_calls ({self.window_calls}) exclude each "
                    "other: give a time or a number of calls"
                )
            return self
        size = self.window_calls or DEFAULT_WINDOW_CALLS
        if self.minimum_calls > size:
            raise ConfigurationError(
                f"minimum_calls ({self.minimum_calls}) is more than window_calls ({size}), so the "
                "breaker would never open; give at most as many, or more window_calls"
            )
        return self

    @model_validator(mode="after")
    def _check_slow_calls(self) -> Self:
        if self.slow_call is None and "slow_call_rate" in self.model_fields_set:
            raise ConfigurationError(
                f"slow_call_rate ({self.slow_call_rate}) has no effect, because no call is slow; "
                "give slow_call, the seconds above which a call is slow, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_open_durations(self) -> Self:
        longest = self.max_open_duration
        if longest is not None and to_ns(longest) < to_ns(self.open_duration):
            raise ConfigurationError(
                f"max_open_duration ({longest}) is less than open_duration "
                f"({self.open_duration}); give more, or leave it out"
            )
        return self


class ConcurrencyPolicy(Policy):
    """How many calls of a client to a server run at the same time (Dubbo's actives; a bulkhead).

    An attempt above the limit waits for another to end, and fails with RESOURCE_EXHAUSTED if that
    takes too long. A stream runs until it ends.
    """

    short: ClassVar[str | None] = "max_calls"

    max_calls: Maximum = ADAPTIVE
    """The number of attempts that run at the same time. `"adaptive"`: at first 20. It grows by
    one with each attempt that succeeds, and is multiplied by 0.9 if more than 1 in 5 fails with
    UNAVAILABLE, or 1 in 20 with RESOURCE_EXHAUSTED or DEADLINE_EXCEEDED. After that, it grows by
    one with as many successes as it allows at a time. It does not apply to streams of responses:
    their ends show little."""

    highest: Annotated[StrictInt, Field(ge=1)] = 200
    """The highest adaptive limit; the lowest is 1."""

    max_wait: Delay = 0.0
    """Maximum seconds that an attempt waits for another to end. 0: it is refused at once."""

    per: Per = "method"
    """Which calls share a limit: `"method"`, those of each method of a target; `"target"`, those of
    all methods of a target that have this policy."""

    @model_validator(mode="after")
    def _check_highest(self) -> Self:
        if self.max_calls != ADAPTIVE and "highest" in self.model_fields_set:
            raise ConfigurationError(
                f"highest ({self.highest}) has no effect, because max_calls is a number "
                f'({self.max_calls}); leave it out, or give max_calls="adaptive"'
            )
        return self


def _number(kinds: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"it must be {kinds}, not {shown(value)}")
    return value


OwnThrottle = Annotated[
    ThrottlePolicy | None,
    OrShort(
        ThrottlePolicy,
        partial(_number, "a multiplier, such as 2.0, or a ThrottlePolicy"),
        ({"type": "number", "minimum": MIN_MULTIPLIER},),
    ),
]
"""A `ThrottlePolicy`, or its `multiplier`."""

OwnBreaker = Annotated[
    BreakerPolicy | None,
    OrShort(
        BreakerPolicy,
        partial(_number, "a failure rate, such as 0.5, or a BreakerPolicy"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1},),
    ),
]
"""A `BreakerPolicy`, or its `failure_rate`."""

OwnConcurrency = Annotated[ConcurrencyPolicy | None, or_maximum(ConcurrencyPolicy)]
"""A `ConcurrencyPolicy`, or its `max_calls`."""
