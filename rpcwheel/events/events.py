"""Events: frozen records of what rpcwheel loses, delays or saves.

Fields that end with `_s` are seconds. `timer` and `name` are the names that the user gave; `task`
and `function` are labels such as `shop.orders.push`; `registry` is the registry's URL without the
password; `instance` is an instance's id. An `error` is the exception itself with its traceback, so
a sink that keeps the event also keeps the frames.
"""

from dataclasses import dataclass


class Event:
    """The base of every event: annotate a sink with it, `def sink(event: Event) -> None`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TaskSlow(Event):
    """A task ran on the timer's own thread for so long that other timeouts were late."""

    timer: str
    task: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class TaskFailed(Event):
    """A task raised; the timer goes on."""

    timer: str
    task: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class ExecutorRejected(Event):
    """The executor or loop that should run a task would not take it."""

    timer: str
    task: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class TooManyTimers(Event):
    """More timers live than any program needs: one shared timer serves them all."""

    live: int
    limit: int


@dataclass(frozen=True, slots=True)
class FailbackQueued(Event):
    """The first try of a call failed; it waits for its retry, and the caller has the default."""

    name: str
    function: str
    error: BaseException
    delay_s: float
    pending: int


@dataclass(frozen=True, slots=True)
class FailbackAttemptFailed(Event):
    """A retry failed and another will follow. `attempts` counts all tries, the first one too."""

    name: str
    function: str
    attempts: int
    waited_s: float
    error: BaseException
    delay_s: float


@dataclass(frozen=True, slots=True)
class FailbackDelivered(Event):
    """A parked call succeeded in the end, at its `attempts`-th try, `waited_s` after its first."""

    name: str
    function: str
    attempts: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class FailbackGaveUp(Event):
    """A parked call is given up: no retries left, or an error that retrying does not cure."""

    name: str
    function: str
    attempts: int
    waited_s: float
    error: BaseException
    reason: str


@dataclass(frozen=True, slots=True)
class FailbackDropped(Event):
    """A call failed and was not parked because the queue is full (`overflow="drop"`)."""

    name: str
    function: str
    error: BaseException
    pending: int


@dataclass(frozen=True, slots=True)
class FailbackLost(Event):
    """Parked calls ended without delivery: closed, exit, their timer stopped, their loop closed."""

    name: str
    functions: tuple[str, ...]
    """Their distinct labels, in order of age."""
    count: int
    oldest_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetterFailed(Event):
    """The user's dead-letter hook raised; the call it was given is in no other place."""

    name: str
    function: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class CallSlow(Event):
    """A call has run for `elapsed_s` and still runs. `side` is "client" or "server"."""

    method: str
    side: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class RetryScheduled(Event):
    """A try of a call failed; the next one begins within the call, after `delay_s`."""

    method: str
    attempts: int
    code: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class HedgeSent(Event):
    """A call was sent again before its earlier attempts have ended, or as one of them failed."""

    method: str
    attempt: int
    """2 for the second attempt."""


@dataclass(frozen=True, slots=True)
class RetryStopped(Event):
    """A try failed with a status that `RetryPolicy.retry_on` names, and is not retried.

    `reason` says why, and what to do: only methods marked `idempotent` are retried.
    """

    method: str
    attempts: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class DefaultResponseUsed(Event):
    """A call failed for good, and its caller was answered with the default_response's default."""

    method: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class StreamStalled(Event):
    """A response stream gave no message for `silent_s`, and was cancelled."""

    method: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class DeadlineExceededBeforeStart(Event):
    """A call was refused by the server because its deadline had passed before its turn came."""

    method: str
    late_s: float
    """0.0 where it can't be told: `grpc.aio` does not show it."""


@dataclass(frozen=True, slots=True)
class CallbackFailed(Event):
    """A user's callback, listener, predicate or wait object raised. Nothing else is changed by it.

    A listener goes on being called.
    """

    subject: str
    """The method, target, service or queue that it was called for."""
    callback: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class HeartbeatMissed(Event):
    """A heartbeat was not answered in time; `misses` counts those in a row."""

    target: str
    misses: int
    silent_s: float
    """Since anything was read."""
    answer: str
    """How the probe ended: the name of a status, or why its answer does not count."""


@dataclass(frozen=True, slots=True)
class ConnectionDead(Event):
    """Nothing was read for the heartbeat timeout, heartbeats were not answered."""

    target: str
    silent_s: float
    misses: int
    calls: int
    """Calls in flight on it."""


@dataclass(frozen=True, slots=True)
class ConnectionReplaced(Event):
    """A channel has replaced its connection; `number` counts its connections, from 1."""

    target: str
    number: int
    reason: str
    calls: int
    """Calls in flight on the old one."""


@dataclass(frozen=True, slots=True)
class ConnectionAlive(Event):
    """A connection that was suspect or dead is answered on; `after_s` of silence."""

    target: str
    after_s: float
    rtt_s: float | None
    """None if it was a call of the user's that was answered."""


@dataclass(frozen=True, slots=True)
class ConnectionIdle(Event):
    """A server's connection does nothing any more, and is going to be closed (or only told of)."""

    peer: str
    reason: str
    idle_s: float
    calls: int
    streams: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed(Event):
    """A server has closed a connection; `how` is "shutdown" or "goaway"."""

    peer: str
    reason: str
    idle_s: float
    how: str


@dataclass(frozen=True, slots=True)
class IdleCloseSkipped(Event):
    """A connection that was to be closed is still open; `reason` says why."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class IdleDetectionLimited(Event):
    """An idle detector can't do all it should, on this system or for these addresses."""

    reason: str


@dataclass(frozen=True, slots=True)
class LateResponse(Event):
    """An answer came to a pending call that had ended `late_s` before; `ending` says how."""

    name: str
    key: str
    ending: str
    late_s: float


@dataclass(frozen=True, slots=True)
class UnmatchedResponse(Event):
    """An answer came that no pending call waits for, nor one that ended lately unanswered."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class InstancePublished(Event):
    """The registry has accepted an instance: a new one, a changed one, or one that it had lost."""

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


@dataclass(frozen=True, slots=True)
class InstanceWithdrawn(Event):
    """The registry has removed an instance because this process asked for it."""

    registry: str
    service: str
    instance: str


@dataclass(frozen=True, slots=True)
class RegistryFailed(Event):
    """A request to the registry failed, or two processes publish the same instance id.

    In the second case `error` is an `InstanceIdConflict`.
    """

    registry: str
    request: str
    """"publish", "withdraw", "renew", "watch", "lookup" or "close"."""
    error: BaseException
    delay_s: float | None
    """Seconds until the next attempt. None: the request is not repeated."""
    items: int = 1
    """The number of instances in the request."""


@dataclass(frozen=True, slots=True)
class RegistryRecovered(Event):
    """The registry answers again, `after_s` after the first failure."""

    registry: str
    after_s: float


@dataclass(frozen=True, slots=True)
class InstancesChanged(Event):
    """The known instances of a subscribed service have changed.

    `source` is that of the new `Snapshot`: "live", "stale" or "cache". If `added` and `removed` are
    0, the values of an instance or the source have changed.
    """

    registry: str
    service: str
    instances: int
    """How many there are now."""
    added: int
    removed: int
    source: str


@dataclass(frozen=True, slots=True)
class InstancesRetained(Event):
    """Instances disappeared from a registry that may have lost data; they are kept as stale.

    They are removed after `RegistryPolicy.stale_timeout` unless the registry lists them again.
    `reason` says why the registry is suspected.
    """

    registry: str
    service: str
    instances: int
    """The number of stale instances."""
    reason: str


@dataclass(frozen=True, slots=True)
class RecordSkipped(Event):
    """A record in the registry or in the snapshot file is not a valid instance.

    Emitted once for each content of the record.
    """

    registry: str
    service: str
    key: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class SnapshotFailed(Event):
    """The snapshot file cannot be read or written. The registry works without it.

    Emitted once until the file works again.
    """

    registry: str
    path: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class SubchannelUnhealthy(Event):
    """A subchannel failed and gets no calls while a healthy one is READY.

    It gets calls again when it answers a health check.
    """

    channel: str
    subchannel: str
    reason: str


@dataclass(frozen=True, slots=True)
class SubchannelHealthy(Event):
    """A subchannel gets calls again, after it was unhealthy for `after_s`."""

    channel: str
    subchannel: str
    after_s: float


@dataclass(frozen=True, slots=True)
class StaleInstancesKept(Event):
    """The registry has no instances any more; a channel keeps the last ones that still answer."""

    channel: str
    subchannels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShutdownStep(Event):
    """A step of a published server's graceful shutdown begins, or the shutdown has ended."""

    server: str
    """The first service and its address."""
    step: str
    """"withdraw", "not serving", "wait" (`lame_duck`), "stop", and at the end "closed"."""
    reason: str
    """Why the server is shut down, such as "SIGTERM"."""


@dataclass(frozen=True, slots=True)
class WithdrawalFailed(Event):
    """A published server has stopped, but a registry may list it until its lease ends."""

    server: str
    """The first service and its address."""
    registry: str
    error: BaseException | None
    """Of the last request; None: it has not been answered."""
