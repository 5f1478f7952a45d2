"""How members that are down are asked whether they are back, for threads.

A probe waits for a connection, so that a server is noticed as soon as it is there again; gRPC runs
a thread for a channel with a call in flight. So not more than `MOST_WAIT` wait at once. The others
are only told to connect, and are asked when they have: each time that its probe is due.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import InternalCallback
from rpcwheel.durations import to_seconds
from rpcwheel.exiting import BACKGROUND
from rpcwheel.observe import CallbackFailed, emit
from rpcwheel.probe import MARK, UNANSWERED, HealthProbe

from ._timeout import timeout_on

if TYPE_CHECKING:
    from rpcwheel.exiting import BackgroundCall
    from rpcwheel.timer import Timeout

    from ._fleet import Fleet, Member

__all__ = ["Probes"]

PROBE: Final = HealthProbe()
PATIENCE_NS: Final = 1_000_000_000
"""Until the next probe, where the user's wait object fails."""

MOST_WAIT: Final = 16
"""Probes that wait for a connection, of one channel."""

MOST: Final = 64
"""Probes in flight, of one channel."""

CONNECTED: Final = frozenset({grpc.ChannelConnectivity.READY, None})


class Probes:
    """The probes of one channel's members; thread-safe. The fleet owns it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = weakref.ref(fleet)
        self._jobs = fleet.jobs
        self._lock = threading.Lock()
        self._running = 0

    def later(self, member: Member, spell: int) -> None:
        """Ask a member after the next wait between probes."""
        fleet = self._fleet()
        if fleet is None:
            return
        try:
            delay_ns = fleet.roster.probe_delay_ns(member)
        except Exception as error:  # noqa: BLE001 - the user's wait object; told as an event
            emit(CallbackFailed(fleet.name, callback="the wait between probes", error=error))
            delay_ns = PATIENCE_NS
        due = partial(_due, weakref.ref(member), weakref.ref(self), spell)
        timeout = timeout_on(fleet.timer, due, delay_ns)
        if timeout is None:
            fleet.up(member)  # nobody would ask it: the next call will tell
        else:
            fleet.keep(member, timeout, lambda: fleet.roster.wants_probe(member, spell))

    def soon(self, member: Member, spell: int) -> None:
        """Ask it now, on a worker."""
        EXECUTOR.submit(self._jobs, partial(self.ask, member, spell))

    def ask(self, member: Member, spell: int) -> None:
        """Ask a member that is down whether it answers. On a worker."""
        fleet = self._fleet()
        if fleet is None or not fleet.roster.wants_probe(member, spell):
            return
        background = BACKGROUND.begin_call()
        if background is None:
            fleet.up(member)  # nobody asks it any more: the next call will tell
            return
        held = waits = self._takes(MOST_WAIT)
        asked = None
        try:
            link = member.channel
            if not held and link.get_state(try_to_connect=True) in CONNECTED:
                held = self._takes(MOST)
            if held:
                limit_s = to_seconds(fleet.roster.rules.probe_timeout_ns)
                call = link.heartbeat_call(PROBE.method)
                asked = call.future(PROBE.request, limit_s, MARK, None, waits)
        except Exception as error:  # noqa: BLE001 - closed meanwhile, or the user's `connect`
            if not isinstance(error, ValueError):
                emit(CallbackFailed(fleet.name, callback=f"connect {member.id}", error=error))
        if asked is None:
            BACKGROUND.end_call(background)
            if held:
                self._gives()
            self._settle(member, spell, None)
            return
        background.cancel = asked.cancel
        hook = InternalCallback(_asked, background, weakref.ref(self), weakref.ref(member), spell)
        asked.add_done_callback(hook)

    def _takes(self, most: int) -> bool:
        """Whether one more may be in flight; it is then."""
        with self._lock:
            if self._running >= most:
                return False
            self._running += 1
        return True

    def _gives(self) -> None:
        with self._lock:
            self._running -= 1

    def _settle(self, member: Member, spell: int, asked: Any) -> None:
        """Draw the conclusion of a probe. On a worker."""
        fleet = self._fleet()
        if fleet is None:
            return
        answers = asked is not None and _answers(asked)
        with fleet.changed:
            wanted = fleet.roster.wants_probe(member, spell)
            if wanted and not answers:
                fleet.roster.probe_failed(member)
        if wanted and answers:
            fleet.up(member)
        elif wanted:
            self.later(member, spell)

    def asked(self, member: Member | None, spell: int, asked: Any) -> None:
        """Take note that a probe has ended. On gRPC's thread."""
        self._gives()
        if member is not None:
            EXECUTOR.submit(self._jobs, partial(self._settle, member, spell, asked))


def _answers(asked: Any) -> bool:
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


def _due(member: weakref.ref[Member], probes: weakref.ref[Probes], spell: int, _: Timeout) -> None:
    """On the timer's thread."""
    alive, one = probes(), member()
    if alive is not None and one is not None:
        alive.soon(one, spell)


def _asked(
    background: BackgroundCall,
    probes: weakref.ref[Probes],
    member: weakref.ref[Member],
    spell: int,
    asked: Any,
) -> None:
    """On gRPC's thread."""
    BACKGROUND.end_call(background)
    alive = probes()
    if alive is not None:
        alive.asked(member(), spell, asked)
