"""The rounds of an idle detector: find the connections, decide which are idle, close those.

A round runs on a worker thread, never on the timer's: it asks the kernel about each connection. It
is a scan of the process's sockets, a decision for each connection, and an attempt to close those of
which that was decided. A connection that cannot be closed yet (a status is still on its way to the
client) is examined again in a later round, until nothing is pending. Rounds are serialized by a
lock, and the timeout of the next is set when one has ended, so they do not pile up.

The decision is some milliseconds old when a connection is closed. So each is examined again right
before, under the lock of the table, and the kernel is asked too: a call that has begun meanwhile,
or bytes that have just arrived and may be one, keep it. The socket is shut down under the same
lock. Bytes that gRPC has read may be a call that is not in the table yet. So the server is given a
pause to accept calls first, and bytes that arrived after the pause began keep the connection.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import ConfigurationError, TimerError, TimerStopped, public_name, safe_repr
from rpcwheel.events import (
    ConnectionClosed,
    ConnectionIdle,
    Event,
    IdleCloseSkipped,
    IdleDetectionLimited,
)
from rpcwheel.telemetry import components
from rpcwheel.timer import shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of

from .core import (
    ACCEPT_LATENCY_NS,
    NOT_YET,
    IdleLimit,
    Limits,
    PendingClose,
    SocketState,
    Step,
    idle_reason,
    next_step,
)
from .policy import IdlePolicy
from .sockets import SUPPORTED, ServerPorts, SocketScanner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .core import IdleReason
    from .sockets import OpenSocket, SocketInfo
    from .table import Connection, ConnectionEntry, ServedCall, Table

HIDDEN_CALLS: Final = (
    "an interceptor before ConnectionTable hides who calls (context.peer() failed), so connections "
    "that were idle during such a call are not closed; give ConnectionTable first"
)

NO_CALLS: Final = (
    "clients send data, but no call was ever seen, so their connections are not closed: is the "
    "ConnectionTable among the server's interceptors?"
)

NOT_SUPPORTED: Final = (
    "this system does not show a process its sockets: idle connections are reported, and not closed"
)

NO_TIMES: Final = (
    "the system does not say when data arrived on a connection (TCP_INFO is refused, or incomplete "
    "as in gVisor): idle_timeout and write_idle close no connection, and max_age closes it at the "
    "end of max_age_grace; allow getsockopt(TCP_INFO), or use gRPC's own server options "
    "grpc.max_connection_idle_ms and grpc.max_connection_age_ms"
)

STOPPED: Final = (
    "detection has stopped because its timer was stopped; create a new IdleConnectionDetector with "
    "a running timer"
)

PAUSED: Final = "detection has stopped until check() or change() is called"

NO_REQUEST_TIMEOUT: Final = (
    "request_timeout has no effect with this version of grpcio: rpcwheel cannot find or end calls "
    "whose request has not arrived; install an older grpcio"
)


class _WakeUp:
    """The task of a detector's timeout."""

    __slots__ = ("_detector",)

    def __init__(self, detector: DetectorBase) -> None:
        self._detector = detector

    def run(self, _: Timeout) -> None:
        EXECUTOR.submit(("idle", id(self._detector)), self._detector._run_round)

    def timer_stopped(self, _: Timeout) -> None:
        self._detector._report_limit("stopped", STOPPED)


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


@public_name("IdleConnectionDetector")
class DetectorBase:
    """The common part of the detectors of `grpc` and `grpc.aio`."""

    def __init__(
        self,
        server: object,
        policy: IdlePolicy | Duration | None,
        *,
        table: Table,
        ports: int | str | Iterable[int | str] | None,
        timer: Timer | None,
    ) -> None:
        self._policy = _checked_policy(policy)
        self._limits = Limits(self._policy)
        self._ports = ServerPorts.parse(ports)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._server = weakref.ref(server)
        self._table = table
        self._round_lock = threading.RLock()
        """Held by a round; taken before `_lock`."""
        self._lock = threading.RLock()
        """Guards the timeout and the end; taken before the lock of the table."""
        self._closed = False
        self._timeout: Timeout | None = None
        self._next_check_ns = NEVER
        self._limited: set[str] = set()
        self._events = NotificationQueue()  # sinks may call `close()`
        self._warn_of_limits()  # raises, if warnings are errors
        self._scanner = SocketScanner(self._ports) if SUPPORTED else None
        with table.lock:
            if table.owner is not None:
                self._free()
                raise ConfigurationError(
                    "connections belongs to another detector; close that one first, and give each "
                    "server a table of its own"
                )
            table.owner = self
        table.now_ns = self._now_ns
        table.set_heartbeats(self._policy.heartbeats)
        self._restart_interval()
        components.add("detector", self)

    # What depends on the server

    def _check_server_ended(self) -> bool:
        """Return whether the server has ended. At each round, on a worker thread or a user's."""
        return self._server() is None

    def _pause(self) -> bool:
        """Give the server time to accept calls that have arrived; False if that failed.

        On a worker thread; blocks for a tenth of a second at most.
        """
        raise NotImplementedError

    def _unknown_calls_since_ns(self, paused: bool) -> int | None:
        """When the oldest call may have arrived of which the connection is not known.

        By `time.monotonic_ns`; None if there is no such call. Called under the lock of the table;
        `paused` is whether a pause succeeded just now.
        """
        raise NotImplementedError

    def _account_for_calls(self) -> None:
        """Note which calls are known. At each check, on a worker thread; does not block."""
        raise NotImplementedError

    def _end_late_requests(self, limit_ns: int) -> bool:
        """End calls that have waited for their single request for `limit_ns`.

        The waiting time counts from the first time that this method finds a call waiting.

        Returns:
            False if that is impossible with this version of grpcio.
        """
        raise NotImplementedError

    # For users

    @property
    def policy(self) -> IdlePolicy:
        """The present policy."""
        return self._policy

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def change(self, **settings: Any) -> IdlePolicy:
        """Change settings of the policy.

        Connections that are about to be closed are examined again by the new policy. The next check
        is a whole `check_interval` away. Thread-safe.

        Returns:
            The new policy.

        Raises:
            ConfigurationError, TypeError: As `IdlePolicy`; then nothing has changed.
        """
        with self._lock:
            policy = self._policy.replace(**settings)
            limits = Limits(policy)
            self._table.set_heartbeats(policy.heartbeats)
            with self._table.lock:  # a round that runs uses either the old limits or the new
                self._policy, self._limits = policy, limits
                for entry in self._table.entries():
                    entry.pending = None
            self._restart_interval()
        return policy

    @safe_repr
    def __repr__(self) -> str:
        kind = type(self)
        state = "closed" if self._closed else f"{len(self._table)} connections"
        return f"<{kind.__module__}.{kind.__name__} {state}>"

    def _stop(self) -> None:
        """Start no more rounds. Idempotent, any thread, does not block."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            self._schedule()
        with self._table.lock:
            if self._table.owner is self:
                self._table.owner = None
                for entry in self._table.entries():
                    entry.pending = None
        if not was_closed:
            EXECUTOR.submit(("idle", id(self)), self._free)

    def _free(self) -> None:
        """Free the descriptors. Waits for a round that runs."""
        with self._round_lock:
            if self._scanner is not None:
                self._scanner.close()

    # The timer

    def _restart_interval(self) -> None:
        interval_ns = self._limits.check_interval_ns
        self._next_check_ns = NEVER if interval_ns == NEVER else self._now_ns() + interval_ns
        self._schedule()

    def _schedule(self) -> None:
        """Set the timeout of the next round."""
        with self._lock:
            if self._timeout is not None:
                self._timeout.cancel()
                self._timeout = None
            if self._closed:
                return
            pending = [entry.pending for entry in self._table.entries()]
            next_ns = min([self._next_check_ns, *(close.next_ns for close in pending if close)])
            if next_ns == NEVER:
                return
            timer = shared_timer() if self._timer is None else self._timer
            delay_s = to_seconds(max(0, next_ns - self._now_ns()))
            try:
                self._timeout = timer.new_timeout(_WakeUp(self), delay_s)
            except TimerStopped:
                self._report_limit("stopped", STOPPED)
            except (TimerError, RuntimeError) as error:  # full, or no thread can be started
                self._report_limit("timer", f"{PAUSED}: {error}")

    # A round

    def _run_round(self, *, check: bool = False) -> list[Connection]:
        """Do what is due; with `check` also a check that is not. Returns the idle connections.

        On a worker thread, or on a user's.
        """
        if not self._closed and self._check_server_ended():
            self._stop()
        with self._round_lock:
            if self._closed:
                return []
            events: list[Event] = []
            idle: list[ConnectionEntry] = []
            check = check or self._now_ns() >= self._next_check_ns
            try:
                if check:
                    self._scan()
                    self._check_requests()
                    idle = self._decide(events)
                self._close_pending(events)
            finally:
                self._events.emit(*events)
                if check:
                    self._restart_interval()
                else:
                    self._schedule()
            return self._table.connections(self._limits, idle)

    def _list_connections(self, *, waits: bool = True) -> list[Connection]:
        """Scan the sockets, and return all connections; none after the end.

        Waits for a round that runs, or takes the connections of the last scan.
        """
        if self._round_lock.acquire(blocking=waits):
            try:
                if not self._closed:
                    self._scan()
            finally:
                self._round_lock.release()
        return [] if self._closed else self._table.connections(self._limits, self._table.entries())

    def status(self) -> tuple[ConnectionStatus, ...]:
        """Describe the connections; by the last scan if a round runs. Any thread."""
        return tuple(map(_connection_status, self._list_connections(waits=False)))

    def _scan(self) -> None:
        """Update the table from the sockets of the process."""
        self._account_for_calls()
        table = self._table
        if self._scanner is not None:
            scanned_ns = table.now_ns()
            own, others = self._scanner.scan(table.callers())
            table.reconcile(own, scanned_ns)
            for info in others[:1]:
                ports = ", ".join(map(str, sorted(self._ports.numbers)))
                self._report_limit(
                    "ports",
                    f"a call came in from {info.name}, at port {info.local[1]}, but no socket of "
                    f"that peer is open at port {ports}; are these the server's ports?",
                )
        if table.hidden_call_ns != NOT_YET:
            self._report_limit("hidden", HIDDEN_CALLS)
        for entry in table.entries():
            if entry.address is None:
                self._report_limit(
                    "system", f"clients at {entry.peer} cannot be distinguished or closed"
                )

    def _check_requests(self) -> None:
        limit_ns = self._limits.request_timeout_ns
        if limit_ns != NEVER and not self._end_late_requests(limit_ns):
            self._report_limit("requests", NO_REQUEST_TIMEOUT)

    def _decide(self, events: list[Event]) -> list[ConnectionEntry]:
        """Find the idle connections, and decide which to close."""
        table, idle = self._table, []
        for entry in table.entries():
            with table.lock:
                if entry.gone or table.owner is not self:
                    continue
                limits, now_ns, activity = self._limits, self._now_ns(), entry.activity
                reason = idle_reason(activity, limits, now_ns)
                if reason is None:
                    continue
                was_busy = entry.pending is not None and entry.pending.reason.busy
                if not (reason.busy or was_busy):
                    idle.append(entry)
                    if entry.note_report(reason, limits):
                        calls, streams = activity.user.unary_calls, activity.user.streams
                        idle_s = reason.idle_ns / 1e9
                        events.append(
                            ConnectionIdle(entry.peer, reason.text, idle_s, calls, streams)
                        )
                hidden = table.hidden_call_ns >= now_ns - reason.idle_ns
                if entry.info is None or limits.report_only or hidden:
                    continue
                if self._may_close(entry, entry.info, reason) and entry.pending is None:
                    entry.pending = PendingClose(reason, now_ns)
        return idle

    def _may_close(self, entry: ConnectionEntry, info: SocketInfo, reason: IdleReason) -> bool:
        """Whether enough is known of a connection to close it. Reports what is missing."""
        if info.lacks_times:
            self._report_limit("times", NO_TIMES)
            if reason.limit in (IdleLimit.IDLE, IdleLimit.WRITE):
                return False  # the connection would never be found quiet
        if self._table.has_seen_calls or entry.had_no_call():
            return True
        self._report_limit("calls", NO_CALLS)
        return False

    def _close_pending(self, events: list[Event]) -> None:
        """Take the next step with each connection that is due to be closed."""
        now_ns, scanner = self._table.now_ns(), self._scanner
        entries = self._table.entries()
        due = [
            entry
            for entry in entries
            if entry.pending is not None and entry.pending.next_ns <= now_ns
        ]
        if not due or scanner is None:
            return
        began_ns = time.monotonic_ns()
        paused = self._pause()
        finished: list[tuple[ServedCall, str]] = []
        try:
            for entry in due:
                if entry.info is None:  # by now several sockets have this peer
                    entry.pending = None
                    continue
                with scanner.open(entry.info) as socket, self._table.lock:
                    if socket is None:  # the client has closed it
                        self._table.drop(entry)
                    elif entry.pending is not None and not entry.gone:
                        state = self._socket_state(socket, began_ns, paused=paused)
                        self._take_step(entry, entry.pending, socket, state, events, finished)
        finally:
            for call, details in finished:
                call.finish(details)

    def _socket_state(self, socket: OpenSocket, began_ns: int, *, paused: bool) -> SocketState:
        unknown_since_ns = self._unknown_calls_since_ns(paused)
        now_ns = time.monotonic_ns()
        return SocketState(
            received_ago_ns=socket.received_ago_ns(),
            unread=socket.unread(),
            unsent=socket.unsent(),
            unaccounted_ns=now_ns - began_ns
            if unknown_since_ns is None
            else now_ns - unknown_since_ns + ACCEPT_LATENCY_NS,
            has_unknown_calls=unknown_since_ns is not None,
        )

    def _take_step(
        self,
        entry: ConnectionEntry,
        pending: PendingClose,
        socket: OpenSocket,
        state: SocketState,
        events: list[Event],
        finished: list[tuple[ServedCall, str]],
    ) -> None:
        now_ns, reason, limits = self._table.now_ns(), pending.reason, self._limits
        step = next_step(entry.activity, pending, state, limits, now_ns)
        pending.note_step(step, limits, now_ns)
        match step:
            case Step.WAIT | Step.WAIT_LONG:
                pass
            case Step.END_CALLS:
                for call in entry.calls:
                    if not call.ended_by_detector:
                        call.ended_by_detector = True
                        finished.append((call, f"closed by the server: {reason.text}"))
            case Step.SHUTDOWN:
                socket.shutdown()
                self._table.drop(entry)
                events.append(ConnectionClosed(entry.peer, reason.text, reason.idle_ns / 1e9))
            case Step.KEEP_USED | Step.KEEP_BUSY:
                entry.pending = None
                events.append(IdleCloseSkipped(entry.peer, step.value))

    # What is not possible

    def _warn_of_limits(self) -> None:
        text = None
        if not SUPPORTED:
            text = NOT_SUPPORTED
        elif self._ports.unix:
            text = f"clients at {', '.join(self._ports.unix)} cannot be distinguished or closed"
        if text is not None:
            warnings.warn(f"IdleConnectionDetector: {text}", RuntimeWarning, stacklevel=4)
            self._report_limit("system", text)

    def _report_limit(self, limit: str, text: str) -> None:
        """Report once what does not work."""
        if limit not in self._limited:
            self._limited.add(limit)
            self._events.emit(IdleDetectionLimited(text))


def _checked_policy(policy: object) -> IdlePolicy:
    if policy is None or isinstance(policy, IdlePolicy):
        return policy or IdlePolicy()
    if isinstance(policy, (int, float, timedelta)) and not isinstance(policy, bool):
        return IdlePolicy(idle_timeout=policy)
    raise TypeError(
        f"policy must be an IdlePolicy, or the seconds of its idle_timeout, not {policy!r}"
    )


def _connection_status(connection: Connection) -> ConnectionStatus:
    tls, state = connection.tls_identity, connection.state.value
    return ConnectionStatus(
        connection.peer,
        connection.local_address,
        connection.user_agent,
        None if tls is None else tls.subject,
        () if tls is None else tls.alternative_names,
        state,
        connection.idle_s,
        connection.calls_in_flight,
        connection.streams_in_flight,
        connection.calls_total,
        connection.heartbeats_total,
        connection.connected_at.timestamp(),
        "it is being closed" if state == "closing" else "",
    )
