"""Calls of a transport of your own that wait for their answers, with timeouts (`DefaultFuture`).

For a transport whose answers carry the id of their request, `PendingCalls` keeps the calls that
wait (Dubbo's `DefaultFuture`). A `CallFuture` always ends: with the answer, with an error, or with
a `CallTimeout` that says whether the request was sent::

    from rpcwheel.pending import PendingCalls      # or rpcwheel.pending.aio

    calls = PendingCalls()
    future = calls.open(7, timeout=2.0, connection=sock)
    sock.sendall(request)
    calls.sent(7)                             # from now on a timeout is the server's
    ...
    calls.received(7, answer)                 # on the thread that reads
    calls.lost(sock, ConnectionError("gone")) # ends all calls of that socket, at once

A table belongs to the process that made it: a forked child starts with a timer in which nothing
waits, and makes its own table for its own connections.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .core import PendingStats
    from .sync import CallFuture, PendingCalls
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {".core": "PendingStats", ".sync": "CallFuture PendingCalls"},
        submodules="aio sync",
    )

__all__ = ["CallFuture", "PendingCalls", "PendingStats"]
