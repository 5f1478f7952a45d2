"""Groups of commands that report errors alike: `rpcwheel journal` and `rpcwheel registry`."""

from __future__ import annotations

import logging
import sys
from functools import wraps
from typing import TYPE_CHECKING, Final, ParamSpec

import typer

from rpcwheel.errors import ConfigurationError, ExtraMissing

from .findings import printable

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")


class CommandGroup:
    """The commands about one subject. Each prints its errors, and ends with 1 or 2 after one."""

    def __init__(self, name: str, failure: type[Exception], help: str, quiet: str = "") -> None:  # noqa: A002 - as typer
        """Make a group without commands.

        Args:
            name: The first word of its commands, which begins its error lines.
            failure: The errors that end a command with 1. After wrong arguments it ends with 2.
            help: The text of `--help`.
            quiet: The logger of a library that warns of what the commands report themselves.
        """
        self.app: Final = typer.Typer(no_args_is_help=True, help=help)
        self._name, self._failure = name, failure
        self._quiet = logging.getLogger(quiet) if quiet else None

    def command(self, run: Callable[P, None]) -> Callable[P, None]:
        """Add a command: a decorator."""

        @self.app.command()
        @wraps(run)
        def reporting(*args: P.args, **options: P.kwargs) -> None:
            level = self._quiet.level if self._quiet else 0
            if self._quiet:
                self._quiet.setLevel(logging.ERROR)
            try:
                run(*args, **options)
            except (ConfigurationError, ExtraMissing) as error:
                self.warn(str(error))
                raise typer.Exit(2) from None
            except self._failure as error:
                self.warn(str(error))
                raise typer.Exit(1) from None
            finally:
                if self._quiet:
                    self._quiet.setLevel(level)

        return reporting

    def warn(self, text: str) -> None:
        """Print a text to stderr."""
        lines = map(printable, text.splitlines())
        print(f"rpcwheel {self._name}:", *lines, file=sys.stderr, flush=True)
