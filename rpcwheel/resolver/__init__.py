"""Channels by name: from a target to the instances of a service, and to their subchannels.

::

    with insecure_channel("etcd://127.0.0.1:2379/shop.Orders") as channel:
        stub = OrdersStub(channel)

The target names a service in a registry, a list of addresses, or anything that gRPC resolves. The
channel follows the registry and balances the calls over all instances. `rpcwheel.resolver.aio` has
the functions for `grpc.aio`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio, sync
    from .sync import insecure_channel, secure_channel
else:
    __getattr__, __dir__ = lazy_names(
        __name__, {".sync": "insecure_channel secure_channel"}, submodules="aio sync"
    )

__all__ = ["insecure_channel", "secure_channel"]
