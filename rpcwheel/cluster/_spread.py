"""One call on some members of a channel at once, for threads.

One that a member did not get goes to another one; one that may wait for a connection is begun anew
when nobody could be reached. It is we who wait, and not at one member, but for a broadcast.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from rpcwheel._grpc.finished import FinishedError

from ._fleet import UnmadeError
from ._tries import judge_at_end, left
from .failed import told_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._fleet import Began, Member
    from ._members import UnaryUnary

__all__ = ["OfCluster", "Running", "Spread"]

Running: TypeAlias = tuple[str, Any]
"""A call that was begun: where, and grpc's future."""


class OfCluster:
    """One method of a channel of many members."""

    def __init__(self, method: UnaryUnary) -> None:
        self._method = method

    def spread(self, count: int | None, request: Any, options: tuple[Any, ...]) -> Spread:
        """Begin it on so many members, on all if None."""
        method, (timeout, metadata, _, wait_for_ready, _) = self._method, options
        until_s = None if timeout is None else monotonic() + timeout
        patient = bool(wait_for_ready)
        members = method.several(count, request, metadata, until_s, patient=patient)
        if patient and count is not None:  # not at one member: it is we who wait
            return Spread(
                method, members, request, (*options[:3], False, options[4]), until_s, count
            )
        return Spread(method, members, request, options, until_s)


class Spread:
    """One call on some members; one that a member did not get may go to another."""

    def __init__(
        self,
        method: UnaryUnary,
        members: Sequence[Member],
        request: Any,
        options: tuple[Any, ...],
        until_s: float | None,
        patient: int = 0,
    ) -> None:
        """Begin it on these.

        Args:
            method: Which.
            members: Where.
            request: The user's.
            options: As grpc has them.
            until_s: Its deadline.
            patient: On how many it is begun anew when nobody could be reached; 0: it is not.
        """
        self._method = method
        self._given = request, options, until_s
        self._patient = patient
        self._of: dict[Any, tuple[Member, Began]] = {}
        self.running: list[Running] = []
        self._begin_all(members)

    def _begin_all(self, members: Sequence[Member]) -> list[Running]:
        self._used = list(members)
        self._all_unsent = True
        begun = [self._begin(member) for member in members]
        names = told_apart(member.address for member in members)
        self.running = list(zip(names, begun, strict=True))
        return self.running

    def _begin(self, member: Member) -> Any:
        request, options, until_s = self._given
        method, began = self._method, member.began(patient=bool(self._patient))
        try:
            call = method.begin_on(member, "future", request, until_s, options[1:])
        except ValueError as error:
            if not method.has_gone(member, began, error):
                raise
            said = f"{member.id} is gone from {method.fleet.name}"
            call = FinishedError(grpc.StatusCode.UNAVAILABLE, said)
        except UnmadeError as error:
            cause = method.fleet.unmade(member, error)
            said = f"{member.id}: connect: {cause!r}"
            call = FinishedError(grpc.StatusCode.UNAVAILABLE, said)
        else:
            judge_at_end(call, method.fleet, member, began)
        self._of[call] = member, began
        return call

    def moved(self, call: Any) -> Any:
        """The same call on another member, if it is sure that this one got nothing."""
        request, (_, metadata, *_), _ = self._given
        member, began = self._of[call]
        fleet = self._method.fleet
        if not isinstance(call, FinishedError) and not fleet.failed(member, call, began):
            self._all_unsent = False
            return None
        other = fleet.roster.other(self._used, (self._method.name, request, metadata))
        if other is None:
            return None
        self._used.append(other)
        return self._begin(other)

    def anew(self, error: BaseException) -> list[Any]:
        """The same call on members again, once somebody may be reached.

        Raises:
            BaseException: `error`, as it is not to wait, or a member may have got it.
        """
        request, (_, metadata, *_), until_s = self._given
        if not self._patient or not self._all_unsent or self._method.fleet.roster.closed:
            raise error
        self._method.rest(until_s)
        if left(until_s) == 0:
            raise self._method.overdue_after(error) from error
        members = self._method.several(self._patient, request, metadata, until_s, patient=True)
        return [call for _, call in self._begin_all(members)]
