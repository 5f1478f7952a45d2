"""`LimitPolicy`, how many calls a server works on, at the same time and per second."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import OrShort, Policy, Seconds, checked, shown
from rpcwheel.rpc import CRITICALITY_SCHEMA, Criticality, checked_criticality

from .rate import Rate, RatePolicy

ADAPTIVE: Final = "adaptive"


def _maximum(value: object, kinds: str = '"adaptive" or a number of calls') -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value == ADAPTIVE or (is_number and value > 0):  # type: ignore[operator]
        return value
    error = ConfigurationError if is_number or isinstance(value, str) else TypeError
    hint = "; the least number is 1" if is_number else ""
    raise error(f"it must be {kinds}, not {shown(value)}{hint}")


Maximum = Annotated[
    Literal["adaptive"] | Annotated[StrictInt, Field(ge=1)],
    BeforeValidator(partial(checked, _maximum)),
]
"""A maximum number of calls that run at the same time, or `ADAPTIVE`."""


def or_maximum(policy: type[Policy]) -> OrShort:
    """Accept a `Maximum`, which is the setting `Policy.short`, in place of a policy."""
    kinds = f'"adaptive", a number of calls, or a {policy.__name__}'
    return OrShort(
        policy,
        partial(_maximum, kinds=kinds),
        ({"const": ADAPTIVE}, {"type": "integer", "minimum": 1}),
    )


def _criticality(value: object) -> object:
    return checked(checked_criticality, value)


OwnCriticality = Annotated[
    Criticality, BeforeValidator(_criticality), WithJsonSchema(CRITICALITY_SCHEMA)
]
"""A `Criticality`, or its name."""


def _rate(policy: RatePolicy | None) -> RatePolicy | None:
    if policy is not None and (policy.max_wait or policy.per != "method"):
        raise ConfigurationError(
            "a server refuses calls above its rate at once: max_wait and per are settings of "
            "clients; leave them out"
        )
    return policy


class LimitPolicy(Policy):
    """How many calls a server works on at the same time, and how long others wait.

    A call above the limit waits, and is refused with RESOURCE_EXHAUSTED before its handler runs if
    it waits too long, if its deadline passes, or if less time is left than its method takes. After
    such a refusal, for 0.1 s at least and until no call waits for the server, the newest is served
    first, because the oldest are nearly too old, and calls are refused at once if enough others
    wait. Of calls that wait, the more critical one (`Criticality`) is served first. A call
    above the `rate` does not wait. If `max_concurrent` is adaptive, up to as many quick calls
    run in addition to it, so that they do not wait for handlers that take longer than 150 ms.

    Health checks and reflection are never limited, nor are heartbeats, but for `max_criticality`.
    """

    short: ClassVar[str | None] = "max_concurrent"

    name: Annotated[StrictStr, Field(min_length=1)] = "server"
    """How the server is called in events, metrics and the live view."""

    max_concurrent: Maximum = ADAPTIVE
    """The number of handlers with one response that run at the same time. `"adaptive"`: it is found
    from the throughput and the durations of handlers. In the policy of a method: a number, for each
    method that the pattern matches, in addition to the limit of the server; with a `rate`, it may
    be left out, and then only the limit of the server applies."""

    rate: Annotated[Rate, AfterValidator(_rate)] = None
    """How many calls start in each second, streams too: a number, or a `RatePolicy` with a `burst`.
    A call above it is refused at once. Each call takes its token when it arrives, also if it is
    refused later. In the policy of a method: for each method that the pattern matches, in addition
    to the rate of the server. None: no limit."""

    max_streams: Annotated[StrictInt, Field(ge=1)] | None = None
    """The number of calls with a request or response stream that are open at the same time. They do
    not count for `max_concurrent`, and above the limit they are refused at once, because others may
    stay open for long. None: no limit."""

    max_wait: Seconds | None = None
    """Maximum seconds that a call waits. Once a call was refused because it had waited for too
    long, for 0.1 s at least and until none waits, it is a tenth (as CoDel does), or a quarter if
    handlers compute: the server is overloaded, and a short queue serves as many calls as a long
    one. None: 0.3 s, or four times the usual duration of a handler if that is longer."""

    pushback: Seconds = 1.0
    """How many seconds a refused client is asked to wait before it tries again
    (`grpc-retry-pushback-ms`, gRFC A6); half to one and a half of it, at random, and at least 1 ms.
    """

    max_criticality: OwnCriticality | None = None
    """The highest criticality that callers may ask for. Calls that ask for more have this one, and
    heartbeats are limited too, but for health checks. None: any."""


Limit = Annotated[LimitPolicy | None, or_maximum(LimitPolicy)]
"""A `LimitPolicy`, or its `max_concurrent`."""
