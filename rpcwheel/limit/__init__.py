"""How many calls a server works on at the same time, which calls wait, and which are refused.

`rpcwheel.Kit(limit="adaptive")` applies it to a server::

    kit = rpcwheel.Kit(limit="adaptive")
    server = grpc.server(kit.server_executor(10), interceptors=kit.server_interceptors())

With `grpc.aio`, the interceptors suffice.

* `LimitPolicy` has the settings; `RatePolicy` those of a rate limit, of servers and of clients.
* `Limiter` decides, without I/O; `AdaptiveLimit` finds the limit.
* `executor` and `aio_interceptor` apply the decisions to a server of `grpc` and of `grpc.aio`.
* `Refusals` reports the start and the end of an overload. `admission` uses it, too.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .executor import ServerExecutor
    from .policy import LimitPolicy
    from .rate import RatePolicy
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {".executor": "ServerExecutor", ".policy": "LimitPolicy", ".rate": "RatePolicy"},
    )

__all__ = ["LimitPolicy", "RatePolicy", "ServerExecutor"]
