"""`FailbackPolicy`: the settings of failback."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, StrictStr, WithJsonSchema, field_validator
from pydantic.json_schema import SkipJsonSchema

from rpcwheel.backoff import Backoff
from rpcwheel.policy import Policy, Wait, checked
from rpcwheel.rpc import CODES_SCHEMA

from .matching import Matcher, wanted
from .queued_call import FailedCall

__all__ = ["FailbackPolicy"]


class FailbackPolicy(Policy):
    """Which failed calls are retried in the background, when, and what their callers get.

    The defaults are those of Dubbo's `FailbackClusterInvoker`: three retries, five seconds apart,
    at most a hundred queued calls.
    """

    retry_on: Annotated[Any, WithJsonSchema(CODES_SCHEMA)] = Field(description=wanted("retry_on"))
    """Exception types, gRPC status codes (or their names), predicates, tenacity `retry_if_*`
    objects, or a set, tuple or list of these. Other errors are raised to the caller unchanged."""

    max_attempts: Annotated[StrictInt, Field(ge=1)] | None = 4
    """How many attempts a call gets, the first one included. 1: no retry, its error is raised.
    None: no limit. If `stop` is given and this is not, `stop` alone decides; if both are given,
    both limit. During `close` neither does: queued calls are retried until `drain_timeout` is
    over."""

    backoff: Wait = 5.0
    """The wait before each further attempt: seconds, a `timedelta`, a tenacity `wait_*` object, or
    a table such as `{initial = 1.0, max = 60.0}`."""

    stop: SkipJsonSchema[Any] = None
    """A tenacity `stop_*` object, which counts the first attempt too, or None."""

    default: Any = None
    """What the caller of a queued call gets: this very object, each time."""

    max_pending: Annotated[StrictInt, Field(ge=1)] = 100
    """How many calls may be queued at once, those with a running attempt included."""

    overflow: Literal["raise", "drop"] = "raise"
    """What happens to a failed call if the queue is full. "raise": `FailbackFull` is raised,
    chained to the call's error. "drop": the caller gets `default`, and the call is dropped with an
    event and an error log (one line a second, with the number of dropped calls)."""

    metadata: tuple[str, ...] = ("*",)
    """Which metadata of a call that an interceptor queued is sent again: names, with the wildcards
    of `fnmatch`. By default all; `authorization` only if it is named in full, because a token may
    have expired by then. Inner interceptors and call credentials add theirs to each attempt."""

    name: Annotated[StrictStr, Field(min_length=1)] | None = None
    """The queue's name in events and logs. None takes the function's name, or the pattern of a
    `CallPolicy` under which this policy is given (`"*"` for all methods); its calls have one
    queue."""

    dead_letter: SkipJsonSchema[Callable[[FailedCall], object] | None] = None
    """Called with each queued call that is given up: it has no attempts left, or it failed with an
    error that `retry_on` does not name. It is not called with the calls that `close` returns. Runs
    on a worker thread, or on the event loop (where it may be a coroutine function). If it raises,
    that is an event and an error log."""

    @property
    def limit(self) -> int | None:
        """The maximum number of attempts, apart from `stop`; None: no limit."""
        if self.stop is not None and "max_attempts" not in self.model_fields_set:
            return None
        return self.max_attempts

    def keeps(self, key: str) -> bool:
        """Whether the metadata entry `key` of a queued call is sent again."""
        if key == "authorization":
            return key in self.metadata
        return any(fnmatchcase(key, pattern) for pattern in self.metadata)

    @field_validator("retry_on")
    @classmethod
    def _check_retry_on(cls, retry_on: object) -> object:
        checked(partial(Matcher, setting="retry_on"), retry_on)
        return retry_on

    @field_validator("backoff")
    @classmethod
    def _check_backoff(cls, backoff: object) -> object:
        checked(Backoff, backoff)
        return backoff

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: object) -> object:
        checked(lambda given: Backoff(stop=given), stop)
        return stop
