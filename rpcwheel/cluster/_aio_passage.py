"""A call of a channel of many members, on its way: from one to the next, until one has got it.

It conducts its relay (`rpcwheel._grpc.aio_relay`), which its caller holds. A try is grpc's own call
on the active connection of a member's channel. One that found no connection, so that nothing was
sent, is followed by a try on another member, each at most once. Where there is nobody to call the
relay shows no try, and the call waits for a change, in no task.

Requests that are written, not iterated, into a channel with interceptors count as taken at once, as
grpc.aio takes them into a queue of its own (1.85); such a call goes nowhere else.

A call that may wait for a connection (`wait_for_ready`) is made so that it does not: or it would
wait for the one member, whatever becomes of the others. It is we who wait.
"""

from __future__ import annotations

import weakref
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.aio_finished import OK, failed_call, finished_call
from rpcwheel._grpc.aio_relay import NotAtOnceError, failure_of, has_ended, immediately
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.probe import UNANSWERED
from rpcwheel.transport.aio import CLOSED

from ._aio_fleet import UnmadeError
from ._aio_unsent import is_unsent, state_of

if TYPE_CHECKING:
    from contextvars import Context

    from rpcwheel._grpc.aio_relay import Relay
    from rpcwheel.rpc import Kind

    from ._aio_calls import Calls
    from ._aio_firsts import AsyncFirsts, Firsts
    from ._aio_member import Member

__all__ = ["Passage"]

UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
TOO_LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
UNREACHED: Final = frozenset({UNAVAILABLE, TOO_LATE})
"""Status codes that may come of a member that can't be reached."""

PATIENCE_NS: Final = 1_000_000_000
"""After which a call that may wait is tried again though all members are down still."""


class Passage:
    """One call. Made for every one, and most go well: what only the others need is set then."""

    requests = None
    """The caller writes to grpc's call itself."""
    firsts: Firsts | AsyncFirsts | None = None
    """What is streamed, if its caller has given an iterator."""
    _at: Member
    _runs = False  # whether a try is counted on `_transport`
    _began_in = ""  # the state of its connection then
    _try_ns = 0  # when it began, if it is not the first
    _tried: tuple[Member, ...] = ()
    _error: grpc.aio.AioRpcError | None = None  # of the last try that found no connection
    _waits = False
    _timeout: Any = None  # while it waits
    _held: Relay | None = None  # while it waits; a stream that is forgotten is not waited for
    _context: Context | None = None  # the caller's, once it has waited

    def __init__(
        self,
        calls: Calls,
        request: Any,
        sent: Any,
        options: dict[str, Any],
        patient: bool | None,
    ) -> None:
        self._calls = calls
        self._request = request
        self._sent = sent
        self._options = options
        self._patient = patient
        self._began_ns = 0 if options["timeout"] is None else calls.fleet.now_ns()

    @property
    def kind(self) -> Kind:
        """Which of the four."""
        return self._calls.kind

    @property
    def method(self) -> str:
        """In full."""
        return self._calls.method

    def begin_on(self, at: Member) -> Relay:
        """Make what the caller holds, with a first try on a member.

        Raises:
            Exception: As `go`.
        """
        try:
            call = self._reach(at, self._options)
        except UnmadeError as unmade:
            return self._unmade(unmade)
        relay = self._calls.relay(self)
        self.follow(relay)
        relay.begin(call)
        return relay

    def follow(self, relay: Relay) -> None:
        """Take note what it conducts, weakly: a stream that its caller forgets is canceled."""
        fleet = self._calls.fleet
        foreign = fleet.foreign or fleet.appended[self.kind]
        self._relay = weakref.ref(relay, self._forgotten if foreign else None)

    def _unmade(self, unmade: UnmadeError) -> Relay:
        """What comes of it that no member has a channel."""
        raise unmade.error

    def _reach(self, at: Member, options: dict[str, Any]) -> Any:
        """Begin a try on a member, or on the next one to which there is a channel.

        Raises:
            UnmadeError: There is a channel to none.
            Exception: As `go`.
        """
        while True:
            try:
                return self.go(at, options)
            except UnmadeError as unmade:
                self._calls.fleet.down(at, f"connect: {unmade.error!r}")
                self._tried = (*self._tried, at)
                other = self._other()
                if other is None:
                    raise
                at = other

    def go(self, at: Member, options: dict[str, Any]) -> Any:
        """Begin a try on a member, and leave the one before; gives grpc's call.

        Raises:
            UnmadeError: The member has no channel, and gets none.
            Exception: No call could be made of what the user gave.
        """
        calls, sent = self._calls, self._sent
        if self.firsts is not None:
            sent = self.firsts.feed()
        member = calls.made.get(at) or calls.bound(at)
        try:
            link, call = member.start(sent, **options)
        except grpc.aio.UsageError as error:
            if at.link is None or at.link.accepts_calls:
                raise UnmadeError(at, error) from error  # the user has closed what `connect` made
            member = calls.bound(at)  # the user has closed the member's own channel, or drained it
            link, call = member.start(sent, **options)
        if self._runs:
            self._leave()
        self._at, self._member, self._transport, self._call = at, member, link, call
        self._runs, self._began_in = True, state_of(link)
        link.running.add(self)
        return call

    def _leave(self) -> None:
        """Be ended no more with the transport of the last try, and not counted there."""
        self._transport.running.discard(self)
        self._count_no_more()

    def _count_no_more(self) -> None:
        self._runs = False
        self._member.channel.end_call_soon(self._transport)

    def _left_ns(self) -> int:
        """Until the deadline."""
        timeout = self._options["timeout"]
        if timeout is None:
            return NEVER
        own_ns = to_ns(timeout, what="timeout")
        return own_ns if own_ns == NEVER else self._began_ns + own_ns - self._calls.fleet.now_ns()

    # From one member to the next

    def _goes_on(self, relay: Relay, error: grpc.aio.AioRpcError) -> bool:
        """Judge a try that has failed, and go on if nothing was sent."""
        code, at, link = error.code(), self._at, self._transport
        if code not in UNREACHED:
            self._heard(code)
            return False
        is_active = link is self._member.channel.connections.active
        state = state_of(link)
        unsent = is_unsent(error, at.instance, self._began_in, state)
        now_ns = self._calls.fleet.now_ns()
        verdict = at.judged(
            code.name,
            state if is_active else "",
            cut_off=unsent,
            began_ns=self._try_ns or self._began_ns or now_ns,
            read_ns=link.activity.last_read_ns,
            now_ns=now_ns,
        )
        if verdict.is_down and is_active:
            why = "no connection" if unsent else f"{code.name} without a connection"
            self._calls.fleet.down(at, why)
        taken = relay.handed or (self.firsts is not None and not self.firsts.whole)
        if taken or not verdict.may_move:
            return False
        self._error, self._tried = error, (*self._tried, at)
        return self._moves(relay)

    def _moves(self, relay: Relay) -> bool:
        """Go to another member, or end as the time is over; False if there is none."""
        left_ns, calls = self._left_ns(), self._calls
        if left_ns <= 0:
            self._give_up(relay)
            return True
        try:
            other = self._other()
            if other is not None:
                relay.begin(self._reach(other, self._rest(left_ns)))
                return True
        except UnmadeError:
            pass  # as if it were not there
        except Exception as error:  # noqa: BLE001 - of a picker, or of `connect`; the caller gets it
            relay.finish(failed_call(self.kind, error))
            return True
        if not self._patient or calls.roster.closed:
            return False
        self._leave()
        relay.pause()
        self._wait(relay, min(left_ns, PATIENCE_NS))
        return True

    def _other(self) -> Member | None:
        """Who is to be tried next."""
        calls = self._calls
        asked = calls.method, self._request, self._options["metadata"]
        return calls.roster.other(self._tried, asked)

    def _rest(self, left_ns: int) -> dict[str, Any]:
        """The options of a later try, which begins now."""
        self._try_ns = self._calls.fleet.now_ns()
        return self._options if left_ns == NEVER else self._options | {"timeout": left_ns / 1e9}

    def _heard(self, code: grpc.StatusCode) -> None:
        """Take note that a member has answered, if that is news."""
        if self._at.down_ns is not None and code.name not in UNANSWERED:
            self._at.up()

    # While there is nobody to call

    def wait(self) -> Any:
        """Begin without a try; or end at once, if there is nothing to wait for.

        Raises:
            grpc.aio.UsageError: The channel is closed; in the words of grpc.aio.
        """
        roster, left_ns = self._calls.roster, self._left_ns()
        if roster.closed:
            raise grpc.aio.UsageError(CLOSED)
        refusal = roster.refusal()
        limit_ns = left_ns if self._patient else min(left_ns, roster.rules.wait_ns)
        if limit_ns <= 0 or (refusal is not None and not self._patient):
            return finished_call(self.kind, self._code(), refusal or roster.too_late())
        relay = self._calls.relay(self)
        self.follow(relay)
        self._wait(relay, limit_ns)
        return relay

    def _wait(self, relay: Relay, limit_ns: int) -> None:
        """Wait for a change, but no longer than that."""
        self._waits = True
        self._calls.fleet.waiting[self] = None
        self._held = None if self.kind.streams_responses else relay
        self._context = self._context or copy_context()
        if limit_ns != NEVER:
            late = partial(_late, weakref.ref(self))
            self._timeout = self._calls.fleet.home.after(limit_ns, late)

    def _wait_no_more(self) -> None:
        self._waits = False
        self._held = None
        self._calls.fleet.waiting.pop(self, None)
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()

    def look(self) -> None:
        """Look whether there is somebody to call by now. On the loop."""
        relay, roster = self._relay(), self._calls.roster
        if relay is None or not self._waits:  # forgotten
            self._wait_no_more()
        elif roster.pick is not None:
            if not (self._tried and roster.all_down):
                self._again(relay)
        elif not self._patient and roster.refusal() is not None:
            self._give_up(relay)

    def late(self) -> None:
        """The time to wait is over."""
        relay, roster = self._relay(), self._calls.roster
        if relay is None or not self._waits:
            self._wait_no_more()
        elif roster.pick is not None and self._left_ns() > 0:
            self._again(relay)
        else:
            self._give_up(relay)

    def _again(self, relay: Relay) -> None:
        """Begin anew, as if it were called now."""
        self._wait_no_more()
        self._tried = ()
        assert self._context is not None  # noqa: S101 - for mypy
        self._context.run(self._begin_anew, relay)

    def _begin_anew(self, relay: Relay) -> None:
        calls, left_ns = self._calls, self._left_ns()
        assert calls.roster.pick is not None  # noqa: S101 - for mypy
        try:
            at = calls.roster.pick(calls.method, self._request, self._options["metadata"])
            call = self._reach(at, self._rest(max(0, left_ns)))
        except UnmadeError as unmade:
            relay.finish(failed_call(self.kind, unmade.error))
        except Exception as error:  # noqa: BLE001 - of a picker, or of `connect`; the caller gets it
            relay.finish(failed_call(self.kind, error))
        else:
            relay.begin(call)

    def _give_up(self, relay: Relay) -> None:
        """End as nobody could be called in time: in the words of the last try, if there was one."""
        roster, error = self._calls.roster, self._error
        code = self._code()
        if error is None:
            relay.finish(finished_call(self.kind, code, roster.refusal() or roster.too_late()))
        elif code is UNAVAILABLE:
            relay.finish(failed_call(self.kind, error))
        else:
            relay.finish(finished_call(self.kind, code, error.details()))

    def _code(self) -> grpc.StatusCode:
        """Whether it is the deadline that is over, or another limit."""
        return TOO_LATE if self._left_ns() <= 0 else UNAVAILABLE

    # For the transport

    def end_with(self, details: str) -> None:
        """End the call with UNAVAILABLE, as its connection is given up."""
        relay = self._relay()
        if relay is not None:
            relay.end(finished_call(self.kind, UNAVAILABLE, details))

    def cancel(self) -> None:
        """Cancel the call, as its channel is closed."""
        relay = self._relay()
        if relay is not None:
            relay.cancel()

    # For the relay

    def failed(self, relay: Relay, call: Any, error: BaseException | None) -> None:
        """Act on the end of a try: go on, or end the relay."""
        try:
            error = failure_of(call) if error is None else error
        except NotAtOnceError:  # a foreign call, which says that it is done and is not
            relay.finish(call)
            return
        except BaseException as raised:  # noqa: BLE001 - an interceptor's; the caller gets it
            error = raised
        if isinstance(error, grpc.aio.AioRpcError):
            self._transport.activity.saw_status(error.code())
            if self._goes_on(relay, error):
                return
            if self.kind.streams_requests:  # or grpc.aio may tell another status later
                relay.finish(failed_call(self.kind, error), source=call)
                return
        relay.finish(call if error is None or has_ended(call) else failed_call(self.kind, error))

    def listen(self, relay: Relay, call: object) -> None:
        """Nothing is done while the caller waits for a message."""

    def _forgotten(self, _: object) -> None:
        self.finished()

    def finished(self) -> None:
        """Take note that the call has ended; on any thread, if it was forgotten."""
        if self._waits:
            self._calls.fleet.home.do(self._wait_no_more)
        if self.firsts is not None:
            self.firsts.close()
        if not self._runs:
            return
        self._count_no_more()
        if self._at.down_ns is not None:
            self._heard_of(self._call)

    def _heard_of(self, call: Any) -> None:
        try:
            code = immediately(call.code()) if call.done() else None
        except BaseException:  # noqa: BLE001 - of a foreign interceptor: nothing is known
            return
        if code is OK:
            self._at.up()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of the call."""
        if self._runs:
            left: float | None = self._call.time_remaining()
            return left
        left_ns = self._left_ns()
        return None if left_ns == NEVER else max(0.0, to_seconds(left_ns))


def _late(passage: weakref.ref[Passage]) -> None:
    alive = passage()
    if alive is not None:
        alive.late()
