"""Interceptors for clients and servers of gRPC, and channels with policies, sync and aio.

Apply policies to an existing channel::

    policy = CallPolicy(
        timeout=2.0,                                                # maximum duration
        retry=RetryPolicy(retry_on={"UNAVAILABLE"}),                # idempotent methods only
        methods={
            "/shop.Orders/Get*": MethodPolicy(idempotent=True),     # may be executed twice
            "/shop.Audit/*": MethodPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE")),
        },
    )
    channel = intercept_channel(grpc.insecure_channel(target), policy)
    server = grpc.server(pool, interceptors=server_interceptors())  # propagates deadlines

`client_interceptors` is for channels that you intercept yourself; it costs more.

Each call is a full `grpc.Call` and `grpc.Future`: `.future()`, `.with_call()`, `cancel()`,
metadata, codes and done-callbacks work as on a channel without policies, and outer interceptors see
one call. If a method has only a deadline, the call is gRPC's own. A response that is not from a
server has the code OK, the reason in its details, and its source in its trailing metadata
(`rpcwheel-answer`).

The policies apply to a call in this order:

1. *Deadline.* The earliest of the caller's `timeout=`, the policy's timeout, and the deadline of
   the call that is being served. All attempts share it. If it has passed, the call is not sent.
2. *Retry* or *hedging*, for methods that are marked `idempotent` (and for calls that a server of
   rpcwheel has refused before their handlers), within the retry budget of the target, and with the
   pushback of the server (`grpc-retry-pushback-ms`). Attempts after the first carry the number of
   previous ones (`x-retry-attempt`, and `grpc-previous-rpc-attempts` of gRFC A6, which gRPC's core
   removes if its own retries are enabled). A response stream is retried only before the caller has
   received a message or metadata. A request stream is buffered up to `retry.replay_buffer_bytes`,
   and is retried only if the buffer has all of it.
3. *Default response* or *failback*, after the last attempt has failed: the caller gets a default,
   and with failback the call is delivered in the background, from a queue of `FailbackQueues`. Not
   after the caller has received messages. A request stream is queued if it ends within a second.

Canceled calls, and errors without a status (a bug in another interceptor), are not changed.

On a server, these apply before the handler of a call, in this order:

1. *Limit*, if the policy has one. The call waits until it may run, or is refused; with `grpc` in
   the executor of the server, `rpcwheel.limit.ServerExecutor`, before it takes a thread.
2. *Counts*, while metrics are on. Refused calls are counted too.
3. *Deadline*. If it has passed, the call is refused. Otherwise the deadline and the criticality are
   set, which the calls of the handler inherit.
4. *Slow calls* are reported while the handler runs.

Users' wait objects, predicates and callbacks run on the caller's thread or on a worker, never on
gRPC's threads or the timer's. If one raises, the event `CallbackFailed` is emitted and the call is
not affected. If one blocks, it delays its own call and other failed calls of the same method.

`rpcwheel.interceptors.aio` has the same functions for `grpc.aio`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio, sync
    from .sync import FailbackQueues, client_interceptors, intercept_channel, server_interceptors
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".sync": "FailbackQueues client_interceptors intercept_channel server_interceptors",
        },
        submodules="aio sync",
    )

__all__ = [
    "FailbackQueues",
    "client_interceptors",
    "intercept_channel",
    "server_interceptors",
]
