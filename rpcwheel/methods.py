"""Patterns over full method names, by which settings apply to methods."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, Final

from pydantic import AfterValidator, WithJsonSchema

from rpcwheel.errors import ConfigurationError

__all__ = ["PATTERN_SCHEMA", "MethodPattern", "checked_pattern", "matches", "specificity"]

_FORM: Final = re.compile(r"\*|/[\w.*]+/[\w*]+", re.ASCII)
"""Names of protobuf and `*`. Other wildcards would be accepted and never match."""
_KNOWN: Final = (
    "'/shop.Orders/Get', '/shop.Orders/Get*', '/shop.Orders/*', '/shop.*/*', or '*' for all"
)


def checked_pattern(pattern: str) -> str:
    """Return the pattern.

    Raises:
        ConfigurationError: It is not valid.
    """
    if _FORM.fullmatch(pattern):
        return pattern
    bare = pattern.strip("/")
    meant = (f"/{bare}", f"/{bare}/*") if "/" in bare else (f"/{bare}/*",)
    near = next((one for one in meant if _FORM.fullmatch(one)), None)
    hint = (
        f"did you mean {near!r}? A pattern is" if near else "a pattern is a full name, or has '*':"
    )
    raise ConfigurationError(f"{pattern!r} names no methods; {hint} {_KNOWN}")


PATTERN_SCHEMA: Final = {"type": "string", "pattern": r"^(\*|/[A-Za-z0-9_.*]+/[A-Za-z0-9_*]+)$"}
"""The JSON schema of a pattern."""

MethodPattern = Annotated[str, AfterValidator(checked_pattern), WithJsonSchema(PATTERN_SCHEMA)]
"""`"/package.Service/Method"`, where `*` stands for any number of characters; or `"*"`."""


def matches(pattern: str, method: str) -> bool:
    """Whether a pattern matches a method."""
    return fnmatchcase(method, pattern)


def specificity(pattern: str) -> tuple[bool, int]:
    """A key to sort by: a full name is most specific, then the number of characters except `*`."""
    return "*" not in pattern, len(pattern) - pattern.count("*")
