"""What is measured, how often, and in which order."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from benchmarks.calls.subjects import Skipped
from benchmarks.timer import peers
from benchmarks.timer.peers import (
    ASYNCIO,
    GO,
    HIERARCHICAL,
    NETTY,
    QUEUES,
    SPARSE,
    THREADING,
    UVLOOP,
    Answer,
    Peer,
    PeerFailed,
    Subject,
)

STEPS = ("calls", "fire", "lateness", "threads", "stall", "pending", "most")
FEW, MANY, MILLION, MOST = 1_000, 100_000, 1_000_000, 10_000_000

T = TypeVar("T")
Results = dict[str, dict[str, float]]
"""The figures of each subject, by name."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int  # of `calls` and of `backlog`
    burst_ns: int  # about the wall time of a phase of `calls`
    fired: int  # timeouts of a round of `fire`
    ontime_rounds: int
    late: int  # timeouts of `lateness`
    stall: int  # timeouts of `stall`
    idle_ms: int


SCALES = {
    "full": Scale(
        rounds=7, burst_ns=50_000_000, fired=200_000, ontime_rounds=3,
        late=2_000, stall=300_000, idle_ms=2_000,
    ),
    "quick": Scale(
        rounds=5, burst_ns=40_000_000, fired=100_000, ontime_rounds=1,
        late=1_000, stall=MANY, idle_ms=500,
    ),
}  # fmt: skip


class Run:
    """Measures all subjects. One that fails is left out, with the reason in `skipped`."""

    def __init__(self, scale: Scale, *, with_rivals: bool) -> None:
        self.scale = scale
        self.skipped: list[Skipped] = []
        self.subjects: dict[str, Subject] = {}
        self._peers: dict[str, Peer] = {}  # the processes that take turns
        self._counts: dict[str, int] = {}  # calls in each phase of `calls`
        self._figures: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for each in (*peers.subjects(), *(peers.rivals() if with_rivals else ())):
            if isinstance(each, Skipped):
                self.skipped.append(each)
            else:
                self.subjects[each.name] = each

    @property
    def results(self) -> Results:
        """The medians of all figures."""
        results: Results = {name: {} for name in self.subjects}
        for (name, figure), values in self._figures.items():
            results[name][figure] = median(values)
        return results

    def run(self, only: Collection[str]) -> None:
        """Take the steps; print to stderr how long each took."""
        steps = {step: getattr(self, f"_{step}") for step in STEPS if step in only}
        try:
            for step, work in ({"warm-up": self._warm_up} | steps).items():
                began = time.monotonic()
                work()
                print(f"{step}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        finally:
            for peer in self._peers.values():
                peer.close()

    def _warm_up(self) -> None:
        """Start the processes; find out how many calls take `burst_ns`."""
        for name, subject in self.subjects.items():
            self._peers[name] = Peer(subject)
            self._counts[name] = FEW if name != THREADING else 10
            for _ in range(1 + subject.warm_up):
                if answer := self._ask(name, "calls", 100, self._counts[name]):
                    pair_ns = answer.phases["pair"].wall_ns / self._counts[name]
                    self._counts[name] = max(min(int(self.scale.burst_ns / pair_ns), MILLION), 10)

    def _calls(self) -> None:
        for pending in (FEW, MANY):
            for _ in range(self.scale.rounds):
                for name in self._names(THREADING if pending == MANY else ""):
                    self._note_calls(name, pending)

    def _note_calls(self, name: str, pending: int) -> None:
        if answer := self._ask(name, "calls", pending, self._counts[name]):
            for phase in answer.phases:
                self._note(name, f"{phase} {pending}", answer.cpu_ns[phase])
            used = answer.phases["pair"]
            self._note(name, "wall/cpu", used.wall_ns / used.cpu_ns)

    def _most(self) -> None:
        """Pairs with ten million timeouts pending, and again with a thousand."""
        for name in (HIERARCHICAL, NETTY[1]):
            if name in self._peers:
                for pending in (FEW, FEW, FEW, FEW, MOST):
                    self._note_calls(name, pending)

    def _fire(self) -> None:
        held = self._names(THREADING, GO)
        compiling = [name for name in held if self.subjects[name].warm_up]
        for measurement in ("backlog", "backlog", "backlog", "ontime"):
            self._ask_all(compiling, measurement)
        for _ in range(self.scale.rounds):
            for name, answer in self._ask_all(held, "backlog"):
                self._note(name, "backlog", answer.cpu_ns["backlog"])
        for _ in range(self.scale.ontime_rounds):
            for name in self._main():
                for _, answer in self._ask_all([name], "ontime"):
                    self._note(name, "ontime", answer.cpu_ns["ontime"])

    def _lateness(self) -> None:
        for name in self._names(THREADING):
            self._note_values(name, self._ask(name, "lateness", 0, self.scale.late))

    def _threads(self) -> None:
        for name in self._names():
            count = self._counts[name]
            if name.startswith(QUEUES) and (answer := self._ask(name, "threads", FEW, count)):
                self._note(name, "pairs/s", count / answer.phases["threads"].wall_ns * 1e9)

    def _stall(self) -> None:
        for name in self._main():
            if name.startswith((*QUEUES, ASYNCIO, UVLOOP)):
                self._note_values(name, self._ask(name, "stall", 0, self.scale.stall))

    def _pending(self) -> None:
        """In new processes, because of the memory; two at a time."""
        with ThreadPoolExecutor(2) as pool:
            for name, answer in pool.map(self._ask_new, self._main()):
                if answer is None:
                    continue
                seconds = self.scale.idle_ms / 1e3
                empty, idle = answer.phases["empty"], answer.phases["idle"]
                self._note(name, "wakeups/s", (idle.sleeps - empty.sleeps) / seconds)
                self._note(name, "idle ms/s", idle.cpu_ns / 1e6 / seconds)
                if "gc" in answer.phases:
                    self._note(name, "gc ms", answer.cpu_ns["gc"] / 1e6)
                if "memory" in answer.phases:
                    answer.values["bytes"] = answer.phases["memory"].bytes / MILLION
                self._note_values(name, answer)

    def _main(self) -> list[str]:
        """The subjects of slow measurements: of the pure form only the default queue."""
        names = self._names(THREADING)
        return [name for name in names if not name.endswith("pure") or name.startswith(SPARSE)]

    def _names(self, *without: str) -> list[str]:
        return [name for name in self._peers if name not in without]

    def _note(self, name: str, figure: str, value: float) -> None:
        self._figures[name, figure].append(value)

    def _note_values(self, name: str, answer: Answer | None) -> None:
        if answer is not None:
            for figure, value in answer.values.items():
                self._note(name, figure, value)

    def _ask(self, name: str, measurement: str, pending: int, count: int) -> Answer | None:
        return self._try(name, measurement, lambda peer: peer.ask(measurement, pending, count))

    def _ask_all(self, names: Iterable[str], measurement: str) -> list[tuple[str, Answer]]:
        """Let several processes start their timeouts at once; they fire them one after another."""
        for name in names:
            self._try(name, measurement, lambda peer: peer.send(measurement, 0, self.scale.fired))
        for name in names:
            self._try(name, measurement, Peer.prepare)
        answers = [(name, self._try(name, measurement, Peer.receive)) for name in names]
        return [(name, answer) for name, answer in answers if answer is not None]

    def _ask_new(self, name: str) -> tuple[str, Answer | None]:
        peer = Peer(self.subjects[name])
        try:
            return name, peer.ask("pending", MILLION, self.scale.idle_ms)
        except PeerFailed as error:
            self.skipped.append(Skipped(f"pending of {name}", str(error)))
            return name, None
        finally:
            peer.close()

    def _try(self, name: str, what: str, work: Callable[[Peer], T]) -> T | None:
        """Leave out a subject whose process fails, in later steps too."""
        if name not in self._peers:
            return None
        try:
            return work(self._peers[name])
        except PeerFailed as error:
            self.skipped.append(Skipped(f"{name} from {what} on", str(error)))
            self._peers.pop(name).close()
            return None
