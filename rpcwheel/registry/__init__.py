"""Service discovery: servers stay published and clients find them while the registry fails.

::

    with open_registry("etcd://127.0.0.1:2379") as registry:
        instance = ServiceInstance(service="shop.Orders", host="10.0.0.7", port=50051)
        registration = registry.register(instance)
        ...
        snapshot = registry.lookup("shop.Orders")

An instance that was registered stays published until it is unregistered. A registry that cannot be
reached is no error: the request is repeated, with the latest values, until it succeeds. Every third
of the lease the process checks that the registry still has its instances; those that it lost, by an
ended lease or a loss of data, are published again.

A lookup or a subscription gives a `Snapshot` of all instances. A failure never makes it empty:
instances that the registry may have lost by mistake are kept for a while, and while it cannot be
reached, the snapshot files have those of an earlier run.

Modules: `reconciler.py` decides what to send to the registry, `cache.py` which instances count;
`session.py`, `watches.py` and `lookups.py` send the requests on worker threads, through a
`RegistryBackend` (`backend.py` is the contract, `backends/` has the built-in ones). `registry.py`
is the blocking interface, whose names `sync.py` lists, and `aio.py` the one for coroutines.
`rpcwheel.publisher` publishes a server while it serves, and `rpcwheel.resolver` has channels to the
instances of a service.

Requests do not run on the timer's thread or the caller's. Everything that is opened has a `close`,
which takes no longer than `close(timeout)` even if the engine is dead. At the interpreter's exit a
registry that was not closed does nothing, and its instances disappear with their lease. In a forked
child it is closed; open another there.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.errors import (
        InstanceIdConflict,
        NotPublished,
        RegistryClosed,
        RegistryError,
        RegistryRefused,
        RegistryUnavailable,
    )
    from rpcwheel.instance import ServiceInstance, Snapshot

    from . import aio, backend, backends, sync
    from .backend import RegistryBackend
    from .policy import RegistryPolicy
    from .sync import Registration, Registry, Subscription, open_registry
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "rpcwheel.errors": (
                "InstanceIdConflict NotPublished RegistryClosed RegistryError RegistryRefused "
                "RegistryUnavailable"
            ),
            "rpcwheel.instance": "ServiceInstance Snapshot",
            ".policy": "RegistryPolicy",
            ".backend": "RegistryBackend",
            ".sync": "Registration Registry Subscription open_registry",
        },
        submodules="aio backend backends sync",
    )

__all__ = [
    "InstanceIdConflict",
    "NotPublished",
    "Registration",
    "Registry",
    "RegistryBackend",
    "RegistryClosed",
    "RegistryError",
    "RegistryPolicy",
    "RegistryRefused",
    "RegistryUnavailable",
    "ServiceInstance",
    "Snapshot",
    "Subscription",
    "open_registry",
]
