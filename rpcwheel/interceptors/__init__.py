"""Interceptors for clients and servers of gRPC, and channels with policies, sync and aio.

Put a policy in front of a channel of yours::

    policy = CallPolicy(
        timeout=2.0,                                                # every call has a deadline
        retry=RetryPolicy(retry_on={"UNAVAILABLE"}),                # of idempotent methods only
        methods={
            "/shop.Orders/Get*": MethodPolicy(idempotent=True),     # may be executed twice
            "/shop.Audit/*": MethodPolicy(failback=FailbackPolicy(retry_on="UNAVAILABLE")),
        },
    )
    channel = intercept_channel(grpc.insecure_channel(target), policy)
    server = grpc.server(pool, interceptors=server_interceptors())  # passes deadlines on

`client_interceptors` is for channels that you intercept yourself; it costs more.

A call gives a whole `grpc.Call` and `grpc.Future`: `.future()`, `.with_call()`, `cancel()`,
metadata, codes and done callbacks work as on the bare channel, and outer interceptors see one call.
If the policies of a method set no more than a deadline, it is gRPC's own call. A response that no
server gave has the code OK, says why in its details, and names its maker in its trailing metadata
(`rpcwheel-answer`).

The policies, in the order in which they act on a call:

1. *Deadline.* The earliest of the caller's `timeout=`, the policy's, and what is left of the call
   that is being served. All attempts share it. A call whose deadline has passed is not made.
2. *Retry* or *hedging*, of methods marked `idempotent`, within the target's budget, and as the
   server asks (`grpc-retry-pushback-ms`). Each further attempt carries its number
   (`x-retry-attempt`, and gRFC A6's `grpc-previous-rpc-attempts`, which gRPC's core removes if its
   own retries are on). A response stream is retried until the caller has a message or metadata of
   it. A request stream is recorded up to `retry.replay_buffer_bytes`, and sent again whole or not
   at all.
3. *Default response* or *failback*, after the last attempt has failed: a default for the caller,
   and with failback a delivery in the background, from a queue of `FailbackQueues`. Never after the
   caller has got messages. A request stream is queued if its end comes within a second.

Canceled calls, and errors without a status (a bug in another interceptor), pass unchanged.

Users' wait objects, predicates and callbacks run on the caller's thread or on a worker, never on
gRPC's or the timer's. If one raises, that is the event `CallbackFailed` and changes no call. If one
blocks, it holds up its own call, and in time others of the same method that have failed.

`rpcwheel.interceptors.aio` has the same for `grpc.aio`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
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
