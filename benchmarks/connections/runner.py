"""Runs the measurements, each in a process of its own, and collects their rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks import _child
from benchmarks.calls.scale import Row, World
from benchmarks.calls.subjects import Skipped
from benchmarks.connections.subjects import PSUTIL, WORLDS, beating, has_psutil

TIMEOUT_S = 600.0

STEPS = ("heartbeats", "frozen", "calls", "replacing", "outages", "serving", "rounds", "churn")
"""The steps."""

AT_ONCE = (("heartbeats", "frozen"), ("outages",))
"""Of which all processes run at once, as they mostly wait; all others one after the other."""


@dataclass(frozen=True, slots=True)
class Job:
    """One process."""

    step: str
    world: World
    scale: str
    who: tuple[str, ...] = ()


def jobs(step: str, scale: str) -> list[Job]:
    """The processes of a step."""
    if step == "heartbeats":
        return [Job(step, world, scale, (who,)) for world in WORLDS for who in beating(world)]
    if step == "churn":
        return [Job(step, "sync", scale)]
    return [Job(step, world, scale) for world in WORLDS]


def run(only: frozenset[str], scale: str) -> Iterator[Row | Skipped]:
    """Measure what is asked for, and say on stderr what is under way."""
    if "rounds" in only and not has_psutil():
        yield Skipped(PSUTIL, "it is not installed")
    alone = [(step,) for step in STEPS if not any(step in steps for steps in AT_ONCE)]
    for steps in (*AT_ONCE, *alone):
        asked = [step for step in steps if step in only]
        began, todo = time.monotonic(), [job for step in asked for job in jobs(step, scale)]
        if not todo:
            continue
        with ThreadPoolExecutor(len(todo) if steps in AT_ONCE else 1) as pool:
            for rows in pool.map(rows_of, todo):
                yield from rows
        took_s = time.monotonic() - began
        print(f"{', '.join(asked)}: {took_s:.0f} s", file=sys.stderr, flush=True)


def rows_of(job: Job) -> list[Row | Skipped]:
    """Run its process."""
    arguments = (job.step, job.world, job.scale, *job.who)
    what = " ".join((job.step, job.world, *job.who))
    quiet = {"GRPC_VERBOSITY": "NONE"}  # it logs each lost connection
    module = "benchmarks.connections.child"
    return _child.rows(what, module, arguments, timeout_s=TIMEOUT_S, env=quiet)
