"""Runs the measurements, each in a process of its own, and collects their rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks import _child
from benchmarks._engines import missing
from benchmarks.calls.scale import Row
from benchmarks.calls.subjects import Skipped
from benchmarks.registries.subjects import (
    AT_ONCE,
    CHANNEL,
    ENGINES,
    RIVALS,
    SPREAD,
    WIPED,
    watching,
)

TIMEOUT_S = 400.0

STEPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "calls": (("sync",), ("aio",)),
    "picks": ((), ("sync",), ("aio",)),
    "converge": tuple((engine, who) for engine in ENGINES for who in watching(engine)),
    "restart": tuple((engine, who) for engine in RIVALS for who in (CHANNEL, RIVALS[engine])),
    "republish": tuple((engine, who) for engine in WIPED for who in (SPREAD, AT_ONCE)),
}
"""The steps, and the subjects of their processes."""


def run(only: frozenset[str], scale: str) -> Iterator[Row | Skipped]:
    """Measure what is asked for, and say on stderr what is under way."""
    lacking = {engine: reason for engine in ENGINES if (reason := missing(engine))}
    if not only.isdisjoint({"converge", "restart", "republish"}):
        for engine, reason in lacking.items():
            yield Skipped(engine, reason)
    for step, whose in STEPS.items():
        if step not in only:
            continue
        began = time.monotonic()
        for who in whose:
            if not lacking.keys() & set(who):
                yield from rows_of(scale, step, *who)
        print(f"{step}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def rows_of(scale: str, step: str, *who: str) -> list[Row | Skipped]:
    """Run one process."""
    quiet = {"GRPC_VERBOSITY": "NONE"}  # it logs each lost connection
    module, what = "benchmarks.registries.child", " ".join((step, *who))
    return _child.rows(what, module, (scale, step, *who), timeout_s=TIMEOUT_S, env=quiet)
