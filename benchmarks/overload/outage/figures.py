"""The figures of a client, from its calls and the arrivals at its server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.overload.cases import BROKEN, OutageCase
from benchmarks.overload.figures import is_answered
from benchmarks.overload.outage.server import CAPACITY, METHODS

Call = tuple[float, float, str, int]
"""When it was due, how long it took after it was sent, its status code, the number of its
method."""

Arrival = tuple[float, float, str]
"""The time, when the attempt was sent, and its method."""

SETTLED_S = 5.0
"""So long after its return, a server is expected to get all calls again."""

PEAK_S = 0.5


@dataclass(frozen=True, slots=True)
class OutageOutcome:
    """The record of a case. Times are seconds after the beginning of the load."""

    case: OutageCase
    late_s: float  # the 99th percentile of how late calls were sent
    calls: list[Call]
    attempts: list[tuple[float, str]]  # when each was sent, and its method
    arrivals: list[Arrival]
    down_s: float
    up_s: float  # when the server returned, or its method works again
    ends_s: float

    @property
    def sent(self) -> float:
        """Attempts that were sent while the server or method was down, as a share of the calls."""
        return self._share(at_s for at_s, method in self.attempts if method == METHODS[0])

    @property
    def arrived(self) -> float:
        """Attempts that reached the server, in the outage or later, as a share of the calls."""
        return self._share(sent_s for _, sent_s, method in self.arrivals if method == METHODS[0])

    def _share(self, sent_s: Iterable[float]) -> float:
        calls = [call for call in self._due(self.down_s, self.up_s) if call[3] == 0]
        return sum(self.down_s <= at_s < self.up_s for at_s in sent_s) / len(calls)

    @property
    def others(self) -> float:
        """The share of the calls of other methods that were answered while one was broken."""
        return self._answered(call for call in self._due(self.down_s, self.up_s) if call[3] != 0)

    @property
    def seconds(self) -> list[float]:
        """The share of the calls that were answered, of each second after the return."""
        count = int(self.ends_s - self.up_s)
        return [self._answered(self._due(self.up_s + n, self.up_s + n + 1)) for n in range(count)]

    @property
    def settled(self) -> float:
        """The share that was answered of the calls due later than `SETTLED_S` after the return."""
        return self._answered(self._due(self.up_s + SETTLED_S, self.ends_s))

    @property
    def peak(self) -> float:
        """The most arrivals in `PEAK_S` after the return, as a multiple of the capacity.

        Without those whose deadline had passed: a process that was stopped reads them when it
        continues, but does not execute them.
        """
        deadline_s = self.case.deadline_s
        times = sorted(
            at_s
            for at_s, sent_s, _ in self.arrivals
            if at_s >= self.up_s and at_s < sent_s + deadline_s
        )
        most = first = 0
        for count, at_s in enumerate(times, 1):
            while times[first] <= at_s - PEAK_S:
                first += 1
            most = max(most, count - first)
        return most / (CAPACITY * PEAK_S)

    def goodput(self) -> list[float]:
        """The calls answered in each second, by the time of the response."""
        counts = Counter(int(call[0] + call[1]) for call in self.calls if self._is_answered(call))
        return [float(counts[second]) for second in range(int(self.ends_s))]

    def _answered(self, calls: Iterable[Call]) -> float:
        answered = [self._is_answered(call) for call in calls]
        return sum(answered) / max(len(answered), 1)

    def _is_answered(self, call: Call) -> bool:
        due_s, took_s, code, _ = call
        return is_answered((due_s, took_s, code, None), self.case.deadline_s)

    def _due(self, from_s: float, to_s: float) -> list[Call]:
        return [call for call in self.calls if from_s <= call[0] < to_s]

    def as_dict(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return {
            **asdict(self.case),
            "late_s": self.late_s,
            "down_s": self.up_s - self.down_s,
            "sent": self.sent,
            "arrived": self.arrived,
            "others": self.others if self.case.scenario in BROKEN else None,
            "seconds": self.seconds,
            "settled": self.settled,
            "peak": self.peak,
        }
