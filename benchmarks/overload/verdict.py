"""The targets of a server with an adaptive limit, and whether outcomes meet them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from benchmarks._page import Verdict, verdict
from benchmarks.overload.cases import (
    ADAPTIVE,
    AFTER,
    CHAIN,
    HALVED,
    HANDLERS,
    PHASES,
    PLAIN,
    SEVERED,
    SPIKE,
    VARIED,
    World,
)
from benchmarks.overload.figures import Outcome, PhaseFigures

LEAST_GOODPUT: dict[str, dict[tuple[World, bool], float]] = {
    "2x": {("sync", False): 0.9, ("aio", False): 0.9, ("sync", True): 0.9, ("aio", True): 0.85},
    "10x": {("sync", False): 0.9, ("aio", False): 0.9, ("sync", True): 0.85, ("aio", True): 0.6},
}
"""Of the capacity, by phase, world, and whether handlers burn CPU."""

MOST_WASTED = 0.01
MOST_SETTLED_S = {AFTER: 1.0, "halved": 3.0}
LEAST_CRITICAL = 0.994
LEAST_CHAIN = 1.45
MOST_P99 = 3.0
"""The 99th percentile of answered calls, over that of the first phase and the longest wait."""

ROOM_S = 0.3
"""The longest wait of a call for its handler (`LimitPolicy.max_wait`)."""


def verdicts(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    """What was measured, the target, and whether it is met."""
    for outcome in outcomes:
        case = outcome.case
        if case.variant != ADAPTIVE:
            continue
        if case.scenario in (PHASES, VARIED) and case.client == PLAIN:
            yield from _phases(outcome)
        if case.scenario == HALVED:
            yield _settled(outcome, outcome.figures()[-1])
        if case.scenario == SPIKE:
            yield _critical(outcome)
    yield from _chains([outcome for outcome in outcomes if outcome.case.scenario == CHAIN])


def _phases(outcome: Outcome) -> Iterator[Verdict]:
    case, figures = outcome.case, outcome.figures()
    unloaded_s = figures[0].p99_s or 0.0
    for each in figures:
        if each.phase in LEAST_GOODPUT:
            least = LEAST_GOODPUT[each.phase][case.world, HANDLERS[case.handler].burns]
            name = f"{_name(outcome)}: goodput at {each.phase}"
            yield verdict(name, each.goodput, least, "{:.2f}", sign="≥")
            most_s = MOST_P99 * unloaded_s + ROOM_S
            name = f"{_name(outcome)}: p99 of answered calls at {each.phase}, ms"
            yield verdict(name, 1e3 * (each.p99_s or 0.0), 1e3 * most_s, "{:,.0f}")
    name = f"{_name(outcome)}: executions for callers that had gone"
    yield verdict(name, max(each.wasted for each in figures), MOST_WASTED, "{:.1%}")
    yield _settled(outcome, figures[-1])


def _settled(outcome: Outcome, figures: PhaseFigures) -> Verdict:
    name = f"{_name(outcome)}: {figures.phase}, settled after, s"
    took_s = inf if figures.settled_s is None else figures.settled_s
    return verdict(name, took_s, MOST_SETTLED_S[figures.phase], "{:.1f}")


def _critical(outcome: Outcome) -> Verdict:
    critical = min(figures.critical or 0.0 for figures in outcome.figures())
    name = f"{_name(outcome)}, {outcome.case.client}: CRITICAL calls answered"
    return verdict(name, critical, LEAST_CRITICAL, "{:.1%}", sign="≥")


def _chains(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    goodput = {
        (each.case.world, each.case.variant): each.figures()[-1].goodput for each in outcomes
    }
    for (world, variant), reached in goodput.items():
        if variant == ADAPTIVE and (without := goodput.get((world, SEVERED))):
            name = f"{CHAIN}, {world}: goodput, over that without inheritance"
            yield verdict(name, reached / without, LEAST_CHAIN, "{:.2f}", sign="≥")


def _name(outcome: Outcome) -> str:
    return f"{outcome.case.scenario}, {outcome.case.world}, {outcome.case.handler}"
