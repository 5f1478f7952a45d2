"""Snapshots of what runs in this process, for metrics and the live view.

`snapshot()` describes all components of the process. `StatusServer` serves that over HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

exposition: Callable[[str], tuple[bytes, str]] | None = None
"""Returns the metrics for the header `Accept` of a request, and their content type.

`rpcwheel.metrics.prometheus.start` sets it; None: there are no metrics for Prometheus.
"""
