"""What a user may set, as a frozen model: unknown keys refused, all errors in one, in our words."""

from __future__ import annotations

import difflib
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from rpcwheel.durations import positive_ns
from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic_core import ErrorDetails

__all__ = ["Policy", "Seconds", "checked"]


R = TypeVar("R")


class Policy(BaseModel):
    """The base of every policy. Immutable; made of keyword arguments, or of a file's tables.

    Raises:
        ConfigurationError: A value is out of range, a key unknown or missing, or two values
            contradict each other; the message names each of them.
        TypeError: A value is of a wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    if not TYPE_CHECKING:  # type checkers take the fields for the signature

        def __init__(self, **settings: object) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise refusal(error, type(self)) from None


def checked(check: Callable[[Any], R], value: object) -> R:
    """What `check` makes of the value; its TypeError too becomes one that pydantic collects."""
    try:
        return check(value)
    except TypeError as error:
        raise PydanticCustomError("own_type", "{said}", {"said": str(error)}) from error


def _seconds(value: object) -> object:
    checked(partial(positive_ns, what="it"), value)
    return value


Seconds = Annotated[float | timedelta, BeforeValidator(_seconds)]
"""A finite time above zero: seconds, or a `timedelta`."""


def refusal(error: ValidationError, policy: type[BaseModel]) -> Exception:
    """One exception in our words for all that pydantic found."""
    found = error.errors(include_url=False)
    said = "; ".join(dict.fromkeys(_said(one, policy) for one in found))
    kind = TypeError if all(one["type"].endswith("_type") for one in found) else ConfigurationError
    return kind(said)


def _said(one: ErrorDetails, policy: type[BaseModel]) -> str:
    place = ".".join(str(part) for part in one["loc"])
    match one["type"]:
        case "missing":
            wanted = policy.model_fields[place].description
            return f"`{place}` is missing" + (f"; {wanted}" if wanted else "")
        case "extra_forbidden":
            near = difflib.get_close_matches(place, policy.model_fields, n=1)
            known = f"did you mean {near[0]!r}?" if near else ", ".join(policy.model_fields)
            return f"there is no setting {place!r}; {known}"
        case "own_type":
            return _at(place, one["msg"])
        case "value_error":
            return _at(place, str(one["ctx"]["error"]))
        case _:
            return f"{place}: {one['msg']}, not {one['input']!r}"


def _at(place: str, said: str) -> str:
    """The message, with its place if it does not name it itself."""
    return said if place.rpartition(".")[2] in said else f"{place}: {said}"
