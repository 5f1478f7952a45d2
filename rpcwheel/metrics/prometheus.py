"""Metrics for Prometheus, through prometheus_client (`rpcwheel[prometheus]`).

A `Collector` is registered in `prometheus_client.REGISTRY` when metrics start. So the program's own
`start_http_server` or `generate_latest` shows these metrics too. For another registry::

    registry = prometheus_client.CollectorRegistry()
    registry.register(rpcwheel.metrics.Collector())

Nothing is written into prometheus_client when a call ends: the values are read at each scrape. So
its multiprocess mode (`PROMETHEUS_MULTIPROC_DIR`) does not have them; scrape each process.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.errors import ExtraMissing

try:
    import prometheus_client
except ModuleNotFoundError as error:
    raise ExtraMissing(
        "metrics for Prometheus need the package prometheus_client: "
        "pip install 'rpcwheel[prometheus]'"
    ) from error
from prometheus_client import exposition as formats
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.utils import floatToGoString

from rpcwheel import status
from rpcwheel.telemetry.call_counts import OTHER, Histogram

from .readings import combine, read, start_counting
from .table import METHOD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric as Family

    from .readings import Labels, Series
    from .table import Metric

OTEL_EXPORTER: Final = "opentelemetry.exporter.prometheus"
"""The package of the exporter of OpenTelemetry for Prometheus."""

_SERVICE_AND_METHOD: Final = ("grpc_service", "grpc_method")


class Collector(prometheus_client.registry.Collector):
    """Reads all metrics of rpcwheel in this process at each scrape.

    The first one begins to count, if `RPCWHEEL_METRICS` has prevented that.
    """

    def __init__(self) -> None:
        start_counting()

    def collect(self) -> Iterator[Family]:
        """Yield the metrics that have values.

        In `prometheus_client.REGISTRY` those are left out that another collector has: a name that
        appears twice would make the whole scrape fail.
        """
        taken = _taken_by_others(self)
        if taken is not None:
            for metric, series in read():
                if metric.name not in taken and series:
                    yield _family(metric, series)

    def describe(self) -> Sequence[Family]:
        """Return nothing, so that no name that the program registers later is refused."""
        return ()


def start() -> None:
    """Register a `Collector` in `prometheus_client.REGISTRY`, and serve it in the live view."""
    prometheus_client.REGISTRY.register(_COLLECTOR)
    status.exposition = exposition


def exposition(accept: str) -> tuple[bytes, str]:
    """Return all metrics of `prometheus_client.REGISTRY` as text, and its content type.

    The header `Accept` of the request chooses between two text formats of Prometheus.
    """
    encode, content_type = formats.choose_encoder(accept)
    return encode(prometheus_client.REGISTRY), content_type


_COLLECTOR: Final = Collector()


def _taken_by_others(collector: Collector) -> set[str] | None:
    """Return the names of other collectors; None if one of them has all metrics of rpcwheel.

    That is a second `Collector`, or the exporter of OpenTelemetry, which has no names.
    """
    names: dict[str, Any] = getattr(prometheus_client.REGISTRY, "_names_to_collectors", {})
    collectors: dict[Any, Any] = getattr(prometheus_client.REGISTRY, "_collector_to_names", {})
    registered = list(collectors.copy())
    if collector not in registered:
        return set()
    if collector is not _COLLECTOR and _COLLECTOR in registered:
        return None
    if any(type(other).__module__.startswith(OTEL_EXPORTER) for other in registered):
        return None
    return {name for name, other in names.copy().items() if other is not collector}


def _family(metric: Metric, series: Series) -> Family:
    labels = [
        name
        for label in metric.labels
        for name in (_SERVICE_AND_METHOD if label == METHOD else (label,))
    ]
    expanded: Series = {}  # several paths may have one service and method
    for values, value in series.items():
        combine(metric, expanded, _values(metric, values), value)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for values, value in expanded.items():
            if isinstance(value, Histogram):
                names = [*map(floatToGoString, metric.bounds), "+Inf"]
                buckets = list(zip(names, accumulate(value.buckets), strict=True))
                histogram.add_metric(values, buckets, value.sum)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for values, value in expanded.items():
        if not isinstance(value, Histogram):
            family.add_metric(values, value)
    return family


def _values(metric: Metric, values: Labels) -> Labels:
    """Return the values of the labels, with the service and the method of a path apart."""
    expanded: list[str] = []
    for label, value in zip(metric.labels, values, strict=True):
        if label == METHOD:
            expanded += split_method(value)
        else:
            expanded.append(value)
    return tuple([value.encode(errors="replace").decode() for value in expanded])


def split_method(path: str) -> tuple[str, str]:
    """Split "/shop.Orders/Get" into the service and the method, as go-grpc-prometheus does.

    `OTHER` stays whole, as both.
    """
    if path == OTHER:
        return OTHER, OTHER
    service, slash, method = path.removeprefix("/").partition("/")
    return (service, method) if slash else ("unknown", "unknown")
