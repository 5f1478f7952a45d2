"""The sections of the live view: tables with their columns, and the metrics of their rows.

The page, `rpcwheel top` and the metrics of components are made from `SECTIONS`. A view has a
function for each `Format`. This module knows the components by the names of their fields only, and
imports none of them.

A field is a path of names that begins in a row, such as `stats.pending`. A row of an inner table,
such as `queues.entries`, has the row that contains it as `outer`.
"""

from __future__ import annotations

import json
from typing import Final, Literal, NamedTuple


class Format(NamedTuple):
    """How a view makes a cell from the values of a column's fields."""

    name: str
    style: Literal["", "number", "text"] = ""
    """Numbers are aligned to the right; a text may take several lines."""


TEXT: Final = Format("text")
LONG_TEXT: Final = Format("text", "text")
NUMBER: Final = Format("text", "number")
FLAG: Final = Format("flag")
COUNT: Final = Format("count", "number")
"""With two fields: the count of the limit."""
SECONDS: Final = Format("seconds", "number")
"""With two fields: the time of the limit."""
QUANTILE: Final = Format("quantile", "number")
MEAN: Final = Format("mean", "number")
"""Of a `Lateness`."""
AGE: Final = Format("age", "number")
"""The time since a time of the wall clock."""
SIZE: Final = Format("size", "number")
"""The number of rows of an inner table; a second field says whether there is one."""
LIST: Final = Format("list", "text")
"""The different texts of all fields, some of which may be lists."""
CODES: Final = Format("codes", "text")
TASK: Final = Format("task", "text")
"""A name, and the seconds that it took."""


class Column(NamedTuple):
    """A column of a section."""

    heading: str
    fields: tuple[str, ...]
    format: Format
    page_only: bool
    """Whether it is left out on a terminal, which is narrow."""


class RowMetric(NamedTuple):
    """A metric that is read from the rows of a section."""

    name: str
    """The name for Prometheus, without the prefix."""
    help: str
    labels: dict[str, str]
    """The fields with the values of the labels. `FIELD`: the name of the field that is read."""
    fields: tuple[str, ...] = ()
    """What is read, each field into a series of its own. Without fields, rows are counted."""
    combine: Literal["sum", "max", "min"] = "sum"
    """What becomes of the values of several rows with the same labels."""
    kind: Literal["counter", "gauge", "histogram"] = "gauge"
    none: float | None = None
    """What stands for a value of None; None: such a row has no series."""
    path: str = ""
    """Where the rows are, if they are not those of the section."""


class Section(NamedTuple):
    """A table of the live view."""

    title: str
    empty: str
    """What is said in place of a table without rows."""
    path: str
    """The field of `Status` with the rows; of an inner table, also its field in the outer row."""
    columns: tuple[Column, ...]
    metrics: tuple[RowMetric, ...] = ()
    joined: bool = False
    """An outer row without inner rows has a row too, and its problem is that of its inner rows."""


RATE: Final = "rate"
"""The field that views add to the rows of calls: calls per second since the last status."""

FIELD: Final = ""


def _column(heading: str, style: Format = TEXT, *fields: str, page_only: bool = False) -> Column:
    return Column(heading, fields or (heading,), style, page_only)


def _extra(heading: str, style: Format = TEXT, *fields: str) -> Column:
    return _column(heading, style, *fields, page_only=True)


_TIMER = {"timer": "name"}
_QUEUE = {"queue": "name"}
_JOURNAL = {"journal": "url"}
_DEPTH = {"journal": "outer.url", "queue": "queue"}
_SERVICE = {"registry": "outer.url", "grpc_service": "service"}
_LIMIT = {"server": "name"}
_METHOD = {"method": "labeled_method"}

# Several columns in a line, as they are read best.
# fmt: off
SECTIONS: Final = (
    Section("Calls", "no calls yet", "methods", (
        _column("side"), _column("method"), _extra("kind"), _column("per s", NUMBER, RATE),
        _column("started", COUNT), _column("in flight", COUNT, "in_flight"),
        _column("p50", QUANTILE, "p50_s"), _column("p99", QUANTILE, "p99_s"),
        _column("ended", CODES, "codes"),
    )),
    Section("Timers", "no timers", "timers", (
        _column("timer", TEXT, "name"), _column("queue"),
        _column("pending", COUNT, "stats.pending"), _extra("started", COUNT, "stats.started"),
        _column("fired", COUNT, "stats.fired"), _extra("canceled", COUNT, "stats.cancelled"),
        _column("failed", COUNT, "stats.failed"), _column("late: mean", MEAN, "stats.lateness"),
        _column("late: max", SECONDS, "stats.lateness.max_s"),
        _extra("slowest task", TASK, "stats.slowest_task", "stats.slowest_task_s"),
    ), (
        RowMetric("timer_pending", "Timeouts that are pending.", _TIMER, ("stats.pending",)),
        RowMetric("timer_started",
            "Timeouts that were started.",
            _TIMER, ("stats.started",), kind="counter"),
        RowMetric("timer_fired",
            "Timeouts whose task was started.",
            _TIMER, ("stats.fired",), kind="counter"),
        RowMetric("timer_canceled",
            "Timeouts that were canceled.",
            _TIMER, ("stats.cancelled",), kind="counter"),
        RowMetric("timer_lateness_seconds",
            "Time between the deadline of a timeout and the start of its task.",
            _TIMER, ("stats.lateness",), kind="histogram"),
        RowMetric("timer_max_lateness_seconds",
            "The longest lateness since the timer was made.",
            _TIMER, ("stats.lateness.max_s",), "max"),
    )),
    Section("Failback queues", "no failback queues", "queues", (
        _column("queue", TEXT, "name"), _column("pending", COUNT, "pending", "max_pending"),
        _column("oldest", SECONDS, "oldest_age_s"), _extra("attempts", COUNT, "stats.attempts"),
        _column("delivered", COUNT, "stats.redelivered"),
        _column("gave up", COUNT, "stats.gave_up"), _column("lost", COUNT, "stats.lost"),
        _column("dropped", COUNT, "stats.dropped"), _extra("rejected", COUNT, "stats.rejected"),
    ), (
        RowMetric("failback_pending",
            "Calls that are queued in this process; with a journal, those that it attempts or is "
            "about to.",
            _QUEUE, ("stats.pending",)),
        RowMetric("failback_max_pending",
            "The most calls that a queue takes.",
            _QUEUE, ("max_pending",)),
        RowMetric("failback_oldest_age_seconds",
            "Time since the first attempt of the oldest queued call.",
            _QUEUE, ("oldest_age_s",), "max", none=0.0),
    )),
    Section("Queued calls", "no queued calls", "queues.entries", (
        _column("queue", TEXT, "outer.name"), _column("call", TEXT, "function"),
        _column("age", SECONDS, "age_s"), _column("attempts", COUNT),
        _column("next in", SECONDS, "next_attempt_s"), _column("last error", LONG_TEXT, "error"),
    )),
    Section("Journals", "no journals", "journals.depths", (
        _column("journal", TEXT, "outer.url"), _column("queue"), _column("target"),
        _column("waiting", COUNT), _column("taken", COUNT), _column("dead", COUNT),
        _column("oldest", SECONDS, "oldest_s"),
        _extra("unstored results", COUNT, "outer.unstored_results"),
    ), (
        RowMetric("journal_up",
            "1 if the last request to the journal succeeded, else 0.",
            _JOURNAL, ("up",), "min", path="journals"),
        RowMetric("journal_calls",
            "Calls in the journal, of all processes that use it, as last counted. Label state: "
            "waiting, taken (by a process that attempts them) or dead.",
            {**_DEPTH, "state": FIELD}, ("waiting", "taken", "dead")),
        RowMetric("journal_oldest_age_seconds",
            "Time since the oldest call in the journal that is not dead was stored.",
            _DEPTH, ("oldest_s",), "max"),
        RowMetric("journal_unstored_results",
            "Results of attempts that the journal has not accepted yet.",
            _JOURNAL, ("unstored_results",), path="journals"),
    ), joined=True),
    Section("Channels", "no channels", "channels", (
        _column("target"), _column("state"), _column("calls", COUNT), _extra("connection", COUNT),
        _column("subchannels", SIZE, "subchannels", "balanced"),
    ), (
        RowMetric("channel_calls",
            "Calls in flight on channels of rpcwheel. (A channel of gRPC that a kit intercepts "
            "has none.)",
            {"channel": "target"}, ("calls",)),
    )),
    Section("Subchannels", "no subchannels", "channels.subchannels", (
        _column("channel", TEXT, "outer.target"), _column("id"), _column("address"),
        _column("state"), _extra("healthy", FLAG), _column("calls", COUNT),
        _column("weight", COUNT), _column("zone"),
    ), (
        RowMetric("subchannels",
            "Subchannels, by state: unhealthy, or that of gRPC, such as READY.",
            {"channel": "outer.target", "state": "health"}),
    )),
    Section("Heartbeats", "no heartbeats", "heartbeats", (
        _column("target"), _column("state"), _column("round trip", SECONDS, "rtt_s"),
        _column("silent for", SECONDS, "silence_s"), _column("missed", COUNT, "misses"),
        _extra("sent", COUNT), _extra("answered", COUNT), _column("replaced", COUNT),
        _column("serving", FLAG),
    ), (
        RowMetric("heartbeat_connections",
            "Connections with heartbeats, by state: alive, dead and so on.",
            {"state": "state"}),
        RowMetric("heartbeat_rtt_seconds",
            "Round trip of the last heartbeat that was answered.",
            {"target": "target"}, ("rtt_s",), "max"),
    )),
    Section("Server connections",
        "no server with an idle detector has connections", "connections", (
        _column("peer"), _extra("at", TEXT, "local_address"), _column("state"),
        _extra("since", AGE, "connected_at"), _column("idle", SECONDS, "idle_s"),
        _column("calls", COUNT), _extra("streams", COUNT),
        _column("calls so far", COUNT, "calls_total"),
        _column("identity", LIST, "tls_subject", "tls_names"),
        _column("user agent", LONG_TEXT, "user_agent"),
    ), (
        RowMetric("server_connections",
            "Connections of servers with an idle detector, by state.",
            {"state": "state"}),
    )),
    Section("Server limits", "no server limits", "limits", (
        _column("server", TEXT, "name"), _column("limit", COUNT), _column("running", COUNT),
        _column("streams", COUNT), _column("waiting", COUNT),
    ), (
        RowMetric("limit",
            "Handlers that a server runs at the same time at most; none if only methods have "
            "limits, or if the server has another executor.",
            _LIMIT, ("limit",)),
        RowMetric("limit_running",
            "Handlers that a server with a limit runs, without streams.",
            _LIMIT, ("running",)),
        RowMetric("limit_streams",
            "Streams that are open on a server with a limit.",
            _LIMIT, ("streams",)),
        RowMetric("limit_waiting",
            "Calls that wait until a server with a limit runs their handlers.",
            _LIMIT, ("waiting",)),
    )),
    Section("Refused calls", "no refused calls", "limits.refused", (
        _column("server", TEXT, "outer.name"), _column("criticality"), _column("reason"),
        _column("calls", COUNT),
    ), (
        RowMetric("limit_refused",
            "Calls that a server refused because of its limit. Label reason: waited, full, "
            "deadline, streams, short_deadline, rate or closed.",
            {"server": "outer.name", "criticality": "criticality", "reason": "reason"},
            ("calls",), kind="counter"),
    )),
    Section("Client limits", "no circuit breakers, throttles or limits of clients", "admissions", (
        _column("target"), _column("method"), _column("breaker"),
        _extra("throttled", NUMBER, "rejection"), _column("running", COUNT, "running", "limit"),
        _column("waiting", COUNT),
    ), (
        RowMetric("breakers",
            "Circuit breakers of a method, by state: closed, open, half_open, forced_open or "
            "disabled.",
            {**_METHOD, "state": "breaker"}, ("breakers",)),
        RowMetric("throttle_rejection",
            "The share of attempts of a method that the client does not send now; the highest.",
            _METHOD, ("rejection",), "max"),
        RowMetric("concurrency_running",
            "Attempts that run, of methods with a concurrency limit of the client.",
            _METHOD, ("running",)),
        RowMetric("concurrency_limit",
            "Attempts of a method that may run at the same time.",
            _METHOD, ("limit",)),
        RowMetric("concurrency_waiting",
            "Attempts that wait because of the concurrency limit of the client.",
            _METHOD, ("waiting",)),
    )),
    Section("Attempts not sent", "all attempts were sent", "admissions.not_sent", (
        _column("target", TEXT, "outer.target"), _column("method", TEXT, "outer.method"),
        _column("reason"), _column("calls", COUNT),
    ), (
        RowMetric("attempts_not_sent",
            "Attempts that the client has not sent. Label reason: breaker, forced, throttle, "
            "rate, concurrency or deadline.",
            {"method": "outer.labeled_method", "reason": "reason"}, ("calls",), kind="counter"),
    )),
    Section("Registries", "no registries", "registries", (
        _column("registry", TEXT, "url"), _column("answers", FLAG, "up"),
        _extra("registered", SIZE, "registrations"), _extra("followed", SIZE, "subscriptions"),
    ), (
        RowMetric("registry_up",
            "1 if the last request to the registry was answered, else 0.",
            {"registry": "url"}, ("up",), "min"),
    )),
    Section("Registered instances", "no registered instances", "registries.registrations", (
        _column("service"), _column("id"), _extra("address"), _column("state"),
        _column("lease", SECONDS, "lease_age_s", "outer.lease_ttl_s"),
    ), (
        RowMetric("registry_registrations",
            "Instances that this process publishes, by state: PUBLISHED, LOST and so on.",
            {**_SERVICE, "state": "state"}),
        RowMetric("registry_lease_age_seconds",
            "Time since the registry last confirmed an instance of this process; the longest.",
            _SERVICE, ("lease_age_s",), "max"),
    )),
    Section("Followed services", "no followed services", "registries.subscriptions", (
        _column("service"), _column("registry", TEXT, "outer.url"), _column("instances", COUNT),
        _column("source"), _extra("not confirmed for", SECONDS, "stale_s"),
    ), (
        RowMetric("registry_instances",
            "Known instances of a service that this process uses. Label source: live, stale or "
            "cache.",
            {**_SERVICE, "source": "source_or_none"}, ("instances",)),
        RowMetric("registry_stale_seconds",
            "Time since the registry last confirmed the known instances; 0 while it does.",
            _SERVICE, ("unconfirmed_s",), "max"),
    )),
    Section("Published servers", "no published servers", "publishers", (
        _column("services", LIST), _column("port", NUMBER), _column("state"),
    )),
)
# fmt: on


def page_sections() -> str:
    """Return what the page needs of `SECTIONS`, as JSON: tuples are arrays."""
    return json.dumps([section._replace(metrics=()) for section in SECTIONS])
