"""All metrics: names, kinds, labels, and where their values come from.

Each metric has a name for Prometheus and one for OpenTelemetry. Metrics of calls have the names
that operators know: those of go-grpc-prometheus, and those of OpenTelemetry's semantic conventions
and of gRFC A66. All others are `rpcwheel_*`; OpenTelemetry's names of these are `rpcwheel.*`,
with a dot after the component, and without the unit.

The values of labels are bounded: names that the program gives (queues, targets, registries),
methods, states. Peers, instance ids and texts of errors are never labels. A metric has at most
`MAX_SERIES` combinations of values; what is beyond is counted as `_OTHER`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rpcwheel.events import events
from rpcwheel.status.sections import SECTIONS
from rpcwheel.telemetry.call_counts import BOUNDS_S
from rpcwheel.timer.api import LATENESS_BOUNDS_S

if TYPE_CHECKING:
    from rpcwheel.events.events import Count, Event
    from rpcwheel.status.sections import RowMetric

MAX_SERIES: Final = 1000

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One row of the table."""

    name: str
    """The name for Prometheus, without `_total` of counters."""
    kind: Kind
    labels: tuple[str, ...]
    """`METHOD` stands for `grpc_service` and `grpc_method`; OpenTelemetry has `rpc.method`."""
    help: str
    bounds: tuple[float, ...] = ()
    """The upper bounds of the buckets of a histogram but the last."""
    otel: str | None = ""
    """OpenTelemetry's name; "": made from `name`; None: not for OpenTelemetry."""
    combine: Literal["sum", "max", "min"] = "sum"
    """What becomes of the values of several components with the same labels."""


OWN_NAMESPACE: Final = frozenset({
    "channel", "failback", "heartbeat", "journal", "limit", "registry", "server", "timer",
})  # fmt: skip
"""Components whose name OpenTelemetry's names have before a dot."""


def otel_name(metric: Metric) -> str | None:
    """Return OpenTelemetry's name of a metric, such as `rpcwheel.failback.queued`."""
    if metric.otel != "":
        return metric.otel
    name = metric.name.removeprefix("rpcwheel_").removesuffix("_seconds")
    component, _, rest = name.partition("_")
    if rest and component in OWN_NAMESPACE:
        name = f"{component}.{rest}"
    return f"rpcwheel.{name}"


def otel_unit(metric: Metric) -> str:
    """Return OpenTelemetry's unit: `s`, or what is counted in braces."""
    if metric.name.endswith("_seconds"):
        return "s"
    return {CLIENT_STARTED: "{call}", SERVER_STARTED: "{call}", ATTEMPT_STARTED: "{attempt}"}.get(
        metric, ""
    )


METHOD: Final = "method"
SERVICE: Final = "grpc_service"
"""A service in a registry. (`service` is a label that Kubernetes service discovery adds.)"""
TYPE: Final = "grpc_type"
CODE: Final = "grpc_code"

# --- Calls ---

CLIENT_STARTED: Final = Metric(
    "grpc_client_started",
    "counter",
    (TYPE, METHOD),
    "Calls that clients began.",
    otel="rpcwheel.client.call.started",
)
CLIENT_HANDLED: Final = Metric(
    "grpc_client_handled",
    "counter",
    (TYPE, METHOD, CODE),
    "Calls of clients that ended, by the status that the caller got. A call that is retried is one "
    "call.",
    otel="rpcwheel.client.call.ended",
)
CLIENT_SECONDS: Final = Metric(
    "grpc_client_handling_seconds",
    "histogram",
    (TYPE, METHOD),
    "Time from the beginning of a call to its end, with all attempts and the waits between them.",
    BOUNDS_S,
    "rpc.client.call.duration",
)
ATTEMPT_STARTED: Final = Metric(
    "grpc_client_attempt_started",
    "counter",
    (TYPE, METHOD),
    "Attempts that clients began: first attempts, retries, hedges and deliveries of failback.",
    otel="grpc.client.attempt.started",
)
ATTEMPT_SECONDS: Final = Metric(
    "grpc_client_attempt_duration_seconds",
    "histogram",
    (TYPE, METHOD, CODE),
    "Time from the beginning of an attempt to its end, by the status of the attempt.",
    BOUNDS_S,
    "grpc.client.attempt.duration",
)
SERVER_STARTED: Final = Metric(
    "grpc_server_started",
    "counter",
    (TYPE, METHOD),
    "Calls that servers accepted, also those that they refused.",
    otel="grpc.server.call.started",
)
SERVER_HANDLED: Final = Metric(
    "grpc_server_handled",
    "counter",
    (TYPE, METHOD, CODE),
    "Calls that servers served or refused, by status.",
    otel="rpcwheel.server.call.ended",
)
SERVER_SECONDS: Final = Metric(
    "grpc_server_handling_seconds",
    "histogram",
    (TYPE, METHOD),
    "Time from the beginning of a handler to its end; 0 for a call that was refused.",
    BOUNDS_S,
    "rpc.server.call.duration",
)

CALLS: Final = (
    CLIENT_STARTED,
    CLIENT_HANDLED,
    CLIENT_SECONDS,
    ATTEMPT_STARTED,
    ATTEMPT_SECONDS,
    SERVER_STARTED,
    SERVER_HANDLED,
    SERVER_SECONDS,
)

# --- Counted from events ---


class EventMetric(NamedTuple):
    """A metric, and the events that it counts."""

    metric: Metric
    event: type[Event]
    source: Count
    fields: tuple[str, ...]
    """The fields of the event that have the values of the labels."""


def _of_event(event: type[Event], source: Count) -> EventMetric:
    kind: Kind = "histogram" if source.bounds else "counter"
    labels = event.labels if source.labels is None else source.labels
    pairs = [label.partition("=") for label in labels.split()]
    fields = {label: field or label for label, _, field in pairs}
    metric = Metric(f"rpcwheel_{source.name}", kind, tuple(fields), source.help, source.bounds)
    return EventMetric(metric, event, source, tuple(fields.values()))


EVENTS: Final = tuple(
    _of_event(event, source)
    for event in vars(events).values()
    if isinstance(event, type) and issubclass(event, events.Event)
    for source in (event.metric, event.histogram)
    if source is not None
)
"""The metrics that the classes of events declare, in their order."""

# --- Read from the components ---


def _metric(source: RowMetric) -> Metric:
    name, labels = f"rpcwheel_{source.name}", tuple(source.labels)
    if source.kind == "histogram":  # of lateness; OpenTelemetry has no observable histograms
        return Metric(name, source.kind, labels, source.help, LATENESS_BOUNDS_S, None)
    return Metric(name, source.kind, labels, source.help, combine=source.combine)


COMPONENTS: Final = {
    _metric(source): (source.path or section.path, source)
    for section in SECTIONS
    for source in section.metrics
}
"""The metrics of components, where their rows are, and what is read of a row."""

_BY_NAME: Final = {source.name: metric for metric, _, source, _ in EVENTS}
LATE_BEFORE_START: Final = _BY_NAME["deadlines_exceeded_before_start"]
REPLACED: Final = _BY_NAME["connections_replaced"]
DELIVERY_SECONDS: Final = _BY_NAME["failback_delivery_seconds"]

METRICS: Final = (*CALLS, *(source.metric for source in EVENTS), *COMPONENTS)
"""All metrics."""
