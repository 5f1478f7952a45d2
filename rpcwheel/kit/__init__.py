"""All policies in one object: settings in, channels, servers and interceptors out.

    methods = {"/shop.Orders/Get*": MethodPolicy(idempotent=True)}  # only these are retried
    kit = rpcwheel.Kit(timeout=2.0, retry=RetryPolicy(retry_on={"UNAVAILABLE"}), methods=methods)
    channel = kit.intercept_channel(grpc.insecure_channel(target))
    server = grpc.server(pool, interceptors=kit.server_interceptors())
    kit.close()  # at the end; returns the queued calls that were not delivered

With `heartbeat`, `kit.channel(target)` replaces a dead connection. With `idle`,
`kit.detect_idle(server)` closes idle connections; `kit.detectors` has the running detectors.

With `limit`, a server works on no more calls than it can finish, and refuses the least critical
ones. A server of `grpc` needs `kit.server_executor()` in place of its thread pool.

With a registry, `kit.channel("etcd://127.0.0.1:2379/shop.Orders")` calls the instances of a
service, and `kit.serve(server, publish="etcd://127.0.0.1:2379", service="shop.Orders", port=50051)`
publishes a server while it serves, and stops it in order at SIGTERM.

`Kit.from_file("shop.toml")` and `Kit.from_env()` read the settings from a file and from the
environment (`config.py`), `Kit.from_service_config()` from a service config of gRPC. All settings
are in `docs/policies.md`. `rpcwheel.aio.Kit` is the kit for `grpc.aio`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio, sync
    from .config import settings_schema
    from .policy import KitPolicy
    from .sync import Kit
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".config": "settings_schema",
            ".policy": "KitPolicy",
            ".sync": "Kit",
        },
        submodules="aio sync",
    )

__all__ = ["Kit", "KitPolicy", "settings_schema"]
