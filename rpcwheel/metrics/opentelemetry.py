"""Metrics for OpenTelemetry, through its API (`rpcwheel[otel]`).

Without an SDK, the API does nothing. Counters and gauges are observable instruments: they are read
when the SDK collects. Only the durations of calls are recorded when a call ends.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics
from opentelemetry.metrics import Meter, Observation

from rpcwheel import live
from rpcwheel.call_counts import Histogram
from rpcwheel.events import FailbackDelivered, add_sink, remove_sink

from .readings import read
from .table import (
    ATTEMPT_SECONDS,
    CLIENT_SECONDS,
    CODE,
    DELIVERY_SECONDS,
    METHOD,
    METRICS,
    SERVER_SECONDS,
    TYPE,
    otel_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, MeterProvider

    from rpcwheel.call_counts import MethodCounts
    from rpcwheel.events import Event

    from .readings import Labels, Series
    from .table import Metric

MAX_AGE_S: Final = 0.5
"""The instruments of one collection share one reading, which is at most this old."""

SERVER_ERRORS: Final = frozenset(
    ["UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"]
)
"""The codes that are errors of a server, by the semantic conventions of gRPC."""


def start(provider: MeterProvider | None = None) -> Callable[[], None]:
    """Make the instruments.

    Args:
        provider: None: the global one, also if the program sets it later.

    Raises:
        ImportError: The API is older than 1.30.

    Returns:
        A function after which no durations are recorded. The other instruments stay; to remove
        them, shut down the provider.
    """
    if "explicit_bucket_boundaries_advisory" not in signature(Meter.create_histogram).parameters:
        raise ImportError("opentelemetry-api is too old; metrics need version 1.30 or newer")
    meter = metrics.get_meter("rpcwheel", version("rpcwheel"), provider)
    _observe(meter)
    delivered = _histogram(meter, DELIVERY_SECONDS)

    def record_delivery(event: Event) -> None:
        if isinstance(event, FailbackDelivered):
            delivered.record(event.waited_s, {"rpcwheel.queue": event.name})

    add_sink(record_delivery)
    counts = live.count_calls()
    recorders = (
        (counts.client, _recorder(meter, CLIENT_SECONDS, _rpc_attributes)),
        (counts.attempts, _recorder(meter, ATTEMPT_SECONDS, _attempt_attributes)),
        (counts.server, _recorder(meter, SERVER_SECONDS, _server_attributes)),
    )
    for side, record in recorders:
        side.listeners += (record,)

    def stop() -> None:
        remove_sink(record_delivery)
        for side, record in recorders:
            side.listeners = tuple(one for one in side.listeners if one is not record)

    return stop


def _observe(meter: Meter) -> None:
    """Make the counters and gauges."""
    reading = _Reading()
    for metric in METRICS:
        name = otel_name(metric)
        if name is None:
            continue
        observe = partial(reading.observe, metric)
        if metric.kind == "counter":
            meter.create_observable_counter(name, [observe], description=metric.help)
        elif metric.kind == "gauge":
            unit = "s" if metric.name.endswith("_seconds") else ""
            meter.create_observable_gauge(name, [observe], unit, metric.help)


class _Reading:
    """The values of all metrics, read again if they are older than `MAX_AGE_S`."""

    def __init__(self) -> None:
        self._read_s = 0.0
        self._series: dict[str, Series] = {}

    def observe(self, metric: Metric, _: CallbackOptions) -> Iterable[Observation]:
        now_s = time.monotonic()
        if not self._series or now_s - self._read_s > MAX_AGE_S:
            self._series = {metric.name: series for metric, series in read()}
            self._read_s = now_s
        for values, value in self._series.get(metric.name, {}).items():
            if not isinstance(value, Histogram):
                yield Observation(value, _attributes(metric, values))


def _attributes(metric: Metric, values: Labels) -> dict[str, str]:
    names = {METHOD: "rpc.method", CODE: "rpc.response.status_code", TYPE: "rpcwheel.call_type"}
    attributes = {}
    for label, value in zip(metric.labels, values, strict=True):
        name = names.get(label, f"rpcwheel.{label}")
        attributes[name] = value.removeprefix("/") if label == METHOD else value
    return attributes


def _histogram(meter: Meter, metric: Metric) -> Any:
    name = otel_name(metric) or metric.name
    return meter.create_histogram(
        name, "s", metric.help, explicit_bucket_boundaries_advisory=metric.bounds
    )


def _recorder(
    meter: Meter, metric: Metric, attributes_of: Callable[[str, str], dict[str, str]]
) -> Callable[[MethodCounts, str, int], None]:
    """Return a listener that records durations. The attributes are made once for each series."""
    histogram = _histogram(meter, metric)
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def record(counts: MethodCounts, code: str, duration_ns: int) -> None:
        key = counts.method, code
        attributes = known.get(key)
        if attributes is None:
            attributes = known[key] = attributes_of(counts.method.removeprefix("/"), code)
        histogram.record(duration_ns / 1e9, attributes)

    return record


def _rpc_attributes(method: str, code: str) -> dict[str, str]:
    attributes = {
        "rpc.system.name": "grpc",
        "rpc.method": method,
        "rpc.response.status_code": code,
    }
    return attributes if code == "OK" else attributes | {"error.type": code}


def _server_attributes(method: str, code: str) -> dict[str, str]:
    attributes = _rpc_attributes(method, code)
    if code not in SERVER_ERRORS:
        attributes.pop("error.type", None)
    return attributes


def _attempt_attributes(method: str, code: str) -> dict[str, str]:
    return {"grpc.method": method, "grpc.status": code}
