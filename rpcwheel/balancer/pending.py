"""Calls without a READY subchannel: whether they wait, and the status with which they end. No I/O.

`WaitRules` decide for all calls of a channel. A `PendingPick` is one call that waits: a blocking
call, a call of `.future()`, a stream, or any call of `grpc.aio`. (grpc-go decides the same in
`pickerWrapper`.) `SubchannelPool.try_pick` picks for it each time the states were read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc

from rpcwheel._grpc.calls import CLOSED_DURING_CALL

from .subchannel import CONNECTING, FAILING, IDLE, READY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .subchannel import SubchannelBase

FIRST_POLL_S: Final = 0.0005
MAX_POLL_S: Final = 0.05
"""How often states are read while calls wait; the interval grows from the first to the second."""

MAX_EXPLAINED: Final = 3
"""The number of servers whose errors are part of a status."""

BEST_FIRST: Final = (READY, CONNECTING, IDLE, FAILING)


def poll_interval_s(waiting: int) -> float:
    """Return the interval of reads after a call began to wait, beside `waiting` other calls.

    It grows with their number, as all of them pick after each read.
    """
    return min(MAX_POLL_S, FIRST_POLL_S * (1 + waiting))


class Refusal(NamedTuple):
    """The status of a call that gets no subchannel."""

    code: grpc.StatusCode
    details: str
    unreachable: bool = False
    """Whether all connection attempts have failed."""


CLOSED_MEANWHILE: Final = Refusal(grpc.StatusCode.CANCELLED, CLOSED_DURING_CALL)
"""The end of a call whose channel is closed while it waits; has gRPC's details."""


@dataclass(slots=True, eq=False)
class PendingPick:
    """A call that waits until a subchannel is READY. Made by `WaitRules.begin`.

    Times are on the monotonic clock, in seconds.
    """

    method: str
    message: Any
    metadata: Any
    timeout_s: float | None
    wait_for_ready: bool
    tried: list[object] | None
    began_s: float
    limit_s: float | None
    """How long it waits at most; None for no limit."""

    def waited_s(self, now_s: float) -> float:
        """Return how long the call has waited."""
        return now_s - self.began_s

    def wait_left_s(self, now_s: float) -> float | None:
        """Return how long the call waits at most from now on; None for no limit."""
        return None if self.limit_s is None else self.began_s + self.limit_s - now_s

    def timeout_left_s(self, now_s: float) -> float | None:
        """Return the rest of the timeout, 0 or more; None for no timeout."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.began_s + self.timeout_s - now_s)

    @property
    def late_code(self) -> grpc.StatusCode:
        """The status code of its end if it has waited for `limit_s`."""
        ended_by_deadline = self.limit_s == self.timeout_s
        return (
            grpc.StatusCode.DEADLINE_EXCEEDED if ended_by_deadline else grpc.StatusCode.UNAVAILABLE
        )


class WaitRules:
    """When a call without a READY subchannel waits, and the status with which it ends."""

    def __init__(self, name: str, pick_timeout_s: float) -> None:
        """Begin without known instances.

        Calls without `wait_for_ready` wait for `pick_timeout_s`.
        """
        self.name = name
        self.pick_timeout_s = pick_timeout_s
        self.are_known = False
        """Whether the instances are known."""
        self.unusable = ""
        """Why no instance may be used, whatever their states; "" if they may be."""
        self.empty_reason = ""
        """Why there are no instances, for the status of calls."""
        self._error = ""
        self._error_is_final = False

    def begin(
        self,
        method: str,
        message: Any,
        metadata: Any,
        timeout_s: float | None,
        wait_for_ready: bool | None,
        now_s: float,
        tried: list[object] | None = None,
    ) -> PendingPick:
        """Begin to wait with a call that got no subchannel.

        The message of a stream is None. `tried` is as of `SubchannelPool.pick_other`.
        """
        limit_s = timeout_s
        if not wait_for_ready:
            limit_s = min(math.inf if timeout_s is None else timeout_s, self.pick_timeout_s)
        return PendingPick(
            method, message, metadata, timeout_s, bool(wait_for_ready), tried, now_s, limit_s
        )

    def know(self, unusable: str) -> None:
        """Note that the instances are known; `unusable` is the reason why none may be used."""
        self.are_known, self._error, self.unusable = True, "", unusable

    def report_error(self, error: str, *, wait: bool) -> bool:
        """Note why the instances are not known; `wait`: calls wait on. False if they are known."""
        if self.are_known:
            return False
        self._error, self._error_is_final = error, not wait
        return True

    def refusal(
        self,
        subchannels: Sequence[SubchannelBase],
        *,
        wait_for_ready: bool = False,
        empty_reason: str = "",
    ) -> Refusal | None:
        """Return the status of a call that got none of its subchannels; None if the call waits.

        `empty_reason` says why there are no subchannels for this call; "": as for all calls.
        """
        if self.unusable:
            return Refusal(grpc.StatusCode.FAILED_PRECONDITION, self.unusable)
        if wait_for_ready:
            return None
        unavailable = grpc.StatusCode.UNAVAILABLE
        nothing = f"no instance of {self.name} is known"
        if not self.are_known:
            ends = self._error and self._error_is_final
            return Refusal(unavailable, f"{nothing}: {self._error}") if ends else None
        if not subchannels:
            reason = empty_reason or self.empty_reason
            why = f": {reason}" if reason else ""
            return Refusal(unavailable, nothing + why)
        if any(subchannel.state is not FAILING for subchannel in subchannels):
            return None
        return Refusal(unavailable, self._unreachable(subchannels), unreachable=True)

    def _unreachable(self, subchannels: Sequence[SubchannelBase]) -> str:
        texts = dict.fromkeys(
            f"{subchannel.address}: {subchannel.error_text}"
            for subchannel in subchannels
            if subchannel.error_text
        )
        reasons = "; ".join(list(texts)[:MAX_EXPLAINED])
        more = f" and {len(texts) - MAX_EXPLAINED} more" if len(texts) > MAX_EXPLAINED else ""
        count = len(subchannels)
        which = "the only server" if count == 1 else f"none of {count} servers"
        verb = "can't be reached" if count == 1 else "can be reached"
        return f"{which} of {self.name} {verb}" + (f": {reasons}{more}" if reasons else "")

    def timed_out(
        self,
        pending: PendingPick,
        subchannels: Sequence[SubchannelBase],
        *,
        empty_reason: str = "",
    ) -> Refusal:
        """Return the status of a call that has waited for too long."""
        refusal = self.refusal(subchannels, empty_reason=empty_reason)
        if refusal is not None:  # the call has `wait_for_ready`
            details = refusal.details
        elif self.are_known:
            details = f"no connection to a server of {self.name} became ready in time"
        else:
            why = f": {self._error}" if self._error else ""
            details = f"no instance of {self.name} is known yet{why}"
        return Refusal(pending.late_code, details)

    def state(self, subchannels: Sequence[SubchannelBase]) -> grpc.ChannelConnectivity:
        """Return the best state of all subchannels, as gRPC's round_robin does."""
        if not self.are_known and not (self._error and self._error_is_final):
            return CONNECTING
        states = {subchannel.state for subchannel in subchannels}
        return next((state for state in BEST_FIRST if state in states), FAILING)
