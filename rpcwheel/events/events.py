"""The events and their log lines.

An event is a frozen record of one occurrence. Fields that end with `_s` are seconds. `timer` and
`name` are names that the user gave; `task` and `function` are labels such as `shop.orders.push`;
`method` is gRPC's full method name; `registry` is the registry's URL without the password;
`instance` is the id of an instance. An `error` is the exception itself with its traceback, so a
sink that keeps the event also keeps the frames.

`log_line` of each class says how `log_event` writes the event, and `metrics` how it is counted.
"""

import logging
import math
import re
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from rpcwheel.errors import InstanceIdConflict

TIMER: Final = logging.getLogger("rpcwheel.timer")
FAILBACK: Final = logging.getLogger("rpcwheel.failback")
CALL: Final = logging.getLogger("rpcwheel.call")
CALLBACK: Final = logging.getLogger("rpcwheel.callback")
CONNECTION: Final = logging.getLogger("rpcwheel.connection")
REGISTRY: Final = logging.getLogger("rpcwheel.registry")

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

    logger: logging.Logger
    level: int
    subject: str
    """Names of fields, separated by spaces. The rate is limited for each combination of their
    values."""
    template: str
    """A %-template over the event's fields, the texts of `Event.log_texts`, and `call`: `name` and
    `function`. `%(count call)s` is the field `count` with a noun: `1 call`, `2 calls`."""
    traceback: bool = False
    """Whether the traceback, if there is one, of an error without a gRPC status is logged."""
    interval_s: float = 0.0
    """At most one line per subject in this time. 0: the general limit."""
    always_after: "type[Event] | None" = None
    """After a logged event of this class and the same subject, the line is always logged."""

    @property
    def counted_fields(self) -> list[tuple[str, str]]:
        """The fields that the template has with a noun, each with the noun."""
        return re.findall(r"%\((\w+) (\w+)\)s", self.template)


class Count(NamedTuple):
    """A metric that counts events of one class, or adds up a field of them."""

    name: str
    """The name for Prometheus, without `rpcwheel_` and `_total`."""
    help: str
    labels: str = ""
    """The labels, separated by spaces. `queue=name`: the label `queue` has the field `name`."""
    amount: str = ""
    """The field with the number to add, or for a histogram the seconds; "": 1."""
    bounds: tuple[float, ...] = ()
    """The upper bounds of the buckets of a histogram but the last; (): it is a counter."""
    counts_if: str = ""
    """A field or property that is true of the events that count; "": all count."""

    @property
    def fields(self) -> dict[str, str]:
        """The field that has the value of each label."""
        pairs = [label.partition("=") for label in self.labels.split()]
        return {label: field or label for label, _, field in pairs}


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
    log_line: ClassVar[LogLine | None] = None
    metrics: ClassVar[tuple[Count, ...]] = ()
    """What `rpcwheel.metrics` counts of the events of this class."""

    def log_texts(self) -> dict[str, str]:
        """Return texts for the template that are computed from the fields."""
        return {}


# Timer


@dataclass(frozen=True, slots=True)
class TaskSlow(Event):
    """A task ran on the timer's thread for so long that other timeouts were late."""

    log_line = LogLine(
        TIMER,
        WARNING,
        "timer task",
        "%(timer)s: task %(task)s blocked the timer's thread for %(duration_s).3f s; "
        "run blocking work on an executor",
    )
    metrics = (Count("timer_tasks_slow", "Tasks that blocked the timer's thread.", "timer"),)
    timer: str
    task: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class TaskFailed(Event):
    """A task raised an exception. The timer continues."""

    log_line = LogLine(
        TIMER, ERROR, "timer task", "%(timer)s: task %(task)s raised %(error)s", traceback=True
    )
    metrics = (Count("timer_tasks_failed", "Tasks that raised an exception.", "timer"),)
    timer: str
    task: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ExecutorRejected(Event):
    """An executor, a timer or an event loop did not accept a task."""

    log_line = LogLine(
        TIMER, WARNING, "timer task", "%(timer)s: task %(task)s was rejected: %(error)s"
    )
    metrics = (
        Count(
            "executor_rejections",
            "Tasks that an executor, a timer or an event loop did not accept.",
            "timer",
        ),
    )
    timer: str
    task: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class TooManyTimers(Event):
    """The process has more timers than any program needs; one shared timer serves all purposes."""

    log_line = LogLine(
        TIMER,
        WARNING,
        "",
        "%(live)d timers exist, more than %(limit)d; use one for everything "
        "(rpcwheel.timer.shared_timer), and stop timers that are no longer needed",
    )
    live: int
    limit: int


# Failback


@dataclass(frozen=True, slots=True)
class FailbackQueued(Event):
    """The first attempt of a call failed. The call is queued, and its caller got the default."""

    log_line = LogLine(
        FAILBACK,
        WARNING,
        "name function",
        "%(call)s failed and was queued, next attempt in %(delay_s).3g s, "
        "%(pending)d queued: %(error)s",
    )
    metrics = (Count("failback_queued", "Calls that failed and were queued.", "queue=name"),)
    name: str
    function: str
    error: BaseException
    delay_s: float
    pending: int


@dataclass(frozen=True, slots=True)
class FailbackAttemptFailed(Event):
    """A later attempt failed, and another follows. `attempts` counts all, the first included."""

    log_line = LogLine(
        FAILBACK,
        INFO,
        "name function",
        "%(call)s failed %(attempts)d times in %(waited_s).3g s, "
        "next attempt in %(delay_s).3g s: %(error)s",
    )
    metrics = (
        Count(
            "failback_attempts_failed",
            "Background attempts that failed and are followed by another one.",
            "queue=name",
        ),
    )
    name: str
    function: str
    attempts: int
    waited_s: float
    error: BaseException
    delay_s: float


@dataclass(frozen=True, slots=True)
class FailbackDelivered(Event):
    """A queued call succeeded at attempt `attempts`, `waited_s` after its first attempt."""

    log_line = LogLine(
        FAILBACK,
        INFO,
        "name function",
        "%(call)s was delivered at attempt %(attempts)d, after %(waited_s).3g s",
    )
    metrics = (
        Count("failback_delivered", "Queued calls that succeeded.", "queue=name"),
        Count(
            "failback_delivery_seconds",
            "Time from the first attempt of a queued call to its delivery.",
            "queue=name",
            amount="waited_s",
            bounds=DELIVERY_BOUNDS_S,
        ),
    )
    name: str
    function: str
    attempts: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class FailbackGaveUp(Event):
    """A queued call is given up: no attempts are left, or the error is not to be retried."""

    log_line = LogLine(
        FAILBACK,
        ERROR,
        "name function",
        "%(call)s was given up after %(attempts)d attempts in %(waited_s).3g s, "
        "%(reason)s: %(error)s",
        traceback=True,
    )
    metrics = (Count("failback_gave_up", "Queued calls that were given up.", "queue=name"),)
    name: str
    function: str
    attempts: int
    waited_s: float
    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class FailbackDropped(Event):
    """A call failed and was not queued, because the queue is full (`overflow="drop"`)."""

    log_line = LogLine(
        FAILBACK,
        ERROR,
        "name function",
        "%(call)s failed and was dropped, the queue is full with %(pending)d calls: %(error)s",
        interval_s=OVERFLOW_INTERVAL_S,
    )
    metrics = (
        Count(
            "failback_dropped",
            'Calls that failed and were dropped, because the queue was full (overflow="drop").',
            "queue=name",
        ),
    )
    name: str
    function: str
    error: BaseException
    pending: int


@dataclass(frozen=True, slots=True)
class FailbackRejected(Event):
    """A call failed and was not queued; its caller got `FailbackFull` or `FailbackClosed`.

    `reason` says why, and what to do.
    """

    log_line = LogLine(
        FAILBACK,
        WARNING,
        "name function",
        "%(call)s failed and was not queued, because %(reason)s: %(error)s",
        interval_s=OVERFLOW_INTERVAL_S,
    )
    metrics = (
        Count(
            "failback_rejected",
            "Calls that failed and were not queued, whose caller got FailbackFull or "
            "FailbackClosed.",
            "queue=name",
        ),
    )
    name: str
    function: str
    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class FailbackLost(Event):
    """Queued calls were not delivered before the queue, its timer, its loop or the process ended.

    `functions` are their distinct labels, the oldest call's first. If a journal in Redis has lost
    the calls, their labels are lost too, and it has `calls to TARGET` instead.
    """

    log_line = LogLine(
        FAILBACK,
        ERROR,
        "name",
        "%(name)s: %(count call)s not delivered, %(reason)s; "
        "the oldest waited %(oldest_s).3g s: %(functions)s",
    )
    metrics = (
        Count(
            "failback_lost",
            "Queued calls that were not delivered before the queue, timer, loop or process "
            "ended, or that a journal has lost.",
            "queue=name",
            amount="count",
        ),
    )
    name: str
    functions: tuple[str, ...]
    count: int
    oldest_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class FailbackLeaseLost(Event):
    """A process lost the lease of calls of a journal, because it was paused, or cut off from it.

    Another process may attempt them at the same time, with the same idempotency keys.
    """

    log_line = LogLine(
        FAILBACK,
        WARNING,
        "name journal",
        "%(name)s: the lease of %(count call)s in %(journal)s has ended; "
        "another process may attempt them too",
        interval_s=OVERFLOW_INTERVAL_S,
    )
    metrics = (
        Count(
            "failback_leases_lost",
            "Calls of a journal whose lease ended during an attempt; others may attempt them too.",
            "queue=name journal",
            amount="count",
        ),
    )
    name: str
    journal: str
    count: int


@dataclass(frozen=True, slots=True)
class JournalFailed(Event):
    """A journal does not store calls or results. `results` wait until it does."""

    log_line = LogLine(
        FAILBACK,
        ERROR,
        "journal",
        "%(journal)s: calls cannot be stored%(waiting)s: %(error)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (
        Count(
            "journal_failures",
            "Outages of a journal, in which failed calls are not queued.",
            "journal",
        ),
    )
    journal: str
    error: BaseException
    results: int

    def log_texts(self) -> dict[str, str]:
        """Return `waiting`: how many results of attempts wait, if any."""
        waiting = f", {self.results} results of attempts wait" if self.results else ""
        return {"waiting": waiting}


@dataclass(frozen=True, slots=True)
class JournalRecovered(Event):
    """A journal stores calls again, `after_s` after the first failure."""

    log_line = LogLine(
        FAILBACK,
        INFO,
        "journal",
        "%(journal)s: calls can be stored again after %(after_s).3g s",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=JournalFailed,
    )
    metrics = (Count("journal_recoveries", "Ends of outages of a journal.", "journal"),)
    journal: str
    after_s: float


@dataclass(frozen=True, slots=True)
class DeadLetterFailed(Event):
    """The user's `dead_letter` callback raised an exception. The call it was given is lost."""

    log_line = LogLine(
        FAILBACK, ERROR, "name function", "%(call)s: dead_letter raised %(error)s", traceback=True
    )
    metrics = (
        Count(
            "failback_dead_letters_failed",
            "Calls whose dead_letter callback raised an exception.",
            "queue=name",
        ),
    )
    name: str
    function: str
    error: BaseException


# Calls


@dataclass(frozen=True, slots=True)
class CallSlow(Event):
    """A call still runs `elapsed_s` after its start. `side` is "client" or "server"."""

    log_line = LogLine(
        CALL, WARNING, "method", "%(method)s (%(side)s) still runs after %(elapsed_s).3g s"
    )
    metrics = (
        Count("slow_calls", "Calls that took longer than slow_call_threshold.", "method side"),
    )
    method: str
    side: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class RetryScheduled(Event):
    """An attempt of a call failed. The next attempt of the same call begins after `delay_s`."""

    log_line = LogLine(
        CALL,
        INFO,
        "method",
        "%(method)s failed with %(code)s at attempt %(attempts)d, next attempt in %(delay_s).3g s",
    )
    metrics = (
        Count(
            "retries",
            "Retries that were planned. Not all begin: a call may be canceled while it waits.",
            "method",
        ),
    )
    method: str
    attempts: int
    code: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class HedgeSent(Event):
    """Hedging sent a further attempt before the earlier ones ended, or as one of them failed.

    `attempt` is 2 for the second attempt.
    """

    log_line = LogLine(CALL, INFO, "method", "%(method)s: hedging sent attempt %(attempt)d")
    metrics = (Count("hedges", "Attempts that hedging sent before earlier ones ended.", "method"),)
    method: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RetryStopped(Event):
    """An attempt failed with a status in `RetryPolicy.retry_on`, and no other attempt follows.

    Or the next attempt was not sent by the client itself.

    `reason` says why, and what to do.
    """

    log_line = LogLine(
        CALL,
        INFO,
        "method",
        "%(method)s failed with %(code)s at attempt %(attempts)d, not retried: %(reason)s",
    )
    metrics = (
        Count(
            "retries_throttled",
            "Retries that were not made because the retry budget was used up.",
            "method",
            counts_if="is_throttled",
        ),
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
class DefaultResponseUsed(Event):
    """A call failed, and its caller got the default response."""

    log_line = LogLine(
        CALL, WARNING, "method", "%(method)s failed, the default response was returned: %(error)s"
    )
    metrics = (Count("default_responses", "Failed calls with a default response.", "method"),)
    method: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class StreamStalled(Event):
    """A response stream was canceled, because no message came for `silent_s`."""

    log_line = LogLine(
        CALL, WARNING, "method", "%(method)s was canceled, no message for %(silent_s).3g s"
    )
    metrics = (Count("streams_stalled", "Streams ended by message_timeout.", "method"),)
    method: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class DeadlineExceededBeforeStart(Event):
    """A server refused a call, because its deadline had passed before the handler could start.

    `late_s` is 0.0 with `grpc.aio`, which does not provide it.
    """

    log_line = LogLine(
        CALL,
        WARNING,
        "method",
        "%(method)s was refused, its deadline passed %(late_s).3g s before the handler could start",
    )
    metrics = (
        Count(
            "deadlines_exceeded_before_start",
            "Calls that a server refused because their deadline had passed. Of calls without a "
            "request stream, gRPC drops most before, and no server metric shows them.",
            "method",
        ),
    )
    method: str
    late_s: float


@dataclass(frozen=True, slots=True)
class CriticalityUnknown(Event):
    """A server ignored the criticality of a call, because its metadata is not valid.

    Emitted once for each method and reason.
    """

    log_line = LogLine(
        CALL,
        WARNING,
        "method",
        "%(method)s: the metadata rpcwheel-criticality of a call was ignored, because %(reason)s: "
        "%(value)s",
    )
    method: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class OverloadBegan(Event):
    """A server with a limit has refused a call, the first one in 5 s."""

    log_line = LogLine(
        CALL,
        WARNING,
        "server",
        "%(server)s is overloaded: it works on %(running call)s with %(waiting call)s waiting, and "
        "refuses others, the least critical first",
    )
    metrics = (Count("overloads", "Times at which a server began to refuse calls.", "server"),)
    server: str
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class OverloadEnded(Event):
    """A server has not refused a call for 5 s."""

    log_line = LogLine(
        CALL,
        INFO,
        "server",
        "%(server)s is no longer overloaded; it has refused %(refused call)s in %(duration_s).3g s",
        always_after=OverloadBegan,
    )
    server: str
    refused: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class LimitIneffective(Event):
    """A server has interceptors with a limit, and an executor that does not know the limit."""

    log_line = LogLine(
        CALL,
        ERROR,
        "server",
        "the limit of %(server)s has no effect, because it needs the executor of the kit: "
        "grpc.server(kit.server_executor(), interceptors=kit.server_interceptors())",
    )
    server: str


@dataclass(frozen=True, slots=True)
class BreakerOpened(Event):
    """A circuit breaker sends no more calls for `duration_s`; `reason` says what has failed.

    `target` is that of the channel; of a function it is "function". If the breaker was opened by
    hand, `duration_s` is infinite.
    """

    log_line = LogLine(
        CALL,
        WARNING,
        "target method",
        "%(target)s %(method)s: the circuit breaker is open %(duration)s: %(reason)s",
    )
    metrics = (
        Count(
            "breaker_opened", "Times at which a circuit breaker opened.", "method=labeled_method"
        ),
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
        """Return `duration`, for how long it is open."""
        by_hand = math.isinf(self.duration_s)
        return {"duration": "until it is reset" if by_hand else f"for {self.duration_s:.3g} s"}


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """A circuit breaker that was open sends all calls again, after `duration_s`."""

    log_line = LogLine(
        CALL,
        INFO,
        "target method",
        "%(target)s %(method)s: the circuit breaker is closed again, after %(duration_s).3g s",
        always_after=BreakerOpened,
    )
    target: str
    method: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class ThrottleBegan(Event):
    """A client has throttled a call of this method, the first one in 5 s."""

    log_line = LogLine(
        CALL,
        WARNING,
        "target method",
        "%(target)s %(method)s: the server accepts too few calls; the client sends only a part of "
        "them",
    )
    metrics = (Count("throttles", "Times at which a client began to throttle a method.", "method"),)
    target: str
    method: str


@dataclass(frozen=True, slots=True)
class ThrottleEnded(Event):
    """A client has not throttled a call of this method for 5 s."""

    log_line = LogLine(
        CALL,
        INFO,
        "target method",
        "%(target)s %(method)s: the client sends all calls again; it has not sent %(refused call)s "
        "in %(duration_s).3g s",
        always_after=ThrottleBegan,
    )
    target: str
    method: str
    refused: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class LateResponse(Event):
    """A response came for a pending call that ended `late_s` before; `ending` says how."""

    log_line = LogLine(
        CALL,
        WARNING,
        "name",
        "%(name)s: the response to %(key)s came %(late_s).3g s after the call had %(ending)s",
    )
    name: str
    key: str
    ending: str
    late_s: float


@dataclass(frozen=True, slots=True)
class UnmatchedResponse(Event):
    """A response came whose key belongs to no pending call and to no call that ended lately."""

    log_line = LogLine(
        CALL, WARNING, "name", "%(name)s: a response came for %(key)s, which no call waits for"
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
        CALLBACK,
        ERROR,
        "subject callback",
        "%(subject)s: %(callback)s raised %(error)s",
        traceback=True,
    )
    metrics = (
        Count(
            "callbacks_failed",
            "Callbacks, predicates and wait objects of the program that raised an exception.",
        ),
    )
    subject: str
    callback: str
    error: BaseException


# Connections


@dataclass(frozen=True, slots=True)
class HeartbeatMissed(Event):
    """A heartbeat was not answered in time. `misses` counts missed heartbeats in a row.

    `silent_s` is the time since anything was read. `answer` says how the heartbeat ended: with a
    status, or with an answer that does not count, and why.
    """

    log_line = LogLine(
        CONNECTION,
        INFO,
        "target",
        "%(target)s: heartbeat missed, %(misses)d in a row, "
        "nothing read for %(silent_s).3g s (%(answer)s)",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (Count("heartbeats_missed", "Heartbeats without an answer in time.", "target"),)
    target: str
    misses: int
    silent_s: float
    answer: str


@dataclass(frozen=True, slots=True)
class ConnectionDead(Event):
    """Nothing was read for the heartbeat timeout. `calls` are in flight on the connection."""

    log_line = LogLine(
        CONNECTION,
        WARNING,
        "target",
        "%(target)s: connection dead, nothing read for %(silent_s).3g s, %(misses heartbeat)s "
        "missed, %(calls call)s in flight",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (Count("connections_dead", "Connections declared dead.", "target"),)
    target: str
    silent_s: float
    misses: int
    calls: int


@dataclass(frozen=True, slots=True)
class ConnectionReplaced(Event):
    """A channel replaced its connection; `number` counts its connections, from 1.

    `calls` were in flight on the old connection.
    """

    log_line = LogLine(
        CONNECTION,
        INFO,
        "target",
        "%(target)s: replaced its connection (the new one is number %(number)d), with "
        "%(calls call)s in flight on the old one: %(reason)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (
        Count(
            "connections_replaced", "Connections that a channel replaced by a new one.", "target"
        ),
    )
    target: str
    number: int
    reason: str
    calls: int


@dataclass(frozen=True, slots=True)
class ConnectionAlive(Event):
    """A connection that was suspected or dead answered, after `after_s` without an answer.

    `rtt_s` is the round trip of the heartbeat; None if a call of the user's was answered.
    """

    log_line = LogLine(
        CONNECTION,
        INFO,
        "target",
        "%(target)s: connection alive after %(after_s).3g s without an answer",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=ConnectionDead,
    )
    target: str
    after_s: float
    rtt_s: float | None


@dataclass(frozen=True, slots=True)
class ConnectionIdle(Event):
    """A server's connection is idle. It will be closed, or is only reported."""

    log_line = LogLine(
        CONNECTION,
        INFO,
        "peer",
        "%(peer)s: idle for %(idle_s).3g s, %(reason)s, %(calls call)s and %(streams stream)s open",
        interval_s=OUTAGE_INTERVAL_S,
    )
    peer: str
    reason: str
    idle_s: float
    calls: int
    streams: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed(Event):
    """A server closed an idle connection."""

    log_line = LogLine(
        CONNECTION,
        INFO,
        "peer",
        "%(peer)s: connection closed, idle for %(idle_s).3g s, %(reason)s",
    )
    metrics = (
        Count(
            "connections_closed_idle",
            "Connections that a server closed, by the limit that they exceeded.",
            "reason",
        ),
    )
    peer: str
    reason: str
    idle_s: float


@dataclass(frozen=True, slots=True)
class IdleCloseSkipped(Event):
    """An idle connection was not closed; `reason` says why."""

    log_line = LogLine(
        CONNECTION,
        INFO,
        "peer",
        "%(peer)s: connection not closed, %(reason)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (
        Count(
            "idle_closes_skipped",
            "Idle connections that a server did not close, by reason.",
            "reason",
        ),
    )
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class IdleDetectionLimited(Event):
    """An idle detector cannot do everything on this system, or for these addresses."""

    log_line = LogLine(CONNECTION, WARNING, "reason", "idle connection detection: %(reason)s")
    reason: str


@dataclass(frozen=True, slots=True)
class SubchannelUnhealthy(Event):
    """A subchannel failed. It gets no calls while a healthy subchannel is READY.

    It gets calls again after it answers a health check.
    """

    log_line = LogLine(
        CONNECTION,
        WARNING,
        "channel subchannel",
        "%(channel)s: %(subchannel)s is unhealthy and gets no calls: %(reason)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (
        Count(
            "ejections", "Subchannels that were taken out of use because they failed.", "channel"
        ),
    )
    channel: str
    subchannel: str
    reason: str


@dataclass(frozen=True, slots=True)
class SubchannelHealthy(Event):
    """A subchannel gets calls again, after it was unhealthy for `after_s`."""

    log_line = LogLine(
        CONNECTION,
        INFO,
        "channel subchannel",
        "%(channel)s: %(subchannel)s is healthy again, after %(after_s).3g s",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=SubchannelUnhealthy,
    )
    channel: str
    subchannel: str
    after_s: float


@dataclass(frozen=True, slots=True)
class StaleInstancesKept(Event):
    """The registry may have lost instances of a service; a channel keeps those that answer.

    All instances of the service disappeared, or these were stale for `stale_timeout`.
    """

    log_line = LogLine(
        CONNECTION,
        WARNING,
        "channel",
        "%(channel)s: the registry may have lost these instances; the channel keeps them as long "
        "as they answer: %(subchannels)s",
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


@dataclass(frozen=True, slots=True)
class InstancePublished(Event):
    """The registry accepted an instance: a new one, a changed one, or one that it had lost."""

    log_line = LogLine(
        REGISTRY,
        INFO,
        "registry service instance",
        "%(registry)s: published %(service)s instance %(instance)s%(details)s",
    )
    metrics = (
        Count(
            "registry_published",
            "Instances that were published. Label again: why it was published again, or empty.",
            "registry grpc_service=service again",
        ),
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
            details += f", again: {reason}; it was missing for at most {self.away_s:.3g} s"
        return {"details": details}


@dataclass(frozen=True, slots=True)
class InstanceWithdrawn(Event):
    """The registry removed an instance because this process asked for it."""

    log_line = LogLine(
        REGISTRY,
        INFO,
        "registry service instance",
        "%(registry)s: withdrew %(service)s instance %(instance)s",
    )
    metrics = (
        Count(
            "registry_withdrawn", "Instances that were withdrawn.", "registry grpc_service=service"
        ),
    )
    registry: str
    service: str
    instance: str


@dataclass(frozen=True, slots=True)
class RegistryFailed(Event):
    """A request to the registry failed, or two processes publish the same instance id.

    In the second case `error` is an `InstanceIdConflict`.
    """

    log_line = LogLine(
        REGISTRY,
        WARNING,
        "registry",
        "%(registry)s: %(action)s failed (%(next)s): %(error)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (
        Count("registry_failures", "Requests to a registry that failed.", "registry request"),
    )
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
        when = f"in {self.delay_s:.3g} s" if self.delay_s else "now"
        if isinstance(self.error, InstanceIdConflict):
            return {"action": "keeping an instance published", "next": f"published again {when}"}
        action = REQUESTS.get(self.request, self.request).format(plural(self.items, "instance"))
        if self.delay_s is None:
            return {"action": action, "next": NOT_REPEATED.get(self.request, "not repeated")}
        kept = "known instances are kept; " if self.request == "watch" else ""
        return {"action": action, "next": f"{kept}next attempt {when}"}


@dataclass(frozen=True, slots=True)
class RegistryRecovered(Event):
    """The registry answers again, `after_s` after the first failure."""

    log_line = LogLine(
        REGISTRY,
        INFO,
        "registry",
        "%(registry)s: the registry answers again after %(after_s).3g s",
        interval_s=OUTAGE_INTERVAL_S,
        always_after=RegistryFailed,
    )
    metrics = (Count("registry_recoveries", "Ends of outages of a registry.", "registry"),)
    registry: str
    after_s: float


@dataclass(frozen=True, slots=True)
class InstancesChanged(Event):
    """The known instances of a subscribed service changed; `instances` is their present number.

    `source` is that of the new `Snapshot`: "live", "stale" or "cache". If `added` and `removed` are
    0, the values of an instance or the source changed.
    """

    log_line = LogLine(
        REGISTRY,
        INFO,
        "registry service",
        "%(registry)s: %(service)s has %(instances instance)s, source %(source)s: "
        "%(added)d added, %(removed)d removed",
    )
    registry: str
    service: str
    instances: int
    added: int
    removed: int
    source: str


@dataclass(frozen=True, slots=True)
class InstancesRetained(Event):
    """Instances disappeared from a registry that may have lost data; they are kept as stale.

    They are removed after `RegistryPolicy.stale_timeout` unless the registry lists them again.
    `instances` is their number. `reason` says why the registry is suspected.
    """

    log_line = LogLine(
        REGISTRY,
        WARNING,
        "registry service",
        "%(registry)s: %(instances instance)s of %(service)s disappeared while the registry may "
        "have lost data (%(reason)s); kept as stale until the registry lists them again or "
        "stale_timeout is over",
        interval_s=OUTAGE_INTERVAL_S,
    )
    metrics = (
        Count(
            "registry_retained",
            "Times that instances were kept that a registry had lost, perhaps with its data.",
            "registry grpc_service=service",
        ),
    )
    registry: str
    service: str
    instances: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecordSkipped(Event):
    """A record in the registry or in a snapshot file is not a valid instance.

    Emitted once for each content of the record.
    """

    log_line = LogLine(
        REGISTRY,
        WARNING,
        "registry service",
        "%(registry)s: ignored the record %(key)s of %(service)s, which is not a valid instance: "
        "%(error)s",
        interval_s=OUTAGE_INTERVAL_S,
    )
    registry: str
    service: str
    key: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class SnapshotFailed(Event):
    """A snapshot file cannot be read or written. The registry works without it.

    Emitted once until the file works again.
    """

    log_line = LogLine(
        REGISTRY,
        WARNING,
        "registry path",
        "%(registry)s: cannot use the snapshot file %(path)s, which clients need only if they "
        "start while the registry is down: %(error)s",
    )
    registry: str
    path: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ShutdownStep(Event):
    """A step of a published server's graceful shutdown begins, or the shutdown has ended.

    `server` is the first service and its address.
    """

    log_line = LogLine(
        REGISTRY, INFO, "server", "%(server)s is shutting down (%(reason)s): %(action)s"
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
class WithdrawalFailed(Event):
    """A published server has stopped, but a registry may list it until its lease ends.

    `server` is the first service and its address. `error` is that of the last request; None if it
    was not answered.
    """

    log_line = LogLine(
        REGISTRY,
        WARNING,
        "server registry",
        "%(server)s has stopped, but could not be withdrawn from %(registry)s, which may list it "
        "until its lease ends: %(error)s",
    )
    server: str
    registry: str
    error: BaseException | None
