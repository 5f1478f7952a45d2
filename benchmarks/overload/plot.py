"""Draws the goodput of servers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks._plot import Chart
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
    SWITCHING,
    THROTTLE,
)
from benchmarks.overload.figures import Outcome

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
    SWITCHING: "adaptive, 0.5 ms",
    PLAIN: "plain",
    NAIVE: "naive retries",
    RETRY: "Kit(retry)",
    THROTTLE: "Kit(retry, throttle)",
    BREAKER: "Kit(retry, breaker)",
    BOTH: "Kit(retry, throttle, breaker)",
}
"""Of the variants of a server, and of the clients of one that is down."""


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
    chart.legend(_named(outcome.case.variant for outcome in outcomes))
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
    chart.legend(_named(outcome.case.variant for outcome in outcomes))
    return chart.svg()


def _named(styles: Iterable[str]) -> list[tuple[str, str]]:
    return [(style, LABELS[style]) for style in styles]


def _title(outcome: Outcome) -> str:
    return f"{TITLES[outcome.case.world]}, handlers that {HANDLERS[outcome.case.handler].about}"
