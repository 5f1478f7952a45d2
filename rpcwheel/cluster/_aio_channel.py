"""The channel of many members for `grpc.aio`: a `grpc.aio.Channel` in every respect.

All of it is on one event loop, but what says that it may be called on any thread.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._grpc.aio_interceptors import give_lists, is_patched
from rpcwheel.errors import ConfigurationError
from rpcwheel.rpc import Kind
from rpcwheel.timer.clock import checked_timer
from rpcwheel.transport.aio import ReconnectingChannel
from rpcwheel.transport.arguments import refuse_both

from ._aio_calls import CALLS
from ._aio_fleet import Fleet
from ._aio_member import Member
from .arguments import (
    checked_on_member,
    checked_policy,
    credentials_for,
    member_options,
    whole_state,
)
from .member import Rules, checked_instances, checked_name
from .pickers import checked_picker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from types import TracebackType

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .pickers import Picker
    from .policy import ClusterPolicy

    Options = list[tuple[str, Any]]
    Connect = Callable[[ServiceInstance, Options], grpc.aio.Channel]

__all__ = ["ClusterChannel", "Member"]

State = grpc.ChannelConnectivity

GLANCE_S: Final = 0.25
"""Between two looks at connections that tell no change."""


class ClusterChannel(grpc.aio.Channel):
    """A channel whose calls go to many servers, which may come and go."""

    def __init__(
        self,
        name: str,
        instances: Iterable[ServiceInstance] | None = None,
        *,
        balance: str | Picker = "round_robin",
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: grpc.Compression | None = None,
        connect: Connect | None = None,
        on_member: Callable[[Member], object] | None = None,
        policy: ClusterPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Make the channel, on a loop or before there is one. Members connect when first called.

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
                `grpc.aio.Channel`. On the loop. A member for which it raises is down; if it raises
                for all, that is the caller's.
            on_member: Told each member when its channel is made; on the loop, before the first
                call. A plain function.
            policy: None: the defaults.
            timer: Where probes wait; None for `shared_timer()`, which also stands in for one that
                was stopped or is full.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
        """
        checked_name(name)
        refuse_both(connect, credentials=credentials, compression=compression)
        ways = _Ways(credentials, compression, connect, member_options(options), timer)
        known = None if instances is None else checked_instances(instances)
        self._fleet = Fleet(
            name,
            ways.channel,
            checked_on_member(on_member),
            checked_picker(balance),
            Rules.of(checked_policy(policy)),
            timer=checked_timer(timer),
            foreign=connect is not None or is_patched(),
        )
        give_lists(self, self._fleet.appended)
        self._fleet.begin(known)

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

        On any thread: now, if that is the loop's, else soon and in the order of the calls. On a
        closed channel, nothing.
        """
        self._fleet.update(instances)

    def fail(self, reason: str) -> None:
        """Have calls end with UNAVAILABLE and this reason, instead of waiting for `update`.

        Nothing, if it is known which servers there are. On any thread, as `update`.
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
        """Pick members as for calls: `count` different ones, or all if those are fewer."""
        return self._fleet.roster.several(count, (method, request, ()))

    # A channel of grpc.aio. Its members take whatever grpc's take: `_registered_method`, for one.

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return self._method(Kind.UNARY_UNARY, method, *args, **options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return self._method(Kind.UNARY_STREAM, method, *args, **options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return self._method(Kind.STREAM_UNARY, method, *args, **options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return self._method(Kind.STREAM_STREAM, method, *args, **options)

    def _method(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        made = CALLS[kind](self._fleet, method, *args, **options)
        made.owner = self
        return made

    # What is known of it

    def get_state(self, try_to_connect: bool = False) -> State:
        """The best state of any member, as gRPC's round robin has it; SHUTDOWN once closed.

        CONNECTING until it is known which members there are; TRANSIENT_FAILURE if there are none.

        Args:
            try_to_connect: Whether all members are to connect, if none of them is.
        """
        roster = self._fleet.roster
        if roster.closed:
            return State.SHUTDOWN
        if not roster.known and not roster.reason:
            return State.CONNECTING
        state = whole_state(_state_of(member.link) for member in roster.members)
        if try_to_connect and state is not State.READY:
            for member in roster.members:
                member.channel.get_state(try_to_connect=True)
        return state

    async def wait_for_state_change(self, last_observed_state: State) -> None:
        """Wait until the state is another."""
        self._fleet.home.enter()
        while await self._stays(last_observed_state):
            """Only a part of it has changed."""

    async def _stays(self, state: State) -> bool:
        """Wait for a change of members, or of one; False at once if the whole is not in `state`."""
        fleet = self._fleet
        changed = fleet.changed.waiter()  # before anything else may run
        seen = [(link, _state_of(link)) for link in fleet.links()]  # it changes at any time
        try:
            if self.get_state() is not state:
                return False
            await _first_of([_change_of(link, before) for link, before in seen], changed)
        finally:
            fleet.changed.forget(changed)
        return True

    async def channel_ready(self) -> None:
        """Wait until a member has a connection, and have all of them connect.

        Raises:
            grpc.aio.UsageError: The channel is closed, or is closed meanwhile.
        """
        self._fleet.home.enter()
        while (state := self.get_state(try_to_connect=True)) is not State.READY:
            if state is State.SHUTDOWN:
                raise grpc.aio.UsageError("Channel is closed.")
            await self._stays(state)  # or one that has come meanwhile would never connect

    # Its end

    async def close(self, grace: float | None = None) -> None:
        """Take no more calls, and end those that run, on all members, as grpc.aio does.

        Args:
            grace: Seconds that they may go on; None or 0: they are cancelled now. So they are if
                this is cancelled while it waits, or called again without a grace.

        Raises:
            ConfigurationError: `grace` is negative.
        """
        if grace is not None and grace < 0:
            raise ConfigurationError(f"grace must be 0 seconds or more, or None, not {grace!r}")
        await self._fleet.close(grace)

    def on_close(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the loop; at once if it is closed. One that raises is told as `CallbackFailed`.

        Returns:
            What to call to have it forgotten.
        """
        return self._fleet.on_close(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        members = self.members
        down = sum(member.state == "DOWN" for member in members)
        state = "closed" if self.closed else f"{len(members)} members, {down} of them down"
        return f"<ClusterChannel of grpc.aio {self.name!r}, {state}, calls in flight: {self.calls}>"


class _Ways:
    """How the channels of members are made."""

    def __init__(
        self,
        credentials: grpc.ChannelCredentials | None,
        compression: grpc.Compression | None,
        connect: Connect | None,
        options: Options,
        timer: Timer | None,
    ) -> None:
        self._credentials = credentials
        self._compression = compression
        self._connect = connect
        self._options = options
        self._timer = timer

    def channel(self, instance: ServiceInstance) -> ReconnectingChannel:
        """The channel of one."""
        if self._connect is not None:
            return ReconnectingChannel(
                instance.target,
                options=self._options,
                connect=partial(self._connect, instance),
                timer=self._timer,
            )
        return ReconnectingChannel(
            instance.target,
            credentials_for(instance.protocol, self._credentials),
            options=self._options,
            compression=self._compression,
            timer=self._timer,
        )


def _state_of(link: ReconnectingChannel | None) -> State:
    """That of a member; one whose connection hides it counts as connected once it was called."""
    if link is None:
        return State.IDLE
    try:
        return link.get_state()
    except Exception:  # noqa: BLE001 - of another make
        return State.READY


async def _change_of(link: ReconnectingChannel, state: State) -> None:
    try:
        await link.wait_for_state_change(state)
    except Exception:  # noqa: BLE001 - of another make, or closed by the user
        await asyncio.sleep(GLANCE_S)


async def _first_of(
    changes: list[Coroutine[Any, Any, None]], changed: asyncio.Future[None]
) -> None:
    """Wait until one of them has happened, then let go of the others."""
    changing = [asyncio.ensure_future(change) for change in changes]
    try:
        await asyncio.wait([*changing, changed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for change in changing:
            change.cancel()
        await asyncio.gather(*changing, return_exceptions=True)
