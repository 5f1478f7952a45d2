"""The command line: `rpcwheel`, or `python -m rpcwheel`.

`doctor` says why a gRPC server can't be reached (`cli/doctor.py`). `registry` shows, follows and
changes what a registry has (`cli/registry.py`). `demo` shows failback at work on
a real gRPC server that is killed and comes back (`cli/demo.py` tells the story, `cli/checks.py`
judges it); it needs protobuf: `pip install 'rpcwheel[cli]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NoReturn

from . import doctor, registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["main"]

POLL_INTERVAL = "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS"

FEWEST_EVENTS = 10
"""Below that some step of the story would have no call to show."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0 if all is well, 1 if not (the command says what), 2 if a package is
        missing, 130 after Ctrl-C.

    Raises:
        SystemExit: With 2 for a wrong argument, 143 after SIGTERM.
    """
    args = _parser().parse_args(argv)
    if argv is None:
        _hurry_old_grpcio()
    try:
        with _sigterm_as_exit():
            status: int = args.run(args)
            return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader is gone (`| head`); what is buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _demo(args: argparse.Namespace) -> int:
    try:
        from rpcwheel.cli import demo
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "google":
            raise
        sys.stderr.write("rpcwheel demo needs protobuf: pip install 'rpcwheel[cli]'\n")
        return 2
    from rpcwheel.cli import view

    return demo.run(
        demo.Settings(events=args.events, outage=args.outage), view.choose(plain=args.plain)
    )


def _hurry_old_grpcio() -> None:
    """Have a grpcio before 1.80 look more often whether a connection came back.

    It does so every 5 s only (grpc #38290), or as often as this variable says when grpc is
    imported, which `import rpcwheel` has done by now: so the program begins again. Measured with
    1.75 to 1.78: the queue drains 8 s after the restart of the server, with this in a second.
    """
    old = tuple(map(int, version("grpcio").split(".")[:2])) < (1, 80)
    if old and POLL_INTERVAL not in os.environ:
        os.environ[POLL_INTERVAL] = "100"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rpcwheel", description="The wheel timer toolkit for gRPC."
    )
    parser.add_argument("--version", action="version", version=f"rpcwheel {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_to(commands)
    registry.add_to(commands)
    demo = commands.add_parser(
        "demo",
        help="kill a real gRPC server under calls and see every one of them arrive",
        description="Start a real gRPC server, call it through @with_failback, kill it (SIGKILL) "
        "between and during calls, restart it, and check that every call arrived exactly as sent. "
        "Exit status 0 only if so.",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument(
        "--events",
        type=_events,
        default=60,
        metavar="N",
        help=f"calls to make (default 60, at least {FEWEST_EVENTS})",
    )
    demo.add_argument(
        "--outage",
        type=_seconds,
        default=1.5,
        metavar="SECONDS",
        help="length of each of the two outages (default 1.5)",
    )
    demo.add_argument(
        "--plain", action="store_true", help="plain lines, as when piped: no colours, no live bar"
    )
    return parser


def _events(text: str) -> int:
    try:
        events = int(text)
    except ValueError:
        events = 0
    if events < FEWEST_EVENTS:
        raise argparse.ArgumentTypeError(
            f"give a whole number of {FEWEST_EVENTS} or more, not {text!r}"
        )
    return events


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"give seconds above zero, not {text!r}")
    return seconds


def _version() -> str:
    try:
        return version("rpcwheel")
    except PackageNotFoundError:  # run from a tree that was never installed
        return "(not installed)"


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that child processes and temporary files go."""

    def leave(signum: int, _frame: object) -> NoReturn:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
