"""Client-side load balancing: one channel for all servers of a service.

A `BalancedChannel` has a subchannel for each instance of the service, with a connection of its own.
A picker chooses one that is READY for each call. `update()` sets the instances and changes only
what differs. `rpcwheel.insecure_channel` and `rpcwheel.secure_channel` make one that follows a
registry.

=====================  =============================================================================
`policy.py`            `BalancerPolicy`, `OutlierEjectionPolicy`.
`pickers.py`           Round robin, weighted round robin, weighted random, least request.
`ring_hash.py`         `RingHash`.
`lb_policy.py`         The names of the pickers.
`subchannel.py`        One subchannel; this and the following are for both APIs.
`subchannels.py`       The subchannels of a channel, and their connections.
`subset.py`            Which instances get a subchannel.
`dubbo.py`             Headers and the warm-up of Dubbo's providers.
`tags.py`              Which subchannels calls with a tag of Dubbo's may use.
`picking.py`           Which subchannels are candidates for a call, and which ones connect.
`pending.py`           Calls that wait for a READY subchannel.
`ejection.py`          Outlier ejection and self-preservation.
`health.py`            Health checks of unhealthy and stale subchannels.
`base.py`              The instances, subchannels and state of a `BalancedChannel`.
`channel.py`           `BalancedChannel` for `grpc`.
`aio_channel.py`       `BalancedChannel` for `grpc.aio`.
`subscriptions.py`     Subscriptions to the state of a channel of `grpc`.
`broadcast.py`         `BroadcastChannel` for `grpc`: each call goes to all servers.
`aio_broadcast.py`     `BroadcastChannel` for `grpc.aio`.
`broadcast_base.py`    The part of broadcasts for both APIs, and `BroadcastFailed`.
`aio.py`               The names for `grpc.aio`.
=====================  =============================================================================
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio
    from .broadcast import BroadcastChannel
    from .broadcast_base import BroadcastFailed
    from .channel import BalancedChannel, Subchannel
    from .pickers import LeastRequest, Picker, RoundRobin, WeightedRandom, WeightedRoundRobin
    from .policy import BalancerPolicy, OutlierEjectionPolicy
    from .ring_hash import RingHash
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".broadcast": "BroadcastChannel",
            ".broadcast_base": "BroadcastFailed",
            ".channel": "BalancedChannel Subchannel",
            ".pickers": "LeastRequest Picker RoundRobin WeightedRandom WeightedRoundRobin",
            ".policy": "BalancerPolicy OutlierEjectionPolicy",
            ".ring_hash": "RingHash",
        },
        submodules="aio",
    )

__all__ = [
    "BalancedChannel",
    "BalancerPolicy",
    "BroadcastChannel",
    "BroadcastFailed",
    "LeastRequest",
    "OutlierEjectionPolicy",
    "Picker",
    "RingHash",
    "RoundRobin",
    "Subchannel",
    "WeightedRandom",
    "WeightedRoundRobin",
]
