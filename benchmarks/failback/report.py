"""The page that a run writes: `docs/benchmarks/failback.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import _page
from benchmarks._page import Origin, Verdict, figure, table, verdict
from benchmarks.failback.scale import (
    AT_MOST,
    CHANNEL,
    DURABILITIES,
    FRONT,
    LEAST_SHARE,
    MEMORY,
    MOST_FAILED,
    MOST_MB,
    PER_S,
    SERVER_THREADS,
    SERVICE_S,
    TIMEOUT_S,
    Scale,
)

Rows = Sequence[dict[str, Any]]

APPENDS = """\
How it is measured: requests of 300 bytes. The subjects take turns, in another order in each round;
{rounds} rounds of {calls:,} calls ({channel_calls:,} on a channel); medians of the wall times, and
of their ratios within a round. The bare module executes the same statements. All values were
prepared before. Threads share its connection and a lock. "Transactions of as many calls as threads"
is one thread that has all calls at hand: what group commit could reach without threads. The calls
of a channel fail because nothing listens at its target.
"""

WAITING = """\
How it is measured: calls of 300 bytes, all of them due. An idle client has an empty journal; a
client that waits has a server that is down. Memory is that of the whole process after {memory_s:g}
s, at its peak. The first delivery is the median of five processes, each of which was killed then.
Appends are by `Journal.append_now`, beside the attempts that the server refuses.
"""

BACKLOG = """\
How it is measured: a server with {threads} threads, each busy for {service_s:g} s with a call, so
that it can execute {per_s:g} calls a second; the timeout of each attempt is {timeout_s:g} s. All
calls are due at the same time. The calls of a queue in memory have failed while nothing listened.
The time is that from the first execution to the end of the last one.
"""


def page(
    appends: Rows,
    waiting: Mapping[str, Any] | None,
    backlog: Rows,
    scale: Scale,
    *,
    origin: Origin,
) -> str:
    """The page, as Markdown."""
    parts = origin.parts("Failback")
    verdicts = [
        *_appends_met(appends),
        *(_waiting_met(waiting) if waiting else ()),
        *_backlog_met(backlog),
    ]
    parts += ["## Targets", table(("", "measured", "target", ""), verdicts)]
    for durability in DURABILITIES:
        rows = [row for row in appends if row["durability"] == durability]
        if rows:
            headers = ("threads", "", "calls/s", "× bare", "× in memory")
            parts += [
                f"## Appends, `durability={durability}`",
                table(headers, [_line(row) for row in rows]),
            ]
    if appends:
        parts.append(
            APPENDS.format(
                rounds=scale.rounds, calls=scale.calls, channel_calls=scale.channel_calls
            )
        )
    if waiting:
        parts += [
            f"## {waiting['waiting']:,} waiting calls",
            table(("", ""), list(_waiting_lines(waiting))),
            WAITING.format(memory_s=scale.memory_s),
        ]
    if backlog:
        headers = ("", "calls", "delivered", "never executed", "failed attempts", "twice")
        parts += [
            "## A long queue and a healthy server",
            table((*headers, "calls/s"), [_backlog_line(row) for row in backlog]),
            BACKLOG.format(
                threads=SERVER_THREADS, service_s=SERVICE_S, per_s=PER_S, timeout_s=TIMEOUT_S
            ),
        ]
    return "\n\n".join(parts)


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    found = _page.facts("grpcio") | _page.engines("SQLite", "PostgreSQL")
    return found | {"Load before": load}


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    channel = row["subject"] in (CHANNEL, MEMORY)
    return (
        str(row["threads"]),
        row["subject"],
        f"{row['per_s']:,.0f}",
        "" if channel else f"{row['bare']:.2f}",
        f"{row['memory']:.2f}" if channel else "",
    )


def _appends_met(rows: Rows) -> Iterator[Verdict]:
    for row in rows:
        if row["subject"] == FRONT:
            text = f"{FRONT}, {row['threads']} threads, `{row['durability']}`: time × bare"
            yield verdict(text, row["bare"], AT_MOST, "{:.2f}", goal_form="{}")


def _waiting_met(waiting: Mapping[str, Any]) -> Iterator[Verdict]:
    for name, text in (("waits", "server is down"), ("delivers", "server is up")):
        above = waiting[name]["peak_mb"] - waiting["idle"]["peak_mb"]
        label = f"memory above an idle client, {waiting['waiting']:,} calls, {text}"
        yield verdict(label, above, MOST_MB, "{:.1f} MB", goal_form="{:g} MB")


def _backlog_met(rows: Rows) -> Iterator[Verdict]:
    for row in rows:
        if row["share"] is None:
            continue
        failed, share = row["failed"] / row["attempts"], row["share"]
        is_met = failed <= MOST_FAILED and share >= LEAST_SHARE and row["never"] == 0
        yield (
            f"a long queue, {row['name']}: failed attempts, share of the server's rate",
            f"{failed:.1%}, {share:.0%}",
            f"≤ {MOST_FAILED:.0%}, ≥ {LEAST_SHARE:.0%}",
            "met" if is_met else "**missed**",
        )


def _backlog_line(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (f"{row[name]:,}" for name in ("calls", "delivered", "never", "failed", "twice"))
    return row["name"], *counts, f"{row['per_s']:,.0f}"


def _waiting_lines(waiting: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "size of the file", f"{waiting['file_mb']:,.0f} MB"
    yield "stored in batches of 1,000", f"{waiting['fill_per_s']:,.0f} calls/s"
    for name, text in (
        ("idle", "idle client"),
        ("waits", "client whose server is down"),
        ("delivers", "client that delivers"),
    ):
        yield (
            f"memory of a {text}".replace("a idle", "an idle"),
            f"{waiting[name]['peak_mb']:.1f} MB",
        )
    first = waiting["first"]
    yield "first delivery after the imports", f"{figure(first['after_imports_s'] * 1e3)} ms"
    yield "first delivery after the start of the process", f"{first['after_spawn_s']:.2f} s"
    for threads in (1, 8):
        rates = [waiting["rates"][f"{name}, {threads}"] for name in ("empty", "full")]
        yield (
            f"appends by {threads} threads to an empty journal, and to this one",
            " and ".join(f"{rate:,.0f}" for rate in rates) + " calls/s",
        )
