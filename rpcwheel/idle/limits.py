"""The settings of a policy in numbers, as the core compares them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel.durations import NEVER, to_ns

if TYPE_CHECKING:
    from rpcwheel.durations import Duration

    from .policy import IdlePolicy

__all__ = ["Limits"]

CHECKS: Final = 3
"""Looks per limit; Dubbo's `HEARTBEAT_CHECK_TICK`."""


class Limits(NamedTuple):
    """A policy, in nanoseconds; `NEVER` where there is no limit."""

    idle_ns: int
    read_ns: int
    write_ns: int
    age_ns: int
    age_grace_ns: int
    check_ns: int
    close_streams: bool
    count_heartbeats: bool
    goaway: bool
    report: bool
    goaway_grace_ns: int
    request_ns: int

    @property
    def request_check_ns(self) -> int:
        """Time between two checks for calls whose request has not arrived."""
        return NEVER if self.request_ns == NEVER else max(1, self.request_ns // CHECKS)

    @classmethod
    def from_policy(cls, policy: IdlePolicy) -> Limits:
        """Work out what a policy says."""
        idle, read, write, age = (
            _ns(limit)
            for limit in (policy.idle_timeout, policy.read_idle, policy.write_idle, policy.max_age)
        )
        shortest = min(idle, read, write, age)
        check = NEVER if shortest == NEVER else max(1, shortest // CHECKS)
        return cls(
            idle_ns=idle,
            read_ns=read,
            write_ns=write,
            age_ns=age,
            age_grace_ns=to_ns(policy.max_age_grace),
            check_ns=check if policy.check is None else to_ns(policy.check),
            close_streams=policy.close_streams,
            count_heartbeats=policy.count_heartbeats,
            goaway=policy.close == "goaway",
            report=policy.close == "report",
            goaway_grace_ns=to_ns(policy.goaway_grace),
            request_ns=_ns(policy.request_timeout),
        )


def _ns(limit: Duration | None) -> int:
    return NEVER if limit is None else to_ns(limit)
