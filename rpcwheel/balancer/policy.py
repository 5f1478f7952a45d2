"""Settings of a balanced channel."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field, StrictBool, StrictInt, StrictStr
from tenacity import wait_random_exponential

from rpcwheel.policy import Delay, Number, Policy, Seconds, Wait, or_short

__all__ = [
    "DEFAULT_HEALTH_CHECK_BACKOFF",
    "BalancerPolicy",
    "OutlierEjectionPolicy",
    "checked_policy",
]

DEFAULT_HEALTH_CHECK_BACKOFF: Final = wait_random_exponential(multiplier=0.5, max=10)
"""Full jitter, so that the clients of an unhealthy server do not probe it at the same time."""


class OutlierEjectionPolicy(Policy):
    """When a server whose calls fail is ejected: it gets no calls for a while (gRFC A50).

    Calls that end with UNAVAILABLE or DEADLINE_EXCEEDED count as failures. Any other status is an
    answer, which shows that the server works. A call that fails because its connection broke does
    not count: the state of the connection shows that. When its time is over, a server is taken back
    as soon as it answers a health check, or at once if it has no connection by then.
    """

    short: ClassVar[str | None] = "consecutive_failures"

    consecutive_failures: Annotated[StrictInt, Field(ge=1)] | None = 5
    """So many failures without a success in between eject a server. None: they do not."""

    failure_percentage: Annotated[Number, Field(gt=0, le=100)] | None = 85.0
    """A share of failures, in percent of the calls of one `interval`, that ejects a server. None:
    none does."""

    min_calls: Annotated[StrictInt, Field(ge=1)] = 50
    """With fewer calls in the interval `failure_percentage` does not apply."""

    interval: Seconds = 10.0
    """Seconds over which `failure_percentage` is counted."""

    base_ejection_time: Seconds = 10.0
    """Seconds that a server is ejected for the first time; for the second time twice as many, and
    so on."""

    max_ejection_time: Seconds = 300.0
    """Seconds that a server is ejected at most. After as long without an ejection the count begins
    anew."""

    max_ejection_percent: Annotated[Number, Field(ge=0, le=100)] = 50.0
    """The share of the servers, in percent, that may be ejected at the same time. Rounded down: of
    three servers one, of a single server none."""


class BalancerPolicy(Policy):
    """How a balanced channel treats its subchannels."""

    short: ClassVar[str | None] = "drain_timeout"

    pick_timeout: Delay = 5.0
    """Seconds that a call waits at most until a subchannel is READY, while one is connecting or the
    instances are not known yet. At most until the call's deadline. 0: it fails at once. A call with
    `wait_for_ready` waits until its deadline."""

    drain_timeout: Delay | None = 30.0
    """Seconds that calls may go on after their instance was removed. Then they are ended with
    UNAVAILABLE. None: as long as they take."""

    health_check_backoff: Wait | None = None
    """The wait before each health check of an unhealthy subchannel. None: random, up to 0.5 s
    before the first one, up to twice as much before each further one, at most 10 s."""

    health_check_timeout: Seconds = 5.0
    """Seconds that a health check may take."""

    slow_start: Seconds | None = None
    """Seconds in which the weight of an instance that has just started grows to its full value
    (Dubbo `warmup`, there 600). None: the weight is full at once."""

    zone: StrictStr = ""
    """Instances of this zone are preferred: others get calls only if none of it is READY. "": no
    preference."""

    subset_size: Annotated[StrictInt, Field(ge=1)] | None = 32
    """With more instances the channel connects to so many of them, chosen at random for each
    channel (gRFC A68). With `zone`, a quarter of them may be of other zones, to fail over to. None:
    to all. `RingHash` always has all."""

    outlier_ejection: Annotated[OutlierEjectionPolicy, or_short(OutlierEjectionPolicy)] | None = (
        OutlierEjectionPolicy()
    )
    """When a server whose calls fail, or are all canceled while it answers no health check, gets no
    calls for a while. None: never. A number stands for `consecutive_failures`."""

    self_preservation: StrictBool = True
    """Whether an update that removes all instances keeps those that still answer (Eureka). Each of
    them is removed when its connection fails or it does not answer a health check. Instances that
    were DRAINING are not kept: a server that is withdrawn announces its end so."""


def checked_policy(policy: object) -> BalancerPolicy:
    """Return it, or the defaults for None.

    Raises:
        TypeError: It is no `BalancerPolicy`.
    """
    if policy is None:
        return BalancerPolicy()
    if not isinstance(policy, BalancerPolicy):
        raise TypeError(f"policy must be a BalancerPolicy or None, not {policy!r}")
    return policy
