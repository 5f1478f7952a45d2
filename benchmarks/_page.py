"""Parts of the pages that all benchmarks write: facts about the machine, and tables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import inf
from operator import ge, le, lt
from pathlib import Path
from typing import TYPE_CHECKING

from rpcwheel import __version__

if TYPE_CHECKING:
    from benchmarks.calls.subjects import Skipped

EMPTY = "–"

Verdict = tuple[str, str, str, str]
"""What a target is about, what was measured, what the target is, and whether it is met."""

_SIGNS = {"≤": le, "<": lt, "≥": ge}

_PROGRAMS = {"etcd": "etcd", "PostgreSQL": "psql", "Redis": "redis-server"}

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def facts(*packages: str) -> dict[str, str]:
    """The machine and the versions of Python, rpcwheel and these packages, by name."""
    return {
        "Machine": f"{_cpu()}, {os.cpu_count()} processors, {_memory()}",
        "System": platform.platform(terse=True),
        "Python": f"{platform.python_implementation()} {sys.version.split(' (', maxsplit=1)[0]}",
        "rpcwheel": __version__,
        "Versions": ", ".join(f"{name} {_version(name)}" for name in packages),
    }


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the figures of a page come from, and what was not measured."""

    facts: Mapping[str, str]
    skipped: Sequence[Skipped]
    command: str

    def parts(self, title: str, remark: str = "") -> list[str]:
        """The first parts of the page; the remark is about the command."""
        facts = [f"* {name}: {value}" for name, value in self.facts.items()]
        lines = "\n".join([*facts, f"* Command: `{self.command}`{remark}"])
        skipped = [f"Not measured: {each.what} ({each.why})." for each in self.skipped]
        return [f"# {title}", lines, *skipped]


def verdict(
    about: str, value: float | None, goal: float, form: str, *, sign: str = "≤", goal_form: str = ""
) -> Verdict:
    """Compare a value, or none, with a target; both are shown in one form if there is no other."""
    target = f"{sign} {(goal_form or form).format(goal)}"
    if value is None:
        return about, EMPTY, target, "not measured"
    shown = "never" if value == inf else form.format(value)
    return about, shown, target, "met" if _SIGNS[sign](value, goal) else "**missed**"


def quartiles(values: Mapping[str, float], name: str) -> str:
    """A ratio, and in brackets its quartiles."""
    ratio, q1, q3 = (values[f"{name}_ratio{part}"] for part in ("", "_q1", "_q3"))
    return f"{ratio:.2f} ({q1:.2f}–{q3:.2f})"


def within(values: Mapping[str, float], key: str) -> str:
    """How many seconds something took; `> 10` if it did not happen within 10 s."""
    value = values.get(key)
    return f"> {values['waited_s']:g}" if value is None else f"{value:.2f}"


def engines(*names: str) -> dict[str, str]:
    """The versions of engines: of the library of SQLite, and of programs that are installed."""
    found = []
    for name in names:
        if name == "SQLite":
            found.append(f"{name} {sqlite3.sqlite_version}")
        elif path := shutil.which(_PROGRAMS[name]):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            number = re.search(r"\d+\.[\d.]+", done.stdout)
            found.append(f"{name} {number[0] if number else 'unknown'}")
    return {"Engines": ", ".join(found)}


def load() -> str:
    """The load average of the last minute: how many programs used or wanted a processor."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (headers, *lines)) for i in range(len(headers))]

    def show(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([show(headers), show(rule), *map(show, lines)])


def figure(value: float | None) -> str:
    """Three digits, or the whole number."""
    if value is None:
        return EMPTY
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _cpu() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    if not _MEMINFO.exists():
        return "memory unknown"
    return f"{int(_MEMINFO.read_text().split()[1]) / 2**20:.0f} GiB"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
