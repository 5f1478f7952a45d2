"""Fire: what running a due timeout costs. Lateness: how long after its deadline it runs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median, quantiles

from benchmarks.timer.calls import row
from benchmarks.timer.clock import Cost, median_cost
from benchmarks.timer.scale import Row, Scale
from benchmarks.timer.subject import Subject
from benchmarks.timer.subjects import make
from rpcwheel.timer.queue import FORM

SPREAD_S = 0.1  # what is fired was due within so long: a hundred ticks
LEAST_S, MOST_S = 0.001, 0.1  # delays whose lateness is measured
TIMEOUT_S = 0.3  # then the last has run, in the coarsest queue too
LATER = 60  # so often as much again, on a machine that stands still meanwhile


def fire(names: Sequence[str], scale: Scale) -> list[Row]:
    """A row `fire` for each: firing a timeout whose task does nothing."""
    taken: dict[str, list[Cost]] = {name: [] for name in names}
    for _ in range(scale.fire_rounds):
        for name in names:
            subject = make(name)
            taken[name].append(subject.fire(min(scale.fired, subject.most_pending), SPREAD_S))
            subject.close()
    return [row("fire", name, scale.fired, median_cost(costs)) for name, costs in taken.items()]


class Late:
    """A task that notes how late it is."""

    __slots__ = ("due", "noted")

    def __init__(self, due: float, noted: list[float]) -> None:
        self.due = due
        self.noted = noted

    def __call__(self, *_: object) -> None:
        self.noted.append(time.monotonic() - self.due)


def lateness(names: Sequence[str], scale: Scale) -> list[Row]:
    """A row `lateness` for each, in wall time: the quantiles' medians, and the least of all."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(scale.late_rounds):
        for name in names:
            subject = make(name)
            try:
                taken[name].append(_latenesses(subject, min(scale.late, subject.most_pending)))
            finally:
                subject.close()
    return [_lateness_row(name, scale.late, rounds) for name, rounds in taken.items()]


def _latenesses(subject: Subject, count: int) -> tuple[float, float, float]:
    noted: list[float] = []
    uniform = random.Random(2).uniform

    def work() -> None:
        for _ in range(count):
            delay = uniform(LEAST_S, MOST_S)
            subject.start(delay, Late(time.monotonic() + delay, noted))

    subject.inside(work)
    subject.let_pass(MOST_S + TIMEOUT_S)
    for _ in range(LATER):
        if len(noted) == count:
            break
        subject.let_pass(TIMEOUT_S)
    else:
        raise RuntimeError(f"{subject.name}: {len(noted)} of {count} timeouts ran in time")
    cuts = quantiles(noted, n=100)
    return cuts[49], cuts[98], min(noted)


def _lateness_row(name: str, count: int, rounds: list[tuple[float, float, float]]) -> Row:
    p50, p99, least = zip(*rounds, strict=True)
    values = {
        "p50_us": median(p50) * 1e6,
        "p99_us": median(p99) * 1e6,
        "least_us": min(least) * 1e6,
    }
    return Row("lateness", name, FORM, count, values)
