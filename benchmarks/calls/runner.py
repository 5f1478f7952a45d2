"""Runs the measurements, each in a process of its own, and collects their rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks import _child
from benchmarks.calls.scale import Row
from benchmarks.calls.subjects import GRPC_INTERCEPTOR, Skipped, missing

STEPS = {
    f"{side}-{world}": (side, world) for side in ("client", "server") for world in ("sync", "aio")
}
"""What can be asked for, and which side and world that is."""

PATIENCE_S = 900.0


def run(only: frozenset[str], scale: str) -> Iterator[Row | Skipped]:
    """Measure what is asked for, and say on stderr what is under way."""
    for name, why in missing().items():
        yield Skipped(name, why)
    if "client-aio" in only:
        yield Skipped(f"{GRPC_INTERCEPTOR}'s client for grpc.aio", "it has none")
    for name, step in STEPS.items():
        if name in only:
            began = time.monotonic()
            yield from _child.rows(
                name, "benchmarks.calls.child", (*step, scale), patience_s=PATIENCE_S
            )
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
