"""The values of all metrics at one time.

`EventCounts` is the sink that counts events. `read` returns the values of a metric for Prometheus
and for OpenTelemetry.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from rpcwheel import live
from rpcwheel.call_counts import OTHER, Histogram
from rpcwheel.events import add_sink
from rpcwheel.status.snapshot import snapshot

from .table import (
    ATTEMPT_SECONDS,
    ATTEMPT_STARTED,
    CHANNEL_CALLS,
    CLIENT_HANDLED,
    CLIENT_SECONDS,
    CLIENT_STARTED,
    COMPONENTS,
    EVENTS,
    FAILBACK_LIMIT,
    FAILBACK_OLDEST,
    FAILBACK_PENDING,
    HEARTBEAT_RTT,
    HEARTBEAT_STATE,
    MAX_SERIES,
    METHOD,
    REGISTRY_INSTANCES,
    REGISTRY_LEASE_AGE,
    REGISTRY_REGISTRATIONS,
    REGISTRY_STALE,
    REGISTRY_UP,
    SERVER_CONNECTIONS,
    SERVER_HANDLED,
    SERVER_SECONDS,
    SERVER_STARTED,
    SUBCHANNELS,
    TIMER_CANCELED,
    TIMER_FIRED,
    TIMER_LATENESS,
    TIMER_MAX_LATENESS,
    TIMER_PENDING,
    TIMER_STARTED,
    FromEvent,
    Metric,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rpcwheel.call_counts import CallCounts, Side
    from rpcwheel.events import Event
    from rpcwheel.status.snapshot import RegistryStatus, Status

MAX_QUEUED: Final = 64
"""Events that are added up at once."""

Labels: TypeAlias = tuple[str, ...]


Value: TypeAlias = float | Histogram
Series: TypeAlias = dict[Labels, Value]
"""The values of a metric by the values of its labels."""


class EventCounts:
    """Counts events: a sink. Takes no lock when an event comes; see `rpcwheel.call_counts`."""

    def __init__(self) -> None:
        self._by_event: dict[type[Event], list[FromEvent]] = {}
        for source in EVENTS:
            self._by_event.setdefault(source.event, []).append(source)
        self._queue: deque[tuple[FromEvent, Labels, float]] = deque()
        self._series: dict[str, Series] = {source.metric.name: {} for source in EVENTS}
        self.new_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.new_lock)

    def new_lock(self) -> None:
        """Replace the lock, in a forked child, where the old one may never be released."""
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Count an event."""
        for source in self._by_event.get(type(event), ()):
            if source.only is None or source.only(event):
                labels = tuple(str(getattr(event, field)) for field in source.fields)
                amount = float(getattr(event, source.amount)) if source.amount else 1.0
                self._queue.append((source, labels, amount))
        if len(self._queue) > MAX_QUEUED and self._lock.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._lock.release()

    def series(self, metric: Metric) -> Series:
        """Return the counts of a metric so far."""
        with self._lock:
            self._add_up()
            return dict(self._series[metric.name])

    def _add_up(self) -> None:
        while self._queue:
            source, labels, amount = self._queue.popleft()
            metric = source.metric
            series = self._series[metric.name]
            if labels not in series and len(series) >= MAX_SERIES:
                labels = (OTHER,) * len(labels)
            old = series.get(labels)
            if isinstance(old, float):
                series[labels] = old + amount
            elif not metric.bounds:
                series[labels] = amount
            else:
                at = bisect_left(metric.bounds, amount)
                buckets = tuple(int(i == at) for i in range(len(metric.bounds) + 1))
                new = Histogram(1, amount, buckets)
                series[labels] = new if old is None else old.plus(new)


EVENT_COUNTS: Final = EventCounts()
"""The sink that `start_counting` adds."""


def start_counting() -> None:
    """Count calls and events from now on. Idempotent."""
    live.count_calls()
    add_sink(EVENT_COUNTS)


def read() -> Iterator[tuple[Metric, Series]]:
    """Yield all metrics with their values."""
    counts = live.count_calls()
    calls = dict(read_calls(counts))
    components = read_components(snapshot())
    yield from calls.items()
    for source in EVENTS:
        metric = source.metric
        series = EVENT_COUNTS.series(metric)
        if metric.kind == "counter":
            for labels in _expected(metric, calls, components):
                series.setdefault(labels, 0.0)
        yield metric, series
    yield from components.items()


_EXPECTED: Final[dict[Labels, Metric]] = {
    (METHOD,): CLIENT_STARTED,
    ("channel",): CHANNEL_CALLS,
    ("queue",): FAILBACK_PENDING,
    ("registry",): REGISTRY_UP,
    ("target",): HEARTBEAT_RTT,
    ("timer",): TIMER_PENDING,
}
"""By the labels of a counter, a metric with the values that they will have."""


def _expected(
    metric: Metric, calls: Mapping[Metric, Series], components: Mapping[Metric, Series]
) -> Iterable[Labels]:
    """Return the labels for which a counter is 0 before its first event.

    Otherwise the first event would make a series that begins with 1, and `increase()` of Prometheus
    would not show it.
    """
    if not metric.labels:
        return [()]
    known = _EXPECTED.get(metric.labels)
    if known is None:
        return ()
    if known is CLIENT_STARTED:
        return ((method,) for _, method in calls[known])
    return components[known]


def read_components(status: Status) -> dict[Metric, Series]:
    """Return the metrics of timers, queues, connections and registries.

    Values with equal labels are added; of ages the greatest is taken.
    """
    all_series: dict[Metric, Series] = {metric: {} for metric in COMPONENTS}
    for metric, labels, value in _component_values(status):
        series = all_series[metric]
        old = series.get(labels)
        if isinstance(old, Histogram) and isinstance(value, Histogram):
            series[labels] = old.plus(value)
        elif isinstance(old, Histogram) or isinstance(value, Histogram) or old is None:
            series[labels] = value
        else:
            series[labels] = max(old, value) if metric in _GREATEST else old + value
    return all_series


_GREATEST: Final = frozenset(
    {TIMER_MAX_LATENESS, FAILBACK_OLDEST, HEARTBEAT_RTT, REGISTRY_LEASE_AGE, REGISTRY_STALE}
)


def _component_values(status: Status) -> Iterator[tuple[Metric, Labels, Value]]:
    for timer in status.timers:
        label, stats = (timer.name,), timer.stats
        late = stats.lateness
        yield TIMER_PENDING, label, float(stats.pending)
        yield TIMER_STARTED, label, float(stats.started)
        yield TIMER_FIRED, label, float(stats.fired)
        yield TIMER_CANCELED, label, float(stats.cancelled)
        yield TIMER_LATENESS, label, Histogram(late.count, late.sum_s, late.buckets)
        yield TIMER_MAX_LATENESS, label, late.max_s
    for queue in status.queues:
        label = (queue.name,)
        yield FAILBACK_PENDING, label, float(queue.stats.pending)
        yield FAILBACK_LIMIT, label, float(queue.max_pending)
        yield FAILBACK_OLDEST, label, queue.oldest_age_s or 0.0
    for heartbeat in status.heartbeats:
        yield HEARTBEAT_STATE, (heartbeat.state,), 1.0
        if heartbeat.rtt_s is not None:
            yield HEARTBEAT_RTT, (heartbeat.target,), heartbeat.rtt_s
    for channel in status.channels:
        yield CHANNEL_CALLS, (channel.target,), float(channel.calls)
        for one in channel.subchannels:
            state = one.state if one.healthy else "unhealthy"
            yield SUBCHANNELS, (channel.target, state), 1.0
    for connection in status.connections:
        yield SERVER_CONNECTIONS, (connection.state,), 1.0
    for registry in status.registries:
        yield from _registry_values(registry)


def _registry_values(registry: RegistryStatus) -> Iterator[tuple[Metric, Labels, Value]]:
    url = registry.url
    yield REGISTRY_UP, (url,), float(registry.up)
    for record in registry.registrations:
        yield REGISTRY_REGISTRATIONS, (url, record.service, record.state), 1.0
        if record.lease_age_s is not None:
            yield REGISTRY_LEASE_AGE, (url, record.service), record.lease_age_s
    for watch in registry.subscriptions:
        labels = url, watch.service
        yield REGISTRY_INSTANCES, (*labels, watch.source or "none"), float(watch.instances)
        yield REGISTRY_STALE, labels, 0.0 if watch.source == "live" else watch.stale_s


def read_calls(counts: CallCounts) -> Iterator[tuple[Metric, Series]]:
    """Yield the metrics of calls. Labels: the kind, the method and, if any, the status."""
    for side, started, ended, seconds in (
        (counts.client, CLIENT_STARTED, CLIENT_HANDLED, CLIENT_SECONDS),
        (counts.attempts, ATTEMPT_STARTED, None, ATTEMPT_SECONDS),
        (counts.server, SERVER_STARTED, SERVER_HANDLED, SERVER_SECONDS),
    ):
        yield from _read_side(side, started, ended, seconds)


def _read_side(
    side: Side, started: Metric, ended: Metric | None, seconds: Metric
) -> Iterator[tuple[Metric, Series]]:
    totals = side.totals()
    yield started, {(one.kind, one.method): one.started for one in totals}
    by_code: dict[Labels, Histogram] = {
        (one.kind, one.method, code): durations
        for one in totals
        for code, durations in one.ended.items()
    }
    if ended is None:
        yield seconds, {**by_code}
        return
    yield ended, {labels: one.number for labels, one in by_code.items()}
    whole: dict[Labels, Histogram] = {}
    for (kind, method, _), one in by_code.items():
        key = kind, method
        whole[key] = whole[key].plus(one) if key in whole else one
    yield seconds, {**whole}
