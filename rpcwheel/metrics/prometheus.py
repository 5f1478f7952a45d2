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
from typing import TYPE_CHECKING, Final

import prometheus_client
from prometheus_client import exposition as formats
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from rpcwheel.call_counts import Histogram

from .readings import read, start_counting
from .table import METHOD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric as Family

    from .readings import Labels, Series
    from .table import Metric

_SERVICE_AND_METHOD: Final = ("grpc_service", "grpc_method")


class Collector(prometheus_client.registry.Collector):
    """Reads all metrics of rpcwheel in this process at each scrape.

    The first one begins to count, if `RPCWHEEL_METRICS` has prevented that.
    """

    def __init__(self) -> None:
        start_counting()

    def collect(self) -> Iterator[Family]:
        """Yield the metrics that have values, but none whose name another collector has."""
        taken = _names_of_others(self)
        for metric, series in read():
            if metric.name not in taken and series:
                yield _family(metric, series)

    def describe(self) -> Sequence[Family]:
        """Return nothing, so that no name that the program registers later is refused."""
        return ()


def start() -> None:
    """Register a `Collector` in `prometheus_client.REGISTRY`."""
    prometheus_client.REGISTRY.register(_COLLECTOR)


def exposition(accept: str) -> tuple[bytes, str]:
    """Return all metrics of `prometheus_client.REGISTRY`, and ours, in Prometheus' text format.

    Args:
        accept: The header `Accept` of the request, which chooses between two text formats.

    Returns:
        The text, and its content type.
    """
    encode, content_type = formats.choose_encoder(accept)
    registry = prometheus_client.REGISTRY
    text = encode(registry)
    if not _is_registered(_COLLECTOR):
        own = prometheus_client.CollectorRegistry()
        own.register(_COLLECTOR)
        text = text.removesuffix(b"# EOF\n") + encode(own)
    return text, content_type


_COLLECTOR: Final = Collector()


def _is_registered(collector: Collector) -> bool:
    return collector in getattr(prometheus_client.REGISTRY, "_collector_to_names", {collector: ()})


def _names_of_others(collector: Collector) -> frozenset[str]:
    """Return the names that other collectors have, such as another library's RPC metrics.

    A name that appears twice would make the whole scrape fail.
    """
    known = getattr(prometheus_client.REGISTRY, "_names_to_collectors", {})
    return frozenset(name for name, other in known.copy().items() if other is not collector)


def _family(metric: Metric, series: Series) -> Family:
    labels = [
        name
        for label in metric.labels
        for name in (_SERVICE_AND_METHOD if label == METHOD else (label,))
    ]
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for values, value in series.items():
            if isinstance(value, Histogram):
                names = [*(f"{bound:.15g}" for bound in metric.bounds), "+Inf"]
                buckets = list(zip(names, accumulate(value.buckets), strict=True))
                histogram.add_metric(_values(metric, values), buckets, value.sum)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for values, value in series.items():
        if not isinstance(value, Histogram):
            family.add_metric(_values(metric, values), value)
    return family


def _values(metric: Metric, values: Labels) -> list[str]:
    """Return the values of the labels, with the service and the method of a path apart."""
    expanded: list[str] = []
    for label, value in zip(metric.labels, values, strict=True):
        if label == METHOD:
            expanded += split_method(value)
        else:
            expanded.append(value)
    return expanded


def split_method(path: str) -> tuple[str, str]:
    """Split "/shop.Orders/Get" into the service and the method, as go-grpc-prometheus does."""
    service, slash, method = path.removeprefix("/").rpartition("/")
    return (service, method) if slash else ("unknown", path)
