"""The values of all metrics at one time.

`EventCounts` is the sink that counts events. `read` returns the values of a metric for Prometheus
and for OpenTelemetry.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from rpcwheel._concurrency.executor import EXECUTOR_NAME, reset_after_fork
from rpcwheel.events import add_sink
from rpcwheel.status.sections import FIELD
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import MAX_NAME, OTHER, Histogram, QueuedCounts

from .table import (
    ATTEMPT_SECONDS,
    ATTEMPT_STARTED,
    CLIENT_HANDLED,
    CLIENT_SECONDS,
    CLIENT_STARTED,
    COMPONENTS,
    EVENTS,
    LATE_BEFORE_START,
    MAX_SERIES,
    METHOD,
    REPLACED,
    SERVER_HANDLED,
    SERVER_SECONDS,
    SERVER_STARTED,
    EventMetric,
    Metric,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rpcwheel.events import Event
    from rpcwheel.status.snapshot import Status
    from rpcwheel.telemetry.call_counts import CallCounts, Side
    from rpcwheel.telemetry.components import Kind

Labels: TypeAlias = tuple[str, ...]
Value: TypeAlias = float | Histogram
Series: TypeAlias = dict[Labels, Value]
"""The values of a metric by the values of its labels."""


class EventCounts(QueuedCounts):
    """Counts events: a sink."""

    def __init__(self) -> None:
        self._by_event: dict[type[Event], list[EventMetric]] = {}
        for source in EVENTS:
            self._by_event.setdefault(source.event, []).append(source)
        super().__init__()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        super().reset()
        self._series: dict[Metric, Series] = {source.metric: {} for source in EVENTS}

    def __call__(self, event: Event) -> None:
        """Count an event."""
        for metric, _, source, fields in self._by_event.get(type(event), ()):
            if not source.counts_if or getattr(event, source.counts_if):
                labels = tuple(str(getattr(event, field))[:MAX_NAME] for field in fields)
                amount = float(getattr(event, source.amount)) if source.amount else 1.0
                self.put((metric, labels, amount))

    def series(self, metric: Metric) -> Series:
        """Return the counts of a metric so far."""
        with self._lock:
            self._add_up()
            return dict(self._series[metric])

    def _add(self, entry: tuple[Metric, Labels, float]) -> None:
        metric, labels, amount = entry
        value: Value = amount
        if metric.bounds:
            at = bisect_left(metric.bounds, amount)
            buckets = tuple(int(i == at) for i in range(len(metric.bounds) + 1))
            value = Histogram(1, amount, buckets)
        series = self._series[metric]
        _add_to(series, labels, value)
        if len(series) > MAX_SERIES:
            oldest = next(labels for labels in series if OTHER not in labels)
            _add_to(series, (OTHER,) * len(oldest), series.pop(oldest))


def _add_to(series: Series, labels: Labels, value: Value) -> None:
    """Add a value to one of a series, and put that last."""
    old = series.pop(labels, None)
    if isinstance(old, Histogram) and isinstance(value, Histogram):
        value = old.plus(value)
    elif isinstance(old, float) and isinstance(value, float):
        value += old
    series[labels] = value


class EndedComponents(QueuedCounts):
    """The counts of timers and limits that have ended: counters must not decrease."""

    def __init__(self) -> None:
        super().__init__()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin with counts of 0, in a forked child."""
        super().reset()
        self._series: dict[Metric, Series] = {}
        self._last: dict[Metric, Series] = {}

    def values(self) -> list[tuple[Metric, Labels, Value]]:
        """Return the counts so far."""
        with self._lock:
            self._add_up()
            return [
                (metric, labels, value)
                for metric, series in self._series.items()
                for labels, value in series.items()
            ]

    def _add(self, entry: tuple[Kind, object]) -> None:
        kind, row = entry
        rows = row if isinstance(row, tuple) else (row,)
        ended = SimpleNamespace(**dict.fromkeys(TABLES.values(), ()) | {TABLES[kind]: rows})
        for metric, labels, value in _component_values(ended, COUNTERS):
            series = self._series.setdefault(metric, {})
            full = labels not in series and len(series) >= MAX_SERIES
            _add_to(series, (OTHER,) * len(labels) if full else labels, value)

    def keep_growing(self, metric: Metric, series: Series) -> None:
        """Replace values that are less than the last ones: what ends is in no count for a while."""
        for labels, last in self._last.get(metric, {}).items():
            if labels in series and _number(series[labels]) < _number(last):
                series[labels] = last
        self._last[metric] = dict(series)


COUNTERS: Final = tuple(metric for metric in COMPONENTS if metric.kind != "gauge")

TABLES: Final[Mapping[Kind, str]] = {
    "timer": "timers",
    "limit": "limits",
    "admission": "admissions",
}
"""Where the rows of `COUNTERS` are in a `Status`, by the kind of the component."""

EVENT_COUNTS: Final = EventCounts()
"""The sink that `start_counting` adds."""

ENDED: Final = EndedComponents()


def start_counting() -> None:
    """Count calls, events and what ends from now on. Idempotent."""
    components.count_calls()
    add_sink(EVENT_COUNTS)
    components.on_end(ENDED.put)


def read() -> Iterator[tuple[Metric, Series]]:
    """Yield all metrics with their values."""
    from rpcwheel.status.snapshot import snapshot  # now: the import takes 20 ms

    # A limit or a channel that ends from here to `del` is in `status`, and not in `ended`. A timer
    # that is stopped meanwhile may be in neither.
    running = [components.of_kind(kind) for kind in TABLES]
    ended = ENDED.values()
    status = snapshot()
    del running
    calls = dict(read_calls(components.count_calls()))
    gauges = read_components(status, ended)
    yield from calls.items()
    expected = _expected(status, calls, gauges)
    for source in EVENTS:
        metric = source.metric
        series = EVENT_COUNTS.series(metric)
        if metric.kind == "counter":
            for labels in expected.get(metric, expected.get(metric.labels, ())):
                if labels not in series and len(series) < MAX_SERIES:
                    series[labels] = 0.0
        yield metric, series
    yield from gauges.items()


def _expected(
    status: Status, calls: Mapping[Metric, Series], gauges: Mapping[Metric, Series]
) -> dict[Metric | Labels, Iterable[Labels]]:
    """Return, by metric or by labels, the series of counters that are 0 before their first event.

    Otherwise the first event would make a series that begins with 1, and `increase()` of Prometheus
    would not show it.
    """
    named = {metric.name: series for metric, series in gauges.items()}
    channels = named["rpcwheel_channel_calls"]
    targets = [(heartbeat.target[:MAX_NAME],) for heartbeat in status.heartbeats]
    return {
        (): [()],
        (METHOD,): [(method,) for _, method in calls[CLIENT_STARTED]],
        LATE_BEFORE_START: [(method,) for _, method in calls[SERVER_STARTED]],
        ("channel",): channels,
        ("queue",): [
            *named["rpcwheel_failback_pending"],
            *((name,) for name in components.expected_queues.copy()),
        ],
        ("registry",): named["rpcwheel_registry_up"],
        ("server",): named["rpcwheel_limit_running"],
        ("target",): targets,
        REPLACED: [*targets, *channels],
        ("timer",): [*named["rpcwheel_timer_pending"], (EXECUTOR_NAME,)],
    }


def read_components(
    status: Status, ended: Iterable[tuple[Metric, Labels, Value]]
) -> dict[Metric, Series]:
    """Return the metrics of the running components, with the counts of ended ones.

    Values with equal labels become one, by `Metric.combine`.
    """
    all_series: dict[Metric, Series] = {metric: {} for metric in COMPONENTS}
    for metric, values, value in (*ended, *_component_values(status, COMPONENTS)):
        series = all_series[metric]
        labels = tuple(text[:MAX_NAME] for text in values)
        if labels not in series and len(series) >= MAX_SERIES:
            labels = (OTHER,) * len(labels)
        combine(metric, series, labels, value)
    for metric in COUNTERS:
        ENDED.keep_growing(metric, all_series[metric])
    return all_series


def combine(metric: Metric, series: Series, labels: Labels, value: Value) -> None:
    """Add a value to a series; values with equal labels become one, by `Metric.combine`."""
    old = series.get(labels)
    if isinstance(old, float) and isinstance(value, float) and metric.combine != "sum":
        series[labels] = (max if metric.combine == "max" else min)(old, value)
    else:
        _add_to(series, labels, value)


def _number(value: Value) -> float:
    return value.number if isinstance(value, Histogram) else value


class _InnerRow(NamedTuple):
    """A row of an inner table, with the row that contains it."""

    row: object
    outer: object


def _component_values(
    status: object, metrics: Iterable[Metric]
) -> Iterator[tuple[Metric, Labels, Value]]:
    """Yield the values of metrics, from the rows of a `Status` or of a part of one."""
    for metric in metrics:
        outer, _, inner = COMPONENTS[metric][0].partition(".")
        rows = getattr(status, outer)
        if inner:
            rows = [_InnerRow(each, row) for row in rows for each in getattr(row, inner)]
        yield from _row_values(metric, rows)


def _row_values(metric: Metric, rows: Sequence[object]) -> Iterator[tuple[Metric, Labels, Value]]:
    path, source = COMPONENTS[metric]

    def reader(field: str) -> Callable[[object], Any]:
        is_own = "." in path and not field.startswith("outer.")
        return attrgetter(f"row.{field}" if is_own else field)

    for field in source.fields or ("",):
        read_value = reader(field) if field else lambda _: 1.0
        read_labels = [
            (lambda _, name=field: name) if label == FIELD else reader(label)
            for label in source.labels.values()
        ]
        for row in rows:
            value: Any = read_value(row)
            if value is None:
                value = source.none
            if value is None:
                continue
            labels = tuple([read(row) for read in read_labels])
            if metric.kind == "histogram":
                yield metric, labels, Histogram(value.count, value.sum_s, value.buckets)
            else:
                yield metric, labels, float(value)


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
    all_totals = side.totals()
    yield started, {(totals.kind, totals.method): float(totals.started) for totals in all_totals}
    by_code: dict[Labels, Histogram] = {
        (totals.kind, totals.method, code): durations
        for totals in all_totals
        for code, durations in totals.ended.items()
    }
    if ended is None:
        yield seconds, {**by_code}
        return
    numbers: Series = {(totals.kind, totals.method, "OK"): 0.0 for totals in all_totals}
    numbers |= {labels: float(durations.number) for labels, durations in by_code.items()}
    yield ended, numbers
    whole: dict[Labels, Histogram] = {}
    for (kind, method, _), durations in by_code.items():
        key = kind, method
        whole[key] = whole[key].plus(durations) if key in whole else durations
    yield seconds, {**whole}
