"""Connections that nobody uses are found and closed: a server's side (Dubbo's `CloseTimerTask`).

    from rpcwheel.idle import ConnectionTable, IdleConnectionDetector

    connections = ConnectionTable()
    server = grpc.server(pool, interceptors=[connections])
    port = server.add_insecure_port("[::]:50051")
    detector = IdleConnectionDetector(server, 180.0, connections=connections, ports=port)
    server.start()

    for connection in connections.snapshot():
        print(connection.peer, connection.last_read, connection.streams_open)

Idle is not dead: for peers that are gone, have the server send pings. What is told here is what
calls do. Heartbeats, and the pings of HTTP/2, keep nothing open; a call that is in flight does, a
stream too, unless the policy says otherwise. `IdlePolicy` has the limits: neither read nor written,
not read, not written, too old.

What a connection is, grpc does not say; the process sees it itself, on Linux, for TCP. A connection
is shut after its streams were ended with UNAVAILABLE and the reason; its client connects again when
it next wants something. Only sockets on the server's own ports are touched. Two servers that share
address and port in one process (`SO_REUSEPORT`) can't be told apart.

Give `ConnectionTable` first: what other interceptors do with a call is then seen as part of it.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .entry import Connection
    from .policy import IdlePolicy
    from .sync import ConnectionTable, IdleConnectionDetector
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".entry": "Connection",
            ".policy": "IdlePolicy",
            ".sync": "ConnectionTable IdleConnectionDetector",
        },
        submodules="aio sync",
    )

__all__ = ["Connection", "ConnectionTable", "IdleConnectionDetector", "IdlePolicy"]
