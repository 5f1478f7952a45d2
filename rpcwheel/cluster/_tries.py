"""How each call of a channel of many members finds its member, for threads.

What is sent is sent by the member's own channel; here is decided to which one, and whether a call
that it did not get goes to another. That is so only where it is sure that nothing was sent, and
only of calls with one request; for those with a stream of them see `_pushing.py`. A call that may
wait for a connection (`wait_for_ready`) is made so that it does not: or it would wait for the one
member, whatever becomes of the others. It is we who wait.
"""

from __future__ import annotations

import weakref
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import call_at_end
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call.sync_call import RetryingCall, RetryingStream
from rpcwheel.durations import to_seconds

from ._fleet import CLOSED, UNREACHED, UnmadeError, when
from ._journey import Journey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rpcwheel.rpc import Kind

    from ._fleet import Began, Fleet, Member

    Call: TypeAlias = tuple[str, Any, Any]
    Convert: TypeAlias = Callable[[Any], Any]

__all__ = ["Call", "Method", "is_connected", "judge_at_end", "left"]

MOST_MADE: Final = 512
"""Multi-callables that are kept of a member."""

PATIENCE_S: Final = 1.0
"""After which a call that waits for its members looks for itself."""

UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
OVERDUE: Final = grpc.StatusCode.DEADLINE_EXCEEDED


class Method:
    """One method of a stub. The base of the four kinds."""

    __slots__ = ("_given", "_key", "_kind", "fleet", "name")

    def __init__(
        self,
        fleet: Fleet,
        kind: Kind,
        method: str,
        serializer: Convert | None,
        deserializer: Convert | None,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        self.fleet = fleet
        self._kind = kind.name.lower()
        self.name = method
        self._given = serializer, deserializer, args, options
        # Of the name: the hash of a member of an enum is a function of Python, for each call.
        self._key = self._kind, method, id(serializer), id(deserializer), args, *options.items()

    def bound(self, member: Member) -> Any:
        """The same method of one member's channel.

        Raises:
            ValueError: The member is gone; in the words of grpc.
            UnmadeError: `connect` has failed.
        """
        of_member = member.made
        known = of_member.get(self._key)
        if known is not None:
            return known[0]
        serializer, deserializer, args, options = self._given
        try:
            channel = member.channel
        except Exception as error:
            if member.closed or member.leaving:
                raise
            raise UnmadeError from error
        make = getattr(channel, self._kind)
        made = make(self.name, serializer, deserializer, *args, **options)
        if len(of_member) >= MOST_MADE:  # of functions made anew for each call
            of_member.clear()
        of_member[self._key] = made, self._given  # what the key is made of must live as long
        return made

    # Who is called

    def at_once(self, call: Call, until_s: float | None, *, patient: bool) -> Member | None:
        """The member for a call; None if it is to wait for one.

        Raises:
            FinishedError: There is none, with UNAVAILABLE; or none before the call's own deadline,
                with DEADLINE_EXCEEDED.
            ValueError: The channel is closed.
        """
        pick = self.fleet.roster.pick
        if pick is not None:
            return pick(*call)
        self._look_out(until_s, patient=patient)
        return None

    def _look_out(self, until_s: float | None, *, patient: bool) -> None:
        """Raise if a call is not to wait for a member; see `at_once`."""
        roster = self.fleet.roster
        if roster.closed:
            raise ValueError(CLOSED)
        is_over = until_s is not None and monotonic() >= until_s
        if is_over or (not patient and roster.refusal() is not None):
            raise self.too_late(until_s)

    def too_late(self, until_s: float | None) -> FinishedError:
        """How a call ends for which there was no member in time."""
        code = UNAVAILABLE if until_s is None or monotonic() < until_s else OVERDUE
        return FinishedError(code, self.fleet.roster.refusal() or self.fleet.roster.too_late())

    @staticmethod
    def overdue_after(error: Any) -> FinishedError:
        """How a call ends whose time is over, and whose last try ended so."""
        tell = getattr(error, "details", None)
        return FinishedError(OVERDUE, str(tell() if callable(tell) else error))

    def latest_s(self, until_s: float | None, *, patient: bool) -> float | None:
        """How long a call may wait for a member, by `time.monotonic`; None: for ever."""
        if patient:
            return until_s
        wait_s = monotonic() + to_seconds(self.fleet.roster.rules.wait_ns)
        return wait_s if until_s is None else min(until_s, wait_s)

    def first(self, call: Call, until_s: float | None, *, patient: bool) -> Member:
        """The member for a call; waits until there is one, as far as it may (see `at_once`)."""
        member = self.at_once(call, until_s, patient=patient)
        if member is not None:
            return member
        latest_s = self.latest_s(until_s, patient=patient)
        while True:
            with self.fleet.changed:
                while self.fleet.roster.pick is None:
                    self._look_out(until_s, patient=patient)
                    left_s = PATIENCE_S if latest_s is None else latest_s - monotonic()
                    if left_s <= 0:
                        raise self.too_late(until_s)
                    self.fleet.changed.wait(min(PATIENCE_S, left_s))
            member = self.at_once(call, until_s, patient=patient)  # the user's key: not under it
            if member is not None:
                return member

    def _wait(
        self,
        name: str,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: bool | None,
        compression: Any,
    ) -> Any:
        """Carry out a call on its caller's thread, on one member after the other."""
        call = self.name, request, metadata
        until_s = None if timeout is None else monotonic() + timeout
        patient = bool(wait_for_ready)
        ready = False if patient else wait_for_ready
        tried: tuple[Member, ...] = ()
        pick = self.fleet.roster.pick
        if pick is None:
            member = self.first(call, until_s, patient=patient)
            timeout = left(until_s)
        else:
            member = pick(*call)
        while True:
            error: BaseException
            began = member.began(patient=patient)
            try:
                known = member.made.get(self._key)  # `bound`, a function less for every call
                bound = self.bound(member) if known is None else known[0]
                answer = getattr(bound, name)(
                    request, timeout, metadata, credentials, ready, compression
                )
            except grpc.RpcError as failure:
                if not self.fleet.failed(member, failure, began):
                    raise
                error, tried = failure, (*tried, member)
            except ValueError as failure:
                if not self.has_gone(member, began, failure):
                    raise
                error = failure
            except UnmadeError as failure:
                error, tried = self.fleet.unmade(member, failure), (*tried, member)
                patient = False  # it may be a mistake, which no waiting mends
            else:
                if member.down_ns is not None:
                    self.fleet.up(member)
                return answer
            member, tried = self.next(tried, call, until_s, error, patient=patient)
            timeout = left(until_s)

    def next(
        self,
        tried: tuple[Member, ...],
        call: Call,
        until_s: float | None,
        error: BaseException,
        *,
        patient: bool,
    ) -> tuple[Member, tuple[Member, ...]]:
        """The member to try next, and those that were tried by then.

        Raises:
            BaseException: `error`, as there is none left.
        """
        if not tried:
            return self.first(call, until_s, patient=patient), tried
        other = self.fleet.roster.other(tried, call)
        if other is not None:
            return other, tried
        if not patient or self.fleet.roster.closed:
            raise error
        self.rest(until_s)
        if left(until_s) == 0:
            raise self.overdue_after(error) from error
        return self.first(call, until_s, patient=True), ()

    def rest(self, until_s: float | None) -> None:
        """Wait for somebody to be up, for a second at most, and not beyond the deadline."""
        roster, changed = self.fleet.roster, self.fleet.changed
        with changed:
            if roster.pick is None or roster.all_down:
                now_s = monotonic()
                changed.wait(PATIENCE_S if until_s is None else min(PATIENCE_S, until_s - now_s))

    def has_gone(self, member: Member, began: Began, error: ValueError) -> bool:
        """Whether nothing was begun on a member, as its channel takes no more calls."""
        return str(error).startswith("Cannot invoke RPC") and self.fleet.lost(member, began)

    # One call on several members

    def several(
        self,
        count: int | None,
        request: Any,
        metadata: Any,
        until_s: float | None,
        *,
        patient: bool,
    ) -> tuple[Member, ...]:
        """Different members, as `pick` gives them; all that there are, if None.

        Raises:
            FinishedError, ValueError: As for any call.
        """
        call = self.name, request, metadata
        first = self.first(call, until_s, patient=patient)
        roster = self.fleet.roster
        if count is None:
            return roster.members or (first,)
        return roster.several(count, call, (first,))

    def begin_on(
        self,
        member: Member,
        name: str,
        request: Any,
        until_s: float | None,
        options: Sequence[Any],
    ) -> Any:
        """Begin a call on one member.

        Raises:
            ValueError: The member is gone.
            UnmadeError: `connect` has failed.
        """
        return getattr(self.bound(member), name)(request, left(until_s), *options)

    # Calls that go on by themselves

    def _begin(
        self,
        name: str,
        request: Any,
        timeout: float | None,
        *options: Any,
    ) -> Any:
        """Begin a call that its caller holds."""
        metadata, _, wait_for_ready, _ = options
        patient, call = bool(wait_for_ready), (self.name, request, metadata)
        until_s = None if timeout is None else monotonic() + timeout
        while True:
            pick = self.fleet.roster.pick
            member = None if pick is None else pick(*call)
            if member is None or patient or not is_connected(member):
                if self.fleet.roster.closed:
                    raise ValueError(CLOSED)
                course = Journey(self, name, request, until_s, options, patient=patient)
                course.set_out(member)
                return RetryingCall(course) if name == "future" else RetryingStream(course)
            began = member.began()
            try:
                running = self.begin_on(member, name, request, until_s, options)
            except ValueError as error:
                if not self.has_gone(member, began, error):
                    raise
            except UnmadeError:
                continue  # it is not connected any more
            else:
                judge_at_end(running, self.fleet, member, began)
                return running


def is_connected(member: Member) -> bool:
    """Whether it has a connection, as far as that can be known."""
    if member.link is None or member.down_ns is not None:
        return False
    return member.link.get_state() in {grpc.ChannelConnectivity.READY, None}


def judge_at_end(running: Any, fleet: Fleet, member: Member, began: Began) -> None:
    """Take note of how a call ends; it is not kept alive for that."""
    since = when(began)
    try:
        call = weakref.ref(running)
    except TypeError:  # a foreign interceptor's
        return

    def ended() -> None:
        """On gRPC's thread, or whoever ends it."""
        over = call()
        if over is not None and (code_of(over) in UNREACHED or member.down_ns is not None):
            EXECUTOR.submit(fleet.jobs, partial(fleet.failed, member, over, since))

    call_at_end(running, ended)


def left(until_s: float | None) -> float | None:
    """What is left of a timeout; grpc ends a call without any by itself."""
    return None if until_s is None else max(0.0, until_s - monotonic())


def code_of(call: Any) -> str:
    """The name of its status code."""
    tell = getattr(call, "code", None)
    code = tell() if callable(tell) else None
    return getattr(code, "name", None) or "UNKNOWN"
