"""Services that stay published, and clients that find them, whatever happens to the registry.

::

    with open_registry("etcd://127.0.0.1:2379") as registry:
        instance = ServiceInstance(service="shop.Orders", host="10.0.0.7", port=50051)
        registration = registry.register(instance)
        ...
        snapshot = registry.lookup("shop.Orders")

What is registered is a wish that stays until it is withdrawn. An engine that can't be reached is no
error: it is told again, by the latest wish, until it knows. Each third of the lease it is asked
whether it still does; what it has lost, by an expired lease, a restart or a wipe, is published
again, spread over some seconds at random where all servers lose it at once.

What is seen is a `Snapshot` of all instances. A failure never makes it empty: what the registry has
lost is held for a while, and what an earlier run saw is read from a file while it can't be reached.

Which part does what: `core.py` decides what to tell the engine, `seen.py` what to believe of it;
`session.py` and `watches.py` make the requests, on worker threads, through a `RegistryBackend`
(`backend.py`: the contract; `backends/`: ours; yours by an entry point); `face.py` is what users
call, and blocks. On it stand `publisher.py`, which publishes a server while it serves, and
`resolver.py`, which updates the channels of `resolved_channel.py` to a service by its name. Their
variants for coroutines are called `aio_...`: the registry's awaits the blocking one, and both kinds
of channels have the same resolver. `sync.py` and `aio.py` have the names of either world.

Nothing runs on the timer's thread or the caller's; each thing that is open is closed, and a dead
engine keeps nobody from that for longer than `close(timeout)`.

Not done at the interpreter's exit or in a forked child: a registry that was not closed is forgotten
by the engine when its lease runs out, and in a child it is closed (open another there).
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.instance import ServiceInstance, Snapshot

    from .backend import RegistryBackend
    from .policy import RegistryPolicy
    from .sync import (
        Publisher,
        Registration,
        Registry,
        Subscription,
        insecure_channel,
        open_registry,
        secure_channel,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "rpcwheel.instance": "ServiceInstance Snapshot",
            ".policy": "RegistryPolicy",
            ".backend": "RegistryBackend",
            ".sync": (
                "Publisher Registration Registry Subscription insecure_channel "
                "open_registry secure_channel"
            ),
        },
        submodules="aio backend backends sync",
    )

__all__ = [
    "Publisher",
    "Registration",
    "Registry",
    "RegistryBackend",
    "RegistryPolicy",
    "ServiceInstance",
    "Snapshot",
    "Subscription",
    "insecure_channel",
    "open_registry",
    "secure_channel",
]
