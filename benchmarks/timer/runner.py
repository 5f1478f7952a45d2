"""Runs the measurements, each in a process of its own, and collects their rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from benchmarks._child import output_of
from benchmarks.timer import netty
from benchmarks.timer.scale import SCALES, Row
from benchmarks.timer.subjects import (
    ASYNC,
    ASYNC_UVLOOP,
    ASYNCIO,
    HAS_UVLOOP,
    OWN,
    QUEUES,
    RIVALS,
    SCHED,
    THREADING,
    UVLOOP,
    available,
)
from rpcwheel.timer.queue import load_form

IDLE_AT_ONCE = 7  # idle processes don't disturb each other
TIMEOUT_S = 600.0

LOOPS = (ASYNC, ASYNC_UVLOOP, ASYNCIO, UVLOOP)
STEPS = {
    "pair": "calls",
    "start": "calls",
    "cancel": "calls",
    "flat": "million",
    "memory": "million",
    "gc": "million",
    "stall": "stall",
    "fire": "fire",
    "lateness": "lateness",
    "idle": "idle",
    "threads": "threads",
}
"""What can be asked for, and which measurement gives it."""

SUBJECTS: dict[str, tuple[str, ...]] = {
    "calls": (*OWN, *RIVALS),
    "million": (*QUEUES, *LOOPS, THREADING, SCHED),
    "stall": (*QUEUES, ASYNCIO, UVLOOP),
    "fire": (*QUEUES, *LOOPS, THREADING, SCHED),
    "lateness": (*QUEUES, *LOOPS, THREADING, SCHED),
    "idle": (*QUEUES, *LOOPS),
    "threads": (*QUEUES, THREADING, SCHED),
}
TOGETHER = ("calls", "fire", "lateness", "threads")
"""Whose subjects take turns in one process; in the others each has a process of its own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    scale: Literal["full", "quick", "tiny"]
    only: frozenset[str]
    with_netty: bool


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not measured, and why."""

    what: str
    why: str


def run(plan: Plan) -> Iterator[Row | Skipped]:
    """Measure all that the plan asks for, and say on stderr what is under way."""
    forms = ["native", "pure"]
    if not _has_native():
        forms.remove("native")
        yield Skipped("the compiled form", "it is not built here")
    if not HAS_UVLOOP:
        yield Skipped("uvloop", "it is not installed")
    for step in dict.fromkeys(STEPS.values()):
        asked = {name for name, its_step in STEPS.items() if its_step == step} & plan.only
        if asked:
            yield from _step(step, forms, plan)
        if step == "calls" and asked and plan.with_netty:
            yield from _netty(plan)


def _step(step: str, forms: list[str], plan: Plan) -> Iterator[Row | Skipped]:
    began = time.monotonic()
    jobs = [
        (step, plan.scale, form, names) for form in forms for names in _groups(step, form, forms)
    ]
    with ThreadPoolExecutor(IDLE_AT_ONCE if step == "idle" else 1) as pool:
        for rows in pool.map(lambda job: _child(*job), jobs):
            yield from rows
    _say(f"{step}: {time.monotonic() - began:.0f} s")


def _groups(step: str, form: str, forms: list[str]) -> list[tuple[str, ...]]:
    """Which subjects are measured in one process: alternatives once, asyncio with each form."""
    names = available(SUBJECTS[step])
    if form != forms[0]:
        baseline = (ASYNCIO,) if step in TOGETHER else ()
        names = tuple(name for name in names if name in (*OWN, *baseline))
    if step == "threads":
        names = tuple(name for name in names if name != ASYNCIO)
    return [names] if step in TOGETHER else [(name,) for name in names]


def _child(step: str, scale: str, form: str, names: tuple[str, ...]) -> list[Row | Skipped]:
    env = {"RPCWHEEL_PURE": "1" if form == "pure" else "0"}
    answer = output_of("benchmarks.timer.child", step, scale, *names, timeout_s=TIMEOUT_S, env=env)
    if isinstance(answer, str):
        return [Skipped(f"{step} of {', '.join(names)} ({form})", answer)]
    return [Row(**row) for row in answer]


def _netty(plan: Plan) -> Iterator[Row | Skipped]:
    began = time.monotonic()
    try:
        yield from netty.measure(SCALES[plan.scale])
    except netty.Unavailable as reason:
        yield Skipped("Netty", str(reason))
    _say(f"netty: {time.monotonic() - began:.0f} s")


def _has_native() -> bool:
    try:
        load_form("native")
    except ImportError:
        return False
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
