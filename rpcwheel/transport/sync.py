"""The channel for threads whose connection can be replaced: a `grpc.Channel` in every respect."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import grpc

from rpcwheel.rpc import Kind
from rpcwheel.timer.clock import checked_timer

from ._members import Ping, Recipe, StreamStream, StreamUnary, UnaryStream, UnaryUnary
from ._switch import Switch
from .arguments import (
    DEFAULT_BACKOFF,
    checked_backoff,
    checked_drain_ns,
    checked_options,
    checked_reason,
    checked_target,
    refuse_both,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .core import Traffic

    Options: TypeAlias = list[tuple[str, Any]]
    Convert: TypeAlias = Callable[[Any], Any]

__all__ = ["ReconnectingChannel"]


class ReconnectingChannel(grpc.Channel):
    """A channel whose connection can be replaced, while stubs and calls go on."""

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
        """Make the channel. It connects when it is first used, as any channel of grpc.

        Args:
            target: As grpc takes it: `"127.0.0.1:50051"`, `"dns:///orders:50051"`.
            credentials: For TLS and such; None for none, as `grpc.insecure_channel`.
            options: As grpc takes them. `grpc.use_local_subchannel_pool` is always set, so that no
                connection is shared.
            compression: As grpc takes it.
            connect: Makes the channel of each connection in your own way: `connect(options)`, with
                the options above. On whichever thread replaces.
            backoff: Between replacements of connections that never answered at all: seconds, or a
                tenacity wait object. That of one that had worked is immediate.
            timer: What ends calls that take too long to drain; None for `shared_timer()`, which
                also stands in for one that was stopped or is full.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
        """
        self._target = checked_target(target)
        refuse_both(connect, credentials=credentials, compression=compression)
        own = partial(_connect, target, credentials, compression) if connect is None else connect
        self._switch = Switch(
            target,
            partial(_checked_connect, own, checked_options(options)),
            checked_backoff(backoff),
            checked_timer(timer),
        )
        self._pings: dict[str, Ping] = {}  # one for each heartbeat would cost as much as its look

    # A channel of grpc

    def unary_unary(
        self,
        method: str,
        request_serializer: Convert | None = None,
        response_deserializer: Convert | None = None,
        *args: Any,
        **options: Any,
    ) -> UnaryUnary:
        """Make a member of a stub."""
        given = method, request_serializer, response_deserializer, args, options
        return UnaryUnary(self._switch, Recipe(Kind.UNARY_UNARY, *given))

    def unary_stream(
        self,
        method: str,
        request_serializer: Convert | None = None,
        response_deserializer: Convert | None = None,
        *args: Any,
        **options: Any,
    ) -> UnaryStream:
        """Make a member of a stub."""
        given = method, request_serializer, response_deserializer, args, options
        return UnaryStream(self._switch, Recipe(Kind.UNARY_STREAM, *given))

    def stream_unary(
        self,
        method: str,
        request_serializer: Convert | None = None,
        response_deserializer: Convert | None = None,
        *args: Any,
        **options: Any,
    ) -> StreamUnary:
        """Make a member of a stub."""
        given = method, request_serializer, response_deserializer, args, options
        return StreamUnary(self._switch, Recipe(Kind.STREAM_UNARY, *given))

    def stream_stream(
        self,
        method: str,
        request_serializer: Convert | None = None,
        response_deserializer: Convert | None = None,
        *args: Any,
        **options: Any,
    ) -> StreamStream:
        """Make a member of a stub."""
        given = method, request_serializer, response_deserializer, args, options
        return StreamStream(self._switch, Recipe(Kind.STREAM_STREAM, *given))

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Call `callback(state)` now and at each change, across replacements.

        On a worker, one callback of a channel at a time. One that raises is told as
        `CallbackFailed` and goes on being called. Nobody is called any more once the interpreter
        exits (`atexit`).

        Args:
            callback: Told the state of the active connection, never of an old one.
            try_to_connect: Whether to connect at once; new connections too, from then on.
        """
        self._switch.subscriptions.add(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Call it no more. Unknown ones are no error."""
        self._switch.subscriptions.remove(callback)

    def close(self) -> None:
        """End all calls, as any channel of grpc, and close all connections. A second time, nothing.

        Not to be called where gRPC runs done-callbacks: like any channel of grpc, it waits there
        for itself.
        """
        self._switch.close()

    def __repr__(self) -> str:
        state = self.get_state()
        return (
            f"<ReconnectingChannel to {self.target!r}, connection {self.number}, "
            f"{'UNKNOWN' if state is None else state.name}, calls in flight: {self.calls}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    # Its connection

    @property
    def target(self) -> str:
        """What was given."""
        return self._target

    @property
    def number(self) -> int:
        """Of the active connection, from 1."""
        return self._switch.links.active.number

    @property
    def calls(self) -> int:
        """How many calls are in flight, on all connections."""
        return self._switch.links.calls

    @property
    def closed(self) -> bool:
        """Whether it was closed, or was retired and has been drained since."""
        return self._switch.links.closed

    @property
    def retired(self) -> bool:
        """Whether it takes no more calls, as it was retired or closed."""
        return self._switch.links.refuses

    def get_state(
        self,
        try_to_connect: bool = False,
    ) -> grpc.ChannelConnectivity | None:
        """The state of the active connection; SHUTDOWN once closed.

        Args:
            try_to_connect: Whether to begin to connect if it is idle; if it is replaced before it
                is ready, so is the next.

        Returns:
            None if it can't be known, as `connect` made a channel that hides it.
        """
        return self._switch.state(try_to_connect=try_to_connect)

    def replace(
        self, reason: str = "asked for", *, drain: Duration | None = None, force: bool = False
    ) -> bool:
        """Put a new connection in the place of the active one; new calls go there at once.

        A call that begins meanwhile goes to either and fails for neither. Told as
        `ConnectionReplaced`, on this thread.

        Args:
            reason: Why; in events, and in the details of calls that are ended.
            drain: Seconds that calls in flight may go on on the old one. After that they are ended
                with UNAVAILABLE, "connection replaced: <reason>". 0: they are ended now, by a
                worker; while somebody subscribes to the state, within 0.2 s. None: they take as
                long as they take.
            force: Whether to do it against the backoff.

        Returns:
            Whether it was replaced: False, and nothing has happened, if the backoff forbids it, if
            another thread replaced it meanwhile (not with `force`), or if the channel is closed.

        Raises:
            TypeError, ConfigurationError: `drain` is no length of time, or negative.
            Exception: What `connect`, or the wait object, raised; nothing has happened.

        Thread-safe; takes as long as `connect` does, and holds up no calls.
        """
        return self._switch.replace(checked_reason(reason), checked_drain_ns(drain), force=force)

    def retire(self, drain: Duration | None = None, *, reason: str = "asked for") -> None:
        """Take no more calls, and close when the last of those in flight has ended.

        Calls from now on raise as on a closed channel. Closed by a worker; nothing waits for it.

        Args:
            drain: Seconds that calls in flight may go on. After that they are ended with
                UNAVAILABLE, "channel retired: <reason>". 0: they are ended now. None: they take as
                long as they take. Called again, it can only become shorter.
            reason: Why; the first one counts.

        Raises:
            TypeError, ConfigurationError: `drain` is no length of time, or negative.

        Thread-safe; on a closed channel, nothing.
        """
        self._switch.retire(checked_drain_ns(drain), checked_reason(reason))

    # For the heartbeat

    @property
    def traffic(self) -> Traffic:
        """When something was read, written and used on the active connection; for heartbeats.

        In nanoseconds on the timer's clock.
        """
        return self._switch.links.active.traffic

    def heartbeat_call(self, method: str) -> Ping:
        """Make a member for heartbeats: of bytes, on the connection that is active at each call.

        Its calls are no use of the connection, and none in flight; what is answered is for the
        heartbeat to note. One that meets a replacement may end with UNAVAILABLE.
        """
        ping = self._pings.get(method)
        if ping is None:
            ping = self._pings[method] = Ping(self._switch, method)
        return ping

    def is_idle(self) -> bool:
        """Whether there is no connection and none is wanted; False where it can't be known."""
        return self._switch.state() is grpc.ChannelConnectivity.IDLE

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the thread that closes it; at once if it is closed. One that raises is told as
        `CallbackFailed`.

        Returns:
            What to call to have it forgotten.
        """
        return self._switch.on_close(callback)


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


def _checked_connect(connect: Callable[[Options], grpc.Channel], options: Options) -> grpc.Channel:
    channel: object = connect(list(options))
    if not isinstance(channel, grpc.Channel):
        raise TypeError(
            f"connect must give a new grpc.Channel, not {channel!r}; for those of grpc.aio there "
            "is rpcwheel.transport.aio"
        )
    return channel
