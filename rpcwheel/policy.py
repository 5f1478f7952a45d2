"""The base of all policies: frozen pydantic models with error messages for users.

The same settings come from code and from files (`rpcwheel.kit.config`). Therefore a table (a dict)
is accepted in place of a policy, and an error names the place of the setting:
`retry.max_attempts`. All mistakes are reported in one error.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice, pairwise
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NoReturn, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from rpcwheel.backoff import DEFAULT_JITTER, JitteredWait, check_wait
from rpcwheel.durations import positive_ns, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema, ErrorDetails

    Place = tuple[int | str, ...]

__all__ = [
    "Number",
    "Policy",
    "Seconds",
    "Wait",
    "checked",
    "field_at",
    "messages_of",
    "or_short",
    "path_of",
    "refusal",
    "shown",
    "types_in",
]

_MAX_BEGINNING: Final = 600
_MAX_END: Final = 300
"""Characters that are shown of a long message, at its beginning and at its end."""

MAX_LISTED: Final = 20
"""The most mistakes that one error lists."""

R = TypeVar("R")


class Policy(BaseModel):
    """The base of every policy. Immutable.

    Raises:
        ConfigurationError: A value is out of range, a setting is unknown or missing, or two
            settings contradict each other; the message names each of them.
        TypeError: A value is of a wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    short: ClassVar[str | None] = None
    """The setting for which a value in place of the policy stands, such as a number, if any."""

    if not TYPE_CHECKING:  # type checkers take the fields for the signature

        def __init__(self, *args: object, **settings: object) -> None:
            if args:
                name = type(self).short or next(iter(type(self).model_fields), "...")
                raise TypeError(
                    f"settings are given by name: {type(self).__name__}({name}={shown(args[0])})"
                )
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise error_for_users(error, type(self)) from None

        # Otherwise pydantic calls this for each table inside another, and errors would not name
        # the place of a setting. Verified with pydantic 2.7 and 2.14 (test_policy.py,
        # test_an_error_names_the_place_of_each_mistake).
        __init__.__pydantic_base_init__ = True

        def __setattr__(self, name: str, _: object) -> NoReturn:
            self._refuse_change(name)

        def __delattr__(self, name: str) -> NoReturn:
            self._refuse_change(name)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the settings; no text has an address, so equal policies look alike."""
        for name, value in super().__repr_args__():
            yield name, _without_address(value)

    def replace(self, **settings: object) -> Self:
        """Return a copy with other settings.

        Raises:
            ConfigurationError, TypeError: As the constructor.
        """
        current = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**current | settings)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema, with the docstrings of fields as descriptions."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for kind in reversed(cls.__mro__):
            if issubclass(kind, Policy) and kind is not Policy:
                for name, text in _field_docstrings(kind):
                    if name in properties:
                        properties[name]["description"] = text
        return schema

    def _refuse_change(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a {type(self).__name__} cannot be changed; make another one: "
            f"policy.replace({name}=...)"
        )


class _Text(str):
    """A text whose `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _without_address(value: Any) -> Any:
    """Return what stands for a value in a `repr`, without the address of an object in it."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return kind(map(_without_address, value))
    if isinstance(value, (FunctionType, MethodType)):
        return _Text(f"{value.__module__}.{value.__qualname__}")
    if isinstance(value, partial):
        parts = [("func", value.func), ("args", value.args), *value.keywords.items()]
    elif getattr(kind, "__repr__", None) is object.__repr__:  # such as the objects of tenacity
        parts = [*getattr(value, "__dict__", {}).items()]
    else:
        return value
    shown_parts = ", ".join(f"{name}={_without_address(part)!r}" for name, part in parts)
    return _Text(f"{kind.__name__}({shown_parts})")


def _field_docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """The docstrings below the fields of a class, as single lines."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    for field, after in pairwise(getattr(tree, "body", ())):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())


def checked(check: Callable[[Any], R], value: object) -> R:
    """Return `check(value)`; pydantic collects a `TypeError` of it with other errors."""
    try:
        return check(value)
    except TypeError as error:
        raise PydanticCustomError("own_type", "{problem}", {"problem": str(error)}) from error


def _seconds(value: object) -> object:
    if value == float("inf"):
        raise ConfigurationError(
            "it must be a finite time; for no limit give None (in a file false)"
        )
    if value != value:  # noqa: PLR0124 - NaN
        raise ConfigurationError("it must be a finite time, not NaN")
    checked(partial(positive_ns, subject="it"), value)
    return value


_SECONDS: Final[dict[str, object]] = {"type": "number", "exclusiveMinimum": 0}
_DELAY: Final[dict[str, object]] = {"type": "number", "minimum": 0}

Seconds = Annotated[float | timedelta, BeforeValidator(_seconds), WithJsonSchema(_SECONDS)]
"""A finite time above zero: seconds, or a `timedelta`. Strings such as `"2s"` are refused."""


def or_short(kind: type[Policy]) -> object:
    """Accept a number or a `timedelta` in place of a policy of this kind; see `Policy.short`."""
    field = kind.model_fields[str(kind.short)]
    number = "seconds (a number)" if timedelta in types_in(field.annotation) else "a number"

    def check(value: object) -> object:
        if isinstance(value, (int, float, timedelta)) and not isinstance(value, bool):
            return value
        raise TypeError(
            f"it must be {number} or {_a(kind.__name__)} (in a file a table such as "
            f"{{{kind.short} = 2}}), not {shown(value)}"
        )

    may_be_zero = WithJsonSchema(_DELAY) in field.metadata
    return OrShort(kind, check, (_DELAY if may_be_zero else _SECONDS,))


@dataclass(frozen=True, slots=True, eq=False)
class OrShort:
    """Lets pydantic accept a value for `Policy.short` in place of a policy, also by its schema."""

    kind: type[Policy]
    check: Callable[[object], object]
    """Returns such a value; raises TypeError or ConfigurationError, without its place."""
    schemas: tuple[dict[str, object], ...]
    """Those of such values."""

    def _convert(self, value: object) -> object:
        if value is None or isinstance(value, (self.kind, dict)):
            return value
        return checked(lambda short: self.kind(**{str(self.kind.short): self.check(short)}), value)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_before_validator_function(self._convert, handler(source))

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        return {"anyOf": [*self.schemas, *schema.get("anyOf", [schema])]}


def _delay(value: object) -> object:
    if isinstance(value, (int, float, timedelta)) and not isinstance(value, bool):
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        if not seconds:
            return 0.0
        if seconds < 0:
            raise ConfigurationError(
                f"it must be a finite time of zero or more, not {shown(value)}"
            )
    return _seconds(value)


Delay = Annotated[float | timedelta, BeforeValidator(_delay), WithJsonSchema(_DELAY)]
"""Zero, or a time that `Seconds` accepts."""

Number = Annotated[float, Strict()]
"""A float or an int; no string and no bool."""


class _Exponential(Policy):
    """The table for a wait."""

    initial: Seconds
    max: Seconds
    multiplier: Annotated[Number, Field(ge=1.0, allow_inf_nan=False)] = 2.0
    jitter: Annotated[Number, Field(ge=0.0, le=1.0)] = DEFAULT_JITTER


_ALLOWED_WAITS: Final = (
    "seconds (a number), a table such as {initial = 0.1, max = 10} (in code a dict), or in code a "
    "timedelta or a tenacity wait object such as wait_exponential(max=60)"
)


def _wait(value: object) -> object:
    """Convert a table to a wait object; check any other wait, and return it as it is."""
    if not isinstance(value, dict):
        checked(partial(check_wait, subject="it", allowed=_ALLOWED_WAITS), value)
        return value
    table = checked(lambda fields: _Exponential(**fields), value)
    initial, longest = (to_seconds(to_ns(time)) for time in (table.initial, table.max))
    if initial > longest:
        raise ConfigurationError(f"initial ({initial:g}) is more than max ({longest:g})")
    return JitteredWait(initial, longest, table.multiplier, table.jitter)


_WAIT: Final = {
    "anyOf": [
        _DELAY,
        {
            "type": "object",
            "properties": {
                "initial": _SECONDS,
                "max": _SECONDS,
                "multiplier": {"type": "number", "minimum": 1, "default": 2.0},
                "jitter": {"type": "number", "minimum": 0, "maximum": 1, "default": DEFAULT_JITTER},
            },
            "required": ["initial", "max"],
            "additionalProperties": False,
        },
    ]
}

Wait = Annotated[Any, BeforeValidator(_wait), WithJsonSchema(_WAIT)]
"""A wait before an attempt: seconds or a `timedelta`, of which half is random; a tenacity `wait_*`
object; or a table `{initial, max, multiplier, jitter}` for a `JitteredWait`."""


# Error messages


def error_for_users(error: ValidationError, policy: type[BaseModel]) -> Exception:
    """Make one exception of all errors that pydantic found."""
    message = refusal((text for _, text in messages_of(error, policy)), error.error_count())
    kinds = [mistake["type"] for mistake in error.errors(include_url=False, include_input=False)]
    are_types = all(kind.endswith("_type") for kind in kinds)
    return TypeError(str(message)) if are_types else message


def refusal(messages: Iterable[str], count: int) -> ConfigurationError:
    """Make one exception of several mistakes, with a line for each of the first ones.

    Args:
        messages: Those of the mistakes; equal ones are listed once.
        count: The number of mistakes.
    """
    listed = list(islice(messages, MAX_LISTED))
    others = [f"and {count - len(listed):,} more"] if count > len(listed) else []
    lines = [*dict.fromkeys(listed), *others]
    error = ConfigurationError("\n".join(lines))
    error.problems = tuple(lines)
    return error


def messages_of(error: ValidationError, policy: type[BaseModel]) -> Iterator[tuple[Place, str]]:
    """Yield the place and the message of each error that pydantic found.

    Missing settings come last, because a misspelled setting explains a missing one. Long messages
    are cut in the middle, because they end with what is allowed.
    """
    for mistake in sorted(
        error.errors(include_url=False), key=lambda mistake: mistake["type"] == "missing"
    ):
        text = _message(mistake, policy)
        if len(text) > _MAX_BEGINNING + _MAX_END:
            text = f"{text[:_MAX_BEGINNING]} ... {text[-_MAX_END:]}"
        yield mistake["loc"], text


def field_at(policy: type[BaseModel], place: Place) -> tuple[type[BaseModel], Any]:
    """Find the model that has the setting at `place`, and the field, None if there is none.

    Keys of a table of policies, such as the patterns of `methods`, belong to the place, and are not
    fields.
    """
    field = None
    for step, part in enumerate(place, 1):
        field = policy.model_fields.get(str(part))
        if step < len(place) and field is not None:
            inner = (
                candidate
                for candidate in types_in(field.annotation)
                if issubclass(candidate, BaseModel)
            )
            policy = next(inner, policy)
    return policy, field


def types_in(annotation: object) -> Iterator[type]:
    """Yield the classes in an annotation."""
    if parts := get_args(annotation):
        for part in parts:
            yield from types_in(part)
    elif isinstance(annotation, type):
        yield annotation


def _message(mistake: ErrorDetails, policy: type[BaseModel]) -> str:
    _, field = field_at(policy, mistake["loc"])
    place, actual = path_of(mistake["loc"]), shown(mistake["input"])
    outer = path_of(mistake["loc"][:-1]) + ": " if len(mistake["loc"]) > 1 else ""
    name = str(mistake["loc"][-1]) if mistake["loc"] else ""
    match mistake["type"]:
        case "missing":
            advice = None if field is None else field.description
            return f"{outer}`{name}` is missing" + (f"; {advice}" if advice else "")
        case "extra_forbidden":
            hint = _hint(mistake["loc"], mistake["input"], policy)
            return f"{outer}there is no setting {shown(name)}; {hint}"
        case "tuple_type":
            item = actual if isinstance(mistake["input"], str) else "'...'"
            return (
                f"{place}: it must be a tuple or a list, such as ({item},) (in a file [{item}]), "
                f"not {actual}"
            )
        case "model_type" if isinstance(mistake["input"], Policy):
            return f"{place}: {_misplaced(mistake, policy)}"
        case "own_type" | "value_error" as kind:
            problem = mistake["msg"] if kind == "own_type" else str(mistake["ctx"]["error"])
            problem = problem.replace("\n", "; ")  # of a table with several mistakes
            names_place = not place or re.match(rf"{re.escape(place)}(?!\w)", problem)
            return problem if names_place else f"{place}: {problem}"
        case kind:
            wanted = "it must be true or false" if kind == "bool_type" else readable(mistake["msg"])
            return f"{place}: {wanted}, not {actual}"


def readable(message: str) -> str:
    """Return a message of pydantic in the words of this package."""
    message = re.sub(r"^(Input|List|Tuple|Set|String|Value) should ", "it must ", message)
    message = re.sub(r" after validation, not \d+$", "", message)
    return re.sub("be a valid dictionary or instance of ", "be a table or a ", message)


def _misplaced(mistake: ErrorDetails, policy: type[BaseModel]) -> str:
    """Say what to write in place of a policy of another kind."""
    actual, wanted = type(mistake["input"]), mistake["ctx"]["class_name"]
    owner, field = field_at(policy, mistake["loc"])
    for kind in (owner, *types_in(field and field.annotation)):
        if kind.__name__ == wanted and issubclass(kind, BaseModel):
            for name, inner in kind.model_fields.items():
                if actual in types_in(inner.annotation):
                    written = f"{wanted}({name}={shown(mistake['input'])})"
                    return f"it must be {_a(wanted)}, not {_a(actual.__name__)}; write {written}"
    return f"it must be {_a(wanted)}, not {_a(actual.__name__)}"


def _a(name: str) -> str:
    """The name with its indefinite article."""
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


SYNONYMS: Final = {
    "failsafe": "default_response",
    "fallback": "default_response",
    "registry": "registry_policy",
    "retries": "max_attempts",
    "wait": "backoff",
}
"""Names of settings in other libraries and in earlier versions."""


def _hint(place: Place, value: object, policy: type[BaseModel]) -> str:
    """Say which setting was probably meant by an unknown name with this value."""
    owner, _ = field_at(policy, place)
    hints = (_outer(place, policy), _similar(str(place[-1]), value, owner))
    return "; or ".join(filter(None, hints)) or f"there are {', '.join(owner.model_fields)}"


def _outer(place: Place, policy: type[BaseModel]) -> str:
    """Say which table around this one has the setting, or return an empty string.

    In TOML, a key after the header of a table belongs to this table, also one meant for the file.
    """
    *tables, name = place
    for level in reversed(range(len(tables))):
        outer = place[:level]
        if field_at(policy, (*outer, name))[1] is not None:
            if outer:
                return f"it is a setting of {path_of(outer)}"
            return "it is a setting of the top level: in TOML, write it before the first [table]"
    return ""


def _similar(name: str, value: object, owner: type[BaseModel]) -> str:
    """Say which setting of the same policy is similar, or return an empty string."""
    fields = owner.model_fields
    if isinstance(value, dict) and value and fields.keys() >= value.keys():
        return f"write its settings at the top level, without it: {', '.join(value)}"
    for outer, field in fields.items():
        for inner in types_in(field.annotation):
            if issubclass(inner, BaseModel) and name in inner.model_fields:
                return f"did you mean {outer}={inner.__name__}({name}={shown(value)})?"
    if SYNONYMS.get(name) in fields:
        return f"did you mean {SYNONYMS[name]!r}?"
    near = difflib.get_close_matches(name, fields, n=1) or [
        field for field in fields if name in field.split("_")
    ]
    return f"did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Return a value as messages show it: short, and only the class of a policy."""
    return f"{type(value).__name__}(...)" if isinstance(value, Policy) else short_repr(value)


def path_of(place: Place) -> str:
    """Return a place as messages show it: `methods["/shop.Orders/Get"].retry.max_attempts`."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif str(part).isidentifier():
            path += f".{part}"
        elif part != "[key]":  # by which pydantic means the key itself
            path += f'["{part}"]'
    return path.removeprefix(".")
