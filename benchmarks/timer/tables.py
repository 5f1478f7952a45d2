"""The figures as tables: Markdown that also reads well on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.timer.scale import Form, Results, Scale
from benchmarks.timer.subjects import ASYNCIO, NETTY, OWN, RIVALS
from benchmarks.timer.verdict import TARGETS, flatness, longest_ms

Line = tuple[str, Form]  # a subject, and the form of rpcwheel in whose process it was measured
Column = tuple[str, Callable[[str, Form], float | None]]

EMPTY = "–"


def verdicts(results: Results, scale: Scale) -> str:
    """Each target, what was measured, and whether it is met."""
    lines = [target.verdict(results, scale) for target in TARGETS]
    return table(("what", "measured", "target", ""), lines)


def calls(results: Results, scale: Scale) -> str:
    """What a call costs, and how the pair compares."""

    def cpu(measure: str) -> Callable[[str, Form], float | None]:
        return lambda name, form: results.value(measure, name, "cpu_ns", form)

    def ratio(name: str, form: Form) -> float | None:
        own = results.value("pair", name, "cpu_ns", form)
        theirs = results.value("pair", ASYNCIO, "cpu_ns", "native" if form == "jvm" else form)
        return theirs / own if own and theirs else None

    def many(name: str, form: Form) -> float | None:
        measure = "pair" if form == "jvm" else "flat"
        return results.value(measure, name, "cpu_ns", form, scale.many)

    def flat(name: str, form: Form) -> float | None:
        if form != "jvm":
            return flatness(results, scale, name, form)
        few, million = cpu("pair")(name, form), many(name, form)
        return million / few if few and million else None

    return _table(
        results,
        ("pair", cpu("pair")),
        ("× faster than asyncio", ratio),
        ("pair, delays vary", cpu("varied")),
        ("start", cpu("start")),
        ("cancel", cpu("cancel")),
        ("fire", cpu("fire")),
        (f"pair, {scale.many:,} pending", many),
        (f"over {scale.few:,} pending", flat),
    )


def million(results: Results, _: Scale) -> str:
    """What a million pending timeouts weigh."""

    def value(measure: str, key: str) -> Callable[[str, Form], float | None]:
        return lambda name, form: results.value(measure, name, key, form)

    def with_collector(name: str, form: Form) -> float | None:
        row = results.row("stall, gc on", name, form)
        return None if row is None else max(row.values[key] for key in row.values if "cpu" in key)

    def wall(name: str, form: Form) -> float | None:
        longest = longest_ms(results, name, form, "wall")
        return None if longest is None else longest * 1e3

    return _table(
        results,
        ("bytes each", value("memory", "bytes")),
        ("gc.collect(), ms", value("gc", "ms")),
        ("longest cancel, µs", value("stall", "cancel_cpu_us")),
        ("start, µs", value("stall", "start_cpu_us")),
        ("advance, µs", value("stall", "advance_cpu_us")),
        ("any, gc on, µs", with_collector),
        ("any, wall, µs", wall),
        ("idle wake-ups", value("idle", "wakeups")),
        ("idle CPU, ms", value("idle", "cpu_ms")),
    )


def lateness(results: Results, _: Scale) -> str:
    """How late tasks run, in wall time, and what four threads get done."""

    def late(key: str) -> Callable[[str, Form], float | None]:
        return lambda name, form: results.value("lateness", name, key, form)

    def rate(key: str) -> Callable[[str, Form], float | None]:
        return lambda name, form: results.value("threads", name, key, form)

    return _table(
        results,
        ("lateness p50, µs", late("p50_us")),
        ("p99, µs", late("p99_us")),
        ("least, µs", late("least_us")),
        ("four threads: pairs/s", rate("pairs_per_s")),
        ("pairs per CPU second", rate("pairs_per_cpu_s")),
        ("all counted", rate("exact")),
    )


def table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, figures to the right."""
    widths = [max(len(line[i]) for line in (headers, *lines)) for i in range(len(headers))]

    def show(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([show(headers), show(rule), *map(show, lines)])


def figure(value: float | None) -> str:
    """Three digits, or the whole number."""
    if value is None:
        return EMPTY
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def label(name: str, form: Form) -> str:
    """A subject by name, with its form if it is ours."""
    return f"{name}, {form}" if name in OWN else name


def lines(results: Results) -> list[Line]:
    """Every subject that was measured: ours compiled, ours pure, the rivals."""
    first: Form = "native" if any(row.form == "native" for row in results.rows) else "pure"
    forms: tuple[Form, ...] = ("native", "pure")
    ours = [(name, form) for form in forms for name in OWN]
    measured = {(row.subject, row.form) for row in results.rows}
    rivals: list[Line] = [(name, first) for name in RIVALS]
    return [line for line in (*ours, *rivals, (NETTY, "jvm")) if line in measured]


def _table(results: Results, *columns: Column) -> str:
    """One line for each subject; without the lines and columns that have no figures."""
    cells = {line: [get(*line) for _, get in columns] for line in lines(results)}
    filled = [any(row[i] is not None for row in cells.values()) for i in range(len(columns))]
    if not any(filled):
        return ""

    def keep(row: Sequence[str]) -> list[str]:
        return [cell for cell, wanted in zip(row, filled, strict=True) if wanted]

    shown = [
        [label(*line), *keep([figure(value) for value in row])]
        for line, row in cells.items()
        if any(value is not None for value in row)
    ]
    return table(["", *keep([header for header, _ in columns])], shown)
