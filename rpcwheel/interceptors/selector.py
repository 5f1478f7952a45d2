"""Which methods a policy is for: patterns over full method names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, Final

from pydantic import AfterValidator

from rpcwheel.errors import ConfigurationError

__all__ = ["MethodPattern", "matches", "specificity"]

_FORM: Final = re.compile(r"\*|/[\w.*?\[\]!-]+/[\w*?\[\]!-]+")


def _checked_pattern(pattern: str) -> str:
    if not _FORM.fullmatch(pattern):
        raise ConfigurationError(
            f"{pattern!r} names no methods; give a full name such as '/shop.Orders/Get', a pattern "
            "such as '/shop.Orders/*' or '/shop.*/Get*', or '*' for all"
        )
    return pattern


MethodPattern = Annotated[str, AfterValidator(_checked_pattern)]
"""`"/package.Service/Method"` with the wildcards of `fnmatch`, or `"*"`."""


def matches(pattern: str, method: str) -> bool:
    """Whether `method` is one that `pattern` names."""
    return fnmatchcase(method, pattern)


def specificity(pattern: str) -> int:
    """How much a pattern says: its characters before and between wildcards; most for a name."""
    plain = re.sub(r"\[[^]]*]|[*?]", "", pattern)
    return len(plain) * 2 + (plain == pattern)
