"""The page that a run writes: `docs/benchmarks/connections.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks._page import EMPTY, Origin, figure, quartiles, table, within
from benchmarks.calls.report import facts as call_facts
from benchmarks.calls.scale import Results, Row, Side
from benchmarks.connections.notes import notes
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import (
    CHURN,
    FROZEN,
    HEARTBEATS,
    RECOVERY,
    REPLACEMENT,
    ROUND,
    SERVING,
    SPREAD,
    UNARY,
    WORLDS,
)
from benchmarks.connections.verdict import TARGETS, each_us, percent

Cell = Callable[[Row], str]
Columns = tuple[tuple[str, Cell], ...]


def page(
    results: Results,
    scale: Scale,
    *,
    origin: Origin,
) -> str:
    """The page, as Markdown."""
    parts = origin.parts("Connections: heartbeats, reconnects, idle detection")
    verdicts = [target.verdict(results) for target in TARGETS]
    parts += ["## Target", table(("", "measured", "target", ""), verdicts)]
    for title, side, measures in _SECTIONS:
        shown = [text for what in measures for text in _tables(results, side, what)]
        parts += [f"## {title.format(scale=scale)}", *shown] if shown else []
    return "\n\n".join([*parts, notes(scale)])


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    found = call_facts(load)
    return found | {"Versions": found["Versions"].split(", ")[0]}  # of grpcio


def _tables(results: Results, side: Side, what: str) -> Iterator[str]:
    for world in WORLDS:
        rows = list(results.of(side, world, what))
        if not rows:
            continue
        name = "`grpc`" if world == "sync" else "`grpc.aio`"
        yield _table(f"{_TITLES[what]}, {name}", _columns(what, results), rows)
        if what == HEARTBEATS:
            yield _spread(name, rows)


def _table(title: str, columns: Columns, rows: Sequence[Row]) -> str:
    lines = [(row.subject, *(cell(row) for _, cell in columns)) for row in rows]
    return table((title, *(header for header, _ in columns)), lines)


def _spread(name: str, rows: Sequence[Row]) -> str:
    """The share of the heartbeats that arrived in each tenth of the interval."""
    tenths = [f"tenth_{at}" for at in range(10)]
    lines = [
        (row.subject, *(f"{100 * row.values[tenth]:.0f} %" for tenth in tenths))
        for row in rows
        if tenths[0] in row.values
    ]
    headers = (f"arrived in this tenth, {name}", *(str(at + 1) for at in range(10)))
    return table(headers, lines) if lines else "No heartbeats came."


def _value(key: str, digits: int | None = None) -> Cell:
    """A figure, if it is there."""

    def cell(row: Row) -> str:
        value = row.values.get(key)
        if value is None or digits is None:
            return figure(value)
        return f"{value:.{digits}f}"

    return cell


def _largest_tenth(row: Row) -> str:
    tenths = [value for key, value in row.values.items() if key.startswith("tenth_")]
    return f"{100 * max(tenths):.0f} %" if tenths else EMPTY


def _within(key: str) -> Cell:
    return lambda row: within(row.values, key)


def _ratio(clock: str) -> Cell:
    return lambda row: quartiles(row.values, clock)


def _before_after(key: str) -> Cell:
    return lambda row: (
        f"{figure(row.values[f'{key}_before'])} → {figure(row.values[f'{key}_after'])}"
    )


def _columns(what: str, results: Results) -> Columns:
    if what != HEARTBEATS:
        return _COLUMNS[what]

    def at_full(row: Row) -> str:
        value = percent(results, row.world, row.subject)
        return EMPTY if value is None else f"{value:.2f}"

    def each(row: Row) -> str:
        return figure(each_us(results, row.world, row.subject))

    def beside(row: Row) -> str:
        own, theirs = (each_us(results, row.world, who) for who in (row.subject, SPREAD[row.world]))
        return f"{own / theirs:.2f}" if own and theirs else EMPTY

    return (
        ("CPU, % of a core", _value("cpu_percent", 2)),
        ("1,000 at 60 s", at_full),
        ("each, µs", each),
        ("× for each, spread", beside),
        ("threads", _value("threads", 0)),
        ("at most", _value("most_threads", 0)),
        ("sent per interval", _value("sent", 0)),
        ("expected", _value("expected", 0)),
        ("arrived", _value("arrived", 0)),
        ("largest tenth", _largest_tenth),
    )


def _costs(baseline: str) -> Columns:
    return (
        ("CPU, µs", _value("cpu_us")),
        (f"× {baseline}", _ratio("cpu")),
        ("wall, µs", _value("wall_us")),
        (f"× {baseline}", _ratio("wall")),
    )


_COLUMNS: Final[dict[str, Columns]] = {
    UNARY: _costs("bare"),
    SERVING: _costs("no-op"),
    REPLACEMENT: (
        ("connected after, µs", _value("renewed_us")),
        ("call answered after, µs", _value("answered_us")),
        ("× own connection", _value("ratio", 2)),
    ),
    RECOVERY: (
        ("call answered after, ms", _value("answered_ms")),
        ("longest, ms", _value("longest_ms")),
    ),
    FROZEN: (
        ("call in flight ended after, s", _within("found_s")),
        ("next call answered after, s", _within("answered_s")),
    ),
    ROUND: (
        ("CPU, ms", _value("cpu_ms")),
        ("wall, ms", _value("wall_ms")),
        ("connections found", _value("count", 0)),
        ("descriptors freed", _value("closed", 0)),
        ("all freed after, ms", _value("gone_ms")),
    ),
    CHURN: (
        ("cycles", _value("cycles")),
        ("CPU, µs a cycle", lambda row: figure(1e3 * row.values["cpu_ms"] / row.values["cycles"])),
        ("descriptors", _before_after("descriptors")),
        ("entries", _before_after("entries")),
        ("memory, MiB", _before_after("memory")),
    ),
}

_TITLES: Final = {
    HEARTBEATS: "CPU of the client",
    UNARY: "a unary call",
    REPLACEMENT: "a new connection",
    RECOVERY: "after an outage",
    FROZEN: "the server is frozen",
    SERVING: "a unary call",
    ROUND: "the detector",
    CHURN: "before → after",
}

_SECTIONS: Final[tuple[tuple[str, Side, tuple[str, ...]], ...]] = (
    (
        "Heartbeats of {scale.channels:,} idle channels, each {scale.interval_s:g} s",
        "client",
        (HEARTBEATS,),
    ),
    ("A channel that reconnects", "client", (UNARY, REPLACEMENT, RECOVERY)),
    ("A frozen server", "client", (FROZEN,)),
    ("ConnectionTable on a server", "server", (SERVING,)),
    ("The idle detector with {scale.connections:,} connections", "server", (ROUND,)),
    ("Opened and closed connections", "server", (CHURN,)),
)
