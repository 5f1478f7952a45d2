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

from rpcwheel._grpc.aio_interceptors import Interceptors, give_lists, is_patched
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import ConfigurationError
from rpcwheel.observe import CallbackFailed, ConnectionReplaced, emit
from rpcwheel.rpc import Kind
from rpcwheel.timer.clock import checked_timer, clock_of

from ._aio_members import MEMBERS, Ping, Wire
from ._aio_seen import Seen
from ._drain import timeout_on
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
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .core import Link

    Options = list[tuple[str, Any]]
    Connect = Callable[[Options], grpc.aio.Channel]

__all__ = ["ReconnectingChannel"]


class ReconnectingChannel(Seen):
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
        options: Sequence[tuple[str, Any]] | None = None,
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
            timer: Ends what runs on past `drain`; None for `shared_timer()`, which also stands in
                for one that was stopped or is full.

        Raises:
            TypeError: An argument is of a wrong type.
            ConfigurationError: `connect` beside what it takes the place of; a wrong `backoff`.
        """
        checked_target(target)
        refuse_both(
            connect, credentials=credentials, compression=compression, interceptors=interceptors
        )
        self._options = checked_options(options)
        self._connect = connect or partial(_connect, target, credentials, compression, interceptors)
        self._foreign = connect is not None or interceptors is not None or is_patched()
        self._timer = checked_timer(timer)
        rhythm = checked_backoff(backoff)
        super().__init__(target, Links(self._new(), clock_of(timer), rhythm))
        self.thread = threading.get_ident()
        """Internal: the loop's thread."""
        self._loop: asyncio.AbstractEventLoop | None = None  # once something was replaced
        self._drains: dict[Link[Wire], Any] = {}  # timeouts
        self._ending: list[Wire] = []  # those that `close` has closed
        self._closing: set[asyncio.Task[None]] = set()
        self.append_to({kind: [] for kind in Kind})
        self._on_close: list[Callable[[], object]] = []

    def append_to(self, lists: Interceptors) -> None:
        """Internal: have calls run the interceptors in these lists, behind those of `connect`.

        Callers may append to the lists later.
        """
        self.appended = lists
        give_lists(self, lists)

    def _new(self) -> Wire:
        channel = self._connect(list(self._options))
        if not isinstance(channel, grpc.aio.Channel):
            raise TypeError(f"connect must return a new grpc.aio channel, not {channel!r}")
        return Wire(channel, foreign=self._foreign)

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
        if links.refuses or (not force and links.wait_ns()):
            return False
        rest_ns = links.rest_ns()  # the user's, as `_connect` is
        wire = self._new()
        if any(link.channel.channel is wire.channel for link in links.opened()):
            raise ConfigurationError("connect must make a new channel each time")
        number, calls = links.active.number + 1, links.active.calls
        old, over = links.replace(wire, drain_ns, reason, rest_ns)
        if old.wanted:
            wire.channel.get_state(try_to_connect=True)
        self._changed.give()
        if over:
            self._end(old)
        elif drain_ns != NEVER:
            self._end_after(old, drain_ns)
        emit(ConnectionReplaced(self.target, number=number, reason=reason, calls=calls))
        return True

    def retire(self, drain: Duration | None = None, *, reason: str = "asked for") -> None:
        """Take no more calls, and close when the last of those in flight has ended.

        On the loop; nothing waits for it, but `close` may. Calls from now on raise as on a closed
        channel. On a closed channel, nothing.

        Args:
            drain: Seconds that calls in flight may go on. After that they are ended with
                UNAVAILABLE, "channel retired: <reason>". 0: they are ended now. None: they take as
                long as they take. Called again, it can only become shorter.
            reason: Why; the first one counts.

        Raises:
            TypeError, ConfigurationError: `drain` is no length of time, or negative.
            RuntimeError: Not called on an event loop.
        """
        drain_ns = checked_drain_ns(drain)
        self._loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        over, shorter = self.links.retire(drain_ns, checked_reason(reason))
        for link in shorter:
            self._end_after(link, drain_ns)
        for link in over:
            self._end(link)

    def _end_after(self, link: Link[Wire], drain_ns: int) -> None:
        """Have what is still on a connection ended then, and no later than it was to be."""
        loop = self._loop
        assert loop is not None  # noqa: S101 - for mypy
        expire = partial(_expire, weakref.ref(self), link)
        timeout: Any = timeout_on(self._timer, partial(_call_soon, loop, expire), drain_ns)
        if timeout is None:
            timeout = loop.call_later(to_seconds(drain_ns), expire)
        former = self._drains.get(link)
        if former is not None:
            former.cancel()
        self._drains[link] = timeout

    def expire(self, link: Link[Wire]) -> None:
        """Internal: the time of `link` to drain is over."""
        if self.links.expire(link):
            self._end(link)

    def leave(self, link: Link[Wire]) -> None:
        """Internal: a call on this connection has ended."""
        if self.links.leave(link):
            self._end(link)

    def _end(self, link: Link[Wire]) -> None:
        """Close a connection that takes no more calls, and end what is still on it."""
        drain = self._drains.pop(link, None)
        if drain is not None:
            drain.cancel()
        link.channel.end(link.details)
        if self._loop is not None and not self._loop.is_closed():
            self._close_soon(self._loop, link.channel)
        # else grpc's channel closes itself when it is dropped
        if self.links.is_spent and not self.links.closed:
            self.links.close()
            self._tell_all()
            self._changed.give()

    def _close_soon(
        self, loop: asyncio.AbstractEventLoop, wire: Wire, grace: float | None = None
    ) -> None:
        task = loop.create_task(_close(wire.channel, grace))
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
            grace: Seconds that they may go on; None or 0: they are cancelled now. So they are if
                this is cancelled while it waits, or called again without a grace.

        Raises:
            ConfigurationError: `grace` is negative.
        """
        if grace is not None and grace < 0:
            raise ConfigurationError(f"grace must be 0 seconds or more, or None, not {grace!r}")
        links = self.links.close()
        for drain in self._drains.values():
            drain.cancel()
        self._drains.clear()
        try:
            self._tell_all()
        finally:  # whatever a callback raises, be it `SystemExit`
            self._ending += [link.channel for link in links]
            for link in links:
                self._close_soon(asyncio.get_running_loop(), link.channel, grace)
            await self._ended(grace)

    async def _ended(self, grace: float | None) -> None:
        """Wait until all is closed; grpc's own `close` does not end what a former one has left."""
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
            self._changed.give()
        for task in closing:
            task.result()

    def _cancel_calls(self) -> None:
        for wire in self._ending:
            wire.cancel()

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

        On the loop; at once if it is closed. One that raises is told as `CallbackFailed`.

        Returns:
            What to call to have it forgotten.
        """
        if self.links.closed:
            self._tell(callback)
        else:
            self._on_close.append(callback)
        return partial(_forget, weakref.ref(self), callback)

    def forget(self, callback: Callable[[], object]) -> None:
        """Internal: what `on_close` returns does it."""
        if callback in self._on_close:
            self._on_close.remove(callback)

    def _tell_all(self) -> None:
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            self._tell(callback)

    def _tell(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - told as an event; the others must be told too
            emit(CallbackFailed(subject=self.target, callback=repr(callback), error=error))

    # --- Members of stubs. They take whatever grpc's channel takes: `_registered_method`, for one.

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return MEMBERS[Kind.UNARY_UNARY](self, method, *args, **options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return MEMBERS[Kind.UNARY_STREAM](self, method, *args, **options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return MEMBERS[Kind.STREAM_UNARY](self, method, *args, **options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
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
    # By name: OpenTelemetry's replacement for these functions looks for `interceptors` there.
    given: dict[str, Any] = {
        "options": options,
        "compression": compression,
        "interceptors": interceptors,
    }
    if credentials is None:
        return grpc.aio.insecure_channel(target, **given)
    return grpc.aio.secure_channel(target, credentials, **given)


async def _close(channel: grpc.aio.Channel, grace: float | None) -> None:
    await channel.close(grace)


def _forget(channel: weakref.ref[ReconnectingChannel], callback: Callable[[], object]) -> None:
    """What who is told of the end holds keeps no channel alive."""
    alive = channel()
    if alive is not None:
        alive.forget(callback)


def _expire(channel: weakref.ref[ReconnectingChannel], link: Link[Wire]) -> None:
    alive = channel()
    if alive is not None:
        alive.expire(link)


def _call_soon(loop: asyncio.AbstractEventLoop, step: Callable[[], object], _: object) -> None:
    """What the timer does, on its own thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
        loop.call_soon_threadsafe(step)
