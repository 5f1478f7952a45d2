"""Public names that are loaded when they are first used (PEP 562).

`import rpcwheel` takes a few milliseconds instead of loading grpc, pydantic, tenacity and all of
this package, and a program that uses one feature does not load the others. Type checkers read the
imports under `TYPE_CHECKING` beside each use of `lazy_names`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["lazy_names"]


def lazy_names(
    package: str,
    modules: Mapping[str, str],
    submodules: str = "",
    elsewhere: str = "",
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a module.

    Args:
        package: The module's `__name__`.
        modules: By module, absolute or relative to `package`, its names, separated by spaces.
        submodules: Modules of the package that are its attributes before something imports them.
        elsewhere: Modules of rpcwheel that may have a class that this one does not have; the error
            names it.
    """
    loadable = frozenset(submodules.split())
    where = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        value: object
        if name in where:
            value = getattr(import_module(where[name], package), name)
        elif name in loadable:
            value = import_module(f".{name}", package)
        else:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{_place_of(name, elsewhere.split())}",
                name=name,
                obj=sys.modules[package],
            )
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where, *loadable})

    return load, names


def _place_of(name: str, modules: Iterable[str]) -> str:
    """Say which of the modules has a class; "" if none has."""
    if not name[:1].isupper():  # `from rpcwheel import live` asks for an attribute first
        return ""
    for module in modules:
        with suppress(ImportError):  # a package that it needs is not installed
            if name in getattr(import_module(f"rpcwheel.{module}"), "__all__", ()):
                return f"; it is rpcwheel.{module}.{name}"
    return ""
