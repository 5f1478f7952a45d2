"""The table of instances on a terminal (needs rich)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

__all__ = ["show"]


def show(head: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """Print the table. Long cells are continued on the next line; DRAINING rows are yellow."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    for name in head:
        table.add_column(name, overflow="fold", justify="right" if name == "weight" else "left")
    for row in rows:
        style = "yellow" if "DRAINING" in row else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    Console(file=stream, highlight=False).print(table)
