"""Publishes a server in registries for as long as it serves: `Publisher`.

::

    with Publisher(server, "etcd://127.0.0.1:2379", "shop.Orders", port=50051):
        server.wait_for_termination()

It starts the server, waits until it serves, and registers its instance in each registry. At the end
it withdraws the instance, waits until clients have noticed, and stops the server, so that a rolling
restart fails no call. `rpcwheel.publisher.aio` has the class for `grpc.aio`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio, sync
    from .sync import Publisher
else:
    __getattr__, __dir__ = lazy_names(__name__, {".sync": "Publisher"}, submodules="aio sync")

__all__ = ["Publisher"]
