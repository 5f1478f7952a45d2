"""Heartbeats and their manager, as far as they are the same for `grpc` and `grpc.aio`.

Each heartbeat has one timeout on the timer, set to the next moment at which `HeartbeatCore` may
have something to do. Calls only stamp the activity of their connection, so a busy connection costs
one wake-up per interval. The timer's thread only compares times and sets the timeout again.
Everything else runs where the adapter's `_submit` runs it, depending on the kind of `Work`.

Locks: `_lock` guards the core, the timeout and the heartbeats in flight. No user code runs under
it. It is reentrant because a finalizer may call `detach` at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

import grpc

from rpcwheel._concurrency.callbacks import run_callback, weak_callback
from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel._concurrency.exiting import BACKGROUND
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.backoff import RANDOM
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import TimerStopped, is_coroutine_function, public_name, safe_repr
from rpcwheel.events import CallbackFailed, ConnectionDead, Event, ExecutorRejected, emit
from rpcwheel.telemetry import components
from rpcwheel.telemetry.tracing import add_to_calls
from rpcwheel.timer import ManualTimer, shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of, timer_name
from rpcwheel.transport.probe import ALIVE, UNANSWERED, HealthProbe, ProbeResult, checked_probe

from .channel import WatchedChannel, channel_below_interceptors
from .core import HeartbeatCore
from .policy import HeartbeatPolicy
from .rules import HeartbeatRules, HeartbeatState, Reconnect, Send, StateChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer
    from rpcwheel.transport.probe import Probe
    from rpcwheel.transport.state import ActivityStamps

    Report = Callable[[int, str, object], None]
    """Takes the time of the end of a heartbeat, the name of its status, and the response."""

GRPC_TIMEOUT_MARGIN_S: Final = 1.0
"""How long after its answer no longer counts gRPC's own deadline ends a heartbeat."""

H = TypeVar("H", bound="HeartbeatBase")


class Work(enum.Enum):
    """Kinds of work of a heartbeat, by which `_submit` chooses a thread."""

    BOOKKEEPING = enum.auto()
    """Code of this package that does not block."""
    USER_CODE = enum.auto()
    """A heartbeat that runs interceptors or a probe of the user, which may block."""
    RECONNECT = enum.auto()
    """`reconnect()` of the channel: runs the user's `connect`, and emits events."""
    NOTIFY = enum.auto()
    """Events and listeners."""


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
    """The status that the server reported (`grpc.health.v1`); None: none yet."""
    silence_s: float | None
    """Seconds since anything was read; None: never was anything."""
    problem: str


@public_name("Heartbeat")
class HeartbeatBase(ABC):
    """The heartbeat of one connection; created by `HeartbeatManager.attach`. Thread-safe."""

    target: str
    """The target of the channel, such as `"127.0.0.1:50051"`; its `repr` if that is not known."""

    def __init__(
        self,
        channel: Any,
        *,
        rules: HeartbeatRules,
        drain_timeout: Any,
        probe: Probe,
        timer: Timer | None,
        forget: Callable[[HeartbeatBase], object],
    ) -> None:
        """Create a heartbeat. It calls `forget(heartbeat)` when it has ended."""
        self._channel = WatchedChannel(channel, clock_of(timer))
        self.target = self._channel.target
        self._probe, self._drain_timeout, self._forget = probe, drain_timeout, forget
        self._timer, self._now_ns = timer, clock_of(timer)
        self._lock = threading.RLock()
        self._timeout: Timeout | None = None
        self._calls: dict[int, Any] = {}  # heartbeats in flight, by number
        self._remove_close_callback: Any = None
        self._listeners: tuple[Callable[..., object], ...] = ()
        self._notifications = NotificationQueue(run=partial(self._submit, Work.NOTIFY))
        can_reconnect = self._channel.can_reconnect
        if not can_reconnect:
            rules = dataclasses.replace(rules, reconnect=False)
        if isinstance(timer, ManualTimer):  # what it calls may run when it has advanced further
            rules = dataclasses.replace(rules, stall_ns=NEVER)
        self._core = HeartbeatCore(
            self.target,
            rules,
            RANDOM.random,
            now_ns=self._now_ns(),
            silent_from_start=not can_reconnect,
        )
        components.add("heartbeat", self)

    # In the adapters

    @abstractmethod
    def _submit(self, work: Work, job: Callable[[], object]) -> None:
        """Run `job` soon where `work` may run. Never blocks; any thread."""

    _metadata: ClassVar[Any]
    """`MARK`, as the adapter's gRPC takes it."""
    _is_lost: Callable[[], bool] | None = None
    """Whether heartbeats in flight can't end any more."""

    @abstractmethod
    def _start(self, multicallable: Any, options: dict[str, Any], report: Report) -> Any:
        """Start a heartbeat, and return an object with `add_done_callback`.

        Calls `report(ended_ns, code, response)` when it has ended; `code` is the name of the
        status, or of the type of an exception.
        """

    @abstractmethod
    def _cancel(self, call: Any) -> None:
        """Cancel a heartbeat whose answer no longer counts. Never blocks; any thread."""

    # State

    @property
    def connection(self) -> Any:
        """The watched channel, below its interceptors; None if its user has dropped it."""
        return self._channel.get()

    @property
    def state(self) -> HeartbeatState:
        """The state at the last look: at most an interval ago; while suspect, at most a tick."""
        return self._core.state

    @property
    def last_read(self) -> float | None:
        """When anything was last read, in seconds on the timer's clock; None: never."""
        return _seconds(self._channel.activity.last_read_ns)

    @property
    def last_write(self) -> float | None:
        """When anything was last written, in seconds on the timer's clock; None: never."""
        return _seconds(self._channel.activity.last_write_ns)

    @property
    def last_use(self) -> float | None:
        """When a call (not a heartbeat) last began, read or wrote, on the timer's clock.

        None: never, or not known, because the channel is not a `ReconnectingChannel`.
        """
        return _seconds(self._channel.activity.last_use_ns)

    @property
    def silence(self) -> float | None:
        """Seconds since anything was last read; None: nothing was ever read."""
        read_ns = self._channel.activity.last_read_ns
        return None if read_ns is None else _seconds(max(0, self._now_ns() - read_ns))

    @property
    def rtt(self) -> float | None:
        """Seconds that the last answered heartbeat took; None before the first answer."""
        return _seconds(self._core.rtt_ns)

    @property
    def misses(self) -> int:
        """Heartbeats in a row that were missed."""
        return self._core.misses

    @property
    def sent(self) -> int:
        """Heartbeats sent in all."""
        return self._core.sent

    @property
    def answered(self) -> int:
        """Heartbeats answered in all."""
        return self._core.answered

    @property
    def replaced(self) -> int:
        """How often the connection was replaced because it was dead."""
        return self._core.replaced

    @property
    def serving(self) -> bool | None:
        """The status that the server last reported (`grpc.health.v1`); None: none yet."""
        return self._core.serving

    def status(self) -> HeartbeatStatus | None:
        """Describe the heartbeat now; None if it has ended."""
        state = str(self.state)
        if state == "closed":
            return None
        problem = state if state in {"suspect", "dead"} else ""
        if not problem and self.serving is False:
            problem = "not serving"
        return HeartbeatStatus(
            self.target,
            state,
            self.rtt,
            self.misses,
            self.sent,
            self.answered,
            self.replaced,
            self.serving,
            self.silence,
            problem,
        )

    @safe_repr
    def __repr__(self) -> str:
        return f"<Heartbeat of {self.target}: {self.state}>"

    # Listeners, requests, end

    def add_listener(
        self, listener: Callable[[Any, HeartbeatState, HeartbeatState], object]
    ) -> None:
        """Call `listener(heartbeat, old, new)` at each change of state, in order.

        One call at a time, on a worker thread; with `grpc.aio` on the event loop. What a listener
        raises becomes a `CallbackFailed` event.

        Raises:
            TypeError: It can't be called with these three, or is a coroutine function.
        """
        _check_listener(listener)
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: object) -> None:
        """Call this listener no more; an unknown one is not an error."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def beat(self) -> bool:
        """Send a heartbeat soon; False if an answer is awaited, or heartbeats have ended."""
        with self._lock:
            wanted = self._core.request()
        if wanted:
            self._submit(Work.BOOKKEEPING, self._act)
        return wanted

    def detach(self) -> None:
        """End the heartbeat; the channel stays open. Idempotent, any thread, never blocks."""
        with self._lock:
            self._core.close()
            self._clear()
        self._notify()

    end_at_exit = detach
    """Called by `BACKGROUND` when the main thread has ended."""

    def is_over(self) -> bool:
        """Whether its channel was dropped, or is a plain channel that was closed."""
        return self._channel.is_over()

    def _activity(self) -> ActivityStamps:
        """Return the activity of the active connection. Under the lock."""
        if self._channel.follow():
            self._core.connection_replaced(self._now_ns())
        return self._channel.activity

    # The timer

    def begin(self) -> None:
        """Set the first timeout, and end when the channel is closed.

        Raises:
            TimerStopped, TooManyTimeouts: The timer does not take it.
        """
        with self._lock:
            if self.is_over() or not BACKGROUND.add(self):
                self._core.close()
            now_ns = self._now_ns()
            at_ns = self._core.next_ns(now_ns, self._activity())
            if at_ns != NEVER:
                self._timer = shared_timer() if self._timer is None else self._timer
                delay = to_seconds(max(0, at_ns - now_ns))
                self._timeout = self._timer.new_timeout(self._expired, delay)
        on_close = getattr(self.connection, "on_close", None)
        if callable(on_close):
            self._remove_close_callback = on_close(weak_callback(self.detach))
        self._notify()

    def _expired(self, timeout: Timeout) -> None:
        """Submit the step that is due. On the timer's thread."""
        with self._lock:
            if timeout is not self._timeout:
                return
            self._timeout = None
            due = self.connection is None or self._plan()
        self._notify()
        if due:
            self._submit(Work.BOOKKEEPING, self._act)

    def _plan(self) -> bool:
        """Set the timeout to the next moment that matters; True if that is now. Under the lock."""
        now_ns = self._now_ns()
        at_ns = self._core.next_ns(now_ns, self._activity())
        if at_ns <= now_ns or at_ns == NEVER:
            self._clear()
            return at_ns <= now_ns
        try:
            delay_s = to_seconds(at_ns - now_ns)
            self._timeout = _moved(self._timer, self._timeout, self._expired, delay_s)
        except Exception as error:  # noqa: BLE001 - stopped, full, no thread: reported as an event
            task = f"heartbeat of {self.target}"
            self._add_event(ExecutorRejected(timer_name(self._timer), task, error))
            self._core.close()
            self._clear()
        return False

    def _clear(self) -> None:
        """Cancel the timeout, and the heartbeats whose answer no longer counts. Under the lock."""
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()
        self._cancel_obsolete()

    def _cancel_obsolete(self) -> None:
        obsolete = self._calls.keys() - self._core.in_flight
        for call in [self._calls.pop(number) for number in obsolete]:
            self._cancel(call)  # which clears, too, if its event loop is closed

    # Actions

    def _act(self) -> None:
        """Take the step that is due. Runs as `Work.BOOKKEEPING`."""
        if self.is_over():
            self.detach()
            return
        due = not BACKGROUND.closed
        while due:
            idle = self._channel.connectivity() is grpc.ChannelConnectivity.IDLE
            calls = self._channel.calls
            with self._lock:
                now_ns = self._now_ns()
                action = self._core.step(now_ns, self._activity(), idle=idle, calls=calls)
                self._cancel_obsolete()
                due = action is None and self._plan()
                if isinstance(action, Send):
                    self._plan()
                    self._channel.activity.last_write_ns = self._now_ns()
                activity = self._channel.activity
            match action:
                case Send() if self._channel.runs_user_code:
                    self._submit(Work.USER_CODE, partial(self._send, action, activity))
                case Send():
                    self._send(action, activity)
                case Reconnect():
                    self._notify()  # `ConnectionDead` comes before `ConnectionReplaced`
                    self._submit(Work.RECONNECT, partial(self._reconnect, action.reason))
                case None:
                    pass
        self._notify()

    def _reconnect(self, reason: str) -> None:
        with self._lock:
            dead = self._core.confirm_dead(self._now_ns(), self._activity())
        done = False
        try:
            if dead:
                done = self._channel.reconnect(reason, self._drain_timeout)
        except Exception as error:  # noqa: BLE001 - the user's connect(): reported as an event
            self._add_event(CallbackFailed(self.target, "connect", error))
        finally:  # also after `SystemExit`
            with self._lock:
                if done:
                    self._channel.follow()
                    self._core.connection_replaced(self._now_ns(), by_heartbeat=True)
                else:
                    self._core.reconnect_refused()
            self._act()

    def _send(self, send: Send, activity: ActivityStamps) -> None:
        """Start a heartbeat on the connection with these stamps."""
        background = BACKGROUND.begin_call()
        if background is None:
            return
        background.is_lost = self._is_lost
        sent_ns = self._now_ns()
        report = partial(self._ended, send.number, sent_ns, activity)
        options = {
            "timeout": to_seconds(send.timeout_ns) + GRPC_TIMEOUT_MARGIN_S,
            "metadata": self._metadata,
            "wait_for_ready": send.wait_for_ready or None,
        }
        try:
            call = self._start(self._channel.multicallable(self._probe.method), options, report)
        except Exception as error:  # noqa: BLE001 - a closed channel, the user's interceptor
            BACKGROUND.end_call(background)
            report(sent_ns, type(error).__name__, None)
            return
        call.add_done_callback(lambda _: BACKGROUND.end_call(background))
        with self._lock:
            if send.number in self._core.in_flight:
                self._calls[send.number] = call
                return
        self._cancel(call)

    def _ended(
        self,
        number: int,
        sent_ns: int,
        activity: ActivityStamps,
        ended_ns: int,
        code: str,
        response: object,
    ) -> None:
        """A heartbeat has ended. Never blocks: this may be gRPC's thread."""
        result, answer, is_silence = ALIVE, "NOT_SERVING", True
        if not code.isupper():  # an exception in this process
            result, answer, is_silence = ProbeResult(alive=False), code, False
        elif code in UNANSWERED:
            result, answer = ProbeResult(alive=False), code
            # gRPC says UNAVAILABLE when a connection breaks, a proxy when its own connection does,
            # and gRPC again without call credentials. Only the first makes the channel not READY.
            is_silence = (
                code != "UNAVAILABLE"
                or self._channel.connectivity() is not grpc.ChannelConnectivity.READY
            )
        elif isinstance(response, bytes):
            result = self._judge(response)
        with self._lock:
            core, now_ns = self._core, self._now_ns()
            self._calls.pop(number, None)
            core.observe(now_ns, self._activity())
            if not result.alive:
                counts = core.record_miss(
                    now_ns, number, answer, serving=result.serving, is_silence=is_silence
                )
            else:
                rtt_ns = max(0, ended_ns - sent_ns)
                counts = core.record_answer(now_ns, number, rtt_ns=rtt_ns, serving=result.serving)
                if counts:
                    activity.last_read_ns = now_ns
            self._cancel_obsolete()
            due = counts and self._plan()
        self._notify()
        if due:
            self._submit(Work.BOOKKEEPING, self._act)

    def _judge(self, response: bytes) -> ProbeResult:
        try:
            result: object = self._probe.judge(response)
        except Exception as error:  # noqa: BLE001 - the user's: reported; there was an answer
            failure: Exception = error
        else:
            if isinstance(result, ProbeResult):
                return result
            failure = TypeError(f"judge must return a ProbeResult, not {result!r}")
        self._add_event(CallbackFailed(self.target, repr(self._probe), failure))
        return ALIVE

    # Notifications

    def _notify(self) -> None:
        """Emit events, call listeners, and if it has ended, leave the manager. Without the lock."""
        with self._lock:
            reports, self._core.reports = self._core.reports, []
            for report in reports:
                if not isinstance(report, StateChanged):
                    self._add_event(report)
                elif self._listeners:
                    self._notifications.add(partial(self._call_listeners, report))
            over = self._core.state is HeartbeatState.CLOSED
            remove = self._remove_close_callback if over else None
        if over:
            self._forget(self)
        if callable(remove):
            self._remove_close_callback = None
            remove()
        self._notifications.start()

    def _add_event(self, event: Event) -> None:
        if isinstance(event, ConnectionDead) and (spans := self._channel.spans):
            self._notifications.add(partial(add_to_calls, event, spans))
        self._notifications.add(partial(emit, event))

    def _call_listeners(self, change: StateChanged) -> None:
        for listener in self._listeners:
            run_callback(self.target, listener, self, *change, catch=BaseException)


@public_name("HeartbeatManager")
class HeartbeatManagerBase(Generic[H]):
    """The heartbeats of many connections. Thread-safe."""

    _heartbeat: ClassVar[type[Any]]
    """The class of its heartbeats."""
    _refused: ClassVar[tuple[type[Any], str]]
    """The type of channels that it refuses, and the text that says so."""

    def __init__(
        self,
        timer: Timer | None = None,
        *,
        interval: Duration | None = 60.0,
        timeout: Duration | None = None,
        probe: Probe | None = None,
        drain_timeout: Duration | None = 0.0,
        reconnect: bool = True,
    ) -> None:
        if isinstance(timer, HeartbeatPolicy):
            raise TypeError(
                "the first argument is the timer; for a policy call HeartbeatManager.from_policy"
            )
        if isinstance(timer, (int, float, timedelta)):
            raise TypeError(f"the first argument is the timer; for seconds: interval={timer!r}")
        policy = HeartbeatPolicy(
            interval=interval, timeout=timeout, drain_timeout=drain_timeout, reconnect=reconnect
        )
        self._timer = checked_timer(timer)
        self._probe = checked_probe(HealthProbe() if probe is None else probe)
        self.policy = policy
        """The settings of all heartbeats of this manager."""
        self._rules = HeartbeatRules.from_policy(policy)
        self._closed = False
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget all heartbeats in a forked child, which has none of its parent's."""
        self._lock = threading.RLock()
        self._heartbeats: dict[int, H] = {}  # by id of the channel

    @classmethod
    def from_policy(
        cls, policy: HeartbeatPolicy, *, timer: Timer | None = None, probe: Probe | None = None
    ) -> Self:
        """Create a manager with the settings of a policy.

        Raises:
            TypeError: An argument is of the wrong type.
        """
        if not isinstance(policy, HeartbeatPolicy):
            raise TypeError(f"policy must be a HeartbeatPolicy, not {policy!r}")
        settings = {name: getattr(policy, name) for name in HeartbeatPolicy.model_fields}
        return cls(timer, probe=probe, **settings)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def heartbeats(self) -> tuple[H, ...]:
        """The attached heartbeats, without those whose channel was closed or dropped."""
        return self._detach_ended()

    def _detach_ended(self) -> tuple[H, ...]:
        """Detach the heartbeats whose channel was closed or dropped; returns the others."""
        with self._lock:
            attached = tuple(self._heartbeats.values())
        for heartbeat in attached:
            if heartbeat.is_over():
                heartbeat.detach()
        return tuple(
            heartbeat for heartbeat in attached if heartbeat.state is not HeartbeatState.CLOSED
        )

    def attach(self, connection: Any, *, probe: Probe | None = None) -> H:
        """Watch a connection; if it is watched already, returns its heartbeat.

        Args:
            connection: A `ReconnectingChannel`, or a channel with interceptors on top of one, which
                are skipped. Any other gRPC channel can be watched too. Its activity is not known,
                so it gets a heartbeat in each interval while it is connected, and it can't be
                reconnected: if it is dead, that is only reported.
            probe: What its heartbeats call; None: the manager's probe.

        Returns:
            Its heartbeat, which ends with `detach()`, `close()`, or the channel.

        Raises:
            TypeError: It is not a channel, or needs the manager for `grpc.aio` or for `grpc`, or is
                a `BroadcastChannel` to a list of channels; the probe is not a probe.
            RuntimeError: This manager is closed.
            TimerStopped, TooManyTimeouts: The timer does not take the timeout; nothing is attached.
        """
        if not callable(getattr(connection, "unary_unary", None)):
            raise TypeError(f"connection must be a gRPC channel, not {connection!r}")
        channel = channel_below_interceptors(connection)
        refused, text = self._refused
        if isinstance(channel, refused):
            raise TypeError(f"{text}; not {channel!r}")
        if isinstance(getattr(channel, "_channel", None), tuple):
            raise TypeError(f"connection must be one channel; attach each channel of {channel!r}")
        probe = self._probe if probe is None else checked_probe(probe)
        key = id(channel)
        watched = self._heartbeats.get(key)
        if self.policy.interval is None:  # these have no timeout, at which they end by themselves
            self._detach_ended()
        elif watched is not None and watched.is_over():  # perhaps of a dropped channel with this id
            watched.detach()
        with self._lock:
            if self._closed:
                raise RuntimeError("this HeartbeatManager is closed; create another one")
            if key in self._heartbeats:
                return self._heartbeats[key]
            new: H = self._heartbeat(
                channel,
                rules=self._rules,
                drain_timeout=self.policy.drain_timeout,
                probe=probe,
                timer=self._timer,
                forget=weak_callback(self._forget, key),
            )
            new.begin()
            if new.state is not HeartbeatState.CLOSED:
                self._heartbeats[key] = new
        return new

    def close(self) -> None:
        """Detach all heartbeats; the channels stay open. Idempotent."""
        with self._lock:
            self._closed = True
        for heartbeat in self.heartbeats:
            heartbeat.detach()

    @safe_repr
    def __repr__(self) -> str:
        return f"<HeartbeatManager of {len(self._heartbeats)} connections, {self.policy!r}>"

    def _forget(self, key: int, heartbeat: HeartbeatBase) -> None:
        with self._lock:
            if self._heartbeats.get(key) is heartbeat:
                del self._heartbeats[key]


def _moved(
    timer: Any, timeout: Timeout | None, task: Callable[[Timeout], None], delay_s: float
) -> Timeout:
    """Move a timeout, or make one.

    Raises:
        TimerStopped: The timer was stopped.
        Exception: It takes no timeout, such as a full one.
    """
    if timer.stopped:  # one whose loop is closed would take most timeouts
        raise TimerStopped(f"{timer_name(timer)} is stopped")
    if timeout is not None and timeout.reschedule(delay_s):
        return timeout
    # A full timer still has the place of the timeout that has just expired.
    moved: Timeout = getattr(timer, "resubmit", timer.new_timeout)(task, delay_s)
    return moved


def status_name(error: Exception) -> str:
    """The name of the status of an RPC error; for other errors the name of their type."""
    if not isinstance(error, grpc.RpcError):
        return type(error).__name__
    status = error.code() if hasattr(error, "code") else None
    return str(getattr(status, "name", "UNKNOWN"))


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else to_seconds(ns)


def _check_listener(listener: Any) -> None:
    accepted = not is_coroutine_function(listener)
    try:
        with contextlib.suppress(ValueError):  # a function in C without a signature
            inspect.signature(listener).bind("heartbeat", "old", "new")
    except TypeError:
        accepted = False
    if not accepted:
        raise TypeError(
            "listener must be a plain function (heartbeat, old, new), not a coroutine function; to "
            f"run a coroutine, create a task in it; not {listener!r}"
        )
