"""Runs cases: measures the capacity of each handler, starts the processes, keeps the schedule."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any, Self

from benchmarks.calls.server_process import ROOT
from benchmarks.overload.cases import BARE, HANDLERS, PLAIN, SCENARIOS, Case, World
from benchmarks.overload.figures import Outcome
from benchmarks.overload.load import LoadSpec
from benchmarks.overload.server import ServerSpec
from benchmarks.overload.work import loops_of_a_call

CAPACITY_S = 2.0
LEAD_S = 0.5
"""How long the load has to prepare its schedule."""


class Process:
    """A process that prints a line of JSON at its start, and answers lines of its input."""

    def __init__(self, module: str, spec: ServerSpec | LoadSpec) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.overload.{module}", json.dumps(asdict(spec))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first: Any = self.answer()

    def tell(self, question: object) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for a line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, question: object) -> Any:
        """Write a line, and wait for the answer."""
        self.tell(question)
        return self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Runner:
    """Runs cases. The capacity of a handler is measured before its first case."""

    def __init__(self, seconds: float, *, poisson: bool) -> None:
        self._seconds = seconds
        self._poisson = poisson
        self._loops = loops_of_a_call()
        self._capacity = cache(self._measured_capacity)

    def run(self, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Run the cases, and report progress on stderr."""
        for case in cases:
            began_s = time.monotonic()
            outcome = self._run(case)
            print(f"{case}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
            yield outcome

    def _measured_capacity(self, world: World, handler: str) -> float:
        """The calls a second that a bare server answers, with the best number of callers."""
        spec = ServerSpec(world, handler, BARE, self._loops)
        with (
            Process("server", spec) as server,
            Process("load", LoadSpec(server.first, PLAIN, poisson=False)) as load,
        ):
            return max(
                load.ask(["closed", callers, CAPACITY_S]) for callers in HANDLERS[handler].callers
            )

    def _run(self, case: Case) -> Outcome:
        capacity = self._capacity(case.world, case.handler)
        phases = SCENARIOS[case.scenario].phases
        spec = ServerSpec(case.world, case.handler, case.variant, self._loops)
        with (
            Process("server", spec) as server,
            Process("load", LoadSpec(server.first, case.client, self._poisson)) as load,
        ):
            begins_s = time.monotonic() + LEAD_S
            rates = [(phase.load * capacity, self._seconds) for phase in phases]
            load.tell(["open", begins_s, rates])
            for number, phase in enumerate(phases):
                time.sleep(max(begins_s + number * self._seconds - time.monotonic(), 0.0))
                server.ask(phase.slowness)
            loaded = load.answer()
            executions = [(began_s - begins_s, is_gone) for began_s, is_gone in server.ask(None)]
        return Outcome(case, capacity, self._seconds, loaded["late_s"], loaded["calls"], executions)
