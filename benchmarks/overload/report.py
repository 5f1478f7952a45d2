"""The page that a run writes: `docs/benchmarks/overload.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks import _page
from benchmarks._page import EMPTY, table
from benchmarks.overload.figures import Outcome, PhaseFigures

LATE_S = 0.02
"""A load that sent 1 call in 100 later than this did not keep its schedule."""

HEADERS = (
    "",
    "phase",
    "calls/s",
    "goodput",
    "answered",
    "wasted",
    "p50, ms",
    "p99, ms",
    "99 % after, s",
    "failed",
)


def page(outcomes: Sequence[Outcome], *, facts: Mapping[str, str], command: str) -> str:
    """The page, as Markdown."""
    origin = [f"* {name}: {value}" for name, value in facts.items()] + [f"* Command: `{command}`"]
    lines = [line for outcome in outcomes for line in _lines(outcome)]
    parts = ["# Overload", "\n".join(origin), table(HEADERS, lines), *_warnings(outcomes)]
    return "\n\n".join(parts)


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    return _page.facts("grpcio") | {"Load before": load}


def _lines(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    case = outcome.case
    name = f"{case.world}, {case.handler}, {case.variant}, {case.client} ({outcome.capacity:.0f}/s)"
    for figures in outcome.phases():
        yield name, *_cells(figures)
        name = ""


def _cells(figures: PhaseFigures) -> Iterator[str]:
    yield figures.phase.name
    yield f"{figures.offered_per_s:,.0f}"
    yield f"{figures.goodput:.2f}"
    yield f"{figures.answered:.1%}"
    yield f"{figures.wasted:.1%}"
    yield from (EMPTY if each is None else f"{1e3 * each:,.0f}" for each in _took(figures))
    yield EMPTY if figures.settled_s is None else f"{figures.settled_s:.1f}"
    yield ", ".join(f"{code} {share:.1%}" for code, share in figures.failed.items())


def _took(figures: PhaseFigures) -> tuple[float | None, float | None]:
    return figures.p50_s, figures.p99_s


def _warnings(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.late_s > LATE_S:
            late_ms = 1e3 * outcome.late_s
            yield f"**{outcome.case}: the load fell behind by {late_ms:.0f} ms (p99).**"
