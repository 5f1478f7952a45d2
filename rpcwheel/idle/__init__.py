"""Connections of a gRPC server: lists them, and closes those that are not used.

    from rpcwheel.idle import ConnectionTable, IdleConnectionDetector

    connections = ConnectionTable()
    server = grpc.server(pool, interceptors=[connections])
    port = server.add_insecure_port("[::]:50051")
    detector = IdleConnectionDetector(server, 180.0, connections=connections, ports=port)
    server.start()

    for connection in detector.connections():
        print(connection.peer, connection.user_agent, connection.state, connection.idle_s)

`IdlePolicy` has the limits: no message read or written, not read, not written, too old (Dubbo's
`CloseTimerTask`). Only calls count as use: heartbeats and HTTP/2 pings do not keep a connection
open. A call in flight does, and an open stream too, unless the policy says otherwise. Bytes that
arrive without a pause of 0.1 s keep a connection open as well: they may be a call. Idle does not
mean dead: to find clients that are frozen or cut off, use keepalive pings of the server.

gRPC does not expose its connections. They are found among the sockets of the process, on Linux, for
TCP. A connection is shut down after its streams were ended with UNAVAILABLE and the reason; its
client reconnects for its next call. Only sockets on the server's own ports are touched. Two servers
that share address and port in one process (`SO_REUSEPORT`) cannot be distinguished.

The shutdown is not preceded by GOAWAY. A client that calls in the same moment may get UNAVAILABLE.
If that matters, use gRPC's `max_connection_idle` and `max_connection_age`
(`rpcwheel.options.server_options`).

Give `ConnectionTable` as the first interceptor: what others do with a call then counts as a part of
it.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio, sync
    from .policy import IdlePolicy
    from .sync import ConnectionTable, IdleConnectionDetector
    from .table import Connection, ConnectionState, TlsIdentity
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".policy": "IdlePolicy",
            ".sync": "ConnectionTable IdleConnectionDetector",
            ".table": "Connection ConnectionState TlsIdentity",
        },
        submodules="aio sync",
    )

__all__ = [
    "Connection",
    "ConnectionState",
    "ConnectionTable",
    "IdleConnectionDetector",
    "IdlePolicy",
    "TlsIdentity",
]
