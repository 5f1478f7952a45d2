"""Checks of command line parameters that several commands use."""

from typing import Final

import typer

LONGEST_S: Final = 1e6
"""Eleven days, less than sockets and threads can wait for."""


def check_seconds(seconds: float | None) -> float | None:
    """Check an option in seconds.

    Raises:
        typer.BadParameter: The value is not above zero, or too large.
    """
    if seconds is not None and not 0 < seconds <= LONGEST_S:
        raise typer.BadParameter(f"give seconds above zero, and at most {LONGEST_S:,.0f}")
    return seconds
