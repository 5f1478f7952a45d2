"""The rate limit of log lines, for each pair of an event class and a subject.

A limited number of lines is logged for each pair in a period. Further events are counted, as zap's
sampling and journald's rate limit do. Each count is returned once: with the next line of the pair,
or by `sweep` or `flush`. Reads no clock; times are seconds of any monotonic clock.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from .events import Event

OTHERS: Final = "others"
"""The subject that all events beyond `MAX_SUBJECTS` subjects of their class share."""

MAX_SUBJECTS: Final = 1024
"""How many subjects of one event class have a limit of their own. This bounds the memory, because
clients can send any method name."""

SWEEP_INTERVAL_S: Final = 1.0
"""The least time between two searches for periods that are over."""


class Suppressed(NamedTuple):
    """The number of events of a class and subject that were not logged within one period."""

    kind: type[Event]
    subject: str
    number: int
    period_s: float


class _Period:
    """The lines of one event class and subject in one period."""

    __slots__ = ("begin_s", "lines", "period_s", "suppressed")

    def __init__(self, begin_s: float, period_s: float) -> None:
        self.begin_s = begin_s
        self.period_s = period_s
        self.lines = 1
        self.suppressed = 0

    def is_over(self, now_s: float) -> bool:
        return now_s - self.begin_s >= self.period_s


class RateLimiter:
    """Admits up to `burst` events per period. Thread-safe, also in finalizers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything. For a forked child: the parent reports the counts."""
        self._lock = threading.RLock()
        self._periods: dict[type[Event], dict[str, _Period]] = {}
        self._swept_s = -math.inf

    def admit(
        self,
        kind: type[Event],
        subject: str,
        now_s: float,
        *,
        burst: int,
        period_s: float,
        always_after: type[Event] | None = None,
    ) -> int | None:
        """Decide whether an event is logged: at most `burst` events are in each period.

        A period begins with its first event that is logged. If an event of the class
        `always_after`, whose `burst` is 1, and of the same subject was logged since the last line
        of `kind`, this event is logged in any case.

        Returns:
            The number of suppressed events that were not reported yet; None if this event is to be
            suppressed too.
        """
        with self._lock:
            periods = self._periods.setdefault(kind, {})
            if subject not in periods and len(periods) >= MAX_SUBJECTS:
                subject = OTHERS
            period = periods.get(subject)
            if not period or period.is_over(now_s) or self._follows(always_after, subject, period):
                periods[subject] = _Period(now_s, period_s)
                return period.suppressed if period else 0
            if period.lines >= burst:
                period.suppressed += 1
                return None
            period.lines += 1
            return 0

    def sweep(self, now_s: float) -> list[Suppressed]:
        """Forget the periods that are over, and return their counts.

        Does nothing if the last sweep was less than `SWEEP_INTERVAL_S` ago.
        """
        if now_s - self._swept_s < SWEEP_INTERVAL_S:
            return []
        self._swept_s = now_s
        return self._end(lambda period: period.is_over(now_s))

    def flush(self) -> list[Suppressed]:
        """End all periods and return their counts."""
        return self._end(lambda _: True)

    def _follows(self, kind: type[Event] | None, subject: str, period: _Period) -> bool:
        """Whether a period of `kind` began after this one; with a burst of 1, it has one line."""
        other = self._periods.get(kind, {}).get(subject) if kind else None
        return other is not None and other.begin_s > period.begin_s

    def _end(self, is_over: Callable[[_Period], bool]) -> list[Suppressed]:
        ended = []
        with self._lock:
            for kind, periods in list(self._periods.items()):
                for subject, period in list(periods.items()):
                    if is_over(period):
                        del periods[subject]
                        ended.append(Suppressed(kind, subject, period.suppressed, period.period_s))
        return [count for count in ended if count.number]
