"""`message_timeout` ends a response stream that stalls; run it: python examples/silent_stream.py.

The server sends three lines, then nothing, and does not end the call. gRPC would wait forever.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from audit_pb2 import Line
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server

from rpcwheel import DeadlinePolicy, Kit

KIT = Kit(timeout=DeadlinePolicy(message_timeout=6.0))  # the stream itself has no deadline


class Silent(AuditServicer):
    """Sends three lines, then waits until its client has canceled the call."""

    left = threading.Event()

    def Follow(self, request: Line, context: grpc.ServicerContext) -> Iterator[Line]:  # noqa: D102, N802
        context.add_callback(self.left.set)
        for number in range(1, 4):
            yield Line(text=f"{request.text} {number}")
        self.left.wait()


def main() -> int:
    """Read the stream until it ends."""
    server = grpc.server(ThreadPoolExecutor(1))
    add_AuditServicer_to_server(Silent(), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with KIT.intercept_channel(grpc.insecure_channel(target)) as channel:
        lines = AuditStub(channel).Follow(Line(text="order"))
        try:
            for line in lines:
                print("received:", line.text)
        except grpc.RpcError:
            print(f"cut: {lines.code().name}, {lines.details()}")
        ended = Silent.left.wait(30.0)
        print("the server has ended the call:", ended)
    server.stop(None).wait()
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
