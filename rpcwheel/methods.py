"""Which methods a policy is for: patterns over full method names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, Final

from pydantic import AfterValidator, WithJsonSchema

from rpcwheel.errors import ConfigurationError

__all__ = ["MethodPattern", "checked_pattern", "matches", "specificity"]

_FORM: Final = re.compile(r"\*|/[\w.*]+/[\w*]+", re.ASCII)
"""What protobuf can name. No sets and no alternatives: they would be accepted, and never match."""
_KNOWN: Final = (
    "'/shop.Orders/Get', '/shop.Orders/Get*', '/shop.Orders/*', '/shop.*/*', or '*' for all"
)


def checked_pattern(pattern: str) -> str:
    """Return the pattern.

    Raises:
        ConfigurationError: It is none.
    """
    if _FORM.fullmatch(pattern):
        return pattern
    bare = pattern.strip("/")
    meant = (f"/{bare}", f"/{bare}/*") if "/" in bare else (f"/{bare}/*",)
    near = next((one for one in meant if _FORM.fullmatch(one)), None)
    hint = (
        f"did you mean {near!r}? A pattern is" if near else "a pattern is a full name, or has '*':"
    )
    raise ConfigurationError(f"{pattern!r} names no methods; {hint} {_KNOWN}; no other signs")


MethodPattern = Annotated[
    str,
    AfterValidator(checked_pattern),
    WithJsonSchema({"type": "string", "pattern": r"^(\*|/[A-Za-z0-9_.*]+/[A-Za-z0-9_*]+)$"}),
]
"""`"/package.Service/Method"`, where `*` stands for any number of characters; or `"*"`."""


def matches(pattern: str, method: str) -> bool:
    """Whether `method` is one that `pattern` names."""
    return fnmatchcase(method, pattern)


def specificity(pattern: str) -> tuple[bool, int]:
    """How much a pattern says, for sorting: a name most, else by the characters beside `*`."""
    return "*" not in pattern, len(pattern) - pattern.count("*")
