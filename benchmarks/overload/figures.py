"""The figures of a case, from its calls and the executions of its handlers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from benchmarks.overload.cases import CRITICAL, DEADLINE_S, SCENARIOS, Case, Phase, Scenario

Call = tuple[float, float, str, str | None]
"""When it was due, how long it took after it was sent, its status code and its criticality."""

OK = "OK"
SETTLED_ANSWERED = 0.99
SETTLED_GOODPUT = 0.9
WINDOW_S = 1.0
"""A phase has settled when, for this time and for the rest of the phase, so many of its calls are
answered, or so much of the capacity is used."""


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The figures of the calls that were due in a phase, and of the executions begun in it."""

    phase: str
    offered: float  # calls a second, as a share of the capacity
    goodput: float  # calls answered within the deadline, as a share of the capacity
    answered: float  # the same, as a share of the calls
    critical: float | None  # the same, of the calls with criticality CRITICAL
    wasted: float  # executions whose caller had gone, as a share of the executions
    p50_s: float | None  # of the calls that got a response
    p99_s: float | None
    failed: dict[str, float]  # status codes, as shares of the calls
    settled_s: float | None  # how long after its beginning the phase has settled


@dataclass(frozen=True, slots=True)
class Outcome:
    """The record of a case. Times are seconds after the beginning of the load."""

    case: Case
    capacity: float
    seconds: float  # of a phase whose length is 1
    late_s: float  # the 99th percentile of how late calls were sent
    calls: list[Call]
    executions: list[tuple[float, bool]]  # when it began, and whether the caller had gone

    @property
    def scenario(self) -> Scenario:
        """The scenario of the case."""
        return SCENARIOS[self.case.scenario]

    def spans(self) -> Iterator[tuple[Phase, float, float]]:
        """Each phase, with its beginning and its end."""
        phases = self.scenario.phases
        ends_s = list(accumulate(phase.length * self.seconds for phase in phases))
        yield from zip(phases, [0.0, *ends_s[:-1]], ends_s, strict=True)

    def figures(self) -> list[PhaseFigures]:
        """The figures of each phase."""
        return [self._figures(*span) for span in self.spans()]

    def goodput(self, width_s: float) -> list[float]:
        """The calls answered a second, by the time of the response, in intervals of this width."""
        *_, (_, _, ends_s) = self.spans()
        counts = Counter(
            int((call[0] + call[1]) / width_s) for call in self.calls if is_answered(call)
        )
        return [counts[number] / width_s for number in range(round(ends_s / width_s))]

    def as_dict(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return {
            **asdict(self.case),
            "capacity": self.capacity,
            "late_s": self.late_s,
            "phases": [asdict(figures) for figures in self.figures()],
        }

    def _figures(self, phase: Phase, begins_s: float, ends_s: float) -> PhaseFigures:
        calls = [call for call in self.calls if begins_s <= call[0] < ends_s]
        gone = [is_gone for began_s, is_gone in self.executions if begins_s <= began_s < ends_s]
        took = sorted(took_s for _, took_s, code, _ in calls if code == OK)
        failed = Counter(code for _, _, code, _ in calls if code != OK)
        critical = [call for call in calls if call[3] == CRITICAL]
        capacity = self.capacity / phase.slowness
        answered = _answered(calls)
        return PhaseFigures(
            phase=phase.name,
            offered=len(calls) / (ends_s - begins_s) / capacity,
            goodput=answered / (ends_s - begins_s) / capacity,
            answered=answered / max(len(calls), 1),
            critical=_answered(critical) / len(critical) if critical else None,
            wasted=sum(gone) / max(len(gone), 1),
            p50_s=_quantile(took, 0.5),
            p99_s=_quantile(took, 0.99),
            failed={code: count / len(calls) for code, count in failed.most_common()},
            settled_s=_settled_s(calls, begins_s, ends_s, capacity),
        )


def is_answered(call: Call, deadline_s: float = DEADLINE_S) -> bool:
    """Whether the caller got the response within the deadline."""
    _, took_s, code, _ = call
    return code == OK and took_s <= deadline_s


def _answered(calls: Sequence[Call]) -> int:
    return sum(map(is_answered, calls))


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _settled_s(
    calls: Sequence[Call], begins_s: float, ends_s: float, capacity: float
) -> float | None:
    """The first tenth of a second at which the phase has settled."""

    def is_settled(from_s: float, to_s: float) -> bool:
        due = [call for call in calls if from_s <= call[0] < to_s]
        enough = min(SETTLED_ANSWERED * len(due), SETTLED_GOODPUT * capacity * (to_s - from_s))
        return _answered(due) >= enough

    for tenths in range(int((ends_s - begins_s - WINDOW_S) * 10) + 1):
        from_s = begins_s + tenths / 10
        if is_settled(from_s, from_s + WINDOW_S) and is_settled(from_s, ends_s):
            return tenths / 10
    return None
