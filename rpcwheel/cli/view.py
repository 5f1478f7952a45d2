"""What the demo shows: plain lines here; on a terminal colours and a live bar (`rich_view.py`)."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Protocol, Self

from rpcwheel.cli.checks import summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from rpcwheel.cli.checks import Check

__all__ = ["PlainView", "View", "choose"]

QUEUE_EVERY = 0.3
"""Seconds between two lines about the queue."""


class View(Protocol):
    """Where the demo is shown; a context manager, entered once."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def title(self, line: str) -> None:
        """Show what this is."""

    def say(self, sentence: str) -> None:
        """Show one step of the story."""

    def queue(self, pending: int, room: int, answered: float | None = None) -> None:
        """Show how many of `room` calls wait, and the seconds until the last caller's answer."""

    def verdict(self, checks: Sequence[Check]) -> None:
        """Show the table and the result."""


def choose(*, plain: bool, stream: TextIO | None = None) -> View:
    """Take the rich view on a terminal, if rich is installed and nobody asked for plain lines."""
    stream = stream or sys.stdout
    if not plain and stream.isatty() and os.environ.get("TERM") != "dumb":
        try:
            from rpcwheel.cli.rich_view import RichView
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
        else:
            return RichView(stream)
    return PlainView(stream)


class PlainView:
    """Lines of ASCII, flushed one by one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_queue_line = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def title(self, line: str) -> None:
        """Print the first line."""
        self._print(line)

    def say(self, sentence: str) -> None:
        """Print a step of the story."""
        self._print(textwrap.fill(sentence, 79, initial_indent="- ", subsequent_indent="  "))

    def queue(self, pending: int, room: int, answered: float | None = None) -> None:
        """Print a line about the queue, a few times a second."""
        if time.monotonic() < self._next_queue_line:
            return
        self._next_queue_line = time.monotonic() + QUEUE_EVERY
        last = f", last caller answered in {answered * 1e3:.1f} ms" if answered is not None else ""
        self._print(f"    queue: {pending} of {room} waiting{last}")

    def verdict(self, checks: Sequence[Check]) -> None:
        """Print the table and the result."""
        width = max(len(check.claim) for check in checks)
        self._print("")
        for check in checks:
            self._print(
                f"{'ok  ' if check.passed else 'FAIL'}  {check.claim:<{width}}  {check.seen}"
            )
        self._print(f"\n{summary(checks)}")

    def _print(self, line: str) -> None:
        # Errors quoted in a table may hold anything; a pipe's encoding may not.
        encoding = self._stream.encoding or "ascii"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()
