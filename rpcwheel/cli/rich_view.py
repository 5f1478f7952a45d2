"""The demo on a terminal: colours, a live bar of the queue, a table (needs rich)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rpcwheel.cli.checks import summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from rpcwheel.cli.checks import Check

__all__ = ["RichView"]


class RichView:
    """A `View` for people, on a stream that is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, transient=True, refresh_per_second=20)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def title(self, line: str) -> None:
        """Print the first line."""
        self._console.print(Text(line, style="bold"))

    def say(self, sentence: str) -> None:
        """Print a step of the story above the bar."""
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text("\N{BULLET}", style="cyan"),
            Text(sentence, style="red" if "SIGKILL" in sentence else ""),
        )
        self._console.print(line)

    def queue(self, pending: int, room: int, answered: float | None = None) -> None:
        """Move the bar."""
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(
            total=room,
            completed=pending,
            width=30,
            complete_style="yellow",
            finished_style="yellow",
        )
        last = f"answered in {answered * 1e3:.1f} ms" if answered is not None else ""
        row.add_row(
            "  queue",
            bar,
            Text(f"{pending:>3} waiting", style="yellow" if pending else "green"),
            last,
        )
        self._live.update(row)

    def verdict(self, checks: Sequence[Check]) -> None:
        """Print the table and the result."""
        self._live.stop()
        table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("")
        table.add_column("promised", overflow="fold")
        table.add_column("seen", overflow="fold")
        for check in checks:
            mark = (
                Text("\N{CHECK MARK}", style="bold green")
                if check.passed
                else Text("\N{BALLOT X}", style="bold red")
            )
            table.add_row(mark, check.claim, Text(check.seen, style="" if check.passed else "red"))
        self._console.print(table)
        passed = all(check.passed for check in checks)
        self._console.print(Text(summary(checks), style="bold green" if passed else "bold red"))
