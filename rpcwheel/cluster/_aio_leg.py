"""One of several calls that are made at once, each on a member of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.aio_finished import finished_call

from ._aio_passage import Passage

if TYPE_CHECKING:
    from rpcwheel._grpc.aio_relay import Relay

    from ._aio_calls import Calls
    from ._aio_fleet import UnmadeError
    from ._aio_member import Member

__all__ = ["Forks", "Leg"]


class Forks:
    """What the forks of one call have in common."""

    def __init__(self, used: list[Member]) -> None:
        self.used = used
        """Where they are, or were: no other goes there."""
        self.heard = False
        """Whether one of them was sent, or may have been."""


class Leg(Passage):
    """One of several calls that are made at once; it goes where none of the others is."""

    def __init__(
        self,
        calls: Calls,
        request: Any,
        sent: Any,
        options: dict[str, Any],
        forks: Forks | None,
    ) -> None:
        super().__init__(calls, request, sent, options, patient=False)
        self._forks = forks

    def _unmade(self, unmade: UnmadeError) -> Any:
        if self._forks is not None:
            self._forks.heard = True  # it is not waited past
        return finished_call(
            self.kind, grpc.StatusCode.UNAVAILABLE, str(unmade)
        )  # the others go on

    def _goes_on(self, relay: Relay, error: grpc.aio.AioRpcError) -> bool:
        goes_on = super()._goes_on(relay, error)
        if self._forks is not None and self._error is not error:
            self._forks.heard = True
        return goes_on

    def _other(self) -> Member | None:
        if self._forks is None:
            return None
        self._tried = tuple(self._forks.used)
        other = super()._other()
        if other is not None:
            self._forks.used.append(other)
        return other
