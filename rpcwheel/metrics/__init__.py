"""Metrics for Prometheus and OpenTelemetry, switched on when their packages are installed.

The first timer, channel, queue, server or registry of the process starts them. The environment
variable `RPCWHEEL_METRICS` limits that: `off`, `prometheus` or `otel`. Nothing else is needed::

    pip install 'rpcwheel[prometheus]'
    prometheus_client.start_http_server(9090)  # in the program, as for its own metrics

`docs/observability.md` has the table of all metrics. `python -m rpcwheel.metrics` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel import tracing
from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .prometheus import Collector
else:
    __getattr__, __dir__ = lazy_names(__name__, {".prometheus": "Collector"})

__all__ = ["Collector", "start"]


def start(sinks: Iterable[str]) -> None:
    """Start the metrics. `rpcwheel.live` calls this, once.

    Args:
        sinks: "prometheus" registers a `Collector` in `prometheus_client.REGISTRY`; "otel" makes
            instruments with the global meter provider, and switches traces on.
    """
    from .readings import start_counting

    start_counting()
    if "prometheus" in sinks:
        from . import prometheus

        prometheus.start()
    if "otel" in sinks:
        from . import opentelemetry

        opentelemetry.start()
        tracing.start()
