"""The commands of `rpcwheel`, as a typer application."""

import sys
from pkgutil import resolve_name
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from rpcwheel._version import __version__
from rpcwheel.timer.queue import FORM

COMMANDS: Final = {
    "doctor": "rpcwheel.cli.doctor.doctor:doctor",
    "top": "rpcwheel.cli.top:top",
    "registry": "rpcwheel.cli.registry:registry.app",
    "journal": "rpcwheel.cli.journal:journal.app",
    "config": "rpcwheel.cli.config:config",
}
"""Where each command is: a function, or a typer application."""

MARKUP: Final = "rich" if sys.stdout.isatty() else None


class Commands(TyperGroup):
    """Imports a command when it is used: to import all of them takes 0.3 s."""

    def __init__(self, **attributes: Any) -> None:
        """Make the group, as typer does."""
        super().__init__(**attributes)
        self.commands: Any = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of this name."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)


def _load(name: str) -> Any:
    command = resolve_name(COMMANDS[name])
    group = typer.Typer(rich_markup_mode=MARKUP)
    if isinstance(command, typer.Typer):
        group.add_typer(command, name=name)
    else:
        group.command(name)(command)
        group.callback()(commands)  # else typer makes no group of one command
    return typer.main.get_group(group).commands[name]


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
)


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
