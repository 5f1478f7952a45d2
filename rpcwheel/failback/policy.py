"""What a user may set for failback, and what each setting means."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from rpcwheel.backoff import Backoff
from rpcwheel.errors import ConfigurationError

from .entry import FailedCall
from .matching import WANTED, Matcher

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["FailbackPolicy"]


class FailbackPolicy(BaseModel):
    """Which failures are tried again, in what rhythm, and what callers get meanwhile.

    The default rhythm is Dubbo's (`FailbackClusterInvoker`): three retries, five seconds apart, at
    most a hundred calls waiting.

    Raises:
        ConfigurationError: A value is out of range, a key unknown, or `on` missing.
        TypeError: A value is of a wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    on: Any
    """Exception types, gRPC status codes (or their names), predicates, tenacity `retry_if_*`
    objects, or a set, tuple or list of these. Other errors are raised to the caller unchanged."""

    retries: Annotated[StrictInt, Field(ge=0)] | None = 3
    """How often a failed call is tried again. 0: never, its error is raised. None: no limit. If
    `stop` is given and this is not, `stop` alone decides; of both, the first to say stop."""

    wait: Any = 5.0
    """Before each retry: seconds, a `timedelta`, or a tenacity `wait_*` object."""

    stop: Any = None
    """A tenacity `stop_*` object, which counts the first try as the first attempt, or None."""

    default: Any = None
    """What the caller of a queued call gets: this very object, each time."""

    max_pending: Annotated[StrictInt, Field(ge=1)] = 100
    """How many calls may be queued or in retry at once."""

    overflow: Literal["raise", "drop"] = "raise"
    """What becomes of a failed call beyond that: `FailbackFull`, chained to its error, is raised,
    or the call is dropped with an event and an error log, and its caller gets `default`."""

    name: Annotated[StrictStr, Field(min_length=1)] | None = None
    """For events and logs; None takes the function's name."""

    dead_letter: Callable[[FailedCall], object] | None = None
    """Called with each call that is given up after its last retry. Runs on a worker thread, or on
    the loop (there it may be a coroutine function); if it raises, that is an event and a log."""

    @property
    def limit(self) -> int | None:
        """How many retries there are at most, `stop` apart; None sets no limit."""
        if self.stop is not None and "retries" not in self.model_fields_set:
            return None
        return self.retries

    if not TYPE_CHECKING:  # type checkers take the fields for the signature

        def __init__(self, **settings: object) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise _refusal(error) from None

    @field_validator("on")
    @classmethod
    def _check_on(cls, on: object) -> object:
        return _checked(Matcher, on)

    @field_validator("wait")
    @classmethod
    def _check_wait(cls, wait: object) -> object:
        return _checked(Backoff, wait)

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: object) -> object:
        return _checked(lambda given: Backoff(stop=given), stop)


def _checked(check: Callable[[Any], object], value: object) -> object:
    """Let `check` refuse the value; a TypeError too becomes an error that pydantic collects."""
    try:
        check(value)
    except TypeError as error:
        raise PydanticCustomError("own_type", "{said}", {"said": str(error)}) from error
    return value


def _refusal(error: ValidationError) -> Exception:
    """One exception in our words for all that pydantic found."""
    found = error.errors(include_url=False)
    said = "; ".join(_said(one) for one in found)
    kind = TypeError if all(one["type"].endswith("_type") for one in found) else ConfigurationError
    return kind(said)


def _said(one: ErrorDetails) -> str:
    name = ".".join(str(part) for part in one["loc"][:1])
    match one["type"]:
        case "missing" if name == "on":
            return f"`on` is missing; {WANTED}"
        case "extra_forbidden":
            near = difflib.get_close_matches(name, FailbackPolicy.model_fields, n=1)
            known = f"did you mean {near[0]!r}?" if near else ", ".join(FailbackPolicy.model_fields)
            return f"there is no setting {name!r}; {known}"
        case "own_type":
            return one["msg"]
        case "value_error":
            return str(one["ctx"]["error"])
        case _:
            return f"{name}: {one['msg']}, not {one['input']!r}"
