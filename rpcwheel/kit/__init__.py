"""All of it in one object: settings in, interceptors for your channels and servers out.

    methods = {"/shop.Orders/Get*": MethodPolicy(idempotent=True)}  # only these are retried
    kit = rpcwheel.Kit(timeout=2.0, retry=RetryPolicy(retry_on={"UNAVAILABLE"}), methods=methods)
    channel = grpc.intercept_channel(grpc.insecure_channel(target), *kit.client_interceptors())
    server = grpc.server(pool, interceptors=kit.server_interceptors())
    kit.close()                              # at the end: [] if every queued call was delivered

With `heartbeat` there is `kit.channel(target)`, whose connection is replaced when it is dead, and
with `idle` there is `kit.detect_idle(server)`, which closes connections that nobody uses.

By name: `kit.channel("etcd://127.0.0.1:2379/shop.Orders")` follows a registry, and
`kit.serve(server, publish="etcd://127.0.0.1:2379", service="shop.Orders", port=50051)` has a server
published while it serves, and ends it in order at SIGTERM.

`Kit.from_file("shop.toml")` and `Kit.from_env()` take the settings from where operators keep them;
`config.py` has the rules, `docs/policies.md` every setting. For `grpc.aio` there is
`rpcwheel.aio.Kit`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
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
