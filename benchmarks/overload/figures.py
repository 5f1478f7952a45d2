"""The figures of a case, from its calls and the executions of its handlers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.overload.cases import DEADLINE_S, SCENARIOS, Case, Phase

Call = tuple[float, float, str]
"""When it was sent, how long it took, and its status code."""

OK = "OK"
SETTLED = 0.99
WINDOW_S = 1.0


def is_answered(call: Call) -> bool:
    """Whether the caller got the response within the deadline."""
    _, took_s, code = call
    return code == OK and took_s <= DEADLINE_S


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The figures of a phase: of the calls that were sent in it."""

    phase: Phase
    offered_per_s: float
    goodput: float  # calls answered within the deadline, as a share of the capacity
    answered: float  # the same, as a share of the calls
    wasted: float  # executions whose caller had gone, as a share of the executions
    p50_s: float | None  # of the calls that got a response
    p99_s: float | None
    failed: dict[str, float]  # status codes, as shares of the calls
    settled_s: float | None  # when 99 % of all later calls of the phase were answered

    def as_dict(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"phase": self.phase.name}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was recorded of a case. Times are seconds after the beginning of the load."""

    case: Case
    capacity: float
    phase_s: float
    late_s: float  # the 99th percentile of how late calls were sent
    calls: list[Call]
    executions: list[tuple[float, bool]]

    def phases(self) -> list[PhaseFigures]:
        """The figures of each phase."""
        return [
            self._figures(number, phase)
            for number, phase in enumerate(SCENARIOS[self.case.scenario].phases)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return {
            **{name: getattr(self.case, name) for name in self.case.__slots__},
            "capacity": self.capacity,
            "late_s": self.late_s,
            "phases": [figures.as_dict() for figures in self.phases()],
        }

    def _figures(self, number: int, phase: Phase) -> PhaseFigures:
        begins_s = number * self.phase_s
        calls = [call for call in self.calls if begins_s <= call[0] < begins_s + self.phase_s]
        gone = [
            is_gone
            for began_s, is_gone in self.executions
            if begins_s <= began_s < begins_s + self.phase_s
        ]
        answered = sum(map(is_answered, calls))
        took = sorted(took_s for _, took_s, code in calls if code == OK)
        failed = Counter(code for _, _, code in calls if code != OK)
        return PhaseFigures(
            phase=phase,
            offered_per_s=len(calls) / self.phase_s,
            goodput=answered / self.phase_s / (self.capacity / phase.slowness),
            answered=answered / max(len(calls), 1),
            wasted=sum(gone) / max(len(gone), 1),
            p50_s=_quantile(took, 0.5),
            p99_s=_quantile(took, 0.99),
            failed={code: count / len(calls) for code, count in failed.most_common()},
            settled_s=_settled_s(calls, begins_s, self.phase_s),
        )


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _settled_s(calls: Sequence[Call], begins_s: float, phase_s: float) -> float | None:
    """The first tenth of a second after which `SETTLED` of the calls were answered."""
    for tenths in range(round((phase_s - WINDOW_S) * 10) + 1):
        from_s = begins_s + tenths / 10
        later = [is_answered(call) for call in calls if call[0] >= from_s]
        if later and sum(later) >= SETTLED * len(later):
            return tenths / 10
    return None
