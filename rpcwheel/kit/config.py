"""The policy of a kit from a file, and from the environment.

A file is TOML or YAML; its keys are the fields of `KitPolicy`, its tables the policies in them::

    timeout = 2.0
    retry = { retry_on = ["UNAVAILABLE"], max_attempts = 4, backoff = { initial = 0.1, max = 2.0 } }

    [methods."/shop.Orders/Get*"]
    idempotent = true

A variable's name is the path of a setting, its value is JSON or a plain word. It changes what it
names and leaves the rest of the file as it is::

    RPCWHEEL_CONFIG=/etc/shop/rpcwheel.toml
    RPCWHEEL_TIMEOUT=5
    RPCWHEEL_RETRY__RETRY_ON=["UNAVAILABLE", "INTERNAL"]

`false` stands for None, which TOML lacks: `retry = false` for a method switches it off there.

Input is limited before anything expensive is done with it: the size of a file, how deep values are
nested, the size of integers, and how many values YAML's aliases stand for.

Not made with pydantic-settings (tried with 2.16): it leaves values as strings that our strict types
refuse, ignores variables that name no setting, and knows nothing of where a wrong value came from.
"""

from __future__ import annotations

import difflib
import json
import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit

from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Policy, field_at, messages_of, path_of, shown, types_in

from .policy import PREFIX, KitPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import core_schema

    Place = tuple[str, ...]

__all__ = [
    "checked_tree",
    "policy_from_env",
    "policy_from_file",
    "read_text",
    "settings_schema",
]

NO_SETTINGS: Final = {"RPCWHEEL_PURE", "RPCWHEEL_EXPECT"}
"""Variables of ours that say how to build and test."""

SUFFIXES: Final = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}

MAX_FILE_BYTES: Final = 1 << 20
"""The largest file that is read."""

MAX_LEVELS: Final = 50
"""How many tables and lists may contain each other. The settings need five."""

MAX_BITS: Final = 64
"""The largest integer; a response's field of type `uint64` has as many bits."""

_TOO_LARGE: Final = f"an integer may have at most {MAX_BITS} bits; give a smaller one"

MAX_DOTS: Final = 200
"""How many dots a line of TOML may have. The time that `tomllib` takes for a key of n names joined
by dots grows with n squared (CPython 3.11: 5 s for 16,000 names)."""

MAX_VALUES: Final = 50_000
"""How many values a YAML file may have, each alias counted as all that it stands for."""

MAX_MISTAKES: Final = 20
"""How many mistakes an error lists."""

MAX_EXAMPLE: Final = 200
"""How many characters of a variable are written as a list, as an example."""


def policy_from_file(path: str | os.PathLike[str]) -> KitPolicy:
    """Read a policy from a TOML or YAML file.

    Args:
        path: Its suffix tells which: `.toml`, `.yaml` or `.yml`. YAML needs `rpcwheel[config]`.

    Raises:
        ConfigurationError: The file can't be read, is not in its format, or a setting in it is
            unknown, out of range, of a wrong type, or contradicts another; all in one message.
    """
    return _policy(_read(Path(path)), lambda _: str(path))


def policy_from_env(prefix: str = PREFIX, environ: Mapping[str, str] | None = None) -> KitPolicy:
    """Read a policy from the environment, and from the file that `<prefix>CONFIG` names.

    Args:
        prefix: How the variables' names begin. All that begin so must be settings; empty ones are
            taken for not set.
        environ: None takes `os.environ`.

    Raises:
        ConfigurationError: As `policy_from_file`; a variable names no setting.
    """
    if not prefix.endswith("_") or not prefix.isupper():
        raise ConfigurationError(
            f"prefix must be capital letters and end with '_', such as 'SHOP_RPC_', not {prefix!r}"
        )
    environ = os.environ if environ is None else environ
    variables = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(prefix) and name not in NO_SETTINGS and value.strip()
    }
    file = variables.pop(f"{prefix}CONFIG", None)
    tree = {} if file is None else _read(Path(file))
    origins: dict[Place, str] = {}
    for name, text in variables.items():
        place = _place(name, prefix)
        value = _value(text, name)
        origins[place] = name if value != text else name + _as_list(text)
        _merge(tree, checked_tree(_nested(place, value), name))

    def origin(place: Place) -> str:
        """The variable that set it, or something in it, or else the file; for () all of them.

        What no variable and no file set is missing where a variable set something else.
        """
        if not place:
            return ", ".join(filter(None, (file, *origins.values())))
        near = [one for one in origins if one == place[: len(one)] or place == one[: len(place)]]
        if near:
            return origins[max(near, key=len)]
        return file or origin(place[:-1])

    return _policy(tree, origin)


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a settings file, TOML or YAML.

    Editors complete and check a file with it. It describes each setting by itself. Settings that
    contradict each other are found by `policy_from_file` only. Settings that only code can give,
    such as `dead_letter`, are not in it.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **KitPolicy.model_json_schema(schema_generator=_SettingsSchema),
        "title": "Settings of rpcwheel",
        "description": (
            "The settings of a kit. Times are seconds. `false` switches a setting off, as None "
            "does in code."
        ),
    }


class _SettingsSchema(GenerateJsonSchema):
    """The schema as a file has it: numbers for times, `false` for None, no types of Python."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}  # noqa: RUF012 - as base

    def field_title_should_be_set(self, schema: Any) -> bool:
        """No titles: they repeat the names."""
        return False

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        """No text for times."""
        raise PydanticOmit

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Allow `false` where it stands for None: not for a count, and not for a yes or no."""
        inner = self.generate_inner(schema["schema"])
        off: list[dict[str, Any]] = [{"type": "null"}]
        if inner.get("type") not in {"integer", "boolean"}:
            off.append({"const": False})
        return {"anyOf": [*inner.get("anyOf", [inner]), *off]}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Allow no key that is no pattern of methods."""
        return super().dict_schema(schema) | {"additionalProperties": False}


def _policy(tree: dict[str, Any], origin: Callable[[Place], str]) -> KitPolicy:
    try:
        return KitPolicy.model_validate(_without_false(tree, ()))
    except ValidationError as error:
        said: dict[str, list[str]] = {}
        for place, what in islice(messages_of(error, KitPolicy), MAX_MISTAKES):
            said.setdefault(origin(tuple(map(str, place))), []).append(what)
        others = error.error_count() - MAX_MISTAKES
    raise ConfigurationError(
        "; ".join(f"{where}: {'; '.join(what)}" for where, what in said.items())
        + (f"; and {others:,} more" if others > 0 else "")
    )


def checked_tree(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The tree, if no value is nested too deep and no integer is too large.

    Raises:
        ConfigurationError: As above; `where` is the file or variable that the tree comes from.
    """

    def check(value: object, place: Place) -> None:
        if isinstance(value, (dict, list, tuple, set)):
            if len(place) >= MAX_LEVELS:
                raise ConfigurationError(_too_deep(where))
            named = value.items() if isinstance(value, dict) else enumerate(value)
            for name, part in named:
                check(part, (*place, str(name)))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ConfigurationError(f"{where}: {path_of(place)}: {_TOO_LARGE}")

    check(tree, ())
    return tree


def _too_deep(where: str) -> str:
    return (
        f"{where}: nested more than {MAX_LEVELS} levels deep; settings need five, see "
        "docs/policies.md: reduce the nesting"
    )


def _without_false(tree: dict[str, Any], place: Place) -> dict[str, Any]:
    """The tree with None for `false` where None is allowed, and a yes or no is not meant."""
    cleared: dict[str, Any] = {}
    for name, value in tree.items():
        here = (*place, str(name))
        if isinstance(value, dict) and here[-1] != "default":
            value = _without_false(value, here)  # noqa: PLW2901 - the same, cleared
        cleared[name] = None if value is False and _may_be_off(here) else value
    return cleared


def _may_be_off(place: Place) -> bool:
    """Whether `false` means None here: not for a count, where it could as well be 0."""
    _, field = field_at(KitPolicy, place)
    kinds = set() if field is None else set(types_in(field.annotation))
    return type(None) in kinds and not kinds & {int, bool}


# Files


def _read(path: Path) -> dict[str, Any]:
    form = SUFFIXES.get(path.suffix.lower())
    if form is None:
        raise ConfigurationError(f"{path}: its name must end with {', '.join(SUFFIXES)}")
    text = read_text(path)
    tree = _toml(text, path) if form == "TOML" else _yaml(text, path)
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: it must hold settings by name, not {shown(tree)}")
    return checked_tree(tree, str(path))


def read_text(path: Path) -> str:
    """The text of a file, if it is not too large.

    Raises:
        ConfigurationError: It can't be read, is too large, or no UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigurationError(
                f"{path}: it is larger than {MAX_FILE_BYTES:,} bytes; settings need a few "
                "thousand: check that it is the right file"
            )
        return content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: it can't be read: {error}") from error


def _toml(text: str, path: Path) -> dict[str, Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            raise ConfigurationError(
                f"{path}: line {number} has more than {MAX_DOTS} dots; write it as several lines"
            )
    import tomllib

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigurationError(_too_deep(str(path))) from None
    except ValueError as error:  # a TOMLDecodeError, or an integer of too many digits
        raise ConfigurationError(f"{path}: not valid TOML: {_reason(error)}") from error


def _yaml(text: str, path: Path) -> object:
    """By ruamel.yaml: YAML 1.2, where the key `on` is a word. For PyYAML it is True."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{path}: YAML needs ruamel.yaml: pip install 'rpcwheel[config]'; TOML needs nothing"
        ) from error
    try:
        _check_events(YAML(typ="safe", pure=True).parse(text), path)
        tree = YAML(typ="safe", pure=True).load(text)
    except ConfigurationError:
        raise
    except (YAMLError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What does not fit its tag raises any of these: `!!int a`, `!!bool a`, `!!timestamp a`.
        raise ConfigurationError(f"{path}: not valid YAML: {_reason(error)}") from error
    return {} if tree is None else tree


def _reason(error: Exception) -> str:
    """The parser's message; for CPython's limit of digits, which ends with wrong advice, ours."""
    return _TOO_LARGE if "sys.set_int_max_str_digits" in str(error) else str(error)


def _check_events(events: Iterable[Any], path: Path) -> None:
    """Check the events of a YAML parser, before values are made of them.

    The parser needs time in proportion to the text. To make the values can take a time, and a
    stack, that is exponential in it, because of aliases ("billion laughs") and merge keys.

    Raises:
        ConfigurationError: Values are nested too deep, or the aliases stand for too many values,
            or for a value that contains the alias.
    """
    sizes: dict[str | None, int | None] = {}  # by anchor: the values in what it marks, None: open
    begun: list[tuple[str | None, int]] = []
    values = 0
    for event in events:
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        if kind.endswith("EndEvent"):
            anchor, before = begun.pop()
            sizes[anchor] = values - before
            continue
        if kind.endswith("StartEvent"):
            begun.append((anchor, values))
            sizes[anchor] = None
        elif kind == "ScalarEvent":
            sizes[anchor] = 1
        elif (size := sizes.get(anchor, 0)) is not None:  # `load` refuses an alias of no anchor
            values += size
        else:
            raise ConfigurationError(
                f"{path}: line {event.start_mark.line + 1}: the alias *{anchor} is inside the "
                "value that it stands for"
            )
        values += 1
        if len(begun) > MAX_LEVELS + 2:  # the stream and the document begin and end too
            raise ConfigurationError(_too_deep(str(path)))
        if values > MAX_VALUES:
            raise ConfigurationError(
                f"{path}: it has, or its aliases stand for, more than {MAX_VALUES:,} values"
            )


# Variables


def _place(name: str, prefix: str) -> Place:
    place = tuple(name.removeprefix(prefix).lower().split("__"))
    known = [*KitPolicy.model_fields, "config"]
    if place[0] in known:
        return place
    paths = {path.replace("__", "_"): path for path in (*known, *_inner_paths())}
    near = difflib.get_close_matches("_".join(place), paths, n=1)
    names = [f"{prefix}{one.upper()}" for one in ([paths[near[0]]] if near else known)]
    hint = f"did you mean {names[0]}?" if near else f"there are {', '.join(names)}"
    raise ConfigurationError(f"{name}: there is no such setting; {hint}")


def _inner_paths() -> Iterator[str]:
    """The settings of the policies in a `KitPolicy`, as variables name them."""
    for outer, field in KitPolicy.model_fields.items():
        for kind in types_in(field.annotation):
            if outer != "methods" and issubclass(kind, Policy):
                yield from (f"{outer}__{inner}" for inner in kind.model_fields)


def _value(text: str, name: str) -> object:
    """A variable's value: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigurationError(_too_deep(name)) from None
    except ValueError:
        return text


def _as_list(text: str) -> str:
    """How to write what looks like a list and is no JSON; nothing for a plain word."""
    parts = [part.strip(" []\"'") for part in text.split(",")]
    if len(parts) == 1 and not text.lstrip().startswith("["):
        return ""
    written = json.dumps([part for part in parts if part])
    example = written if len(written) <= MAX_EXAMPLE else '["...", "..."]'
    return f" (no JSON; a list is {example})"


def _nested(place: Place, value: object) -> dict[str, Any]:
    for part in reversed(place[1:]):
        value = {part: value}
    return {place[0]: value}


def _merge(tree: dict[str, Any], change: dict[str, Any], place: Place = ()) -> None:
    """Put a change into a tree: tables are merged, all else is replaced."""
    for name, value in change.items():
        here = (*place, name)
        before, after = _table(here, tree.get(name)), _table(here, value)
        if isinstance(before, dict) and isinstance(after, dict) and name != "default":
            tree[name] = dict(before)  # a YAML alias may stand for the same table elsewhere
            _merge(tree[name], after, here)
        else:
            tree[name] = after


def _table(place: Place, value: object) -> object:
    """The value; for `timeout = 2.0` the table that it stands for."""
    _, field = field_at(KitPolicy, place)
    if field is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    kinds = (kind for kind in types_in(field.annotation) if issubclass(kind, Policy))
    return next(({kind.short: value} for kind in kinds if kind.short), value)
