"""Every call ends in time: one deadline over all its attempts, passed on to what it calls.

    from rpcwheel import current_deadline, deadline_scope

    with deadline_scope(2.0):                 # all calls in here share two seconds
        order = orders.Get(request)
        stock = stocks.Get(order.item)        # gets what is left

A server with rpcwheel's interceptors does the same for each call that it serves: the client's
deadline becomes `current_deadline()`, and calls made meanwhile get what is left of it.

For a transport of your own, whose answers carry the id of their request, `PendingCalls` keeps the
calls that wait (Dubbo's `DefaultFuture`). A `CallFuture` always ends: with the answer, with an
error, or with a `CallTimeout` that says who was slow::

    from rpcwheel.deadline import PendingCalls     # or rpcwheel.deadline.aio

    calls = PendingCalls()
    future = calls.open(7, timeout=2.0, connection=sock)
    sock.sendall(request)
    calls.sent(7)                             # from now on it is the server that is slow
    ...
    calls.received(7, answer)                 # on the thread that reads
    calls.lost(sock, ConnectionError("gone")) # ends all calls of that socket, at once

A table belongs to the process that made it: a forked child starts with a timer in which nothing
waits, and makes its own table for its own connections.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .context import Deadline, current_deadline, deadline_scope
    from .pending import PendingStats
    from .policy import DeadlinePolicy, RetryPolicy
    from .sync import CallFuture, PendingCalls
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".context": "Deadline current_deadline deadline_scope",
            ".pending": "PendingStats",
            ".policy": "DeadlinePolicy RetryPolicy",
            ".sync": "CallFuture PendingCalls",
        },
        submodules="aio sync",
    )

__all__ = [
    "CallFuture",
    "Deadline",
    "DeadlinePolicy",
    "PendingCalls",
    "PendingStats",
    "RetryPolicy",
    "current_deadline",
    "deadline_scope",
]
