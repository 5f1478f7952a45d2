"""The page that a run writes: `docs/benchmarks/capacity.md`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import _page
from benchmarks._page import EMPTY, Origin, figure, table
from benchmarks.capacity.subjects import BODY, Disk, Growth, Series, Threads

NOTES = """\
How it is measured:

* Memory: the growth of the resident memory of a process of its own, divided by the number of
  subjects, after a collection of garbage. The first ten of each are not counted. Requests are
  {body} bytes. Descriptors and threads are those of the process too. Client and server are separate
  processes; each connection was used for one call. "bare" is gRPC without rpcwheel, with
  a connection for each channel.
* Disk: the bodies are those of unary calls with a request of {body} bytes, stored in batches of
  1,000, without order keys. SQLite: the file, with its write-ahead log; it does not shrink when
  calls are delivered, but uses the space again. PostgreSQL: tables and indexes in the schema,
  without its write-ahead log; VACUUM makes the space free again. Redis: the memory of the server.
* Series: samples that `/metrics` has more. Client and server are in one process. A histogram of
  durations has 17 of them. A further status code adds 18 series to a method of a client, and 1 to
  that of a server.
* Nothing here is a time, so other programs do not change the figures.
"""

Rows = Sequence[Growth | Disk | Series | Threads]


def page(
    rows: Rows,
    *,
    origin: Origin,
) -> str:
    """The page, as Markdown."""
    parts = origin.parts("Capacity: memory, threads, descriptors, series, disk")
    if grown := [row for row in rows if isinstance(row, Growth)]:
        headers = ("each", "bytes", "descriptors", "threads of all", "measured with")
        parts += ["## Memory and descriptors", table(headers, list(map(_growth_cells, grown)))]
    for row in rows:
        if isinstance(row, Threads):
            parts += ["## Threads", table(("a process with, one after the other", "threads"),
                      [(what, f"{number}") for what, number in row.steps.items()])]  # fmt: skip
    if stored := [row for row in rows if isinstance(row, Disk)]:
        headers = ("engine", "bytes of a stored call", "after its delivery", "measured with")
        parts += ["## A journal", table(headers, list(map(_disk_cells, stored)))]
    if counted := [row for row in rows if isinstance(row, Series)]:
        lines = [(row.subject, f"{row.first}", f"{row.next}") for row in counted]
        parts += ["## Series of Prometheus", table(("each", "the first", "a further one"), lines)]
    return "\n\n".join([*parts, NOTES.format(body=len(BODY))])


def facts() -> dict[str, str]:
    """The machine and the versions, by name."""
    found = _page.facts("grpcio", "prometheus-client", "psycopg", "redis")
    return found | _page.engines("SQLite", "PostgreSQL", "Redis")


def _growth_cells(row: Growth) -> tuple[str, ...]:
    descriptors = figure(row.descriptors) if row.descriptors >= 0.01 else EMPTY
    return row.subject, f"{row.memory:,.0f}", descriptors, f"{row.threads}", f"{row.number:,}"


def _disk_cells(row: Disk) -> tuple[str, ...]:
    return row.engine, f"{row.stored:,.0f}", f"{row.delivered:,.0f}", f"{row.number:,}"
