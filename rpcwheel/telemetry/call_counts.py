"""Counts and durations of calls, by method, kind and status code.

A call only appends to a queue, which is atomic. It waits for no lock, so it may end in a finalizer
or a signal handler. The entries are added up when the counts are read, or when there are
`MAX_QUEUED`. A forked child begins with counts of 0.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BOUNDS_S", "CallCounts", "CallEnd", "Histogram", "MethodCounts", "MethodTotals", "Side"]

BOUNDS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of durations in seconds, as OpenTelemetry's semantic conventions of
RPC metrics advise; the last bucket has none."""

MAX_METHODS: Final = 300
"""Methods that are counted for themselves. A proxy calls any name that its clients send."""

OTHER: Final = "_OTHER"
"""The method of all calls beyond `MAX_METHODS`, as in OpenTelemetry's semantic conventions."""

MAX_NAME: Final = 200
"""Characters of a method; one that is longer is counted as `OTHER`."""

MAX_QUEUED: Final = 128

MAX_ADDED: Final = 256
"""Entries that one call adds up, at most: about 0.1 ms."""

FAILURES: Final = frozenset({
    "DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE",
    "UNIMPLEMENTED", "UNKNOWN",
})  # fmt: skip
"""Status codes that show a failure of the server or the connection, as for the alert rules. On a
server DEADLINE_EXCEEDED is none: its clients set the deadline."""

_BOUNDS_NS: Final = tuple(round(bound * 1e9) for bound in BOUNDS_S)


class Durations:
    """A histogram of durations."""

    __slots__ = ("buckets", "count", "sum_ns")

    def __init__(self) -> None:
        self.count = 0
        self.sum_ns = 0
        self.buckets = [0] * (len(BOUNDS_S) + 1)


class QueuedCounts:
    """Adds up entries that are put into its queue by any code, also by finalizers."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.reset()

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        self._lock = threading.Lock()
        self.queue.clear()

    def put(self, entry: object) -> None:
        """Count an entry."""
        self.queue.append(entry)
        if len(self.queue) > MAX_QUEUED:
            self.add_some()

    def add_some(self) -> None:
        """Add up entries, unless another thread, or the code below on the stack, does it now."""
        if self._lock.acquire(blocking=False):
            try:
                self._add_up(MAX_ADDED)
            finally:
                self._lock.release()

    def _add_up(self, limit: int | None = None) -> None:
        """Add up entries, under the lock; all that are there now, without a limit."""
        add, queue = self._add, self.queue
        for _ in range(min(len(queue), limit or len(queue))):
            add(queue.popleft())

    def _add(self, entry: Any) -> None:
        """Add one entry."""
        raise NotImplementedError


class MethodCounts:
    """The calls of one method and kind."""

    __slots__ = ("_queue", "_side", "ended", "kind", "method", "started")

    def __init__(self, side: Side, method: str, kind: str) -> None:
        self.method = method
        """`"/shop.Orders/Get"`, or `OTHER`."""
        self.kind = kind
        """`"unary"`, `"client_stream"`, `"server_stream"` or `"bidi_stream"`."""
        self.started = 0
        self.ended: dict[str, Durations] = {}
        """By the name of the status code."""
        self._side = side
        self._queue = side.queue

    def begin(self) -> int:
        """Count the start of a call. Returns the time, for `end`."""
        self._queue.append(self)
        return perf_counter_ns()

    def end(self, began_ns: int, code: str) -> None:
        """Count the end of a call. `code` is the name of its status code."""
        duration_ns = perf_counter_ns() - began_ns
        queue = self._queue
        queue.append((self, code, duration_ns))
        if len(queue) > MAX_QUEUED:
            self._side.add_some()
        for listener in self._side.listeners:
            listener(self, code, duration_ns)


class Histogram(NamedTuple):
    """A histogram: the number of values, their sum, and the numbers in its buckets."""

    number: int
    sum: float
    buckets: tuple[int, ...]

    def plus(self, other: Histogram) -> Histogram:
        """Return both histograms as one; they have the same bounds."""
        buckets = tuple(map(sum, zip(self.buckets, other.buckets, strict=True)))
        return Histogram(self.number + other.number, self.sum + other.sum, buckets)


class CallEnd:
    """The end of a call that has begun: counted once, as CANCELLED if the call is dropped.

    The call holds this object, for example in a list of callbacks, and does not have to end. For
    one thread at a time.
    """

    __slots__ = ("_began_ns", "_counts")

    def __init__(self, counts: MethodCounts, began_ns: int) -> None:
        """Make the end of a call that began at `began_ns`, the result of `counts.begin()`."""
        self._counts: MethodCounts | None = counts
        self._began_ns = began_ns

    def end(self, code: str) -> None:
        """Count the end. Idempotent."""
        counts = self._counts
        if counts is not None:
            self._counts = None
            counts.end(self._began_ns, code)

    def __del__(self) -> None:
        """Count the end of a call that was dropped."""
        if self._counts is not None:
            self.end("CANCELLED")


class MethodTotals(NamedTuple):
    """The figures that `Side.totals` returns for one method."""

    method: str
    kind: str
    started: int
    ended: dict[str, Histogram]
    """The durations in seconds, by status code."""


class Side(QueuedCounts):
    """The calls of clients, their attempts, or the calls of servers."""

    def __init__(self) -> None:
        self._methods: dict[tuple[str, str], MethodCounts] = {}
        self.listeners: tuple[Callable[[MethodCounts, str, int], object], ...] = ()
        """Called at the end of each call with its duration in nanoseconds. They must not raise, nor
        wait for a lock."""
        super().__init__()

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        super().reset()
        for counts in self._methods.values():
            counts.started, counts.ended = 0, {}

    def method(self, method: str, kind: str) -> MethodCounts:
        """Return the counts of a method."""
        counts = self._methods.get((method, kind))
        if counts is None:
            if len(self._methods) >= MAX_METHODS or len(method) > MAX_NAME:
                method = OTHER
            new = MethodCounts(self, method, kind)
            counts = self._methods.setdefault((method, kind), new)
        return counts

    def _add_up(self, limit: int | None = None) -> None:
        next_entry = self.queue.popleft  # without a call for each entry
        for _ in range(min(len(self.queue), limit or len(self.queue))):
            entry = next_entry()
            if entry.__class__ is MethodCounts:
                entry.started += 1
                continue
            counts, code, duration_ns = entry
            durations = counts.ended.get(code)
            if durations is None:
                durations = counts.ended[code] = Durations()
            durations.count += 1
            durations.sum_ns += duration_ns
            durations.buckets[bisect_left(_BOUNDS_NS, duration_ns)] += 1

    def totals(self) -> list[MethodTotals]:
        """Return all counts so far, sorted by method."""
        with self._lock:
            self._add_up()
            return [
                MethodTotals(
                    counts.method,
                    counts.kind,
                    counts.started,
                    {
                        code: Histogram(
                            durations.count, durations.sum_ns / 1e9, tuple(durations.buckets)
                        )
                        for code, durations in sorted(counts.ended.items())
                    },
                )
                for _, counts in sorted(self._methods.copy().items())
            ]


@dataclass(frozen=True, slots=True)
class CodeStatus:
    """The calls of a method that ended with one status code."""

    code: str
    count: int
    mean_s: float


@dataclass(frozen=True, slots=True)
class MethodStatus:
    """The calls of a method."""

    side: str
    """`"client"`: calls; `"attempt"`: what clients sent; `"server"`."""
    method: str
    kind: str
    started: int
    in_flight: int
    p50_s: float | None
    """Approximate, from the buckets; the last bound stands for more. None: no call has ended."""
    p99_s: float | None
    failed: int
    """Calls that ended with one of `FAILURES`."""
    codes: tuple[CodeStatus, ...]


class CallCounts:
    """All calls of this process that pass through channels and interceptors of rpcwheel."""

    def __init__(self) -> None:
        self.client = Side()
        """Calls of clients, from the caller's view: a call that is retried is one call."""
        self.attempts = Side()
        """What clients sent: a call that is retried twice has three attempts."""
        self.server = Side()
        """Calls that handlers of servers served."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        for side in (self.client, self.attempts, self.server):
            side.reset()

    def status(self) -> tuple[MethodStatus, ...]:
        """Describe the calls of each method so far."""
        sides = ("client", self.client), ("attempt", self.attempts), ("server", self.server)
        return tuple(_method(name, totals) for name, side in sides for totals in side.totals())


def _method(side: str, totals: MethodTotals) -> MethodStatus:
    ended = totals.ended
    all_buckets = [durations.buckets for durations in ended.values()]
    buckets = [sum(numbers) for numbers in zip(*all_buckets, strict=True)]
    codes = tuple(
        CodeStatus(code, durations.number, durations.sum / durations.number)
        for code, durations in ended.items()
    )
    failures = FAILURES - {"DEADLINE_EXCEEDED"} if side == "server" else FAILURES
    in_flight = max(0, totals.started - sum(status.count for status in codes))
    return MethodStatus(
        side,
        totals.method,
        totals.kind,
        totals.started,
        in_flight,
        quantile(buckets, 0.5),
        quantile(buckets, 0.99),
        sum(status.count for status in codes if status.code in failures),
        codes,
    )


def quantile(buckets: list[int], share: float) -> float | None:
    """Estimate a quantile from the counts of the buckets of `BOUNDS_S`; None if there are none.

    It is interpolated in its bucket, as Prometheus' `histogram_quantile` does. In the last bucket,
    which has no upper bound, it is the last bound.
    """
    rank, below = share * sum(buckets), 0
    if not rank:
        return None
    for index, count in enumerate(buckets[:-1]):
        if below + count >= rank:
            lower = BOUNDS_S[index - 1] if index else 0.0
            return lower + (BOUNDS_S[index] - lower) * (rank - below) / count
        below += count
    return BOUNDS_S[-1]


CALL_COUNTS: Final = CallCounts()
"""The counts of this process."""
