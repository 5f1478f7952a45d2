"""One channel over many servers: a member for each, and a picker over them: `ClusterChannel`.

A stub made of such a channel calls one of the members at each call. `update()` tells which there
are; it touches only what has changed: new ones are called from then on, those that are gone take no
new calls and end those in flight. A member that can't be reached is not called any more until it
has answered a probe; a call that it did not get goes to another one, unseen by the caller.

`rpcwheel.cluster.aio` has the same for `grpc.aio`. `rpcwheel.insecure_channel` makes
one that follows a registry by itself.

================  ==================================================================================
`core.py`         Which members there are and which is called: pure, for both worlds.
`member.py`       What is known of one member, and what follows from a failed call: pure, too.
`pickers.py`      Round robin, weighted random, least active, consistent hash.
`policy.py`       What a user may set.
`arguments.py`    What both channels are given, checked.
`failed.py`       What a broadcast raises.
`sync.py`         The names for threads.
`_channel.py`     The channel, as one of grpc.
`_fleet.py`       Its members under a lock: they come and go, are down and are probed.
`_tries.py`       How each of its calls finds a member, or another one.
`_journey.py`     A call that its caller holds, on its way to a member.
`_members.py`     Its multi-callables.
`_timeout.py`     A timeout on the best timer there is.
`_watch.py`       Its state, told to whoever subscribes.
`_forking.py`     One call on several members: the first good answer, or all.
`aio.py`          The names for `grpc.aio`.
================  ==================================================================================
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .failed import BroadcastFailed
    from .pickers import ConsistentHash, LeastActive, Picker, RoundRobin, WeightedRandom
    from .policy import ClusterPolicy
    from .sync import BroadcastInvoker, ClusterChannel, ForkingInvoker
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".failed": "BroadcastFailed",
            ".pickers": "ConsistentHash LeastActive Picker RoundRobin WeightedRandom",
            ".policy": "ClusterPolicy",
            ".sync": "BroadcastInvoker ClusterChannel ForkingInvoker",
        },
        submodules="aio sync",
    )

__all__ = [
    "BroadcastFailed",
    "BroadcastInvoker",
    "ClusterChannel",
    "ClusterPolicy",
    "ConsistentHash",
    "ForkingInvoker",
    "LeastActive",
    "Picker",
    "RoundRobin",
    "WeightedRandom",
]
