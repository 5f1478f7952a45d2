"""`rpcwheel top HOST:PORT`: the live view of a process in a terminal.

Reads `/status.json` of a process with `Kit(status_port=...)`. If the process stops to answer, the
last frame stays, with the reason, until it answers again: a restart does not end the command.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from http import HTTPStatus
from typing import Annotated, Any, Final

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from .findings import Problem, printable
from .parameters import check_seconds
from .target import Target, parse_target
from .top_view import frame

TIMEOUT_S: Final = 10.0

MAX_BYTES: Final = 64 << 20
"""The largest answer."""

PATH: Final = "/status.json"

VARIABLE: Final = "RPCWHEEL_STATUS_TOKEN"
"""From which `Kit.from_env` takes the token too."""

PIPE_WIDTH: Final = 250
"""Columns of a frame that is not printed on a terminal."""


def top(
    target: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="`kit.status_address` of the process.")
    ],
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", callback=check_seconds, help="Between two frames."),
    ] = 2.0,
    token: Annotated[
        str,
        typer.Option(
            envvar=VARIABLE,
            show_default=False,
            help="The `status_token` of the process. Others can see arguments; prefer the "
            "variable.",
        ),
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, as without a terminal.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with all that the process sends.")
    ] = False,
) -> None:
    """Show what runs in a process, which must have Kit(status_port=...). Ctrl-C ends it.

    Exit status: 0 success; 1 the process does not answer, or refuses; 2 a wrong argument; 130 after
    Ctrl-C.
    """
    try:
        where = parse_target(target.removeprefix("http://").rstrip("/"))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="HOST:PORT") from None
    if where.path:
        raise typer.BadParameter("the live view has no Unix socket", param_hint="HOST:PORT")
    try:
        status = _status(where, token)
        if as_json:
            print(json.dumps(status, indent=2))
            return
        if once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print(frame(str(where), status))
            return
        _follow(where, token, interval, status)
    except Problem as problem:
        print(f"rpcwheel top: {printable(problem.message)}", file=sys.stderr)
        print(f"              {printable(problem.advice)}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print(view: RenderableType) -> None:
    """Print a frame, in a pipe without trailing spaces."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(view)
    print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n")


def _follow(where: Target, token: str, interval: float, status: dict[str, Any]) -> None:
    """Show frames until Ctrl-C."""
    console, before, failure = Console(highlight=False), None, ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = frame(str(where), status, before, failure, height=console.size.height)
            live.update(view, refresh=True)
            time.sleep(interval)
            try:
                latest, failure = _status(where, token), ""
            except Problem as problem:
                failure = problem.message
            else:
                before, status = status, latest


def _status(where: Target, token: str) -> dict[str, Any]:
    """Request the status.

    Raises:
        Problem: There is no answer, or another one.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection = http.client.HTTPConnection(where.host, where.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", PATH, headers=headers)
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES)
    except ValueError:  # of `putheader`, whose text contains the token
        raise Problem("the token is not valid", "give the `status_token` of the process") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Problem(
            f"{where} does not answer: {reason}",
            "does the process run, and does its Kit have this status_port (kit.status_address)?",
        ) from error
    finally:
        connection.close()
    if answer.status == HTTPStatus.OK:
        return _parsed(where, body)
    text = body[:200].decode(errors="replace").strip()
    raise Problem(f"{where} answers {answer.status}: {text}", _advice(answer.status))


def _advice(status: int) -> str:
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return f"set {VARIABLE}, or give --token: the status_token of the process"
        case HTTPStatus.FORBIDDEN:
            return "give the host that status_host names, or 127.0.0.1 (through a tunnel)"
        case HTTPStatus.SERVICE_UNAVAILABLE:
            return "too many clients read the live view; try again"
    return "is this the status_port of a Kit?"


def _parsed(where: Target, body: bytes) -> dict[str, Any]:
    try:
        status = json.loads(body)
    except (ValueError, RecursionError):
        status = None
    if isinstance(status, dict) and "pid" in status:
        return status
    raise Problem(f"{where} does not answer with a status", "is this the status_port of a Kit?")
