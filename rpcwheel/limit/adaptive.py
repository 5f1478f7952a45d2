"""How many handlers of a server run at the same time, found from their durations. No I/O.

By Little's law, the number of calls that a server works on is its throughput times their duration.
The highest throughput that was measured, times the shortest duration, is therefore the smallest
number of handlers that keeps the server busy (the bandwidth-delay product of BBR, Cardwell et al.
2016; Kratos and Sentinel limit servers by it). With fewer handlers the server idles, with more they
only wait for each other: for a lock, for a connection of a pool, or for the interpreter.

Both are measured in windows. Durations differ, so a window is long enough for its mean to be exact,
and its duration is the mean plus the standard error: otherwise the shortest one would be that of a
few short calls. The throughput is the mean number of handlers that ran, divided by their duration.
It does not depend on how many happened to end.

While nearly all calls have to wait for a handler to end, three kinds of windows follow each other:

* `NORMAL`: as many handlers as the product says.
* `FEWER`: half as many as run. With too many handlers all of them are slow, and only fewer show how
  long they take alone. When the limit is new, at once and until durations get no shorter; then
  every 10 s, or ten windows if they are longer (BBR's ProbeRTT).
* `MORE`: at first twice as many, later a quarter more. If the throughput rises, so does the limit,
  and faster with each success. If not, the next attempt is later each time. So the limit follows a
  server that can do more, and no handler is left running that only slows down the others.

Other windows show how long handlers take, and nothing about the limit, unless handlers use most of
the interpreter's time. Then they may wait for each other, and calls in gRPC, which needs the
interpreter to accept them: the limit becomes the product if handlers take twice as long as before,
and a window with fewer shows every 10 s whether they take less time then.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Final, NamedTuple

INITIAL_LIMIT: Final = 8
"""The limit before the first measurement."""

MAX_LIMIT: Final = 1 << 20

MIN_WINDOW_NS: Final = 200_000_000
MIN_CALLS: Final = 20
"""A window ends after this time and this number of calls, if it is exact. With a low limit,
`FEW_CALLS` for each handler are enough."""

EXACT: Final = 0.2
"""A window is exact if the standard error of the mean duration is at most this share of it."""

MAX_WINDOW_NS: Final = 1_000_000_000
MAX_DURATIONS: Final = 4
FEW_CALLS: Final = 5
"""Otherwise it ends after this time, or this number of mean durations, and this number of calls."""

HISTORY_NS: Final = 10_000_000_000
HISTORY_WINDOWS: Final = 10
"""How long a window is remembered, and the time between two windows with fewer handlers: this time,
or that of so many windows if they are longer."""

MORE_AGAIN_NS: Final = 1_000_000_000, 4_000_000_000
"""The time until the next window with more handlers, after the first one without success. It
doubles with each, up to the second of these."""

SATURATED: Final = 0.9
"""The server is saturated if at least this share of the calls of a window have waited, and this
share of the handlers that may run ran in the mean: fewer also wait if many arrive together by
chance, and after a pause the calls before it tell nothing."""

SHORTER: Final = 0.8
"""With fewer handlers, durations are shorter if they are less than this share."""

SLOWER: Final = 0.6
"""If the throughput of two windows is less than this share of the highest one, the server has
become slower, and what was measured before does not count."""

BUSY: Final = 0.7
"""If handlers compute in more than this share of the time, the interpreter is busy. The rest is
needed to accept and to refuse calls."""

BEYOND_LOCK: Final = 1.1
"""If they compute in more than this share, they do so without the interpreter's lock."""

SURELY_BEYOND_LOCK: Final = 1.5
"""The same, not by chance: the processor time of a handler is counted when it ends, and in a short
window many may end that began before it."""

SURPLUS: Final = 0.25
"""The share of a handler that the product may exceed a whole number by: it is not exact."""


class Trial(enum.Enum):
    """What a window tries."""

    NORMAL = enum.auto()
    FEWER = enum.auto()
    MORE = enum.auto()


class Window(NamedTuple):
    """What was measured in one window."""

    end_ns: int
    throughput: float
    """Calls per nanosecond."""
    duration_ns: float
    """The mean duration of handlers, plus its standard error."""
    running: float
    """How many handlers ran, in the mean."""


class AdaptiveLimit:
    """The limit for a server. The caller holds the lock of the server's limiter."""

    def __init__(self) -> None:
        self.limit = INITIAL_LIMIT
        """How many handlers may run."""
        self.minimum = 1
        """The lowest limit."""
        self.maximum = MAX_LIMIT
        """The highest limit, such as the number of threads."""
        self.used = 0.0
        """The share of the time in which handlers computed in the last window."""
        self._windows: deque[Window] = deque()
        self._trial = Trial.NORMAL
        self._before = 0  # the limit before `FEWER`, if few calls waited; else 0
        self._measured_ns: int | None = None  # when a window showed durations without waiting
        self._more_at_ns = 0  # when to try more handlers
        self._more_interval_ns = 0
        self._step = INITIAL_LIMIT  # how many more
        self._slow_windows = 0
        self._history_ns = HISTORY_NS
        self._old = 1  # how many handlers are to end before a window begins: of another limit
        self._begin(0, 0, 0)

    @property
    def is_busy(self) -> bool:
        """Whether handlers used most of the interpreter's time in the last window."""
        return BUSY < self.used < BEYOND_LOCK

    def ended(self, took_ns: int, now_ns: int, *, has_waited: bool, is_answered: bool) -> bool:
        """Count a handler that has ended, other than that of a stream.

        Args:
            took_ns: How long the handler took.
            now_ns: The time now.
            has_waited: Whether the call has waited before.
            is_answered: Whether its client got the answer; if not, it was too slow, and nobody is
                served by it.

        Returns:
            True if a window begins, or may end. Then call `measure`.
        """
        if self._old:
            self._old -= 1
            return not self._old
        self._count += 1
        self._duration_ns += took_ns
        self._squares += took_ns * took_ns
        if has_waited:
            self._waited += 1
        if not is_answered:
            self._unanswered += 1
        return self._count >= FEW_CALLS and now_ns - self._began[0] >= MIN_WINDOW_NS

    def measure(self, now_ns: int, cpu_ns: int, work_ns: int) -> None:
        """Begin a window, or end it if it is exact or long, and then set the limit.

        Args:
            now_ns: The time now.
            cpu_ns: The processor time that all handlers have used up to now.
            work_ns: The time for which handlers have run up to now, the sum of all of them.
        """
        began_ns, began_cpu_ns, began_work_ns = self._began
        count, elapsed_ns = self._count, now_ns - began_ns
        if not count:  # the last handler of another limit has ended
            self._begin(now_ns, cpu_ns, work_ns)
            return
        mean_ns = self._duration_ns / count
        variance = self._squares / count - mean_ns * mean_ns
        is_exact = (
            count >= min(MIN_CALLS, FEW_CALLS * self.limit)
            and variance <= count * (EXACT * mean_ns) ** 2
        )
        if not is_exact and elapsed_ns < max(MAX_WINDOW_NS, MAX_DURATIONS * mean_ns):
            return
        worked_ns = work_ns - began_work_ns
        running = worked_ns / elapsed_ns
        self.used = (cpu_ns - began_cpu_ns) / elapsed_ns
        is_saturated = self._waited >= SATURATED * count and running >= SATURATED * self.limit
        duration_ns = max(1.0, mean_ns + math.sqrt(max(0.0, variance) / count))
        if not is_saturated:
            duration_ns = max(duration_ns, worked_ns / count)
        throughput = running / duration_ns * (count - self._unanswered) / count
        window = Window(now_ns, throughput, duration_ns, running)
        self._begin(now_ns, cpu_ns, work_ns)
        if is_saturated:
            self._history_ns = max(HISTORY_NS, HISTORY_WINDOWS * elapsed_ns)
        if is_exact or is_saturated:
            limit = self._next_limit(window, is_saturated=is_saturated)
        else:
            limit = self._limit_after_few_calls()
        limit = max(self.minimum, min(limit, self.maximum))
        if limit != self.limit:
            self.limit, self._old = limit, math.ceil(running)

    def _limit_after_few_calls(self) -> int:
        """End the trial after a window that shows nothing: the calls that end first are short."""
        trial, self._trial = self._trial, Trial.NORMAL
        if trial is not Trial.FEWER or not self._windows:
            return self.limit
        return self._before or self._product()

    def _begin(self, now_ns: int, cpu_ns: int, work_ns: int) -> None:
        self._began = now_ns, cpu_ns, work_ns
        self._count = self._unanswered = self._waited = self._duration_ns = self._squares = 0

    def _next_limit(self, window: Window, *, is_saturated: bool) -> int:
        now_ns, trial, self._trial = window.end_ns, self._trial, Trial.NORMAL
        while self._windows and self._windows[0].end_ns < now_ns - self._history_ns:
            self._windows.popleft()
        highest = max((each.throughput for each in self._windows), default=0.0)
        shortest = self._shortest_ns()
        if is_saturated and trial is not Trial.FEWER and self._is_slower(window, highest):
            self._windows.clear()
            self._measured_ns = None
        self._windows.append(window)
        is_due = self._measured_ns is None or now_ns - self._measured_ns > self._history_ns
        is_shorter = window.duration_ns < SHORTER * shortest
        if trial is Trial.FEWER:
            self._measured_ns = now_ns
            if self._before and not is_shorter:
                return self._before  # handlers did not wait for each other, nor calls for them
            if self.limit > 1 and is_shorter and is_saturated:  # else the load may have ended
                return self._try_fewer(window, before=0)
        elif not is_saturated:
            return self._unsaturated_limit(window, shortest, is_due=is_due)
        elif is_due:
            return self._try_fewer(window, before=0)
        limit = self._product()
        if trial is Trial.MORE:
            self._judge_more(window, limit)
        # If more have just run, the next window is to show that fewer suffice.
        if now_ns >= self._more_at_ns and self.limit <= limit < self.maximum:
            self._trial = Trial.MORE
            self._step = min(self._step, limit)
            return limit + self._step
        return limit

    def _unsaturated_limit(self, window: Window, shortest: float, *, is_due: bool) -> int:
        if not self.is_busy:
            self._measured_ns = window.end_ns
        elif window.duration_ns > 2 * shortest:
            return self._product()
        elif is_due:
            return self._try_fewer(window, before=self.limit)
        return self.limit

    def _judge_more(self, window: Window, limit: int) -> None:
        """Set when to try more handlers again, and how many, after a window with more."""
        before = self._windows[-2]
        # Half of what the additional handlers would bring if they were not in each other's way.
        expected = before.throughput * (before.running + window.running) / 2
        if window.throughput * before.running > expected and window.running > before.running:
            self._step, self._more_interval_ns = 2 * self._step, 0
        else:
            self._step = max(1, limit // 4)
            first_ns, most_ns = MORE_AGAIN_NS
            self._more_interval_ns = min(max(first_ns, 2 * self._more_interval_ns), most_ns)
        self._more_at_ns = window.end_ns + self._more_interval_ns

    def _shortest_ns(self) -> float:
        return min((each.duration_ns for each in self._windows), default=math.inf)

    def _product(self) -> int:
        highest = max(each.throughput for each in self._windows)
        return math.ceil(highest * min(each.duration_ns for each in self._windows) - SURPLUS)

    def _try_fewer(self, window: Window, *, before: int) -> int:
        self._trial, self._before = Trial.FEWER, before
        running = math.ceil(window.throughput * window.duration_ns - SURPLUS)
        return min(self.limit, running) // 2  # fewer run than may, if few calls wait

    def _is_slower(self, window: Window, highest: float) -> bool:
        """Whether the server has become slower; one window may be chance, if it is not far less."""
        self._slow_windows += 1
        if window.throughput >= SLOWER * highest:
            self._slow_windows = 0
        return self._slow_windows > 1 or window.throughput < SLOWER / 2 * highest
