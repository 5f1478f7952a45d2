"""Failback on your own channel and stubs; run it: python examples/failback_interceptor.py.

While the server is down, calls return a default response at once and are queued. After its restart
they are delivered.
"""

import sys
import time

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditStub
from audit_server import AuditServer

from rpcwheel import FailbackPolicy, Kit, MethodPolicy

QUEUED = Receipt(number=0)
LATER = (2, 3, 4)
FAILBACK = FailbackPolicy(retry_on="UNAVAILABLE", max_attempts=101, backoff=0.25, default=QUEUED)


def main() -> int:
    """Call a server before it is killed, while it is down, and after its restart."""
    kit = Kit(timeout=20.0, methods={"/shop.Audit/Push": MethodPolicy(failback=FAILBACK)})
    with AuditServer() as server, grpc.insecure_channel(server.target) as mine, kit:
        audit = AuditStub(grpc.intercept_channel(mine, *kit.client_interceptors()))
        print("up: the server answers", str(audit.Push(Line(text="order 1"))).strip())
        server.kill()
        for number in LATER:
            began = time.perf_counter()
            answer = audit.Push(Line(text=f"order {number}"))
            took = f"{(time.perf_counter() - began) * 1e3:.1f} ms"
            print(f"killed: queued={answer is QUEUED} after {took}; waiting: {kit.pending}")
        for name, entries in kit.entries().items():
            methods = ", ".join(entry.function for entry in entries)
            print(f"the queue {name} has: {methods}")
        server.start()
        print("up again: the queue is delivered, in any order")
        kit.flush(timeout=20.0)
        delivered = sum(stats.redelivered for stats in kit.stats().values())
        print("delivered later:", delivered)
    return 0 if delivered == len(LATER) else 1


if __name__ == "__main__":
    sys.exit(main())
