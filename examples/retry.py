"""Retries within one deadline; run it: python examples/retry.py.

A server fails twice and then succeeds, so the first call succeeds. Then the server always fails:
the second call ends with the error of its last attempt, as soon as a further attempt can't begin
before the deadline. Only methods that are marked idempotent are retried: here `Push`.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server
from tenacity import wait_fixed

from rpcwheel import Kit, MethodPolicy, RetryPolicy

TIMEOUT = 1.75
KIT = Kit(
    # Each wait is 0.5 s. With `backoff=0.5` it would be random, from 0.25 to 0.5 s.
    retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=10, backoff=wait_fixed(0.5)),
    methods={"/*/Push": MethodPolicy(idempotent=True)},  # otherwise a call is made once
)


class Failing(AuditServicer):
    """Fails a given number of times."""

    failures = 2

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: D102, N802
        before = dict(context.invocation_metadata()).get("x-retry-attempt", "none")
        left = context.time_remaining()
        print(f"    server: {request.text}; attempts before: {before}; {left:.2f} s left")
        if self.failures:
            self.failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return Receipt(number=1)


def main() -> int:
    """Make a call that succeeds in its third attempt, and one that fails."""
    servicer, server = Failing(), grpc.server(ThreadPoolExecutor(1))
    add_AuditServicer_to_server(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with KIT.intercept_channel(grpc.insecure_channel(target)) as channel:
        audit = AuditStub(channel)
        print("answered:", str(audit.Push(Line(text="order 1"), timeout=60.0)).strip())
        servicer.failures, began = 1000, time.monotonic()
        try:
            audit.Push(Line(text="order 2"), timeout=TIMEOUT)
        except grpc.RpcError as error:
            print("failed:", error.details())  # type: ignore[attr-defined]  # grpc has no types
    print(f"after {time.monotonic() - began:.2f} s, of {TIMEOUT}")
    server.stop(None).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
