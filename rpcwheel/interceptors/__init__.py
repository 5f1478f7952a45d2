"""Where gRPC's calls come in: client and server interceptors for all four kinds, sync and aio.

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

What comes back from a call is always a whole `grpc.Call` and `grpc.Future`, through timeouts,
retries and failback: `.future()`, `.with_call()`, `cancel()`, metadata, codes and done callbacks
work as on the bare channel, and interceptors outside see one call. Where a method's rules ask for
no more than a deadline, it is grpc's own call. An answer that no server gave has the code OK, says
why in its details, and names who made it in its trailing metadata (`rpcwheel-answer`).

The rules, in the order in which they act on a call:

1. *Deadline.* The earliest of the caller's `timeout=`, the policy's, and what is left of the call
   that is being served. All tries share it; a call whose deadline has passed is not made.
2. *Retry*, within the call: codes of `retry_on`, and only what does no harm, while the target's
   budget lasts, as the server asks (`grpc-retry-pushback-ms`); each retry tells how many tries went
   before (`x-retry-attempt`; gRFC A6's `grpc-previous-rpc-attempts` too, which gRPC's core drops
   where its own retries are on). Response streams only until something of theirs (a
   message, or metadata that is not empty) is in the caller's hands. Request streams are recorded up
   to `retry.replay_buffer_bytes`, and sent again whole or not at all.
3. *Default response* or *failback*, when it has failed for good: a default for the caller, and
   with failback a delivery in the background, from a queue of `FailbackQueues`. Never after
   messages were handed out. A request stream is queued if its end comes within a second.

Cancelled calls, and errors without a status (a bug in another interceptor), pass unchanged.

Users' wait objects, predicates and callbacks run on the caller's thread or on a worker, never on
gRPC's or the timer's. If one raises, that is the event `CallbackFailed` and changes no call. If one
hangs, it holds up its own call, and in time others of the same method that have failed.

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
