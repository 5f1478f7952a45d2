"""Draws the goodput of servers as SVG, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from benchmarks.overload.cases import (
    ADAPTIVE,
    BARE,
    BOTH,
    BREAKER,
    FIXED,
    HANDLERS,
    NAIVE,
    PLAIN,
    RETRY,
    SEVERED,
    SWEEP,
    THROTTLE,
)
from benchmarks.overload.figures import Outcome

WIDTH, HEIGHT = 860, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 80, 44
HIGHEST = 2.2
"""Loads above this share of the capacity are cut off; the names of the phases say how high."""

INTERVALS = 20
"""A line has so many points for each phase."""

TITLES = {"sync": "grpc", "aio": "grpc.aio"}
LABELS = {
    BARE: "bare",
    FIXED: "best fixed limit",
    ADAPTIVE: 'limit="adaptive"',
    SEVERED: "nothing inherited",
    PLAIN: "plain",
    NAIVE: "naive retries",
    RETRY: "Kit(retry)",
    THROTTLE: "Kit(retry, throttle)",
    BREAKER: "Kit(retry, breaker)",
    BOTH: "Kit(retry, throttle, breaker)",
}
"""Of the variants of a server, and of the clients of one that is down."""
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
:root {{ --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --load: #e4e8ec;
  --bare: #cf222e; --fixed: #9a6700; --adaptive: #0969da; --severed: #8250df;
  --naive: #cf222e; --throttle: #9a6700; --breaker: #0969da }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #0d1117; --ink: #f0f6fc; --soft: #9198a1; --rule: #3d444d; --load: #262c36;
    --bare: #f85149; --fixed: #d29922; --adaptive: #58a6ff; --severed: #bc8cff;
    --naive: #f85149; --throttle: #d29922; --breaker: #58a6ff }}
}}
text {{ font: 12px ui-sans-serif, system-ui, sans-serif; fill: var(--soft) }}
.title {{ font-size: 14px; font-weight: 600; fill: var(--ink) }}
.middle {{ text-anchor: middle }} .end {{ text-anchor: end }}
path {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
.load {{ fill: var(--load) }} .rule {{ stroke: var(--rule); stroke-width: 1 }}
.capacity {{ stroke: var(--ink); stroke-width: 1; stroke-dasharray: 6 4 }}
.bare {{ stroke: var(--bare) }} .fixed {{ stroke: var(--fixed); stroke-dasharray: 9 3 }}
.adaptive {{ stroke: var(--adaptive); stroke-width: 3 }} .severed {{ stroke: var(--severed) }}
.naive {{ stroke: var(--naive) }} .throttle {{ stroke: var(--throttle); stroke-dasharray: 9 3 }}
.breaker {{ stroke: var(--breaker); stroke-width: 3 }}
</style>
<rect width="{width}" height="{height}" fill="var(--paper)"/>"""

Points = Sequence[tuple[float, float]]


class Chart:
    """A chart with two axes. Points above the top are drawn at the top."""

    def __init__(self, title: str, x: tuple[float, float], top: float) -> None:
        self._from_x, self._to_x = x
        self._top = top
        self._parts = [
            HEAD.format(width=WIDTH, height=HEIGHT, title=escape(title)),
            f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
        ]

    def area(self, points: Points) -> None:
        """The area under a line, as a load."""
        ends = [(points[0][0], 0.0), *points, (points[-1][0], 0.0)]
        self._path("load", ends)

    def line(self, points: Points, style: str) -> None:
        """A line."""
        self._path(style, points)

    def phase(self, x: float, begins: float, name: str) -> None:
        """A name above the chart, and a rule where it begins."""
        self._path("rule", [(begins, 0.0), (begins, self._top)])
        self._text(self._x(x), TOP - 8, name, "middle")

    def axes(self, x: Iterable[tuple[float, str]], y: Iterable[float], x_name: str) -> None:
        """The labels of both axes; calls a second, or shares, are on the left."""
        for value in y:
            self._path("rule", [(self._from_x, value), (self._to_x, value)])
            self._text(LEFT - 8, self._y(value) + 4, f"{value:g}", "end")
        for value, label in x:
            self._text(self._x(value), HEIGHT - BOTTOM + 16, label, "middle")
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, "middle")

    def legend(self, subjects: Iterable[str]) -> None:
        """The names of what is drawn, below the title."""
        drawn = [("load", "offered load"), ("capacity", "capacity")]
        drawn += [(subject, LABELS[subject]) for subject in subjects]
        for number, (style, label) in enumerate(drawn):
            x = LEFT + 150 * number
            shape = "v-9h26v9z" if style == "load" else "m0,-4h26"
            self._parts.append(f'<path class="{style}" d="M{x},45{shape}"/>')
            self._text(x + 32, 45, label)

    def svg(self) -> str:
        """The chart."""
        return "\n".join([*self._parts, "</svg>\n"])

    def _path(self, style: str, points: Points) -> None:
        places = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        self._parts.append(f'<path class="{style}" d="M{places}"/>')

    def _text(self, x: float, y: float, text: str, style: str = "") -> None:
        self._parts.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def _x(self, x: float) -> float:
        share = (x - self._from_x) / (self._to_x - self._from_x)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def _y(self, y: float) -> float:
        return HEIGHT - BOTTOM - min(y / self._top, 1.0) * (HEIGHT - TOP - BOTTOM)


def write(outcomes: Iterable[Outcome], directory: Path) -> None:
    """Write the charts of plain clients: one for each scenario, world and handler."""
    directory.mkdir(parents=True, exist_ok=True)
    plain = [outcome for outcome in outcomes if outcome.case.client == PLAIN]
    for name, group in groupby(plain, key=file_name):
        together = list(group)
        is_sweep = together[0].case.scenario == SWEEP
        (directory / name).write_text(sweep(together) if is_sweep else timeline(together))


def file_name(outcome: Outcome) -> str:
    """The file of the chart that has this outcome."""
    return f"overload-{outcome.case.scenario}-{outcome.case.world}-{outcome.case.handler}.svg"


def timeline(outcomes: Sequence[Outcome]) -> str:
    """The goodput over time, a line for each variant."""
    first = outcomes[0]
    spans, capacity = list(first.spans()), first.capacity
    ends_s = spans[-1][-1]
    highest = capacity * min(HIGHEST, 1.1 * max(1.0, *(phase.loads for phase, _, _ in spans)))
    chart = Chart(f"{_title(first)}: calls answered in time, per second", (0.0, ends_s), highest)
    chart.area([(x, phase.loads * capacity) for phase, *xs in spans for x in xs])
    step = 10 ** math.floor(math.log10(highest))
    ticks = [step * number / 2 for number in range(int(2 * highest / step) + 1)]
    seconds = [(begins_s, f"{begins_s:g}") for _, begins_s, _ in spans]
    chart.axes([*seconds, (ends_s, f"{ends_s:g}")], ticks, "seconds")
    for phase, phase_begins_s, phase_ends_s in spans:
        chart.phase((phase_begins_s + phase_ends_s) / 2, phase_begins_s, phase.name)
    chart.line([(x, capacity / phase.slowness) for phase, *xs in spans for x in xs], "capacity")
    width_s = first.seconds / INTERVALS
    for outcome in outcomes:
        points = enumerate(outcome.goodput(width_s))
        chart.line([((x + 0.5) * width_s, y) for x, y in points], outcome.case.variant)
    chart.legend(outcome.case.variant for outcome in outcomes)
    return chart.svg()


def sweep(outcomes: Sequence[Outcome]) -> str:
    """The goodput by the offered load, both as shares of the capacity."""
    loads = [phase.load for phase in outcomes[0].scenario.phases]
    xs = [math.log(load) for load in loads]
    chart = Chart(f"{_title(outcomes[0])}: goodput, of the capacity", (xs[0], xs[-1]), 1.2)
    fine = [math.log(1.2) * n / 20 + xs[0] * (1 - n / 20) for n in range(21)]
    chart.area([*((x, math.exp(x)) for x in fine), (xs[-1], 1.2)])
    labels = [(x, f"{load:g}") for x, load in zip(xs, loads, strict=True)]
    chart.axes(labels, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "offered load, times the capacity")
    chart.line([(xs[0], 1.0), (xs[-1], 1.0)], "capacity")
    for outcome in outcomes:
        shares = [figures.goodput for figures in outcome.figures()]
        chart.line(list(zip(xs, shares, strict=True)), outcome.case.variant)
    chart.legend(outcome.case.variant for outcome in outcomes)
    return chart.svg()


def _title(outcome: Outcome) -> str:
    return f"{TITLES[outcome.case.world]}, handlers that {HANDLERS[outcome.case.handler].about}"
