"""The server of overload.py: a separate process that finishes 80 calls per second."""

import sys
import threading
import time

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, add_AuditServicer_to_server

from rpcwheel import Kit

CONNECTIONS, WORK, THREADS = 4, 0.05, 32
CAPACITY = CONNECTIONS / WORK


class Audit(AuditServicer):
    """Needs one of a few connections for a while, such as those of a database."""

    def __init__(self) -> None:
        self._connections = threading.Semaphore(CONNECTIONS)

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: D102, N802
        with self._connections:
            time.sleep(WORK)
        return Receipt(number=1)


def serve(kit: Kit) -> None:
    """Print the port, and serve until the standard input ends."""
    server = grpc.server(kit.server_executor(THREADS), interceptors=kit.server_interceptors())
    add_AuditServicer_to_server(Audit(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    serve(Kit(limit="adaptive") if sys.argv[1:] == ["adaptive"] else Kit())
