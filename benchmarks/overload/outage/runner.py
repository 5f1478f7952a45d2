"""Runs the clients of a scenario at the same time, each with a server of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from signal import SIGCONT, SIGKILL, SIGSTOP

from benchmarks._page import load
from benchmarks._process import ProcessEnded
from benchmarks.calls.subjects import Skipped
from benchmarks.overload.cases import (
    BROKEN,
    FAILING,
    FROZEN,
    HANGS,
    KILLED,
    PATIENT,
    REFUSES,
    SLOW,
    OutageCase,
    World,
)
from benchmarks.overload.outage.figures import OutageOutcome
from benchmarks.overload.outage.load import LoadSpec
from benchmarks.overload.outage.server import CAPACITY, METHODS, ServerSpec
from benchmarks.overload.runner import LEAD_S, start

LOAD = 0.7
"""The offered load, as a share of the capacity."""

BEFORE, DOWN, AFTER = 0.6, 3.0, 1.5
"""How long a server works, is down, and works again, in lengths of a phase."""

START_S = 3.0
"""How much longer the load runs, because a server that was killed needs time to start."""

HOW = {REFUSES: "UNAVAILABLE", PATIENT: "UNAVAILABLE", HANGS: SLOW, FAILING: "INTERNAL", SLOW: SLOW}


def run(cases: Iterable[OutageCase], seconds: float) -> Iterator[OutageOutcome | Skipped]:
    """Run the cases, with phases of so many seconds, and report progress on stderr."""
    for name, group in groupby(cases, key=_scenario_and_world):
        together, before = list(group), load()
        with ThreadPoolExecutor(len(together)) as pool:
            yield from pool.map(partial(_run_or_skip, seconds=seconds), together)
        print(f"{', '.join(name)}: load {before} to {load()}", file=sys.stderr, flush=True)


def _scenario_and_world(case: OutageCase) -> tuple[str, World]:
    return case.scenario, case.world


def _run_or_skip(case: OutageCase, seconds: float) -> OutageOutcome | Skipped:
    try:
        return _run(case, seconds)
    except ProcessEnded as error:
        return Skipped(str(case), str(error))


def _run(case: OutageCase, seconds: float) -> OutageOutcome:
    with ExitStack() as stack:
        server = start(stack, ServerSpec(case.world))
        port = server.first
        client = start(stack, LoadSpec(case.world, port, case.client, case.deadline_s))
        begins_s = time.monotonic() + LEAD_S
        lasts_s = (BEFORE + DOWN + AFTER) * seconds + START_S
        methods = len(METHODS) if case.scenario in BROKEN else 1
        client.tell([begins_s, LOAD * CAPACITY, lasts_s, methods])
        down_s = _wait_until(begins_s + BEFORE * seconds)
        if case.scenario == KILLED:
            os.kill(server.pid, SIGKILL)
        elif case.scenario == FROZEN:
            os.kill(server.pid, SIGSTOP)
        else:
            server.ask([HOW[case.scenario], METHODS[:1]])
        _wait_until(down_s + DOWN * seconds)
        if case.scenario == KILLED:
            server = start(stack, ServerSpec(case.world, port))
        elif case.scenario == FROZEN:
            os.kill(server.pid, SIGCONT)
        else:
            server.ask(["", []])
        up_s = time.monotonic()
        loaded = client.answer()
        arrived = server.ask(None)
    attempts = [(at_s - begins_s, method) for at_s, method in loaded["attempts"]]
    arrivals = [(at_s - begins_s, sent_s - begins_s, method) for at_s, sent_s, method in arrived]
    down_s, up_s = down_s - begins_s, up_s - begins_s
    ends_s = min(up_s + AFTER * seconds, lasts_s)
    return OutageOutcome(
        case, loaded["late_s"], loaded["calls"], attempts, arrivals, down_s, up_s, ends_s
    )


def _wait_until(time_s: float) -> float:
    time.sleep(max(time_s - time.monotonic(), 0.0))
    return time.monotonic()
