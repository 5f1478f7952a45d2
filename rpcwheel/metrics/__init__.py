"""Metrics for Prometheus and OpenTelemetry, switched on when their packages are installed.

The first timer, channel, queue, server or registry of the process starts them, for each of the two
packages that is installed. The environment variable `RPCWHEEL_METRICS` restricts them to one
(`prometheus` or `otel`) or none (`off`). Nothing else is needed::

    pip install 'rpcwheel[prometheus]'
    prometheus_client.start_http_server(9090)  # in the program, as for its own metrics

`docs/observability.md` has the table of all metrics. `python -m rpcwheel.metrics` prints it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from rpcwheel._lazy import lazy_names
from rpcwheel.telemetry.switches import SINKS, is_installed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .prometheus import Collector
else:  # on demand: `prometheus_client` may not be installed
    __getattr__, __dir__ = lazy_names(__name__, {".prometheus": "Collector"})

_LOG: Final = logging.getLogger("rpcwheel")

__all__ = ["start"]
if is_installed(SINKS["prometheus"]):  # otherwise a star import would raise
    __all__ += ["Collector"]


def start(sinks: Iterable[str]) -> None:
    """Start the metrics. `rpcwheel._autostart` calls this, once.

    Args:
        sinks: "prometheus" registers a `Collector` in `prometheus_client.REGISTRY`; "otel" makes
            instruments with the global meter provider. If one cannot be started, that is logged.
    """
    for sink in sinks:
        try:
            if sink == "prometheus":
                from . import prometheus

                prometheus.start()
            else:
                from . import opentelemetry

                opentelemetry.start()
        except ImportError as error:  # the installed package is too old
            _LOG.warning("metrics for %s stay off: %s", sink, error)
        except Exception:  # noqa: BLE001 - the program continues without it
            _LOG.exception("metrics for %s stay off", sink)
