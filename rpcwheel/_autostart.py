"""Starts metrics and traces when the first component of the process is made.

`rpcwheel/__init__.py` gives `start` to `rpcwheel.telemetry.components`. It is not in the package
`rpcwheel.metrics`, which would then be imported although metrics are off.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from rpcwheel.telemetry import switches

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG: Final = logging.getLogger("rpcwheel")


def start() -> None:
    """Import and start what is installed and allowed. Never raises."""
    for begin in (_start_metrics, _start_traces):
        _start_or_log(begin)


def _start_or_log(begin: Callable[[], None]) -> None:
    try:
        begin()
    except Exception:  # noqa: BLE001 - the program continues without it
        _LOG.exception("metrics or traces stay off, because they could not be started")


def _start_metrics() -> None:
    if sinks := switches.metric_sinks():
        from rpcwheel import metrics

        metrics.start(sinks)


def _start_traces() -> None:
    if switches.traces_allowed():
        from rpcwheel.telemetry import tracing

        tracing.start()
