"""Four threads that start and cancel on one timer at once: how fast, and whether all is counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import median

from benchmarks.timer.calls import burst
from benchmarks.timer.clock import Cost, Stopwatch, median_cost
from benchmarks.timer.own import OwnSubject
from benchmarks.timer.scale import Row, Scale
from benchmarks.timer.subject import Subject
from benchmarks.timer.subjects import make
from rpcwheel.timer.queue import FORM

THREADS = 4
LONGEST_S = 2.0  # of a round, for the slow ones


def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    """A row `threads` for each; `exact` is 1 if the timer's own counts are right in every round."""
    return [_measure(name, scale) for name in names]


def _measure(name: str, scale: Scale) -> Row:
    subject = make(name)
    try:
        subject.fill(scale.few)
        one_ns = subject.pair_cost(burst(subject, scale.burst)).wall_ns
        pairs = max(min(scale.per_thread, int(LONGEST_S * 1e9 / one_ns / THREADS)), 1)
        rounds = [_round(subject, pairs) for _ in range(scale.thread_rounds)]
    finally:
        subject.close()
    taken = median_cost(each for each, _ in rounds)
    values = {
        "pairs_per_s": 1e9 / median(each.wall_ns for each, _ in rounds),
        "pairs_per_cpu_s": 1e9 / taken.cpu_ns,
    }
    if isinstance(subject, OwnSubject):
        values["exact"] = float(all(exact for _, exact in rounds))
    return Row("threads", name, FORM, scale.few, values)


def _round(subject: Subject, pairs: int) -> tuple[Cost, bool]:
    ready = threading.Barrier(THREADS + 1)

    def work() -> None:
        ready.wait()
        subject.pairs(pairs)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    before = _counts(subject)
    for thread in threads:
        thread.start()
    ready.wait()
    watch = Stopwatch()
    for thread in threads:
        thread.join()
    taken = watch.per(THREADS * pairs)
    started, cancelled, pending = (b - a for a, b in zip(before, _counts(subject), strict=True))
    return taken, started == cancelled == THREADS * pairs and pending == 0


def _counts(subject: Subject) -> tuple[int, int, int]:
    if not isinstance(subject, OwnSubject):
        return 0, 0, 0
    stats = subject.timer.stats()
    return stats.started, stats.cancelled, stats.pending
