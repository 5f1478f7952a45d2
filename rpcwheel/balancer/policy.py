"""Settings of a balanced channel."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field, StrictBool, StrictInt, StrictStr

from rpcwheel.backoff import JitteredWait
from rpcwheel.policy import Delay, Number, Policy, Seconds, Wait, or_short

DEFAULT_HEALTH_CHECK_BACKOFF: Final = JitteredWait(initial=0.5, max=10.0)
"""Half of it is random, so that the clients of an unhealthy server do not probe it together."""


class OutlierEjectionPolicy(Policy):
    """When a server whose calls fail is ejected: for some time it gets no calls (gRFC A50).

    A server is ejected only if its calls fail more often than those of the other servers. If no
    other server is READY, an ejected server still gets calls. A call that ends with UNAVAILABLE or
    DEADLINE_EXCEEDED is a failure. Any other status shows that the server answers. A call that
    fails because its connection broke is not counted. After the ejection time, a server gets calls
    again when it answers a health check, or immediately if it is not connected.
    """

    short: ClassVar[str | None] = "consecutive_failures"

    consecutive_failures: Annotated[StrictInt, Field(ge=1)] | None = 5
    """Number of consecutive failures after which a server is ejected. None: off."""

    failure_percentage: Annotated[Number, Field(gt=0, le=100)] | None = 85.0
    """Percentage of failed calls in one `interval` at which a server is ejected. None: off."""

    min_calls: Annotated[StrictInt, Field(ge=1)] = 50
    """`failure_percentage` applies only if the server got at least this many calls in the
    `interval`."""

    interval: Seconds = 10.0
    """Seconds over which `failure_percentage` is measured."""

    base_ejection_time: Seconds = 10.0
    """Length of the first ejection of a server in seconds. The second one is twice as long, the
    third one three times as long, and so on."""

    max_ejection_time: Seconds = 300.0
    """Maximum length of an ejection in seconds. If a server was not ejected for this long, its next
    ejection counts as the first."""

    max_ejection_percent: Annotated[Number, Field(ge=0, le=100)] = 50.0
    """Maximum percentage of servers that are ejected at the same time. With 50, one of three
    servers can be ejected, and a single server never."""


class BalancerPolicy(Policy):
    """The settings of a balanced channel."""

    short: ClassVar[str | None] = "drain_timeout"

    pick_timeout: Delay = 5.0
    """How many seconds a call waits for a READY subchannel, while a subchannel is connecting or the
    instances are not known yet. 0: the call fails immediately. A call with `wait_for_ready` waits
    until its deadline instead."""

    drain_timeout: Delay | None = 30.0
    """How many seconds calls may continue after their instance was removed. After that they end
    with UNAVAILABLE. None: no limit."""

    health_check_backoff: Wait | None = None
    """The wait before each health check of an unhealthy subchannel. None:
    `{initial = 0.5, max = 10}`."""

    health_check_timeout: Seconds = 5.0
    """Maximum seconds for one health check."""

    slow_start: Seconds | None = None
    """Seconds in which the weight of an instance that has just started grows to its full value
    (Dubbo `warmup`, 600 there). None: it has its full weight immediately."""

    zone: StrictStr = ""
    """The preferred zone. Instances of other zones get calls only if none in this zone is READY.
    "": no preference."""

    subset_size: Annotated[StrictInt, Field(ge=1)] | None = 32
    """Maximum number of instances to which a channel connects. If there are more, it chooses at
    random (gRFC A68). If `zone` alone has enough instances, up to a quarter of the chosen ones are
    still from other zones, as a fallback. If providers of Dubbo have
    tags, the maximum applies to each tag. None: no limit. `RingHash` connects to all instances."""

    outlier_ejection: Annotated[OutlierEjectionPolicy, or_short(OutlierEjectionPolicy)] | None = (
        OutlierEjectionPolicy()
    )
    """When to stop sending calls to a server whose calls fail, or are all canceled while it answers
    no health check. None: never. A number sets `consecutive_failures`."""

    self_preservation: StrictBool = True
    """If the list of instances becomes empty, or the registry may have lost most of them, whether
    the channel keeps the instances that still answer (Eureka). A kept instance is removed when its
    connection fails or it does not answer a health check. DRAINING instances are not kept, because
    they have announced their end."""


def checked_policy(policy: object) -> BalancerPolicy:
    """Return the policy; for None the defaults.

    Raises:
        TypeError: `policy` is not a `BalancerPolicy`.
    """
    if policy is None:
        return BalancerPolicy()
    if not isinstance(policy, BalancerPolicy):
        raise TypeError(f"balancer_policy must be a BalancerPolicy or None, not {policy!r}")
    return policy
