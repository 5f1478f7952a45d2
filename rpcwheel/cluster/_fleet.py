"""The members of a channel for threads: who comes and goes, who is down, and what is done about it.

The lock guards the `Roster` and is held for a few steps only: nothing that blocks, and nothing of
gRPC's, runs under it; of the user's only the picker that is asked for a function. Who is called is
found without it. Probes are due on the timer's thread, which hands them to workers; so does gRPC's,
which tells how they ended.
"""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.status import outcome_of_error
from rpcwheel._grpc.styles import OwnHook
from rpcwheel.channel._drain import timeout_on
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.observe import ListenerFailed, emit
from rpcwheel.observe.events import MemberDown, MemberUp
from rpcwheel.probe import MARK, UNANSWERED, HealthProbe
from rpcwheel.timer.clock import clock_of
from rpcwheel.workers import POOL

from ._closers import Closers, told
from .core import Roster
from .member import MemberCore, judged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.channel.sync import ReconnectingChannel
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from ._journey import Journey
    from .member import Rules
    from .pickers import Picker

__all__ = ["CLOSED", "Fleet", "Member"]

CLOSED: Final = "Cannot invoke RPC on closed channel!"
"""What grpc says to who makes a call on a closed channel."""

PROBE: Final = HealthProbe()
PATIENCE_NS: Final = 1_000_000_000
"""Until the next probe, where the user's wait object fails."""

UNREACHED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Status codes that may come of a member that can't be reached."""


class Member(MemberCore):
    """One server of a channel's, with a connection of its own. Made by the channel."""

    def __init__(self, fleet: Fleet, instance: ServiceInstance, began_ns: int) -> None:
        super().__init__(instance, began_ns)
        self._fleet = fleet
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

    def __init__(  # noqa: PLR0917
        self,
        name: str,
        connect: Callable[[ServiceInstance], ReconnectingChannel],
        on_member: Callable[[Member], object] | None,
        picker: Picker,
        rules: Rules,
        timer: Timer | None,
    ) -> None:
        self.name = name
        self._connect = connect
        self._on_member = on_member
        self.timer = timer
        self.changed = threading.Condition(threading.RLock())  # for what ends by the collector
        self.roster: Roster[Member] = Roster(
            name, partial(Member, self), picker, rules, clock_of(timer)
        )
        self.jobs: Final = object()  # by which the workers know ours
        self._timeouts: dict[Any, Timeout] = {}  # by member; of the growing weights by None
        self.closers = Closers(name)
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
            POOL.submit(self.jobs, partial(self.probe, member, member.spell))
        self._grow_later()
        self._stir()

    def _retire(self, member: Member, link: ReconnectingChannel) -> None:
        link.on_close(partial(_left, weakref.ref(self), member))
        drain_ns = self.roster.rules.drain_ns
        drain = None if drain_ns == NEVER else to_seconds(drain_ns)
        link.retire(drain, reason=f"{member.id} is gone from {self.name}")

    def left(self, member: Member) -> None:
        """Take note that a removed member is closed."""
        with self.changed:
            self.roster.left(member)
            member.made.clear()

    def _stir(self) -> None:
        """Have those who wait for something look: something has changed."""
        self.watch()
        if self.waiting:
            POOL.submit(self.jobs, self._serve)

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
            told(self.name, partial(self._on_member, member), self._on_member)
        return made

    def lost(self, member: Member, link: ReconnectingChannel | None) -> None:
        """Have another channel made for a member whose own was closed by the user."""
        with self.changed:
            if link is not None and member.link is link and link.closed:
                member.link = None
                member.made.clear()

    # Up and down

    def failed(self, member: Member, error: Any) -> bool:  # noqa: ANN401 - or a call that has ended
        """Judge a call that has just ended; True if it is sure that nothing was sent.

        The words of its status and the state of the connection must both say so: a connection that
        breaks amid a call may have failed to come back by now, as another call has asked for it.
        """
        link = member.link
        if link is None:
            return False
        outcome = outcome_of_error(error, cut_off=link.is_cut_off)
        if outcome.code not in UNREACHED:
            if member.down_ns is not None and outcome.code not in UNANSWERED:
                self.up(member)  # that is an answer
            return False
        state, unsent = link.get_state(), outcome.unprocessed
        verdict = judged(outcome.code, "" if state is None else state.name, cut_off=unsent)
        if verdict.is_down:
            self.down(member, "no connection" if unsent else f"{outcome.code}: no connection")
        return verdict.may_move

    def down(self, member: Member, reason: str) -> None:
        """Have a member not called until it answers a probe."""
        with self.changed:
            news = self.roster.down(member, reason)
            spell = member.spell
            self.changed.notify_all()
        if news:
            emit(MemberDown(channel=self.name, member=member.id, reason=reason))
            self._probe_later(member, spell)
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

    def _probe_later(self, member: Member, spell: int) -> None:
        try:
            delay_ns = self.roster.probe_delay_ns(member)
        except Exception as error:  # noqa: BLE001 - the user's wait object; told as an event
            emit(ListenerFailed(self.name, listener="the wait between probes", error=error))
            delay_ns = PATIENCE_NS
        due = partial(_due, weakref.ref(member), weakref.ref(self), spell)
        timeout = timeout_on(self.timer, due, delay_ns)
        if timeout is None:
            self.up(member)  # nobody would ask it: the next call will tell
        else:
            self._keep(member, timeout, lambda: self.roster.wants_probe(member, spell))

    def _keep(self, key: Member | None, timeout: Timeout, wanted: Callable[[], bool]) -> None:
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

    def probe(self, member: Member, spell: int) -> None:
        """Ask a member that is down whether it answers. On a worker."""
        if not self.roster.wants_probe(member, spell):
            return
        try:
            call = member.channel.heartbeat_call(PROBE.method)
            limit_s = to_seconds(self.roster.rules.probe_timeout_ns)
            asked = call.future(PROBE.request, timeout=limit_s, metadata=MARK, wait_for_ready=True)
        except Exception as error:  # noqa: BLE001 - closed meanwhile, or the user's `connect`
            if not isinstance(error, ValueError):
                emit(ListenerFailed(self.name, listener=f"connect {member.id}", error=error))
            self._settle(member, spell, None)
            return
        asked.add_done_callback(OwnHook(_asked, weakref.ref(self), weakref.ref(member), spell))

    def _settle(self, member: Member, spell: int, asked: Any) -> None:  # noqa: ANN401 - a future
        """Draw the conclusion of a probe. On a worker."""
        answers = asked is not None and _answers(asked)
        with self.changed:
            wanted = self.roster.wants_probe(member, spell)
            if wanted and not answers:
                self.roster.probe_failed(member)
        if wanted and answers:
            self.up(member)
        elif wanted:
            self._probe_later(member, spell)

    def settle_soon(self, member: Member, spell: int, asked: Any) -> None:  # noqa: ANN401
        """Have it done by a worker. On gRPC's thread."""
        POOL.submit(self.jobs, partial(self._settle, member, spell, asked))

    # Growing weights

    def _grow_later(self) -> None:
        with self.changed:
            wake_ns = None if self.roster.closed else self.roster.wake_ns()
            if wake_ns is None or None in self._timeouts:
                return
        timeout = timeout_on(self.timer, partial(_grow, weakref.ref(self)), wake_ns)
        if timeout is not None:
            self._keep(None, timeout, lambda: not self.roster.closed)

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
            self.closers.tell()
        finally:  # whatever a callback raises, be it `SystemExit`
            for member in gone:
                if member.link is not None:
                    member.link.close()
                member.made.clear()


def _nothing() -> None:
    """Nobody watches."""


def _answers(asked: Any) -> bool:  # noqa: ANN401 - a future that is done
    """Whether a probe was answered, by one that serves."""
    try:
        response = asked.result(timeout=0)
    except grpc.RpcError as error:
        code = error.code() if hasattr(error, "code") else None
        return getattr(code, "name", "CANCELLED") not in UNANSWERED
    except Exception:  # noqa: BLE001 - cancelled, or of an interceptor's own future
        return False
    return PROBE.judge(response).serving is not False


# What others hold keeps no channel alive


def _left(fleet: weakref.ref[Fleet], member: Member) -> None:
    alive = fleet()
    if alive is not None:
        alive.left(member)


def _due(member: weakref.ref[Member], fleet: weakref.ref[Fleet], spell: int, _: Timeout) -> None:
    """On the timer's thread."""
    alive, one = fleet(), member()
    if alive is not None and one is not None:
        POOL.submit(alive.jobs, partial(alive.probe, one, spell))


def _grow(fleet: weakref.ref[Fleet], _: Timeout) -> None:
    """On the timer's thread."""
    alive = fleet()
    if alive is not None:
        POOL.submit(alive.jobs, alive.grow)


def _asked(
    fleet: weakref.ref[Fleet],
    member: weakref.ref[Member],
    spell: int,
    asked: Any,  # noqa: ANN401
) -> None:
    """On gRPC's thread."""
    alive, one = fleet(), member()
    if alive is not None and one is not None:
        alive.settle_soon(one, spell, asked)
