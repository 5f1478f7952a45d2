"""A channel of `grpc.aio` with the policies in front: for any channel the user has.

The members of a stub look up its config once, when they are made. A call then costs no task of its
own, as it does behind an interceptor: the first try begins at once, and where its config asks for
no more than a timeout it goes to the caller as it is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

import grpc

from rpcwheel._grpc.aio_finished import CANCELLED_HERE, failed_call, finished_call, metadata_from
from rpcwheel._grpc.aio_interceptors import give_lists, lists_of
from rpcwheel._grpc.details import metadata_of, with_attempt
from rpcwheel.call._aio_member import Member
from rpcwheel.call._aio_resend import Resend
from rpcwheel.call.aio_call import Tries, late
from rpcwheel.call.config import kept_metadata, resend_timeout, seconds_left
from rpcwheel.durations import to_ns
from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rpcwheel._grpc.aio_relay import Relay
    from rpcwheel._grpc.details import Metadata
    from rpcwheel.call._aio_member import State
    from rpcwheel.failback.policy import FailbackPolicy

    Relays = weakref.WeakSet[Relay]

__all__ = ["InterceptedChannel"]


class InterceptedChannel(grpc.aio.Channel):
    """The user's channel, with the policies in front. Closing it closes the user's channel."""

    def __init__(self, channel: grpc.aio.Channel, state: State) -> None:
        """Put the policies in front of a channel.

        Raises:
            TypeError: `channel` is no channel of grpc.aio.
        """
        if not isinstance(channel, grpc.aio.Channel):
            raise TypeError(
                f"channel must be a grpc.aio channel, not {channel!r}; for those of grpc there is "
                "rpcwheel.interceptors.intercept_channel"
            )
        self._channel = channel
        self._state = state
        give_lists(self, lists_of(channel))  # what is appended to them runs in each attempt
        self.between: Relays = weakref.WeakSet()
        """Calls that wait for their next try."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the user's channel, as it would itself; calls between two tries are cancelled."""
        self._cancel_between()  # no new try is taken any more, whatever the grace
        await self._channel.close(grace)
        self._cancel_between()

    def _cancel_between(self) -> None:
        for relay in list(self.between):
            if relay.shows(None):
                relay.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As the user's channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As the user's channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As the user's channel."""
        await self._channel.channel_ready()

    # What follows takes whatever the channel takes: `_registered_method` came with 1.63, for one.

    def unary_unary(self, method: str, *args: Any, **options: Any) -> _UnaryUnary:
        """Make a member of a stub."""
        call = self._channel.unary_unary(method, *args, **options)
        return _UnaryUnary(call, Member(self._state, method, Kind.UNARY_UNARY), self)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> _UnaryStream:
        """Make a member of a stub."""
        call = self._channel.unary_stream(method, *args, **options)
        return _UnaryStream(call, Member(self._state, method, Kind.UNARY_STREAM), self)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> _StreamUnary:
        """Make a member of a stub."""
        call = self._channel.stream_unary(method, *args, **options)
        return _StreamUnary(call, Member(self._state, method, Kind.STREAM_UNARY), self)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> _StreamStream:
        """Make a member of a stub."""
        call = self._channel.stream_stream(method, *args, **options)
        return _StreamStream(call, Member(self._state, method, Kind.STREAM_STREAM), self)


class _Member:
    """One method of a stub. The base of the four kinds."""

    def __init__(
        self, call: Callable[..., Any], member: Member, channel: InterceptedChannel
    ) -> None:
        self._call = call
        self._member = member
        self._channel = channel

    def _begin(self, request: Any, timeout: float | None, options: dict[str, Any]) -> Any:
        member = self._member
        own_ns = None if timeout is None else to_ns(timeout, what="timeout")
        now_ns, deadline_ns, attempt_ns = member.state.open(member.config, own_ns)
        is_late = now_ns >= deadline_ns
        if is_late and not member.answers:
            return late(member.kind)
        left = seconds_left(attempt_ns, now_ns)
        if member.plain:
            return self._call(request, timeout=left, **options)
        if options["metadata"] is not None:  # interceptors below may add to what they are given
            pairs = metadata_of(options["metadata"])
            options, kept = options | {"metadata": metadata_from(pairs)}, options
            kept["metadata"] = pairs
        else:
            kept = options
        tries = _Tries(member, now_ns, deadline_ns, request, self, kept, timeout)
        relay = member.relay(tries)
        if is_late:
            tries.begun_late(relay)
            return relay
        if tries.requests is not None:
            request = tries.sent
        try:
            call = self._call(request, timeout=left, **options)
        except BaseException:  # such as `UsageError` of a channel that is closed
            tries.finished()
            raise
        relay.begin(call)
        return relay

    def start(self, request: Any, timeout: float | None, options: dict[str, Any]) -> Any:
        """Make a try."""
        return self._call(request, timeout=timeout, **options)

    def between(self, relay: Relay) -> None:
        """Note that a call waits for its next try, so that `close` finds it."""
        self._channel.between.add(relay)


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
        options = {
            "metadata": metadata,
            "credentials": credentials,
            "wait_for_ready": wait_for_ready,
            "compression": compression,
        }
        return self._begin(request, timeout, options)


class _ManyRequests(_Member):
    """The caller gives an iterator of requests, or writes them."""

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        options = {
            "metadata": metadata,
            "credentials": credentials,
            "wait_for_ready": wait_for_ready,
            "compression": compression,
        }
        return self._begin(request_iterator, timeout, options)


class _UnaryUnary(_OneRequest, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    pass


class _UnaryStream(_OneRequest, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    pass


class _StreamUnary(_ManyRequests, grpc.aio.StreamUnaryMultiCallable):  # type: ignore[type-arg]  # not in 1.76
    pass


class _StreamStream(_ManyRequests, grpc.aio.StreamStreamMultiCallable):  # type: ignore[type-arg]  # not in 1.76
    pass


class _Tries(Tries[_Member, dict[str, Any]]):
    """Tries made by calling a member of the user's channel."""

    def make(self, relay: Relay, timeout: float | None, number: int) -> None:
        try:
            call = self._start.start(self.sent, timeout, self._with(self._metadata(number)))
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            call = finished_call(self.kind, grpc.StatusCode.CANCELLED, CANCELLED_HERE)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call = failed_call(self.kind, error)
        relay.begin(call)

    def waits(self, relay: Relay) -> None:
        self._start.between(relay)

    def resend(self, policy: FailbackPolicy, attempts: int) -> Resend:
        return Resend(
            self.method,
            self.kind,
            self._start_alone,
            timeout=resend_timeout(self._own_timeout, self._member.config),
            metadata=kept_metadata(self._options["metadata"], policy),
            attempts=attempts,
        )

    async def _start_alone(self, request: Any, timeout: float, metadata: Metadata) -> Any:  # noqa: ASYNC109
        return self._start.start(request, timeout, self._with(metadata))

    def _metadata(self, number: int) -> Metadata:
        return with_attempt(self._options["metadata"], number)

    def _with(self, metadata: Metadata) -> dict[str, Any]:
        return self._options | {"metadata": metadata_from(metadata)}
