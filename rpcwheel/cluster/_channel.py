"""The channel of many members for threads: a `grpc.Channel` in every respect."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import grpc

from rpcwheel.rpc import Kind
from rpcwheel.timer.clock import checked_timer
from rpcwheel.transport.arguments import refuse_both
from rpcwheel.transport.sync import ReconnectingChannel

from ._fleet import Fleet, Member
from ._members import StreamStream, StreamUnary, UnaryStream, UnaryUnary
from ._watch import Watch
from .arguments import (
    checked_on_member,
    checked_policy,
    credentials_for,
    member_options,
    whole_state,
)
from .member import Rules, checked_name
from .pickers import checked_picker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .pickers import Picker
    from .policy import ClusterPolicy

    Options: TypeAlias = list[tuple[str, Any]]
    Connect: TypeAlias = Callable[[ServiceInstance, Options], grpc.Channel]
    Convert: TypeAlias = Callable[[Any], Any]

__all__ = ["ClusterChannel"]

SHUTDOWN: Final = grpc.ChannelConnectivity.SHUTDOWN


class ClusterChannel(grpc.Channel):
    """A channel whose calls go to many servers, which may come and go.

    Thread-safe. In a forked child make another one: as with any channel of grpc, this one's
    connections and threads are the parent's.
    """

    def __init__(
        self,
        name: str,
        instances: Iterable[ServiceInstance] | None = None,
        *,
        balance: str | Picker = "round_robin",
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: grpc.Compression | None = None,
        connect: Callable[[ServiceInstance, Options], grpc.Channel] | None = None,
        on_member: Callable[[Member], object] | None = None,
        policy: ClusterPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Make the channel. Each member connects when it is first called.

        Args:
            name: Of the service: `"shop.Orders"`; for people.
            instances: The servers; None if they are not known yet, so that calls wait for `update`.
            balance: How calls are spread: `"round_robin"`, `"weighted_random"`, `"least_active"`,
                `"consistent_hash:HEADER"`, or a `Picker`.
            credentials: For TLS and such. None: none, but for instances whose protocol is `grpcs`,
                which get grpc's own defaults.
            options: As grpc takes them, for each member's connection.
            compression: As grpc takes it.
            connect: Makes the connections in your own way: `connect(instance, options)` gives a new
                `grpc.Channel`. On whichever thread calls, or replaces.
            on_member: Told each member when its channel is made, on the thread that calls it first.
            policy: None: the defaults.
            timer: Where probes wait; None for `shared_timer()`, which also stands in for one that
                was stopped or is full.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
        """
        checked_name(name)
        refuse_both(connect, credentials=credentials, compression=compression)
        own = partial(_connect, credentials, compression) if connect is None else connect
        self._fleet = Fleet(
            name,
            partial(_member_channel, own, member_options(options), checked_timer(timer)),
            checked_on_member(on_member),
            checked_picker(balance),
            Rules.of(checked_policy(policy)),
            timer,
            is_foreign=connect is not None,
        )
        self._watch = Watch(name, self._look, timer)
        self._fleet.watch = self._watch.stir
        if instances is not None:
            self.update(instances)

    # Its members

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """Take note which servers there are; touches only what has changed.

        A change of weight, zone, status or metadata keeps a member; one of host, port or protocol
        makes another of it. Who is gone takes no new calls; those in flight have `policy.drain`
        seconds.

        Args:
            instances: All there are. None of them: calls end with UNAVAILABLE.

        Raises:
            TypeError: One is no `ServiceInstance`; nothing has changed.

        Thread-safe. On a closed channel, nothing.
        """
        self._fleet.update(instances)

    def fail(self, reason: str) -> None:
        """Have calls end with UNAVAILABLE and this reason, instead of waiting for `update`.

        Nothing, if it is known which servers there are.
        """
        self._fleet.fail(reason)

    @property
    def members(self) -> tuple[Member, ...]:
        """One for each instance, in the order of their ids; without those that are gone."""
        return self._fleet.roster.members

    @property
    def name(self) -> str:
        """What was given."""
        return self._fleet.name

    @property
    def target(self) -> str:
        """The name: for what asks a channel where it goes."""
        return self._fleet.name

    @property
    def calls(self) -> int:
        """How many calls are in flight, on all members, also on those that are gone."""
        roster = self._fleet.roster
        return sum(member.calls for member in (*roster.members, *roster.leaving))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._fleet.roster.closed

    def pick(self, count: int, method: str = "", request: Any = None) -> tuple[Member, ...]:
        """Pick members as for calls: `count` different ones, or all that are called if fewer."""
        with self._fleet.changed:
            return self._fleet.roster.several(count, (method, request, ()))

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
        return UnaryUnary(self._fleet, Kind.UNARY_UNARY, *given)

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
        return UnaryStream(self._fleet, Kind.UNARY_STREAM, *given)

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
        return StreamUnary(self._fleet, Kind.STREAM_UNARY, *given)

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
        return StreamStream(self._fleet, Kind.STREAM_STREAM, *given)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Call `callback(state)` now and at each change; see `get_state`.

        On a worker, one callback at a time; a change is told within 0.2 s. One that raises is told
        as `CallbackFailed` and goes on being called.

        Args:
            callback: Told the state of the whole.
            try_to_connect: Whether members are to connect as long as none of them is.
        """
        self._watch.add(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Call it no more. Unknown ones are no error."""
        self._watch.remove(callback)

    def close(self) -> None:
        """End all calls, as any channel of grpc, and close all members. A second time, nothing.

        Not to be called where gRPC runs done-callbacks: like any channel of grpc, it waits there
        for itself.
        """
        self._watch.close()
        self._fleet.close()

    def __repr__(self) -> str:
        members = self.members
        down = sum(member.state == "DOWN" for member in members)
        state = "closed" if self.closed else f"{len(members)} members, {down} of them down"
        return f"<ClusterChannel {self.name!r}, {state}, calls in flight: {self.calls}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    # What is known of it

    def get_state(
        self,
        try_to_connect: bool = False,
    ) -> grpc.ChannelConnectivity:
        """The best state of any member, as gRPC's round robin has it; SHUTDOWN once closed.

        CONNECTING until it is known which members there are; TRANSIENT_FAILURE if there are none.

        Args:
            try_to_connect: Whether all members are to connect, if none of them is.
        """
        return self._look(try_to_connect)

    def _look(self, try_to_connect: bool) -> grpc.ChannelConnectivity:
        roster = self._fleet.roster
        if roster.closed:
            return SHUTDOWN
        if not roster.known and not roster.reason:
            return grpc.ChannelConnectivity.CONNECTING
        state = whole_state(map(_state_of, roster.members))
        if try_to_connect and state is not grpc.ChannelConnectivity.READY:
            for member in roster.members:
                _ask_to_connect(member)
        return state

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the thread that closes it; at once if it is closed. One that raises is told as
        `CallbackFailed`.

        Returns:
            What to call to have it forgotten.
        """
        return self._fleet.closers.add(callback)


def _member_channel(
    connect: Connect, options: Options, timer: Timer | None, instance: ServiceInstance
) -> ReconnectingChannel:
    """The channel of one member."""
    made = partial(connect, instance)
    return ReconnectingChannel(instance.target, options=options, connect=made, timer=timer)


def _connect(
    credentials: grpc.ChannelCredentials | None,
    compression: grpc.Compression | None,
    instance: ServiceInstance,
    options: Options,
) -> grpc.Channel:
    credentials = credentials_for(instance.protocol, credentials)
    channel: grpc.Channel = (
        grpc.insecure_channel(instance.target, options, compression)
        if credentials is None
        else grpc.secure_channel(instance.target, credentials, options, compression)
    )
    return channel


def _state_of(member: Member) -> grpc.ChannelConnectivity:
    """That of a member; one whose connection hides it counts as connected once it was called."""
    link = member.link
    if link is None:
        return grpc.ChannelConnectivity.IDLE
    state = link.get_state()
    return grpc.ChannelConnectivity.READY if state is None else state


def _ask_to_connect(member: Member) -> None:
    with contextlib.suppress(ValueError):  # gone meanwhile
        member.channel.get_state(try_to_connect=True)
