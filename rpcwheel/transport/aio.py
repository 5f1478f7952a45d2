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
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias

import grpc

from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel._grpc.aio_finished import finished_call
from rpcwheel._grpc.aio_multicallable import INTERFACES, Channel
from rpcwheel._grpc.aio_relay import (
    RELAYS,
    Relay,
    Signal,
)
from rpcwheel._grpc.calls import AIO_CLOSED
from rpcwheel._grpc.interceptors import LISTS, InterceptorLists, give_lists, lists_of
from rpcwheel.errors import ConfigurationError
from rpcwheel.rpc import Kind, classes_by_kind
from rpcwheel.telemetry.tracing import begin_call as begin_traced_call

from .arguments import DEFAULT_BACKOFF, checked_grace
from .base import ReconnectingBase
from .state import MethodSpec, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    Options: TypeAlias = list[tuple[str, Any]]

__all__ = ["ReconnectingChannel"]

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


class ReconnectingChannel(ReconnectingBase["AioTransport"], Channel):
    """A channel whose connection can be replaced while stubs and calls live on.

    On other threads than the loop's only `target`, `number`, `calls`, `closed`, `accepts_calls`,
    `activity` and `get_state()` may be read.
    """

    _grpc: ClassVar[Any] = grpc.aio
    _hint = "channels of grpc use rpcwheel.transport"
    _title = "ReconnectingChannel of grpc.aio"

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

        The arguments are those of `rpcwheel.transport.ReconnectingChannel`, and `interceptors`, as
        in `grpc.aio`. `connect` replaces these too, and is called on the loop.

        Raises:
            TypeError, ConfigurationError: An argument is not valid.
        """
        own = {
            "credentials": credentials,
            "compression": compression,
            "interceptors": interceptors,
        }
        self._loop: asyncio.AbstractEventLoop | None = None  # since the first reconnect or drain
        self._thread = threading.get_ident()
        """The loop's thread."""
        self._closed_transports: list[AioTransport] = []  # those that `close` has closed
        self._closing: set[asyncio.Task[None]] = set()
        self._replaced_or_closed = Signal()
        super().__init__(target, connect, own, options=options, backoff=backoff, timer=timer)
        self.append_to({kind: [] for kind in Kind})

    def _transport(self, channel: grpc.aio.Channel) -> AioTransport:
        return AioTransport(channel, self._now_ns)

    def append_to(self, lists: InterceptorLists) -> None:
        """Run the interceptors in these lists in all calls, after those of `connect`.

        The lists may be appended to later.
        """
        self.appended = lists
        give_lists(self, lists)

    # Reconnecting

    def _enter(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def _replaced(self) -> None:
        self._replaced_or_closed.notify()

    def _expire_soon(self, transport: AioTransport, timeout: Timeout) -> None:
        if self._loop is not None:
            call_on_loop(self._loop, self._expire, transport)

    def _close_transport(self, transport: AioTransport) -> None:
        transport.end_calls()
        if self._loop is not None and not self._loop.is_closed():
            self._close_soon(self._loop, transport)
        # otherwise gRPC's channel is closed when it is garbage-collected
        if self.transports.drained and not self.transports.closed:
            self.transports.close()
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
        checked_grace(grace)
        transports = self._close_all()
        self._replaced_or_closed.notify()
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
        for task in closing:
            task.result()

    def _cancel_calls(self) -> None:
        for transport in self._closed_transports:
            transport.cancel_calls()

    # State

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the active connection; SHUTDOWN if the channel is closed.

        Args:
            try_to_connect: Whether to connect if it is IDLE. If it is replaced before it is READY,
                the next connection is also made at once.
        """
        if self.transports.closed:  # gRPC's channel is not, before the grace is over
            return grpc.ChannelConnectivity.SHUTDOWN
        transport = self.transports.active
        state = transport.channel.get_state(try_to_connect)
        if transport.connection_wanted or try_to_connect:
            transport.connection_wanted = state is not READY
        return state

    def is_ready(self) -> bool:
        """Whether calls may start and the active connection is READY, or its state is not known."""
        transports = self.transports
        try:
            return transports.accepts_calls and transports.active.channel.get_state() is READY
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
        if self.transports.closed:
            raise grpc.aio.UsageError(AIO_CLOSED)
        while self.get_state() is last_observed_state:
            channel = self.transports.active.channel
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

    # Multicallables

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        return MULTICALLABLES[kind](self, MethodSpec(kind, method, *args, **options))

    def _heartbeats(self, spec: MethodSpec) -> Any:
        return _HeartbeatCall(self, spec)

    # For multicallables

    def end_call(self, transport: AioTransport) -> None:
        """Count the end of a call. Runs on the loop."""
        if self.transports.end_call(transport):
            self._end(transport)

    def end_call_soon(self, transport: AioTransport) -> None:
        """Count the end of a call. Any thread.

        Before the first reconnect or drain it counts on that thread, later on the loop, because
        the end may close a transport.
        """
        if self._loop is None or threading.get_ident() == self._thread:
            self.end_call(transport)
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
            self._span_key = begin_traced_call(self._transport.spans)
        self._transport.running[id(self)] = weakref.ref(self)
        self.begin(call)
        return self

    def end_with(self, details: str) -> None:
        """End it with UNAVAILABLE, because its transport is closed."""
        self.end(finished_call(self.kind, grpc.StatusCode.UNAVAILABLE, details))

    def time_remaining(self) -> float | None:
        left: float | None = self._call.time_remaining()
        return left

    def _attempt_failed(self, call: Any, error: BaseException) -> None:
        self._has_failed = True
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
                transport.activity.saw_read()  # here: stamping in a deserializer is slower
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
        transports = self.channel.transports
        if not transports.accepts_calls:
            raise grpc.aio.UsageError(AIO_CLOSED)
        transport = transports.begin_call()
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
        transport.activity.saw_write()
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
        transport = self.channel.transports.active
        call = self._on(transport)(*request, **options)
        return _CALLS[self.kind](self, transport).run(call, counted=False)


_HeartbeatCall: Final = classes_by_kind(_Heartbeats, INTERFACES)[Kind.UNARY_UNARY]


async def _close(channel: grpc.aio.Channel, grace: float | None) -> None:
    await channel.close(grace)
