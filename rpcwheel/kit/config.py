"""Settings of a kit from a file and from the environment, and their JSON schema.

A file is TOML or YAML. Its keys are the fields of `KitPolicy`, its tables the policies in them::

    timeout = 2.0
    retry = { retry_on = ["UNAVAILABLE"], max_attempts = 4, backoff = { initial = 0.1, max = 2.0 } }

    [methods."/shop.Orders/Get*"]
    idempotent = true

The name of a variable is the path of a setting. Its value is JSON or plain text. It overrides that
setting of the file, and no other::

    RPCWHEEL_CONFIG=/etc/shop/rpcwheel.toml
    RPCWHEEL_TIMEOUT=5
    RPCWHEEL_RETRY__RETRY_ON=["UNAVAILABLE", "INTERNAL"]

`false` means None, which TOML lacks: `retry = false` for a method switches retries off there.

Input is limited before it can cost much time or memory: the size of a file, the depth of nesting,
the size of integers, and the number of values, with YAML's aliases resolved.

Not made with pydantic-settings (tried with 2.16): it leaves values as strings, which the strict
types refuse, ignores variables that name no setting, and does not know where a wrong value came
from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit

from rpcwheel.errors import ConfigurationError, masked_url
from rpcwheel.policy import Policy, field_at, messages_of, path_of, refusal, shown, types_in
from rpcwheel.telemetry.switches import METRICS_VARIABLE, TRACES_VARIABLE

from .policy import PREFIX, KitPolicy, journal_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import core_schema

    SettingPath = tuple[str, ...]

__all__ = [
    "checked_tree",
    "policy_from_env",
    "policy_from_file",
    "read_text",
    "settings_schema",
]

OTHER_VARIABLES: Final = {"RPCWHEEL_PURE", METRICS_VARIABLE, TRACES_VARIABLE}
"""Variables that are not settings of a kit: of the build, the metrics and the traces."""

_SERVICE_VARIABLE: Final = re.compile(
    r"(\w*?)_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""A variable that Kubernetes sets for each Service of a namespace."""

OFF: Final = ("null", "false")
"""What a variable says for None."""

SUFFIXES: Final = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}

MAX_FILE_BYTES: Final = 1 << 20
"""The largest file that is read."""

MAX_LEVELS: Final = 50
"""The deepest nesting of tables and lists. The settings need five levels."""

MAX_BITS: Final = 64
"""The largest integer; a response's field of type `uint64` has as many bits."""

_TOO_LARGE: Final = f"an integer may have at most {MAX_BITS} bits; give a smaller one"

MAX_DOTS: Final = 200
"""The most dots in a line of TOML. The time that `tomllib` takes for a key of n names, joined by
dots, grows with n squared (CPython 3.11: 5 s for 16,000 names)."""

MAX_VALUES: Final = 50_000
"""The most values in a YAML file, with its aliases resolved."""

MAX_EXAMPLE_LENGTH: Final = 200
"""The longest value of a variable that a message shows as a JSON list."""


def policy_from_file(path: str | os.PathLike[str]) -> KitPolicy:
    """Read a policy from a TOML or YAML file.

    Args:
        path: Ends with `.toml`, `.yaml` or `.yml`. YAML needs `rpcwheel[config]`.

    Raises:
        ConfigurationError: The file can't be read or parsed, or a setting in it is unknown, out of
            range, of a wrong type, or contradicts another. The message lists all mistakes.
    """
    return _policy(_read(path), lambda _: str(path))


def policy_from_env(prefix: str = PREFIX, environ: Mapping[str, str] | None = None) -> KitPolicy:
    """Read a policy from the environment, and from the file that `<prefix>CONFIG` names.

    Args:
        prefix: How the names of the variables begin. Every variable with this prefix must name a
            setting. Empty variables are ignored, and those that Kubernetes sets for a Service with
            such a name.
        environ: None: `os.environ`.

    Raises:
        ConfigurationError: As `policy_from_file`; or a variable with this prefix names no setting.
        TypeError: `prefix` is not a string.
    """
    _check_prefix(prefix)
    environ = os.environ if environ is None else environ
    variables = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(prefix) and name not in OTHER_VARIABLES and value.strip()
    }
    file = variables.pop(f"{prefix}CONFIG", None)
    tree = {} if file is None else _read(file)
    origins: dict[SettingPath, str] = {}
    unknown: list[str] = []
    for name, text in variables.items():
        if "://" in text and _is_of_service(name, environ):  # it may be named as a setting is
            continue
        parts = name.removeprefix(prefix).split("__")
        place = tuple(part.lower() for part in parts)
        if place[0] == "methods":
            place = (place[0], *parts[1:2], *place[2:])  # the name of a method as it is written
        if place[0] not in (*KitPolicy.model_fields, "config"):
            if not _is_of_service(name, environ):
                unknown.append(_unknown_variable(name, place, prefix))
            continue
        is_token = place == ("status_token",) and text.strip() not in OFF
        value = text if is_token else _value(text, name)
        origins[place] = name if value != text or is_token else name + _as_list(text)
        _merge(tree, checked_tree(_nest(place, value), name))

    def origin(place: SettingPath) -> str:
        """Return the variable that gave a setting or a part of it, or else the file.

        For the place () that is all of them. A missing setting is reported with its table.
        """
        if not place:
            return ", ".join(filter(None, (file, *origins.values())))
        near = [
            path for path in origins if path == place[: len(path)] or place == path[: len(place)]
        ]
        if near:
            return origins[max(near, key=len)]
        return file or origin(place[:-1])

    return _policy(tree, origin, unknown)


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a settings file, TOML or YAML.

    Editors use it to complete and check a file. The JSON of variables, nested by the parts of their
    names, has the same form. The schema does not find settings that contradict each other;
    `policy_from_file` does. Settings that only code can give, such as `dead_letter`, are not in it.
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
    """The schema of a file: times are numbers, and `false` means None."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave out titles, which repeat the names."""
        return False

    def emit_warning(self, kind: object, detail: str) -> None:
        """Do not warn of defaults that JSON cannot express, such as a tenacity object."""

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        """Leave out `timedelta`, which pydantic would describe as text."""
        raise PydanticOmit

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Allow `false`, except for booleans."""
        inner = self.generate_inner(schema["schema"])
        off: list[dict[str, Any]] = [{"type": "null"}]
        if inner.get("type") != "boolean":
            off.append({"const": False})
        return {"anyOf": [*inner.get("anyOf", [inner]), *off]}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Allow only patterns of methods as keys."""
        return super().dict_schema(schema) | {"additionalProperties": False}


def _policy(
    tree: dict[str, Any], origin: Callable[[SettingPath], str], others: Sequence[str] = ()
) -> KitPolicy:
    """Make a policy of the settings; `others` are problems that were found before."""
    try:
        policy = KitPolicy.model_validate(_without_false(tree, ()))
    except ValidationError as error:
        problems, count = messages_of(error, KitPolicy), error.error_count()
    else:
        journal = list(journal_problems(policy))
        if not journal and not others:
            return policy
        problems, count = iter(journal), len(journal)
    lines = (f"{origin(tuple(map(str, place)))}: {message}" for place, message in problems)
    raise refusal(chain(others, lines), len(others) + count)


def checked_tree(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the tree of settings.

    Raises:
        ConfigurationError: A value is nested too deep, or an integer is too large; `where` is the
            file or variable that the tree comes from.
    """

    def check(value: object, place: tuple[str | int, ...]) -> None:
        if isinstance(value, (dict, list, tuple, set)):
            if len(place) >= MAX_LEVELS:
                raise ConfigurationError(_too_deep(where))
            if isinstance(value, dict):
                for name, part in value.items():
                    check(part, (*place, str(name)))
            else:
                for number, part in enumerate(value):
                    check(part, (*place, number))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ConfigurationError(f"{where}: {path_of(place)}: {_TOO_LARGE}")

    check(tree, ())
    return tree


def _too_deep(where: str) -> str:
    return (
        f"{where}: nested more than {MAX_LEVELS} levels deep; settings need five, see "
        "docs/policies.md: reduce the nesting"
    )


def _without_false(tree: dict[str, Any], place: SettingPath) -> dict[str, Any]:
    """Replace `false` by None in settings that may be None."""
    cleared: dict[str, Any] = {}
    for name, value in tree.items():
        here = (*place, str(name))
        if isinstance(value, dict) and here[-1] != "default":
            cleared[name] = _without_false(value, here)
        else:
            cleared[name] = None if value is False and _may_be_none(here) else value
    return cleared


def _may_be_none(place: SettingPath) -> bool:
    """Return whether `false` means None here. It does not for booleans."""
    _, field = field_at(KitPolicy, place)
    kinds = set() if field is None else set(types_in(field.annotation))
    return type(None) in kinds and bool not in kinds


# Files


def _read(file: str | os.PathLike[str]) -> dict[str, Any]:
    path, name = Path(file), os.fspath(file)
    if "://" in name[2:]:  # not `C://`
        raise ConfigurationError(f"{masked_url(name)}: give the path of a settings file, not a URL")
    form = SUFFIXES.get(path.suffix.lower())
    if form is None:
        raise ConfigurationError(f"{path}: its name must end with {', '.join(SUFFIXES)}")
    text = read_text(path)
    tree = _toml(text, path) if form == "TOML" else _yaml(text, path)
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: it must hold settings by name, not {shown(tree)}")
    return checked_tree(tree, str(path))


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        ConfigurationError: It can't be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigurationError(
                f"{path}: it is larger than {MAX_FILE_BYTES:,} bytes; settings need a few "
                "thousand: check that it is the right file"
            )
        return content.decode("utf-8-sig").replace("\r\n", "\n")
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
    """Parse YAML 1.2 with ruamel.yaml. PyYAML parses YAML 1.1, where the key `on` is True."""
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
        # A value that does not fit its tag raises any of these: `!!int a`, `!!timestamp a`.
        raise ConfigurationError(f"{path}: not valid YAML: {_reason(error)}") from error
    return {} if tree is None else tree


def _reason(error: Exception) -> str:
    """Return the parser's message in one line, without advice that is wrong for settings."""
    if "sys.set_int_max_str_digits" in str(error):
        return _TOO_LARGE
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    # A `MarkedYAMLError`, whose text has several lines, and advice to allow duplicate keys.
    context = getattr(error, "context", None) or ""
    if context and (begin := getattr(error, "context_mark", None)) is not None:
        context = f"{context} (line {begin.line + 1})"
    problem = str(getattr(error, "problem", "")).partition(" with value ")[0]
    reason = ", ".join(filter(None, (context, problem)))
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}"


def _check_events(events: Iterable[Any], path: Path) -> None:
    """Check the events of a YAML parser before values are constructed from them.

    Parsing takes time in proportion to the text. Constructing the values can take exponential time
    and stack, because of aliases ("billion laughs") and merge keys.

    Raises:
        ConfigurationError: Values are nested too deep, or aliases stand for too many values, or for
            a value that contains the alias.
    """
    sizes: dict[str | None, int | None] = {}  # values by anchor; None: it has not ended yet
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


def _check_prefix(prefix: object) -> None:
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string, such as 'SHOP_RPC_', not {prefix!r}")
    if not prefix.endswith("_") or not prefix.isupper():
        raise ConfigurationError(
            f"prefix must be in capital letters and end with '_', such as 'SHOP_RPC_', not "
            f"{prefix!r}"
        )


def _is_of_service(name: str, environ: Mapping[str, str]) -> bool:
    variable = _SERVICE_VARIABLE.fullmatch(name)
    return variable is not None and f"{variable[1]}_SERVICE_HOST" in environ


def _unknown_variable(name: str, place: SettingPath, prefix: str) -> str:
    settings = [*KitPolicy.model_fields, "config"]
    paths = {path.replace("__", "_"): path for path in (*settings, *_inner_paths())}
    near = difflib.get_close_matches("_".join(place), paths, n=1)
    names = [f"{prefix}{path.upper()}" for path in ([paths[near[0]]] if near else settings)]
    hint = f"did you mean {names[0]}?" if near else f"there are {', '.join(names)}"
    return f"{name}: there is no such setting; {hint}"


def _inner_paths() -> Iterator[str]:
    """Yield the settings of the policies in a `KitPolicy`, as variables name them."""
    for outer, field in KitPolicy.model_fields.items():
        for kind in types_in(field.annotation):
            if outer != "methods" and issubclass(kind, Policy):
                yield from (f"{outer}__{inner}" for inner in kind.model_fields)


def _value(text: str, name: str) -> object:
    """Parse the value of a variable as JSON; if it is not JSON, return the text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigurationError(_too_deep(name)) from None
    except ValueError:
        return text


def _as_list(text: str) -> str:
    """Say how to write a text that looks like a list and is not JSON; "" for plain text."""
    has_login = "@" in text  # perhaps of a URL that `masked_url` does not know
    if "://" in text:
        text = masked_url(text)
    parts = [part.strip(" []\"'") for part in text.split(",")]
    if len(parts) == 1 and not text.lstrip().startswith("["):
        return ""
    written = json.dumps([part for part in parts if part])
    is_hidden = has_login or len(written) > MAX_EXAMPLE_LENGTH
    example = '["...", "..."]' if is_hidden else written
    return f" (not JSON; a list is written {example})"


def _nest(place: SettingPath, value: object) -> dict[str, Any]:
    for part in reversed(place[1:]):
        value = {part: value}
    return {place[0]: value}


def _merge(tree: dict[str, Any], change: dict[str, Any], place: SettingPath = ()) -> None:
    """Merge a change into a tree: tables are merged, other values are replaced."""
    for name, value in change.items():
        here = (*place, name)
        before, after = _table(here, tree.get(name)), _table(here, value)
        if isinstance(before, dict) and isinstance(after, dict) and name != "default":
            tree[name] = dict(before)  # a YAML alias may stand for the same table elsewhere
            _merge(tree[name], after, here)
        else:
            tree[name] = after


def _table(place: SettingPath, value: object) -> object:
    """Return the table that a number stands for, as in `timeout = 2.0`, or else the value."""
    _, field = field_at(KitPolicy, place)
    if field is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    kinds = (kind for kind in types_in(field.annotation) if issubclass(kind, Policy))
    return next(({kind.short: value} for kind in kinds if kind.short), value)
