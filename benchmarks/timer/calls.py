"""Pair, start and cancel with a thousand pending: all subjects take turns in one process."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.timer.clock import Cost, Stopwatch, cost, median_cost
from benchmarks.timer.own import DELAYS_S, OwnSubject
from benchmarks.timer.scale import Row, Scale
from benchmarks.timer.subject import Subject
from benchmarks.timer.subjects import TURNING, make
from rpcwheel.timer.queue import FORM

BURST_NS = 3_000_000  # a burst takes about so long at most: subjects differ by a factor of 10^6


def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    """A row for each of `pair`, `pair, varied delays` (ours), `start` and `cancel`."""
    subjects = [make(name) for name in names]
    try:
        for subject in subjects:
            subject.fill(scale.few)
        bursts = {subject.name: burst(subject, scale.burst) for subject in subjects}
        taken: dict[tuple[str, str], list[Cost]] = {}
        for _ in range(scale.rounds):
            for subject in subjects:
                for what, each in _round(subject, bursts[subject.name]).items():
                    taken.setdefault((what, subject.name), []).append(each)
    finally:
        for subject in subjects:
            subject.close()
    return [row(what, name, scale.few, median_cost(costs)) for (what, name), costs in taken.items()]


def row(measure: str, subject: str, pending: int, taken: Cost) -> Row:
    """A row that says what a call costs."""
    values = {"cpu_ns": taken.cpu_ns, "wall_ns": taken.wall_ns}
    return Row(measure, subject, FORM, pending, values)


def burst(subject: Subject, most: int) -> int:
    """How many calls are timed in one go."""
    subject.pair_cost(1)
    taken = subject.pair_cost(3)
    return max(min(int(BURST_NS / taken.wall_ns), most), 1)


def _round(subject: Subject, calls: int) -> dict[str, Cost]:
    subject.pair_cost(
        max(calls // 4, 1)
    )  # a slow subject before has displaced the processor's caches
    costs = {"pair": subject.pair_cost(calls)}
    if subject.name in TURNING:
        return costs
    if isinstance(subject, OwnSubject):
        costs["varied"] = subject.inside(lambda: _varied_cost(subject, calls))
    costs["start"], costs["cancel"] = subject.inside(lambda: _start_and_cancel(subject, calls))
    return costs


def _varied_cost(subject: OwnSubject, calls: int) -> Cost:
    rounds = max(calls // len(DELAYS_S), 1)
    return cost(subject.varied, rounds * len(DELAYS_S))


def _start_and_cancel(subject: Subject, calls: int) -> tuple[Cost, Cost]:
    watch = Stopwatch()
    handles = subject.starts(calls)
    started = watch.per(calls)
    watch = Stopwatch()
    subject.cancels(handles)
    return started, watch.per(calls)
