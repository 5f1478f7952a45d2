"""A grpc.aio server lists and closes connections; run it: python examples/idle_aio.py.

Two clients are connected. One keeps calling. The other is silent, and the server closes its
connection. When it calls again, gRPC reconnects, and the client sees no error.
"""

import asyncio
import sys
import time

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server

from rpcwheel.events import ConnectionClosed, Event, add_sink
from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector
from rpcwheel.transport.aio import ReconnectingChannel

Context = grpc.aio.ServicerContext[Line, Receipt]
IDLE_TIMEOUT, TIME_LIMIT = 6.0, 60.0  # the default of the idle timeout is three minutes


class Audit(AuditServicer):
    """A service that stores lines."""

    async def Push(self, request: Line, context: Context) -> Receipt:  # noqa: D102, N802
        return Receipt(number=1)


def print_closed(event: Event) -> None:
    """Print which connection was closed."""
    if isinstance(event, ConnectionClosed):
        print(f"    closed: {event.peer} after {event.idle_s:.1f} s: {event.reason}")


async def main() -> int:
    """Run the server and both clients, each with a connection of its own."""
    add_sink(print_closed)
    table = ConnectionTable()
    server = grpc.aio.server(interceptors=[table])
    add_AuditServicer_to_server(Audit(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{port}"
    async with (
        IdleConnectionDetector(server, IDLE_TIMEOUT, connections=table, ports=port) as detector,
        ReconnectingChannel(target) as one,
        ReconnectingChannel(target) as other,
    ):
        busy, idle = AuditStub(one), AuditStub(other)
        await idle.Push(Line(text="a line"))
        calls, end = 0, time.monotonic() + TIME_LIMIT
        while not calls or (len(await detector.connections()) > 1 and time.monotonic() < end):
            await busy.Push(Line(text="another line"))
            calls += 1
            await asyncio.sleep(IDLE_TIMEOUT / 5)
        for connection in await detector.connections():
            print(f"    open: {connection.peer}, {connection.user_agent}")
            print(f"    since {connection.connected_at}, {connection.calls_total} calls")
        kept = [connection.calls_total for connection in await detector.connections()]
        print(f"the busy connection was kept: {kept == [calls]}")
        await other.wait_for_state_change(grpc.ChannelConnectivity.READY)  # until it notices
        await idle.Push(Line(text="a line after a while"))
        print("the other client calls again and gets a response")
    await server.stop(None)
    return 0 if kept == [calls] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
