"""A server closes the connection that does nothing; run it: python examples/idle.py.

Two clients are connected. One goes on calling, the other falls silent, and its connection is closed
from the server's side. When it calls again, gRPC connects again: it sees no error.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server

from rpcwheel.events import ConnectionClosed, Event, add_sink
from rpcwheel.idle import ConnectionTable, IdleConnectionDetector
from rpcwheel.transport import ReconnectingChannel

IDLE, PATIENCE = 1.0, 10.0  # three minutes, if nothing is said


class Audit(AuditServicer):
    """Yours does more."""

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: D102, N802
        return Receipt(number=1)


def told(event: Event) -> None:
    """Print what was closed."""
    if isinstance(event, ConnectionClosed):
        print(f"    closed: {event.peer} after {event.idle_s:.1f} s: {event.reason}")


def main() -> int:
    """Be the server and both clients, each with a connection of its own."""
    add_sink(told)
    connections = ConnectionTable()
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[connections])
    add_AuditServicer_to_server(Audit(), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with (
        IdleConnectionDetector(server, IDLE, connections=connections),
        ReconnectingChannel(target) as one,
        ReconnectingChannel(target) as other,
    ):
        busy, idle = AuditStub(one), AuditStub(other)
        idle.Push(Line(text="for now, this is all"))
        calls, end = 0, time.monotonic() + PATIENCE
        while not calls or (len(connections.snapshot()) > 1 and time.monotonic() < end):
            busy.Push(Line(text="and another"))
            calls += 1
            time.sleep(IDLE / 5)
        kept = [connection.calls for connection in connections.snapshot()]
        print(f"the busy connection was kept: {kept == [calls]}")
        while other.get_state() is not grpc.ChannelConnectivity.IDLE:
            time.sleep(0.01)  # it has not heard of it yet
        idle.Push(Line(text="here again"))
        print("the other client calls again, and is answered")
    server.stop(None).wait()
    return 0 if kept == [calls] else 1


if __name__ == "__main__":
    sys.exit(main())
