"""The settings of a registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from pydantic import StrictBool, StrictStr, field_validator, model_validator

from rpcwheel.backoff import Backoff, JitteredWait
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Policy, Seconds, Wait

SWITCHES: Final = frozenset({"yes", "no", "on", "off", "true", "false", "none", "null", "0", "1"})
"""Words that are refused as the directory of snapshots: they are meant as true or false."""


class RegistryPolicy(Policy):
    """Leases, retries and stale instances of a registry. A single number is the `lease_ttl`."""

    short: ClassVar[str | None] = "lease_ttl"

    lease_ttl: Seconds = 15.0
    """Seconds after which the registry removes an instance that is not renewed, because its process
    has died or cannot reach the registry."""

    renew: Seconds | None = None
    """Seconds between renewals, with a random deviation of ±10 %. Each renewal also checks that the
    registry still has all instances of this process. None: a third of `lease_ttl`."""

    timeout: Seconds = 3.0
    """Maximum seconds for one request to the registry."""

    backoff: Wait | None = None
    """The wait before a failed request is retried. The number of retries is not limited. None:
    `{initial = 0.2, max = M}`, where M is the smaller of a third of `lease_ttl` and 30 s."""

    jitter: Seconds | None = None
    """Maximum random delay, in seconds, before a process registers its instances again after the
    registry has lost a lease, a session or all its data. It spreads the requests of many servers.
    None: the smaller of a third of `lease_ttl` and 5 s."""

    stale_timeout: Seconds | None = None
    """How many seconds clients keep stale instances, which the registry no longer lists. The time
    starts when the registry is reachable again, or when more than half of the instances of a
    service have disappeared. None: twice `lease_ttl`."""

    self_preservation: StrictBool = True
    """Whether clients keep stale instances. False: they remove an instance immediately if the
    registry does not list it, even if the list is empty."""

    snapshot: StrictBool | StrictStr = True
    """The directory in which a client stores the instances, and from which it reads them when it
    starts while the registry is unreachable. True: one for each registry in the user's cache
    directory. A path: this directory; if relative, below the working directory when the registry
    is opened. False: none."""

    @field_validator("snapshot")
    @classmethod
    def _check_snapshot(cls, snapshot: bool | str) -> bool | str:
        if snapshot == "":
            raise ConfigurationError("it must be a directory, True or False, not ''")
        if isinstance(snapshot, str) and snapshot.strip().lower() in SWITCHES:
            raise ConfigurationError(
                f"it must be a directory, true or false, not the text {snapshot!r}; write true or "
                "false without quotes (in Python True or False), and a directory of that name "
                f"'./{snapshot}'"
            )
        return snapshot

    @model_validator(mode="after")
    def _renews_in_time(self) -> Self:
        if self.renew is not None and to_ns(self.renew) >= to_ns(self.lease_ttl):
            raise ConfigurationError(
                f"renew ({self.renew}) must be less than lease_ttl ({self.lease_ttl}); otherwise "
                "the registry removes each instance before it is renewed"
            )
        return self


RENEWALS_PER_LEASE: Final = 3
"""How often a lease is renewed while it lasts: one renewal may be lost, as with the clients of
Consul and etcd."""

FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_NS: Final = 30_000_000_000
LEAST_RETRY_NS: Final = 10_000_000
"""A lower bound for every policy: a registry that refuses immediately must not cost a core."""

LONGEST_JITTER_NS: Final = 5_000_000_000
"""Ten thousand instances in this time are 2,000 a second: one small etcd takes 2,400."""

STALE_LEASES: Final = 2
"""One in which other processes notice the loss, and one in which they publish again."""


@dataclass(frozen=True, slots=True)
class RegistryRules:
    """A `RegistryPolicy` in nanoseconds, with the defaults that depend on other settings."""

    lease_ns: int
    renew_interval_ns: int
    timeout_ns: int
    jitter_ns: int
    stale_timeout_ns: int
    self_preservation: bool
    backoff: Backoff
    """The wait after each failure."""
    longest_retry_ns: int
    """A third of the lease, at most 30 s; also taken if the backoff raises or has no end."""

    @classmethod
    def from_policy(cls, policy: RegistryPolicy) -> RegistryRules:
        """Derive them from a policy."""
        lease_ns = to_ns(policy.lease_ttl)
        share_ns = max(1, lease_ns // RENEWALS_PER_LEASE)
        longest_ns = min(share_ns, LONGEST_RETRY_NS)
        usual = JitteredWait(initial=FIRST_RETRY_S, max=to_seconds(longest_ns))

        def given_or(value: Seconds | None, default_ns: int) -> int:
            return default_ns if value is None else to_ns(value)

        return cls(
            lease_ns=lease_ns,
            renew_interval_ns=given_or(policy.renew, share_ns),
            timeout_ns=to_ns(policy.timeout),
            jitter_ns=given_or(policy.jitter, min(share_ns, LONGEST_JITTER_NS)),
            stale_timeout_ns=given_or(policy.stale_timeout, STALE_LEASES * lease_ns),
            self_preservation=policy.self_preservation,
            backoff=Backoff(usual if policy.backoff is None else policy.backoff),
            longest_retry_ns=longest_ns,
        )

    def retry_ns(self, attempt: int, *, elapsed_ns: int, error: BaseException | None) -> int:
        """Return the wait after the `attempt`-th failure in a row; never endless, never 0.

        Calls the user's strategy: not under a lock.
        """
        try:
            delay_ns = self.backoff.next_delay_ns(attempt, elapsed_ns=elapsed_ns, error=error)
        except BaseException:  # noqa: BLE001 - an object of the user; attempts continue
            delay_ns = None
        if delay_ns is None or delay_ns == NEVER:
            delay_ns = self.longest_retry_ns
        return max(delay_ns, LEAST_RETRY_NS)
