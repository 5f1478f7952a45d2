"""`ReconnectingChannel` for `grpc`: a `grpc.Channel` that any thread may use.

The multicallables look up the active transport for each call; the calls are gRPC's own objects. A
call is started again on the next transport only if gRPC refused to start it because its transport
was being closed, never after a status. Serializers stamp reads and writes.

Locks: `_lock` guards the `Transports`. Nothing that blocks, and no code of the user or of
gRPC, runs under it. `_making` prevents that a transport is closed while a multicallable is created
on it: grpcio 1.85 crashes then. Worker threads close transports, because gRPC waits there until its
own thread has reported the end of each call.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.calls import (
    CLOSED,
    failure_of,
    has_ended,
    run_at_end,
    value_of,
    was_not_invoked,
)
from rpcwheel._grpc.connectivity import (
    CORE_READY,
    close_unavailable,
    core_channel,
    core_state,
    is_bare,
    wait_for_polling_end,
)
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.rpc import Kind, classes_by_kind
from rpcwheel.telemetry.tracing import begin_call as begin_traced_call

from .arguments import DEFAULT_BACKOFF
from .base import ReconnectingBase
from .state import MethodSpec, Transport
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

READY: Final = grpc.ChannelConnectivity.READY


class ReconnectingChannel(ReconnectingBase["SyncTransport"], multicallable.Channel):
    """A channel whose connection can be replaced while stubs and calls live on."""

    _grpc: ClassVar[Any] = grpc
    _hint = "channels of grpc.aio use rpcwheel.transport.aio"

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
        self._making = threading.RLock()
        own = {"credentials": credentials, "compression": compression}
        super().__init__(target, connect, own, options=options, backoff=backoff, timer=timer)
        self._subscriptions = TransportSubscriptions(target, self.transports)

    def _transport(self, channel: grpc.Channel) -> SyncTransport:
        transport = Transport(channel, self._now_ns)
        transport.core = core_channel(channel)
        return transport

    # Reconnecting

    def _replaced(self) -> None:
        self._subscriptions.watch_active()

    def _expire_soon(self, transport: SyncTransport, timeout: Timeout) -> None:
        EXECUTOR.submit(self, partial(self._expire, transport))

    def _close_transport(self, transport: SyncTransport) -> None:
        EXECUTOR.submit(self, partial(self._close_on_worker, transport))

    def _close_on_worker(self, transport: SyncTransport) -> None:
        self._subscriptions.watch_active()
        self._wait_until_made()
        wait_for_polling_end(transport.channel)  # otherwise `close` would wait as long
        try:
            close_unavailable(transport.channel, transport.end_details)
        finally:
            if self.transports.drained:
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
        transports = self._close_all()
        self._subscriptions.close()
        try:
            self._close_callbacks.run()
        finally:  # also if a callback raises SystemExit
            self._wait_until_made()
            wait_for_polling_end(*(transport.channel for transport in transports))
            with ExitStack() as closing:  # all, although `close` of the user's channel may raise
                for transport in transports:
                    closing.callback(transport.channel.close)

    # State

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity | None:
        """The state of the active connection; SHUTDOWN if the channel is closed.

        Args:
            try_to_connect: Whether to connect if it is IDLE. If it is replaced before it is READY,
                the next connection is also made at once.

        Returns:
            None if it is not known, because `connect` returned a channel of another type.
        """
        if self.transports.closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        while True:
            transport = self.transports.active
            state = core_state(transport.channel, try_to_connect=try_to_connect)
            if transport.connection_wanted or try_to_connect:
                transport.connection_wanted = state is not READY
            closed = state is grpc.ChannelConnectivity.SHUTDOWN
            if not closed or transport is self.transports.active:
                return state

    def is_ready(self) -> bool:
        """Whether calls may start and the active connection is READY, or its state is not known.

        As `get_state`, but faster: a balancer calls it for each call.
        """
        transports = self.transports
        core = transports.active.core
        if core is None:
            return transports.accepts_calls and self.get_state() in {None, READY}
        try:
            is_ready: bool = core.check_connectivity_state(False) == CORE_READY
        except ValueError:  # closed
            return False
        return is_ready and transports.accepts_calls

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

        Raises:
            TypeError: `callback` is not callable.
        """
        self._subscriptions.add(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Call this callback no more; an unknown one is not an error."""
        self._subscriptions.remove(callback)

    # Multicallables

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        return _MULTICALLABLES[kind](self, MethodSpec(kind, method, *args, **options))

    def _heartbeats(self, spec: MethodSpec) -> grpc.UnaryUnaryMultiCallable:
        return _HeartbeatCall(self, spec)

    # For multicallables

    def begin_call(self) -> SyncTransport:
        """Return the transport for a call that starts now. Call `end_call` when it has ended.

        Raises:
            ValueError: The channel is closed or drains, with gRPC's text.
        """
        with self._lock:
            if not self.transports.accepts_calls:
                raise ValueError(CLOSED)
            return self.transports.begin_call()

    def end_call(self, transport: SyncTransport, span_key: object = None) -> None:
        """Count the end of a call. Any thread.

        Args:
            transport: The result of `begin_call`.
            span_key: The result of `rpcwheel.telemetry.tracing.begin_call`.
        """
        if span_key is not None:
            transport.spans.pop(span_key, None)
        with self._lock:
            over = self.transports.end_call(transport)
        if over:
            self._end(transport)

    def active_transport(self) -> SyncTransport:
        """Return the transport for a heartbeat, even while it drains.

        Raises:
            ValueError: It is closed, with gRPC's text.
        """
        transport = self.transports.active
        if self.transports.closed or (self.transports.draining and transport.ended):
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
        if not was_not_invoked(error):
            return False
        return transport.ended or transport is not self.transports.active


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
        span_key = begin_traced_call(transport.spans)
        try:
            return getattr(method, name)(request, *options)
        except grpc.RpcError as error:
            transport.activity.saw_status(value_of(error, "code"))  # a bound method would keep it
            raise
        except ValueError as error:
            if not channel.has_moved(transport, error):
                raise
            if not is_bare(transport.channel):
                raise _ended_with(transport) from error
        finally:
            channel.end_call(transport, span_key)
        return self._wait(name, request, *options)

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        """Start a call that does not block."""
        channel = self._channel
        transport, method = self._begin_call()
        span_key = begin_traced_call(transport.spans)
        try:
            call = getattr(method, name)(request, *options)
        except BaseException as error:
            channel.end_call(transport, span_key)
            if not channel.has_moved(transport, error):
                raise
            if not is_bare(transport.channel):
                return _ended_with(transport)
            return self._begin(name, request, *options)
        run_at_end(call, partial(channel.end_call, transport, span_key))
        # Interceptors on the transport's own channel turn an exception below them into a call.
        if transport.ended and has_ended(call) and channel.has_moved(transport, failure_of(call)):
            return _ended_with(transport)
        return call


def _ended_with(transport: SyncTransport) -> FinishedError:
    """The result of a call whose transport was closed while interceptors of its own channel ran.

    The interceptors may have sent the request already, so the call is not started again.
    """
    return FinishedError(grpc.StatusCode.UNAVAILABLE, transport.end_details)


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
