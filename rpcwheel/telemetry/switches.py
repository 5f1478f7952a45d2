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
    wanted = _known_value(METRICS_VARIABLE, *SINKS)
    names = tuple(
        name for name, module in SINKS.items() if wanted in ("", name) and is_installed(module)
    )
    if wanted and not names:
        _LOG.warning(
            "metrics stay off, because the package for %s=%s is not installed: "
            "pip install 'rpcwheel[%s]'",
            METRICS_VARIABLE,
            wanted,
            wanted,
        )
    return names


def traces_allowed() -> bool:
    """Return whether OpenTelemetry's traces are installed and allowed."""
    if is_off(METRICS_VARIABLE) or is_off(TRACES_VARIABLE) or not is_installed(TRACE_MODULE):
        return False
    _known_value(TRACES_VARIABLE)
    return True


def is_off(variable: str) -> bool:
    """Return whether a variable of the environment says "off", or what others use for it."""
    return _value(variable) in {"off", "0", "false", "no", "none"}


def _known_value(variable: str, *values: str) -> str:
    """Return the value of a variable that is not off; "" if it is not known, which is logged."""
    value = _value(variable)
    if value and value not in values:
        allowed = f"off, {' or '.join(values)}" if values else "off"
        _LOG.warning(
            "%s=%s is not known and has no effect; it may be %s", variable, ascii(value), allowed
        )
        return ""
    return value


def _value(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()


def is_installed(module: str) -> bool:
    """Return whether a module can be imported; many packages share `opentelemetry`."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no such namespace; a module that a test has made
        return False
