"""One frame of `rpcwheel top`, from the JSON of a status.

Texts may come from peers of the process: they are never markup, and characters that are not
printable are escaped. A value that is missing, because the process has another version of rpcwheel,
is shown as `?`.
"""

from __future__ import annotations

import time
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rpcwheel.errors import three_digits
from rpcwheel.status.sections import RATE, SECTIONS, TEXT, Column, Section

from .findings import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_TEXT: Final = 200
"""Characters of a cell."""

MAX_ROWS: Final = 200
"""Rows of a table."""

SHORT: Final = 24
"""Characters of a cell that is not cut while others can be."""


LAST_BOUND_S: Final = 10.0
"""The quantile of durations that stands for more."""

WINDOW_S: Final = 60.0
MAX_FAILED_SHARE: Final = 0.05
"""A method has a problem if more of its calls failed within the window, as for the alert rules."""

Row: TypeAlias = dict[str, Any]


def seconds(value: float | None) -> str:
    """Return a time with three digits."""
    if value is None:
        return ""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (100.0, 1.0, "s")):
        if value < limit:
            return f"{three_digits(value * factor)} {unit}" if value else "0"
    for limit, divisor, unit in ((7200, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{three_digits(value / divisor)} {unit}"
    return f"{value / 86_400:.1f} d"


def _limited(text: Callable[[Any], str]) -> Callable[..., str]:
    def cell(value: Any, limit: Any = None) -> str:
        return text(value) if value is None or limit is None else f"{text(value)} of {text(limit)}"

    return cell


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _mean(lateness: Row) -> str:
    return seconds(lateness["sum_s"] / lateness["count"]) if lateness["count"] else ""


def _list(*values: Any) -> str:
    texts = (text for value in values for text in (value if isinstance(value, list) else [value]))
    return ", ".join(dict.fromkeys(filter(None, texts)))


_FORMATS: Final[dict[str, Callable[..., str]]] = {
    "text": lambda value: "" if value is None else str(value),
    "flag": lambda value: "" if value is None else "yes" if value else "no",
    "count": _limited(_count),
    "seconds": _limited(seconds),
    "quantile": lambda value: f"≥ {seconds(value)}" if value == LAST_BOUND_S else seconds(value),
    "mean": _mean,
    "size": lambda rows, exists=True: _count(len(rows)) if exists else "",
    "list": _list,
    "codes": lambda codes: ", ".join(f"{entry['code']} {entry['count']:,}" for entry in codes),
}
"""Makes a cell of the values of a column's fields."""

_PROBLEM: Final = Column("problem", ("problem",), TEXT, page_only=False)


def frame(
    target: str,
    status: Row,
    history: Sequence[Row] = (),
    failure: str = "",
    *,
    height: int | None = None,
) -> RenderableType:
    """Make a frame.

    Args:
        target: Of the process.
        status: The JSON of its status.
        history: Earlier statuses, the oldest first, for rates and failed calls.
        failure: Why the status is not up to date.
        height: Of the terminal: each table has only some of its rows, and the last line says how
            many rows are missing. None: no limit.
    """
    tables: list[tuple[Section, list[Row]]] = []
    empty: list[str] = []
    for section in SECTIONS:
        rows = sorted(_rows(section, status, history), key=lambda row: not row.get("problem"))
        if rows:
            tables.append((section, rows))
        else:
            empty.append(section.empty)
    errors = status.get("errors")
    errors = errors if isinstance(errors, list) else []  # another version
    parts: list[RenderableType] = [_head(target, status), _summary(tables, len(errors))]
    if failure:
        at = time.strftime("%H:%M:%S", time.localtime(_float(status.get("now"))))
        parts.append(_line(f"{failure} (the figures are of {at})", "bold red"))
    parts += [_line(f"not shown: {error}", "red") for error in errors]
    total = sum(len(rows) for _, rows in tables)
    if height is not None:
        height -= len(parts) + bool(empty) + 1
        tables = _fitting(tables, height // 2)  # a heading and a row each
    lines = MAX_ROWS * len(tables) if height is None else height - len(tables)
    spaced = lines >= 3 * len(tables)  # an empty line before each table
    room = _shared(lines - spaced * len(tables), [len(rows) for _, rows in tables])
    for (section, rows), most in zip(tables, room, strict=True):
        parts += [_line("", "")] * spaced
        parts.append(_table(section, rows, most))
    if empty:
        parts.append(_line(", ".join(empty), "dim"))
    if height is not None:
        parts.append(_line(_hint(total - sum(room)), "dim"))
    return Group(*parts)


def _summary(tables: list[tuple[Section, list[Row]]], errors: int) -> Text:
    """Say how many problems there are, and where."""
    counts = {
        section.title: sum(bool(row.get("problem")) for row in rows) for section, rows in tables
    }
    counts["Not shown"] = errors
    total = sum(counts.values())
    if not total:
        return _line("no problems", "green")
    places = ", ".join(f"{title} {count}" for title, count in counts.items() if count)
    return _line(f"{total} problem{'' if total == 1 else 's'}: {places}", "bold red")


def _hint(hidden: int) -> str:
    if not hidden:
        return "q: quit"
    return f"{hidden:,} row{' is' if hidden == 1 else 's are'} hidden; ↓: show all; q: quit"


def _fitting(tables: list[tuple[Section, list[Row]]], most: int) -> list[tuple[Section, list[Row]]]:
    """Return at most so many tables: first those with a problem."""
    order = sorted(range(len(tables)), key=lambda index: not tables[index][1][0].get("problem"))
    return [tables[index] for index in sorted(order[: max(0, most)])]


def _shared(lines: int, wanted: list[int]) -> list[int]:
    """Share the lines of a screen among tables: each has one at least, and none more than others.

    A table that wants less leaves the rest to the others.
    """
    shared = [min(1, want) for want in wanted]
    lines -= sum(shared)
    while lines > 0 and shared != wanted:
        for index, want in enumerate(wanted):
            if lines > 0 and shared[index] < want:
                shared[index] += 1
                lines -= 1
    return shared


def _head(target: str, status: Row) -> Text:
    words = [f"rpcwheel {status.get('version', '?')} at {target}", f"process {status['pid']}"]
    started, now = status.get("started"), _float(status.get("now"))
    if started is not None:
        words.append(f"up for {seconds(max(0.0, now - _float(started)))}")
    return _line(", ".join(words), "bold")


def _rows(section: Section, status: Row, history: Sequence[Row]) -> list[Row]:
    try:
        rows = [row for row in _all_rows(section, status) if isinstance(row, dict)]
        if section.path == "methods":
            rows = _call_rows(rows, status, history)
    except (KeyError, TypeError):  # another version
        return []
    return rows


def _all_rows(section: Section, status: Row) -> Iterator[Any]:
    outer, _, inner = section.path.partition(".")
    if not inner:
        yield from status[outer]
        return
    for row in status[outer]:
        if not section.joined:
            yield from (each | {"outer": row} for each in row[inner])
            continue
        empty = dict.fromkeys(field for column in section.columns for field in column.fields)
        for each in row[inner] or [empty]:
            yield each | {"outer": row, "problem": row["problem"] or each.get("problem")}


def _call_rows(rows: list[Row], status: Row, history: Sequence[Row]) -> list[Row]:
    """Add what the figures of calls mean now: a rate, and a problem if many fail."""
    same = [earlier for earlier in history if earlier["pid"] == status["pid"]]
    recent = [earlier for earlier in same if status["now"] - earlier["now"] <= WINDOW_S]
    statuses = recent or same[-1:]
    first, last = (_by_method(statuses[index]) if statuses else {} for index in (0, -1))
    passed_s = status["now"] - statuses[-1]["now"] if statuses else 0.0
    described = []
    for row in sorted(rows, key=lambda row: -row["started"]):
        early, late, rate = first.get(_method(row)), last.get(_method(row)), ""
        if late is not None and passed_s > 0:
            rate = f"{(row['started'] - late['started']) / passed_s:.1f}"
        described.append(row | {RATE: rate, "problem": _failed(row, early)})
    return described


def _method(row: Row) -> tuple[Any, ...]:
    return row["side"], row["method"], row["kind"]


def _by_method(status: Row) -> dict[tuple[Any, ...], Row]:
    return {_method(row): row for row in status["methods"]}


def _failed(row: Row, early: Row | None) -> str:
    """Return how many calls failed since `early`, or at all if none ended since, if it is many."""
    failed, ended = row["failed"], _ended(row)
    if early is not None and _ended(early) < ended:
        failed, ended = failed - early["failed"], ended - _ended(early)
    return f"{failed:,} of {ended:,} failed" if failed > MAX_FAILED_SHARE * ended else ""


def _ended(row: Row) -> int:
    return sum(entry["count"] for entry in row["codes"])


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _table(section: Section, rows: list[Row], room: int) -> Table:
    shown, columns = rows[:room], [column for column in section.columns if not column.page_only]
    part = "" if len(rows) == len(shown) else f" {len(shown)}/{len(rows)}"
    if any(row.get("problem") for row in rows):
        columns.insert(1, _PROBLEM)
    table = Table(box=None, header_style="", padding=(0, 2, 0, 0))
    cells = [[_cell(column, row) for column in columns] for row in shown]
    for index, column in enumerate(columns):  # only long texts are cut if the screen is narrow
        is_long = max(len(line[index]) for line in cells) > SHORT
        heading = (
            Text(column.heading, style="dim") if index else _line(section.title + part, "bold")
        )
        justify: Literal["left", "right"] = "right" if column.format.style == "number" else "left"
        table.add_column(heading, justify=justify, no_wrap=not is_long)
    for row, line in zip(shown, cells, strict=True):
        style = "red" if row.get("problem") else ""
        table.add_row(*(_line(cell, style) for cell in line))
    return table


def _cell(column: Column, row: Row) -> str:
    try:
        values = [reduce(getitem, field.split("."), row) for field in column.fields]
        return _FORMATS[column.format.name](*values)
    except (KeyError, TypeError, ValueError, AttributeError):  # another version
        return "?"


def _line(text: str, style: str) -> Text:
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return Text(printable(cut), style=style, no_wrap=True, overflow="ellipsis")
