"""The part of `ReconnectingChannel` that `grpc` and `grpc.aio` have in common.

`ReconnectingBase` carries out what `Transports` decide: it makes transports, replaces and
drains them. Its subclasses close them, and say on which thread or loop.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from rpcwheel._concurrency.callbacks import CloseCallbacks, weak_callback
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import ConfigurationError, safe_repr
from rpcwheel.events import ConnectionReplaced, emit
from rpcwheel.rpc import Kind
from rpcwheel.telemetry import components
from rpcwheel.telemetry.tracing import add_to_calls
from rpcwheel.timer.manual import checked_timer, clock_of, start_timeout

from .arguments import (
    checked_backoff,
    checked_drain_ns,
    checked_options,
    checked_reason,
    checked_target,
    refuse_both,
)
from .state import MethodSpec, T, Transports
from .status import ChannelStatus, channel_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .state import ActivityStamps


class ReconnectingBase(Generic[T]):
    """A channel whose connection can be replaced while stubs and calls live on."""

    _grpc: ClassVar[Any]
    """The module `grpc` or `grpc.aio`."""
    _hint: ClassVar[str]
    """For errors: where the channels of the other API are."""
    _title: ClassVar[str] = "ReconnectingChannel"

    def __init__(
        self,
        target: str,
        connect: Callable[[Any], Any] | None,
        own: dict[str, Any],
        *,
        options: Any,
        backoff: Any,
        timer: Timer | None,
    ) -> None:
        """Check the arguments, which are those of `ReconnectingChannel`; make a transport.

        `own` has those that are not allowed together with `connect`.
        """
        self._target = checked_target(target)
        refuse_both(connect, **own)
        self._options = checked_options(options)
        self._connect = connect or partial(_connect, self._grpc, target, **own)
        reconnect_backoff = checked_backoff(backoff)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._lock = threading.RLock()  # the garbage collector may end a call at any time
        self._drain_timeouts: dict[T, Timeout] = {}
        self._close_callbacks = CloseCallbacks(target)
        self.transports: Transports[T] = Transports(
            self._new_transport(), self._now_ns, reconnect_backoff
        )
        """The transports, and which of them serves the next call."""
        components.add("channel", self)

    def _new_transport(self) -> T:
        channel: object = self._connect(list(self._options))
        if not isinstance(channel, self._grpc.Channel):
            name = self._grpc.__name__
            raise TypeError(
                f"connect must return a new {name}.Channel, not {channel!r}; for {self._hint}"
            )
        return self._transport(channel)

    # --- For subclasses to override ---

    def _transport(self, channel: Any) -> T:
        """Make a transport from a channel of gRPC."""
        raise NotImplementedError

    def _enter(self) -> None:
        """Check that `reconnect` or `drain` may be called here."""

    def _replaced(self) -> None:
        """Another transport is active."""
        raise NotImplementedError

    def _close_transport(self, transport: T) -> None:
        """Close a transport, now or soon, and end the calls on it with its `end_details`."""
        raise NotImplementedError

    def _expire_soon(self, transport: T, timeout: Timeout) -> None:
        """Call `_expire` on a worker, or on the loop. Runs on the timer's thread."""
        raise NotImplementedError

    def _heartbeats(self, spec: MethodSpec) -> Any:
        """Make the multicallable of `heartbeat_call`."""
        raise NotImplementedError

    def get_state(self, try_to_connect: bool = False) -> Any:
        """Return the state of the active connection."""
        raise NotImplementedError

    # --- Reconnecting ---

    def reconnect(
        self,
        reason: str = "asked for",
        *,
        drain_timeout: Duration | None = None,
        force: bool = False,
    ) -> bool:
        """Replace the active connection by a new one, which new calls use at once.

        A call that starts meanwhile uses one of the two and does not fail. Emits
        `ConnectionReplaced` here. With `grpc`, thread-safe; blocks only for `connect`, and delays
        no calls. With `grpc.aio`, to be called on the loop.

        Args:
            reason: Why; part of the event, and of the status of calls that are ended.
            drain_timeout: Seconds for which calls may continue on the old connection. Then they end
                with UNAVAILABLE, "connection replaced: <reason>". 0: they end now; with `grpc` on a
                worker thread, and if the state is subscribed to, within 0.2 s. None: no limit.
            force: Whether to reconnect even if the backoff forbids it.

        Returns:
            False, and nothing has changed, if the backoff forbids it, if another thread has just
            reconnected (not with `force`), or if the channel is closed or drains.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is not a duration, or is negative.
            RuntimeError: It is a channel of `grpc.aio`, and no event loop runs here.
            Exception: Of `connect` or of the wait object; nothing has changed.
        """
        checked_reason(reason)
        drain_ns = checked_drain_ns(drain_timeout)
        self._enter()
        transports = self.transports
        seen = transports.active
        if not transports.accepts_calls or (not force and transports.backoff_left_ns()):
            return False
        backoff_ns = transports.next_backoff_ns()  # user code: not under the lock
        new = self._new_transport()
        with self._lock:
            if any(new.channel is transport.channel for transport in transports.open_transports):
                raise ConfigurationError("connect must return a new channel each time")
            calls, reconnected = transports.active.calls, None
            if (force or transports.active is seen) and transports.accepts_calls:
                reconnected = transports.reconnect(new, drain_ns, reason, backoff_ns)
        if reconnected is None:
            self._close_transport(new)
            return False
        old, over = reconnected
        event = ConnectionReplaced(self.target, number=new.number, reason=reason, calls=calls)
        add_to_calls(event, old.spans)  # before the calls end
        if new.connection_wanted:
            self.get_state(try_to_connect=True)
        self._replaced()
        if over:
            self._end(old)
        elif drain_ns != NEVER:
            self._end_after(old, drain_ns)
        emit(event)
        return True

    def drain(self, drain_timeout: Duration | None = None, *, reason: str = "asked for") -> None:
        """Accept no more calls, and close the channel when all calls in flight have ended.

        New calls raise as on a closed channel. This does not wait. Does nothing on a closed
        channel. With `grpc`, thread-safe; a worker thread closes the channel. With `grpc.aio`, to
        be called on the loop; `close` waits for the end.

        Args:
            drain_timeout: Seconds for which calls in flight may continue. Then they end with
                UNAVAILABLE, "channel drained: <reason>". 0: they end now. None: no limit. A second
                call can only make it shorter.
            reason: Why; that of the first call counts.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is not a duration, or is negative.
            RuntimeError: It is a channel of `grpc.aio`, and no event loop runs here.
        """
        drain_ns = checked_drain_ns(drain_timeout)
        checked_reason(reason)
        self._enter()
        with self._lock:
            over, shorter = self.transports.drain(drain_ns, reason)
        for transport in over:
            self._end(transport)
        for transport in shorter:
            self._end_after(transport, drain_ns)

    def _end_after(self, transport: T, drain_ns: int) -> None:
        """End the calls on a transport after `drain_ns`; now if the timer takes no timeout."""
        expire = weak_callback(self._expire_soon, transport)
        name = f"drain of a connection to {self._target}"
        timeout = start_timeout(self._timer, expire, to_seconds(drain_ns), name)
        if timeout is None:
            self._expire(transport)
            return
        obsolete: Timeout | None = timeout
        with self._lock:
            if not transport.ended:
                obsolete = self._drain_timeouts.get(transport)
                self._drain_timeouts[transport] = timeout
        if obsolete is not None:
            obsolete.cancel()

    def _expire(self, transport: T) -> None:
        """End the calls on a transport whose drain timeout has passed."""
        with self._lock:
            over = self.transports.expire(transport)
        if over:
            self._end(transport)

    def _end(self, transport: T) -> None:
        with self._lock:
            timeout = self._drain_timeouts.pop(transport, None)
        if timeout is not None:
            timeout.cancel()
        self._close_transport(transport)

    def _close_all(self) -> list[T]:
        """Accept no more calls; returns the transports to close. A second call returns none."""
        with self._lock:
            closing = self.transports.close()
            timeouts, self._drain_timeouts = list(self._drain_timeouts.values()), {}
        for timeout in timeouts:
            timeout.cancel()
        return closing

    # --- For users ---

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the thread that closes it, or on the loop; at once if it is closed. An exception becomes
        a `CallbackFailed` event.

        Returns:
            A function that removes the callback. It does not keep the channel alive.

        Raises:
            TypeError: It is not callable.
        """
        return self._close_callbacks.add(callback)

    def heartbeat_call(self, method: str) -> Any:
        """Create a multicallable for heartbeats, with bytes as messages.

        Its calls use the connection that is active when they start. They count neither as use of
        the connection nor as calls in flight. A reconnect may end them with UNAVAILABLE.
        """
        return self._heartbeats(MethodSpec(Kind.UNARY_UNARY, method))

    @property
    def target(self) -> str:
        """The target, as given to the constructor."""
        return self._target

    @property
    def number(self) -> int:
        """Number of the active connection, from 1."""
        return self.transports.active.number

    @property
    def calls(self) -> int:
        """Number of calls in flight, on all connections."""
        return self.transports.calls

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or `drain` was called and all calls have ended."""
        return self.transports.closed

    @property
    def accepts_calls(self) -> bool:
        """Whether calls may start: neither `drain` nor `close` was called."""
        return self.transports.accepts_calls

    @property
    def activity(self) -> ActivityStamps:
        """When the active connection was last read, written and used; for heartbeats.

        In nanoseconds on the timer's clock.
        """
        return self.transports.active.activity

    def status(self) -> ChannelStatus | None:
        """Describe the channel now; None if it is closed."""
        if self.closed:
            return None
        state = self._state_name()
        problem = channel_problem(state, has_servers=True)
        return ChannelStatus(
            target=self.target,
            balanced=False,
            state=state,
            calls=self.calls,
            connection=self.number,
            stale=False,
            subchannels=(),
            problem=problem,
        )

    def _state_name(self) -> str:
        state = self.get_state()
        return "UNKNOWN" if state is None else str(state.name)

    @safe_repr
    def __repr__(self) -> str:
        return (
            f"<{self._title} to {self.target!r}, connection {self.number}, "
            f"{self._state_name()}, calls in flight: {self.calls}>"
        )


def _connect(api: Any, target: str, options: Any, *, credentials: Any, **own: Any) -> Any:
    # As keyword arguments, where OpenTelemetry's replacement of these functions looks for them.
    if credentials is None:
        return api.insecure_channel(target, options=options, **own)
    return api.secure_channel(target, credentials, options=options, **own)
