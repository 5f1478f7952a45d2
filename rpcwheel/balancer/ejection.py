"""Outlier ejection, and self-preservation. Decisions without I/O.

* `OutlierEjection` decides when a subchannel whose calls fail is ejected (gRFC A50).
* `SelfPreservation` decides which subchannels stay although the registry no longer lists their
  instances, because it may have lost them (Eureka).

All times are on the timer's clock. The caller holds the lock of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic

from rpcwheel.durations import to_ns

from .subchannel import FAILING_WEIGHT, S

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Mapping

    from rpcwheel.instance import ServiceInstance

    from .policy import OutlierEjectionPolicy
    from .subchannel import SubchannelHealth

FAILURES: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Statuses that show that a server may not work. Every other status is an answer."""

SERVER_ERRORS: Final = frozenset(
    {*FAILURES, "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DATA_LOSS"}
)
"""Statuses whose cause is the server rather than the call: those of failed server spans in the
conventions of OpenTelemetry, and that of an overloaded server."""

UNDECIDED: Final = frozenset({"CANCELLED", ""})
"""Statuses that show neither; "" is a call without a status."""

CANCELED_CALLS: Final = 5
"""The number of canceled calls, without an answer in between, that leads to a health check."""

BY_CHANCE: Final = 1e-8
"""Failures in a row eject a server if they are less probable than this on other servers."""

LOST_NS: Final = 60_000_000_000
"""How long instances that left the registry are remembered for self-preservation. If several
servers are cut off at the same time, their leases end within this time."""


class OutlierEjection:
    """Decides when a subchannel whose calls fail is ejected, and for how long (gRFC A50)."""

    def __init__(self, policy: OutlierEjectionPolicy | None) -> None:
        self._policy = policy

    def count_failure(self, health: SubchannelHealth, now_ns: int) -> str:
        """Count a failed call. Returns the failures that cause an ejection; "" for none."""
        policy = self._policy
        if policy is None:
            return ""
        health.failures += 1
        health.failing += (1.0 - health.failing) * FAILING_WEIGHT
        if now_ns - health.window_ns >= to_ns(policy.interval):
            health.window_ns = now_ns
            health.window_failures = 0
            health.window_successes = health.successes
        health.window_failures += 1
        calls = health.window_calls()
        count, percentage = policy.consecutive_failures, policy.failure_percentage
        if count is not None and health.failures >= count:
            return f"{health.failures}"
        if percentage is None or calls < policy.min_calls:
            return ""
        over = health.window_failures * 100 >= percentage * calls
        return f"{health.window_failures} of {calls}" if over else ""

    def count_canceled(self, health: SubchannelHealth) -> bool:
        """Count a canceled call. Returns whether the subchannel is to be checked now.

        With hedging, the attempts on a frozen server do not fail: they are canceled when another
        attempt is answered.
        """
        if self._policy is None:
            return False
        if health.canceled_since != health.successes:
            health.canceled_since, health.canceled = health.successes, 0
        health.canceled += 1
        few = health.canceled < CANCELED_CALLS
        if few or health.suspected or health.unhealthy_ns is not None:
            return False
        health.canceled, health.suspected = 0, True
        return True

    def eject(
        self,
        health: SubchannelHealth,
        all_health: Collection[SubchannelHealth],
        used: Iterable[SubchannelHealth],
        now_ns: int,
    ) -> int | None:
        """Eject a subchannel and return for how long; None if too many are, or it is no outlier.

        `all_health` is the health of all subchannels of the channel, `used` that of the
        subchannels which get calls.
        """
        policy = self._policy
        ejected = sum(other.ejected for other in all_health) + 1
        if policy is None or ejected * 100 > policy.max_ejection_percent * len(all_health):
            return None
        if not _is_outlier(policy, health, used):
            return None
        max_ns = to_ns(policy.max_ejection_time)
        if now_ns - health.recovered_ns >= max_ns:
            health.ejections = 0
        health.ejections += 1
        health.ejected = True
        return min(max_ns, to_ns(policy.base_ejection_time) * health.ejections)


def _is_outlier(
    policy: OutlierEjectionPolicy, health: SubchannelHealth, used: Iterable[SubchannelHealth]
) -> bool:
    """Whether the calls of a subchannel fail more often than those of others that get calls.

    If something fails that all servers need, some calls fail on each of them, and a few in a row do
    so by chance. Without the servers that are ejected for that, the others would get more calls.
    The quarter of the others with the fewest failures is the measure: half of the servers may be
    cut off at the same time.
    """
    shares = sorted(
        other.share_of_failures() for other in used if other is not health and not other.ejected
    )
    usual = shares[(len(shares) - 1) // 4] if shares else 0.0
    if usual**health.failures <= BY_CHANCE:
        return True
    calls = health.window_calls()
    return calls >= policy.min_calls and health.window_failures >= 2 * usual * calls


class SelfPreservation(Generic[S]):
    """Decides which subchannels stay, as stale, after their instances left the registry.

    Instances that were lost shortly before are remembered: if all servers are cut off from the
    registry, their leases end one after the other.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.grace_ns: int | None = None
        """How long after the last change of what is stale the stale subchannels that answer are
        removed; never while they are the majority. None (no registry, or one without
        `self_preservation`): subchannels that an update does not list are removed at once, unless
        it lists nothing."""
        self._changed_ns = 0
        self._lost: dict[str, tuple[int, ServiceInstance]] = {}  # with the time

    def kept(
        self,
        present: Mapping[str, S],
        listed: Collection[str],
        expired: Container[str],
        now_ns: int,
    ) -> tuple[dict[str, S], list[ServiceInstance]]:
        """Return the subchannels to keep as stale, and instances that become stale ones again.

        The registry lists the ids in `listed` now. It has lost those in `expired`, and not by a
        withdrawal.
        """
        if not self._enabled:
            return {}, []
        if not listed:
            kept = {
                id_: subchannel
                for id_, subchannel in present.items()
                if subchannel.instance.status != "DRAINING"
            }
            self.remember_lost((), kept, now_ns)
            lost, self._lost = self._lost, {}
            return kept, [instance for _, instance in lost.values()]
        if self.grace_ns is None:
            return {}, []
        return {
            id_: subchannel
            for id_, subchannel in present.items()
            if (subchannel.stale or id_ in expired)
            and id_ not in listed
            and subchannel.instance.status != "DRAINING"
        }, []

    def remember_lost(
        self, lost: Iterable[ServiceInstance], present: Container[str], now_ns: int
    ) -> None:
        """Remember instances that left without DRAINING, for `LOST_NS`; forget those `present`."""
        self._lost = {
            id_: (since_ns, instance)
            for id_, (since_ns, instance) in self._lost.items()
            if id_ not in present and now_ns - since_ns < LOST_NS
        }
        self._lost |= {
            instance.id: (now_ns, instance) for instance in lost if instance.status != "DRAINING"
        }

    def stale_changed(self, now_ns: int) -> None:
        """Note that a subchannel became or ceased to be stale."""
        self._changed_ns = now_ns

    def may_expire(self, present: Mapping[str, S], now_ns: int) -> bool:
        """Whether all stale subchannels are to be removed, although they answer.

        Not as long as most subchannels are stale: the few others would get all calls. And not
        before the servers that can be published again have been.
        """
        stale = sum(subchannel.stale for subchannel in present.values())
        if self.grace_ns is None or 2 * stale > len(present):
            return False
        return now_ns - self._changed_ns >= self.grace_ns
