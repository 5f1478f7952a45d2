"""What the doctor says: one note a step, in plain words, with what to do."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Level", "Note", "Trouble", "as_json", "as_lines", "printable", "spread", "verdict"]

INDENT: Final = " " * 6


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "FAIL"  # calls break by this


class Trouble(Exception):
    """A step that could not be done: what is so, what to do, and which step where that is known."""

    def __init__(self, said: str, do: str, step: str = "") -> None:
        """Keep them apart."""
        super().__init__(said, do, step)
        self.said = said
        self.do = do
        self.step = step


@dataclass(frozen=True, slots=True)
class Note:
    """One line. `facts` are for machines: milliseconds, numbers, names."""

    step: str
    level: Level
    said: str
    do: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    @classmethod
    def failed(cls, step: str, trouble: Trouble, level: Level = Level.FAIL) -> Note:
        """Tell a trouble, with its own step if it has one."""
        return cls(trouble.step or step, level, trouble.said, trouble.do)


def as_lines(note: Note) -> list[str]:
    """As people read it: what a server says makes no lines of its own, and no colours."""
    lines = [f"{note.level:<5} {note.step:<10} {printable(note.said)}"]
    return [*lines, f"{INDENT}{'':<10} -> {printable(note.do)}"] if note.do else lines


def printable(text: str) -> str:
    """What came from elsewhere, on one line, and without power over a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def as_json(target: str, notes: Sequence[Note]) -> str:
    """As machines read it: one object."""
    findings = [
        {"step": note.step, "level": note.level.lower(), "said": note.said, "do": note.do}
        | note.facts
        for note in notes
    ]
    return json.dumps({"target": target, "healthy": healthy(notes), "findings": findings}, indent=2)


def healthy(notes: Sequence[Note]) -> bool:
    """Whether nothing of it breaks calls."""
    return not any(note.level is Level.FAIL for note in notes)


def verdict(notes: Sequence[Note]) -> str:
    """The last line."""
    failed = [note.step for note in notes if note.level is Level.FAIL]
    if failed:
        return f"NOT healthy: {', '.join(dict.fromkeys(failed))}."
    warned = sum(note.level is Level.WARN for note in notes)
    return "healthy." if not warned else f"healthy, with {warned} warning{'s'[: warned - 1]}."


def spread(seconds: Sequence[float]) -> tuple[str, dict[str, object]]:
    """Times in words, and in milliseconds for machines."""
    ms = [one * 1000 for one in seconds]
    low, middle, high = min(ms), statistics.median(ms), max(ms)
    said = f"{middle:.2f} ms (median of {len(ms)}; {low:.2f} to {high:.2f})"
    rounded = {"min": round(low, 3), "median": round(middle, 3), "max": round(high, 3)}
    return said, {"ms": rounded, "samples": len(ms)}
