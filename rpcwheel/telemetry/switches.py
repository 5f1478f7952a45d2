"""Which packages for metrics and traces are installed, and which the environment allows.

`RPCWHEEL_METRICS=off` keeps metrics and traces off; `prometheus` or `otel` allows metrics for only
one of the two. `RPCWHEEL_TRACES=off` keeps traces off.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from typing import Final

METRICS_VARIABLE: Final = "RPCWHEEL_METRICS"
TRACES_VARIABLE: Final = "RPCWHEEL_TRACES"

SINKS: Final = {"prometheus": "prometheus_client", "otel": "opentelemetry.metrics"}
"""By the value of `METRICS_VARIABLE`, the module that it needs."""

TRACE_MODULE: Final = "opentelemetry.trace"

_LOG: Final = logging.getLogger("rpcwheel")


@cache
def metric_sinks() -> tuple[str, ...]:
    """Return the keys of `SINKS` that are installed and allowed. Read once in a process."""
    if is_off(METRICS_VARIABLE):
        return ()
    wanted = _value(METRICS_VARIABLE)
    if wanted and wanted not in SINKS:
        _LOG.warning(
            "%s=%s is not known and has no effect; it may be off, %s",
            METRICS_VARIABLE,
            ascii(wanted),
            " or ".join(SINKS),
        )
        wanted = ""
    return tuple(
        name for name, module in SINKS.items() if wanted in ("", name) and is_installed(module)
    )


def traces_allowed() -> bool:
    """Return whether OpenTelemetry's traces are installed and allowed."""
    return not (is_off(METRICS_VARIABLE) or is_off(TRACES_VARIABLE)) and is_installed(TRACE_MODULE)


def is_off(variable: str) -> bool:
    """Return whether a variable of the environment says "off", or what others use for it."""
    return _value(variable) in {"off", "0", "false", "no", "none"}


def _value(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()


def is_installed(module: str) -> bool:
    """Return whether a module can be imported; many packages share `opentelemetry`."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no such namespace; a module that a test has made
        return False
