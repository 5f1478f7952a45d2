"""`rpcwheel journal ls|show|retry|drop|export|stats|work URL ...`: journals of failback.

Works with every engine. No command creates a journal. They see the calls of all processes.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rpcwheel.errors import (
    ConfigurationError,
    JournalError,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.journal import (
    CallState,
    Depth,
    Filter,
    JournalBackend,
    StoredCall,
    open_journal_backend,
)

from .findings import printable
from .group import CommandGroup
from .journal_view import (
    CALL_COLUMNS,
    COUNTS,
    DEPTH_COLUMNS,
    call_as_json,
    call_row,
    depth_as_json,
    depth_rows,
    described,
    description,
    total_of,
)
from .journal_work import work
from .parameters import JournalUrl, check_seconds, parse_span, with_options
from .protobuf_view import named_fields, numbered_fields
from .table import print_table, table_of

MAX_COUNT: Final = 10_000
"""How far a question counts the selected calls."""


class StateFilter(StrEnum):
    """The states by which calls are selected. A blocked call is a waiting one."""

    WAITING = "waiting"
    TAKEN = "taken"
    DEAD = "dead"


STATES: Final = {
    StateFilter.WAITING: (CallState.READY, CallState.BLOCKED),
    StateFilter.TAKEN: (CallState.TAKEN,),
    StateFilter.DEAD: (CallState.DEAD,),
}

MAX_NUMBER: Final = 2**63 - 2
"""The largest number of a call or of calls: engines have 63 bits, and `ls` asks for one more."""

Watch = Annotated[bool, typer.Option("--watch", help="Show changes until Ctrl-C.")]
Interval = Annotated[
    float, typer.Option(metavar="SECONDS", callback=check_seconds, help="Between two looks.")
]
All = Annotated[bool, typer.Option("--all", help="All calls; needed if there is no filter.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

journal = CommandGroup(
    "journal",
    JournalError,
    "Show, repeat and delete the calls in a journal of failback, and deliver them.\n\nExit "
    "status: 0 success; 1 there is no such journal or call, the journal does not answer or "
    "refuses, or the answer was no; 2 a wrong argument or a missing package; 130 after Ctrl-C.",
    quiet="psycopg",  # it warns of lost connections, which the journal reports
)


def selection(
    state: Annotated[
        list[StateFilter] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only calls in this state: waiting, taken or dead; may be given several times.",
        ),
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only calls of this queue.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help='Only calls to this target; "" for functions.'),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Only these methods or functions; * and ? match others."
        ),
    ] = None,
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only calls whose last error has this text.")
    ] = None,
    older: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=parse_span, help="Only calls stored longer ago: 30s, 2h."
        ),
    ] = None,
    ids: Annotated[
        list[int] | None,
        typer.Option(
            "--id",
            metavar="ID",
            min=0,
            max=MAX_NUMBER,
            help="Only this call; may be given several times.",
        ),
    ] = None,
) -> Filter:
    """Return the filter that the options of a command describe."""
    states = [call_state for name in state or () for call_state in STATES[name]]
    return Filter(
        ids=tuple(ids) if ids else None,
        states=tuple(dict.fromkeys(states)) or None,
        queue=queue,
        target=target,
        method=method,
        error=error,
        min_age_s=older,
    )


selecting = with_options(selection, "chosen")


# The commands


@journal.command
@selecting
def ls(
    url: JournalUrl,
    chosen: Filter,
    limit: Annotated[
        int, typer.Option(min=1, max=MAX_NUMBER, help="How many calls to show.")
    ] = 100,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each call, on one line.")
    ] = False,
    watch: Watch = False,
    interval: Interval = 2.0,
) -> None:
    """List calls, the oldest first."""
    if watch and as_json:
        raise ConfigurationError("--watch shows a table; leave out --json")
    with _opened(url) as backend:
        if as_json:
            for call in backend.calls(chosen, limit):
                print(json.dumps(call_as_json(call)))
            return

        def look() -> _Frame:
            calls = list(backend.calls(chosen, limit + 1))
            rows = [call_row(call) for call in calls[:limit]]
            return _Frame(CALL_COLUMNS, rows, _summary(backend, calls, limit))

        _show(backend, look, watch=watch, interval=interval)


@journal.command
def show(
    url: JournalUrl,
    number: Annotated[int, typer.Argument(metavar="ID", min=0, max=MAX_NUMBER)],
    body: Annotated[
        bool, typer.Option("--body", help="Show the requests, or the arguments of the function.")
    ] = False,
    descriptors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --body: a descriptor set with the method, which "
                     "protoc --include_imports --descriptor_set_out writes. Without it, fields of "
                     "protobuf have numbers."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:  # fmt: skip
    """Show one call, without secrets in its metadata, and without its requests."""
    with _opened(url) as backend:
        calls = backend.select(Filter(ids=(number,)), limit=1)
        if not calls:
            journal.warn(f"there is no call {number} in {backend.url}; it may have been delivered")
            raise typer.Exit(1)
        if as_json:
            print(json.dumps(described(calls[0], with_body=body), indent=2))
            return
        decode = numbered_fields
        if descriptors is not None:
            decode = partial(named_fields, descriptors, calls[0].method)
        for line in description(calls[0], with_body=body, decode_request=decode):
            print(printable(line))


@journal.command
@selecting
def retry(
    url: JournalUrl,
    chosen: Filter,
    every: All = False,
    yes: Yes = False,
) -> None:
    """Make calls due now. Dead letters begin anew, with their whole maximum age."""
    _require_filter(chosen, every=every)
    with _opened(url) as backend:
        if not yes:
            _ask(backend, chosen, "retry")
        print(f"{_calls(backend.retry(chosen))} due now")


@journal.command
@selecting
def drop(
    url: JournalUrl,
    chosen: Filter,
    every: Annotated[
        bool, typer.Option("--all", help="All dead letters; needed if there is no filter.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Delete dead letters; other calls only with --state. They are not delivered any more."""
    _require_filter(chosen, every=every)
    has_state = chosen.states is not None
    if not has_state:
        chosen = replace(chosen, states=STATES[StateFilter.DEAD])
    with _opened(url) as backend:
        if not yes:
            _ask(backend, chosen, "drop")
        dropped = backend.delete(chosen)
        print(f"{_calls(dropped)} dropped")
        if not dropped and not has_state:
            journal.warn("only dead letters were considered; --state names other calls")


@journal.command
@selecting
def export(
    url: JournalUrl,
    chosen: Filter,
    body: Annotated[
        bool, typer.Option("--body", help="With the requests (base64) and arguments.")
    ] = False,
) -> None:
    """Print all calls, one JSON object on each line, as `show --json` prints one call."""
    with _opened(url) as backend:
        for call in backend.calls(chosen):
            print(json.dumps(described(call, with_body=body)))


@journal.command
def stats(
    url: JournalUrl,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object; with --watch, one on each line.")
    ] = False,
    watch: Watch = False,
    interval: Interval = 2.0,
) -> None:
    """Count the calls of each queue and target."""
    with _opened(url) as backend:
        if as_json:
            print_one = partial(_print_document, backend, None if watch else 2)
            _print_results(backend, print_one, watch=watch, interval=interval)
            return
        _show(backend, lambda: _depths_frame(backend), watch=watch, interval=interval)


journal.command(work)


# Calls


def _require_filter(chosen: Filter, *, every: bool) -> None:
    if chosen == Filter() and not every:
        raise ConfigurationError("no filter is given; --all selects all calls")


@contextmanager
def _opened(url: str) -> Iterator[JournalBackend]:
    """Open a journal that exists."""
    with closing(open_journal_backend(url, create=False)) as backend:
        _end_leases(backend)
        yield backend


def _end_leases(backend: JournalBackend) -> None:
    """Make the calls of processes that have died waiting again, if their leases have ended.

    Each process that delivers calls does this too, but perhaps none runs. A user who may only read
    the journal, or has the URL of a standby or a replica, sees them as taken. If the journal
    refuses for another reason, the next request fails too.

    Raises:
        JournalError: The journal fails, so the next request would select the wrong calls.
    """
    try:
        with suppress(JournalRefused):
            backend.take("", 0.0, (), 0.0)
    except JournalUnavailable as error:
        if not _is_read_only(error):
            raise


def _is_read_only(error: JournalUnavailable) -> bool:
    """Whether a server refuses changes: a standby of PostgreSQL, or a replica of Redis."""
    cause = error.__cause__
    in_postgresql = getattr(cause, "sqlstate", None) == "25006"  # its texts are translated
    return in_postgresql or "read only replica" in str(cause)


def _ask(backend: JournalBackend, chosen: Filter, action: str) -> None:
    """Ask whether the selected calls are to be changed.

    Raises:
        ConfigurationError: There is no terminal for the answer.
        typer.Exit: No call is selected, or the answer is no.
    """
    if not sys.stdin.isatty():
        raise ConfigurationError(f"no terminal to ask whether to {action} calls; give --yes")
    count = sum(1 for _ in backend.calls(chosen, MAX_COUNT + 1))
    if count == 0:
        print("no call is selected")
        raise typer.Exit
    number = f"more than {MAX_COUNT:,} calls" if count > MAX_COUNT else _calls(count)
    if not _is_confirmed(f"{action} {number} of {printable(str(backend.url))}?"):
        print("nothing was changed")
        raise typer.Exit(1)


def _is_confirmed(question: str) -> bool:
    """Ask until the answer is yes or no. Not by `typer.confirm`, which takes Ctrl-C for a no."""
    while True:
        print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:  # Ctrl-D
            print(file=sys.stderr)
        if answer.strip().lower() in {"y", "yes"}:
            return True
        if answer.strip().lower() in {"n", "no", ""}:
            return False
        print("answer y or n", file=sys.stderr)


def _calls(count: int) -> str:
    return f"{count:,} call{'' if count == 1 else 's'}"


# Output


class _Frame(NamedTuple):
    """A table, and a line below."""

    head: tuple[str, ...]
    rows: list[list[str]]
    summary: str

    def print(self) -> None:
        if self.rows:
            print_table(self.head, self.rows, sys.stdout)
            print()
        print(printable(self.summary), flush=True)

    def renderable(self, height: int, failure: str) -> RenderableType:
        """Return what fits on a terminal."""
        parts: list[RenderableType] = [_text(self.summary, "bold")]
        if failure:
            parts.append(_text(failure, "bold red"))
        if self.rows:
            room = max(0, height - len(parts) - 2)
            parts += [Text(), table_of(self.head, self.rows[:room])]
        return Group(*parts)


def _text(text: str, style: str) -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _summary(backend: JournalBackend, calls: list[StoredCall], limit: int) -> str:
    if len(calls) > limit:
        return f"the first {_calls(limit)} at {backend.url}; --limit shows more, `export` all"
    return f"{_calls(len(calls)) if calls else 'no call'} at {backend.url}"


def _depths_frame(backend: JournalBackend) -> _Frame:
    depths = backend.depths()
    total = total_of(depths)
    counts = ", ".join(f"{total[name]:,} {name}" for name in COUNTS)
    return _Frame(DEPTH_COLUMNS, depth_rows(depths), f"{counts} at {backend.url}")


def _print_document(backend: JournalBackend, indent: int | None) -> None:
    depths: list[Depth] = backend.depths()
    totals: dict[str, Any] = {"journal": str(backend.url), "total": total_of(depths)}
    document = totals | {"queues": list(map(depth_as_json, depths))}
    print(json.dumps(document, indent=indent), flush=True)


def _print_results(
    backend: JournalBackend, print_one: Callable[[], None], *, watch: bool, interval: float
) -> None:
    """Print a result; with `watch` one after the other, also after the journal did not answer."""
    print_one()
    while watch:
        time.sleep(interval)
        try:
            _end_leases(backend)
            print_one()
        except JournalError as error:
            journal.warn(str(error))


def _show(
    backend: JournalBackend, look: Callable[[], _Frame], *, watch: bool, interval: float
) -> None:
    """Print a frame; with `watch` one after the other, on a terminal in its place.

    If the journal does not answer later, the last frame stays, with the reason.
    """
    if not watch or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        _print_results(backend, lambda: look().print(), watch=watch, interval=interval)
        return
    frame = look()
    console, failure = Console(highlight=False), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame.renderable(console.size.height, failure), refresh=True)
            time.sleep(interval)
            try:
                _end_leases(backend)
                frame, failure = look(), ""
            except JournalError as error:
                failure = str(error)
