"""A circuit breaker before a server whose database fails; run it: python examples/breaker.py.

While the database is down, each call takes its caller 0.3 s. When half of the last ten calls have
failed, the breaker opens: calls fail at once, and the server gets one now and then, until one
succeeds.
"""

import logging
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server

from rpcwheel import BreakerPolicy, Kit

KIT = Kit(
    breaker=BreakerPolicy(
        window_calls=10,
        minimum_calls=5,
        half_open_calls=3,
        open_duration=0.4,
        max_open_duration=0.8,
    )
)


class Audit(AuditServicer):
    """Answers if its database works; fails while that is down."""

    calls = 0

    def __init__(self) -> None:
        self.database = threading.Event()

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: D102, N802
        self.calls += 1
        if not self.database.wait(0.3):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the database does not answer")
        return Receipt(number=self.calls)


def call(audit: AuditStub, calls: int) -> Counter[str]:
    """Make calls one after the other, and count what became of them."""
    ends: Counter[str] = Counter()
    for _ in range(calls):
        try:
            audit.Push(Line(text="order"))
            ends["answered"] += 1
        except grpc.RpcError as error:
            refused = error.details().startswith("not sent: ")  # type: ignore[attr-defined]
            ends["not sent" if refused else "failed"] += 1
        time.sleep(0.02)
    return ends


def main() -> int:
    """Call the server while its database works, is down, and works again."""
    logging.basicConfig(level="INFO", format="    log: %(message)s", stream=sys.stdout)
    servicer, server = Audit(), grpc.server(ThreadPoolExecutor(4))
    add_AuditServicer_to_server(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    ends: Counter[str] = Counter()
    with KIT.channel(target) as channel, KIT:
        for works, calls in ((True, 20), (False, 60), (True, 60)):
            (servicer.database.set if works else servicer.database.clear)()
            print("the database", "works" if works else "is down")
            ends = call(AuditStub(channel), calls)
            print("    calls:", dict(ends))
    server.stop(None).wait()
    return 0 if ends["answered"] else 1


if __name__ == "__main__":
    sys.exit(main())
