"""How often events of one kind and one subject are logged.

Each pair has a burst of lines per period; what exceeds it is counted, as zap's sampling and
journald's rate limit do. A count is given away exactly once: with the next line of the pair, or by
`over` and `flush`. Pure but for its lock; times are seconds of any monotonic clock.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from .events import Event

__all__ = ["OTHERS", "RateLimiter", "Suppressed"]

OTHERS: Final = "others"
"""The subject of all events whose own subject is not kept, because there are `MAX_SUBJECTS`."""

MAX_SUBJECTS: Final = 1024
"""Subjects of a kind that have a limit of their own. Clients can invent method names."""

SWEEP_S: Final = 1.0
"""Seconds between two searches for periods that are over."""


class Suppressed(NamedTuple):
    """So many events of a kind and subject were not logged within one period."""

    kind: type[Event]
    subject: str
    number: int
    period_s: float


class _Window:
    """The lines of one kind and subject in one period."""

    __slots__ = ("begin_s", "lines", "period_s", "suppressed")

    def __init__(self, begin_s: float, period_s: float) -> None:
        self.begin_s = begin_s
        self.period_s = period_s
        self.lines = 1
        self.suppressed = 0

    def is_over(self, now_s: float) -> bool:
        return now_s - self.begin_s >= self.period_s


class RateLimiter:
    """Admits events up to a burst per period. Thread-safe; may be re-entered by a finalizer."""

    def __init__(self, max_subjects: int = MAX_SUBJECTS) -> None:
        self._max_subjects = max_subjects
        self.reset()

    def reset(self) -> None:
        """Forget all. For a forked child: its parent reports the counts."""
        self._lock = threading.RLock()
        self._windows: dict[type[Event], dict[str, _Window]] = {}
        self._sweep_s = -math.inf

    def admit(
        self,
        kind: type[Event],
        subject: str,
        now_s: float,
        *,
        burst: int,
        period_s: float,
        ends: type[Event] | None = None,
    ) -> int | None:
        """Decide whether an event is logged.

        Args:
            kind: The event's class.
            subject: What it is about: a method, a target.
            now_s: The time.
            burst: How many are logged per period.
            period_s: The period begins with its first line.
            ends: The kind of event that this one is the end of. If one was logged since the last
                of this kind, this one is logged too.

        Returns:
            How many were suppressed before it and not reported yet; None if it is to be suppressed.
        """
        with self._lock:
            windows = self._windows.setdefault(kind, {})
            if subject not in windows and len(windows) >= self._max_subjects:
                subject = OTHERS
            window = windows.get(subject)
            if window and not window.is_over(now_s) and not self._ends(ends, subject, window):
                if window.lines >= burst:
                    window.suppressed += 1
                    return None
                window.lines += 1
                return 0
            windows[subject] = _Window(now_s, period_s)
            return window.suppressed if window else 0

    def over(self, now_s: float) -> list[Suppressed]:
        """Give what was suppressed in periods that are over.

        Looks for them at most once a second; in between, the list is empty.
        """
        if now_s - self._sweep_s < SWEEP_S:
            return []
        self._sweep_s = now_s
        return self._end(lambda window: window.is_over(now_s))

    def flush(self) -> list[Suppressed]:
        """End all periods, and give what was suppressed in them."""
        return self._end(lambda _: True)

    def _ends(self, ends: type[Event] | None, subject: str, window: _Window) -> bool:
        begun = self._windows.get(ends, {}).get(subject) if ends else None
        return begun is not None and begun.begin_s > window.begin_s

    def _end(self, chosen: Callable[[_Window], bool]) -> list[Suppressed]:
        ended = []
        with self._lock:
            for kind, windows in list(self._windows.items()):
                for subject, window in list(windows.items()):
                    if chosen(window):
                        del windows[subject]
                        ended.append(Suppressed(kind, subject, window.suppressed, window.period_s))
        return [one for one in ended if one.number]
