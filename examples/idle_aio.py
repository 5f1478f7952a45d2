"""A server of aio closes what does nothing; run it: python examples/idle_aio.py.

Two clients are connected. One goes on calling, the other falls silent, and its connection is closed
from the server's side. When it calls again, gRPC connects again: it sees no error.
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
IDLE, PATIENCE = 1.0, 10.0  # three minutes, if nothing is said


class Audit(AuditServicer):
    """Yours does more."""

    async def Push(self, request: Line, context: Context) -> Receipt:  # noqa: D102, N802
        return Receipt(number=1)


def told(event: Event) -> None:
    """Print what was closed."""
    if isinstance(event, ConnectionClosed):
        print(f"    closed: {event.peer} after {event.idle_s:.1f} s: {event.reason}")


async def main() -> int:
    """Be the server and both clients, each with a connection of its own."""
    add_sink(told)
    connections = ConnectionTable()
    server = grpc.aio.server(interceptors=[connections])
    add_AuditServicer_to_server(Audit(), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with (
        IdleConnectionDetector(server, IDLE, connections=connections),
        ReconnectingChannel(target) as one,
        ReconnectingChannel(target) as other,
    ):
        busy, idle = AuditStub(one), AuditStub(other)
        await idle.Push(Line(text="for now, this is all"))
        calls, end = 0, time.monotonic() + PATIENCE
        while not calls or (len(connections.snapshot()) > 1 and time.monotonic() < end):
            await busy.Push(Line(text="and another"))
            calls += 1
            await asyncio.sleep(IDLE / 5)
        kept = [connection.calls for connection in connections.snapshot()]
        print(f"the busy connection was kept: {kept == [calls]}")
        await other.wait_for_state_change(grpc.ChannelConnectivity.READY)  # until it has heard
        await idle.Push(Line(text="here again"))
        print("the other client calls again, and is answered")
    await server.stop(None)
    return 0 if kept == [calls] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
