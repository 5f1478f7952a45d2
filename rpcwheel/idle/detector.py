"""The rounds of an idle detector: look at all connections, decide, tell, and close some.

A round runs on a worker, never on the timer's thread: it asks the kernel about each connection. It
is a scan of the process's sockets, then a decision for each connection, then a second scan that
closes those that were marked, each after one more look. What is not over then (a status that is
still on its way to the client, a client that was asked to leave) is looked at again by a timeout of
its own, until nothing is marked any more. Rounds come one after the other, under a lock, and the
timeout of the next is set when one has ended: they never overlap, and never pile up.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import ConfigurationError, TimerError, TimerStopped
from rpcwheel.events import ConnectionIdle, Event, IdleDetectionLimited
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from .closing import Closing, Settled
from .core import NOTHING, Mark, judge
from .limits import Limits
from .peers import SUPPORTED
from .policy import IDLE_TIMEOUT_S, IdlePolicy
from .ports import Ports
from .scan import Scan
from .table import Connections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .entry import Connection, Entry

__all__ = ["Detector"]

BLIND: Final = (
    "an interceptor before ConnectionTable hides who calls (context.peer() failed), so that while "
    "there are such calls connections on which anything comes in are kept; give ConnectionTable "
    "first"
)

UNSEEN: Final = (
    "clients say something, but no call was ever seen, so that they are kept: is the "
    "ConnectionTable among the server's interceptors?"
)

TLS: Final = "a client under TLS can't be asked to leave: its connection is shut down"

STOPPED: Final = (
    "detection has stopped because its timer was stopped; create a new IdleConnectionDetector with "
    "a running timer"
)

PAUSED: Final = "detection has stopped until check() or change() is called"

NO_REQUEST_TIMEOUT: Final = (
    "request_timeout has no effect with this version of grpcio: rpcwheel can't find or end calls "
    "whose request has not arrived; install an older grpcio"
)


class Detector:
    """What the twins of `IdleConnectionDetector` have in common."""

    def __init__(
        self,
        server: object,
        idle_timeout: Duration | None = IDLE_TIMEOUT_S,
        *,
        connections: Connections,
        ports: int | str | Iterable[int | str] | None = None,
        policy: IdlePolicy | None = None,
        timer: Timer | None = None,
        **settings: Any,
    ) -> None:
        """Begin to look, every `check` seconds of the policy, until `close()`.

        Args:
            server: Whose connections these are. Held weakly; the detector ends with it.
            idle_timeout: As in `IdlePolicy`; 180 s. None: no such limit.
            connections: The table that was given to the server, among its `interceptors`. Each
                server has its own.
            ports: Where the server listens: what `add_insecure_port()` returned, or the address,
                which is better where the process listens at the same port of another address. No
                socket of another address or port is ever touched. None: wherever a call has come
                in.
            policy: All settings at once, in place of `idle_timeout` and the others.
            timer: Any rpcwheel timer; None takes `shared_timer()`.
            **settings: Those of `IdlePolicy`, by name.

        Raises:
            TypeError: An argument is of a wrong type.
            ConfigurationError: A setting is out of range, `policy` and settings are both given, or
                another detector has the table.
            OSError: The process has no descriptor left; two are held, so that looks need none.
        """
        self._policy = _policy(policy, idle_timeout, settings)
        self._limits = Limits.from_policy(self._policy)
        self._ports = Ports.of(ports)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._server = weakref.ref(server)
        self._connections = connections
        self._rounds = threading.RLock()
        """Held by a round; taken before `_lock`."""
        self._lock = threading.RLock()
        """Taken before the table's, never after."""
        self._closed = False
        self._next: Timeout | None = None
        self._again: Timeout | None = None
        self._requests: Timeout | None = None
        self._limited: set[str] = set()
        self._events = NotificationQueue()  # sinks may call `close()`
        self._say_what_is_not_possible()  # which may raise, where warnings are errors
        self._scan = Scan(self._ports)
        try:
            _own(connections, self)
        except BaseException:
            self._free()
            raise
        connections.now_ns = self._now_ns
        connections.set_heartbeats(self._policy.heartbeats)
        self._arm()
        self._arm_requests()

    # What a twin knows

    def _is_over(self) -> bool:
        """Whether the server has ended. On a worker."""
        return self._server() is None

    def _settle(self) -> bool:
        """Give the server a moment to see the calls that have come in; False if it had none.

        On a worker; waits for a tenth of a second at most.
        """
        return True

    def _coming_ago_ns(self, settled: bool) -> int:
        """That of `Look`; told whether the server had its moment. Cheap, under the table's lock."""
        return NOTHING

    # For users

    @property
    def policy(self) -> IdlePolicy:
        """What it goes by."""
        return self._policy

    @property
    def connections(self) -> Connections:
        """The table it looks after."""
        return self._connections

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def change(self, **settings: Any) -> IdlePolicy:
        """Change settings of the policy while it runs; connections already marked are judged anew.

        Returns:
            The new policy. The next look is a whole `check` of it away.

        Raises:
            ConfigurationError, TypeError: As `IdlePolicy`; then nothing has changed.

        Thread-safe.
        """
        with self._lock:
            policy = self._policy.replace(**settings)
            limits = Limits.from_policy(policy)
            self._connections.set_heartbeats(policy.heartbeats)
            with self._connections.lock:  # a round decides by the old ones, or by the new
                self._policy, self._limits = policy, limits
                for entry in self._connections.entries():
                    mark = entry.mark
                    if mark is not None and (mark.left_ns is None or limits.report):
                        entry.mark = None
            self._arm()
            self._arm_requests()
        return policy

    def _stop(self) -> bool:
        """Start no more rounds; False if that was done before. Any thread, does not wait."""
        with self._lock:
            was, self._closed = self._closed, True
            for timeout in (self._next, self._again, self._requests):
                if timeout is not None:
                    timeout.cancel()
            self._next = self._again = self._requests = None
        with self._connections.lock:
            if self._connections.owner is self:
                self._connections.owner = None
                for entry in self._connections.entries():
                    entry.mark = None
        if not was:
            EXECUTOR.submit(("idle", id(self)), self._free)
        return not was

    def _free(self) -> None:
        """Give up the descriptors, when no round runs: milliseconds."""
        with self._rounds:
            if self._scan.slot is not None:
                self._scan.slot.close()

    def __repr__(self) -> str:
        kind = type(self)
        state = "closed" if self._closed else f"{len(self._connections.entries())} connections"
        return f"<{kind.__module__}.{kind.__name__} {state}>"

    # The timer

    def _arm(self) -> None:
        with self._lock:
            if self._next is not None:
                self._next.cancel()
            self._next = self._timeout(self._limits.check_ns, self._round)

    def _arm_requests(self) -> None:
        with self._lock:
            if self._requests is not None:
                self._requests.cancel()
            self._requests = self._timeout(self._limits.request_check_ns, self._end_late_requests)

    def _arm_again(self) -> None:
        """Have what is marked looked at when its next step is."""
        marks = [entry.mark for entry in self._connections.entries()]
        next_ns = min((mark.next_ns for mark in marks if mark is not None), default=NEVER)
        with self._lock:
            if self._again is not None:
                self._again.cancel()
            delay_ns = NEVER if next_ns == NEVER else max(0, next_ns - self._now_ns())
            self._again = self._timeout(delay_ns, self._act)

    def _timeout(self, delay_ns: int, work: Callable[[], object]) -> Timeout | None:
        if self._closed or delay_ns == NEVER:
            return None
        timer = shared_timer() if self._timer is None else self._timer
        try:
            return timer.new_timeout(_Look(self, work), to_seconds(delay_ns))
        except TimerStopped:
            self.timer_stopped()
            return None
        except TimerError as error:
            self._limit("timer", f"{PAUSED}: {error}")
            return None

    def hand_over(self, work: Callable[[], object]) -> None:
        """Internal: run a round on a worker."""
        EXECUTOR.submit(("idle", id(self)), work)

    def timer_stopped(self) -> None:
        """Internal: report that detection has stopped."""
        self._limit("stopped", STOPPED)

    # A round

    def _round(self) -> list[Connection]:
        """Look at everything; gives those that are idle. On a worker, or on a user's thread."""
        found: list[Entry] = []
        if not self._closed and self._is_over():
            self._stop()
        with self._rounds:
            if self._closed:
                return []
            events: list[Event] = []
            try:
                self._look()
                found = self._decide(events)
                self._close_marked(events)
            finally:
                self._events.emit(*events)
                self._arm()
                self._arm_again()
                if self._requests is None:
                    self._arm_requests()
        return [entry.connection() for entry in found]

    def _act(self) -> None:
        """Go on with what is marked. On a worker."""
        with self._rounds:
            if self._closed:
                return
            events: list[Event] = []
            try:
                self._close_marked(events)
            finally:
                self._events.emit(*events)
                self._arm_again()

    def _end_late_requests(self) -> None:
        """End calls whose request does not arrive. On a worker."""
        if self._is_over():
            self._stop()
        with self._rounds:
            if not self._closed:
                try:
                    self._connections.end_late_requests(self._limits.request_ns)
                    if not self._connections.can_end_late_requests:
                        self._limit("requests", NO_REQUEST_TIMEOUT)
                finally:
                    self._arm_requests()

    def _look(self) -> None:
        """Scan the sockets, and bring the table up to date."""
        connections = self._connections
        if SUPPORTED:
            unknown = self._scan.look(connections)
            if unknown is not None:
                peer, port = unknown
                where = "" if port is None else f", at port {port}"
                self._limit(
                    "ports",
                    f"a call came in from {peer}{where}, but no socket of that peer is open at "
                    f"port {', '.join(map(str, sorted(self._ports.numbers)))}; are these the "
                    "server's ports?",
                )
        if connections.uncounted:
            self._limit("blind", BLIND)
        apart = [one.peer for one in connections.entries() if one.address is None]
        if apart:
            self._limit("system", f"clients at {apart[0]} can't be told apart, nor closed")

    def _decide(self, events: list[Event]) -> list[Entry]:
        """Judge each connection, tell of the idle ones, and mark those that are to be closed."""
        connections, idle = self._connections, []
        for entry in connections.entries():
            with connections.lock:
                if entry.gone or connections.owner is not self:
                    continue
                limits, now_ns = self._limits, self._now_ns()
                if entry.address is None:  # all that can't be told apart: it has no age
                    limits = limits._replace(age_ns=NEVER)
                due = judge(entry.seen, limits, now_ns)
                if due is None:
                    continue
                was_busy = entry.mark is not None and entry.mark.due.waits
                is_idle = not (due.waits or was_busy)
                if is_idle:
                    idle.append(entry)
                moves = entry.seen.moves(limits, due.reason)
                if is_idle and entry.is_news(due, moves):
                    calls, streams = entry.seen.user.calls, entry.seen.user.streams
                    idle_s = due.idle_ns / 1e9
                    events.append(ConnectionIdle(entry.peer, due.text, idle_s, calls, streams))
                closable = entry.inode is not None and not entry.ambiguous and not limits.report
                if closable and not connections.has_seen_calls() and not entry.is_mute():
                    self._limit("unseen", UNSEEN)
                elif closable and entry.mark is None:
                    entry.mark = Mark(due, moves, now_ns)
                    if limits.goaway and entry.asked and not entry.seen.plain:
                        self._limit("goaway", TLS)
        return idle

    def _close_marked(self, events: list[Event]) -> None:
        closing = Closing(
            self._connections, lambda: self._limits, Settled(self._settle), self._coming_ago_ns
        )
        try:
            closing.run(self._scan.slot)
        finally:
            events += closing.events
            for call, details in closing.finished:
                call.finish(details)

    # What can't be done

    def _say_what_is_not_possible(self) -> None:
        said = None
        if not SUPPORTED:
            said = "this system does not show a process its sockets: connections are only told of"
        elif self._ports.others:
            said = f"clients at {', '.join(self._ports.others)} can't be told apart, nor closed"
        if said is not None:
            warnings.warn(f"IdleConnectionDetector: {said}", RuntimeWarning, stacklevel=4)
            self._limit("system", said)

    def _limit(self, what: str, said: str) -> None:
        """Tell once what does not work."""
        if what not in self._limited:
            self._limited.add(what)
            self._events.emit(IdleDetectionLimited(said))


class _Look:
    """The timer's task that starts a round. The round itself runs on a worker."""

    __slots__ = ("_detector", "_work")

    def __init__(self, detector: Detector, work: Callable[[], object]) -> None:
        self._detector = detector
        self._work = work

    def run(self, _: Timeout) -> None:
        self._detector.hand_over(self._work)

    def timer_stopped(self, _: Timeout) -> None:
        self._detector.timer_stopped()


def _policy(
    policy: IdlePolicy | None, idle_timeout: Duration | None, settings: dict[str, Any]
) -> IdlePolicy:
    if policy is None:
        return IdlePolicy(idle_timeout=idle_timeout, **settings)
    if not isinstance(policy, IdlePolicy):
        raise TypeError(f"policy must be an IdlePolicy, or None, not {policy!r}")
    if settings or idle_timeout != IDLE_TIMEOUT_S:
        raise ConfigurationError(
            "give either policy, or idle_timeout and the other settings, not both; "
            "policy.replace(...) makes another policy of one"
        )
    return policy


def _own(connections: Connections, detector: Detector) -> None:
    """Give a table its detector."""
    if not isinstance(connections, Connections):
        raise TypeError(
            "connections must be the ConnectionTable among the server's interceptors, not "
            f"{connections!r}"
        )
    with connections.lock:
        if connections.owner is not None:
            raise ConfigurationError(
                "connections belongs to another detector; close that one first, and give each "
                "server a table of its own"
            )
        connections.owner = detector
