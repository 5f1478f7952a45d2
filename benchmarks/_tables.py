"""Reads the tables of a page of docs/benchmarks, from which its pictures are made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks._page import EMPTY

HEADING = re.compile(r"^#+ (.+)$")
QUARTILES = re.compile(r"\(([\d.]+)–([\d.]+)\)")
NUMBER = re.compile(r"(?:[<>≥≤] )?(-?[\d,]*\.?\d+)")


@dataclass(frozen=True, slots=True)
class Table:
    """A table, the heading above it, and the line of the page on which it begins."""

    section: str
    line: int
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, header: str) -> list[str]:
        """The cells of the first column with this header.

        Raises:
            ValueError: There is none.
        """
        number = self.headers.index(header)
        return [row[number] for row in self.rows]

    def names(self, columns: int = 1) -> list[str]:
        """The names of the rows: their first cells. An empty first cell repeats that above it."""
        names, first = [], ""
        for row in self.rows:
            first = row[0] or first
            parts = [first, *row[1:columns]]
            names.append(", ".join(re.sub(r" \(.*?\)", "", part) for part in parts if part))
        return names

    def quartiles(self, row: int, header: str) -> tuple[float, float]:
        """The quartiles in brackets in a cell, or in the next one, which has no header.

        A cell without them has its figure twice.
        """
        number = self.headers.index(header)
        cell = self.rows[row][number]
        if self.headers[number + 1 : number + 2] == ("",):
            cell += " " + self.rows[row][number + 1]
        if found := QUARTILES.search(cell):
            return float(found[1]), float(found[2])
        figure = value(cell) or 0.0
        return figure, figure


def tables(page: str) -> Iterator[Table]:
    """All tables of a page, in their order."""
    section = ""
    lines = page.split("\n")
    for number, line in enumerate(lines):
        if heading := HEADING.match(line):
            section = heading[1]
        elif line.startswith("|") and not lines[number - 1].startswith("|"):
            rows = []
            for row in lines[number:]:
                if not row.startswith("|"):
                    break
                rows.append(tuple(cell.strip() for cell in row.strip("|").split("|")))
            yield Table(section, number, rows[0], tuple(rows[2:]))


def value(cell: str) -> float | None:
    """The figure at the beginning of a cell; None if there is none."""
    found = NUMBER.match(cell)
    return float(found[1].replace(",", "")) if found else None


def label(cell: str) -> str:
    """A cell without what is in brackets."""
    return cell.partition(" (")[0] or EMPTY
