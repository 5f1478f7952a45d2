"""The members of a channel of `grpc.aio`: who comes and goes, and who is down.

All of it is on the loop. What other threads tell (`update`, `fail`, a member's `down` and `up`, the
timer) is handed over to it; before there is a loop, it waits for the first call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.callbacks import CloseCallbacks, run_callback, weak_callback
from rpcwheel._grpc.aio_relay import Signal
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.exiting import BACKGROUND
from rpcwheel.observe import CallbackFailed, MemberDown, MemberUp, emit
from rpcwheel.probe import MARK, UNANSWERED, HealthProbe
from rpcwheel.rpc import Kind
from rpcwheel.timer.clock import clock_of
from rpcwheel.transport.aio import CLOSED

from ._aio_home import Home
from ._aio_member import Member
from .core import Roster
from .member import checked_instances

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel._grpc.aio_interceptors import Interceptors
    from rpcwheel.exiting import BackgroundCall
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer
    from rpcwheel.transport.aio import ReconnectingChannel

    from .member import Rules
    from .pickers import Picker

    Job = Callable[[], object]

__all__ = ["Fleet", "Member", "UnmadeError"]

PROBE: Final = HealthProbe()
PATIENCE_NS: Final = 1_000_000_000
"""Until the next probe, where the user's wait object fails."""


class UnmadeError(Exception):
    """A member has no channel that a call could be made on; `error` says why."""

    def __init__(self, member: Member, error: Exception) -> None:
        super().__init__(f"{member.id}: connect: {error!r}")
        self.error = error


class Fleet:
    """The members, and what is known of them."""

    def __init__(
        self,
        name: str,
        connect: Callable[[ServiceInstance], ReconnectingChannel],
        on_member: Callable[[Member], object] | None,
        picker: Picker,
        rules: Rules,
        *,
        timer: Timer | None,
        foreign: bool,
    ) -> None:
        self.name = name
        self.foreign = foreign
        """Whether calls may be of another make, or have others' interceptors in them."""
        self.appended: Interceptors = {kind: [] for kind in Kind}
        """Interceptors that were appended to the channel's; they run on each member's."""
        self._connect = connect
        self._on_member = on_member
        self.home = Home(timer, name, self._grow_later)
        self.now_ns = clock_of(timer)
        self.roster: Roster[Member] = Roster(
            name, partial(Member, self), picker, rules, self.now_ns
        )
        self.changed = Signal()
        """Given when members come, go, get a channel, or change their minds."""
        self.waiting: dict[Any, None] = {}
        """Calls that wait for somebody to call, in order; `look()` of each is asked at a change."""
        self._timeouts: dict[Any, Any] = {}  # by member; of the growing weights by None
        self._probes: set[asyncio.Task[None]] = set()
        self._closers = CloseCallbacks(name)
        self._links: list[ReconnectingChannel] = []  # those that `close` has closed
        self._former: list[ReconnectingChannel] = []  # those that the user has retired

    def _tell_change(self) -> None:
        """Let those look again who wait for a change."""
        self.changed.give()
        for call in tuple(self.waiting):
            call.look()

    # Which there are

    def begin(self, instances: Iterable[ServiceInstance] | None) -> None:
        """Begin with these members, or none known yet; be it before there is a loop."""
        if instances is not None:
            self.roster.update(instances, time.time())
        with contextlib.suppress(RuntimeError):
            self.home.enter()

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """See `ClusterChannel.update`."""
        given = tuple(checked_instances(instances))
        self.home.do(partial(self._update, given))

    def _update(self, instances: tuple[ServiceInstance, ...]) -> None:
        change = self.roster.update(instances, time.time())
        for member in change.removed:
            self._forget_probe(member)
            if member.link is None:
                member.closed = True
            else:
                self._retire(member, member.link)
        for member in change.returned:
            self._probe(member, member.spell)
        self._grow_later()
        self._tell_change()

    def _retire(self, member: Member, link: ReconnectingChannel) -> None:
        link.on_close(weak_callback(self.left, member))
        drain_ns = self.roster.rules.drain_ns
        drain = None if drain_ns == NEVER else to_seconds(drain_ns)
        link.drain(drain, reason=f"{member.id} is gone from {self.name}")

    def left(self, member: Member) -> None:
        """Take note that a removed member is closed."""
        self.roster.left(member)

    def fail(self, reason: str) -> None:
        """See `ClusterChannel.fail`."""
        self.home.do(partial(self._fail, reason))

    def _fail(self, reason: str) -> None:
        self.roster.fail(reason)
        self._tell_change()

    def connected(self, member: Member) -> ReconnectingChannel:
        """The channel of a member, made if there is none, or if the user has closed or retired it.

        Raises:
            grpc.aio.UsageError: The member is gone; in the words of grpc.aio.
            Exception: What `connect` raised.
        """
        if member.link is not None and member.link.accepts_calls:
            return member.link
        if member.closed or member.leaving:
            raise grpc.aio.UsageError(CLOSED)
        with contextlib.suppress(RuntimeError):  # grpc.aio makes channels before a loop runs
            self.home.enter()
        made = self._connect(member.instance)
        made.append_to(self.appended)
        former = [*self._former, *([] if member.link is None else [member.link])]
        self._former = [link for link in former if not link.closed]  # calls run on them still
        member.link, member.used = made, True
        if self._on_member is not None:
            run_callback(self.name, self._on_member, member)
        self.changed.give()
        return made

    def reached(self, member: Member) -> ReconnectingChannel:
        """As `connected`, for calls, which may go elsewhere.

        Raises:
            grpc.aio.UsageError: The member is gone.
            UnmadeError: `connect` has raised.
        """
        try:
            return self.connected(member)
        except Exception as error:
            if member.closed or member.leaving:
                raise
            raise UnmadeError(member, error) from error

    def links(self) -> list[ReconnectingChannel]:
        """The channels of the members that have one."""
        links = [member.link for member in self.roster.members]
        return [link for link in links if link is not None and not link.closed]

    # Up and down

    def down(self, member: Member, reason: str) -> None:
        """Have a member not called until it answers a probe."""
        if self.roster.down(member, reason):
            emit(MemberDown(channel=self.name, member=member.id, reason=reason))
            self._probe_later(member)

    def up(self, member: Member) -> None:
        """Have a member called again."""
        away_ns = self.roster.up(member)
        if away_ns is not None:
            self._forget_probe(member)
            emit(MemberUp(channel=self.name, member=member.id, after_s=to_seconds(away_ns)))
            self._tell_change()

    def _probe_later(self, member: Member) -> None:
        try:
            delay_ns = self.roster.probe_delay_ns(member)
        except Exception as error:  # noqa: BLE001 - the user's wait object; told as an event
            emit(CallbackFailed(self.name, callback="the wait between probes", error=error))
            delay_ns = PATIENCE_NS
        due = partial(_due, weakref.ref(self), weakref.ref(member), member.spell)
        self._forget_probe(member)
        self._timeouts[member] = self.home.after(delay_ns, due)

    def _forget_probe(self, member: Member) -> None:
        timeout = self._timeouts.pop(member, None)
        if timeout is not None:
            timeout.cancel()

    def probe(self, member: Member, spell: int) -> None:
        """Ask a member that is down whether it answers."""
        self._timeouts.pop(member, None)
        self._probe(member, spell)

    def _probe(self, member: Member, spell: int) -> None:
        if not self.roster.wants_probe(member, spell):
            return
        background = BACKGROUND.begin_call()
        if background is None:
            self.up(member)  # nobody asks it any more: the next call will tell
            return
        loop = self.home.enter()
        task = loop.create_task(self._asked(member, spell))
        background.is_lost = loop.is_closed
        background.cancel = partial(loop.call_soon_threadsafe, task.cancel)
        self._probes.add(task)
        task.add_done_callback(partial(self._probe_ended, background))

    def _probe_ended(self, background: BackgroundCall, task: asyncio.Task[None]) -> None:
        self._probes.discard(task)
        BACKGROUND.end_call(background)

    async def _asked(self, member: Member, spell: int) -> None:
        answers = await self._answers(member)
        if not self.roster.wants_probe(member, spell):
            return
        if answers:
            self.up(member)
        else:
            self.roster.probe_failed(member)
            self._probe_later(member)

    async def _answers(self, member: Member) -> bool:
        """Whether it answers, and serves."""
        limit_s = to_seconds(self.roster.rules.probe_timeout_ns)
        try:
            call = self.connected(member).heartbeat_call(PROBE.method)
            response = await call(
                PROBE.request, timeout=limit_s, metadata=MARK, wait_for_ready=True
            )
        except grpc.RpcError as error:
            code = error.code() if hasattr(error, "code") else None
            return getattr(code, "name", "CANCELLED") not in UNANSWERED
        except Exception as error:  # noqa: BLE001 - closed meanwhile, or the user's `connect`
            if not isinstance(error, grpc.aio.UsageError):
                emit(CallbackFailed(self.name, callback=f"connect {member.id}", error=error))
            return False
        return PROBE.judge(response).serving is not False

    # Growing weights

    def _grow_later(self) -> None:
        wake_ns = None if self.roster.closed else self.roster.wake_ns()
        if wake_ns is not None and None not in self._timeouts:
            self._timeouts[None] = self.home.after(wake_ns, weak_callback(self.grow))

    def grow(self) -> None:
        """Let weights grow by a step."""
        self._timeouts.pop(None, None)
        self.roster.refresh()
        self._grow_later()

    # The end

    async def close(self, grace: float | None) -> None:
        """See `ClusterChannel.close`."""
        self.home.enter()
        gone = self.roster.close()
        timeouts, self._timeouts = list(self._timeouts.values()), {}
        for timeout in timeouts:
            timeout.cancel()
        waiting, self.waiting = tuple(self.waiting), {}
        for call in waiting:
            call.cancel()
        for probe in tuple(self._probes):
            probe.cancel()
        try:
            self._closers.run()
        finally:  # whatever a callback raises, be it `SystemExit`
            self._links += [member.link for member in gone if member.link is not None]
            self._links += self._former
            self.changed.give()
            await self._closed(grace)

    async def _closed(self, grace: float | None) -> None:
        """Close the members' channels, at the same time, and wait for what was probing."""
        closing = [asyncio.ensure_future(link.close(grace)) for link in self._links]
        try:
            if closing or self._probes:
                await asyncio.wait([*closing, *self._probes])
        except asyncio.CancelledError:
            for task in closing:
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
            raise
        for task in closing:
            task.result()

    def on_close(self, callback: Job) -> Job:
        """See `ClusterChannel.on_close`."""
        return self._closers.add(callback)


# What others hold keeps no channel alive


def _due(fleet: weakref.ref[Fleet], member: weakref.ref[Member], spell: int) -> None:
    alive, one = fleet(), member()
    if alive is not None and one is not None:
        alive.probe(one, spell)
