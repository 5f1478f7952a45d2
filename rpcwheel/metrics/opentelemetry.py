"""Metrics for OpenTelemetry, through its API (`rpcwheel[otel]`).

Without an SDK, the API does nothing. Counters and gauges are observable instruments: they are read
when the SDK collects. Only durations are recorded, on a worker thread.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Final

from opentelemetry import metrics
from opentelemetry.metrics import Meter, Observation

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.events import FailbackDelivered, add_sink, remove_sink
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import Histogram

from .readings import read, start_counting
from .table import (
    ATTEMPT_SECONDS,
    ATTEMPT_STARTED,
    CLIENT_SECONDS,
    CODE,
    DELIVERY_SECONDS,
    METHOD,
    METRICS,
    SERVER_SECONDS,
    SERVER_STARTED,
    TYPE,
    otel_name,
    otel_unit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, MeterProvider

    from rpcwheel.events import Event
    from rpcwheel.telemetry.call_counts import MethodCounts

    from .readings import Labels, Series
    from .table import Metric

MAX_QUEUED: Final = 256
"""Durations that wait until a worker records them."""

BY_A66: Final = (ATTEMPT_STARTED, SERVER_STARTED)
"""Counters of gRFC A66. `grpc.target` is not known."""

QUEUE: Final = "rpcwheel.queue"

SERVER_ERRORS: Final = frozenset(
    ["UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"]
)
"""The codes that are errors of a server, by the semantic conventions of gRPC."""


def start(provider: MeterProvider | None = None) -> Callable[[], None]:
    """Make the instruments, and begin to count.

    Args:
        provider: None: the global one, also if the program sets it later.

    Raises:
        ImportError: The API is too old.

    Returns:
        A function after which no durations are recorded. The other instruments stay; to remove
        them, shut down the provider.
    """
    if "explicit_bucket_boundaries_advisory" not in signature(Meter.create_histogram).parameters:
        raise ImportError("opentelemetry-api is too old; install rpcwheel[otel]")
    start_counting()
    meter = metrics.get_meter("rpcwheel", sys.modules["rpcwheel"].__version__, provider)
    recorder = _Recorder(meter)
    _observe(meter, _Reading(recorder))
    add_sink(recorder.delivered)
    counts = components.count_calls()
    listeners = (
        (counts.client, partial(recorder.ended, CLIENT_SECONDS)),
        (counts.attempts, partial(recorder.ended, ATTEMPT_SECONDS)),
        (counts.server, partial(recorder.ended, SERVER_SECONDS)),
    )
    for side, listener in listeners:
        side.listeners += (listener,)

    def stop() -> None:
        remove_sink(recorder.delivered)
        for side, listener in listeners:
            side.listeners = tuple(other for other in side.listeners if other is not listener)

    return stop


class _Recorder:
    """Records durations. SDKs take locks, so no thread that ends a call does it, but a worker."""

    def __init__(self, meter: Meter) -> None:
        self._histograms = {
            metric: meter.create_histogram(
                otel_name(metric) or metric.name,
                otel_unit(metric),
                metric.help,
                explicit_bucket_boundaries_advisory=metric.bounds,
            )
            for metric in (*ATTRIBUTES, DELIVERY_SECONDS)
        }
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin without durations, in a forked child: the parent records them."""
        self._queue: deque[tuple[Metric, str, str, float]] = deque()
        self._is_scheduled = False

    def ended(self, metric: Metric, counts: MethodCounts, code: str, duration_ns: int) -> None:
        """Record the duration of a call or an attempt. Waits for no lock of an SDK."""
        self._put((metric, counts.method, code, duration_ns / 1e9))

    def delivered(self, event: Event) -> None:
        """Record the time until a delivery. A sink."""
        if isinstance(event, FailbackDelivered):
            self._put((DELIVERY_SECONDS, event.name, "", event.waited_s))

    def _put(self, entry: tuple[Metric, str, str, float]) -> None:
        self._queue.append(entry)
        if len(self._queue) >= MAX_QUEUED and not self._is_scheduled:
            self._is_scheduled = True
            EXECUTOR.submit(self, self.record)

    def record(self) -> None:
        """Record what is queued. Not in a finalizer or a signal handler."""
        self._is_scheduled = False
        while self._queue:
            try:
                metric, name, code, seconds = self._queue.popleft()
            except IndexError:  # another thread was faster
                return
            make = ATTRIBUTES.get(metric)
            attributes = make(name.removeprefix("/"), code) if make else {QUEUE: name}
            self._histograms[metric].record(seconds, attributes)


class _Reading:
    """The values of all metrics. They are read again when one is asked for the second time."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._series: dict[Metric, Series] = {}
        self._asked: set[Metric] = set()

    def observe(self, metric: Metric, _: CallbackOptions) -> Iterable[Observation]:
        if not self._series or metric in self._asked:
            self._recorder.record()
            self._series = dict(read())
            self._asked = set()
        self._asked.add(metric)
        for values, value in self._series.get(metric, {}).items():
            if not isinstance(value, Histogram):
                yield Observation(value, _attributes(metric, values))


def _observe(meter: Meter, reading: _Reading) -> None:
    """Make the counters and gauges; what can be added up is an up-down counter."""
    for metric in METRICS:
        name = otel_name(metric)
        if name is None or metric.kind == "histogram":
            continue
        if metric.kind == "counter":
            make: Callable[..., object] = meter.create_observable_counter
        elif metric.combine == "sum":
            make = meter.create_observable_up_down_counter
        else:
            make = meter.create_observable_gauge
        make(name, [partial(reading.observe, metric)], otel_unit(metric), metric.help)


def _attributes(metric: Metric, values: Labels) -> dict[str, str]:
    method = "grpc.method" if metric in BY_A66 else "rpc.method"
    names = {METHOD: method, CODE: "rpc.response.status_code", TYPE: "rpcwheel.call_type"}
    attributes = {}
    for label, value in zip(metric.labels, values, strict=True):
        name = names.get(label, f"rpcwheel.{label.removeprefix('grpc_')}")
        attributes[name] = value.removeprefix("/") if label == METHOD else value
    return attributes


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


ATTRIBUTES: Final = {
    CLIENT_SECONDS: _rpc_attributes,
    ATTEMPT_SECONDS: _attempt_attributes,
    SERVER_SECONDS: _server_attributes,
}
"""The attributes of durations, made of the method and the code."""
