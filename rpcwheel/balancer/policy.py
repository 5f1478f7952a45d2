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
    """When a server whose calls fail is ejected, so that it gets no calls for a time (gRFC A50).

    Calls that end with UNAVAILABLE or DEADLINE_EXCEEDED count as failures. Any other status shows
    that the server works. A call that fails because its connection breaks does not count. After
    the ejection time a server gets calls again as soon as it answers a health check, or at once if
    it has no connection.
    """

    short: ClassVar[str | None] = "consecutive_failures"

    consecutive_failures: Annotated[StrictInt, Field(ge=1)] | None = 5
    """The number of failures without a success in between that ejects a server. None: no limit."""

    failure_percentage: Annotated[Number, Field(gt=0, le=100)] | None = 85.0
    """The share of failures, in percent of the calls of one `interval`, that ejects a server. None:
    no limit."""

    min_calls: Annotated[StrictInt, Field(ge=1)] = 50
    """The number of calls in one `interval` from which on `failure_percentage` applies."""

    interval: Seconds = 10.0
    """The seconds for which calls are counted for `failure_percentage`."""

    base_ejection_time: Seconds = 10.0
    """The seconds of the first ejection of a server. The second lasts twice as long, and so on."""

    max_ejection_time: Seconds = 300.0
    """The maximum seconds of an ejection. After as long without an ejection, the next one counts as
    the first."""

    max_ejection_percent: Annotated[Number, Field(ge=0, le=100)] = 50.0
    """The share of servers, in percent, that may be ejected at the same time. Rounded down: one of
    three servers, none of one server."""


class BalancerPolicy(Policy):
    """The settings of a balanced channel."""

    short: ClassVar[str | None] = "drain_timeout"

    pick_timeout: Delay = 5.0
    """The maximum seconds that a call waits for a READY subchannel, while a subchannel is
    connecting or the instances are not known yet. 0: the call fails at once. The deadline of the
    call is a limit too; a call with `wait_for_ready` has only this limit."""

    drain_timeout: Delay | None = 30.0
    """The seconds that calls may continue after their instance was removed. Then they end with
    UNAVAILABLE. None: no limit."""

    health_check_backoff: Wait | None = None
    """The wait before each health check of an unhealthy subchannel. None: a random time up to 0.5 s
    before the first check, up to twice as much before each further one, at most 10 s."""

    health_check_timeout: Seconds = 5.0
    """The timeout of a health check in seconds."""

    slow_start: Seconds | None = None
    """The seconds in which the weight of an instance that has just started grows to its full value
    (Dubbo `warmup`, 600 there). None: it has its full weight at once."""

    zone: StrictStr = ""
    """The preferred zone. Instances of other zones get calls only if none of this zone is READY.
    "": no preference."""

    subset_size: Annotated[StrictInt, Field(ge=1)] | None = 32
    """The maximum number of instances that a channel connects to, chosen at random for each channel
    (gRFC A68). With `zone`, a quarter of them may be of other zones, for failover. None: no limit.
    `RingHash` always connects to all."""

    outlier_ejection: Annotated[OutlierEjectionPolicy, or_short(OutlierEjectionPolicy)] | None = (
        OutlierEjectionPolicy()
    )
    """When a server gets no calls for a time, because its calls fail, or because they are all
    canceled and it answers no health check. None: never. A number sets `consecutive_failures`."""

    self_preservation: StrictBool = True
    """Whether an update that removes all instances keeps those that still answer (Eureka). Such an
    instance is removed when its connection fails or it does not answer a health check. DRAINING
    instances are not kept, because they have announced their end."""


def checked_policy(policy: object) -> BalancerPolicy:
    """Return the policy; for None the defaults.

    Raises:
        TypeError: `policy` is not a `BalancerPolicy`.
    """
    if policy is None:
        return BalancerPolicy()
    if not isinstance(policy, BalancerPolicy):
        raise TypeError(f"policy must be a BalancerPolicy or None, not {policy!r}")
    return policy
