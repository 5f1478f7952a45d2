"""The members of stubs of a channel of many members on a loop: each call finds its member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.aio_relay import relay_of
from rpcwheel.rpc import Kind
from rpcwheel.transport.aio import MULTICALLABLES
from rpcwheel.transport.state import MethodSpec

from ._aio_firsts import as_now, firsts_of, sealed
from ._aio_leg import Leg
from ._aio_passage import Passage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._aio_fleet import Fleet
    from ._aio_leg import Forks
    from ._aio_member import Member

__all__ = ["CALLS", "Calls"]

OPTIONS: Final = ("timeout", "metadata", "credentials", "wait_for_ready", "compression")


def options_of(*given: Any) -> dict[str, Any]:
    """What grpc.aio takes by name."""
    return dict(zip(OPTIONS, given, strict=True))


class Calls:
    """One method of a stub. The base of the four kinds."""

    kind: Kind
    owner: object = None
    """The channel, which lives as long as a stub of it does: somebody tells it of its members."""

    def __init__(
        self,
        fleet: Fleet,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        self.fleet = fleet
        self.roster = fleet.roster
        self.method = method
        self.serializer: Any = request_serializer
        self.relay = relay_of(self.kind)
        self.made: dict[Member, Any] = {}
        """The same method of members' own channels."""
        # Foreign interceptors want to see the request itself.
        is_seen = fleet.foreign or bool(fleet.appended[self.kind])
        self._seals = request_serializer is not None and not is_seen
        self._given = (response_deserializer, args, options)

    def bound(self, at: Member) -> Any:
        """The same method of a member's own channel, made anew.

        Raises:
            grpc.aio.UsageError: The member is gone.
            UnmadeError: It has no channel, by what `connect` raised.
        """
        channel = self.fleet.reached(at)
        self.made = {member: made for member, made in self.made.items() if not member.closed}
        deserializer, args, options = self._given
        seals = self._seals and not self.kind.streams_requests
        serializer = None if seals else self.serializer
        spec = MethodSpec(self.kind, self.method, serializer, deserializer, *args, **options)
        made = MULTICALLABLES[self.kind](channel, spec)
        self.made[at] = made
        return made

    def on(
        self,
        at: Member,
        request: Any,
        options: dict[str, Any],
        forks: Forks | None,
    ) -> Any:
        """Begin a call with one request on this member, as one of several at once.

        Args:
            at: Where.
            request: What is sent.
            options: All that grpc.aio takes.
            forks: Where the others are, and this one: not to go there if `at` does not get it, but
                to another, which is noted there. None: to nobody else.
        """
        return Leg(self, request, self.sealed(request), options, forks).begin_on(at)

    def sealed(self, request: Any) -> Any:
        """A request as it is sent."""
        return sealed(request, self.serializer) if self._seals else request


class _OneRequest(Calls):
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
        metadata = metadata if metadata is None else as_now(metadata)
        pick = self.roster.pick
        at = None if pick is None else pick(self.method, request, metadata)
        ready = False if wait_for_ready else wait_for_ready
        options = options_of(timeout, metadata, credentials, ready, compression)
        passage = Passage(self, request, self.sealed(request), options, wait_for_ready)
        if at is None:
            self.fleet.home.enter()
            pick = self.roster.pick
            if pick is None:
                return passage.wait()
            at = pick(self.method, request, metadata)
        return passage.begin_on(at)


class _ManyRequests(Calls):
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
        metadata = metadata if metadata is None else as_now(metadata)
        ready = False if wait_for_ready else wait_for_ready
        options = options_of(timeout, metadata, credentials, ready, compression)
        passage = Passage(self, None, None, options, wait_for_ready)
        if request_iterator is not None:
            passage.firsts = firsts_of(request_iterator)
        self.fleet.home.enter()
        pick = self.roster.pick
        relay: Any
        if pick is None:
            relay = passage.wait()
        else:
            relay = passage.begin_on(pick(self.method, None, metadata))
        relay.moves = request_iterator is None
        return relay


class _UnaryUnary(_OneRequest, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    kind = Kind.UNARY_UNARY


class _UnaryStream(_OneRequest, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    kind = Kind.UNARY_STREAM


class _StreamUnary(_ManyRequests, grpc.aio.StreamUnaryMultiCallable):  # type: ignore[type-arg]  # not in 1.76
    kind = Kind.STREAM_UNARY


class _StreamStream(_ManyRequests, grpc.aio.StreamStreamMultiCallable):  # type: ignore[type-arg]  # not in 1.76
    kind = Kind.STREAM_STREAM


CALLS: Final = {
    Kind.UNARY_UNARY: _UnaryUnary,
    Kind.UNARY_STREAM: _UnaryStream,
    Kind.STREAM_UNARY: _StreamUnary,
    Kind.STREAM_STREAM: _StreamStream,
}
