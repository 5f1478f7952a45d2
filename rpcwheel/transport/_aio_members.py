"""The members of a stub on an event loop: each call goes to the connection that is active then.

What the caller holds is a `Relay` (`rpcwheel._grpc.aio_relay`) with one try, grpc's own call. So a
call that is still on a connection that was given up can be ended with a status that says why, and
its caller finds no `CancelledError` that nobody asked for. No call costs a task.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.aio_finished import failed_call, finished_call
from rpcwheel._grpc.aio_interceptors import LISTS, lists_of
from rpcwheel._grpc.aio_relay import NotAtOnceError, failure_of, has_ended, relay_of
from rpcwheel.errors import ConfigurationError
from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel._grpc.aio_relay import Relay

    from .aio import ReconnectingChannel
    from .core import Link

__all__ = ["CLOSED", "MEMBERS", "Ping", "Running", "Wire"]

CLOSED: Final = "Channel is closed."
"""What grpc.aio says to who makes a call on a closed channel."""


class Wire:
    """A channel of grpc.aio, and the calls that run on it."""

    __slots__ = ("_own", "channel", "foreign", "running")

    def __init__(self, channel: grpc.aio.Channel, *, foreign: bool) -> None:
        self.channel = channel
        self.foreign = foreign
        """Whether its calls may be of another make, or have others' interceptors in them."""
        self.running: set[Running] = set()
        self._own = {kind: len(own) for kind, own in lists_of(channel).items()}

    def append(self, kind: Kind, appended: list[Any]) -> None:
        """Have its calls of this kind run these interceptors behind its own.

        Raises:
            ConfigurationError: The channel is not gRPC's own and has no such list.
        """
        own = self._own.get(kind)
        if own is None:
            raise ConfigurationError(
                f"{LISTS[kind]}: {appended!r} can't be appended, as connect made {self.channel!r}, "
                "which has no such list; give it these interceptors in connect"
            )
        interceptors = lists_of(self.channel)[kind]
        if interceptors[own:] != appended:
            interceptors[own:] = appended
            self.foreign = True

    def end(self, details: str) -> None:
        """End all that runs on it with UNAVAILABLE."""
        for running in list(self.running):
            running.end(details)

    def cancel(self) -> None:
        """Cancel all that runs on it."""
        for running in list(self.running):
            running.cancel()


class Running:
    """A call on one connection; conducts its relay (see `rpcwheel._grpc.aio_relay`)."""

    __slots__ = ("__weakref__", "_call", "_counts", "_link", "_member", "_relay")

    requests = None
    """The caller writes to grpc's call itself."""

    def __init__(self, member: _Member, link: Link[Wire], call: Any, *, counts: bool) -> None:
        self._member = member
        self._link = link
        self._call = call
        self._counts = counts

    def begin(self) -> Relay:
        """Make what the caller holds."""
        relay = self._member.relay(self)
        self.follow(relay)
        self._link.channel.running.add(self)
        relay.begin(self._call)
        return relay

    def follow(self, relay: Relay) -> None:
        """Take note what it conducts.

        Weakly: a stream that its caller has forgotten is cancelled. A call whose interceptor has
        raised, and that nobody awaits, never tells that it ended (grpc.aio 1.60; proved not to be
        so on 1.85).
        """
        foreign = self._link.channel.foreign
        self._relay = weakref.ref(relay, self._forgotten if foreign else None)

    def end(self, details: str) -> None:
        """End the call, as its connection is given up."""
        relay = self._relay()
        if relay is not None:
            relay.end(finished_call(self.kind, grpc.StatusCode.UNAVAILABLE, details))

    def cancel(self) -> None:
        """Cancel the call, as its channel is closed."""
        relay = self._relay()
        if relay is not None:
            relay.cancel()

    # --- For the relay ---

    @property
    def kind(self) -> Kind:
        """Which of the four."""
        return self._member.kind

    @property
    def method(self) -> str:
        """In full."""
        return self._member.method

    def failed(self, relay: Relay, call: Any, error: BaseException | None) -> None:
        """End the relay as the call has ended."""
        try:
            error = failure_of(call) if error is None else error
        except NotAtOnceError:  # a foreign call, which says that it is done and is not
            relay.finish(call)
            return
        except BaseException as raised:  # noqa: BLE001 - an interceptor's; the caller gets it
            error = raised
        if isinstance(error, grpc.aio.AioRpcError):
            self._link.traffic.saw_status(error.code())
            if self._goes_on(relay, error):
                return
            if self.kind.streams_requests:  # or grpc.aio may tell another status later
                relay.finish(failed_call(self.kind, error), source=call)
                return
        relay.finish(call if error is None or has_ended(call) else failed_call(self.kind, error))

    def _goes_on(self, relay: Relay, error: grpc.aio.AioRpcError) -> bool:
        """Whether another try has been begun, or will be, after this failure."""
        return False

    def finished(self) -> None:
        """Take note that the call has ended; on any thread, if it was forgotten."""
        link, channel = self._link, self._member.channel
        running = link.channel.running
        if self not in running:
            return
        if get_ident() != channel.thread and channel.hand_over(self.finished):
            return
        running.remove(self)
        if self._counts:
            channel.leave(link)

    def _forgotten(self, _: object) -> None:
        self.finished()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of the call."""
        left: float | None = self._call.time_remaining()
        return left

    def listen(self, relay: Relay, call: object) -> None:
        """Nothing is done while the caller waits for a message."""


class _Member:
    """One method of a stub. The base of the four kinds."""

    kind: Kind

    def __init__(
        self,
        channel: ReconnectingChannel,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        self.channel = channel
        self.method = method
        self.relay = relay_of(self.kind)
        self._codec = (request_serializer, response_deserializer)
        self._given = (args, options)
        self.links = channel.links
        self.appended = channel.appended[self.kind]
        """Interceptors that were appended to those of the channel."""
        self._make(channel.links.active)

    def _make(self, link: Link[Wire]) -> Any:
        """Make grpc's own member on another connection; the one before is let go."""
        serializer, deserializer = self._codec
        traffic = link.traffic
        self._call = self._of(link, traffic.writing(serializer), traffic.reading(deserializer))
        self._link = link
        return self._call

    def _of(self, link: Link[Wire], serializer: Any, deserializer: Any) -> Any:
        args, options = self._given
        make = getattr(link.channel.channel, self.kind.name.lower())
        return make(self.method, serializer, deserializer, *args, **options)

    def start(self, request: Any, options: dict[str, Any]) -> tuple[Link[Wire], Any]:
        """Internal: begin grpc's own call on the active connection; gives both.

        A `Running` of them is to tell its end: what the caller holds, or a channel of many members.
        """
        if self.links.retired:
            raise grpc.aio.UsageError(CLOSED)
        link = self.links.enter()
        try:
            if self.appended:
                link.channel.append(self.kind, self.appended)
            member = self._call if link is self._link else self._make(link)
            return link, member(request, **options)
        except BaseException:  # such as `UsageError` of a channel that is closed
            self.channel.leave(link)
            raise

    def _begin(self, request: Any, **options: Any) -> Any:
        link, call = self.start(request, options)
        return Running(self, link, call, counts=True).begin()


class _OneRequest(_Member):
    """The caller gives one request."""

    def __call__(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(
            request,
            timeout=timeout,
            metadata=metadata,
            credentials=credentials,
            wait_for_ready=wait_for_ready,
            compression=compression,
        )


class _ManyRequests(_Member):
    """The caller gives an iterator of requests, or writes them."""

    def start(self, request: Any, options: dict[str, Any]) -> tuple[Link[Wire], Any]:
        link, call = super().start(request, options)
        link.traffic.saw_write()  # it begins before there is a request
        return link, call

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        return self._begin(
            request_iterator,
            timeout=timeout,
            metadata=metadata,
            credentials=credentials,
            wait_for_ready=wait_for_ready,
            compression=compression,
        )


class _UnaryUnary(_OneRequest, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    kind = Kind.UNARY_UNARY


class _UnaryStream(_OneRequest, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    kind = Kind.UNARY_STREAM


class _StreamUnary(_ManyRequests, grpc.aio.StreamUnaryMultiCallable):  # type: ignore[type-arg]  # not in 1.76
    kind = Kind.STREAM_UNARY


class _StreamStream(_ManyRequests, grpc.aio.StreamStreamMultiCallable):  # type: ignore[type-arg]  # not in 1.76
    kind = Kind.STREAM_STREAM


class Ping(_UnaryUnary):
    """A heartbeat's calls: of bytes, neither use nor calls in flight.

    On whatever connection is active when one begins.
    """

    def _make(self, link: Link[Wire]) -> Any:
        self._call = link.channel.channel.unary_unary(self.method)
        self._link = link
        return self._call

    def _begin(self, request: Any, **options: Any) -> Any:
        link = self.links.active
        if self.appended:
            link.channel.append(self.kind, self.appended)
        member = self._call if link is self._link else self._make(link)
        return Running(self, link, member(request, **options), counts=False).begin()


MEMBERS: Final = {
    Kind.UNARY_UNARY: _UnaryUnary,
    Kind.UNARY_STREAM: _UnaryStream,
    Kind.STREAM_UNARY: _StreamUnary,
    Kind.STREAM_STREAM: _StreamStream,
}
