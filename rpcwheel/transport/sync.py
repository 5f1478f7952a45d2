"""`ReconnectingChannel` for `grpc`: a `grpc.Channel` that any thread may use.

The multicallables look up the active transport for each call; the calls are gRPC's own objects. A
call is started again on the next transport only if gRPC refused to start it because its transport
was being closed, never after a status. Serializers stamp reads and writes.

Locks: `_lock` guards the `ConnectionManager`. Nothing that blocks, and no code of the user or of
gRPC, runs under it. `_making` prevents that a transport is closed while a multicallable is created
on it: grpcio 1.85 crashes then. Worker threads close transports, because gRPC waits there until its
own thread has reported the end of each call.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.callbacks import CloseCallbacks, weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.calls import failure_of, has_ended, is_single_threaded, run_at_end
from rpcwheel._grpc.connectivity import (
    CORE_READY,
    close_unavailable,
    core_state,
    is_bare,
    state_reader,
    wait_for_polling_end,
)
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError, safe_repr
from rpcwheel.events import ConnectionReplaced, emit
from rpcwheel.rpc import Kind, classes_by_kind
from rpcwheel.telemetry import components
from rpcwheel.telemetry.tracing import add_to_calls, begin_call
from rpcwheel.timer.clock import checked_timer, clock_of

from .arguments import (
    DEFAULT_BACKOFF,
    checked_backoff,
    checked_drain_ns,
    checked_options,
    checked_reason,
    checked_target,
    refuse_both,
)
from .drain_timer import new_drain_timeout
from .state import ChannelProperties, ConnectionManager, MethodSpec, Transport
from .subscriptions import TransportSubscriptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    Options: TypeAlias = list[tuple[str, Any]]
    SyncTransport: TypeAlias = Transport[grpc.Channel]

__all__ = ["ReconnectingChannel"]

CLOSED: Final = "Cannot invoke RPC on closed channel!"
"""The text of gRPC's error for a call on a closed channel."""

READY: Final = grpc.ChannelConnectivity.READY


class ReconnectingChannel(ChannelProperties, multicallable.Channel):
    """A channel whose connection can be replaced while stubs and calls live on."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: grpc.Compression | None = None,
        connect: Callable[[Options], grpc.Channel] | None = None,
        backoff: Duration | WaitBaseT = DEFAULT_BACKOFF,
        timer: Timer | None = None,
    ) -> None:
        """Create the channel. It connects when it is first used, as any channel of gRPC.

        Args:
            target: A target of gRPC: `"127.0.0.1:50051"`, `"dns:///orders:50051"`.
            credentials: None: as `grpc.insecure_channel`.
            options: Of the channel. `grpc.use_local_subchannel_pool` is always set, so that no
                connection is shared.
            compression: Of the channel.
            connect: Called as `connect(options)`, with the options above, to create the channel of
                each connection, on the thread that reconnects. Replaces `credentials` and
                `compression`.
            backoff: Between reconnects while the server never answers: seconds or a `timedelta`, of
                which half is random, or a tenacity wait object. A connection that has worked is
                replaced at once.
            timer: For `drain_timeout`; None: `shared_timer()`.

        Raises:
            TypeError, ConfigurationError: An argument is not valid.
        """
        self._target = checked_target(target)
        refuse_both(connect, credentials=credentials, compression=compression)
        self._options = checked_options(options)
        self._connect = connect or partial(_connect, target, credentials, compression)
        reconnect_backoff = checked_backoff(backoff)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._lock = (
            threading.RLock()
        )  # reentrant: the garbage collector may end a call at any time
        self._making = threading.RLock()
        self._drain_timeouts: dict[SyncTransport, Timeout] = {}
        self._close_callbacks = CloseCallbacks(target)
        self.connections: ConnectionManager[SyncTransport] = ConnectionManager(
            self._new_transport(), self._now_ns, reconnect_backoff
        )
        """The transports, and which of them serves the next call."""
        self._subscriptions = TransportSubscriptions(target, self.connections)
        components.add("channel", self)

    def _new_transport(self) -> SyncTransport:
        channel: object = self._connect(list(self._options))
        if not isinstance(channel, grpc.Channel):
            raise TypeError(
                f"connect must return a new grpc.Channel, not {channel!r}; for channels of "
                "grpc.aio use rpcwheel.transport.aio"
            )
        transport = Transport(channel, self._now_ns)
        transport.read_state = state_reader(channel)
        return transport

    # Reconnecting

    def reconnect(
        self,
        reason: str = "asked for",
        *,
        drain_timeout: Duration | None = None,
        force: bool = False,
    ) -> bool:
        """Replace the active connection by a new one, which new calls use at once.

        A call that starts meanwhile uses one of the two and does not fail. Thread-safe. Blocks only
        for `connect`, and delays no calls. Emits `ConnectionReplaced` on this thread.

        Args:
            reason: Why; part of the event, and of the status of calls that are ended.
            drain_timeout: Seconds for which calls may continue on the old connection. Then they end
                with UNAVAILABLE, "connection replaced: <reason>". 0: they end now, on a worker
                thread; if the state is subscribed to, within 0.2 s. None: no limit.
            force: Whether to reconnect even if the backoff forbids it.

        Returns:
            False, and nothing has changed, if the backoff forbids it, if another thread has just
            reconnected (not with `force`), or if the channel is closed or drains.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is not a duration, or is negative.
            Exception: Of `connect` or of the wait object; nothing has changed.
        """
        checked_reason(reason)
        drain_ns = checked_drain_ns(drain_timeout)
        connections = self.connections
        seen = connections.active
        if not connections.accepts_calls or (not force and connections.backoff_left_ns()):
            return False
        backoff_ns = connections.next_backoff_ns()  # user code: not under the lock
        new = self._new_transport()
        with self._lock:
            if any(new.channel is transport.channel for transport in connections.open_transports):
                raise ConfigurationError("connect must return a new channel each time")
            calls, reconnected = connections.active.calls, None
            if (force or connections.active is seen) and connections.accepts_calls:
                reconnected = connections.reconnect(new, drain_ns, reason, backoff_ns)
        if reconnected is None:
            new.channel.close()
            return False
        old, over = reconnected
        event = ConnectionReplaced(self.target, number=new.number, reason=reason, calls=calls)
        add_to_calls(event, old.spans)  # before the calls end
        if over:
            self._close_soon(old)
        elif drain_ns != NEVER:
            self._end_after(old, drain_ns)
        if new.connection_wanted:
            core_state(new.channel, try_to_connect=True)
        self._subscriptions.watch_active()
        emit(event)
        return True

    def drain(self, drain_timeout: Duration | None = None, *, reason: str = "asked for") -> None:
        """Accept no more calls, and close the channel when all calls in flight have ended.

        New calls raise as on a closed channel. A worker thread closes it; this does not wait.
        Thread-safe. Does nothing on a closed channel.

        Args:
            drain_timeout: Seconds for which calls in flight may continue. Then they end with
                UNAVAILABLE, "channel drained: <reason>". 0: they end now. None: no limit. A second
                call can only make it shorter.
            reason: Why; that of the first call counts.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is not a duration, or is negative.
        """
        drain_ns = checked_drain_ns(drain_timeout)
        checked_reason(reason)
        with self._lock:
            over, shorter = self.connections.drain(drain_ns, reason)
        for transport in over:
            self._close_soon(transport)
        for transport in shorter:
            self._end_after(transport, drain_ns)

    def _end_after(self, transport: SyncTransport, drain_ns: int) -> None:
        expire = weak_callback(self._expire_soon, transport)
        timeout = new_drain_timeout(self._timer, expire, drain_ns, self._target)
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

    def _expire_soon(self, transport: SyncTransport, _: Timeout) -> None:
        """End the calls on a worker. Runs on the timer's thread."""
        EXECUTOR.submit(self, partial(self._expire, transport))

    def _expire(self, transport: SyncTransport) -> None:
        """End the calls on a transport whose drain timeout has passed."""
        with self._lock:
            over = self.connections.expire(transport)
        if over:
            self._close_soon(transport)

    def _close_soon(self, transport: SyncTransport) -> None:
        with self._lock:
            timeout = self._drain_timeouts.pop(transport, None)
        if timeout is not None:
            timeout.cancel()
        EXECUTOR.submit(self, partial(self._close_transport, transport))

    def _close_transport(self, transport: SyncTransport) -> None:
        self._subscriptions.watch_active()
        self._wait_until_made()
        wait_for_polling_end(transport.channel)  # otherwise `close` would wait as long
        try:
            close_unavailable(transport.channel, transport.end_details)
        finally:
            if self.connections.drained:
                self.close()

    def _wait_until_made(self) -> None:
        """Wait until no multicallable is being created on a transport that has ended."""
        with self._making:
            pass

    # Closing

    def close(self) -> None:
        """End all calls, as gRPC's channels do, and close all connections. Idempotent.

        Must not be called in a done callback of a call: like gRPC's own channels it would wait
        there for itself.
        """
        with self._lock:
            transports = self.connections.close()
            timeouts, self._drain_timeouts = list(self._drain_timeouts.values()), {}
        for timeout in timeouts:
            timeout.cancel()
        self._subscriptions.close()
        try:
            self._close_callbacks.run()
        finally:  # also if a callback raises SystemExit
            self._wait_until_made()
            wait_for_polling_end(*(transport.channel for transport in transports))
            for transport in transports:
                transport.channel.close()

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the thread that closes it; at once if it is closed. An exception becomes a
        `CallbackFailed` event.

        Returns:
            A function that removes the callback. It does not keep the channel alive.
        """
        return self._close_callbacks.add(callback)

    # State

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity | None:
        """The state of the active connection; SHUTDOWN if the channel is closed.

        Args:
            try_to_connect: Whether to connect if it is IDLE. If it is replaced before it is READY,
                the next connection is also made at once.

        Returns:
            None if it is not known, because `connect` returned a channel of another type.
        """
        if self.connections.closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        while True:
            transport = self.connections.active
            state = core_state(transport.channel, try_to_connect=try_to_connect)
            if transport.connection_wanted or try_to_connect:
                transport.connection_wanted = state is not READY
            closed = state is grpc.ChannelConnectivity.SHUTDOWN
            if not closed or transport is self.connections.active:
                return state

    def is_ready(self) -> bool:
        """Whether calls may start and the active connection is READY, or its state is not known.

        As `get_state`, but faster: a balancer calls it for each call.
        """
        connections = self.connections
        try:
            is_ready = connections.active.read_state(False) == CORE_READY
        except ValueError:  # closed
            return False
        return is_ready and connections.accepts_calls

    def is_idle(self) -> bool:
        """Whether the active connection is IDLE; False if its state is not known."""
        return self.get_state() is grpc.ChannelConnectivity.IDLE

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Call `callback(state)` now and at each change, across reconnects.

        On a worker thread, one callback of a channel at a time. An exception becomes a
        `CallbackFailed` event, and the callback is called again at the next change. When the
        interpreter exits (`atexit`), no callback is called any more.

        Args:
            callback: Takes the state of the active connection, never that of an old one.
            try_to_connect: Whether to connect now, and also after each reconnect.
        """
        self._subscriptions.add(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Call this callback no more; an unknown one is not an error."""
        self._subscriptions.remove(callback)

    @safe_repr
    def __repr__(self) -> str:
        state = self.get_state()
        return (
            f"<ReconnectingChannel to {self.target!r}, connection {self.number}, "
            f"{'UNKNOWN' if state is None else state.name}, calls in flight: {self.calls}>"
        )

    # Multicallables

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        return _MULTICALLABLES[kind](self, MethodSpec(kind, method, *args, **options))

    def heartbeat_call(self, method: str) -> grpc.UnaryUnaryMultiCallable:
        """Create a multicallable for heartbeats, with bytes as messages.

        Its calls use the connection that is active when they start. They count neither as use of
        the connection nor as calls in flight. A reconnect may end them with UNAVAILABLE.
        """
        return _HeartbeatCall(self, MethodSpec(Kind.UNARY_UNARY, method))

    # For multicallables

    def begin_call(self) -> SyncTransport:
        """Return the transport for a call that starts now. Call `end_call` when it has ended.

        Raises:
            ValueError: The channel is closed or drains, with gRPC's text.
        """
        with self._lock:
            if not self.connections.accepts_calls:
                raise ValueError(CLOSED)
            return self.connections.begin_call()

    def end_call(self, transport: SyncTransport, span_key: object = None) -> None:
        """Count the end of a call. Any thread.

        Args:
            transport: The result of `begin_call`.
            span_key: The result of `rpcwheel.telemetry.tracing.begin_call`.
        """
        if span_key is not None:
            transport.spans.pop(span_key, None)
        with self._lock:
            over = self.connections.end_call(transport)
        if over:
            self._close_soon(transport)

    def active_transport(self) -> SyncTransport:
        """Return the transport for a heartbeat, even while it drains.

        Raises:
            ValueError: It is closed, with gRPC's text.
        """
        transport = self.connections.active
        if self.connections.closed or (self.connections.draining and transport.ended):
            raise ValueError(CLOSED)
        return transport

    def make(self, spec: MethodSpec, transport: SyncTransport, *, stamps: bool) -> Any:
        """Create gRPC's multicallable on a transport.

        Raises:
            ValueError: The transport was closed meanwhile, with gRPC's text.
        """
        with self._making:
            if transport.ended:
                raise ValueError(CLOSED)
            return spec.make(transport.channel, transport.activity if stamps else None)

    def has_moved(self, transport: SyncTransport, error: BaseException | None) -> bool:
        """Whether gRPC started nothing because the transport was closed meanwhile.

        Then `begin_call` returns another one, or raises because the channel is closed.
        """
        if not isinstance(error, ValueError) or not str(error).startswith("Cannot invoke RPC"):
            return False
        return transport.ended or transport is not self.connections.active


class _ReconnectingMulticallable:
    """A method of a stub. The base of the four kinds of multicallables."""

    __slots__ = ("_bound", "_channel", "_spec")

    _stamps = True

    def __init__(self, channel: ReconnectingChannel, spec: MethodSpec) -> None:
        self._channel = channel
        self._spec = spec
        self._bound: tuple[SyncTransport | None, Any] = (None, None)

    def _on(self, transport: SyncTransport) -> Any:
        """Return gRPC's multicallable on this transport."""
        bound, method = self._bound  # one read: another thread may change it
        if bound is not transport:
            method = self._channel.make(self._spec, transport, stamps=self._stamps)
            self._bound = transport, method
        return method

    def _begin_call(self) -> tuple[SyncTransport, Any]:
        channel = self._channel
        while True:
            transport = channel.begin_call()
            transport.activity.saw_write()
            try:
                return transport, self._on(transport)
            except BaseException as error:
                channel.end_call(transport)
                if not channel.has_moved(transport, error):
                    raise

    def _wait(self, name: str, request: Any, *options: Any) -> Any:
        """Make a blocking call."""
        channel = self._channel
        transport, method = self._begin_call()
        span_key = begin_call(transport.spans)
        try:
            return getattr(method, name)(request, *options)
        except grpc.RpcError as error:
            code = getattr(error, "code", None)
            transport.activity.saw_status(code() if callable(code) else None)
            raise
        except ValueError as error:
            if not channel.has_moved(transport, error):
                raise
            if not is_bare(transport.channel):
                raise _ended_with(transport) from error
        finally:
            channel.end_call(transport, span_key)
        return self._wait(name, request, *options)

    wait_for = _wait  # for the balancer: one frame less per call

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        """Start a call that does not block."""
        channel = self._channel
        transport, method = self._begin_call()
        span_key = begin_call(transport.spans)
        try:
            call = getattr(method, name)(request, *options)
        except BaseException as error:
            channel.end_call(transport, span_key)
            if not channel.has_moved(transport, error):
                raise
            if not is_bare(transport.channel):
                return _ended_with(transport)
            return self._begin(name, request, *options)
        end: Callable[[], object] = partial(channel.end_call, transport, span_key)
        if is_single_threaded(call):
            # Such a call reports no end if it is dropped or canceled. `end` runs on a worker
            # thread, because the thread of the garbage collector may hold any lock.
            finalizer = weakref.finalize(call, EXECUTOR.submit, channel, end)
            finalizer.atexit = False
            end = partial(_end_once, finalizer, end)
        run_at_end(call, end)
        # Interceptors on the transport's own channel turn an exception below them into a call.
        if transport.ended and has_ended(call) and channel.has_moved(transport, failure_of(call)):
            return _ended_with(transport)
        return call


def _ended_with(transport: SyncTransport) -> FinishedError:
    """The result of a call whose transport was closed while interceptors of its own channel ran.

    The interceptors may have sent the request already, so the call is not started again.
    """
    return FinishedError(grpc.StatusCode.UNAVAILABLE, transport.end_details)


def _end_once(finalizer: weakref.finalize[..., Any], end: Callable[[], object]) -> None:
    if finalizer.detach() is not None:
        end()


_MULTICALLABLES: Final = classes_by_kind(_ReconnectingMulticallable, multicallable.MULTICALLABLES)


class _HeartbeatCall(_ReconnectingMulticallable, multicallable.UnaryUnary):
    """Heartbeats, which count neither as use of the connection nor as calls in flight."""

    __slots__ = ()

    _stamps = False

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        transport = self._channel.active_transport()
        try:
            return getattr(self._on(transport), name)(request, *options)
        except ValueError as error:
            if not self._channel.has_moved(transport, error):
                raise
        return self._begin(name, request, *options)

    _wait = _begin


def _connect(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    compression: grpc.Compression | None,
    options: Options,
) -> grpc.Channel:
    channel: grpc.Channel = (
        grpc.insecure_channel(target, options, compression)
        if credentials is None
        else grpc.secure_channel(target, credentials, options, compression)
    )
    return channel
