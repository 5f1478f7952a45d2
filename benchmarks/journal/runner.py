"""Runs the measurements, each engine in a process of its own, and collects their rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks import _child
from benchmarks._engines import missing
from benchmarks.calls.scale import Row
from benchmarks.calls.subjects import Skipped
from benchmarks.journal.subjects import ENGINES

TIMEOUT_S = 600.0


def run(only: frozenset[str], scale: str) -> Iterator[Row | Skipped]:
    """Measure what is asked for, and say on stderr what is under way."""
    for engine in ENGINES:
        if engine not in only:
            continue
        if reason := missing(engine):
            yield Skipped(engine, reason)
            continue
        began = time.monotonic()
        module = "benchmarks.journal.child"
        yield from _child.rows(engine, module, (scale, engine), timeout_s=TIMEOUT_S)
        print(f"{engine}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
