"""`ReconnectingChannel` for `grpc.aio`: a `grpc.aio.Channel` on one event loop.

The multicallables look up the active transport for each call. The caller gets a `Relay`
(`rpcwheel._grpc.aio_relay`) with one attempt, gRPC's own call, for two reasons: grpc.aio can't end
a call with a status that is not its own, and a call that is canceled with its connection would
raise a `CancelledError` that its caller did not cause. A call needs no task. Serializers stamp
reads and writes.

Everything runs on the loop. The timer's thread and the garbage collector only schedule calls there.
The timer does not keep a channel alive.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import grpc

from rpcwheel._concurrency.callbacks import CloseCallbacks, weak_callback
from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel._grpc.aio_finished import finished_call
from rpcwheel._grpc.aio_interceptors import LISTS, Interceptors, give_lists, lists_of
from rpcwheel._grpc.aio_multicallable import INTERFACES, Channel
from rpcwheel._grpc.aio_relay import (
    RELAYS,
    Relay,
    Signal,
    WouldBlockError,
    failure_of,
)
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

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    Options: TypeAlias = list[tuple[str, Any]]

__all__ = ["ReconnectingChannel"]

CLOSED: Final = "Channel is closed."
"""The text of grpc.aio's error for a call on a closed channel."""

READY: Final = grpc.ChannelConnectivity.READY


class AioTransport(Transport[grpc.aio.Channel]):
    """A channel of grpc.aio, and the calls on it."""

    __slots__ = ("_own_interceptors", "running")

    def __init__(self, channel: grpc.aio.Channel, now_ns: Callable[[], int]) -> None:
        super().__init__(channel, now_ns)
        self.running: dict[int, weakref.ref[TransportCall]] = {}
        """Calls in flight by `id`; each removes itself. (A `WeakSet` costs 1 µs per call.)"""
        self._own_interceptors = {kind: len(own) for kind, own in lists_of(channel).items()}

    def append(self, kind: Kind, appended: list[Any]) -> None:
        """Run these interceptors in calls of this kind, after the channel's own.

        Raises:
            ConfigurationError: `connect` returned a channel without a list of interceptors.
        """
        own = self._own_interceptors.get(kind)
        if own is None:
            raise ConfigurationError(
                f"{LISTS[kind]}: {appended!r} can't be appended, because connect returned "
                f"{self.channel!r}, which has no such list; pass the interceptors to it in connect"
            )
        interceptors = lists_of(self.channel)[kind]
        if interceptors[own:] != appended:
            interceptors[own:] = appended

    def end_calls(self) -> None:
        """End its calls with UNAVAILABLE and the reason."""
        for call in self._running_calls():
            call.end_with(self.end_details)

    def cancel_calls(self) -> None:
        """Cancel its calls."""
        for call in self._running_calls():
            call.cancel()

    def _running_calls(self) -> list[TransportCall]:
        calls = [reference() for reference in list(self.running.values())]
        return [call for call in calls if call is not None]


class ReconnectingChannel(ChannelProperties, Channel):
    """A channel whose connection can be replaced while stubs and calls live on.

    On other threads than the loop's only `target`, `number`, `calls`, `closed`, `accepts_calls`,
    `activity` and `get_state()` may be read.
    """

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: grpc.Compression | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
        connect: Callable[[Options], grpc.aio.Channel] | None = None,
        backoff: Duration | WaitBaseT = DEFAULT_BACKOFF,
        timer: Timer | None = None,
    ) -> None:
        """Create the channel. It connects when it is first used, as any channel of gRPC.

        Args:
            target: A target of gRPC: `"127.0.0.1:50051"`, `"dns:///orders:50051"`.
            credentials: None: as `grpc.aio.insecure_channel`.
            options: Of the channel. `grpc.use_local_subchannel_pool` is always set, so that no
                connection is shared.
            compression: Of the channel.
            interceptors: Of the channel.
            connect: Called as `connect(options)`, with the options above, to create the channel of
                each connection. Replaces `credentials`, `compression` and `interceptors`.
            backoff: Between reconnects while the server never answers: seconds or a `timedelta`, of
                which half is random, or a tenacity wait object. A connection that has worked is
                replaced at once.
            timer: For `drain_timeout`; None: `shared_timer()`.

        Raises:
            TypeError, ConfigurationError: An argument is not valid.
        """
        self._target = checked_target(target)
        refuse_both(
            connect, credentials=credentials, compression=compression, interceptors=interceptors
        )
        self._options = checked_options(options)
        self._connect = connect or partial(_connect, target, credentials, compression, interceptors)
        checked = checked_backoff(backoff)
        self._timer = checked_timer(timer)
        self._now_ns = clock_of(timer)
        self._drain_timeouts: dict[AioTransport, Timeout] = {}
        self._close_callbacks = CloseCallbacks(target)
        self._loop: asyncio.AbstractEventLoop | None = None  # since the first reconnect or drain
        self._thread = threading.get_ident()
        """The loop's thread."""
        self._closed_transports: list[AioTransport] = []  # those that `close` has closed
        self._closing: set[asyncio.Task[None]] = set()
        self._replaced_or_closed = Signal()
        self.append_to({kind: [] for kind in Kind})
        self.connections: ConnectionManager[AioTransport] = ConnectionManager(
            self._new_transport(), self._now_ns, checked
        )
        """The transports, and which of them serves the next call."""
        components.add("channel", self)

    def _new_transport(self) -> AioTransport:
        channel: object = self._connect(list(self._options))
        if not isinstance(channel, grpc.aio.Channel):
            raise TypeError(
                f"connect must return a new grpc.aio.Channel, not {channel!r}; for channels of "
                "grpc use rpcwheel.transport"
            )
        return AioTransport(channel, self._now_ns)

    def append_to(self, lists: Interceptors) -> None:
        """Run the interceptors in these lists in all calls, after those of `connect`.

        The lists may be appended to later.
        """
        self.appended = lists
        give_lists(self, lists)

    # Reconnecting

    def reconnect(
        self,
        reason: str = "asked for",
        *,
        drain_timeout: Duration | None = None,
        force: bool = False,
    ) -> bool:
        """Replace the active connection by a new one, which new calls use at once.

        Call it on the loop. Emits `ConnectionReplaced`.

        Args:
            reason: Why; part of the event, and of the status of calls that are ended.
            drain_timeout: Seconds for which calls may continue on the old connection. Then they end
                with UNAVAILABLE, "connection replaced: <reason>". 0: they end now. None: no limit.
            force: Whether to reconnect even if the backoff forbids it.

        Returns:
            False, and nothing has changed, if the backoff forbids it, or if the channel is closed
            or drains.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is not a duration, or is negative.
            RuntimeError: Not called on an event loop.
            Exception: Of `connect` or of the wait object; nothing has changed.
        """
        checked_reason(reason)
        drain_ns = checked_drain_ns(drain_timeout)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        connections = self.connections
        if not connections.accepts_calls or (not force and connections.backoff_left_ns()):
            return False
        backoff_ns = connections.next_backoff_ns()
        new = self._new_transport()
        if any(new.channel is transport.channel for transport in connections.open_transports):
            raise ConfigurationError("connect must return a new channel each time")
        calls = connections.active.calls
        old, over = connections.reconnect(new, drain_ns, reason, backoff_ns)
        event = ConnectionReplaced(self.target, number=new.number, reason=reason, calls=calls)
        add_to_calls(event, old.spans)  # before the calls end
        if new.connection_wanted:
            new.channel.get_state(try_to_connect=True)
        self._replaced_or_closed.notify()
        if over:
            self._close_transport(old)
        elif drain_ns != NEVER:
            self._end_after(old, drain_ns)
        emit(event)
        return True

    def drain(self, drain_timeout: Duration | None = None, *, reason: str = "asked for") -> None:
        """Accept no more calls, and close the channel when all calls in flight have ended.

        New calls raise as on a closed channel. Call it on the loop. This does not wait; `close`
        does. Does nothing on a closed channel.

        Args:
            drain_timeout: Seconds for which calls in flight may continue. Then they end with
                UNAVAILABLE, "channel drained: <reason>". 0: they end now. None: no limit. A second
                call can only make it shorter.
            reason: Why; that of the first call counts.

        Raises:
            TypeError, ConfigurationError: `drain_timeout` is not a duration, or is negative.
            RuntimeError: Not called on an event loop.
        """
        drain_ns = checked_drain_ns(drain_timeout)
        checked_reason(reason)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        over, shorter = self.connections.drain(drain_ns, reason)
        for transport in over:
            self._close_transport(transport)
        for transport in shorter:
            self._end_after(transport, drain_ns)

    def _end_after(self, transport: AioTransport, drain_ns: int) -> None:
        expire = weak_callback(self._expire, transport)
        expire_soon = partial(call_on_loop, asyncio.get_running_loop(), expire)
        timeout = new_drain_timeout(self._timer, expire_soon, drain_ns, self._target)
        if timeout is None:
            self._expire(transport)
            return
        obsolete = self._drain_timeouts.pop(transport, None)
        if obsolete is not None:
            obsolete.cancel()
        self._drain_timeouts[transport] = timeout

    def _expire(self, transport: AioTransport, _: object = None) -> None:
        """End the calls on a transport whose drain timeout has passed."""
        if self.connections.expire(transport):
            self._close_transport(transport)

    def _close_transport(self, transport: AioTransport) -> None:
        timeout = self._drain_timeouts.pop(transport, None)
        if timeout is not None:
            timeout.cancel()
        transport.end_calls()
        if self._loop is not None and not self._loop.is_closed():
            self._close_soon(self._loop, transport)
        # otherwise gRPC's channel is closed when it is garbage-collected
        if self.connections.drained and not self.connections.closed:
            self.connections.close()
            self._close_callbacks.run()
            self._replaced_or_closed.notify()

    def _close_soon(
        self, loop: asyncio.AbstractEventLoop, transport: AioTransport, grace: float | None = None
    ) -> None:
        task = loop.create_task(_close(transport.channel, grace))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # Closing

    async def close(self, grace: float | None = None) -> None:
        """Accept no more calls, and end those in flight on all connections, as grpc.aio does.

        Args:
            grace: Seconds for which calls may continue; None or 0: they are canceled now. They are
                also canceled if this is canceled while it waits, or called again without a grace.

        Raises:
            ConfigurationError: `grace` is negative.
        """
        if grace is not None and grace < 0:
            raise ConfigurationError(f"grace must be 0 seconds or more, or None, not {grace!r}")
        transports = self.connections.close()
        for timeout in self._drain_timeouts.values():
            timeout.cancel()
        self._drain_timeouts.clear()
        try:
            self._close_callbacks.run()
        finally:  # also if a callback raises SystemExit
            self._closed_transports += transports
            for transport in transports:
                self._close_soon(asyncio.get_running_loop(), transport, grace)
            await self._wait_closed(grace)

    async def _wait_closed(self, grace: float | None) -> None:
        """Wait until all is closed. gRPC's own second `close` does not end calls in their grace."""
        closing = list(self._closing)
        try:
            if not grace:
                self._cancel_calls()
            if closing:
                await asyncio.wait(closing)
        except asyncio.CancelledError:
            self._cancel_calls()
            raise
        finally:
            self._replaced_or_closed.notify()
        for task in closing:
            task.result()

    def _cancel_calls(self) -> None:
        for transport in self._closed_transports:
            transport.cancel_calls()

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the loop; at once if it is closed. An exception becomes a `CallbackFailed` event.

        Returns:
            A function that removes the callback. It does not keep the channel alive.
        """
        return self._close_callbacks.add(callback)

    # State

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the active connection; SHUTDOWN if the channel is closed.

        Args:
            try_to_connect: Whether to connect if it is IDLE. If it is replaced before it is READY,
                the next connection is also made at once.
        """
        transport = self.connections.active
        state = transport.channel.get_state(try_to_connect)
        if transport.connection_wanted or try_to_connect:
            transport.connection_wanted = state is not READY
        return state

    def is_ready(self) -> bool:
        """Whether calls may start and the active connection is READY, or its state is not known."""
        connections = self.connections
        try:
            return connections.accepts_calls and connections.active.channel.get_state() is READY
        except Exception:  # noqa: BLE001 - a channel of another type, by `connect`
            return True

    def is_idle(self) -> bool:
        """Whether the active connection is IDLE; False if its state is not known."""
        try:
            return bool(self.get_state() is grpc.ChannelConnectivity.IDLE)
        except Exception:  # noqa: BLE001 - closed, or a channel of another type
            return False

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state changes, also by a reconnect.

        Raises:
            grpc.aio.UsageError: The channel is closed.
        """
        if self.connections.closed:
            raise grpc.aio.UsageError(CLOSED)
        while True:
            channel = self.connections.active.channel
            if channel.get_state() is not last_observed_state:
                return
            await self._changed_or_replaced(channel.wait_for_state_change(last_observed_state))

    async def _changed_or_replaced(self, change: Coroutine[Any, Any, None]) -> None:
        replaced = self._replaced_or_closed.waiter()  # before other tasks run
        changing = asyncio.ensure_future(change)
        try:
            await asyncio.wait([changing, replaced], return_when=asyncio.FIRST_COMPLETED)
            if not replaced.done():
                changing.result()
        finally:
            self._replaced_or_closed.forget(replaced)
            changing.cancel()
            await asyncio.gather(changing, return_exceptions=True)

    async def channel_ready(self) -> None:
        """Connect, and wait until the channel is READY."""
        while (state := self.get_state(try_to_connect=True)) is not READY:
            await self.wait_for_state_change(state)

    @safe_repr
    def __repr__(self) -> str:
        return (
            f"<ReconnectingChannel of grpc.aio to {self.target!r}, connection {self.number}, "
            f"{self.get_state().name}, calls in flight: {self.calls}>"
        )

    # Multicallables

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        return MULTICALLABLES[kind](self, MethodSpec(kind, method, *args, **options))

    def heartbeat_call(self, method: str) -> Any:
        """Create a multicallable for heartbeats, with bytes as messages.

        Its calls use the connection that is active when they start. They count neither as use of
        the connection nor as calls in flight. A reconnect may end them with UNAVAILABLE.
        """
        return _HeartbeatCall(self, MethodSpec(Kind.UNARY_UNARY, method))

    # For multicallables

    def end_call(self, transport: AioTransport) -> None:
        """Count the end of a call. Runs on the loop."""
        if self.connections.end_call(transport):
            self._close_transport(transport)

    def end_call_soon(self, transport: AioTransport) -> None:
        """Count the end of a call. Any thread.

        Before the first reconnect or drain it counts on that thread, later on the loop, because
        the end may close a transport.
        """
        if self._loop is None or threading.get_ident() == self._thread:
            connections = self.connections
            if transport is connections.active and connections.accepts_calls:
                transport.calls -= 1  # as `end_call`, inlined for speed
                connections.calls -= 1
            elif connections.end_call(transport):
                self._close_transport(transport)
        else:
            call_on_loop(self._loop, self.end_call, transport)


class TransportCall(Relay):
    """A call on a transport, which counts it until it ends. The base of the four kinds."""

    _call: Any = None
    _counted = False
    _has_failed = False
    _span_key: object = None  # of `rpcwheel.telemetry.tracing.begin_call`

    def __init__(self, multicallable: _ReconnectingMulticallable, transport: AioTransport) -> None:
        self.method = multicallable.method
        self._reconnecting = multicallable.channel
        self._transport = transport

    def run(self, call: Any, *, counted: bool) -> Self:
        """Use gRPC's call as the only attempt."""
        self._call = call
        self._counted = counted
        if counted:
            self._span_key = begin_call(self._transport.spans)
        self._transport.running[id(self)] = weakref.ref(self)
        self.begin(call, is_new=True)
        return self

    def end_with(self, details: str) -> None:
        """End it with UNAVAILABLE, because its transport is closed."""
        self.end(finished_call(self.kind, grpc.StatusCode.UNAVAILABLE, details))

    def time_remaining(self) -> float | None:
        left: float | None = self._call.time_remaining()
        return left

    def _attempt_failed(self, call: Any, error: BaseException | None) -> None:
        self._has_failed = True
        try:
            error = failure_of(call) if error is None else error
        except WouldBlockError:  # a call of another type, which is not done although it says so
            self.finish(call)
            return
        except BaseException as raised:  # noqa: BLE001 - of an interceptor; the caller gets it
            error = raised
        if error is None:
            self.finish(call)
            return
        if isinstance(error, grpc.aio.AioRpcError):
            self._saw_status(error.code())
        elif isinstance(error, asyncio.CancelledError):
            self._saw_status(grpc.StatusCode.CANCELLED)
        self.finish_failed(call, error)

    def _saw_status(self, code: grpc.StatusCode) -> None:
        """Stamp the activity with the status of a failure."""
        self._transport.activity.saw_status(code)

    def _release(self) -> None:
        """End its count. On any thread, if its caller has dropped it."""
        transport = self._transport
        transport.running.pop(id(self), None)
        if self._span_key is not None:
            transport.spans.pop(self._span_key, None)
        if self._counted:
            self._counted = False
            if self._final is self._call and not (self._has_failed or self.kind.streams_responses):
                activity = transport.activity  # here, because stamping in a deserializer is slower
                activity.last_read_ns = activity.last_use_ns = activity.now_ns()
            self._reconnecting.end_call_soon(transport)


_CALLS: Final = classes_by_kind(TransportCall, RELAYS)


class _ReconnectingMulticallable:
    """A method of a stub. The base of the four kinds of multicallables."""

    kind: Kind
    _stamps = True

    def __init__(self, channel: ReconnectingChannel, spec: MethodSpec) -> None:
        self.channel = channel
        self.method = spec.method
        self._spec = spec
        self._appended = channel.appended[spec.kind]
        self._bound: tuple[AioTransport | None, Any] = (None, None)

    def _on(self, transport: AioTransport) -> Any:
        """Return gRPC's multicallable on this transport."""
        if self._appended:
            transport.append(self.kind, self._appended)
        bound, method = self._bound
        if bound is not transport:
            activity = transport.activity if self._stamps else None
            method = self._spec.make(transport.channel, activity, stamps_response=False)
            self._bound = transport, method
        return method

    def start(self, request: tuple[Any, ...], options: dict[str, Any]) -> tuple[AioTransport, Any]:
        """Start gRPC's own call on the active transport; return the transport and the call.

        Call `end_call` of the channel when the call has ended.
        """
        connections = self.channel.connections
        if not connections.accepts_calls:
            raise grpc.aio.UsageError(CLOSED)
        transport = connections.active
        transport.calls += 1  # as `begin_call`, inlined for speed
        connections.calls += 1
        bound, method = self._bound
        try:
            if bound is not transport or self._appended:
                method = self._on(transport)
            call = method(*request, **options)
        except (
            BaseException
        ):  # such as UsageError, if the user has closed the channel from `connect`
            self.channel.end_call(transport)
            raise
        activity = transport.activity
        activity.last_write_ns = activity.last_use_ns = activity.now_ns()  # as `saw_write`
        return transport, call

    def __call__(self, *request: Any, **options: Any) -> Any:
        """Start a call, with the arguments of gRPC's multicallable."""
        transport, call = self.start(request, options)
        return _CALLS[self.kind](self, transport).run(call, counted=True)


MULTICALLABLES: Final = classes_by_kind(_ReconnectingMulticallable, INTERFACES)
"""The class of multicallables of each kind, made with a channel and a `MethodSpec`."""


class _Heartbeats(_ReconnectingMulticallable):
    """Heartbeats, which count neither as use of the connection nor as calls in flight."""

    _stamps = False

    def __call__(self, *request: Any, **options: Any) -> Any:
        transport = self.channel.connections.active
        call = self._on(transport)(*request, **options)
        return _CALLS[self.kind](self, transport).run(call, counted=False)


_HeartbeatCall: Final = classes_by_kind(_Heartbeats, INTERFACES)[Kind.UNARY_UNARY]


def _connect(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    compression: grpc.Compression | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None,
    options: Options,
) -> grpc.aio.Channel:
    # As keyword arguments, where OpenTelemetry's replacement of these functions looks for them.
    arguments: dict[str, Any] = {
        "options": options,
        "compression": compression,
        "interceptors": interceptors,
    }
    if credentials is None:
        return grpc.aio.insecure_channel(target, **arguments)
    return grpc.aio.secure_channel(target, credentials, **arguments)


async def _close(channel: grpc.aio.Channel, grace: float | None) -> None:
    await channel.close(grace)
