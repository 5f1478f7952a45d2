"""The members of a channel for threads: who comes and goes, who is down, and what is done about it.

The lock guards the `Roster` and is held for a few steps only: nothing that blocks, and nothing of
gRPC's, runs under it; of the user's only the picker that is asked for a function. Who is called is
found without it.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.callbacks import CloseCallbacks, run_callback, weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import is_unprocessed
from rpcwheel.call.retry import result_of
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.observe import emit
from rpcwheel.observe.events import MemberDown, MemberUp
from rpcwheel.probe import UNANSWERED
from rpcwheel.timer.clock import clock_of

from ._probes import Probes
from ._timeout import timeout_on
from .core import Roster
from .member import MemberCore, address_dialled, proves_unsent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer
    from rpcwheel.transport.sync import ReconnectingChannel

    from ._journey import Journey
    from .member import Rules
    from .pickers import Picker

    Began: TypeAlias = tuple[ReconnectingChannel | None, int | None, bool, int]
    """The channel, None if there was none; the number of its active connection; whether that was
    not connected, as far as that was looked at; when."""

__all__ = ["CLOSED", "Fleet", "Member", "UnmadeError", "when"]

CLOSED: Final = "Cannot invoke RPC on closed channel!"
"""What grpc says to who makes a call on a closed channel."""

CONNECTED: Final = frozenset({grpc.ChannelConnectivity.READY, None})

FAILING: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE

SAID: Final = ("details", "trailing_metadata", "initial_metadata")

UNREACHED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Status codes that may come of a member that can't be reached."""


class UnmadeError(Exception):
    """No channel could be made for a call's member: `__cause__` is what `connect` raised."""


class Member(MemberCore):
    """One server of a channel's, with a connection of its own. Made by the channel."""

    def __init__(self, fleet: Fleet, instance: ServiceInstance, began_ns: int) -> None:
        super().__init__(instance, began_ns)
        self._fleet = fleet
        self._is_vague = fleet.is_foreign or address_dialled(instance) is None
        self.link: ReconnectingChannel | None = None
        """Internal: its channel, once there is one."""
        self.made: dict[Any, Any] = {}
        """Internal: its multi-callables, by what each was made of."""

    @property
    def channel(self) -> ReconnectingChannel:
        """Its own channel; made when it is first asked for, and connected by its first call.

        Raises:
            ValueError: The member is gone.
            Exception: What `connect` raised.
        """
        return self._fleet.connected(self) if self.link is None else self.link

    @property
    def calls(self) -> int:
        """Calls in flight on it."""
        return 0 if self.link is None else self.link.calls

    def began(self, *, patient: bool = False) -> Began:
        """Internal: where a call that begins now goes.

        Args:
            patient: Whether it may not fail for want of a connection.
        """
        link = self.link
        if link is None:
            return None, 1, True, self._fleet.now_ns()
        looks = patient or self._is_vague or self.down_ns is not None  # it takes 3 us
        had_none = looks and link.get_state() not in CONNECTED
        return link, link.number, had_none, self._fleet.now_ns()

    def down(self, reason: str = "asked for") -> None:
        """Have it not called until it answers a probe. A second time, or once it is gone, nothing.

        Args:
            reason: For the event.
        """
        self._fleet.down(self, reason)

    def up(self) -> None:
        """Have it called again, at once. One that is not down: nothing."""
        self._fleet.up(self)


class Fleet:
    """The members, and what is known of them. Thread-safe."""

    def __init__(
        self,
        name: str,
        connect: Callable[[ServiceInstance], ReconnectingChannel],
        on_member: Callable[[Member], object] | None,
        picker: Picker,
        rules: Rules,
        timer: Timer | None,
        *,
        is_foreign: bool = False,
    ) -> None:
        """Begin without members; see `ClusterChannel`.

        Args:
            name: Of the channel.
            connect: Makes the channel of a member.
            on_member: Told each that was made.
            picker: Who is called.
            rules: The policy.
            timer: Where probes wait.
            is_foreign: Whether `connect` is the user's, and may go anywhere.
        """
        self.name = name
        self.is_foreign = is_foreign
        self._connect = connect
        self._on_member = on_member
        self.timer = timer
        self.now_ns = clock_of(timer)
        self.changed = threading.Condition(threading.RLock())  # for what ends by the collector
        self.roster: Roster[Member] = Roster(
            name, partial(Member, self), picker, rules, self.now_ns
        )
        self.jobs: Final = object()  # by which the workers know ours
        self._probes = Probes(self)
        self._timeouts: dict[Any, Timeout] = {}  # by member; of the growing weights by None
        self.closers = CloseCallbacks(name)
        self.waiting: dict[Journey, None] = {}
        """Calls that wait to know which members there are."""
        self.watch: Callable[[], object] = _nothing
        """Called when the state of the whole may have changed."""

    # Which there are

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """See `ClusterChannel.update`."""
        given = tuple(instances)  # the user's iterator: not under the lock
        with self.changed:
            change = self.roster.update(given, time.time())
            leaving = [(member, member.link) for member in change.removed]
            self.changed.notify_all()
        for member, link in leaving:
            self._forget_probe(member)
            if link is None:
                self.left(member)
            else:
                self._retire(member, link)
        for member in change.returned:
            self._probes.soon(member, member.spell)
        self._grow_later()
        self._stir()

    def _retire(self, member: Member, link: ReconnectingChannel) -> None:
        link.on_close(weak_callback(self.left, member))
        drain_ns = self.roster.rules.drain_ns
        drain = None if drain_ns == NEVER else to_seconds(drain_ns)
        link.drain(drain, reason=f"{member.id} is gone from {self.name}")

    def left(self, member: Member) -> None:
        """Take note that a removed member is closed."""
        with self.changed:
            self.roster.left(member)
            member.made.clear()

    def _stir(self) -> None:
        """Have those who wait for something look: something has changed."""
        self.watch()
        if self.waiting:
            EXECUTOR.submit(self.jobs, self._serve)

    def _serve(self) -> None:
        """On a worker."""
        with self.changed:
            waiting = tuple(self.waiting)
        for one in waiting:
            one.look_for_members()

    def fail(self, reason: str) -> None:
        """See `ClusterChannel.fail`."""
        with self.changed:
            self.roster.fail(reason)
            self.changed.notify_all()
        self._stir()

    def connected(self, member: Member) -> ReconnectingChannel:
        """The channel of a member, made if there is none.

        Raises:
            ValueError: The member is gone; in the words of grpc.
            Exception: What `connect` raised.
        """
        made = self._connect(member.instance)  # the user's: not under the lock
        with self.changed:
            gone = member.closed or member.leaving
            if member.link is None and not gone:
                member.link, member.used = made, True
            link = member.link
        if link is not made:
            made.close()
            if link is None:
                raise ValueError(CLOSED)
            return link
        if self._on_member is not None:
            run_callback(self.name, self._on_member, member)
        return made

    def lost(self, member: Member, began: Began) -> bool:
        """Whether a call was refused because the member is gone, or the channel that it had.

        If that was closed or retired by the user, the next call has another one made.
        """
        with self.changed:
            if member.closed or member.leaving or self.roster.closed:
                return True
            link = began[0] or member.link  # made for this call
            if link is None or link is not member.link:
                return link is not None
            if link.accepts_calls:
                return False
            member.link, member.made = None, {}  # who has the old dict writes to that
        if not link.closed:
            link.on_close(self.closers.add(link.close))  # calls run on it still
        return True

    # Up and down

    def failed(self, member: Member, error: Any, began: Began) -> bool:
        """Judge a call that has just ended; True if it is sure that nothing was sent.

        What proves that is in `proves_unsent`.

        Args:
            member: Whose it was.
            error: The call, or the error that it raised.
            began: Where and when it began; see `when`.
        """
        link, number, had_none, began_ns = began
        link = link or member.link
        if link is None:
            return False
        outcome = result_of(error)
        if outcome.code not in UNREACHED:
            if member.down_ns is not None and outcome.code not in UNANSWERED:
                self.up(member)  # that is an answer
            return False
        state = link.get_state()
        has_none = state is FAILING and number == link.number
        details, *metadata = (_said(error, name) for name in SAID)
        unsent = is_unprocessed(outcome.code, details, *metadata) and proves_unsent(
            member.instance, details, had_none=had_none, has_none=has_none
        )
        verdict = member.judged(
            outcome.code,
            "" if state is None else state.name,
            cut_off=unsent,
            began_ns=began_ns,
            read_ns=link.activity.last_read_ns,
            now_ns=self.now_ns(),
        )
        if verdict.is_down:
            self.down(member, "no connection" if unsent else f"{outcome.code}: no connection")
        return verdict.may_move

    def unmade(self, member: Member, error: UnmadeError) -> BaseException:
        """Take note that no channel could be made for a member; gives what is the caller's."""
        cause = error.__cause__ or error
        self.down(member, f"connect: {cause!r}")
        return cause

    def down(self, member: Member, reason: str) -> None:
        """Have a member not called until it answers a probe."""
        with self.changed:
            news = self.roster.down(member, reason)
            spell = member.spell
            self.changed.notify_all()
        if news:
            emit(MemberDown(channel=self.name, member=member.id, reason=reason))
            self._probes.later(member, spell)
            self._stir()

    def up(self, member: Member) -> None:
        """Have a member called again."""
        with self.changed:
            away_ns = self.roster.up(member)
            self.changed.notify_all()
        if away_ns is not None:
            self._forget_probe(member)
            emit(MemberUp(channel=self.name, member=member.id, after_s=to_seconds(away_ns)))
            self._stir()

    def keep(self, key: Member | None, timeout: Timeout, wanted: Callable[[], bool]) -> None:
        """Keep a timeout, to be cancelled with the rest; in the stead of the one before."""
        obsolete: Timeout | None = timeout
        with self.changed:
            if wanted():
                obsolete = self._timeouts.get(key)
                self._timeouts[key] = timeout
        if obsolete is not None:
            obsolete.cancel()

    def _forget_probe(self, member: Member) -> None:
        with self.changed:
            timeout = self._timeouts.pop(member, None)
        if timeout is not None:
            timeout.cancel()

    # Growing weights

    def _grow_later(self) -> None:
        with self.changed:
            wake_ns = None if self.roster.closed else self.roster.wake_ns()
            if wake_ns is None or None in self._timeouts:
                return
        timeout = timeout_on(self.timer, weak_callback(self._grow_on_worker), wake_ns)
        if timeout is not None:
            self.keep(None, timeout, lambda: not self.roster.closed)

    def _grow_on_worker(self, _: Timeout) -> None:
        EXECUTOR.submit(self.jobs, self.grow)

    def grow(self) -> None:
        """Let weights grow by a step. On a worker."""
        with self.changed:
            self._timeouts.pop(None, None)
            self.roster.refresh()
        self._grow_later()

    # The end

    def close(self) -> None:
        """See `ClusterChannel.close`."""
        with self.changed:
            gone = self.roster.close()
            timeouts, self._timeouts = list(self._timeouts.values()), {}
            self.changed.notify_all()
        for timeout in timeouts:
            timeout.cancel()
        self._stir()
        try:
            self.closers.run()
        finally:  # whatever a callback raises, be it `SystemExit`
            for member in gone:
                if member.link is not None:
                    member.link.close()
                member.made.clear()


def when(began: Began) -> Began:
    """What is kept of a call's begin while it runs: when, but not where."""
    return None, None, False, began[-1]


def _said(error: Any, name: str) -> Any:
    """What a call that has failed says; None if an interceptor's error can't say it."""
    tell = getattr(error, name, None)
    return tell() if callable(tell) else None


def _nothing() -> None:
    """Nobody watches."""
