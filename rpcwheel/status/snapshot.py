"""A description of everything that runs in this process: `snapshot()`.

It reads what components offer to every thread. It waits for no event loop, and holds the lock of a
component only for as long as the component itself does. A component that raises is left out, and
its error is in `Status.errors`. `dataclasses.asdict` makes JSON of a `Status`.

Texts may come from peers (methods, instance ids, user agents): they are as the peer sent them.
Texts of errors are one line, in which characters that are not printable are escaped.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rpcwheel.events.log import MAX_ERROR, error_kind, error_text
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import BOUNDS_S
from rpcwheel.timer.api import LATENESS_BOUNDS_S, TimerStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rpcwheel.failback.queue import FailbackStats
    from rpcwheel.telemetry.call_counts import CallCounts, MethodTotals

MAX_ENTRIES: Final = 50
"""Entries of a failback queue in a snapshot."""

LATE_S: Final = 0.1
"""A task is late if it starts so much after its deadline. One of `LATENESS_BOUNDS_S`."""

LATE_SHARE: Final = 0.01
"""The share of late tasks from which a timer has a problem."""

FAILURES: Final = frozenset({
    "DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE",
    "UNIMPLEMENTED", "UNKNOWN",
})  # fmt: skip
"""Status codes that show a failure of the server or the connection, as for the alert rules. On a
server DEADLINE_EXCEEDED is none: its clients set the deadline."""

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class TimerStatus:
    """A timer."""

    name: str
    queue: str
    """The class of its queue."""
    stats: TimerStats
    late_s: float
    """By how much its next wake-up is overdue now."""
    problem: str
    """What is wrong with it; "" if nothing is. So it is in all other classes."""


@dataclass(frozen=True, slots=True)
class QueuedCallStatus:
    """A call in a failback queue."""

    function: str
    age_s: float
    attempts: int
    next_attempt_s: float | None
    """None: an attempt runs, or there is no further attempt."""
    error_kind: str
    """The status code, or the class of the error."""
    error: str
    """Begins with the kind."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A failback queue."""

    name: str
    pending: int
    """Calls that are queued; with a journal, in all of it, as last counted."""
    max_pending: int
    oldest_age_s: float | None
    """None: the queue is empty."""
    stats: FailbackStats
    entries: tuple[QueuedCallStatus, ...]
    """The oldest `MAX_ENTRIES` calls."""
    problem: str


@dataclass(frozen=True, slots=True)
class DepthStatus:
    """The calls of one queue and target in a journal."""

    queue: str
    target: str
    waiting: int
    taken: int
    """By processes that attempt them or are about to."""
    dead: int
    oldest_s: float
    """The age of the oldest call that is not dead; 0 without one."""
    problem: str


@dataclass(frozen=True, slots=True)
class JournalStatus:
    """A journal of failback."""

    url: str
    """Without the password."""
    up: bool
    """Whether the last request succeeded."""
    unstored_results: int
    """Results of attempts that the journal has not accepted yet."""
    depths: tuple[DepthStatus, ...]
    """As last counted; of all processes that use the journal."""
    problem: str


@dataclass(frozen=True, slots=True)
class HeartbeatStatus:
    """The heartbeat of a channel."""

    target: str
    state: str
    rtt_s: float | None
    misses: int
    sent: int
    answered: int
    replaced: int
    serving: bool | None
    """What the server said about itself; None: nothing."""
    silence_s: float | None
    """Seconds since anything was read; None: never was anything."""
    problem: str


@dataclass(frozen=True, slots=True)
class SubchannelStatus:
    """A server of a balanced channel."""

    id: str
    address: str
    state: str
    healthy: bool
    unhealthy_reason: str
    ejected: bool
    """Whether it is unhealthy because its calls failed."""
    stale: bool
    """Whether its instance has left the registry and it is kept because it still answers."""
    calls: int
    """In flight."""
    weight: int
    zone: str
    problem: str


@dataclass(frozen=True, slots=True)
class ChannelStatus:
    """A channel to one target, or a balanced channel, which has subchannels."""

    target: str
    """The name of the service if it is balanced."""
    balanced: bool
    state: str
    calls: int
    """In flight."""
    connection: int | None
    """The number of the active connection, from 1; None if it is balanced."""
    stale: bool
    """Whether a subchannel is stale."""
    subchannels: tuple[SubchannelStatus, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class ConnectionStatus:
    """A connection of a server that has an idle detector."""

    peer: str
    local_address: str | None
    user_agent: str | None
    tls_subject: str | None
    tls_names: tuple[str, ...]
    state: str
    idle_s: float
    calls: int
    """In flight, streams included."""
    streams: int
    calls_total: int
    heartbeats_total: int
    connected_at: float
    """Seconds since 1970."""
    problem: str


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """An instance that is published in a registry."""

    service: str
    id: str
    address: str
    state: str
    lease_age_s: float | None
    """Seconds since the registry last confirmed it; None: never."""
    error: str
    problem: str


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """A service that is followed in a registry."""

    service: str
    instances: int
    source: str
    """`"live"`, `"stale"`, `"cache"`, or "" if nothing is known yet."""
    stale_s: float
    """For how long the registry has not confirmed the instances."""
    problem: str


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    """A registry."""

    url: str
    """Without the password."""
    up: bool
    lease_ttl_s: float
    error: str
    """Of the last request, if it failed."""
    registrations: tuple[RegistrationStatus, ...]
    subscriptions: tuple[SubscriptionStatus, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """A server that is published."""

    services: tuple[str, ...]
    state: str
    port: int
    problem: str


@dataclass(frozen=True, slots=True)
class CodeStatus:
    """The calls of a method that ended with one status code."""

    code: str
    count: int
    mean_s: float


@dataclass(frozen=True, slots=True)
class MethodStatus:
    """The calls of a method."""

    side: str
    """`"client"`: calls; `"attempt"`: what clients sent; `"server"`."""
    method: str
    kind: str
    started: int
    in_flight: int
    p50_s: float | None
    """Approximate, from the buckets; the last bound stands for more. None: no call has ended."""
    p99_s: float | None
    failed: int
    """Calls that ended with one of `FAILURES`."""
    codes: tuple[CodeStatus, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """What runs in this process. Rows are sorted by their first field."""

    version: str
    python: str
    grpcio: str
    """"" if it is not imported."""
    pid: int
    started: float | None
    """The start of the process, seconds since 1970; None: not known on this system."""
    now: float
    """Seconds since 1970."""
    timers: tuple[TimerStatus, ...]
    queues: tuple[QueueStatus, ...]
    journals: tuple[JournalStatus, ...]
    heartbeats: tuple[HeartbeatStatus, ...]
    channels: tuple[ChannelStatus, ...]
    connections: tuple[ConnectionStatus, ...]
    registries: tuple[RegistryStatus, ...]
    publishers: tuple[PublisherStatus, ...]
    methods: tuple[MethodStatus, ...]
    calls_counted: bool
    """Whether calls are counted; if not, `methods` is empty."""
    errors: tuple[str, ...]
    """Why components are missing."""


def snapshot() -> Status:
    """Describe what runs in this process. Any thread. Does not raise because a component does."""
    errors: list[str] = []

    def rows(name: components.Kind, describe: Callable[[Any], Iterator[Row]]) -> tuple[Row, ...]:
        found: list[Row] = []
        for component in components.of_kind(name):
            try:
                found += describe(component)
            except Exception as error:  # noqa: BLE001 - the other components are described
                errors.append(f"{name}: {error_text(error, MAX_ERROR)}")
        return tuple(sorted(found, key=_first_field))

    counts = components.call_counts()
    return Status(
        version=_version("rpcwheel"),
        python=platform.python_version(),
        grpcio=_version("grpc"),
        pid=os.getpid(),
        started=_process_start(),
        now=time.time(),
        timers=rows("timer", _timer),
        queues=rows("failback", _queue),
        journals=rows("journal", _journal),
        heartbeats=rows("heartbeat", _heartbeat),
        channels=rows("channel", _channel),
        connections=rows("detector", _connections),
        registries=rows("registry", _registry),
        publishers=rows("publisher", _publisher),
        methods=() if counts is None else tuple(_methods(counts)),
        calls_counted=counts is not None,
        errors=tuple(errors),
    )


def _first_field(row: Any) -> str:
    return str(getattr(row, row.__match_args__[0]))


def _version(package: str) -> str:
    """Return the version of a package; "" if it is not imported."""
    return str(getattr(sys.modules.get(package), "__version__", ""))


def _process_start() -> float | None:
    """Return the wall-clock time at which this process began; None if the system has no /proc."""
    try:
        fields = Path("/proc/self/stat").read_text("utf-8", errors="replace").rpartition(")")[2]
        ticks = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
        uptime_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - (uptime_s - ticks)


def _error(error: BaseException | None) -> str:
    return "" if error is None else error_text(error, MAX_ERROR)


# One component each; nothing for a component that was closed.


def _timer(timer: Any) -> Iterator[TimerStatus]:
    if timer.stopped:
        return
    stats: TimerStats = timer.stats()
    late_s = timer.overdue
    late = sum(stats.lateness.buckets[bisect_left(LATENESS_BOUNDS_S, LATE_S) + 1 :])
    problem = ""
    if late_s > LATE_S:
        problem = f"it should have woken up {late_s:.3g} s ago"
    elif late > LATE_SHARE * stats.fired:
        problem = f"{late} of {stats.fired} tasks started over {LATE_S:g} s late"
    yield TimerStatus(timer.name, timer.queue_type, stats, late_s, problem)


def _queue(queue: Any) -> Iterator[QueueStatus]:
    if queue.closed and not queue.pending:
        return
    stats: FailbackStats = queue.stats()
    entries, pending = queue.held_entries(MAX_ENTRIES), queue.pending
    yield QueueStatus(
        queue.name,
        pending,
        queue.max_pending,
        entries[0].age_s if entries else None,
        stats,
        tuple(
            QueuedCallStatus(
                one.function,
                one.age_s,
                one.attempts,
                None if one.next_attempt_s == math.inf else one.next_attempt_s,
                error_kind(one.error),
                _error(one.error),
            )
            for one in entries
        ),
        "it is full" if pending >= queue.max_pending else _waiting(pending),
    )


def _waiting(count: int) -> str:
    return f"{count:,} call{' waits' if count == 1 else 's wait'}" if count else ""


def _journal(journal: Any) -> Iterator[JournalStatus]:
    results = journal.unstored_results
    problem = "it stores nothing" if journal.is_failing else ""
    if results and problem:
        problem += f"; {results} results wait"
    yield JournalStatus(
        str(journal.url),
        not journal.is_failing,
        results,
        tuple(
            DepthStatus(
                one.queue,
                one.target,
                one.waiting,
                one.taken,
                one.dead,
                one.oldest_s,
                _depth_problem(one.dead, one.waiting + one.taken),
            )
            for one in journal.depths()
        ),
        problem,
    )


def _depth_problem(dead: int, pending: int) -> str:
    letters = f"{dead:,} dead letter{'' if dead == 1 else 's'}" if dead else ""
    return ", ".join(filter(None, (letters, _waiting(pending))))


def _heartbeat(heartbeat: Any) -> Iterator[HeartbeatStatus]:
    state = str(heartbeat.state)
    if state == "closed":
        return
    problem = state if state in {"suspect", "dead"} else ""
    if not problem and heartbeat.serving is False:
        problem = "not serving"
    yield HeartbeatStatus(
        heartbeat.target,
        state,
        heartbeat.rtt,
        heartbeat.misses,
        heartbeat.sent,
        heartbeat.answered,
        heartbeat.replaced,
        heartbeat.serving,
        heartbeat.silence,
        problem,
    )


def _channel(channel: Any) -> Iterator[ChannelStatus]:
    """Describe a `ReconnectingChannel` or the `SubchannelPool` of a balanced channel."""
    balanced = hasattr(channel, "subchannels")
    if channel.closing if balanced else channel.closed:
        return
    subchannels = tuple(map(_subchannel, channel.subchannels)) if balanced else ()
    state = channel.whole_state() if balanced else channel.get_state()
    name = "UNKNOWN" if state is None else str(state.name)
    yield ChannelStatus(
        channel.name if balanced else channel.target,
        balanced,
        name,
        channel.calls,
        None if balanced else channel.number,
        any(one.stale for one in subchannels),
        subchannels,
        _channel_problem(name, known=bool(subchannels) or not balanced),
    )


def _channel_problem(state: str, *, known: bool) -> str:
    if state != "TRANSIENT_FAILURE":
        return ""
    return "its servers cannot be reached" if known else "no server is known"


def _subchannel(subchannel: Any) -> SubchannelStatus:
    instance, state, reason = subchannel.instance, subchannel.state, subchannel.unhealthy_reason
    problem = f"unhealthy: {reason}" if not subchannel.healthy else ""
    if not problem and subchannel.stale:
        problem = "stale: its instance has left the registry"
    if not problem and state.name == "TRANSIENT_FAILURE":
        problem = "it cannot be reached"
    return SubchannelStatus(
        subchannel.id,
        subchannel.address,
        state.name,
        subchannel.healthy,
        reason,
        subchannel.ejected,
        subchannel.stale,
        subchannel.calls,
        instance.weight,
        instance.zone,
        problem,
    )


def _connections(detector: Any) -> Iterator[ConnectionStatus]:
    for one in detector._known_connections():
        tls = one.tls_identity
        yield ConnectionStatus(
            one.peer,
            one.local_address,
            one.user_agent,
            None if tls is None else tls.subject,
            () if tls is None else tls.alternative_names,
            one.state.value,
            one.idle_s,
            one.calls_in_flight,
            one.streams_in_flight,
            one.calls_total,
            one.heartbeats_total,
            one.connected_at.timestamp(),
            "it is being closed" if one.state.value == "closing" else "",
        )


def _registry(session: Any) -> Iterator[RegistryStatus]:
    if session.closed:
        return
    now_ns, lease_s, health = session.now_ns(), session.rules.lease_ns / 1e9, session.health
    registrations = [_registration(one, now_ns, lease_s) for one in session.records()]
    watches = [_subscription(one) for one in session.watches.watches()]
    error = _error(health.error)
    down = health.since_ns is not None
    yield RegistryStatus(
        session.name,
        health.up,
        lease_s,
        error,
        tuple(sorted(registrations, key=lambda one: (one.service, one.id))),
        tuple(sorted(watches, key=_first_field)),
        (error or "it does not answer") if down else "",
    )


def _registration(record: Any, now_ns: int, lease_s: float) -> RegistrationStatus:
    state, error, seen_ns = str(record.state), _error(record.error), record.seen_ns
    age_s = None if seen_ns is None else max(0, now_ns - seen_ns) / 1e9
    problem = error
    if not problem and state == "LOST":
        problem = "the registry has lost it"
    elif not problem and state == "PUBLISHED" and age_s is not None and age_s > lease_s:
        problem = "its lease has run out"
    instance = record.instance
    return RegistrationStatus(
        instance.service, instance.id, instance.address, state, age_s, error, problem
    )


def _subscription(watch: Any) -> SubscriptionStatus:
    known = watch.snapshot
    if known is None:
        return SubscriptionStatus(watch.service, 0, "", 0.0, "nothing is known of it")
    problem = ""
    if known.source != "live":
        problem = f"not confirmed by the registry for {known.age_s:.3g} s"
    return SubscriptionStatus(
        watch.service, len(known.instances), known.source, known.age_s, problem
    )


def _publisher(publisher: Any) -> Iterator[PublisherStatus]:
    state = publisher.state
    if state != "closed":
        services = tuple(one.service for one in publisher.instances)
        problem = "it stops" if state == "ending" else ""
        yield PublisherStatus(services, state, publisher.port, problem)


def _methods(counts: CallCounts) -> Iterator[MethodStatus]:
    for name, side in (
        ("client", counts.client),
        ("attempt", counts.attempts),
        ("server", counts.server),
    ):
        for totals in side.totals():
            yield _method(name, totals)


def _method(side: str, totals: MethodTotals) -> MethodStatus:
    ended = totals.ended
    buckets = [
        sum(numbers) for numbers in zip(*(one.buckets for one in ended.values()), strict=True)
    ]
    codes = tuple(CodeStatus(code, one.number, one.sum / one.number) for code, one in ended.items())
    in_flight = max(0, totals.started - sum(one.count for one in codes))
    failures = FAILURES - {"DEADLINE_EXCEEDED"} if side == "server" else FAILURES
    return MethodStatus(
        side,
        totals.method,
        totals.kind,
        totals.started,
        in_flight,
        quantile(buckets, 0.5),
        quantile(buckets, 0.99),
        sum(one.count for one in codes if one.code in failures),
        codes,
    )


def quantile(buckets: list[int], share: float) -> float | None:
    """Estimate a quantile from the counts of the buckets of `BOUNDS_S`; None if there are none.

    It is interpolated in its bucket, as Prometheus' `histogram_quantile` does. In the last bucket,
    which has no upper bound, it is the last bound.
    """
    rank, below = share * sum(buckets), 0
    if not rank:
        return None
    for index, count in enumerate(buckets[:-1]):
        if below + count >= rank:
            lower = BOUNDS_S[index - 1] if index else 0.0
            return lower + (BOUNDS_S[index] - lower) * (rank - below) / count
        below += count
    return BOUNDS_S[-1]
