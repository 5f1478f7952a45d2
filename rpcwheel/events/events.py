"""The events and their log lines.

An event is a frozen record of one occurrence. Fields that end with `_s` are seconds. `timer` and
`name` are names that the user gave; `task` and `function` are labels such as `shop.orders.push`;
`method` is gRPC's full method name; `registry` is the registry's URL without the password;
`instance` is the id of an instance. An `error` is the exception itself with its traceback, so a
sink that keeps the event also keeps the frames.

`log_line` of each class says how `log_event` writes the event, and `metric` how it is counted. What
most events of one kind have in common is in a base class, such as `_FailbackEvent`.
"""

import logging
import math
import re
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from rpcwheel.errors import InstanceIdConflict, time_text

__all__ = [
    "BreakerClosed",
    "BreakerOpened",
    "CallSlow",
    "CallbackFailed",
    "ConnectionAlive",
    "ConnectionClosed",
    "ConnectionDead",
    "ConnectionIdle",
    "ConnectionReplaced",
    "CriticalityUnknown",
    "DeadLetterFailed",
    "DeadlineExceededBeforeStart",
    "DefaultResponseUsed",
    "Event",
    "ExecutorRejected",
    "FailbackAttemptFailed",
    "FailbackDelivered",
    "FailbackDropped",
    "FailbackGaveUp",
    "FailbackLeaseLost",
    "FailbackLost",
    "FailbackQueued",
    "FailbackRejected",
    "HeartbeatMissed",
    "HedgeSent",
    "IdleCloseSkipped",
    "IdleDetectionLimited",
    "InstancePublished",
    "InstanceWithdrawn",
    "InstancesChanged",
    "InstancesRetained",
    "JournalFailed",
    "JournalRecovered",
    "LateResponse",
    "LimitIneffective",
    "OverloadBegan",
    "OverloadEnded",
    "RecordSkipped",
    "RegistryFailed",
    "RegistryRecovered",
    "RetryScheduled",
    "RetryStopped",
    "ShutdownStep",
    "SnapshotFailed",
    "StaleInstancesKept",
    "StreamStalled",
    "SubchannelHealthy",
    "SubchannelUnhealthy",
    "TaskFailed",
    "TaskSlow",
    "ThrottleBegan",
    "ThrottleEnded",
    "TooManyTimers",
    "UnmatchedResponse",
    "WithdrawalFailed",
]

INFO: Final = logging.INFO
WARNING: Final = logging.WARNING
ERROR: Final = logging.ERROR

OVERFLOW_INTERVAL_S: Final = 1.0
"""Seconds between two lines about a full queue: each call would write one."""

OUTAGE_INTERVAL_S: Final = 60.0
"""Seconds between two equal lines about one target or registry. An outage may last for days."""

BUDGET_USED_UP: Final = "the retry budget of the target is used up"
"""The reason of a `RetryStopped`."""

DELIVERY_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)
"""Upper bounds of the buckets of the time until a queued call is delivered."""


class LogLine(NamedTuple):
    """How events of one class are logged."""

    level: int
    template: str
    """A %-template over the event's fields, the texts of `Event.log_texts`, and `call`: `name` and
    `function`. `%(count call)s` is the field `count` with a noun: `1 call`, `2 calls`.
    `%(delay_s s)s` is the field `delay_s` with its unit: `0.25 s`."""
    subject: str | None = None
    """Names of fields, separated by spaces. The rate is limited for each combination of their
    values. None: those of `Event.subject_fields`."""
    traceback: bool = False
    """Whether the traceback, if there is one, of an error without a gRPC status is logged."""
    interval_s: float = 0.0
    """At most one line per subject in this time. 0: the general limit."""
    always_after: "type[Event] | None" = None
    """After a logged event of this class and the same subject, the line is always logged."""

    @property
    def counted_fields(self) -> list[tuple[str, str]]:
        """The fields that the template has with a noun or `s`, each with that word."""
        return re.findall(r"%\((\w+) (\w+)\)s", self.template)


class Count(NamedTuple):
    """A metric that counts events of one class, or adds up a field of them."""

    name: str
    """The name for Prometheus, without `rpcwheel_` and `_total`."""
    help: str
    labels: str | None = None
    """The labels, separated by spaces. `queue=name`: the label `queue` has the field `name`. None:
    those of `Event.labels`."""
    amount: str = ""
    """The field with the number to add, or for a histogram the seconds; "": 1."""
    bounds: tuple[float, ...] = ()
    """The upper bounds of the buckets of a histogram but the last; (): it is a counter."""
    counts_if: str = ""
    """A field or property that is true of the events that count; "": all count."""


def labeled_method(target: str, method: str) -> str:
    """Return the path of a method, for the label in metrics.

    A function, and `*` for all methods, have their target in place of a service:
    "/function/prices.fetch", "/orders:50051/*".
    """
    return method if "/" in method else f"/{target.rpartition('/')[2]}/{method}"


def plural(count: object, noun: str) -> str:
    """Return a number with its noun: `1 call`, `2 calls`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Event:
    """The base class of all events; annotate a sink with it: `def sink(event: Event) -> None`."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()
    logger: ClassVar[logging.Logger]
    subject_fields: ClassVar[str] = ""
    """The subject of log lines that give none."""
    labels: ClassVar[str] = ""
    """The labels of metrics that give none."""
    log_line: ClassVar[LogLine | None] = None
    metric: ClassVar[Count | None] = None
    """The counter of `rpcwheel.metrics` for the events of this class."""
    histogram: ClassVar[Count | None] = None
    """Its histogram of a time."""

    def log_texts(self) -> dict[str, str]:
        """Return texts for the template that are computed from the fields."""
        return {}


# Timer


class _TimerEvent(Event):
    __slots__ = ()
    logger = logging.getLogger("rpcwheel.timer")
    subject_fields = "timer task"
    labels = "timer"


@dataclass(frozen=True, slots=True)
class TaskSlow(_TimerEvent):
    """A task ran on the timer's thread for so long that other timeouts were late."""

    log_line = LogLine(
        WARNING,
        "%(timer)s: task %(task)s blocked the timer's thread for %(duration_s s)s; "
        "run blocking work on an executor",
    )
    metric = Count("timer_tasks_slow", "Tasks that blocked the timer's thread.")
    timer: str
    task: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class TaskFailed(_TimerEvent):
    """A task raised an exception. The timer continues."""

    log_line = LogLine(ERROR, "%(timer)s: task %(task)s raised %(error)s", traceback=True)
    metric = Count("timer_tasks_failed", "Tasks that raised an exception.")
    timer: str
    task: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ExecutorRejected(_TimerEvent):
    """An executor, a timer or an event loop did not accept a task."""

    log_line = LogLine(WARNING, "%(timer)s: task %(task)s was rejected: %(error)s")
    metric = Count(
        "executor_rejections", "Tasks that an executor, a timer or an event loop did not accept."
    )
    timer: str
    task: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class TooManyTimers(_TimerEvent):
    """The process has more timers than any program needs; one shared timer serves all purposes."""

    log_line = LogLine(
        WARNING,
        "%(live)d timers exist, more than %(limit)d; use one for everything "
        "(rpcwheel.timer.shared_timer), and stop timers that are no longer needed",
        subject="",
    )
    live: int
    limit: int


# Failback


class _FailbackEvent(Event):
    __slots__ = ()
    logger = logging.getLogger("rpcwheel.failback")
    subject_fields = "name function"
    labels = "queue=name"


@dataclass(frozen=True, slots=True)
class FailbackQueued(_FailbackEvent):
    """The first attempt of a call failed. The call is queued, and its caller got the default."""

    log_line = LogLine(
        WARNING,
        "%(call)s failed and was queued, next attempt in %(delay_s s)s, "
        "%(pending)d queued: %(error)s",
    )
    metric = Count("failback_queued", "Calls that failed and were queued.")
    name: str
    function: str
    error: BaseException
    delay_s: float
    pending: int


@dataclass(frozen=True, slots=True)
class FailbackAttemptFailed(_FailbackEvent):
    """A later attempt failed, and another follows. `attempts` counts all, the first included."""

    log_line = LogLine(
        INFO,
        "%(call)s failed %(attempts)d times in %(waited_s s)s, "
        "next attempt in %(delay_s s)s: %(error)s",
    )
    metric = Count(
        "failback_attempts_failed",
        "Background attempts that failed and are followed by another one.",
    )
    name: str
    function: str
    attempts: int
    waited_s: float
    error: BaseException
    delay_s: float


@dataclass(frozen=True, slots=True)
class FailbackDelivered(_FailbackEvent):
    """A queued call succeeded at attempt `attempts`, `waited_s` after its first attempt."""

    log_line = LogLine(INFO, "%(call)s was delivered at attempt %(attempts)d, after %(waited_s s)s")
    metric = Count("failback_delivered", "Queued calls that succeeded.")
    histogram = Count(
        "failback_delivery_seconds",
        "Time from the first attempt of a queued call to its delivery.",
        amount="waited_s",
        bounds=DELIVERY_BOUNDS_S,
    )
    name: str
    function: str
    attempts: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class FailbackGaveUp(_FailbackEvent):
    """A queued call is given up: no attempts are left, or the error is not to be retried."""

    log_line = LogLine(
        ERROR,
        "%(call)s was given up after %(attempts)d attempts in %(waited_s s)s, "
        "%(reason)s: %(error)s",
        traceback=True,
    )
    metric = Count("failback_gave_up", "Queued calls that were given up.")
    name: str
    function: str
    attempts: int
    waited_s: float
    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class FailbackDropped(_FailbackEvent):
    """A call failed and was not queued, because the queue is full (`overflow="drop"`)."""

    log_line = LogLine(
        ERROR,
        "%(call)s failed and was dropped, the queue is full with %(pending)d calls: %(error)s",
        interval_s=OVERFLOW_INTERVAL_S,
    )
    metric = Count(
        "failback_dropped",
        'Calls that failed and were dropped, because the queue was full (overflow="drop").',
    )
    name: str
    function: str
    error: BaseException
    pending: int


@dataclass(frozen=True, slots=True)
class FailbackRejected(_FailbackEvent):
    """A call failed and was not queued; its caller got a `FailbackError`, such as `FailbackFull`.

    `reason` says why, and what to do.
    """

    log_line = LogLine(
        WARNING,
        "%(call)s failed and was not queued, because %(reason)s: %(error)s",
        interval_s=OVERFLOW_INTERVAL_S,
    )
    metric = Count(
        "failback_rejected",
        "Calls that failed and were not queued, whose caller got FailbackFull or another "
        "FailbackError.",
    )
    name: str
    function: str
    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class FailbackLost(_FailbackEvent):
    """Queued calls were not delivered before the queue, its timer, its loop or the process ended.

    `functions` are their distinct labels, the oldest call's first. If a journal in Redis has lost
    the calls, their labels are lost too, and it has `calls to TARGET` instead.
    """

    log_line = LogLine(
        ERROR,
        "%(name)s: %(count call)s not delivered, %(reason)s; "
        "the oldest waited %(oldest_s s)s: %(functions)s",
        subject="name",
    )
    metric = Count(
        "failback_lost",
        "Queued calls that were not delivered before the queue, timer, loop or process "
        "ended, or that a journal has lost.",
        amount="count",
    )
    name: str
    functions: tuple[str, ...]
    count: int
    oldest_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class FailbackLeaseLost(_FailbackEvent):
    """A process lost the lease of calls of a journal, because it was paused, or cut off from it.

    Another process may attempt them at the same time, with the same idempotency keys.
    """

    log_line = LogLine(
        WARNING,
        "%(name)s: the lease of %(count call)s in %(journal)s has ended; "
        "another process may attempt them too",
        subject="name journal",
        interval_s=OVERFLOW_INTERVAL_S,
    )
    metric = Count(
        "failback_leases_lost",
        "Calls of a journal whose lease ended during an attempt; others may attempt them too.",
        "queue=name journal",
        amount="count",
    )
    name: str
    journal: str
    count: int


@dataclass(frozen=True, slots=True)
class JournalFailed(_FailbackEvent):
    """A journal does not store calls or results. `results` wait until it does."""

    log_line = LogLine(
        ERROR,
        "%(journal)s: calls cannot be stored%(waiting)s: %(error)s",
        subject="journal",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count(
        "journal_failures", "Outages of a journal, in which failed calls are not queued.", "journal"
    )
    journal: str
    error: BaseException
    results: int

    def log_texts(self) -> dict[str, str]:
        """Return `waiting`: how many results of attempts wait, if any."""
        waiting = f", {self.results} results of attempts wait" if self.results else ""
        return {"waiting": waiting}


@dataclass(frozen=True, slots=True)
class JournalRecovered(_FailbackEvent):
    """A journal stores calls again, `after_s` after the first failure."""

    log_line = LogLine(
        INFO,
        "%(journal)s: calls can be stored again after %(after_s s)s",
        subject="journal",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=JournalFailed,
    )
    metric = Count("journal_recoveries", "Ends of outages of a journal.", "journal")
    journal: str
    after_s: float


@dataclass(frozen=True, slots=True)
class DeadLetterFailed(_FailbackEvent):
    """The user's `dead_letter` callback raised an exception.

    Without a journal, the call that it was given is lost.
    """

    log_line = LogLine(ERROR, "%(call)s: dead_letter raised %(error)s", traceback=True)
    metric = Count(
        "failback_dead_letters_failed", "Calls whose dead_letter callback raised an exception."
    )
    name: str
    function: str
    error: BaseException


# Calls


class _CallEvent(Event):
    __slots__ = ()
    logger = logging.getLogger("rpcwheel.call")
    subject_fields = "method"
    labels = "method"


@dataclass(frozen=True, slots=True)
class CallSlow(_CallEvent):
    """A call still runs `elapsed_s` after its start. `side` is "client" or "server"."""

    log_line = LogLine(WARNING, "%(method)s (%(side)s) still runs after %(elapsed_s s)s")
    metric = Count("slow_calls", "Calls that took longer than slow_call_threshold.", "method side")
    method: str
    side: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class RetryScheduled(_CallEvent):
    """An attempt of a call failed. The next attempt of the same call begins after `delay_s`."""

    log_line = LogLine(
        INFO,
        "%(method)s failed with %(code)s at attempt %(attempts)d, next attempt in %(delay_s s)s",
    )
    metric = Count(
        "retries",
        "Retries that were planned. Not all begin: a call may be canceled while it waits.",
    )
    method: str
    attempts: int
    code: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class HedgeSent(_CallEvent):
    """Hedging sent a further attempt before the earlier ones ended, or as one of them failed.

    `attempt` is 2 for the second attempt.
    """

    log_line = LogLine(INFO, "%(method)s: hedging sent attempt %(attempt)d")
    metric = Count("hedges", "Attempts that hedging sent before earlier ones ended.")
    method: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RetryStopped(_CallEvent):
    """An attempt failed with a status in `RetryPolicy.retry_on`, and no other attempt follows.

    Or the next attempt was not sent by the client itself.

    `reason` says why, and what to do.
    """

    log_line = LogLine(
        INFO, "%(method)s failed with %(code)s at attempt %(attempts)d, not retried: %(reason)s"
    )
    metric = Count(
        "retries_throttled",
        "Retries that were not made because the retry budget was used up.",
        counts_if="is_throttled",
    )
    method: str
    attempts: int
    code: str
    reason: str

    @property
    def is_throttled(self) -> bool:
        """Whether the retry budget was used up."""
        return self.reason == BUDGET_USED_UP


@dataclass(frozen=True, slots=True)
class DefaultResponseUsed(_CallEvent):
    """A call failed, and its caller got the default response."""

    log_line = LogLine(WARNING, "%(method)s failed, the default response was returned: %(error)s")
    metric = Count("default_responses", "Failed calls with a default response.")
    method: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class StreamStalled(_CallEvent):
    """A response stream was canceled, because no message came for `silent_s`."""

    log_line = LogLine(WARNING, "%(method)s was canceled, no message for %(silent_s s)s")
    metric = Count("streams_stalled", "Streams ended by message_timeout.")
    method: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class DeadlineExceededBeforeStart(_CallEvent):
    """A server refused a call, because its deadline had passed before the handler could start.

    `late_s` is 0.0 with `grpc.aio`, which does not provide it.
    """

    log_line = LogLine(
        WARNING,
        "%(method)s was refused, its deadline passed %(late_s s)s before the handler could start",
    )
    metric = Count(
        "deadlines_exceeded_before_start",
        "Calls that a server refused because their deadline had passed. Of calls without a "
        "request stream, gRPC drops most before, and no server metric shows them.",
    )
    method: str
    late_s: float


@dataclass(frozen=True, slots=True)
class CriticalityUnknown(_CallEvent):
    """A server ignored the criticality of a call, because its metadata is not valid.

    Emitted once for each method and reason.
    """

    log_line = LogLine(
        WARNING,
        "%(method)s: the metadata rpcwheel-criticality of a call was ignored, because %(reason)s: "
        "%(value)s",
    )
    method: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class OverloadBegan(_CallEvent):
    """A server with a limit has refused a call, the first one in 5 s."""

    log_line = LogLine(
        WARNING,
        "%(server)s is overloaded: it works on %(running call)s with %(waiting call)s waiting, and "
        "refuses others, the least critical first",
        subject="server",
    )
    metric = Count("overloads", "Times at which a server began to refuse calls.", "server")
    server: str
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class OverloadEnded(_CallEvent):
    """A server has not refused a call for 5 s."""

    log_line = LogLine(
        INFO,
        "%(server)s is no longer overloaded; it has refused %(refused call)s in %(duration_s s)s",
        subject="server",
        always_after=OverloadBegan,
    )
    server: str
    refused: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class LimitIneffective(_CallEvent):
    """A server has interceptors with a limit, and an executor that does not know the limit."""

    log_line = LogLine(
        ERROR,
        "the limit of %(server)s has no effect, because it needs the executor of the kit: "
        "grpc.server(kit.server_executor(), interceptors=kit.server_interceptors())",
        subject="server",
    )
    server: str


@dataclass(frozen=True, slots=True)
class BreakerOpened(_CallEvent):
    """A circuit breaker sends no calls, and tries again in `duration_s`; `reason`: what has failed.

    It tries a health check, if it can. If that fails, it stays open for longer, without an event.
    `target` is that of the channel; of a function it is "function". If the breaker was opened by
    hand, `duration_s` is infinite.
    """

    log_line = LogLine(
        WARNING,
        "%(target)s %(method)s: the circuit breaker %(state)s: %(reason)s",
        subject="target method",
    )
    metric = Count(
        "breaker_opened", "Times at which a circuit breaker opened.", "method=labeled_method"
    )
    target: str
    method: str
    reason: str
    duration_s: float

    @property
    def labeled_method(self) -> str:
        """The method, for the label in metrics."""
        return labeled_method(self.target, self.method)

    def log_texts(self) -> dict[str, str]:
        """Return `state`: that it is open, and what follows."""
        by_hand = math.isinf(self.duration_s)
        then = (
            " until it is reset" if by_hand else f"; it tries again in {time_text(self.duration_s)}"
        )
        return {"state": f"is open{then}"}


@dataclass(frozen=True, slots=True)
class BreakerClosed(_CallEvent):
    """A circuit breaker that was open sends all calls again, after `duration_s`."""

    log_line = LogLine(
        INFO,
        "%(target)s %(method)s: the circuit breaker is closed again, after %(duration_s s)s",
        subject="target method",
        always_after=BreakerOpened,
    )
    target: str
    method: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class ThrottleBegan(_CallEvent):
    """A client has throttled a call of this method, the first one in 5 s."""

    log_line = LogLine(
        WARNING,
        "%(target)s %(method)s: the server accepts too few calls; the client sends only a part of "
        "them",
        subject="target method",
    )
    metric = Count("throttles", "Times at which a client began to throttle a method.")
    target: str
    method: str


@dataclass(frozen=True, slots=True)
class ThrottleEnded(_CallEvent):
    """A client has not throttled a call of this method for 5 s."""

    log_line = LogLine(
        INFO,
        "%(target)s %(method)s: the client sends all calls again; it has not sent %(refused call)s "
        "in %(duration_s s)s",
        subject="target method",
        always_after=ThrottleBegan,
    )
    target: str
    method: str
    refused: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class LateResponse(_CallEvent):
    """A response came for a pending call that ended `late_s` before; `ending` says how."""

    log_line = LogLine(
        WARNING,
        "%(name)s: the response to %(key)s came %(late_s s)s after the call had %(ending)s",
        subject="name",
    )
    name: str
    key: str
    ending: str
    late_s: float


@dataclass(frozen=True, slots=True)
class UnmatchedResponse(_CallEvent):
    """A response came whose key belongs to no pending call and to no call that ended lately."""

    log_line = LogLine(
        WARNING, "%(name)s: a response came for %(key)s, which no call waits for", subject="name"
    )
    name: str
    key: str


# User callbacks


@dataclass(frozen=True, slots=True)
class CallbackFailed(Event):
    """A user's callback, listener, predicate or wait object raised an exception.

    The call is not affected, and a listener is called again. `subject` is the method, target,
    service or queue for which it was called.
    """

    log_line = LogLine(
        ERROR,
        "%(subject)s: %(callback)s raised %(error)s",
        subject="subject callback",
        traceback=True,
    )
    logger = logging.getLogger("rpcwheel.callback")
    metric = Count(
        "callbacks_failed",
        "Callbacks, predicates and wait objects of the program that raised an exception.",
    )
    subject: str
    callback: str
    error: BaseException


# Connections


class _ConnectionEvent(Event):
    __slots__ = ()
    logger = logging.getLogger("rpcwheel.connection")
    subject_fields = "target"
    labels = "target"


@dataclass(frozen=True, slots=True)
class HeartbeatMissed(_ConnectionEvent):
    """A heartbeat was not answered in time. `misses` counts missed heartbeats in a row.

    `silent_s` is the time since anything was read. `answer` says how the heartbeat ended: with a
    status, or with an answer that does not count, and why.
    """

    log_line = LogLine(
        INFO,
        "%(target)s: heartbeat missed, %(misses)d in a row, "
        "nothing read for %(silent_s s)s (%(answer)s)",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count("heartbeats_missed", "Heartbeats without an answer in time.")
    target: str
    misses: int
    silent_s: float
    answer: str


@dataclass(frozen=True, slots=True)
class ConnectionDead(_ConnectionEvent):
    """Nothing was read for the heartbeat timeout. `calls` are in flight on the connection."""

    log_line = LogLine(
        WARNING,
        "%(target)s: connection dead, nothing read for %(silent_s s)s, %(misses heartbeat)s "
        "missed, %(calls call)s in flight",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count("connections_dead", "Connections declared dead.")
    target: str
    silent_s: float
    misses: int
    calls: int


@dataclass(frozen=True, slots=True)
class ConnectionReplaced(_ConnectionEvent):
    """A channel replaced its connection; `number` counts its connections, from 1.

    `calls` were in flight on the old connection.
    """

    log_line = LogLine(
        INFO,
        "%(target)s: replaced its connection (the new one is number %(number)d), with "
        "%(calls call)s in flight on the old one: %(reason)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count("connections_replaced", "Connections that a channel replaced by a new one.")
    target: str
    number: int
    reason: str
    calls: int


@dataclass(frozen=True, slots=True)
class ConnectionAlive(_ConnectionEvent):
    """A connection that was suspected or dead answered, after `after_s` without an answer.

    `rtt_s` is the round trip of the heartbeat; None if a call of the user's was answered.
    """

    log_line = LogLine(
        INFO,
        "%(target)s: connection alive after %(after_s s)s without an answer",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=ConnectionDead,
    )
    target: str
    after_s: float
    rtt_s: float | None


@dataclass(frozen=True, slots=True)
class ConnectionIdle(_ConnectionEvent):
    """A server's connection is idle. It will be closed, or is only reported."""

    log_line = LogLine(
        INFO,
        "%(peer)s: idle for %(idle_s s)s, %(reason)s, %(calls call)s and %(streams stream)s open",
        subject="peer",
        interval_s=OUTAGE_INTERVAL_S,
    )
    peer: str
    reason: str
    idle_s: float
    calls: int
    streams: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed(_ConnectionEvent):
    """A server closed an idle connection."""

    log_line = LogLine(
        INFO, "%(peer)s: connection closed, idle for %(idle_s s)s, %(reason)s", subject="peer"
    )
    metric = Count(
        "connections_closed_idle",
        "Connections that a server closed, by the limit that they exceeded.",
        "reason",
    )
    peer: str
    reason: str
    idle_s: float


@dataclass(frozen=True, slots=True)
class IdleCloseSkipped(_ConnectionEvent):
    """An idle connection was not closed; `reason` says why."""

    log_line = LogLine(
        INFO,
        "%(peer)s: connection not closed, %(reason)s",
        subject="peer",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count(
        "idle_closes_skipped", "Idle connections that a server did not close, by reason.", "reason"
    )
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class IdleDetectionLimited(_ConnectionEvent):
    """A server has no idle detector, or this system or the addresses limit what it can do."""

    log_line = LogLine(WARNING, "idle connection detection: %(reason)s", subject="reason")
    reason: str


@dataclass(frozen=True, slots=True)
class SubchannelUnhealthy(_ConnectionEvent):
    """A subchannel failed. It gets no calls while a healthy subchannel is READY.

    It gets calls again after it answers a health check.
    """

    log_line = LogLine(
        WARNING,
        "%(channel)s: %(subchannel)s is unhealthy and gets no calls: %(reason)s",
        subject="channel subchannel",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count(
        "ejections", "Subchannels that were taken out of use because they failed.", "channel"
    )
    channel: str
    subchannel: str
    reason: str


@dataclass(frozen=True, slots=True)
class SubchannelHealthy(_ConnectionEvent):
    """A subchannel gets calls again, after it was unhealthy for `after_s`."""

    log_line = LogLine(
        INFO,
        "%(channel)s: %(subchannel)s is healthy again, after %(after_s s)s",
        subject="channel subchannel",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=SubchannelUnhealthy,
    )
    channel: str
    subchannel: str
    after_s: float


@dataclass(frozen=True, slots=True)
class StaleInstancesKept(_ConnectionEvent):
    """The registry may have lost instances of a service; a channel keeps those that answer.

    All instances of the service disappeared, or these were stale for `stale_timeout`.
    """

    log_line = LogLine(
        WARNING,
        "%(channel)s: the registry may have lost these instances; the channel keeps them as long "
        "as they answer: %(subchannels)s",
        subject="channel",
        interval_s=OUTAGE_INTERVAL_S,
    )
    channel: str
    subchannels: tuple[str, ...]


# Registries

REASONS_TO_REPUBLISH: Final = {
    "missing": "its record had disappeared",
    "taken": "another process had replaced its record",
    "lease": "its lease had ended",
    "session": "the registry session had ended",
    "wiped": "the registry had lost its data",
}

REQUESTS: Final = {
    "publish": "publishing {}",
    "withdraw": "withdrawing {}",
    "renew": "renewing the lease of {}",
    "watch": "watching for changes",
    "lookup": "a lookup",
    "close": "closing the connection",
}

NOT_REPEATED: Final = {
    "publish": "not repeated, as the registry is being closed",
    "withdraw": "not repeated; clients see the instances until their lease ends",
    "lookup": "the caller gets the last known instances, or this error",
    "close": "instances that are still published disappear when their lease ends",
}

SHUTDOWN_STEPS: Final = {
    "withdraw": "withdrawing its instances from the registry",
    "not serving": "setting its health to NOT_SERVING",
    "wait": "serving until clients have learned of the shutdown (lame duck)",
    "stop": "accepting no more calls; calls in flight may finish",
    "closed": "finished",
}


class _RegistryEvent(Event):
    __slots__ = ()
    logger = logging.getLogger("rpcwheel.registry")
    subject_fields = "registry"
    labels = "registry"


@dataclass(frozen=True, slots=True)
class InstancePublished(_RegistryEvent):
    """The registry accepted an instance: a new one, a changed one, or one that it had lost."""

    log_line = LogLine(
        INFO,
        "%(registry)s: published %(service)s instance %(instance)s%(details)s",
        subject="registry service instance",
    )
    metric = Count(
        "registry_published",
        "Instances that were published. Label again: why it was published again, or empty.",
        "registry grpc_service=service again",
    )
    registry: str
    service: str
    instance: str
    again: str = ""
    """Why it was published again. "": a new or changed instance. "missing": its record had
    disappeared. "taken": another process had replaced its record. "lease": the lease had ended.
    "session": the session had ended. "wiped": the registry had lost its data."""
    away_s: float = 0.0
    """If `again` is set: the longest time for which the registry may not have had it."""
    status: str = "UP"
    """The published status: "UP", or "DRAINING" right before it is withdrawn."""

    def log_texts(self) -> dict[str, str]:
        """Return `details`: the status if it is not UP, and why it was published again."""
        details = "" if self.status == "UP" else f", status {self.status}"
        if self.again:
            reason = REASONS_TO_REPUBLISH.get(self.again, self.again)
            details += f", again: {reason}; it was missing for at most {time_text(self.away_s)}"
        return {"details": details}


@dataclass(frozen=True, slots=True)
class InstanceWithdrawn(_RegistryEvent):
    """The registry removed an instance because this process asked for it."""

    log_line = LogLine(
        INFO,
        "%(registry)s: withdrew %(service)s instance %(instance)s",
        subject="registry service instance",
    )
    metric = Count(
        "registry_withdrawn", "Instances that were withdrawn.", "registry grpc_service=service"
    )
    registry: str
    service: str
    instance: str


@dataclass(frozen=True, slots=True)
class RegistryFailed(_RegistryEvent):
    """A request to the registry failed, or two processes publish the same instance id.

    In the second case `error` is an `InstanceIdConflict`.
    """

    log_line = LogLine(
        WARNING,
        "%(registry)s: %(action)s failed (%(next)s): %(error)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count("registry_failures", "Requests to a registry that failed.", "registry request")
    registry: str
    request: str
    """"publish", "withdraw", "renew", "watch", "lookup" or "close"."""
    error: BaseException
    delay_s: float | None
    """Seconds until the next attempt. None: the request is not repeated."""
    items: int = 1
    """The number of instances in the request."""

    def log_texts(self) -> dict[str, str]:
        """Return `action`, which failed, and `next`, which follows."""
        when = f"in {time_text(self.delay_s)}" if self.delay_s else "now"
        if isinstance(self.error, InstanceIdConflict):
            return {"action": "keeping an instance published", "next": f"published again {when}"}
        action = REQUESTS.get(self.request, self.request).format(plural(self.items, "instance"))
        if self.delay_s is None:
            return {"action": action, "next": NOT_REPEATED.get(self.request, "not repeated")}
        kept = "known instances are kept; " if self.request == "watch" else ""
        return {"action": action, "next": f"{kept}next attempt {when}"}


@dataclass(frozen=True, slots=True)
class RegistryRecovered(_RegistryEvent):
    """The registry answers again, `after_s` after the first failure."""

    log_line = LogLine(
        INFO,
        "%(registry)s: the registry answers again after %(after_s s)s",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=RegistryFailed,
    )
    metric = Count("registry_recoveries", "Ends of outages of a registry.")
    registry: str
    after_s: float


@dataclass(frozen=True, slots=True)
class InstancesChanged(_RegistryEvent):
    """The known instances of a subscribed service changed; `instances` is their present number.

    `source` is that of the new `Snapshot`: "live", "stale" or "cache". If `added` and `removed` are
    0, the values of an instance or the source changed.
    """

    log_line = LogLine(
        INFO,
        "%(registry)s: %(service)s has %(instances instance)s, source %(source)s: "
        "%(added)d added, %(removed)d removed",
        subject="registry service",
    )
    registry: str
    service: str
    instances: int
    added: int
    removed: int
    source: str


@dataclass(frozen=True, slots=True)
class InstancesRetained(_RegistryEvent):
    """Instances disappeared from a registry that may have lost data; they are kept as stale.

    They are removed after `RegistryPolicy.stale_timeout` unless the registry lists them again.
    `instances` is their number. `reason` says why the registry is suspected.
    """

    log_line = LogLine(
        WARNING,
        "%(registry)s: %(instances instance)s of %(service)s disappeared while the registry may "
        "have lost data (%(reason)s); kept as stale until the registry lists them again or "
        "stale_timeout is over",
        subject="registry service",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metric = Count(
        "registry_retained",
        "Times that instances were kept that a registry had lost, perhaps with its data.",
        "registry grpc_service=service",
    )
    registry: str
    service: str
    instances: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecordSkipped(_RegistryEvent):
    """A record in the registry or in a snapshot file is not a valid instance.

    Emitted once for each content of the record.
    """

    log_line = LogLine(
        WARNING,
        "%(registry)s: ignored the record %(key)s of %(service)s, which is not a valid instance: "
        "%(error)s",
        subject="registry service",
        interval_s=OUTAGE_INTERVAL_S,
    )
    registry: str
    service: str
    key: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class SnapshotFailed(_RegistryEvent):
    """A snapshot file cannot be read or written. The registry works without it.

    Emitted once until the file works again.
    """

    log_line = LogLine(
        WARNING,
        "%(registry)s: cannot use the snapshot file %(path)s, which clients need only if they "
        "start while the registry is down: %(error)s",
        subject="registry path",
    )
    registry: str
    path: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ShutdownStep(_RegistryEvent):
    """A step of a published server's graceful shutdown begins, or the shutdown has ended.

    `server` is the first service and its address.
    """

    log_line = LogLine(
        INFO, "%(server)s is shutting down (%(reason)s): %(action)s", subject="server"
    )
    server: str
    step: str
    """"withdraw", "not serving", "wait" (`lame_duck`), "stop", and at the end "closed"."""
    reason: str
    """Why the server is shut down, such as "SIGTERM"."""

    def log_texts(self) -> dict[str, str]:
        """Return `action`, which begins."""
        return {"action": SHUTDOWN_STEPS.get(self.step, self.step)}


@dataclass(frozen=True, slots=True)
class WithdrawalFailed(_RegistryEvent):
    """A published server has stopped, but a registry may list it until its lease ends.

    `server` is the first service and its address. `error` is that of the last request; None if it
    was not answered.
    """

    log_line = LogLine(
        WARNING,
        "%(server)s has stopped, but could not be withdrawn from %(registry)s, which may list it "
        "until its lease ends: %(error)s",
        subject="server registry",
    )
    server: str
    registry: str
    error: BaseException | None
