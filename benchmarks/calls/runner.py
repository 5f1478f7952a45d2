"""Runs the steps, each in a process of its own, and collects their rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks import _child
from benchmarks.calls.scale import Row
from benchmarks.calls.subjects import GRPC_INTERCEPTOR, Skipped, missing

STEPS = {
    f"{what}-{world}": (what, world)
    for what in ("client", "server", "counts", "hedging")
    for world in ("sync", "aio")
}
"""The steps by name, each with what it measures and in which world."""

TIMEOUT_S = 900.0
"""How long a step may take."""


def run(only: frozenset[str], scale: str) -> Iterator[Row | Skipped]:
    """Run the steps asked for, and report progress on stderr."""
    for name, why in missing().items():
        yield Skipped(name, why)
    if "client-aio" in only:
        yield Skipped(f"{GRPC_INTERCEPTOR}'s client for grpc.aio", "it has none")
    for name, step in STEPS.items():
        if name in only:
            began = time.monotonic()
            yield from _child.rows(
                name, "benchmarks.calls.child", (*step, scale), timeout_s=TIMEOUT_S
            )
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
