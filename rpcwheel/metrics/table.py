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

from rpcwheel.events import (
    CallbackFailed,
    CallSlow,
    ConnectionClosed,
    ConnectionDead,
    ConnectionReplaced,
    DeadLetterFailed,
    DeadlineExceededBeforeStart,
    DefaultResponseUsed,
    ExecutorRejected,
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackDropped,
    FailbackGaveUp,
    FailbackLeaseLost,
    FailbackLost,
    FailbackQueued,
    FailbackRejected,
    HeartbeatMissed,
    HedgeSent,
    IdleCloseSkipped,
    InstancePublished,
    InstancesRetained,
    InstanceWithdrawn,
    JournalFailed,
    JournalRecovered,
    RegistryFailed,
    RegistryRecovered,
    RetryScheduled,
    RetryStopped,
    StreamStalled,
    SubchannelUnhealthy,
    TaskFailed,
    TaskSlow,
)
from rpcwheel.rpc import NO_BUDGET
from rpcwheel.status.sections import SECTIONS
from rpcwheel.telemetry.call_counts import BOUNDS_S
from rpcwheel.timer.api import LATENESS_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.events import Event
    from rpcwheel.status.sections import RowMetric

MAX_SERIES: Final = 1000

DELIVERY_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)
"""Upper bounds of the buckets of the time until a queued call is delivered."""

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


def otel_name(metric: Metric) -> str | None:
    """Return OpenTelemetry's name of a metric, such as `rpcwheel.failback.queued`."""
    if metric.otel != "":
        return metric.otel
    name = metric.name.removeprefix("rpcwheel_").removesuffix("_seconds")
    component, _, rest = name.partition("_")
    if component in ("channel", "failback", "heartbeat", "journal", "registry", "server", "timer"):
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
    "Calls that servers accepted, also those that they refused because the deadline had passed.",
    otel="grpc.server.call.started",
)
SERVER_HANDLED: Final = Metric(
    "grpc_server_handled",
    "counter",
    (TYPE, METHOD, CODE),
    "Calls that servers served, by status.",
    otel="rpcwheel.server.call.ended",
)
SERVER_SECONDS: Final = Metric(
    "grpc_server_handling_seconds",
    "histogram",
    (TYPE, METHOD),
    "Time from the beginning of a handler to its end.",
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


class FromEvent(NamedTuple):
    """A metric that counts events of one class, or adds up a field of them."""

    metric: Metric
    event: type[Event]
    fields: tuple[str, ...]
    """The fields of the event that have the values of the labels."""
    amount: str = ""
    """The field with the number to add, or for a histogram the seconds; "": 1."""
    only: Callable[[Event], bool] | None = None
    """Which events count."""


def _count(
    name: str,
    event: type[Event],
    labels: dict[str, str],
    text: str,
    *,
    amount: str = "",
    only: Callable[[Event], bool] | None = None,
) -> FromEvent:
    metric = Metric(f"rpcwheel_{name}", "counter", tuple(labels), text)
    return FromEvent(metric, event, tuple(labels.values()), amount, only)


def _is_throttled(event: Event) -> bool:
    return isinstance(event, RetryStopped) and event.reason == NO_BUDGET.reason


_METHOD = {METHOD: "method"}
_QUEUE = {"queue": "name"}
_TARGET = {"target": "target"}
_REGISTRY = {"registry": "registry"}
_JOURNAL = {"journal": "journal"}
_SERVICE = {"registry": "registry", SERVICE: "service"}
_TIMER = {"timer": "timer"}

DELIVERY_SECONDS: Final = Metric(
    "rpcwheel_failback_delivery_seconds",
    "histogram",
    tuple(_QUEUE),
    "Time from the first attempt of a queued call to its delivery.",
    DELIVERY_BOUNDS_S,
)

EVENTS: Final = (
    _count(
        "retries",
        RetryScheduled,
        _METHOD,
        "Retries that were planned. Not all begin: a call may be canceled while it waits.",
    ),
    _count(
        "retries_throttled",
        RetryStopped,
        _METHOD,
        "Retries that were not made because the retry budget was used up.",
        only=_is_throttled,
    ),
    _count("hedges", HedgeSent, _METHOD, "Attempts that hedging sent before earlier ones ended."),
    _count(
        "default_responses", DefaultResponseUsed, _METHOD, "Failed calls with a default response."
    ),
    _count(
        "slow_calls",
        CallSlow,
        {METHOD: "method", "side": "side"},
        "Calls that took longer than slow_call_threshold.",
    ),
    _count("streams_stalled", StreamStalled, _METHOD, "Streams ended by message_timeout."),
    _count(
        "deadlines_exceeded_before_start",
        DeadlineExceededBeforeStart,
        _METHOD,
        "Calls that a server refused because their deadline had passed. Of calls without a request "
        "stream, gRPC drops most before, and no server metric shows them.",
    ),
    _count(
        "callbacks_failed",
        CallbackFailed,
        {},
        "Callbacks, predicates and wait objects of the program that raised an exception.",
    ),
    _count("failback_queued", FailbackQueued, _QUEUE, "Calls that failed and were queued."),
    _count(
        "failback_attempts_failed",
        FailbackAttemptFailed,
        _QUEUE,
        "Background attempts that failed and are followed by another one.",
    ),
    _count("failback_delivered", FailbackDelivered, _QUEUE, "Queued calls that succeeded."),
    FromEvent(
        DELIVERY_SECONDS,
        FailbackDelivered,
        tuple(_QUEUE.values()),
        "waited_s",
    ),
    _count("failback_gave_up", FailbackGaveUp, _QUEUE, "Queued calls that were given up."),
    _count(
        "failback_dropped",
        FailbackDropped,
        _QUEUE,
        'Calls that failed and were dropped, because the queue was full (overflow="drop").',
    ),
    _count(
        "failback_rejected",
        FailbackRejected,
        _QUEUE,
        "Calls that failed and were not queued, whose caller got FailbackFull or FailbackClosed.",
    ),
    _count(
        "failback_lost",
        FailbackLost,
        _QUEUE,
        "Queued calls that were not delivered before the queue, timer, loop or process ended, or "
        "that a journal has lost.",
        amount="count",
    ),
    _count(
        "failback_dead_letters_failed",
        DeadLetterFailed,
        _QUEUE,
        "Calls whose dead_letter callback raised an exception.",
    ),
    _count(
        "failback_leases_lost",
        FailbackLeaseLost,
        {"queue": "name", "journal": "journal"},
        "Calls of a journal whose lease ended during an attempt; others may attempt them too.",
        amount="count",
    ),
    _count(
        "journal_failures",
        JournalFailed,
        _JOURNAL,
        "Outages of a journal, in which failed calls are not queued.",
    ),
    _count("journal_recoveries", JournalRecovered, _JOURNAL, "Ends of outages of a journal."),
    _count("heartbeats_missed", HeartbeatMissed, _TARGET, "Heartbeats without an answer in time."),
    _count("connections_dead", ConnectionDead, _TARGET, "Connections declared dead."),
    _count(
        "connections_replaced",
        ConnectionReplaced,
        _TARGET,
        "Connections that a channel replaced by a new one.",
    ),
    _count(
        "connections_closed_idle",
        ConnectionClosed,
        {"reason": "reason"},
        "Connections that a server closed, by the limit that they exceeded.",
    ),
    _count(
        "idle_closes_skipped",
        IdleCloseSkipped,
        {"reason": "reason"},
        "Idle connections that a server did not close, by reason.",
    ),
    _count(
        "ejections",
        SubchannelUnhealthy,
        {"channel": "channel"},
        "Subchannels that were taken out of use because they failed.",
    ),
    _count(
        "registry_failures",
        RegistryFailed,
        {"registry": "registry", "request": "request"},
        "Requests to a registry that failed.",
    ),
    _count("registry_recoveries", RegistryRecovered, _REGISTRY, "Ends of outages of a registry."),
    _count(
        "registry_published",
        InstancePublished,
        {"registry": "registry", SERVICE: "service", "again": "again"},
        "Instances that were published. Label again: why it was published again, or empty.",
    ),
    _count("registry_withdrawn", InstanceWithdrawn, _SERVICE, "Instances that were withdrawn."),
    _count(
        "registry_retained",
        InstancesRetained,
        _SERVICE,
        "Times that instances were kept that a registry had lost, perhaps with its data.",
    ),
    _count("timer_tasks_failed", TaskFailed, _TIMER, "Tasks that raised an exception."),
    _count("timer_tasks_slow", TaskSlow, _TIMER, "Tasks that blocked the timer's thread."),
    _count(
        "executor_rejections",
        ExecutorRejected,
        _TIMER,
        "Tasks that an executor, a timer or an event loop did not accept.",
    ),
)

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

_BY_EVENT: Final = {source.event: source.metric for source in EVENTS}
LATE_BEFORE_START: Final = _BY_EVENT[DeadlineExceededBeforeStart]
REPLACED: Final = _BY_EVENT[ConnectionReplaced]

METRICS: Final = (*CALLS, *(source.metric for source in EVENTS), *COMPONENTS)
"""All metrics."""
