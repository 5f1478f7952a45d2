"""`rpcwheel config check|schema`: check a settings file, and show what it means."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import typer

from rpcwheel.call.policy import REPLACED, MethodPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.kit.config import policy_from_file, settings_schema
from rpcwheel.kit.policy import KitPolicy
from rpcwheel.methods import matches, specificity
from rpcwheel.policy import Policy

from .findings import printable
from .table import print_table

__all__ = ["config"]

config = typer.Typer(no_args_is_help=True, help="Check settings files.")


@config.command()
def schema() -> None:
    """Print the JSON schema of a settings file, for editors."""
    print(json.dumps(settings_schema(), indent=2))


@config.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A settings file, TOML or YAML.")],
    method: Annotated[
        str | None,
        typer.Option(metavar="/PACKAGE.SERVICE/METHOD", help="Show the settings of this method."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a settings file, and print all problems or the settings that are in effect.

    Exit status: 0 if the file is valid, 1 if not.
    """
    if method is not None and not re.fullmatch(r"/[\w.]+/\w+", method):
        raise typer.BadParameter(
            f"give a method in full, such as /shop.Orders/Get, not {method!r}",
            param_hint="--method",
        )
    try:
        policy = policy_from_file(file)
    except ConfigurationError as error:
        problems = error.problems or (str(error),)
        if as_json:
            print(json.dumps({"file": file, "valid": False, "problems": problems}, indent=2))
        else:
            print(*map(printable, problems), sep="\n", file=sys.stderr)
        raise typer.Exit(1) from None
    settings = list(_all_settings(policy) if method is None else _method_settings(policy, method))
    if as_json:
        values = {one.name: {"value": one.value, "from": one.source} for one in settings}
        print(json.dumps({"file": file, "valid": True, "settings": values}, indent=2, default=str))
        return
    rows = [
        (one.name, json.dumps(one.value, ensure_ascii=False, default=str), one.source)
        for one in settings
    ]
    print_table(("setting", "value", "from"), rows, sys.stdout)
    print(f"\n{file} is valid.")


class Setting(NamedTuple):
    """One setting that is in effect."""

    name: str
    value: Any
    """As in JSON; False for a policy that is switched off."""
    source: str
    """"file", "default", or the pattern of the methods that it is set for."""


Layer = tuple[str, Policy]
"""Settings that a file sets in one place, and the name of the place."""


def _all_settings(policy: KitPolicy) -> Iterator[Setting]:
    """Yield the general settings, and those that the file sets for some methods."""
    for name in KitPolicy.model_fields:
        if name != "methods":
            yield from _settings(name, getattr(policy, name), [("file", policy)])
    for pattern, own in policy.methods.items():
        for name in MethodPolicy.model_fields:
            for one in _settings(name, getattr(own, name), [("file", own)]):
                if one.source == "file":
                    yield one._replace(name=f'methods."{pattern}".{one.name}')


def _method_settings(policy: KitPolicy, method: str) -> Iterator[Setting]:
    """Yield the settings of one method, and where each comes from."""
    patterns = sorted(policy.methods, key=specificity)
    layers: list[Layer] = [("file", policy)]
    layers += [
        (pattern, policy.methods[pattern]) for pattern in patterns if matches(pattern, method)
    ]
    effective = policy.policy_for(method)
    for name in MethodPolicy.model_fields:
        yield from _settings(name, getattr(effective, name), layers)


def _settings(name: str, value: object, layers: Sequence[Layer]) -> Iterator[Setting]:
    """Yield a setting; of a policy, each setting in it that has a value."""
    if not isinstance(value, Policy):
        source = _source(name, "", layers)
        if value is None and source != "default":  # another policy may have replaced it
            replacing = [other for other, replaced in REPLACED.items() if name in replaced]
            sources = {source, *(_source(other, "", layers) for other in replacing)}
            source = next((one for one, _ in reversed(layers) if one in sources), "default")
        yield Setting(name, False if value is None else _as_json(value), source)
        return
    for part in type(value).model_fields:
        source, inner = _source(name, part, layers), getattr(value, part)
        if inner is not None or source != "default":
            yield Setting(f"{name}.{part}", False if inner is None else _as_json(inner), source)


def _source(name: str, part: str, layers: Sequence[Layer]) -> str:
    """Return the last layer that sets a setting.

    A policy of a layer replaces the one of an earlier layer as a whole, but for `timeout`, whose
    parts are merged.
    """
    for source, layer in reversed(layers):
        if name in layer.model_fields_set:
            own = getattr(layer, name)
            if not part or not isinstance(own, Policy) or part in own.model_fields_set:
                return source
            if name != "timeout":
                return "default"
    return "default"


def _as_json(value: object) -> object:
    """Return a value as JSON has it. A tenacity object is shown as a call: `wait_fixed(...)`."""
    match value:
        case timedelta():
            return value.total_seconds()
        case set() | frozenset():
            return sorted(map(str, value))
        case list() | tuple():
            return [_as_json(one) for one in value]
        case dict() | str() | bool() | int() | float():
            return value
        case Policy():
            return {name: _as_json(getattr(value, name)) for name in value.model_fields_set}
    parts = ", ".join(f"{name}={part}" for name, part in vars(value).items())
    return f"{type(value).__name__}({parts})"
