"""Pending calls of your own transport, with timeouts (Dubbo `DefaultFuture`).

For a transport whose responses carry the id of their request. `PendingCalls` keeps the calls that
wait for a response. Each `CallFuture` ends exactly once: with the response, with an error, or with
a `CallTimeout` that says whether the request was sent::

    from rpcwheel.pending import PendingCalls      # or rpcwheel.pending.aio

    calls = PendingCalls()
    future = calls.open(7, timeout=2.0, connection=sock)
    sock.sendall(request)
    calls.sent(7)                             # a timeout from now on is the server's
    ...
    calls.received(7, response)               # on the thread that reads
    calls.lost(sock, ConnectionError("gone")) # fails all calls of that socket at once

A forked child must create its own `PendingCalls` for its own connections; the timeouts of its
parent's calls do not expire there.

`table.py` has what is the same for `sync.py` (threads) and `aio.py` (coroutines).
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio, sync
    from .sync import CallFuture, PendingCalls
    from .table import PendingStats
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {".sync": "CallFuture PendingCalls", ".table": "PendingStats"},
        submodules="aio sync",
    )

__all__ = ["CallFuture", "PendingCalls", "PendingStats"]
