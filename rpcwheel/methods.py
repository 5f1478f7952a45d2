"""Patterns over full method names, by which settings apply to methods."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, StrictStr, WithJsonSchema

from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "PATTERN_SCHEMA",
    "MethodPattern",
    "PatternIndex",
    "checked_pattern",
    "matches",
    "overlap",
    "specificity",
]

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
    near = next((form for form in meant if _FORM.fullmatch(form)), None)
    hint = (
        f"did you mean {near!r}? A pattern is" if near else "a pattern is a full name, or has '*':"
    )
    raise ConfigurationError(f"{pattern!r} names no methods; {hint} {_KNOWN}")


PATTERN_SCHEMA: Final = {"type": "string", "pattern": r"^(\*|/[A-Za-z0-9_.*]+/[A-Za-z0-9_*]+)$"}
"""The JSON schema of a pattern."""

MethodPattern = Annotated[
    StrictStr, AfterValidator(checked_pattern), WithJsonSchema(PATTERN_SCHEMA)
]
"""`"/package.Service/Method"`, where `*` stands for any number of characters; or `"*"`."""


def matches(pattern: str, method: str) -> bool:
    """Whether a pattern matches a method."""
    return fnmatchcase(method, pattern)


def overlap(first: str, second: str) -> str | None:
    """Return a pattern whose methods match two patterns; None if no method matches both.

    Args:
        first: A full name, or a pattern other than `"*"`; use `"/*/*"`.
        second: The same.
    """
    seen: set[tuple[int, int]] = set()
    steps = [(0, 0, "")]
    while steps:
        at, other_at, text = steps.pop()
        if at == len(first) and other_at == len(second):
            return text
        if (at, other_at) in seen:
            continue
        seen.add((at, other_at))
        char, other = first[at : at + 1], second[other_at : other_at + 1]
        if char == other == "*":
            steps += (at + 1, other_at, text + "*"), (at, other_at + 1, text + "*")
        elif char == "*":  # it matches no more, or the next character of the other pattern
            steps.append((at + 1, other_at, text))
            if other not in ("", "/"):
                steps.append((at, other_at + 1, text + other))
        elif other == "*":
            steps.append((at, other_at + 1, text))
            if char not in ("", "/"):
                steps.append((at + 1, other_at, text + char))
        elif char == other:
            steps.append((at + 1, other_at + 1, text + char))
    return None


def specificity(pattern: str) -> tuple[bool, int]:
    """A key to sort by: a full name is most specific, then the number of characters except `*`."""
    return "*" not in pattern, len(pattern) - pattern.count("*")


class PatternIndex:
    """Finds the patterns that match a method, without a comparison with each of them.

    The texts between the `*` of patterns form a tree. A step down the tree looks up the parts of
    the method that have the length of such a text.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """Build the index, in time proportional to the number of patterns."""
        self._patterns = sorted(patterns, key=specificity)  # stable: of equals the later is later
        self._names: dict[str, int] = {}
        self._root = _Node()
        for rank, pattern in enumerate(self._patterns):
            *texts, last = pattern.split("*")
            if not texts:
                self._names[pattern] = rank
                continue
            node = self._root
            for text in texts:
                node = node.child(text)
            node.ends[last] = rank
            node.end_lengths.add(len(last))

    def matching(self, method: str) -> list[str]:
        """Return the patterns that match a method, or a pattern; the most specific one last."""
        ranks = [self._names[method]] if method in self._names else []
        steps = [(self._root, 0)]
        while steps:
            node, start = steps.pop()
            ranks += node.ends_at(method, start)
            steps += node.children_at(method, start, is_root=node is self._root)
        return [self._patterns[rank] for rank in sorted(ranks)]


class _Node:
    """The texts that may follow after a `*`; at the root, those with which patterns begin."""

    __slots__ = ("child_lengths", "children", "end_lengths", "ends")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        """By the text before the next `*`."""
        self.child_lengths: set[int] = set()
        self.ends: dict[str, int] = {}
        """Numbers of patterns by the text after their last `*`."""
        self.end_lengths: set[int] = set()

    def child(self, text: str) -> _Node:
        """Get or make the node after a text."""
        self.child_lengths.add(len(text))
        return self.children.setdefault(text, _Node())

    def ends_at(self, method: str, start: int) -> Iterator[int]:
        """Yield the numbers of the patterns that end with the rest of a method."""
        for length in self.end_lengths:
            begin = len(method) - length
            rank = self.ends.get(method[begin:]) if begin >= start else None
            if rank is not None:
                yield rank

    def children_at(self, method: str, start: int, *, is_root: bool) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes after texts of the rest of a method, each with the end of its text.

        Of each text the first occurrence, which leaves the most for the texts that follow.
        """
        for length in self.child_lengths:
            seen = set()
            last = len(method) - length
            for begin in range(start, min(last, 0 if is_root else last) + 1):
                child = self.children.get(method[begin : begin + length])
                if child is not None and child not in seen:
                    seen.add(child)
                    yield child, begin + length
