"""Counts and durations of calls, by method, kind and status code.

`CallCounts` has three `Side` objects: the calls of clients, the attempts of these calls, and the
calls of servers. A `Side` has one `MethodCounts` for each method and kind, with the methods `begin`
and `end` for calls; a `CallEnd` also counts the end of a call that is dropped. `Side.totals()`
returns the figures for metrics, `CallCounts.status()` those for the live view.

Beginning or ending a call appends an entry to a queue, which is an atomic operation. The entries
are added up, under a lock, when the counts are read, or by a call that finds more than `MAX_QUEUED`
entries. A call never waits for this lock: it may end in a finalizer or a signal handler, which may
have interrupted the thread that holds the lock. A forked child begins with counts of 0.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of durations in seconds, as OpenTelemetry's semantic conventions of
RPC metrics advise; the last bucket has none."""

MAX_METHODS: Final = 300
"""The number of methods and kinds that a `Side` counts separately; the calls of all others are
counted as `OTHER`. A limit is needed because a proxy calls any name that its clients send."""

OTHER: Final = "_OTHER"
"""The method of all calls beyond `MAX_METHODS`, as in OpenTelemetry's semantic conventions."""

MAX_NAME: Final = 200
"""The longest name of a method in characters; calls of longer ones are counted as `OTHER`."""

MAX_QUEUED: Final = 128
"""The end of a call adds up entries if the queue is longer than this."""

MAX_ADDED: Final = 256
"""The number of entries that the end of a call adds up at most, which takes about 0.1 ms. A longer
queue becomes shorter nevertheless, because each call appends only two entries."""

FAILURES: Final = frozenset({
    "DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE",
    "UNIMPLEMENTED", "UNKNOWN",
})  # fmt: skip
"""Status codes that show a failure of the server or the connection, the same as in the alert rules
(`deploy/prometheus/alerts.yml`). In the counts of a server, DEADLINE_EXCEEDED is no failure: its
clients choose the deadline."""

_BOUNDS_NS: Final = tuple(round(bound * 1e9) for bound in BOUNDS_S)


class CallCounts:
    """All calls of this process that pass through channels and interceptors of rpcwheel."""

    def __init__(self) -> None:
        self.client = Side()
        """The calls of clients. A call that is retried is one call."""
        self.attempts = Side()
        """The attempts that clients sent. A call that is retried twice has three attempts."""
        self.server = Side()
        """The calls that handlers of servers served."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        for side in (self.client, self.attempts, self.server):
            side.reset()

    def status(self) -> tuple[MethodStatus, ...]:
        """Describe the calls of each method so far."""
        sides = ("client", self.client), ("attempt", self.attempts), ("server", self.server)
        return tuple(
            _method_status(name, totals) for name, side in sides for totals in side.totals()
        )


class QueuedCounts:
    """Counts with a queue of entries. The subclass adds one entry to its counts in `_add`.

    `put` may be called on any thread, and by finalizers and signal handlers.
    """

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.reset()

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        self.queue.clear()

    def put(self, entry: object) -> None:
        """Count an entry."""
        self.queue.append(entry)
        if len(self.queue) > MAX_QUEUED:
            self.add_some()

    def add_some(self) -> None:
        """Add up at most `MAX_ADDED` entries; none if the lock is held.

        Another thread may hold the lock, or the code that was interrupted by this finalizer or
        signal handler.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._add_up(MAX_ADDED)
            finally:
                self._lock.release()

    def _add_up(self, limit: int | None = None) -> None:
        """Add up the entries that are in the queue now, at most `limit` of them. With the lock."""
        add, queue = self._add, self.queue
        for _ in range(self._batch_size(limit)):
            add(queue.popleft())

    def _batch_size(self, limit: int | None) -> int:
        queued = len(self.queue)
        return queued if limit is None else min(queued, limit)

    def _add(self, entry: Any) -> None:
        """Add one entry to the counts. With the lock."""
        raise NotImplementedError


class Side(QueuedCounts):
    """The counts of one of three: the calls of clients, their attempts, the calls of servers.

    An entry of the queue is a `MethodCounts` for a call that begins, and a tuple of `MethodCounts`,
    status code and duration in nanoseconds for a call that ends.
    """

    def __init__(self) -> None:
        self._methods: dict[tuple[str, str], MethodCounts] = {}
        self.listeners: tuple[Callable[[MethodCounts, str, int], object], ...] = ()
        """Functions that are called at the end of each call, with the `MethodCounts`, the name of
        the status code and the duration in nanoseconds. They must not raise, nor wait for a lock.
        """
        super().__init__()  # calls `reset`, which uses the attributes above

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        super().reset()
        for counts in self._methods.values():
            counts.started, counts.ended = 0, {}

    def method(self, method: str, kind: str) -> MethodCounts:
        """Return the counts of a method and kind, which may be those of `OTHER`."""
        counts = self._methods.get((method, kind))
        if counts is None:
            if len(self._methods) >= MAX_METHODS or len(method) > MAX_NAME:
                method = OTHER
            new = MethodCounts(self, method, kind)
            counts = self._methods.setdefault((method, kind), new)
        return counts

    def _add_up(self, limit: int | None = None) -> None:
        next_entry = self.queue.popleft
        for _ in range(self._batch_size(limit)):  # no method `_add`: a call for each entry is slow
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
        """Return the figures of all calls so far, sorted by method."""
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


class MethodCounts:
    """The calls of one method and kind."""

    __slots__ = ("_queue", "_side", "ended", "kind", "method", "started")

    ignores_invalid_requests: Final = False

    def __init__(self, side: Side, method: str, kind: str) -> None:
        self.method = method
        """`"/shop.Orders/Get"`, or `OTHER`."""
        self.kind = kind
        """`"unary"`, `"client_stream"`, `"server_stream"` or `"bidi_stream"`."""
        self.started = 0
        """The number of calls that have begun, apart from the entries in the queue."""
        self.ended: dict[str, Durations] = {}
        """The calls that have ended, by the name of their status code; apart from the queue too."""
        self._side = side
        self._queue = side.queue

    def begin(self) -> int:
        """Count the start of a call. Returns its time in nanoseconds, for `end`."""
        self._queue.append(self)  # `end` limits the length of the queue
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


class Durations:
    """The durations of calls with one status code, while they are added up: see `Histogram`."""

    __slots__ = ("buckets", "count", "sum_ns")

    def __init__(self) -> None:
        self.count = 0
        self.sum_ns = 0
        """The sum of the durations in nanoseconds."""
        self.buckets = [0] * (len(BOUNDS_S) + 1)


class CallObserver(Protocol):
    """Gets the end of each call of one method: a `MethodCounts`, or a `MethodAdmission`."""

    @property
    def kind(self) -> str:
        """`"unary"` if all calls have one request and one response; another string if not."""

    @property
    def ignores_invalid_requests(self) -> bool:
        """Whether a call counts as canceled if gRPC could not send its request."""

    def end(self, began: Any, code: str, /) -> None:
        """Note the end of a call. `began` identifies it; `code` is the name of its status code."""


class CallEnd:
    """Reports the end of a call that has begun, once.

    The call holds the only reference to this object, for example in its list of callbacks. If the
    call is dropped before `end` was called, it is counted as CANCELLED. Not thread-safe.
    """

    __slots__ = ("_began_ns", "_counts")

    def __init__(self, counts: CallObserver | None, began_ns: Any) -> None:
        """`began_ns` identifies the call for `counts.end`: of a `MethodCounts`, when it began.

        If `counts` is None, nothing is reported.
        """
        self._counts = counts
        self._began_ns = began_ns

    def end(self, code: str) -> None:
        """Count the end with the name of its status code. Idempotent."""
        counts = self._counts
        if counts is not None:
            self._counts = None
            counts.end(self._began_ns, code)

    def __del__(self) -> None:
        """Count the end of a call that was dropped."""
        if self._counts is not None:
            self.end("CANCELLED")


class CountedMessages:
    """An iterator of messages whose end is counted as the end of its call."""

    __slots__ = ("_code_of", "_end", "_messages")

    def __init__(
        self, messages: Any, end: CallEnd, code_of: Callable[[BaseException | None], str]
    ) -> None:
        """Wrap an iterator. A dropped call is counted if only this object refers to its `end`.

        `code_of` returns the name of the status code for what the iterator raised; its argument is
        None for a normal end.
        """
        self._messages = messages
        self._end = end
        self._code_of = code_of

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._messages)
        except StopIteration:
            self._end.end(self._code_of(None))
            raise
        except BaseException as error:
            self._end.end(self._code_of(error))
            raise


class Histogram(NamedTuple):
    """An immutable histogram of values, such as durations in seconds."""

    number: int
    """The number of values."""
    sum: float
    """The sum of the values."""
    buckets: tuple[int, ...]
    """The number of values in each bucket."""

    def plus(self, other: Histogram) -> Histogram:
        """Return both histograms as one; they have the same bounds."""
        buckets = tuple(map(sum, zip(self.buckets, other.buckets, strict=True)))
        return Histogram(self.number + other.number, self.sum + other.sum, buckets)


class MethodTotals(NamedTuple):
    """The figures of one method and kind, as `Side.totals` returns them."""

    method: str
    kind: str
    started: int
    ended: dict[str, Histogram]
    """The durations in seconds, by the name of the status code."""


@dataclass(frozen=True, slots=True)
class MethodStatus:
    """The calls of one method and kind."""

    side: str
    """`"client"`, `"attempt"` or `"server"`: see `CallCounts`."""
    method: str
    kind: str
    started: int
    in_flight: int
    p50_s: float | None
    """The median duration in seconds, as `quantile` estimates it; None if no call has ended."""
    p99_s: float | None
    """The 99th percentile, likewise."""
    failed: int
    """The number of calls that ended with one of `FAILURES`."""
    codes: tuple[CodeStatus, ...]


@dataclass(frozen=True, slots=True)
class CodeStatus:
    """The calls of a method that ended with one status code."""

    code: str
    count: int
    mean_s: float


def _method_status(side: str, totals: MethodTotals) -> MethodStatus:
    ended = totals.ended
    all_buckets = [durations.buckets for durations in ended.values()]
    buckets = [sum(numbers) for numbers in zip(*all_buckets, strict=True)]  # of all status codes
    codes = tuple(
        CodeStatus(code, durations.number, durations.sum / durations.number)
        for code, durations in ended.items()
    )
    failures = FAILURES - {"DEADLINE_EXCEEDED"} if side == "server" else FAILURES
    ended_calls = sum(status.count for status in codes)
    return MethodStatus(
        side,
        totals.method,
        totals.kind,
        totals.started,
        max(0, totals.started - ended_calls),  # in flight
        quantile(buckets, 0.5),
        quantile(buckets, 0.99),
        sum(status.count for status in codes if status.code in failures),
        codes,
    )


def quantile(buckets: list[int], share: float) -> float | None:
    """Estimate a quantile of durations in seconds; None if there are no durations.

    The result is interpolated in its bucket of `BOUNDS_S`, as by Prometheus' `histogram_quantile`.
    In the last bucket, which has no upper bound, it is the last bound.
    """
    rank = share * sum(buckets)
    if not rank:
        return None
    below = 0  # durations in the buckets before this one
    for index, count in enumerate(buckets[:-1]):
        if below + count >= rank:
            lower = BOUNDS_S[index - 1] if index else 0.0
            return lower + (BOUNDS_S[index] - lower) * (rank - below) / count
        below += count
    return BOUNDS_S[-1]


CALL_COUNTS: Final = CallCounts()
"""The counts of this process."""
