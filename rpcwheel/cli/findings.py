"""What `rpcwheel doctor` finds: one finding for each step, as text and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

INDENT: Final = " " * 6


class Level(StrEnum):
    """How severe a finding is."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "FAIL"  # calls fail because of it


class Problem(Exception):
    """A step that failed: the message, what to do, and the step if it is known."""

    def __init__(self, message: str, advice: str, step: str = "") -> None:
        """Store the parts."""
        super().__init__(message, advice, step)
        self.message = message
        self.advice = advice
        self.step = step

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The result of one step. `facts` are numbers and names for the JSON output."""

    step: str
    level: Level
    message: str
    advice: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    @classmethod
    def failed(cls, step: str, problem: Problem) -> DoctorFinding:
        """Return the finding for a problem. The step of the problem, if it has one, is used."""
        return cls(problem.step or step, Level.FAIL, problem.message, problem.advice)


def as_lines(finding: DoctorFinding) -> list[str]:
    """Return the finding as text: the message, and the advice on a second line."""
    lines = [f"{finding.level:<5} {finding.step:<10} {printable(finding.message)}"]
    return [*lines, f"{INDENT}{'':<10} -> {printable(finding.advice)}"] if finding.advice else lines


def printable(text: str) -> str:
    """Return the text with control characters escaped. A server's text may contain any."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def as_json(target: str, findings: Sequence[DoctorFinding]) -> str:
    """Return all findings as one JSON object."""
    steps = [
        {
            "step": finding.step,
            "level": finding.level.lower(),
            "message": finding.message,
            "advice": finding.advice,
        }
        | finding.facts
        for finding in findings
    ]
    return json.dumps({"target": target, "healthy": healthy(findings), "findings": steps}, indent=2)


def healthy(findings: Sequence[DoctorFinding]) -> bool:
    """Return whether no finding makes calls fail."""
    return not any(finding.level is Level.FAIL for finding in findings)


def summary(findings: Sequence[DoctorFinding]) -> str:
    """Return the last line of the report."""
    failed = [finding.step for finding in findings if finding.level is Level.FAIL]
    if failed:
        return f"NOT healthy: {', '.join(dict.fromkeys(failed))}."
    warnings = sum(finding.level is Level.WARN for finding in findings)
    return "healthy." if not warnings else f"healthy, with {warnings} warning{'s'[: warnings - 1]}."


def distribution(seconds: Sequence[float]) -> tuple[str, dict[str, object]]:
    """Return median, minimum and maximum of durations, as text and as facts, in milliseconds."""
    ms = [duration_s * 1000 for duration_s in seconds]
    low, middle, high = min(ms), statistics.median(ms), max(ms)
    text = f"{middle:.2f} ms (median of {len(ms)}; {low:.2f} to {high:.2f})"
    rounded = {"min": round(low, 3), "median": round(middle, 3), "max": round(high, 3)}
    return text, {"ms": rounded, "samples": len(ms)}
