"""One deadline for a whole chain of calls; run it: python examples/deadlines.py.

A calls B with a timeout of one second. B works for a while and calls C without a timeout. The call
to C gets the rest of the second.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server

from rpcwheel import Kit, current_deadline

KIT = Kit()  # propagates deadlines by default
TIMEOUT, WORK = 10.0, 0.3


class B(AuditServicer):
    """Works, then calls C."""

    def __init__(self, c: AuditStub) -> None:
        self._c = c

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: D102, N802
        deadline = current_deadline()
        print(f"B has {deadline.remaining():.2f} s" if deadline else "B has no deadline")
        time.sleep(WORK)
        return self._c.Push(request)


class C(AuditServicer):
    """Returns the time until its deadline, in milliseconds."""

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: D102, N802
        print(f"C has {context.time_remaining():.2f} s")
        return Receipt(number=round(context.time_remaining() * 1000))


@contextmanager
def serving(servicer: AuditServicer) -> Iterator[AuditStub]:
    """Start a server; yield a stub for it."""
    server = grpc.server(ThreadPoolExecutor(1), interceptors=KIT.server_interceptors())
    add_AuditServicer_to_server(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with KIT.intercept_channel(grpc.insecure_channel(target)) as channel:
        yield AuditStub(channel)
    server.stop(None).wait()


if __name__ == "__main__":
    with serving(C()) as c, serving(B(c)) as b:
        print(f"A gives {TIMEOUT:.2f} s")
        left = b.Push(Line(text="order 1"), timeout=TIMEOUT).number / 1000
    sys.exit(0 if 0 < left < TIMEOUT else 1)
