"""The page that a run writes: `docs/benchmarks/journal.md`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import _page
from benchmarks._page import Origin, Verdict, figure, quartiles, table, verdict
from benchmarks.calls.scale import Results, Row
from benchmarks.journal.subjects import (
    AT_MOST,
    BATCH,
    BODY,
    ENGINES,
    ONE,
    OURS,
    SINGLE,
    WORKER,
    WORKERS,
    Scale,
)

NOTES = """\
How it is measured: bodies of {body} bytes, calls without order keys. The subjects take turns, in
another order in each round. {rounds} rounds of {single:,} calls one by one, or of {batched:,} in
batches; medians. "× bare" is the median of the ratios of wall times within a round, with their
quartiles. If these are far apart, other programs used the machine. The bare driver executes the
same statements with values that were prepared before, and makes no objects of the rows. Workers are
threads of one process, each with a connection of its own. The engines write to the same disk:
SQLite with `durability=process` and `power`, PostgreSQL with `fsync` and `synchronous_commit` on,
Redis with `appendonly yes` and `appendfsync everysec`. PostgreSQL and Redis run on this
machine.
"""


def page(
    results: Results,
    scale: Scale,
    *,
    origin: Origin,
) -> str:
    """The page, as Markdown."""
    parts = origin.parts("Journals and their engines")
    parts += ["## Target", table(("", "measured", "target", ""), list(_verdicts(results)))]
    for what in (ONE, BATCH, SINGLE, WORKER, WORKERS):
        rows = list(results.of("client", "sync", what))
        if rows:
            headers = ("", "calls/s", "wall, µs", "× bare", "CPU, µs")
            parts += [f"## {what.capitalize()}", table(headers, [_line(row) for row in rows])]
    notes = NOTES.format(
        body=len(BODY), rounds=scale.rounds, single=scale.single, batched=scale.batched
    )
    return "\n\n".join([*parts, notes])


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    found = _page.facts("psycopg", "redis") | _page.engines("SQLite", "PostgreSQL", "Redis")
    return found | {"Load before": load}


def _line(row: Row) -> tuple[str, ...]:
    values = row.values
    return (
        row.subject,
        f"{1e6 / values['wall_us']:,.0f}",
        figure(values["wall_us"]),
        quartiles(values, "wall"),
        figure(values["cpu_us"]),
    )


def _verdicts(results: Results) -> Iterator[Verdict]:
    for engine in ENGINES:
        for what in (ONE, BATCH):
            value = results.value("client", "sync", what, f"{engine}, {OURS}", "wall_ratio")
            yield verdict(f"{engine}: {what}", value, AT_MOST, "{:.3f}×", goal_form="{:.2f}×")
