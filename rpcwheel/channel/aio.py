"""A channel of `grpc.aio` whose connection can be replaced by a new one while calls run.

All of it is on one event loop; only a timer's thread calls in, and what it calls is handed over to
the loop. The timer knows the channel weakly, so one that is dropped is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import grpc

from rpcwheel._grpc.aio_relay import Signal
from rpcwheel.call import Kind
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import ConfigurationError, TimerError
from rpcwheel.observe import ConnectionReplaced, ListenerFailed, emit
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from ._aio_members import MEMBERS, Ping, Wire
from .arguments import (
    DEFAULT_BACKOFF,
    checked_backoff,
    checked_drain_ns,
    checked_options,
    checked_reason,
    checked_target,
    refuse_both,
)
from .core import Links

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .core import Link, Traffic

    Options = list[tuple[str, Any]]
    Connect = Callable[[Options], grpc.aio.Channel]

__all__ = ["ReconnectingChannel"]


class ReconnectingChannel(grpc.aio.Channel):
    """A channel that can be given a new connection: `replace()`.

    Stubs and interceptors made of it before a replacement work after it. Whatever `grpc.aio` gives
    a channel it has too. It is of one event loop; nothing of it may be called on another thread,
    but `target`, `number`, `calls`, `closed` and `traffic` may be read there.
    """

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        options: Sequence[tuple[str, Any]] = (),
        compression: grpc.Compression | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
        connect: Connect | None = None,
        backoff: Duration | WaitBaseT = DEFAULT_BACKOFF,
        timer: Timer | None = None,
    ) -> None:
        """Make the first connection's channel; as with grpc, it connects at the first call.

        Args:
            target: As `grpc.aio.insecure_channel` takes it.
            credentials: None for a channel without encryption.
            options: Of grpc's channels. Each gets `grpc.use_local_subchannel_pool` on top, so that
                a new one never shares the old one's connection.
            compression: Of grpc's channels.
            interceptors: Of grpc's channels.
            connect: Makes a new channel of the options; for channels made in a way of your own. It
                takes the place of `credentials`, `compression` and `interceptors`.
            backoff: How long after a replacement another one may follow, as long as nothing was
                heard on the connection: seconds, a `timedelta`, or a tenacity wait object. The
                default is up to 1 s after the first, up to twice as long after each more, at most
                60 s. A connection that has worked is replaced at once.
            timer: Ends what runs on past `drain`; None for `shared_timer()`.

        Raises:
            TypeError: An argument is of a wrong type.
            ConfigurationError: `connect` beside what it takes the place of; a wrong `backoff`.
        """
        self.target = checked_target(target)
        """As it was given."""
        refuse_both(
            connect, credentials=credentials, compression=compression, interceptors=interceptors
        )
        self._options = checked_options(options)
        self._connect = connect or partial(_connect, target, credentials, compression, interceptors)
        self._foreign = connect is not None or interceptors is not None
        self._timer = checked_timer(timer)
        rhythm = checked_backoff(backoff)
        self.links: Links[Wire] = Links(self._new(), clock_of(timer), rhythm)
        """Internal: which connection serves what."""
        self.thread = threading.get_ident()
        """Internal: the loop's thread."""
        self._loop: asyncio.AbstractEventLoop | None = None  # once something was replaced
        self._changed = Signal()
        self._drains: dict[Link[Wire], Any] = {}  # timeouts
        self._closing: set[asyncio.Task[None]] = set()
        self._on_close: list[Callable[[], object]] = []

    def _new(self) -> Wire:
        channel = self._connect(list(self._options))
        if not isinstance(channel, grpc.aio.Channel):
            raise TypeError(f"connect must return a new grpc.aio channel, not {channel!r}")
        return Wire(channel, foreign=self._foreign)

    # --- What is seen of it ---

    @property
    def number(self) -> int:
        """Of the connection that is active, from 1."""
        return self.links.active.number

    @property
    def calls(self) -> int:
        """Calls in flight, those on connections that were replaced too."""
        return self.links.calls

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.links.closed

    @property
    def traffic(self) -> Traffic:
        """When something was read, written and used on the active connection; for heartbeats."""
        return self.links.active.traffic

    def is_idle(self) -> bool:
        """Whether there is no connection, and none is wanted; False where that is unknown."""
        try:
            return bool(self.get_state() is grpc.ChannelConnectivity.IDLE)
        except Exception:  # noqa: BLE001 - closed, or of another make
            return False

    def is_cut_off(self) -> bool:
        """Whether a call that failed just now is sure to have found no connection.

        What retries ask, to know that nothing was sent.
        """
        failing = self.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return failing and self.links.is_alone()

    # --- Replacing ---

    def replace(
        self,
        reason: str = "asked for",
        *,
        drain: Duration | None = None,
        force: bool = False,
    ) -> bool:
        """Put a new connection in the place of the active one; new calls go there at once.

        On the loop. Emits `ConnectionReplaced`.

        Args:
            reason: For the event, and the status of calls that are ended.
            drain: Seconds that calls on the old connection may go on; those that still run are then
                ended with UNAVAILABLE. 0: at once. None or infinite: as long as they take.
            force: Whether to do so even where the backoff forbids it.

        Returns:
            False if nothing was done: the backoff forbids it, or the channel is closed.

        Raises:
            TypeError, ConfigurationError: `drain` is no length of time.
            RuntimeError: Not called on an event loop.
            Exception: What `connect`, or the wait object, raised; nothing has changed.
        """
        checked_reason(reason)
        drain_ns = checked_drain_ns(drain)
        self._loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        links = self.links
        if links.closed or (not force and links.wait_ns()):
            return False
        rest_ns = links.rest_ns()  # the user's, as `_connect` is
        wire = self._new()
        if wire.channel is links.active.channel.channel:
            raise ConfigurationError("connect must make a new channel each time")
        number, calls = links.active.number + 1, links.active.calls
        old, over = links.replace(wire, drain_ns, reason, rest_ns)
        self._changed.give()
        if over:
            self._end(old)
        elif drain_ns != NEVER:
            self._drains[old] = self._end_after(old, drain_ns)
        emit(ConnectionReplaced(self.target, number=number, reason=reason, calls=calls))
        return True

    def _end_after(self, link: Link[Wire], drain_ns: int) -> Any:  # noqa: ANN401 - has `cancel()`
        """Have what is still on a connection ended then."""
        loop = self._loop
        assert loop is not None  # noqa: S101 - for mypy
        expire = partial(_expire, weakref.ref(self), link)
        delay_s = to_seconds(drain_ns)
        try:
            timer = self._timer or shared_timer()
            return timer.new_timeout(partial(_call_soon, loop, expire), delay_s)
        except TimerError:  # stopped, or full: the loop has a clock of its own
            return loop.call_later(delay_s, expire)

    def expire(self, link: Link[Wire]) -> None:
        """Internal: the time of `link` to drain is over."""
        if self.links.expire(link):
            self._end(link)

    def leave(self, link: Link[Wire]) -> None:
        """Internal: a call on this connection has ended."""
        if self.links.leave(link):
            self._end(link)

    def _end(self, link: Link[Wire]) -> None:
        """Close a connection that was replaced, and end what is still on it."""
        drain = self._drains.pop(link, None)
        if drain is not None:
            drain.cancel()
        link.channel.end(f"connection replaced: {link.reason}")
        self._close_soon(link.channel)

    def _close_soon(self, wire: Wire) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return  # grpc's channel closes itself when it is dropped
        task = loop.create_task(_close(wire.channel, None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def hand_over(self, step: Callable[[], object]) -> bool:
        """Internal: have the loop do it; on any thread. False if it is as good done there."""
        if self._loop is None:
            return False  # nothing was replaced: nothing follows from the end of a call
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(step)
        return True

    # --- Closing ---

    async def close(self, grace: float | None = None) -> None:
        """Take no more calls, and end those that run, on all connections, as grpc.aio does.

        Args:
            grace: Seconds that they may go on; None or 0: they are cancelled now.

        A second time, nothing.
        """
        links = self.links.close()
        for drain in self._drains.values():
            drain.cancel()
        self._drains.clear()
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            self._tell(callback)
        try:
            closing = [_close(link.channel.channel, grace) for link in links]
            await asyncio.gather(*closing, *self._closing)
        finally:
            self._changed.give()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the loop; at once if it is closed. One that raises is told as `ListenerFailed`.

        Returns:
            What to call to have it forgotten.
        """
        if self.links.closed:
            self._tell(callback)
        else:
            self._on_close.append(callback)
        return partial(self._forget, callback)

    def _forget(self, callback: Callable[[], object]) -> None:
        if callback in self._on_close:
            self._on_close.remove(callback)

    def _tell(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - told as an event; the others must be told too
            emit(ListenerFailed(target=self.target, listener=repr(callback), error=error))

    # --- State ---

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - as grpc has it
        """Of the active connection."""
        return self.links.active.channel.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state is another, be it that of a new connection."""
        while True:
            channel = self.links.active.channel.channel
            if channel.get_state() is not last_observed_state:
                return
            await self._either(channel.wait_for_state_change(last_observed_state))

    async def _either(self, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change of state, or for a new connection."""
        waiting = [asyncio.ensure_future(change), asyncio.ensure_future(self._changed.wait())]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if waiting[0] in done and waiting[1] not in done:
            waiting[0].result()

    async def channel_ready(self) -> None:
        """Wait until there is a connection, and have it made."""
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(state)

    # --- Members of stubs. They take whatever grpc's channel takes: `_registered_method`, for one.

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a member of a stub."""
        return MEMBERS[Kind.UNARY_UNARY](self, method, *args, **options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a member of a stub."""
        return MEMBERS[Kind.UNARY_STREAM](self, method, *args, **options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a member of a stub."""
        return MEMBERS[Kind.STREAM_UNARY](self, method, *args, **options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Make a member of a stub."""
        return MEMBERS[Kind.STREAM_STREAM](self, method, *args, **options)

    def heartbeat_call(self, method: str) -> Ping:
        """Make a member for heartbeats: of bytes, on the connection that is active at each call.

        Its calls are no use of the connection, and none in flight. One that meets a replacement
        ends with UNAVAILABLE, as the others do.
        """
        return Ping(self, method)


def _connect(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    compression: grpc.Compression | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None,
    options: Options,
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(target, options, compression, interceptors)
    return grpc.aio.secure_channel(target, credentials, options, compression, interceptors)


async def _close(channel: grpc.aio.Channel, grace: float | None) -> None:
    await channel.close(grace)


def _expire(channel: weakref.ref[ReconnectingChannel], link: Link[Wire]) -> None:
    alive = channel()
    if alive is not None:
        alive.expire(link)


def _call_soon(loop: asyncio.AbstractEventLoop, step: Callable[[], object], _: object) -> None:
    """What the timer does, on its own thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
        loop.call_soon_threadsafe(step)
