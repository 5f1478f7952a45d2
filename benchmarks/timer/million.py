"""A million pending: memory a timeout, a garbage collection, and whether the pair stays flat."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.timer.calls import burst, row
from benchmarks.timer.clock import Cost, Stopwatch, median_cost
from benchmarks.timer.scale import Row, Scale
from benchmarks.timer.subject import Subject
from benchmarks.timer.subjects import make
from rpcwheel.timer.queue import FORM

_STATM = Path("/proc/self/statm")


def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    """Rows `memory`, `gc` and twice `flat`. A process should measure one subject only."""
    return [each for name in names for each in _measure(name, scale)]


def _measure(name: str, scale: Scale) -> list[Row]:
    few, many = make(name), make(name)
    count = min(scale.many, many.most_pending)
    try:
        few.fill(scale.few)
        many.fill(1)
        before, before_ns = resident_bytes(), _collection_ns(scale)
        many.fill(count)
        rows = [
            Row(
                "gc",
                name,
                FORM,
                count,
                {"ms": _collection_ns(scale) / 1e6, "empty_ms": before_ns / 1e6},
            )
        ]
        if before:
            rows.append(
                Row("memory", name, FORM, count, {"bytes": (resident_bytes() - before) / count})
            )
        if count == scale.many:
            rows += _flat(few, many, scale)
    finally:
        few.close()
        many.close()
    return rows


def _flat(few: Subject, many: Subject, scale: Scale) -> list[Row]:
    """The pair beside few and beside many, in turns."""
    calls = burst(many, scale.burst)
    costs: dict[int, list[Cost]] = {scale.few: [], scale.many: []}
    for _ in range(scale.rounds):
        costs[scale.few].append(few.pair_cost(calls))
        costs[scale.many].append(many.pair_cost(calls))
    return [row("flat", few.name, pending, median_cost(taken)) for pending, taken in costs.items()]


def resident_bytes() -> int:
    """The memory this process occupies; 0 if the system does not report it."""
    gc.collect()
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _collection_ns(scale: Scale) -> float:
    taken = []
    for _ in range(scale.collections):
        watch = Stopwatch()
        gc.collect()
        taken.append(watch.per(1).cpu_ns)
    return median(taken)
