"""`rpcwheel config check|schema`: check a settings file, and show what it means."""

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import date, time
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

import typer

from rpcwheel.backoff import JitteredWait
from rpcwheel.call.policy import REPLACED, MethodPolicy
from rpcwheel.errors import ConfigurationError, ExtraMissing, masked_url
from rpcwheel.journal.url import parse_journal_url
from rpcwheel.kit.config import policy_from_env, policy_from_file, settings_schema
from rpcwheel.kit.policy import PREFIX, KitPolicy
from rpcwheel.limit.policy import ADAPTIVE
from rpcwheel.methods import matches, specificity
from rpcwheel.policy import Policy
from rpcwheel.rpc import Criticality

from .findings import printable
from .table import print_table

config = typer.Typer(no_args_is_help=True, help="Check settings files.")


@config.command()
def schema() -> None:
    """Print the JSON schema of a settings file, for editors."""
    print(json.dumps(settings_schema(), indent=2))


def _check_prefix(prefix: str) -> str:
    try:
        policy_from_env(prefix or PREFIX, {})
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None
    return prefix


@config.command()
def check(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A settings file, TOML or YAML.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="/PACKAGE.SERVICE/METHOD", help="Show the settings of this method."),
    ] = None,
    env: Annotated[
        bool,
        typer.Option("--env", help=f"Read {PREFIX}... variables too, as Kit.from_env does. FILE "
                     f"replaces {PREFIX}CONFIG, and may be left out."),
    ] = False,
    prefix: Annotated[
        str,
        typer.Option(callback=_check_prefix, help="Read the variables with this prefix, such as "
                     "SHOP_RPC_; implies --env.", show_default=PREFIX),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:  # fmt: skip
    """Check a settings file, and print all problems or the settings that are in effect.

    Exit status: 0 if the settings are valid, 1 if not, 2 for a wrong argument, or if the file
    cannot be read or a package that it needs is missing.
    """
    if method is not None and not re.fullmatch(r"/[\w.]+/\w+", method):
        raise typer.BadParameter(
            f"give a method in full, such as /shop.Orders/Get, not {method!r}",
            param_hint="--method",
        )
    if env:
        prefix = prefix or PREFIX
    origin = "file"
    try:
        if prefix:
            environ = os.environ | ({} if file is None else {f"{prefix}CONFIG": file})
            policy = policy_from_env(prefix, environ)
            origin = "file or variable" if environ.get(f"{prefix}CONFIG") else "variable"
        elif file is not None:
            policy = policy_from_file(file)
        else:
            raise typer.BadParameter("give a FILE, or --env", param_hint="FILE")
    except ExtraMissing as error:
        print(printable(str(error)), file=sys.stderr)
        raise typer.Exit(2) from None
    except ConfigurationError as error:
        if isinstance(error.__cause__, (ModuleNotFoundError, OSError)):
            print(printable(str(error)), file=sys.stderr)
            raise typer.Exit(2) from None
        problems = error.problems or (str(error),)
        if as_json:
            shown = masked_url(file) if file and "://" in file else file
            print(json.dumps({"file": shown, "valid": False, "problems": problems}, indent=2))
        else:
            print(*map(printable, problems), sep="\n", file=sys.stderr)
        raise typer.Exit(1) from None
    settings = list(
        _method_settings(policy, origin, method) if method else _all_settings(policy, origin)
    )
    notes = [] if method else list(_notes(policy))
    if as_json:
        values = {
            setting.name: {"value": _as_json(setting.value), "from": setting.source}
            | ({"note": setting.note} if setting.note else {})
            for setting in settings
        }
        report = {"file": file, "valid": True, "notes": notes, "settings": values}
        print(json.dumps(report, indent=2, default=str))
        return
    rows = [
        (name, _as_toml(value), f"{source} ({note})" if note else source)
        for name, value, source, note in settings
    ]
    print_table(("setting", "value", "from"), rows, sys.stdout)
    result = "The settings are valid." if prefix else f"{file} is valid."
    print("", *map("note: {}".format, notes), result, sep="\n")


class Setting(NamedTuple):
    """One setting that is in effect."""

    name: str
    value: Any
    """The value, as in JSON; also a date or a time, which JSON lacks and TOML has."""
    source: str
    """"file", "variable", "file or variable", "default", or the pattern of the methods that it is
    set for."""
    note: str = ""
    """Why it has no effect, or the policy that replaced it."""


Layer = tuple[str, Policy]
"""Settings that are given in one place, and the name of the place."""


def _all_settings(policy: KitPolicy, origin: str) -> Iterator[Setting]:
    """Yield the general settings, and those that are given for some methods."""
    for name in KitPolicy.model_fields:
        if name != "methods":
            yield from _settings(name, getattr(policy, name), [(origin, policy)])
    for pattern, own in policy.methods.items():
        for name in MethodPolicy.model_fields:
            for setting in _settings(name, getattr(own, name), [(origin, own)]):
                if setting.source == origin:
                    yield setting._replace(name=f'methods."{pattern}".{setting.name}')


NOT_IDEMPOTENT: Final = {
    "retry": "only for calls that a server refuses",
    "hedging": "no effect",
}
"""The effect of settings of a method that is not idempotent."""


def _notes(policy: KitPolicy) -> Iterator[str]:
    """Say which settings have less effect than expected, because no method is idempotent."""
    layers = (policy, *policy.methods.values())
    if any(layer.idempotent for layer in layers):
        return
    for name, effect in NOT_IDEMPOTENT.items():
        if any(getattr(layer, name) is not None for layer in layers):
            yield f"{name}: {effect}, because no method has idempotent = true"


OF_METHOD: Final = ("limit.max_concurrent", "limit.rate")
"""What the limit of a method may have."""

ALSO_OF_SERVER: Final = "in addition to the limit of the server"
"""What the limit of a method is."""


def _method_settings(policy: KitPolicy, origin: str, method: str) -> Iterator[Setting]:
    """Yield the settings of one method, and where each comes from."""
    patterns = sorted(policy.methods, key=specificity)
    layers: list[Layer] = [(origin, policy)]
    layers += [
        (pattern, policy.methods[pattern]) for pattern in patterns if matches(pattern, method)
    ]
    effective = policy.policy_for(method)
    for name in MethodPolicy.model_fields:
        value = getattr(effective, name)
        limited = ""
        if name in NOT_IDEMPOTENT and value is not None and not effective.idempotent:
            limited = f"{NOT_IDEMPOTENT[name]}: the method is not idempotent"
        settings = _settings(name, value, layers)
        if name == "limit" and value is not None and value is not policy.limit:
            settings = (setting for setting in settings if _is_of_method(setting))
            limited = ALSO_OF_SERVER if policy.limit is not None else ""
        for setting in settings:
            yield setting._replace(note=limited or setting.note)


def _is_of_method(setting: Setting) -> bool:
    """Whether a setting in the limit of a method has an effect."""
    return setting.name in OF_METHOD and setting.value not in (None, ADAPTIVE)


@cache
def _names(policy: str) -> list[str]:
    """Return the settings of a policy that a file can set."""
    return list(settings_schema()["$defs"][policy]["properties"])


def _settings(name: str, value: object, layers: Sequence[Layer]) -> Iterator[Setting]:
    """Yield a setting; of a policy, each setting in it."""
    if not isinstance(value, Policy):
        yield Setting(name, _as_plain(value), *_source(name, layers))
        return
    for part in _names(type(value).__name__):
        source, set_there = _source_in(name, part, layers)
        inner = _without_secrets(name, part, getattr(value, part))
        left_out = inner is None and set_there is not None
        note = "no effect: not shorter than timeout" if left_out else ""
        yield Setting(f"{name}.{part}", _as_plain(inner), source, note)


def _without_secrets(name: str, part: str, value: Any) -> Any:
    """Return a setting without passwords, as the output may be in the log of a CI job."""
    match name, part, value:
        case "failback", "journal", str():
            return parse_journal_url(value).location
        case "failback", "target", str() if "://" in value:
            return masked_url(value)
    return value


def _source(name: str, layers: Sequence[Layer]) -> tuple[str, str]:
    """Return the last layer that sets or replaces a setting, and a note if it replaces it."""
    source, note, value = "default", "", None
    for place, layer in layers:
        replacing = (other for other, replaced in REPLACED.items() if name in replaced)
        by = next((other for other in replacing if getattr(layer, other) is not None), None)
        if name in layer.model_fields_set:
            source, note, value = place, "", getattr(layer, name)
        elif value is not None and by is not None:
            source, note, value = place, f"replaced by {by}", None
    return source, note


def _source_in(name: str, part: str, layers: Sequence[Layer]) -> tuple[str, object]:
    """Return the last layer that sets a setting of a policy, and its value there.

    A policy of a layer replaces the one of an earlier layer as a whole, but for `timeout`, whose
    parts are merged.
    """
    for source, layer in reversed(layers):
        if name in layer.model_fields_set:
            own = getattr(layer, name)
            if not isinstance(own, Policy):
                return source, None
            if part in own.model_fields_set:
                return source, getattr(own, part)
            if name != "timeout":
                break
    return "default", None


def _as_plain(value: object) -> object:
    """Return a value as a settings file has it; a wait as the table from which it is made."""
    match value:
        case None | str() | bool() | int() | float() | date() | time():
            return value.label if isinstance(value, Criticality) else value
        case set() | frozenset():
            return sorted(map(str, value))
        case list() | tuple():
            return [_as_plain(element) for element in value]
        case dict() | Policy():
            return {str(name): _as_plain(element) for name, element in dict(value).items()}
        case JitteredWait():
            usual = JitteredWait(value.initial, value.max)
            table = {"initial": value.initial, "max": value.max}
            for name in ("multiplier", "jitter"):
                if getattr(value, name) != getattr(usual, name):
                    table[name] = getattr(value, name)
            return table
    return str(value)


def _as_json(value: Any) -> Any:
    """Return a value of `_as_plain` with strings in place of the numbers that JSON lacks."""
    match value:
        case list():
            return [_as_json(element) for element in value]
        case dict():
            return {name: _as_json(element) for name, element in value.items()}
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _as_toml(value: Any) -> str:
    """Return a value of `_as_plain` as TOML has it; None, which TOML lacks, as `none`."""
    match value:
        case None:
            return "none"
        case list():
            return f"[{', '.join(map(_as_toml, value))}]"
        case dict():
            pairs = (f"{_as_key(name)} = {_as_toml(element)}" for name, element in value.items())
            return f"{{{', '.join(pairs)}}}"
        case date() | time():
            return value.isoformat()
        case float() if not math.isfinite(value):
            return str(value)
    # As in JSON, where U+007F needs no escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _as_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _as_toml(name)
