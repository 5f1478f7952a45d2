"""A registry policy's figures: what was left out is worked out here, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tenacity import wait_random_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns, to_seconds

if TYPE_CHECKING:
    from .policy import RegistryPolicy

__all__ = ["RegistryRules"]

SHARE: Final = 3
"""Renewals per lease, so that one may be lost; Consul's and etcd's own clients do the same."""

FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_NS: Final = 30_000_000_000
LONGEST_JITTER_NS: Final = 5_000_000_000
"""Ten thousand instances in so long are 2,000 a second: one small etcd takes 2,400."""

HOLD: Final = 2
"""Leases: one in which the others find out, and one in which they publish again."""

LEAST_RETRY_NS: Final = 10_000_000
"""Whatever the policy says: a dead engine that refuses at once must not cost a core."""


@dataclass(frozen=True, slots=True)
class RegistryRules:
    """What a `RegistryPolicy` means, in nanoseconds."""

    lease_ns: int
    renew_ns: int
    timeout_ns: int
    jitter_ns: int
    hold_ns: int
    backoff: Backoff
    """The wait after each failure."""
    longest_retry_ns: int
    """A third of the lease, at most 30 s; taken too when the backoff raises or has no end."""

    @classmethod
    def of(cls, policy: RegistryPolicy) -> RegistryRules:
        """Work them out."""
        lease_ns = to_ns(policy.lease)
        share_ns = max(1, lease_ns // SHARE)
        longest_ns = min(share_ns, LONGEST_RETRY_NS)
        usual = wait_random_exponential(multiplier=FIRST_RETRY_S, max=to_seconds(longest_ns))
        return cls(
            lease_ns=lease_ns,
            renew_ns=share_ns if policy.renew is None else to_ns(policy.renew),
            timeout_ns=to_ns(policy.timeout),
            jitter_ns=(
                min(share_ns, LONGEST_JITTER_NS) if policy.jitter is None else to_ns(policy.jitter)
            ),
            hold_ns=HOLD * lease_ns if policy.hold is None else to_ns(policy.hold),
            backoff=Backoff(usual if policy.backoff is None else policy.backoff),
            longest_retry_ns=longest_ns,
        )

    def retry_ns(self, attempt: int, *, elapsed_ns: int, error: BaseException | None) -> int:
        """How long to wait after the `attempt`-th failure in a row; never for ever, never 0.

        Calls the user's strategy: not under a lock.
        """
        try:
            delay_ns = self.backoff.next_delay_ns(attempt, elapsed_ns=elapsed_ns, error=error)
        except BaseException:  # noqa: BLE001 - a strategy of the user's; the tries must go on
            delay_ns = None
        if delay_ns is None or delay_ns == NEVER:
            delay_ns = self.longest_retry_ns
        return max(delay_ns, LEAST_RETRY_NS)
