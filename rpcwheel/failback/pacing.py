"""When the queued calls to one target are attempted: how many at a time, and how many a second.

The window is the largest number of attempts at a time. It follows their latency, as in TCP Vegas
and FAST TCP (Jin, Wei, Low 2004), so that a long queue uses the server and does not overload it:

    * It is set once in each round, by the mean latency of the first attempts of the round.
    * `base` is the smallest latency of a round: that of calls that do not wait in the server. By
      Little's law, `window * base / latency` of the attempts are executed, and the others wait. The
      window becomes this number plus `extra`. So about `extra` attempts wait, for far less than a
      timeout. A wait of up to `SLACK_NS`, and what may be chance, are ignored.
    * Slow start: at first the window is doubled in each round, until the latency rises.
    * After `PROBE_NS` without a new minimum, `base` is measured anew in a round with half of the
      window: the server may have become slower.
    * Failures halve the window as soon as a round has `FAILURE_MARGIN` more of them than
      deliveries. Fewer lower it by half of their share, and refusals by their share. So calls that
      fail whatever the window is, to one of ten servers or because of what is in them, hardly slow
      down the others. Failures leave the window at least at 1 if the server may be busy, and
      otherwise at `FAILING_LIMIT`.
    * After `IDLE_NS` without an attempt everything begins anew.

While the last attempt has failed, about `FAILING_LIMIT` attempts begin in a second, evenly spaced
except for the first ones after a pause. So a server that is down, or has just come back, is not
flooded by a long queue, and it is noticed soon that it is back.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from rpcwheel.durations import NEVER

FIRST_WINDOW: Final = 4

FAILING_LIMIT: Final = 10
"""The number of attempts in a second while they fail; and the smallest window after failures that
do not show that the server is busy."""

MAX_WINDOW: Final = 256
"""The largest window. A running call has about 60 kB of memory; 1,000 at a time deliver 3,100
calls/s, and 256 deliver 2,600."""

PACE_NS: Final = 1_000_000_000
FAILING_GAP_NS: Final = PACE_NS // FAILING_LIMIT
"""The mean time between the beginnings of two attempts while they fail. Those that did not begin in
the last `PACE_NS` can be made up for."""

MIN_SAMPLES: Final = 8
MAX_SAMPLES: Final = 32
"""The number of attempts that are measured in a round: the window, within these limits."""

FAILURE_MARGIN: Final = 3
"""So many more failures than deliveries in a round halve the window at once."""

STRAGGLER_FACTOR: Final = 4
"""A round ends without the rest of its attempts when so many times as many others have ended."""

SLACK_NS: Final = 20_000_000
"""The wait in a server that is ignored: more than the jitter of latencies, less than a timeout."""

STANDARD_ERRORS: Final = 2
"""How many standard errors of the mean the latency of a round must rise, as calls differ."""

TIMEOUT_SHARE: Final = 0.5
NEAR_BASE: Final = 1.1
"""A latency above this share of the timeout is too high, unless it is near the smallest one."""

MIN_EXTRA: Final = 3
EXTRA_SHARE: Final = 8
"""How many attempts may wait in the server: a share of the window, but at least `MIN_EXTRA`, and at
most half as many as are executed; fewer if a call takes more than a third of its timeout, and none
if it takes half of it."""

FREE_ROUNDS: Final = 4
FREE_GROWTH: Final = 0.25
"""After so many rounds whose latency has not risen, the window grows by this share in each."""

PROBE_NS: Final = 10_000_000_000
PROBE_ROUNDS: Final = 20
"""After how long, and after how many rounds, the smallest latency is measured anew."""

IDLE_NS: Final = 10_000_000_000

CATCH_UP_NS: Final = 20_000_000
"""With a rate, attempts that begin late are followed sooner by the next ones, up to this time."""

BUSY_CODES: Final = frozenset({"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})
"""The status codes that only show that a server is busy, or cannot be reached."""


class Outcome(enum.Enum):
    """The end of an attempt, as far as it shows the load of its server."""

    DELIVERED = enum.auto()
    REFUSED = enum.auto()
    """It failed with RESOURCE_EXHAUSTED: the server is busy, or a quota is used up."""
    BUSY = enum.auto()
    """It failed with another one of `BUSY_CODES`: the server may be busy."""
    FAILED = enum.auto()
    """It failed in another way, and is repeated."""
    UNKNOWN = enum.auto()
    """It says nothing: it was canceled, or its call was given up."""

    @classmethod
    def of_failure(cls, code: str) -> Outcome:
        """Return the outcome of an attempt that failed with this status code."""
        if code == "RESOURCE_EXHAUSTED":
            return cls.REFUSED
        return cls.BUSY if code in BUSY_CODES else cls.FAILED


@dataclass(slots=True)
class _Round:
    """The attempts after which the window is set. The first `size` of them are measured."""

    began_ns: int
    size: int
    missing: int
    """How many of the measured attempts have not ended."""
    begun: int = 0
    last_begun_ns: int = NEVER
    """When the last of the measured attempts began."""
    delivered: int = 0
    """How many calls were delivered since, also by attempts that began before."""
    failed: int = 0
    """How many attempts of the round have failed."""
    refused: int = 0
    """How many of these were refused."""
    least: int = FAILING_LIMIT
    """The smallest window after these failures."""
    ended: int = 0
    latencies: list[int] = field(default_factory=list)
    timeout_ns: int = NEVER
    """The shortest timeout."""
    is_limited: bool = False
    """Whether more attempts would have begun in a larger window."""


class Pacing:
    """Decides when the attempts to one target begin. Not thread-safe."""

    def __init__(self, rate: float | None = None, max_in_flight: int | None = None) -> None:
        """Begin without an attempt.

        Args:
            rate: The largest number of attempts a second, evenly spaced; None: no limit.
            max_in_flight: The number of attempts at a time; None: it follows the latency.
        """
        self._gap_ns = 0 if rate is None else max(1, round(1e9 / rate))
        """The time between two attempts by the rate; 0 without a rate."""
        self._fixed = max_in_flight
        """The window that was given; None: it follows the latency."""
        self._next_ns = 0
        """When the rate allows the next attempt."""
        self._paced_ns = -PACE_NS
        """When the next attempt may begin while attempts fail."""
        self.in_flight = 0
        """The number of attempts that run."""
        self._last_ns = -IDLE_NS
        """When an attempt last began or ended."""
        self._restart(0)

    def _restart(self, now_ns: int) -> None:
        self._window = float(FIRST_WINDOW)
        self._failing = False
        self._is_slow_start = True
        self._free_rounds = 0
        self._base_ns: float = NEVER
        self._base_at_ns = now_ns
        self._before_probe: float | None = None
        """The window before the present probe; None: no probe."""
        self._begin_round(now_ns)

    def _begin_round(self, now_ns: int) -> None:
        least = 1 if self._is_slow_start else MIN_SAMPLES
        size = min(max(self.window, least), MAX_SAMPLES)
        self._round = _Round(now_ns, size, missing=size)

    @property
    def window(self) -> int:
        """The largest number of attempts at a time."""
        return int(self._window) if self._fixed is None else self._fixed

    def is_new(self, now_ns: int) -> bool:
        """Whether everything begins anew with the next attempt, as in a new object."""
        is_idle = not self.in_flight and now_ns - self._last_ns >= IDLE_NS
        return is_idle and self._next_ns <= now_ns - CATCH_UP_NS

    def next_ns(self, now_ns: int) -> int:
        """Return when the next attempt may begin; `NEVER`: not before one has ended."""
        if self.in_flight >= self.window:
            self._round.is_limited = True
            return NEVER
        at_ns = self._next_ns
        if self._failing:
            at_ns = max(at_ns, self._paced_ns)
        return at_ns

    def capacity(self, within_ns: int) -> int:
        """Return how many calls can be at hand, so that each begins within about this time.

        Those that are attempted are included, and as many again, which follow at once.
        """
        count = self.in_flight + FAILING_LIMIT if self._failing else 2 * self.window
        if self._gap_ns:
            count = min(count, self.in_flight + within_ns // self._gap_ns + 1)
        return count

    def began(self, now_ns: int, timeout_ns: int = NEVER) -> None:
        """Note that an attempt has begun, and its timeout."""
        if not self.in_flight and now_ns - self._last_ns >= IDLE_NS:
            self._restart(now_ns)
        paced_ns = max(self._paced_ns, now_ns - PACE_NS + FAILING_GAP_NS)
        self._paced_ns = min(paced_ns, now_ns) + FAILING_GAP_NS
        self._next_ns = max(self._next_ns, now_ns - CATCH_UP_NS) + self._gap_ns
        self.in_flight += 1
        self._last_ns = now_ns
        this = self._round
        this.begun += 1
        this.timeout_ns = min(this.timeout_ns, timeout_ns)
        if this.begun == this.size:
            this.last_begun_ns = now_ns

    def ended(self, began_ns: int, now_ns: int, outcome: Outcome) -> None:
        """Note that an attempt has ended."""
        self.in_flight -= 1
        self._last_ns = now_ns
        is_failure = outcome in (Outcome.REFUSED, Outcome.BUSY, Outcome.FAILED)
        if outcome is not Outcome.UNKNOWN:
            self._failing = is_failure
        this = self._round
        this.delivered += outcome is Outcome.DELIVERED
        if began_ns < this.began_ns:
            return
        this.ended += 1
        this.failed += is_failure
        this.refused += outcome is Outcome.REFUSED
        if outcome in (Outcome.REFUSED, Outcome.BUSY):
            this.least = 1
        if this.failed - this.delivered >= min(FAILURE_MARGIN, this.size):
            self._shrink(this.least)
            self._begin_round(now_ns)
            return
        if began_ns <= this.last_begun_ns:
            this.missing -= 1
            if outcome is Outcome.DELIVERED:
                this.latencies.append(now_ns - began_ns)
        if this.missing <= 0 or this.ended >= STRAGGLER_FACTOR * this.size:
            if this.latencies:
                self._adapt(now_ns, this)
            self._begin_round(now_ns)

    def _shrink(self, least: int) -> None:
        """Halve the window."""
        window = self._window if self._before_probe is None else self._before_probe
        self._before_probe = None
        self._window = min(window, max(least, window / 2))
        self._is_slow_start = self._window <= least
        self._free_rounds = 0

    def _adapt(self, now_ns: int, ended: _Round) -> None:
        """Set the window at the end of a round."""
        latency_ns = fmean(ended.latencies)
        variance = fmean((each - latency_ns) ** 2 for each in ended.latencies)
        error_ns = STANDARD_ERRORS * math.sqrt(variance / len(ended.latencies))
        if self._before_probe is not None:
            self._window, self._before_probe = self._before_probe, None
            self._base_ns, self._base_at_ns = latency_ns, now_ns
            return
        if latency_ns <= self._base_ns:
            self._base_ns, self._base_at_ns = latency_ns, now_ns
        usual_ns: float = self._base_ns + SLACK_NS + error_ns
        usual_ns = min(usual_ns, max(self._base_ns * NEAR_BASE, ended.timeout_ns * TIMEOUT_SHARE))
        executed = self._window * min(1.0, usual_ns / max(latency_ns, 1))
        room = TIMEOUT_SHARE * ended.timeout_ns / max(self._base_ns, 1) - 1.0
        most = executed * min(0.5, max(0.0, room))
        extra = min(max(MIN_EXTRA, self._window / EXTRA_SHARE), most)
        self._free_rounds = self._free_rounds + 1 if executed == self._window else 0
        if not self._free_rounds:
            self._is_slow_start = False
        if self._free_rounds >= FREE_ROUNDS:
            extra = max(extra, self._window * FREE_GROWTH)
        lost = (ended.failed + ended.refused) / 2 / (ended.failed + ended.delivered)
        executed = max(executed * (1.0 - lost), min(executed, ended.least))
        window = 2 * self._window if self._is_slow_start else executed + extra
        if window < self._window or ended.is_limited:
            self._window = min(max(1.0, window), MAX_WINDOW)
        if now_ns - self._base_at_ns >= max(PROBE_NS, PROBE_ROUNDS * latency_ns):
            self._before_probe, self._window = self._window, max(1.0, self._window / 2)
