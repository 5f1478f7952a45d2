"""How a call with a stream of requests finds its member, for threads.

Its requests are read while gRPC still looks for a connection, so that it can't be made elsewhere.
So it is begun on a member that has a connection, or was never asked for one, as long as there is
such a one. One that may wait for a connection (`wait_for_ready`) is tried on one member after the
other, and its requests wait at a gate until one of them has a connection.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call.sync_call import RetryingCall, RetryingStream

from ._fleet import CLOSED, UnmadeError
from ._gate import Gate
from ._journey import Journey
from ._tries import Method, judge_at_end, left

if TYPE_CHECKING:
    from ._fleet import Member
    from ._tries import Call

__all__ = ["Pushing"]

MOST_ASKED: Final = 8
"""Members that are asked whether they have a connection."""


class Pushing(Method):
    """One method of a stub with a stream of requests. The base of the two kinds."""

    __slots__ = ()

    def _wait(
        self,
        name: str,
        requests: Any,
        timeout: float | None,
        *options: Any,
    ) -> Any:
        """Carry out a call on its caller's thread."""
        call = self.name, None, options[0]
        until_s = None if timeout is None else monotonic() + timeout
        if options[2]:
            return self._wait_patiently(name, requests, until_s, call, options)
        while True:
            member = self._connected(call, until_s)
            began, timeout = member.began(), left(until_s)
            try:
                answer = getattr(self.bound(member), name)(requests, timeout, *options)
            except grpc.RpcError as failure:
                self.fleet.failed(member, failure, began)
                raise
            except ValueError as failure:
                if not self.has_gone(member, began, failure):
                    raise
            except UnmadeError as failure:
                cause = self.fleet.unmade(member, failure)
                if self.fleet.roster.all_down:
                    raise cause from None
            else:
                self._answered(member)
                return answer

    def _wait_patiently(
        self,
        name: str,
        requests: Any,
        until_s: float | None,
        call: Call,
        options: tuple[Any, ...],
    ) -> Any:
        """The same, on one member after the other until one has a connection."""
        metadata, credentials, _, compression = options
        patient = True
        tried: tuple[Member, ...] = ()
        member = self.first(call, until_s, patient=True)
        while True:
            error: BaseException
            began, gate = member.began(patient=True), Gate(requests, member)
            try:
                bound, given = self.bound(member), (metadata, credentials, False, compression)
                answer = getattr(bound, name)(gate, left(until_s), *given)
            except grpc.RpcError as failure:
                unsent = self.fleet.failed(member, failure, began)
                if gate.shut() or not unsent:
                    raise
                error, tried = failure, (*tried, member)
            except ValueError as failure:
                if gate.shut() or not self.has_gone(member, began, failure):
                    raise
                error = failure
            except UnmadeError as failure:
                error, tried = self.fleet.unmade(member, failure), (*tried, member)
                patient = False
            else:
                self._answered(member)
                return answer
            finally:
                gate.shut()
            member, tried = self.next(tried, call, until_s, error, patient=patient)

    def _answered(self, member: Member) -> None:
        if member.down_ns is not None:
            self.fleet.up(member)

    def _begin(
        self,
        name: str,
        requests: Any,
        timeout: float | None,
        *options: Any,
    ) -> Any:
        """Begin a call that its caller holds."""
        call = self.name, None, options[0]
        until_s = None if timeout is None else monotonic() + timeout
        if options[2]:
            return self._set_out(name, requests, until_s, options)
        while True:
            try:
                member = self._connected(call, until_s)
            except FinishedError as ended:
                return ended
            began = member.began()
            try:
                running = self.begin_on(member, name, requests, until_s, options)
            except ValueError as error:
                if not self.has_gone(member, began, error):
                    raise
            except UnmadeError as failure:
                cause = self.fleet.unmade(member, failure)
                if self.fleet.roster.all_down:
                    raise cause from None
            else:
                judge_at_end(running, self.fleet, member, began)
                return running

    def _set_out(
        self,
        name: str,
        requests: Any,
        until_s: float | None,
        options: tuple[Any, ...],
    ) -> RetryingCall:
        if self.fleet.roster.closed:
            raise ValueError(CLOSED)
        course = Journey(self, name, requests, until_s, options, patient=True, streams=True)
        course.set_out(None)
        return RetryingCall(course) if name == "future" else RetryingStream(course)

    def _connected(self, call: Call, until_s: float | None) -> Member:
        """A member that has a connection, or was never asked for one, if there is any.

        One that has lost its connection is asked for another; until it has one it comes last.
        """
        first = member = self.first(call, until_s, patient=False)
        tried: list[Member] = []
        idle: Member | None = None
        while member.link is not None:
            state = member.link.get_state()
            if state is grpc.ChannelConnectivity.READY or state is None:
                break
            if state is grpc.ChannelConnectivity.IDLE:
                idle = idle or member
                member.link.get_state(try_to_connect=True)
            tried.append(member)
            other = self.fleet.roster.other(tried, call)
            if other is None or len(tried) == MOST_ASKED:
                return idle or first
            member = other
        return member
