"""Instances as a table: plain text, or rich's on a terminal; and as one JSON document."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from .diagnosis import printable
from .registry_changes import facts_of, pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from rpcwheel.instance import ServiceInstance

__all__ = ["as_document", "as_text", "show"]

Found: TypeAlias = "Mapping[str, Sequence[ServiceInstance]]"
"""By service."""

COLUMNS: Final = (
    "service", "id", "address", "weight", "version", "group", "zone", "status", "up since",
    "metadata",
)  # fmt: skip

LEFT_OUT: Final = {"version", "group", "zone", "metadata"}
"""If no instance has any."""


def table(found: Found) -> tuple[list[str], list[list[str]]]:
    """The head and the rows."""
    rows = [_row(one) for instances in found.values() for one in instances]
    kept = [
        at
        for at, name in enumerate(COLUMNS)
        if name not in LEFT_OUT or any(row[at] for row in rows)
    ]
    return [COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in rows]


def _row(one: ServiceInstance) -> list[str]:
    address = one.address if one.protocol == "grpc" else f"{one.protocol}://{one.address}"
    words = [one.service, one.id, address, str(one.weight), one.version, one.group, one.zone]
    words += [one.status, _since(one.started_at), pairs(one.metadata)]
    return [printable(word) for word in words]


def _since(seconds: float) -> str:
    """In this machine's time; "" if it was not told, or is no time that a calendar has."""
    if not seconds:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def as_text(found: Found) -> str:
    """Columns of plain text; "" if there is no instance."""
    head, rows = table(found)
    if not rows:
        return ""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [
        "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
        for row in [[name.upper() for name in head], *rows]
    ]
    return "\n".join(lines)


def as_document(registry: str, found: Found) -> str:
    """One JSON object: the registry, and the instances of each service."""
    services = {name: [facts_of(one) for one in instances] for name, instances in found.items()}
    return json.dumps({"registry": registry, "services": services}, indent=2)


def summary(registry: str, found: Found) -> str:
    """The last line."""
    count = sum(map(len, found.values()))
    if not found:
        return f"no service at {registry}"
    if not count:
        return f"no instance of {', '.join(found)} at {registry}"
    return (
        f"{count} instance{'s' if count > 1 else ''} of {len(found)} "
        f"service{'s' if len(found) > 1 else ''} at {registry}"
    )


def show(registry: str, found: Found, stream: TextIO, *, plain: bool) -> None:
    """Print the table, and how many there are; in colours on a terminal, if rich is there."""
    if any(found.values()):
        if plain or not stream.isatty() or os.environ.get("TERM") == "dumb":
            _print(as_text(found), stream)
        else:
            _show_rich(found, stream)
        _print("", stream)
    _print(summary(registry, found), stream)


def _show_rich(found: Found, stream: TextIO) -> None:
    try:
        from . import registry_rich
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        _print(as_text(found), stream)
    else:
        registry_rich.show(*table(found), stream)


def _print(line: str, stream: TextIO) -> None:
    # What others have published may hold anything; a pipe's encoding may not.
    encoding = stream.encoding or "ascii"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()
