"""The heartbeat of one connection, as far as it is the same for `grpc` and `grpc.aio`.

Each heartbeat has one timeout, set to the next moment that matters. Traffic only changes stamps, so
a busy connection costs one wake-up per interval. On the timer's thread the stamps are read and the
timeout is set again, nothing else. The adapters say where the rest runs: our own bookkeeping and
heartbeats (`_soon`), user code in them (`_soon_users`), replacements (`_soon_replaced`), events and
listeners (`_soon_notified`).

`_lock` guards the core, the timeout and the calls in flight; no user code runs under it. It is
re-entrant because a finalizer may detach anything at any time.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.events import emit
from rpcwheel.events.events import (
    CallbackFailed,
    ConnectionAlive,
    ConnectionDead,
    Event,
    ExecutorRejected,
    HeartbeatMissed,
)
from rpcwheel.exiting import BACKGROUND
from rpcwheel.probe import ALIVE, UNANSWERED, ProbeResult
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import clock_of
from rpcwheel.transport.state import ActivityStamps

from .core import HeartbeatCore
from .rules import Changed, Died, HeartbeatState, Missed, Reconnect, Revived, Seen, Send
from .view import HeartbeatView
from .watched import Watched, seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.exiting import BackgroundCall
    from rpcwheel.probe import Probe
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .rules import HeartbeatRules

__all__ = ["SLACK_S", "HeartbeatBase"]

SLACK_S: Final = 1.0
"""How much longer than our own timeout gRPC's deadline of a heartbeat is, as a backstop."""


class HeartbeatBase(HeartbeatView):
    """The heartbeat of one connection; made by `HeartbeatManager.attach`. Thread-safe."""

    def __init__(
        self,
        connection: Any,
        *,
        rules: HeartbeatRules,
        drain_timeout: Any,
        probe: Probe,
        timer: Timer | None,
        forget: Callable[[HeartbeatBase], object],
    ) -> None:
        """For `HeartbeatManager.attach`."""
        self._watched = Watched(connection, clock_of(timer))
        self.target = self._watched.target
        self._probe = probe
        self._drain_timeout = drain_timeout
        self._forget = forget
        self._unhook: Callable[[], object] | None = None
        self._timer = timer
        self._now_ns = clock_of(timer)
        self._lock = threading.RLock()
        self._timeout: Timeout | None = None
        self._calls: dict[int, Any] = {}
        self._activity: ActivityStamps = self._watched.activity() or ActivityStamps(self._now_ns)
        self._planned_by: Seen | None = None  # what had been seen when the timeout was set
        if not self._watched.ours:
            rules = dataclasses.replace(rules, reconnect=False)
        self._core = HeartbeatCore(
            rules, random.random, now_ns=self._now_ns(), begun=not self._watched.ours
        )
        self._listeners: tuple[Callable[..., object], ...] = ()
        self._notifications = NotificationQueue(run=self._soon_notified)

    @property
    def connection(self) -> Any:
        """The channel that is watched, below interceptors; None once its user has dropped it."""
        return self._watched.channel

    @property
    def orphaned(self) -> bool:
        """Whether its channel was dropped by its user."""
        return self._watched.channel is None

    # What users do with it

    def add_listener(
        self, listener: Callable[[Any, HeartbeatState, HeartbeatState], object]
    ) -> None:
        """Have `listener(heartbeat, old, new)` called at each change of state, in order.

        On a worker thread, with `grpc.aio` on the loop; one call at a time. What a listener raises
        becomes a `CallbackFailed` event.

        Raises:
            TypeError: It can't be called with those three, or is a coroutine function.
        """
        listener = checked_listener(listener)
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: object) -> None:
        """Call it no more; an unknown one is no error."""
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known != listener)

    def beat(self) -> bool:
        """Send a heartbeat now, soon that is; False if one is waited for, or none is to be sent."""
        with self._lock:
            wanted = self._core.beat()
        if wanted:
            self._soon(self._act)
        return wanted

    def withdraw(self) -> None:
        """The target is gone on purpose (its registry says so): ask and replace it no more."""
        with self._lock:
            self._core.withdraw()
            self._tidy()
        self._flush()

    def detach(self) -> None:
        """End it; the connection stays as it is. Idempotent, from any thread, never waits."""
        with self._lock:
            self._core.close()
            self._tidy()
        self._flush()

    def is_closed_below(self) -> bool:
        """Whether it is that of a channel of grpc's, which reports no end, and was closed."""
        return not self._watched.ours and self._watched.is_closed()

    def end_at_exit(self) -> None:
        """Detach it: the main thread has ended."""
        self.detach()

    # The timer

    def _begin(self) -> None:
        """Set the first timeout.

        Raises:
            TimerStopped, TooManyTimeouts: The timer doesn't take it.
        """
        with self._lock:
            if self._watched.is_closed() or not BACKGROUND.add(self):
                self._core.close()
            now_ns = self._now_ns()
            at_ns = self._core.next_ns(now_ns, self._seen())
            if at_ns != NEVER:
                timer = self._timer = shared_timer() if self._timer is None else self._timer
                delay = to_seconds(max(0, at_ns - now_ns))
                self._timeout = timer.new_timeout(self._expired, delay)
        self._flush()

    def _expired(self, timeout: Timeout) -> None:
        """On the timer's thread: look whether anything is to be done, and hand it on."""
        with self._lock:
            if timeout is not self._timeout:
                return
            self._timeout = None
            due = self._is_silent() or self._plan()
        if due:
            self._soon(self._act)
        else:
            self._flush()

    def _is_silent(self) -> bool:
        """Whether nothing came since the timeout was set, so that it is due. Under the lock.

        An unused connection is looked at and left alone, which costs no worker.
        """
        activity = self._watched.activity()
        if activity is None:  # orphaned
            return True
        unused = self._core.state is HeartbeatState.UNUSED
        return not unused and activity is self._activity and seen(activity) == self._planned_by

    def _plan(self) -> bool:
        """Set the timeout to the next moment that matters; True if that is now. Under the lock."""
        now_ns = self._now_ns()
        self._planned_by = self._seen()
        at_ns = self._core.next_ns(now_ns, self._planned_by)
        if at_ns <= now_ns or at_ns == NEVER:
            self._tidy()
            return at_ns <= now_ns
        delay = to_seconds(at_ns - now_ns)
        if self._timeout is None or not self._timeout.reschedule(delay):
            self._timeout = None
            self._arm(delay)
        return False

    def _arm(self, delay: float) -> None:
        timer: Any = self._timer
        try:  # the place in the timer that it has just left is still its own
            submit = getattr(timer, "resubmit", timer.new_timeout)
            self._timeout = submit(self._expired, delay)
        except Exception as error:  # noqa: BLE001 - stopped, full, no thread: told, and it ends
            name = str(getattr(timer, "name", type(timer).__name__))
            self._add_event(ExecutorRejected(name, f"heartbeat of {self.target}", error))
            self._core.close()
            self._tidy()

    def _tidy(self) -> None:
        """Drop the timeout, and the calls that no answer counts for any more. Under the lock."""
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()
        self._drop()

    def _drop(self) -> None:
        for number in self._calls.keys() - self._core.on_way:
            self._give_up(self._calls.pop(number))

    def _seen(self) -> Seen:
        """The stamps of the connection that is there now. Under the lock."""
        activity = self._watched.activity()
        if activity is not None and activity is not self._activity:
            self._activity = activity
            self._core.renewed(self._now_ns())
        return seen(self._activity)

    # What is done, where `_soon` says

    def _act(self) -> None:
        if self.orphaned:
            self.detach()
            return
        due = not BACKGROUND.closed
        while due:
            idle = self._watched.is_idle()
            with self._lock:
                step = self._core.step(self._now_ns(), self._seen(), idle=idle)
                self._drop()
                due = step is None and self._plan()
                if isinstance(step, Send):
                    self._plan()
                    self._activity.last_write_ns = self._now_ns()
                activity = self._activity
            match step:
                case Send() if self._watched.pure:
                    self._send(step, activity)
                case Send():
                    self._soon_users(partial(self._send, step, activity))
                case Reconnect():
                    self._flush()  # its death is told first
                    self._soon_replaced(partial(self._reconnect, step))
                case None:
                    pass
        self._flush()

    def _reconnect(self, step: Reconnect) -> None:
        channel = self._watched.channel
        done, failure = False, None
        with self._lock:
            wanted = channel is not None and self._core.confirm(self._now_ns(), self._seen())
        if wanted:
            try:
                # Calls that wait for a connection (`wait_for_ready`) were not sent: they go on.
                drain_timeout = None if self._watched.never_sent() else self._drain_timeout
                done = channel.reconnect(step.reason, drain_timeout=drain_timeout)
            except Exception as error:  # noqa: BLE001 - the user's connect(): told
                failure = error
        with self._lock:
            if failure is not None:
                self._add_event(CallbackFailed(self.target, "connect", failure))
            if done:
                self._activity = self._watched.activity() or self._activity
                self._core.renewed(self._now_ns(), by_us=True)
            else:
                self._core.refused()
            due = self._plan()
        self._flush()
        if due:
            self._act()

    def _send(self, step: Send, activity: ActivityStamps) -> None:
        """Start the call; what comes of it goes to `_settle`."""
        background = BACKGROUND.begin_call()
        if background is None:
            return
        began_ns = self._now_ns()
        settle = partial(self._settle, _Sent(step.number, began_ns, activity))
        try:
            member = self._watched.member(self._probe.method)
            call = self._start(member, step, settle, background)
        except Exception as error:  # noqa: BLE001 - a closed channel, the user's interceptor
            BACKGROUND.end_call(background)
            if not self._watched.ours and _says_closed(error):
                self.detach()
            else:
                settle(began_ns, type(error).__name__, None)
            return
        with self._lock:
            if step.number in self._core.on_way:
                self._calls[step.number] = call
                return
        self._give_up(call)

    def _settle(self, sent: _Sent, at_ns: int, code: str, response: object) -> None:
        """Take note of how a heartbeat ended. Never waits: it may run on gRPC's thread."""
        condemning = True
        if code in UNANSWERED or (response is None and not code.isupper()):
            verdict, answer = ProbeResult(alive=False), code
            condemning = code.isupper() and not self._was_said(code)
        else:
            verdict = self._judge(response) if isinstance(response, bytes) else ALIVE
            answer = "NOT_SERVING"
        with self._lock:
            core, now_ns = self._core, self._now_ns()
            self._calls.pop(sent.number, None)
            core.notice(now_ns, self._seen())
            if not verdict.alive:
                known = core.missed(
                    *(now_ns, sent.number, answer),
                    serving=verdict.serving,
                    condemning=condemning,
                )
            elif known := core.heard(
                now_ns, sent.number, rtt_ns=max(0, at_ns - sent.at_ns), serving=verdict.serving
            ):
                sent.activity.last_read_ns = now_ns
            self._drop()
            due = known and self._plan()
        self._flush()
        if due:
            self._soon(self._act)

    def _was_said(self, code: str) -> bool:
        """Whether a status was not made up for want of a connection.

        gRPC says UNAVAILABLE when a connection breaks, a proxy when its upstream has, and gRPC
        again when call credentials can't be had. Only the first leaves the channel not READY.
        """
        return code == "UNAVAILABLE" and self._watched.is_ready()

    def _judge(self, response: bytes) -> ProbeResult:
        try:
            verdict: object = self._probe.judge(response)
            if isinstance(verdict, ProbeResult):
                return verdict
            raise TypeError(f"judge must return a ProbeResult, not {verdict!r}")  # noqa: TRY301 - told as what it raises itself
        except Exception as error:  # noqa: BLE001 - the user's: told; an answer it was
            self._add_event(CallbackFailed(self.target, repr(self._probe), error))
            return ALIVE

    def _flush(self) -> None:
        """Emit events and call listeners, in order, where user code may run. Not under the lock."""
        with self._lock:
            if self._core.told:
                told, self._core.told = self._core.told, []
                for fact in told:
                    self._add(fact)
            over = self._core.state is HeartbeatState.CLOSED
            unhook, self._unhook = (self._unhook, None) if over else (None, self._unhook)
        if over:  # never under the lock: others' locks are taken
            self._forget(self)
        if unhook is not None:
            unhook()
        self._notifications.start()

    def _add(self, fact: object) -> None:
        """Add what the core reports to the notifications. Under the lock."""
        match fact:
            case Changed(old, new):
                if self._listeners:  # else each heartbeat costs more
                    self._notifications.add(partial(self._call_listeners, old, new))
            case Missed(misses, silent_ns, answer):
                missed = HeartbeatMissed(self.target, misses, to_seconds(silent_ns), answer)
                self._add_event(missed)
            case Died(silent_ns, misses):  # its calls are counted before they are ended
                calls = self._watched.calls()
                self._add_event(ConnectionDead(self.target, to_seconds(silent_ns), misses, calls))
            case Revived(after_ns, rtt_ns):
                rtt_s = None if rtt_ns is None else to_seconds(rtt_ns)
                self._add_event(ConnectionAlive(self.target, to_seconds(after_ns), rtt_s))

    def _add_event(self, event: Event) -> None:
        self._notifications.add(partial(emit, event))

    def _call_listeners(self, old: HeartbeatState, new: HeartbeatState) -> None:
        for listener in self._listeners:
            run_callback(self.target, listener, self, old, new, catch=BaseException)

    def _when_over(self, unhook: object) -> None:
        """Call `unhook()` at the end; whatever else it is, is ignored."""
        if callable(unhook):
            with self._lock:
                self._unhook = unhook
            self._flush()

    # In the adapters

    def _soon(self, job: Callable[[], object]) -> None:
        """Run our own bookkeeping where grpc may be called; from any thread."""
        raise NotImplementedError

    def _soon_users(self, job: Callable[[], object]) -> None:
        """As `_soon`, for users' code, which may hang without holding up other heartbeats."""
        raise NotImplementedError

    def _soon_replaced(self, job: Callable[[], object]) -> None:
        """As `_soon`, for replacements: users' code makes channels, and sinks are told."""
        raise NotImplementedError

    def _soon_notified(self, job: Callable[[], object]) -> None:
        """As `_soon`, for events and listeners."""
        raise NotImplementedError

    def _start(
        self,
        call: Any,
        step: Send,
        settle: Callable[[int, str, object], None],
        background: BackgroundCall,
    ) -> Any:
        """Begin a heartbeat; `settle(at_ns, code, response)` once, where `_soon` would run it.

        When the call has ended, `BACKGROUND.end_call(background)` is called.
        """
        raise NotImplementedError

    def _give_up(self, call: Any) -> None:
        """Cancel a heartbeat whose answer nobody waits for; on any thread, must not block."""
        raise NotImplementedError


class _Sent(NamedTuple):
    """A heartbeat that was sent."""

    number: int
    at_ns: int
    activity: ActivityStamps
    """Of the connection on which it was sent."""


def _says_closed(error: Exception) -> bool:
    """Whether grpc refused a call because the channel was closed; the words of 1.60 and 1.85."""
    said = str(error).lower()
    return "closed" in said and "channel" in said


def checked_listener(listener: object) -> Any:
    """Return `listener`.

    Raises:
        TypeError: It can't be called with three arguments, or is a coroutine function.
    """
    if (
        not callable(listener)
        or inspect.iscoroutinefunction(listener)
        or not _takes(listener, "heartbeat", "old", "new")
    ):
        raise TypeError(
            "listener must be a plain function (heartbeat, old, new); for a coroutine give one "
            f"that starts a task of it; not {listener!r}"
        )
    return listener


def _takes(function: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True
