"""The commands of `rpcwheel`, as a typer application."""

import sys
from typing import Annotated

import typer

from rpcwheel._version import __version__
from rpcwheel.timer.queue import FORM

from .config import config
from .doctor.doctor import doctor
from .journal import journal
from .registry import registry
from .top import top

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)
app.command()(doctor)
app.command()(top)
app.add_typer(registry.app, name="registry")
app.add_typer(journal.app, name="journal")
app.add_typer(config, name="config")


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    form = "compiled" if FORM == "native" else "pure Python"
    print(f"rpcwheel {__version__} ({form} timer)")
    raise typer.Exit


@app.callback()
def commands(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version, and whether the timer is compiled or pure Python.",
        ),
    ] = False,
) -> None:
    """Resilience middleware for gRPC: examine servers, processes, registries and journals."""
