"""How objects and methods are named in messages."""

from __future__ import annotations

from functools import wraps
from inspect import isfunction
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C")


def public_name(name: str) -> Callable[[type[C]], type[C]]:
    """Name the methods of a base class as those of its public subclasses, in Python's errors.

    Otherwise a missing argument is one of `KitBase.serve()`, a class that users do not know.
    """

    def rename(base: type[C]) -> type[C]:
        for function in filter(isfunction, vars(base).values()):
            function.__qualname__ = f"{name}.{function.__name__}"
        return base

    return rename


def safe_repr(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """Make a `__repr__` that does not raise if the constructor of the object has raised.

    Debuggers and test runners show such objects.
    """

    @wraps(describe)
    def described(self: Any) -> str:
        try:
            return describe(self)
        except AttributeError:
            return f"<{type(self).__name__}, not initialized>"

    return described
