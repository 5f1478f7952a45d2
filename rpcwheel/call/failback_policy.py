"""`FailbackPolicy`: the settings of failback."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from rpcwheel.backoff import Backoff
from rpcwheel.journal.url import parse_journal_url
from rpcwheel.policy import Number, Policy, Seconds, Wait, checked
from rpcwheel.rpc import CODES_SCHEMA, CRITICALITY_KEY

from .idempotency import IDEMPOTENCY_KEY
from .matching import Matcher, accepted_values

NEVER_STORED: Final = frozenset({"authorization", "proxy-authorization", "cookie", IDEMPOTENCY_KEY})
"""Metadata keys that are not stored in a journal: credentials, and the idempotency key, which has
its own field."""

SECRET_PARTS: Final = (
    *("auth", "token", "secret", "password", "passwd", "passphrase", "private", "credential"),
    *("cookie", "session", "api-key", "apikey", "signature", "jwt", "oidc", "client-principal"),
)
SECRET_WORDS: Final = frozenset({"otp", "pin"})
KEYS_OF_DATA: Final = frozenset({"idempotency", "order", "partition", "routing", "shard", "cache"})
"""Words before `-key` in keys that name data, such as `routing-key`."""


def is_secret(key: str) -> bool:
    """Whether a metadata key names a secret, which a journal has only if it is listed by its name.

    This is so if it contains one of `SECRET_PARTS`, ends with `-key`, such as `x-api-key`, or if
    one of its words is in `SECRET_WORDS`. Words are separated by `-`, `_` and `.`.
    """
    words = re.split("[-_.]", key.lower().removesuffix("-bin"))
    if words[-1] == "key" and words[-2:-1] and words[-2] not in KEYS_OF_DATA:
        return True
    text = "-".join(words)
    return any(part in text for part in SECRET_PARTS) or not SECRET_WORDS.isdisjoint(words)


JOURNAL_CAPACITY: Final = 1_000_000
"""The default of `max_pending` with a journal."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that was not delivered, with all that is needed to make it by other means."""

    function: str
    """The method path, such as `/shop.Orders/Push`, or the function's name, such as
    `shop.orders.push`."""
    args: tuple[Any, ...] = field(repr=False)
    """The positional arguments; messages are copies, in the state they had when it was queued."""
    kwargs: dict[str, Any] = field(repr=False)
    attempts: int
    """Attempts made, the first one included."""
    waited_s: float
    """Seconds since the first attempt began."""
    error: BaseException
    """How the last finished attempt failed."""
    reason: str
    """Why there is no further attempt."""


class FailbackPolicy(Policy):
    """Settings for retries in the background: of which calls, when, and what the callers get.

    The defaults are those of Dubbo's `FailbackClusterInvoker`: three retries, five seconds apart
    (here half of the wait is random), at most a hundred queued calls.
    """

    retry_on: Annotated[Any, WithJsonSchema(CODES_SCHEMA)] = Field(
        description=accepted_values("retry_on")
    )
    """The failures that are retried: gRPC status codes (or their names), exception types, functions
    that take the exception and return a bool, tenacity `retry_if_*` objects, or a set, tuple or
    list of these. Other errors are raised to the caller unchanged. A call that is queued is also
    attempted again after UNAVAILABLE, DEADLINE_EXCEEDED and RESOURCE_EXHAUSTED, and if the server
    has canceled it, as these only show that its server is busy, is being stopped or cannot be
    reached."""

    max_attempts: Annotated[StrictInt, Field(ge=1)] | None = 4
    """Maximum number of attempts of a call, including the first. 1: the error is raised to the
    caller. None: no limit. If `stop` is set and this is not, only `stop` limits the attempts; if
    both are set, both do. During `close` neither does: queued calls are retried until
    `drain_timeout` is over."""

    backoff: Wait = 5.0
    """The wait before each retry: seconds, a `timedelta`, a tenacity `wait_*` object, or a table
    such as `{initial = 1.0, max = 60.0}`. Half of a number and of the times in a table is random:
    with 5.0 the wait is from 2.5 to 5 s. A `wait_fixed(5)` of tenacity is exact."""

    stop: SkipJsonSchema[Any] = None
    """A tenacity `stop_*` object that ends the retries of a call, or None. It counts the first
    attempt too."""

    default: Any = None
    """The response that the caller of a queued call gets: this object, not a copy."""

    max_pending: Annotated[StrictInt, Field(ge=1)] = 100
    """Maximum number of queued calls, including those that are being retried at the moment. With a
    journal: of all calls of this queue in it, dead letters not included, and 1,000,000 if it is not
    set."""

    overflow: Literal["raise", "drop"] = "raise"
    """What happens if a call fails while the queue is full. "raise": `FailbackFull` is raised,
    chained to the call's error. "drop": the caller gets `default`, and the call is discarded, with
    an event and an error log (one line a second, with the number of such calls)."""

    metadata: tuple[StrictStr, ...] = ("*",)
    """The metadata keys of a call on a channel that are sent again with each retry, in any case;
    the wildcards of `fnmatch` are allowed. `authorization` is sent again only if it is listed by
    its full name, because the token may have expired; it is never stored in a journal, and other
    keys that may be secret (with "token", "api-key" and the like in them) only if they are listed
    by their full names. `rpcwheel-criticality` is always sent again. Inner interceptors and call
    credentials add their metadata to each attempt."""

    rate: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = None
    """The largest number of attempts of queued calls a second, evenly spaced, to the target of each
    channel (for a function: of its calls). None: no limit. Each process has its own rate."""

    max_in_flight: Annotated[StrictInt, Field(ge=1)] | None = None
    """The largest number of such attempts at a time. None: it follows the latency of the calls, so
    that a long queue does not overload the server."""

    name: Annotated[StrictStr, Field(min_length=1)] | None = None
    """The name of the queue in events and logs. None: the function's name, or the method pattern
    for which this policy is set (`"*"` for all methods)."""

    journal: StrictStr | None = Field(default=None, repr=False)  # it may have a password
    """The URL of a journal: `"sqlite:///var/lib/shop/failback.db"`. A failed call is stored there
    before its caller is answered, and survives the process. A call that is given up stays there as
    a dead letter. If `max_attempts` is not set, only `max_age` limits the attempts. None: queued
    calls are kept in memory."""

    max_age: Seconds = 86_400.0
    """With a journal: seconds after its first failure when a call is given up."""

    order_key: StrictStr | SkipJsonSchema[Callable[..., str | None]] | None = None
    """With a journal: which queued calls are delivered one at a time, in the order in which they
    were queued: those with the same key. A string names the metadata entry that has the key, or the
    argument of a function. Or a function that returns the key, or None for no order: it gets the
    request (the first one of a stream), or the arguments of the function."""

    target: Annotated[StrictStr, Field(min_length=1)] | None = None
    """With a journal: the target under which calls are stored, in place of the channel's. After a
    restart, a call is delivered through a channel with the same target."""

    dead_letter: SkipJsonSchema[Callable[[FailedCall], object] | None] = None
    """A function that is called with a `FailedCall` for each queued call that is given up, because
    it has no attempts left or failed with an error not in `retry_on`. It is not called with the
    calls that `close` returns. It runs on a worker thread, or on the event loop (where it may be a
    coroutine function). If it raises, an event is emitted and an error is logged."""

    @property
    def limit(self) -> int | None:
        """The maximum number of attempts, apart from `stop`; None: no limit."""
        is_default = "max_attempts" not in self.model_fields_set
        if is_default and (self.stop is not None or self.journal is not None):
            return None
        return self.max_attempts

    @property
    def capacity(self) -> int:
        """The maximum number of queued calls."""
        is_default = "max_pending" not in self.model_fields_set
        return JOURNAL_CAPACITY if is_default and self.journal is not None else self.max_pending

    def keeps(self, key: str) -> bool:
        """Whether the metadata entry `key` of a queued call is sent again."""
        key = key.lower()  # a caller may write another case, which an inner interceptor changes
        if key == CRITICALITY_KEY:
            return True
        if self.journal is not None and key in NEVER_STORED:
            return False
        if key == "authorization" or (self.journal is not None and is_secret(key)):
            return key in self.metadata
        return any(fnmatchcase(key, pattern) for pattern in self.metadata)

    @field_validator("retry_on")
    @classmethod
    def _check_retry_on(cls, retry_on: object) -> object:
        checked(partial(Matcher, setting="retry_on"), retry_on)
        return retry_on

    @field_validator("metadata")
    @classmethod
    def _in_lower_case(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key.lower() for key in keys)  # as the keys of gRPC

    @field_validator("journal")
    @classmethod
    def _check_journal(cls, journal: str | None) -> str | None:
        if journal is not None:
            checked(parse_journal_url, journal)
        return journal

    @model_validator(mode="after")
    def _check_for_journal(self) -> Self:
        names = [
            name
            for name in ("max_age", "order_key", "target")
            if name in self.model_fields_set and getattr(self, name) is not None
        ]
        if names and self.journal is None:
            raise ValueError(f"{', '.join(names)}: has an effect only with `journal`")
        return self

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: object) -> object:
        checked(lambda value: Backoff(stop=value), stop)
        return stop


def same_name_problem(name: str) -> str:
    """Describe that two different policies, of which one has a journal, have the same name."""
    return (
        f"two failback policies have the name {name!r}; with a journal give each its own, "
        "FailbackPolicy(name=...), because calls are stored under it"
    )
