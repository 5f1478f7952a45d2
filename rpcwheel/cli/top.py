"""`rpcwheel top HOST:PORT`: the live view of a process in a terminal.

Reads `/status.json` of a process with `Kit(status_port=...)`, on a thread. If the process stops to
answer, the last frame stays, with the reason, until it answers again: a restart does not end the
command.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import select
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from rpcwheel.instance import checked_host

from .findings import Problem, printable
from .parameters import check_seconds
from .target import ServerTarget, parse_target
from .top_view import WINDOW_S, frame

if sys.platform != "win32":
    import termios
    import tty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S: Final = 10.0

MAX_BYTES: Final = 64 << 20
"""The largest answer."""

PATH: Final = "/status.json"

VARIABLE: Final = "RPCWHEEL_STATUS_TOKEN"
"""From which `Kit.from_env` takes the token too."""

PIPE_WIDTH: Final = 250
"""Columns of a frame that is not printed on a terminal."""

KEY_INTERVAL_S: Final = 0.1
"""Between two looks whether an answer has come; keys are read at once."""

SLOW_S: Final = 1.0
"""An answer that takes longer is reported."""

KEY: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
LINE_DOWN: Final = {"j", "\x1b[B", "\x1bOB"}
LINE_UP: Final = {"k", "\x1b[A", "\x1bOA"}
PAGE_DOWN: Final = {" ", "\x1b[6~"}
PAGE_UP: Final = {"b", "\x1b[5~"}

HISTORY_S: Final = 2.0
"""Between two statuses that are kept for rates, if the interval is shorter."""


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
    """Show what runs in a process, which must have Kit(status_port=...).

    Keys: q or Ctrl-C quits; arrows, Page Up and Page Down show the rows that do not fit.

    Exit status: 0 success; 1 the process does not answer, or refuses; 2 a wrong argument; 130 after
    Ctrl-C.
    """
    try:
        where = parse_target(target.removeprefix("http://").rstrip("/"))
        if not where.path:
            checked_host(where.host.encode("idna").decode())
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


def _follow(where: ServerTarget, token: str, interval: float, status: dict[str, Any]) -> None:
    """Show frames until the key q or Ctrl-C."""
    answers: queue.SimpleQueue[dict[str, Any] | Problem] = queue.SimpleQueue()
    poll = threading.Thread(target=_poll, args=(where, token, interval, answers), daemon=True)
    poll.start()
    console, failure, offset = Console(highlight=False), "", -1
    history: deque[dict[str, Any]] = deque(maxlen=int(WINDOW_S / HISTORY_S))
    kept_s = answered_s = time.monotonic()
    with _keys() as read_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        shown: object = None
        while True:
            late_s = int(time.monotonic() - answered_s - interval)
            is_late = late_s >= SLOW_S and not failure
            reason = f"{where} has not answered for {late_s} s" if is_late else failure
            state = answered_s, reason, offset, console.size
            if state != shown:
                view, offset = _view(console, where, status, history, reason, offset)
                live.update(view, refresh=True)
                shown = state
            for key in KEY.findall(read_keys(KEY_INTERVAL_S)):
                if key in {"q", "Q"}:
                    return
                offset = _scrolled(offset, key, console.size.height - 1)
            while not answers.empty():
                answer, answered_s = answers.get(), time.monotonic()
                if isinstance(answer, Problem):
                    failure = answer.message
                    continue
                if not history or answered_s - kept_s >= HISTORY_S:
                    history.append(status)
                    kept_s = answered_s
                status, failure = answer, ""


def _poll(
    where: ServerTarget,
    token: str,
    interval: float,
    answers: queue.SimpleQueue[dict[str, Any] | Problem],
) -> None:
    """Request statuses for ever, on a daemon thread: keys work while the process is frozen."""
    while True:
        time.sleep(interval)
        try:
            answers.put(_status(where, token))
        except Problem as problem:
            answers.put(problem)


def _scrolled(offset: int, key: str, page: int) -> int:
    """Return the first line to show after a key; -1 for some rows of each table."""
    if key in LINE_DOWN or (key in PAGE_DOWN and offset < 0):
        return offset + 1
    if key in PAGE_DOWN:
        return offset + page
    if key in LINE_UP:
        return max(-1, offset - 1)
    return max(-1, offset - page) if key in PAGE_UP else offset


def _view(
    console: Console,
    where: ServerTarget,
    status: dict[str, Any],
    history: deque[dict[str, Any]],
    failure: str,
    offset: int,
) -> tuple[RenderableType, int]:
    """Return what fits the terminal, and the offset, which is not beyond the last line."""
    height = console.size.height
    if offset < 0:
        return frame(str(where), status, history, failure, height=height), offset
    lines = console.render_lines(frame(str(where), status, history, failure), pad=False)
    offset = max(0, min(offset, len(lines) - height + 1))
    shown = lines[offset : offset + height - 1]
    place = f"lines {offset + 1} to {offset + len(shown)} of {len(lines)}; ↑ ↓: scroll; q: quit"
    return Group(SegmentLines(shown, new_lines=True), Text(place, style="dim", end="")), offset


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for keys, and returns them."""

    def wait(timeout_s: float) -> str:
        time.sleep(timeout_s)
        return ""

    if sys.platform == "win32" or not sys.stdin.isatty():
        yield wait
        return
    descriptor = sys.stdin.fileno()

    def read(timeout_s: float) -> str:
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return ""
        return os.read(descriptor, 64).decode(errors="replace") or "q"  # the terminal is gone

    mode = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C is still a signal
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)


def _status(where: ServerTarget, token: str) -> dict[str, Any]:
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
    except http.client.BadStatusLine as error:
        raise Problem(
            f"{where} does not answer in HTTP/1.1, so it may be a port for calls of gRPC",
            "give the status_port of the process (kit.status_address)",
        ) from error
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


def _parsed(where: ServerTarget, body: bytes) -> dict[str, Any]:
    try:
        status = json.loads(body)
    except (ValueError, RecursionError):
        status = None
    if isinstance(status, dict) and "pid" in status:
        return status
    raise Problem(f"{where} does not answer with a status", "is this the status_port of a Kit?")
