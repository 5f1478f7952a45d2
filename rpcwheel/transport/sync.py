"""`ReconnectingChannel` for `grpc`: a channel of gRPC's in every respect, used by any thread.

The multicallables look up the active transport for each call; the calls are gRPC's own objects. A
call is begun again on the next transport only if gRPC refused to begin it, because its transport
was closed at that moment; never after a status. Serializers stamp what was read and written.

Locks: `_lock` guards the `ConnectionManager` and is held for a few steps only; nothing that blocks,
and no code of the user's or of gRPC's, runs under it. `_making` keeps a transport from being closed
while a multicallable of it is made: grpcio 1.85 crashes then. Workers close transports, because
gRPC waits there until its own thread has reported the end of every call.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import grpc

from rpcwheel._concurrency.callbacks import CloseCallbacks, weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.calls import call_at_end, failure_of, has_ended, is_single_threaded
from rpcwheel._grpc.connectivity import (
    READY_STATE,
    end_calls,
    is_bare,
    state_below,
    state_reader,
    wait_unpolled,
)
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import ConnectionReplaced, emit
from rpcwheel.rpc import Kind
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
from .state import ChannelStatus, ConnectionManager, MethodSpec, Transport
from .subscriptions import Subscriptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

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


class ReconnectingChannel(ChannelStatus, grpc.Channel):
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
        """Make the channel. It connects when it is first used, as any channel of gRPC.

        Args:
            target: As gRPC takes it: `"127.0.0.1:50051"`, `"dns:///orders:50051"`.
            credentials: For TLS and such; None for none, as `grpc.insecure_channel`.
            options: As gRPC takes them. `grpc.use_local_subchannel_pool` is always set, so that no
                connection is shared.
            compression: As gRPC takes it.
            connect: Makes the channel of each connection in your own way: `connect(options)`, with
                the options above. It runs on the thread that reconnects, and takes the place of
                `credentials` and `compression`.
            backoff: Between reconnects while the server never answers: seconds, a `timedelta`, or a
                tenacity wait object. A connection that has worked is replaced at once.
            timer: Limits how long calls drain; None for `shared_timer()`.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
        """
        self._target = checked_target(target)
        refuse_both(connect, credentials=credentials, compression=compression)
        self._options = checked_options(options)
        self._connect = connect or partial(_connect, target, credentials, compression)
        rhythm = checked_backoff(backoff)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._lock = threading.RLock()  # the garbage collector may end a call at any time
        self._making = threading.RLock()
        self._drain_timeouts: dict[SyncTransport, Timeout] = {}
        self._close_callbacks = CloseCallbacks(target)
        self.connections: ConnectionManager[SyncTransport] = ConnectionManager(
            self._new_transport(), self._now_ns, rhythm
        )
        """Internal: which transport takes which call."""
        self._subscriptions = Subscriptions(target, self.connections)

    def _new_transport(self) -> SyncTransport:
        channel: object = self._connect(list(self._options))
        if not isinstance(channel, grpc.Channel):
            raise TypeError(
                f"connect must return a new grpc.Channel, not {channel!r}; for those of grpc.aio "
                "there is rpcwheel.transport.aio"
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
        """Put a new connection in the place of the active one; new calls use it at once.

        A call that begins meanwhile uses either and fails on neither. Thread-safe; takes as long as
        `connect` does, and delays no calls. Emits `ConnectionReplaced` on this thread.

        Args:
            reason: Why; for the event, and for the status of calls that are ended.
            drain_timeout: Seconds that calls may go on on the old connection. Then they are ended
                with UNAVAILABLE, "connection replaced: <reason>". 0: they are ended now, by a
                worker; while the state is subscribed to, within 0.2 s. None: as long as they take.
            force: Whether to reconnect although the backoff forbids it.

        Returns:
            False, and nothing has happened, if the backoff forbids it, if another thread did it
            meanwhile (not with `force`), or if the channel is closed or drains.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is no length of time, or negative.
            Exception: What `connect`, or the wait object, raised; nothing has happened.
        """
        checked_reason(reason)
        drain_ns = checked_drain_ns(drain_timeout)
        connections = self.connections
        seen = connections.active
        if not connections.accepts_calls or (not force and connections.backoff_left_ns()):
            return False
        backoff_ns = connections.next_backoff_ns()  # code of the user's: not under the lock
        new = self._new_transport()
        with self._lock:
            if any(new.channel is known.channel for known in connections.open_transports):
                raise ConfigurationError("connect must make a new channel each time")
            calls, reconnected = connections.active.calls, None
            if (force or connections.active is seen) and connections.accepts_calls:
                reconnected = connections.reconnect(new, drain_ns, reason, backoff_ns)
        if reconnected is None:
            new.channel.close()
            return False
        old, over = reconnected
        if over:
            self._close_soon(old)
        elif drain_ns != NEVER:
            self._end_after(old, drain_ns)
        if new.connection_wanted:
            state_below(new.channel, try_to_connect=True)
        self._subscriptions.follow()
        emit(ConnectionReplaced(self.target, number=new.number, reason=reason, calls=calls))
        return True

    def drain(self, drain_timeout: Duration | None = None, *, reason: str = "asked for") -> None:
        """Accept no more calls, and close when the last of those in flight has ended.

        Calls from now on raise as on a closed channel. A worker closes it; nothing waits for that.
        Thread-safe; on a closed channel, nothing.

        Args:
            drain_timeout: Seconds that calls in flight may go on. Then they are ended with
                UNAVAILABLE, "channel drained: <reason>". 0: they are ended now. None: as long as
                they take. A second call can only make it shorter.
            reason: Why; that of the first call counts.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is no length of time, or negative.
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
        expire = weak_callback(self.expire_soon, transport)
        timeout = new_drain_timeout(self._timer, expire, drain_ns, self._target)
        if timeout is None:
            self.expire(transport)
            return
        obsolete: Timeout | None = timeout
        with self._lock:
            if not transport.ended:
                obsolete = self._drain_timeouts.get(transport)
                self._drain_timeouts[transport] = timeout
        if obsolete is not None:
            obsolete.cancel()

    def expire_soon(self, transport: SyncTransport, _: Timeout) -> None:
        """Internal: as `expire`, from the timer's thread."""
        EXECUTOR.submit(self, partial(self.expire, transport))

    def expire(self, transport: SyncTransport) -> None:
        """Internal: end the calls on a transport, as its time to drain is over."""
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
        self._subscriptions.follow()
        self._wait_until_made()
        wait_unpolled(transport.channel)  # to close it would take as long anyway
        try:
            end_calls(transport.channel, transport.end_details)
        finally:
            if self.connections.drained:
                self.close()

    def _wait_until_made(self) -> None:
        """Wait until no multicallable of a transport is being made that has ended by now."""
        with self._making:
            pass

    # Closing

    def close(self) -> None:
        """End all calls, as any channel of gRPC, and close all connections. A second time, nothing.

        Not to be called where gRPC runs done-callbacks: like any channel of gRPC, it would wait
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
        finally:  # whatever a callback raises, be it `SystemExit`
            self._wait_until_made()
            wait_unpolled(*(transport.channel for transport in transports))
            for transport in transports:
                transport.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the thread that closes it; now if it is closed. If it raises, that is the event
        `CallbackFailed`.

        Returns:
            A function that removes the callback. It does not keep the channel alive.
        """
        return self._close_callbacks.add(callback)

    # State

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity | None:
        """The state of the active connection; SHUTDOWN once closed.

        Args:
            try_to_connect: Whether to connect if it is idle; if it is replaced before it is ready,
                so does the next one.

        Returns:
            None if it can't be known, because `connect` made a channel that hides it.
        """
        if self.connections.closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        while True:
            transport = self.connections.active
            state = state_below(transport.channel, try_to_connect=try_to_connect)
            wanted = transport.connection_wanted or bool(try_to_connect)
            transport.connection_wanted = wanted and state is not READY
            closed = state is grpc.ChannelConnectivity.SHUTDOWN
            if not closed or transport is self.connections.active:
                return state

    def is_ready(self) -> bool:
        """Whether calls may begin and the active connection is READY, or hides its state.

        As `get_state`, but quicker: a balancer asks for each call.
        """
        connections = self.connections
        try:
            is_ready = connections.active.read_state(False) == READY_STATE
        except ValueError:  # closed
            return False
        return is_ready and connections.accepts_calls

    def is_idle(self) -> bool:
        """Whether there is no connection and none is wanted; False where it can't be known."""
        return self.get_state() is grpc.ChannelConnectivity.IDLE

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Call `callback(state)` now and at each change, across reconnects.

        On a worker, one callback of a channel at a time. If one raises, that is the event
        `CallbackFailed`, and it is called again at the next change. None is called any more once
        the interpreter exits (`atexit`).

        Args:
            callback: Gets the state of the active connection, never of an old one.
            try_to_connect: Whether to connect now; new connections too, from then on.
        """
        self._subscriptions.add(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Call it no more. Unknown ones are no error."""
        self._subscriptions.remove(callback)

    def __repr__(self) -> str:
        state = self.get_state()
        return (
            f"<ReconnectingChannel to {self.target!r}, connection {self.number}, "
            f"{'UNKNOWN' if state is None else state.name}, calls in flight: {self.calls}>"
        )

    # Multicallables. They take whatever gRPC's channel takes: `_registered_method`, for one.

    def unary_unary(self, method: str, *args: Any, **options: Any) -> grpc.UnaryUnaryMultiCallable:
        """Make a multicallable."""
        return _UnaryUnary(self, MethodSpec(Kind.UNARY_UNARY, method, *args, **options))

    def unary_stream(
        self, method: str, *args: Any, **options: Any
    ) -> grpc.UnaryStreamMultiCallable:
        """Make a multicallable."""
        return _UnaryStream(self, MethodSpec(Kind.UNARY_STREAM, method, *args, **options))

    def stream_unary(
        self, method: str, *args: Any, **options: Any
    ) -> grpc.StreamUnaryMultiCallable:
        """Make a multicallable."""
        return _StreamUnary(self, MethodSpec(Kind.STREAM_UNARY, method, *args, **options))

    def stream_stream(
        self, method: str, *args: Any, **options: Any
    ) -> grpc.StreamStreamMultiCallable:
        """Make a multicallable."""
        return _StreamStream(self, MethodSpec(Kind.STREAM_STREAM, method, *args, **options))

    def heartbeat_call(self, method: str) -> grpc.UnaryUnaryMultiCallable:
        """Make a multicallable for heartbeats: of bytes, on the connection that is active then.

        Its calls are no use of the connection, and not in flight. One that meets a reconnect may
        end with UNAVAILABLE.
        """
        return _HeartbeatCall(self, MethodSpec(Kind.UNARY_UNARY, method))

    # For multicallables

    def begin_call(self) -> SyncTransport:
        """Internal: the transport for a call that begins now; `end_call` is to follow.

        Raises:
            ValueError: The channel is closed or drains; with gRPC's text.
        """
        with self._lock:
            if not self.connections.accepts_calls:
                raise ValueError(CLOSED)
            return self.connections.begin_call()

    def end_call(self, transport: SyncTransport) -> None:
        """Internal: a call has ended. Any thread."""
        with self._lock:
            over = self.connections.end_call(transport)
        if over:
            self._close_soon(transport)

    def active_transport(self) -> SyncTransport:
        """Internal: the transport for a heartbeat; also while it drains.

        Raises:
            ValueError: It is closed; with gRPC's text.
        """
        transport = self.connections.active
        if self.connections.closed or (self.connections.draining and transport.ended):
            raise ValueError(CLOSED)
        return transport

    def make(self, spec: MethodSpec, transport: SyncTransport, *, stamps: bool) -> Any:
        """Internal: make gRPC's multicallable.

        Raises:
            ValueError: The transport was closed meanwhile; with gRPC's text.
        """
        with self._making:
            if transport.ended:
                raise ValueError(CLOSED)
            return spec.make(transport.channel, transport.activity if stamps else None)

    def has_moved(self, transport: SyncTransport, error: BaseException | None) -> bool:
        """Internal: whether gRPC began nothing on a transport, as it was closed meanwhile.

        Then `begin_call` gives another one, or raises because the channel is closed.
        """
        if not isinstance(error, ValueError) or not str(error).startswith("Cannot invoke RPC"):
            return False
        return transport.ended or transport is not self.connections.active


class _Multicallable:
    """One method of a stub. The base of the four multicallable."""

    __slots__ = ("_bound", "_channel", "_spec")

    _stamps = True

    def __init__(self, channel: ReconnectingChannel, spec: MethodSpec) -> None:
        self._channel = channel
        self._spec = spec
        self._bound: tuple[SyncTransport | None, Any] = (None, None)

    def _on(self, transport: SyncTransport) -> Any:
        """Return gRPC's multicallable on this transport."""
        bound, made = self._bound  # one read: another thread may change it
        if bound is not transport:
            made = self._channel.make(self._spec, transport, stamps=self._stamps)
            self._bound = transport, made
        return made

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
        """Make a call on its caller's thread."""
        channel = self._channel
        transport, made = self._begin_call()
        try:
            return getattr(made, name)(request, *options)
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
            channel.end_call(transport)
        return self._wait(name, request, *options)

    wait_for = _wait  # for the balancer, which spares a frame of each call so

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        """Begin a call that goes on by itself."""
        channel = self._channel
        transport, made = self._begin_call()
        try:
            call = getattr(made, name)(request, *options)
        except BaseException as error:
            channel.end_call(transport)
            if not channel.has_moved(transport, error):
                raise
            if not is_bare(transport.channel):
                return _ended_with(transport)
            return self._begin(name, request, *options)
        end: Callable[[], object] = partial(channel.end_call, transport)
        if is_single_threaded(call):
            # One that is dropped or canceled reports no end. On a worker, as the garbage
            # collector's thread may hold any lock.
            finalizer = weakref.finalize(call, EXECUTOR.submit, channel, end)
            finalizer.atexit = False
            end = partial(_end_once, finalizer, end)
        call_at_end(call, end)
        # Interceptors on the transport's own channel make a call of what is raised below them.
        if transport.ended and has_ended(call) and channel.has_moved(transport, failure_of(call)):
            return _ended_with(transport)
        return call


def _ended_with(transport: SyncTransport) -> FinishedError:
    """How a call ends whose transport was closed while interceptors of its own channel ran.

    They may have made other calls before, this one among them, so it is not begun again.
    """
    return FinishedError(grpc.StatusCode.UNAVAILABLE, transport.end_details)


def _end_once(finalizer: weakref.finalize[..., Any], end: Callable[[], object]) -> None:
    if finalizer.detach() is not None:
        end()


class _UnaryUnary(_Multicallable, multicallable.UnaryUnary):
    __slots__ = ()


class _StreamUnary(_Multicallable, multicallable.StreamUnary):
    __slots__ = ()


class _UnaryStream(_Multicallable, multicallable.UnaryStream):
    __slots__ = ()


class _StreamStream(_Multicallable, multicallable.StreamStream):
    __slots__ = ()


class _HeartbeatCall(_Multicallable, multicallable.UnaryUnary):
    """Heartbeats: neither use of the connection nor calls in flight."""

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
