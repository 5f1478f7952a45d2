"""What a user may set for registries, and what each setting means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from pydantic import StrictBool, field_validator, model_validator
from tenacity import wait_random_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Policy, Seconds, Wait, checked

__all__ = ["RegistryPolicy", "RegistryRules"]


SWITCHES: Final = frozenset({"yes", "no", "on", "off", "true", "false", "none", "null", "0", "1"})

"""Words that mean no file, whatever language they come from."""


class RegistryPolicy(Policy):
    """How long a registry may believe in an instance, and how it is told again."""

    short: ClassVar[str | None] = "lease_ttl"

    lease_ttl: Seconds = 15.0
    """Seconds after which the registry forgets an instance whose process is gone."""

    renew: Seconds | None = None
    """Seconds between renewals, each of which looks whether all is still there. None: a third of
    the lease."""

    timeout: Seconds = 3.0
    """Seconds that one request to the registry may take."""

    backoff: Wait | None = None
    """How long to wait after a failed request. None: at random up to 0.2 s, then up to twice as
    much each time, at most a third of the lease, or 30 s. There is no limit to the tries."""

    jitter: Seconds | None = None
    """When the registry has forgotten everything, publishing again is spread over so many seconds
    at random, so that a thousand servers don't come at once. None: a third of the lease, at most
    5 s."""

    stale_timeout: Seconds | None = None
    """Seconds that instances which vanish are kept, from when the registry was last seen to have
    lost contact, memory or more than half of a service. None: twice the lease."""

    self_preservation: StrictBool = True
    """Whether instances are held at all; False believes the registry, an empty list too."""

    snapshot: StrictBool | str = True
    """The file that serves a start without the registry. True: one for each registry in the user's
    cache directory. False: none."""

    @field_validator("backoff")
    @classmethod
    def _check_backoff(cls, backoff: object) -> object:
        if backoff is not None:
            checked(Backoff, backoff)
        return backoff

    @field_validator("snapshot")
    @classmethod
    def _check_snapshot(cls, snapshot: bool | str) -> bool | str:
        if snapshot == "":
            raise ConfigurationError("it must be a file, True or False, not ''")
        if isinstance(snapshot, str) and snapshot.strip().lower() in SWITCHES:
            raise ConfigurationError(
                f"it must be a file, true or false, not the text {snapshot!r}; write true or false "
                f"without quotes (in Python True or False), and a file of that name './{snapshot}'"
            )
        return snapshot

    @model_validator(mode="after")
    def _renews_in_time(self) -> Self:
        if self.renew is not None and to_ns(self.renew) >= to_ns(self.lease_ttl):
            raise ConfigurationError(
                f"renew ({self.renew}) must be less than lease_ttl ({self.lease_ttl}), or each "
                "instance is forgotten before it is renewed"
            )
        return self


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
        lease_ns = to_ns(policy.lease_ttl)
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
            hold_ns=HOLD * lease_ns
            if policy.stale_timeout is None
            else to_ns(policy.stale_timeout),
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
