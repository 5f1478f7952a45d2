"""Runs cases: measures the capacity of each handler, starts the processes, keeps the schedule."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from benchmarks._page import load
from benchmarks._process import Process, ProcessEnded
from benchmarks.calls.subjects import Skipped
from benchmarks.overload.cases import (
    BARE,
    BURN_S,
    CHAIN_CALLS,
    FIXED,
    HANDLERS,
    PLAIN,
    RELAY_THREADS,
    SCENARIOS,
    SHEDDABLE,
    Case,
    World,
)
from benchmarks.overload.figures import Outcome
from benchmarks.overload.load import LoadSpec
from benchmarks.overload.server import ServerSpec

CAPACITY_S = 2.0
LEAD_S = 0.5
"""How long the load has to prepare its schedule."""


def start(stack: ExitStack, spec: Any) -> Process:
    """Start the module of the class of `spec`, a dataclass with its arguments."""
    return stack.enter_context(Process(type(spec).__module__, json.dumps(asdict(spec))))


class Runner:
    """Runs cases. A capacity is measured before the first case that needs it.

    That of handlers that burn CPU is measured before each case.
    """

    def __init__(self, seconds: float, *, poisson: bool) -> None:
        self._seconds = seconds
        self._poisson = poisson
        self._capacity = cache(self._measured_capacity)

    def run(self, cases: Iterable[Case]) -> Iterator[Outcome | Skipped]:
        """Run the cases, and report progress on stderr."""
        for case in cases:
            began_s = time.monotonic()
            try:
                yield self._run(case)
            except ProcessEnded as error:
                yield Skipped(str(case), str(error))
            took_s = time.monotonic() - began_s
            print(f"{case}: {took_s:.0f} s, load {load()}", file=sys.stderr, flush=True)

    def _measured_capacity(
        self, world: World, handler: str, wait_s: float, *, is_chain: bool
    ) -> float:
        """The calls a second that bare servers answer, with the best number of callers."""
        with ExitStack() as stack:
            spec = self._spec(world, handler, BARE, wait_s)
            ports, _ = self._serve(stack, spec, is_chain=is_chain)
            client = start(stack, LoadSpec(ports, PLAIN))
            answered = [
                client.ask(["closed", callers, CAPACITY_S]) for callers in HANDLERS[handler].callers
            ]
        return float(max(answered))

    def _run(self, case: Case) -> Outcome:
        scenario = SCENARIOS[case.scenario]
        is_chain, wait_s = scenario.is_chain, scenario.wait_s
        if HANDLERS[case.handler].burns:  # a shared processor is up to 20 % faster a minute later
            self._capacity.cache_clear()
        capacity = self._capacity(case.world, case.handler, wait_s, is_chain=is_chain)
        lengths = [phase.length * self._seconds for phase in scenario.phases]
        timed = list(zip(scenario.phases, lengths, strict=True))
        flows = [
            (scenario.criticality, [(phase.load * capacity, length) for phase, length in timed]),
            (SHEDDABLE, [(phase.sheddable * capacity, length) for phase, length in timed]),
        ]
        with ExitStack() as stack:
            spec = self._spec(case.world, case.handler, case.variant, wait_s)
            ports, worker = self._serve(stack, spec, is_chain=is_chain)
            load_spec = LoadSpec(
                ports, case.client, scenario.criticality is not None, self._poisson
            )
            client = start(stack, load_spec)
            begins_s = time.monotonic() + LEAD_S
            client.tell(["open", begins_s, flows])
            phase_begins_s = begins_s
            for phase, length in timed:
                time.sleep(max(phase_begins_s - time.monotonic(), 0.0))
                worker.ask(phase.slowness)
                phase_begins_s += length
            loaded = client.answer()
            executions = [(began_s - begins_s, is_gone) for began_s, is_gone in worker.ask(None)]
        return Outcome(case, capacity, self._seconds, loaded["late_s"], loaded["calls"], executions)

    def _spec(self, world: World, handler: str, variant: str, wait_s: float) -> ServerSpec:
        kind = HANDLERS[handler]
        limit = kind.best_limit if variant == FIXED else None
        spec = ServerSpec(world, variant, kind.threads, limit, varies=kind.varies)
        if kind.burns:
            return replace(spec, burn_s=BURN_S)
        return replace(spec, wait_s=wait_s)

    @staticmethod
    def _serve(stack: ExitStack, spec: ServerSpec, *, is_chain: bool) -> tuple[list[int], Process]:
        """Start the servers; return the ports of those to call, and the one that does the work."""
        worker = start(stack, spec)
        if not is_chain:
            return [worker.first], worker
        relay = ServerSpec(
            spec.world, spec.variant, RELAY_THREADS, None, port=worker.first, calls=1
        )
        front = replace(relay, port=start(stack, relay).first, calls=CHAIN_CALLS)
        return [start(stack, front).first for _ in range(2)], worker
