"""Tables on a terminal and in a pipe."""

from __future__ import annotations

import os
from io import StringIO
from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .findings import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

RIGHT_ALIGNED: Final = {
    "weight", "age", "attempts", "due", "waiting", "taken", "dead", "oldest",
}  # fmt: skip
"""Columns of numbers."""


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO, *, plain: bool = False
) -> None:
    """Print a table.

    On a terminal, long cells continue on the next line, and rows with the cell "DRAINING" are
    yellow. In a pipe, or with `plain`, each row is one line of text.
    """
    if stream.isatty() and not plain and os.environ.get("TERM") != "dumb":
        table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
        _fill(table, head, rows)
        Console(file=stream, highlight=False).print(table)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    _fill(table, [name.upper() for name in head], rows)
    lines = StringIO()
    Console(file=lines, width=1_000_000, color_system=None).print(table)
    for line in lines.getvalue().splitlines():
        print(line.rstrip(), file=stream)


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for a terminal, each row on one line."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    _fill(table, head, rows)
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return table


def _fill(table: Table, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for name in head:
        is_number = name.lower() in RIGHT_ALIGNED
        table.add_column(name, overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        style = "yellow" if "DRAINING" in row else ""
        table.add_row(*(Text(printable(cell), style=style) for cell in row))
